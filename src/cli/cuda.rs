//! From this machine's card to a device, and what is said about it.

use super::human_bytes;
use crate::config;
use crate::device::cuda::{Card, CudaDevice, Delivery, Options, PATIENCE, Unusable};
use crate::error::{Error, Result};

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

/// A device on the card, and a line on stderr that says what it is.
pub fn device(card: Card, budget: u64) -> Result<CudaDevice> {
    // A tenth is left to the rest of the system: pinned pages cannot be swapped.
    let pinnable = config::available_memory().map_or(u64::MAX, |bytes| bytes / 10 * 9);
    let options = Options { budget, delivery: delivery(), pinnable, patience: PATIENCE };
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
