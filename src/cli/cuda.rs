//! What `doctor` reports about this machine's NVIDIA GPU.

use super::human_bytes;
use crate::device::Tiles;
use crate::device::cuda::{Card, CudaDevice, Options, PATIENCE, SHOWN, Unusable};
use crate::open::cuda::delivery;

/// Whether the compiler found is known to compile the kernels; empty without one, because none is needed.
fn compiler(found: Option<(u32, u32)>) -> String {
    let name = |(major, minor): (u32, u32)| format!("{major}.{minor}");
    match found {
        None => String::new(),
        Some(version) if SHOWN.contains(&version) => {
            format!("; NVRTC {} is known to compile every kernel", name(version))
        }
        Some(version) => format!(
            "; NVRTC {} is not tested with these kernels; {} compile all of them (set DYNAMICINFER_NVRTC to the \
             file of one)",
            name(version),
            SHOWN.map(name).join(", ")
        ),
    }
}

/// The line of `doctor` about the GPU: verdict, conclusion and details.
pub fn look() -> (&'static str, String, Vec<String>) {
    let card = match Card::open() {
        Ok(card) => card,
        // Most machines have none, and need none.
        Err(why @ (Unusable::NoDriver | Unusable::NoCard)) => {
            return ("note", format!("none, everything runs on the processor: {why}"), Vec::new());
        }
        Err(why) => return ("problem", why.to_string(), Vec::new()),
    };
    let (arch, version) = (card.arch, card.driver_version);
    let found = format!("{}, {} of {} free", card.name, human_bytes(card.free), human_bytes(card.total));
    let mut details = vec![format!(
        "compute capability {}.{}, driver for CUDA {}.{}",
        arch / 10,
        arch % 10,
        version / 1000,
        version % 1000 / 10
    )];
    if !card.gives_back_in_part() {
        details.push("it cannot free memory in part, so a changed budget copies whole layers".into());
    }
    if !card.pins_read_only {
        let why = "it cannot pin a mapped model, so the processor copies neurons through 32 MiB of pinned memory";
        details.push(why.into());
    }
    let options = Options {
        budget: 0,
        delivery: delivery(),
        pinnable: 0,
        patience: PATIENCE,
        graphs: false,
        tiles: Tiles::Lanes,
    };
    match CudaDevice::new(card, &options) {
        Ok(device) => {
            let compiler = compiler(options.delivery.nvrtc_version());
            details.push(format!("kernels {}{compiler}", device.kernels()));
            ("ok", found, details)
        }
        Err(why) => ("problem", format!("{found}; {why}"), details),
    }
}
