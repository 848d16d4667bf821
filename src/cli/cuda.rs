//! From this machine's card to a device, and what is said about it.

use super::human_bytes;
use crate::config;
use crate::device::MoveRate;
use crate::device::cuda::{Card, CudaDevice, Delivery, Options, PATIENCE, SHOWN, Unusable};
use crate::error::{Error, Result};
use crate::lab::measure::{self, CardRates};

/// The exit status that a reason deserves.
pub fn error(why: Unusable) -> Error {
    let text = why.to_string();
    match why {
        Unusable::Full { .. } => Error::Memory(text),
        Unusable::Refused { refusal } if refusal.code == 2 => Error::Memory(text),
        Unusable::Refused { .. } => Error::Failed(text),
        _ => Error::Usage(text),
    }
}

/// The budget when nobody names one: what is free, less a sixteenth for what else uses the card, less what does not show in a plan:
/// modules and scratch of the kernels, and the part of its last chunk that each layer leaves empty.
pub fn most(card: &Card, layers: usize) -> u64 {
    const CHUNK: u64 = 2 << 20;
    const KERNELS: u64 = 64 << 20;
    (card.free / 16 * 15).saturating_sub(KERNELS + layers as u64 * CHUNK)
}

/// Where kernels are kept, and where else NVRTC may be.
pub fn delivery() -> Delivery {
    // What a toolkit installs without telling the loader; other places by LD_LIBRARY_PATH, or by name.
    let toolkits = ["/usr/local/cuda/lib64/libnvrtc.so", "/opt/cuda/lib64/libnvrtc.so"];
    let named = config::variable("DYNAMICINFER_NVRTC");
    Delivery {
        cache: config::cache_dir().map(|dir| dir.join("kernels")),
        nvrtc: named.iter().map(String::as_str).chain(toolkits).map(Into::into).collect(),
    }
}

/// Whether there is a card. One that is there and cannot be used is an error: nobody who has one wants to get another device's figures.
pub fn is_there() -> Result<bool> {
    match Card::open() {
        Ok(_) => Ok(true),
        Err(Unusable::NoDriver | Unusable::NoCard) => Ok(false),
        Err(why) => Err(error(why)),
    }
}

/// What this machine's card does, measured; `None` without one that can be used, and why.
pub fn rates() -> Result<CardRates, String> {
    let measured = || -> Result<CardRates> {
        let card = Card::open().map_err(error)?;
        let budget = card.free / 2;
        let options = Options { budget, delivery: delivery(), pinnable: u64::MAX, patience: PATIENCE, graphs: false };
        let mut device = CudaDevice::new(card, &options).map_err(error)?;
        // A card that is nearly full is measured with less.
        let bytes = (budget / 2) as usize / 4096 * 4096;
        measure::card(&mut device, (bytes < measure::COPY_BYTES).then_some(bytes))
    };
    measured().map_err(|error| error.to_string())
}

/// The ways that neuron blocks can take, a line each, with what a few and many blocks take.
pub fn ways(rates: &[MoveRate]) -> String {
    const BLOCK: u64 = 24 << 10;
    let line = |rate: &MoveRate| {
        let us = |blocks: u64| rate.us(blocks as usize, blocks * BLOCK);
        format!(
            "moves, {:7}: {:.1} us a group, {:.2} a block, {:.2} GB/s; 1, 16, 256 blocks of 24 KiB in {:.0}, {:.0}, {:.0} us\n",
            rate.method.name(),
            rate.group_us,
            rate.piece_us,
            rate.gb_s,
            us(1),
            us(16),
            us(256)
        )
    };
    rates.iter().map(line).collect()
}

/// Of so much free host memory, what may be pinned: a tenth is left to the rest of the system, for pinned pages cannot be swapped.
pub const fn pinnable(free: u64) -> u64 {
    free / 10 * 9
}

/// A device on the card, with or without graphs, and a line on stderr that says what it is.
pub fn device(card: Card, budget: u64, graphs: bool) -> Result<CudaDevice> {
    let pinnable = config::available_memory().map_or(u64::MAX, pinnable);
    let options = Options { budget, delivery: delivery(), pinnable, patience: PATIENCE, graphs };
    let device = CudaDevice::new(card, &options).map_err(error)?;
    let card = device.card();
    eprintln!(
        "{}: {} of {} free, budget {}; kernels {}",
        card.name,
        human_bytes(card.free),
        human_bytes(card.total),
        human_bytes(budget),
        device.kernels()
    );
    Ok(device)
}

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
    let options = Options { budget: 0, delivery: delivery(), pinnable: 0, patience: PATIENCE, graphs: false };
    match CudaDevice::new(card, &options) {
        Ok(device) => {
            let compiler = compiler(options.delivery.nvrtc_version());
            ("ok", format!("{said}; kernels {}{compiler}", device.kernels()))
        }
        Err(why) => ("problem", format!("{said}; {why}")),
    }
}
