//! What a model remembered of a text, on disk: keys and values by layer, and states. In the form of [`super::sections`].

use super::sections::{self, Content, Section, SectionFile};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The name ending.
pub const EXTENSION: &str = "prompt";

/// Name of the section of the text's tokens.
pub const TOKENS: &str = "tokens";

/// Positions of a text, at most: more than any model's context.
const MAX_LEN: usize = 1 << 24;
/// Lengths whose states a file has, at most.
const MAX_LENS: usize = 16;

/// What a layer remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Layer {
    /// Keys, and behind them as many values, or what is both: `[heads, positions, head_bytes]` each.
    Positions {
        /// 2 for keys and values, 1 for what is both.
        parts: usize,
        /// Heads of keys.
        heads: usize,
        /// Bytes of the keys, or values, of a head at a position.
        head_bytes: usize,
        /// How many positions back attention sees; `None` sees all.
        window: Option<usize>,
        /// The first position that is there.
        first: usize,
    },
    /// A state of f32 numbers for each of the lengths.
    Recurrent {
        /// Numbers of a state.
        numbers: usize,
    },
    /// Nothing: its keys and values are another layer's.
    Elsewhere,
}

/// The header of a text's file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// Fingerprint of the published model.
    pub fingerprint: String,
    /// Hash of all else that decides what is computed for a token.
    pub variant: String,
    /// Whose text it is, 16 hex digits.
    pub owner: String,
    /// The type of keys and values.
    pub kv: String,
    /// Lengths, ascending, whose states are there; the last is the text's, and the only one where no layer has a state.
    pub lens: Vec<usize>,
    /// What each layer remembered.
    pub layers: Vec<Layer>,
    /// The tokens, and each layer's bytes; filled in when the file is written.
    pub sections: Vec<Section>,
}

impl Header {
    /// Positions of the text.
    pub fn positions(&self) -> usize {
        self.lens.last().copied().unwrap_or(0)
    }

    /// Bytes of a layer's section; `None` for sizes that cannot be.
    pub fn layer_bytes(&self, layer: Layer) -> Option<u64> {
        let product = |of: &[usize]| of.iter().try_fold(1u64, |product, &n| product.checked_mul(n as u64));
        match layer {
            Layer::Positions { parts, heads, head_bytes, first, .. } => {
                product(&[parts, heads, self.positions().checked_sub(first)?, head_bytes])
            }
            Layer::Recurrent { numbers } => product(&[self.lens.len(), numbers, size_of::<f32>()]),
            Layer::Elsewhere => Some(0),
        }
    }
}

impl sections::Header for Header {
    const MAGIC: [u8; 8] = *b"PROMPTS\0";
    const VERSION: u32 = 1;
    const NOUN: &'static str = "file of a saved prompt";
    const REMEDY: &'static str = "remove it: the daemon writes another";

    fn sections(&self) -> &[Section] {
        &self.sections
    }

    fn set_sections(&mut self, sections: Vec<Section>) {
        self.sections = sections;
    }
}

/// An open file of a saved prompt.
pub type PromptFile = SectionFile<Header>;

/// Name of a layer's section.
pub fn layer_name(layer: usize) -> String {
    format!("layer.{layer}")
}

/// Opens a file and checks every number of its header against the lengths of its sections. Their checksums are not compared.
///
/// # Errors
/// [`Error::BadFile`] with the field that is wrong, [`Error::Io`] if it cannot be opened.
pub fn open(path: &Path) -> Result<PromptFile> {
    let file = PromptFile::open(path)?;
    let remedy = <Header as sections::Header>::REMEDY;
    check(&file).map_err(|(field, why)| Error::bad(path, &field, format!("{why}; {remedy}")))?;
    Ok(file)
}

/// The field that is wrong, and how.
fn check(file: &PromptFile) -> Result<(), (String, String)> {
    let h = &file.header;
    let bad = |field: &str, why: &str| Err((field.to_owned(), why.to_owned()));
    let lens = (&h.lens, h.lens.first().copied().unwrap_or(0));
    if lens.1 == 0 || lens.0.len() > MAX_LENS || h.positions() > MAX_LEN || !lens.0.is_sorted_by(|a, b| a < b) {
        return bad("lens", "are not ascending lengths of a text");
    }
    sections::check_bounds(&[("layers", h.layers.len(), 1 << 12)]).map_err(|(field, why)| (field.to_owned(), why))?;
    if h.sections.len() > h.layers.len() + 1 {
        return bad("sections", "are more than the layers need");
    }
    let is_there = |name: &str, content: Content, bytes: u64| {
        file.section(name).is_some_and(|section| section.content == content && section.bytes == bytes)
    };
    if !is_there(TOKENS, Content::Numbers, 4 * h.positions() as u64) {
        return bad(TOKENS, "are not as many as the text has positions");
    }
    for (l, &layer) in h.layers.iter().enumerate() {
        let name = layer_name(l);
        let fits = match (layer, h.layer_bytes(layer)) {
            (Layer::Elsewhere, _) => file.section(&name).is_none(),
            (_, Some(bytes)) => bytes > 0 && is_there(&name, Content::Bytes, bytes),
            (_, None) => false,
        };
        if !fits {
            return bad(&name, "its bytes do not fit its form");
        }
    }
    Ok(())
}
