//! What is said about this machine's NVIDIA card.

use super::human_bytes;
use crate::device::Tiles;
use crate::device::cuda::{Card, CudaDevice, Options, PATIENCE, SHOWN, Unusable};
use crate::open::cuda::delivery;

/// Whether the compiler that is found is one that was shown to know the kernels; nothing without one, which none needs.
fn compiler(found: Option<(u32, u32)>) -> String {
    let name = |(major, minor): (u32, u32)| format!("{major}.{minor}");
    match found {
        None => String::new(),
        Some(version) if SHOWN.contains(&version) => {
            format!("; NVRTC {} is one that was shown to compile every kernel", name(version))
        }
        Some(version) => format!(
            "; NVRTC {} was not tried with these kernels: {} were shown to compile every one (DYNAMICINFER_NVRTC names a file of \
             one of them)",
            name(version),
            SHOWN.map(name).join(", ")
        ),
    }
}

/// What `doctor` says of the card: a verdict and a sentence.
pub fn look() -> (&'static str, String) {
    let card = match Card::open() {
        Ok(card) => card,
        // Most machines have none, and need none.
        Err(why @ (Unusable::NoDriver | Unusable::NoCard)) => {
            return ("note", format!("everything runs on the processor: {why}"));
        }
        Err(why) => return ("problem", why.to_string()),
    };
    let (arch, version) = (card.arch, card.driver_version);
    let mut said = format!(
        "{}, compute capability {}.{}, driver for CUDA {}.{}, {} of {} free",
        card.name,
        arch / 10,
        arch % 10,
        version / 1000,
        version % 1000 / 10,
        human_bytes(card.free),
        human_bytes(card.total)
    );
    if !card.gives_back_in_part() {
        said += "; it cannot give memory back in part, so a changed budget copies whole layers";
    }
    if !card.pins_read_only {
        said += "; it does not pin a mapped model, whose neurons then go through 32 MiB of pinned memory at the price of a copy by \
                 the processor";
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
            ("ok", format!("{said}; kernels {}{compiler}", device.kernels()))
        }
        Err(why) => ("problem", format!("{said}; {why}")),
    }
}
