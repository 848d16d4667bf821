//! A placement on disk, as JSON: which neurons begin on the device. Written by `dynamicinfer plan -o`.

use super::MappedFile;
use super::temporary;
use crate::error::{Error, Result, excerpt};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The version of the format that is written, and the only one that is read.
pub const VERSION: u32 = 1;
const REMEDY: &str = "make it again with `dynamicinfer plan MODEL --vram SIZE -o FILE`";

/// How the neurons of a layer's slots are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PlacementPolicy {
    /// The neurons with the most impact, as the plan has computed it.
    Static,
    /// As many neurons in each layer, but chosen at random: what the plan is compared with (PowerInfer 8.3.1).
    Random,
    /// None: as many slots, all of them empty.
    None,
}

impl PlacementPolicy {
    /// The policy's name as the file writes it.
    pub const fn name(self) -> &'static str {
        match self {
            PlacementPolicy::Static => "static",
            PlacementPolicy::Random => "random",
            PlacementPolicy::None => "none",
        }
    }
}

/// What the file holds: the slots of every layer on the device, and the neurons that they begin with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlacementFile {
    /// Is [`VERSION`].
    pub version: u32,
    /// Fingerprint of the model that it belongs to (`neuron_store::Header::fingerprint`).
    pub fingerprint: String,
    /// Name of that model, for messages.
    pub model: String,
    /// Neurons per layer.
    pub ffn: usize,
    /// How `neurons` of each layer were chosen.
    pub policy: PlacementPolicy,
    /// Seed of [`PlacementPolicy::Random`]; `None` for the others.
    pub seed: Option<u64>,
    /// One entry per layer of the model, in their order.
    pub layers: Vec<LayerPlacement>,
}

/// One layer's part of a placement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerPlacement {
    /// Neuron blocks that there is room for on the device.
    pub slots: usize,
    /// The neurons that lie there at the beginning, at most `slots`, the most important first; in the published model's numbering.
    pub neurons: Vec<u32>,
}

impl PlacementFile {
    /// Reads the placement at `path` and checks it.
    ///
    /// # Errors
    /// [`Error::BadFile`] with the field that is wrong, [`Error::Io`] if it cannot be opened.
    pub fn read(path: &Path) -> Result<PlacementFile> {
        let file = MappedFile::open(path)?;
        let bad = |field: String, why: String| Error::bad(path, field, format!("{why}; {REMEDY}"));
        let placement: PlacementFile = serde_json::from_slice(file.bytes())
            .map_err(|e| bad(String::new(), format!("not a placement: {}", excerpt(e))))?;
        placement.check().map_err(|(field, why)| bad(field, why))?;
        Ok(placement)
    }

    /// Checks every number. The error is the first field that is wrong, and what is wrong with it.
    pub fn check(&self) -> Result<(), (String, String)> {
        if self.version != VERSION {
            return Err(("version".into(), format!("is {}; this program reads {VERSION}", self.version)));
        }
        // The bounds of `model::Description::check`.
        if self.ffn == 0 || self.ffn > 1 << 20 {
            return Err(("ffn".into(), format!("is {}; it must be 1 to {}", self.ffn, 1 << 20)));
        }
        if self.layers.is_empty() || self.layers.len() > 1 << 12 {
            return Err(("layers".into(), format!("are {}; it must be 1 to {}", self.layers.len(), 1 << 12)));
        }
        for (l, layer) in self.layers.iter().enumerate() {
            let bad = |why: String| Err((format!("layer {l}"), why));
            if layer.slots > self.ffn || layer.neurons.len() > layer.slots {
                let found = layer.neurons.len();
                return bad(format!("{found} neurons in {} slots of a layer of {}", layer.slots, self.ffn));
            }
            let mut neurons = layer.neurons.clone();
            neurons.sort_unstable();
            if let Some(n) = neurons.last().filter(|n| **n as usize >= self.ffn) {
                return bad(format!("there is no neuron {n} among {}", self.ffn));
            }
            if let Some(pair) = neurons.windows(2).find(|pair| pair[0] == pair[1]) {
                return bad(format!("neuron {} is there twice", pair[0]));
            }
        }
        Ok(())
    }

    /// Checks that it was made for the model with this fingerprint and shape. `path` is for the message.
    ///
    /// # Errors
    /// [`Error::BadFile`] if it belongs to another model.
    pub fn check_owner(&self, path: &Path, fingerprint: &str, layers: usize, ffn: usize) -> Result<()> {
        let why = if self.fingerprint != fingerprint {
            let (its, ours) = (excerpt(&self.fingerprint), excerpt(fingerprint));
            format!(
                "is {its}, the model's is {ours}: this placement belongs to another model ({})",
                excerpt(&self.model)
            )
        } else if (self.layers.len(), self.ffn) != (layers, ffn) {
            let (l, n) = (self.layers.len(), self.ffn);
            format!("is the model's, but it places {l} layers of {n} neurons and the model has {layers} of {ffn}")
        } else {
            return Ok(());
        };
        Err(Error::bad(path, "fingerprint", format!("{why}; {REMEDY}")))
    }

    /// Writes it to a temporary file, which then takes the place of what is at `path`.
    ///
    /// # Errors
    /// [`Error::Io`] if the system refuses; what was at `path` is then still there.
    pub fn write(&self, path: &Path) -> Result<()> {
        debug_assert_eq!(self.check(), Ok(()));
        let mut text = serde_json::to_vec(self).expect("a placement is plain data");
        text.push(b'\n');
        temporary::write_whole(path, &text)
    }
}
