//! What can be said against a device before it is opened: options that are wrong, a machine that has none, a model that it cannot compute with.

use super::cuda;
use super::device::without_card;
use super::listener::Listener;
use super::options::{DeviceKind, DeviceOptions};
use crate::device::Tiles;
use crate::engine::session::{CHUNK, CHUNKS};
use crate::engine::split::parts::MAX_PARTS;
use crate::error::{Error, Result};
use crate::model::Model;

impl DeviceOptions {
    /// Whether this machine has the device; it is not opened, and no model is needed: this comes before anything is packed for it. `told` gets
    /// the reason where `Auto` finds none.
    ///
    /// # Errors
    /// [`Error::Usage`] for options that are wrong for every model, and for a device that was named and cannot be used.
    pub(super) fn is_there(&self, told: &dyn Listener) -> Result<bool> {
        self.check_asked()?;
        match self.kind {
            DeviceKind::Virtual => Ok(true),
            DeviceKind::Cuda => cuda::look().map(|()| true).map_err(cuda::error),
            DeviceKind::Auto => Ok(match cuda::look() {
                Ok(()) => true,
                Err(why) => {
                    told.note(&without_card(why));
                    false
                }
            }),
        }
    }

    /// Whether it says how much memory it may take.
    pub(super) fn has_budget(&self) -> bool {
        self.vram.is_some() || self.vram_share.is_some() || self.ffn_share.is_some()
    }

    /// Refuses options that are wrong on every machine.
    pub(super) fn check(&self, model: &Model) -> Result<()> {
        let layers = model.config.layers().len();
        self.check_asked()?;
        check_device_can(model, "leave out the device")?;
        if let Some(ahead) = self.lookahead.filter(|ahead| !(1..layers).contains(ahead)) {
            return Err(Error::Usage(format!("--lookahead {ahead}: take 1 to {}", layers - 1)));
        }
        Ok(())
    }

    /// Refuses options that are wrong for every model, too.
    fn check_asked(&self) -> Result<()> {
        if self.kind == DeviceKind::Virtual && self.graphs {
            return Err(Error::Usage(
                "--graphs on is about an NVIDIA card; take --device cuda, or leave it out".into(),
            ));
        }
        if self.kind == DeviceKind::Virtual && self.tiles == Some(Tiles::TensorCores) {
            return Err(Error::Usage(
                "--tensor-cores on is about an NVIDIA card; take --device cuda, or leave it out".into(),
            ));
        }
        if let Some(chunk) = self.chunk.filter(|chunk| !CHUNKS.contains(chunk)) {
            return Err(Error::Usage(format!("--prompt-chunk {chunk}: take one of {CHUNKS:?}")));
        }
        if let Some(parts) = self.parts.filter(|parts| !(1..=MAX_PARTS).contains(parts)) {
            return Err(Error::Usage(format!("--prompt-parts {parts}: take 1 to {MAX_PARTS}")));
        }
        if let Some(chunk) = self.chunk.filter(|&chunk| chunk > CHUNK && self.deterministic && self.live) {
            return Err(Error::Usage(format!(
                "--prompt-chunk {chunk} and --deterministic: answers that do not depend on other clients have prompts in chunks of {CHUNK}, \
                 so that none waits long for another; leave out one of the two"
            )));
        }
        if let Some(share) = self.ffn_share.filter(|s| !(*s > 0.0 && *s <= 1.0)) {
            return Err(Error::Usage(format!("--ffn-share {share}: give a share above 0 and at most 1")));
        }
        if let Some(share) = self.vram_share.filter(|s| !(0.0..=1.0).contains(s) || self.vram.is_some()) {
            return Err(Error::Usage(format!("vram_share {share}: take a share of 0 to 1, and no vram beside it")));
        }
        if self.kind == DeviceKind::Virtual && !self.has_budget() {
            return Err(Error::Usage("--device virtual needs a budget: --vram 8GiB, or --ffn-share 0.5".into()));
        }
        Ok(())
    }
}

/// Refuses a model that a device cannot compute with; of a mixture `instead` says what to do.
///
/// # Errors
/// [`Error::Usage`].
pub fn check_device_can(model: &Model, instead: &str) -> Result<()> {
    let Some(why) = model.not_on_device() else { return Ok(()) };
    let c = &model.config;
    let remedy = if c.is_mixture() || c.only_in_place().is_some() {
        instead
    } else if c.movable_layers() < c.layers().len() {
        "leave out --device and --vram"
    } else {
        "give --quant q8_0 (or pack it so) to use a device"
    };
    let types = model.types();
    Err(Error::Usage(format!("a device cannot compute with this model, whose weights are {types}: {why}; {remedy}")))
}
