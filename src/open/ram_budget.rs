//! The host memory of a model of which a part lies on disk, and how it is changed while a text is generated.

use super::{ram, too_little};
use crate::engine::{Engine, Split};
use crate::error::{Error, Result, human_bytes};

/// Changes the host memory that a model may take to `ram` bytes, counted as `--ram` counts them, between two passes. What is over a smaller
/// budget has been given back when this returns; a larger one fills as neurons are needed.
///
/// # Errors
/// [`Error::Usage`] where the whole model is in memory; [`Error::Memory`] for a budget below the least that it works with, and where the
/// system does not give so much. The budget is what it was then.
pub fn set_ram(engine: &mut Engine, ram: u64) -> Result<()> {
    let before_for_chunks = ram::for_chunks(&engine.model, engine.chunk());
    let planned = engine.split.as_ref().map(Split::chunk);
    if let Some(split) = &mut engine.split {
        // Nothing is copied from frames that go away.
        split.cache.settle(&mut *split.device);
    }
    let Some(cached) = &mut engine.cached else {
        return Err(Error::Usage(
            "the whole model is in memory: there is no budget that could change; begin with --ram".into(),
        ));
    };
    let beside = cached.beside.saturating_sub(before_for_chunks);
    let (before, least) = (cached.memory().budget, beside + cached.cache.least_bytes());
    if ram < least {
        return Err(too_little(&format!("--ram {} is", human_bytes(ram)), least));
    }
    let (chunk, for_chunks) = ram::chunk(&engine.model, planned, ram - least);
    let frames_before = cached.cache.frames().0;
    let refused = |e| Error::Memory(format!("there is no memory for --ram {}: {e}", human_bytes(ram)));
    cached.cache.set_budget(ram - beside - for_chunks).map_err(refused)?;
    cached.beside = beside + for_chunks;
    let frames_after = cached.cache.frames().0;
    engine.set_chunk(chunk);
    tracing::debug!(bytes_before = before, bytes_after = ram, frames_before, frames_after, "budget of host memory");
    Ok(())
}
