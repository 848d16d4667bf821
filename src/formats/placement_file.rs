//! A placement on disk, as JSON: which neurons begin on the device. Written by `dynamicinfer plan -o`.

use super::MappedFile;
use super::temporary;
use crate::error::{Error, Result, excerpt};
use serde::{Deserialize, Serialize};
use std::path::Path;

pub const VERSION: u32 = 1;
const REMEDY: &str = "make it again with `dynamicinfer plan MODEL --vram SIZE -o FILE`";

/// How the neurons of a layer's slots are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// The plan: those with the most impact.
    Static,
    /// As many in each layer, but any: what the plan is compared with (powerinfer 8.3.1).
    Random,
    /// The same slots, and none filled.
    None,
}

impl Policy {
    pub const fn name(self) -> &'static str {
        match self {
            Policy::Static => "static",
            Policy::Random => "random",
            Policy::None => "none",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlacementFile {
    pub version: u32,
    /// Fingerprint of the model that it belongs to (`neuron_store::Header::fingerprint`).
    pub fingerprint: String,
    /// Name of that model, for messages.
    pub model: String,
    /// Neurons per layer.
    pub ffn: usize,
    pub policy: Policy,
    /// Of `random`.
    pub seed: Option<u64>,
    pub layers: Vec<LayerPlacement>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerPlacement {
    /// Neuron blocks that there is room for on the device.
    pub slots: usize,
    /// Those that lie there at the beginning, in the published model's numbering, the most important first; `slots` at
    /// most.
    pub neurons: Vec<u32>,
}

impl PlacementFile {
    /// # Errors
    /// [`Error::BadFile`] with the field that is wrong.
    pub fn read(path: &Path) -> Result<PlacementFile> {
        let file = MappedFile::open(path)?;
        let bad = |field: String, why: String| Error::bad(path, field, format!("{why}; {REMEDY}"));
        let placement: PlacementFile = serde_json::from_slice(file.bytes())
            .map_err(|e| bad(String::new(), format!("not a placement: {}", excerpt(e))))?;
        placement.check().map_err(|(field, why)| bad(field, why))?;
        Ok(placement)
    }

    /// The field that is wrong, and how.
    pub fn check(&self) -> Result<(), (String, String)> {
        if self.version != VERSION {
            return Err(("version".into(), format!("is {}; this program reads {VERSION}", self.version)));
        }
        // The bounds of `model::ModelConfig::check`.
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

    /// That it was made for the model with this fingerprint and shape. `path` is for the message.
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

    /// Puts it at `path` when it is whole, in place of what was there.
    pub fn write(&self, path: &Path) -> Result<()> {
        debug_assert_eq!(self.check(), Ok(()));
        let mut text = serde_json::to_vec(self).expect("a placement is plain data");
        text.push(b'\n');
        temporary::write_whole(path, &text)
    }
}
