//! Opens this machine's NVIDIA card as a device.

use super::listener::Listener;
use super::vram_budget::pinnable;
use crate::config;
use crate::device::Tiles;
pub use crate::device::cuda::{Card, Unusable};
use crate::device::cuda::{CudaDevice, Delivery, Options, PATIENCE};
use crate::error::{Error, Result, human_bytes};
use crate::machine::measure::CardRates;
use crate::machine::measure_card;

/// The error, and with it the exit status, for a card that cannot be used.
pub fn error(why: Unusable) -> Error {
    let text = why.to_string();
    match why {
        Unusable::Full { .. } => Error::Memory(text),
        Unusable::Refused { refusal } if refusal.code == 2 => Error::Memory(text),
        Unusable::Refused { .. } => Error::Failed(text),
        _ => Error::Usage(text),
    }
}

/// Default budget for a model of `layers` layers, bytes: the free memory, less a sixteenth for other users of the card, less what a plan
/// does not count: modules and scratch of the kernels, and the unused part of each layer's last chunk.
pub fn most(card: &Card, layers: usize) -> u64 {
    const CHUNK: u64 = 2 << 20;
    const KERNELS: u64 = 64 << 20;
    (card.free / 16 * 15).saturating_sub(KERNELS + layers as u64 * CHUNK)
}

/// Where compiled kernels are kept, and further places to look for NVRTC.
pub fn delivery() -> Delivery {
    // Where toolkits put it without registering it with the loader; other places can be given by LD_LIBRARY_PATH or DYNAMICINFER_NVRTC.
    let toolkits = ["/usr/local/cuda/lib64/libnvrtc.so", "/opt/cuda/lib64/libnvrtc.so"];
    let named = config::variable("DYNAMICINFER_NVRTC");
    let files = || named.iter().map(String::as_str).chain(toolkits).map(Into::into).collect();
    Delivery {
        cache: config::cache_dir().map(|dir| dir.join("kernels")),
        nvrtc: (named.as_deref() != Some("none")).then(files),
    }
}

/// Whether there is a card.
///
/// # Errors
/// As [`error`], for a card that cannot be used: the owner of a card does not want another device's results without notice.
pub fn is_there() -> Result<bool> {
    match Card::open() {
        Ok(_) => Ok(true),
        Err(Unusable::NoDriver | Unusable::NoCard) => Ok(false),
        Err(why) => Err(error(why)),
    }
}

/// Checks whether there is a card that can be used, without taking memory of it.
///
/// # Errors
/// The reason why there is none.
pub fn look() -> Result<(), Unusable> {
    Card::look()
}

/// Measures this machine's card.
///
/// # Errors
/// The reason in words, without a card that can be used.
pub fn rates() -> Result<CardRates, String> {
    let measured = || -> Result<CardRates> {
        let card = Card::open().map_err(error)?;
        let budget = card.free / 2;
        let options = Options {
            budget,
            delivery: delivery(),
            pinnable: u64::MAX,
            patience: PATIENCE,
            graphs: false,
            tiles: Tiles::Lanes,
        };
        let mut device = CudaDevice::new(card, &options).map_err(error)?;
        // Products by what multiplies fastest: where that is too high for a type, the processor has less to do than it could have.
        device.try_tensor_cores();
        if device.tiles() == Tiles::Exact {
            device.use_tiles(Tiles::TensorCores);
        }
        // A card with little free memory is measured with smaller copies.
        let bytes = (budget / 2) as usize / 4096 * 4096;
        measure_card::card(&mut device, (bytes < measure_card::COPY_BYTES).then_some(bytes))
    };
    measured().map_err(|error| error.to_string())
}

/// Opens a device on the card that may use `budget` bytes, with or without CUDA graphs, which multiplies prompts by these tiles, or by what
/// turns out to be faster; where `rounds`, that may round the inputs of f16 matrices to f16. `told` gets a sentence about it.
///
/// # Errors
/// As [`error`].
pub fn device(
    card: Card,
    budget: u64,
    (graphs, tiles, rounds): (bool, Option<Tiles>, bool),
    told: &dyn Listener,
) -> Result<CudaDevice> {
    let pinnable = config::available_memory().map_or(u64::MAX, pinnable);
    let options = Options {
        budget,
        delivery: delivery(),
        pinnable,
        patience: PATIENCE,
        graphs,
        tiles: tiles.unwrap_or_default(),
    };
    if options.delivery.compiles(card.arch, card.driver_version) {
        told.note(&format!(
            "compiling the kernels for {}, which takes a quarter of a minute on the first start",
            card.name
        ));
    }
    let mut device = CudaDevice::new(card, &options).map_err(error)?;
    if tiles.is_none() {
        device.try_tensor_cores();
        // Where every start must give the same bits, nothing is rounded.
        if rounds && device.tiles() == Tiles::Exact {
            device.use_tiles(Tiles::TensorCores);
        }
    }
    let card = device.card();
    told.note(&format!(
        "{}: {} of {} free, budget {}; kernels {}{}",
        card.name,
        human_bytes(card.free),
        human_bytes(card.total),
        human_bytes(budget),
        device.kernels(),
        match device.tiles() {
            Tiles::Lanes => "",
            Tiles::Exact => "; tensor cores for prompts of q8_0 and q4_0",
            Tiles::TensorCores => "; tensor cores for prompts",
        }
    ));
    Ok(device)
}
