//! Notes and progress while an engine is opened.

use crate::error::Result;
use std::path::Path;

/// Gets notes and progress while an engine is opened. By default notes are logged.
pub trait Listener {
    /// Gets a sentence for people, about a choice that was made for them, or about something that looks wrong.
    fn note(&self, text: &str) {
        tracing::info!("{text}");
    }

    /// Whether a model may be packed now; asked before the first byte is written.
    ///
    /// # Errors
    /// [`crate::Error::Usage`] where the answer is no.
    fn may_pack(&self, _packing: &Packing<'_>) -> Result<()> {
        Ok(())
    }

    /// Runs `work`, which packs a model; `what` describes it. `work` is given a callback for bytes done and all bytes, which it calls from
    /// several threads; an error from the callback ends it.
    fn packing(&self, _what: &str, work: &mut dyn FnMut(PackProgress<'_>) -> Result<()>) -> Result<()> {
        work(&|_, _| Ok(()))
    }
}

/// What packing a model would write.
pub struct Packing<'a> {
    /// The model and its types, as `packing NAME as q8_0`.
    pub what: &'a str,
    /// The file that would be written.
    pub store: &'a Path,
    /// Its bytes.
    pub bytes: u64,
}

/// Callback for progress: bytes done and all bytes.
pub type PackProgress<'a> = &'a (dyn Fn(u64, u64) -> Result<()> + Sync);

/// A listener that only logs.
pub struct Quiet;

impl Listener for Quiet {}
