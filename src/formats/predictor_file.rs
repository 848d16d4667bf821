//! A model's predictors on disk: for each layer and look-ahead a table that turns scores into probabilities and, for kinds
//! that have them, weights. In the form of [`super::sections`].

use super::sections::{self, Section, SectionFile};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The usual name ending.
pub const EXTENSION: &str = "predictor";

/// Most points of a table.
pub const MAX_POINTS: usize = 256;

/// The header of a predictor file: the model that it belongs to, and a table for each predictor.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// Fingerprint of the model that it belongs to (`neuron_store::Header::fingerprint`).
    pub fingerprint: String,
    /// Name of that model, for messages.
    pub model: String,
    /// `sign` or `mlp`.
    pub kind: String,
    /// Layers of the model.
    pub layers: usize,
    /// Numbers of the model's residual per token: what a predictor reads.
    pub hidden: usize,
    /// Neurons per layer; of a mixture, of an expert.
    pub ffn: usize,
    /// Experts per layer, whose neurons stand one expert after the other; 1 without experts.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub experts: usize,
    /// A neuron is computed from this probability on, unless its table or the user says otherwise.
    pub threshold: f32,
    /// `[layers]`: the magnitude |act(gate)| above which a neuron of the layer counts as active; zeros for ReLU models.
    #[serde(rename = "cuts")]
    pub activation_thresholds: Vec<f32>,
    /// One table per layer and look-ahead, each at most once.
    pub tables: Vec<Table>,
    /// How it was made (texts, tokens, seconds): for people, not read by the program.
    #[serde(deserialize_with = "sections::few_values")]
    pub made: serde_json::Value,
    /// The weights of the kinds that have some; filled in when the file is written.
    pub sections: Vec<Section>,
}

/// The predictor of one layer from the residual `ahead` layers before it, with its quality on text that it was not made from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// The layer whose neurons are predicted.
    pub layer: usize,
    /// How many layers before it the residual is taken; 0 for the layer's own.
    pub ahead: usize,
    /// Size of the network's hidden layer; 0 for kinds without weights, and for networks that consist of a bias only.
    pub rank: usize,
    /// Rising scores, 1 to [`MAX_POINTS`] of them.
    pub scores: Vec<f32>,
    /// Rising probabilities that a neuron is active, one for each of `scores`.
    pub probabilities: Vec<f32>,
    /// A neuron of this layer is computed from this probability on; `None` for the header's threshold. Layers differ: one whose neurons
    /// rarely fire has small probabilities, and its few active neurons may matter most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub threshold: Option<f32>,
    /// Neurons predicted at the threshold and active / active, 0 to 1.
    pub recall: f32,
    /// Neurons predicted at the threshold and active / predicted, 0 to 1.
    pub precision: f32,
    /// Neurons predicted at the threshold / all, 0 to 1.
    pub computed_share: f32,
}

/// An open predictor file.
pub type PredictorFile = SectionFile<Header>;

fn one() -> usize {
    1
}

fn is_one(experts: &usize) -> bool {
    *experts == 1
}

impl Header {
    /// Neurons of a layer, of all its experts.
    pub fn neurons(&self) -> usize {
        self.ffn * self.experts
    }

    /// What a layer consists of: its experts, or its neurons where it has none.
    pub fn clusters(&self) -> usize {
        if self.experts > 1 { self.experts } else { self.ffn }
    }
}

impl sections::Header for Header {
    const MAGIC: [u8; 8] = *b"PREDICT\0";
    const VERSION: u32 = 1;
    const NOUN: &'static str = "predictor file";
    const REMEDY: &'static str =
        "make it again: `dynamicinfer train-predictor MODEL` for the kind mlp, `dynamicinfer calibrate MODEL` for sign";

    fn sections(&self) -> &[Section] {
        &self.sections
    }

    fn set_sections(&mut self, sections: Vec<Section>) {
        self.sections = sections;
    }
}

/// Opens a predictor file and checks every number of its header.
///
/// # Errors
/// [`Error::BadFile`] with the field that is wrong, [`Error::Io`] if it cannot be opened.
pub fn open(path: &Path) -> Result<PredictorFile> {
    let file = PredictorFile::open(path)?;
    check(&file.header)
        .map_err(|(field, why)| Error::bad(path, field, format!("{why}; {}", <Header as sections::Header>::REMEDY)))?;
    Ok(file)
}

/// The field that is wrong, and how.
fn check(h: &Header) -> Result<(), (String, String)> {
    let bad = |field: &str, why: String| Err((field.to_owned(), why));
    let share = |x: f32| (0.0..=1.0).contains(&x);
    sections::check_shape(h.layers, h.hidden, h.ffn)?;
    sections::check_bounds(&[("experts", h.experts, 1 << 16)]).map_err(|(field, why)| (field.to_owned(), why))?;
    if !share(h.threshold) {
        return bad("threshold", format!("is {}, not a probability", h.threshold));
    }
    if h.activation_thresholds.len() != h.layers || h.activation_thresholds.iter().any(|c| !c.is_finite() || *c < 0.0) {
        return bad("cuts", "are not one magnitude per layer".into());
    }
    let mut seen = std::collections::HashSet::new();
    for t in &h.tables {
        let name = format!("layer {} from {} before", t.layer, t.ahead);
        if t.layer >= h.layers || t.ahead > t.layer || !seen.insert((t.layer, t.ahead)) {
            return bad(&name, "there is no such layer, or it is there twice".into());
        }
        let points = t.scores.len();
        if points == 0 || points > MAX_POINTS || points != t.probabilities.len() {
            return bad(&name, format!("{points} scores for {} probabilities", t.probabilities.len()));
        }
        let rising = |v: &[f32]| v.iter().all(|x| x.is_finite()) && v.windows(2).all(|w| w[0] <= w[1]);
        if !rising(&t.scores) || !rising(&t.probabilities) || !t.probabilities.iter().all(|&p| share(p)) {
            return bad(&name, "scores and probabilities are not rising numbers".into());
        }
        if let Some(t) = t.threshold.filter(|t| !share(*t)) {
            return bad(&name, format!("threshold {t} is not a probability"));
        }
        if ![t.recall, t.precision, t.computed_share].into_iter().all(share) {
            return bad(&name, "recall, precision or computed share are not shares".into());
        }
    }
    Ok(())
}
