//! The neuron store: a model as the engine reads it. `docs/neuron_store.md` draws the bytes.
//!
//! The file has the form of [`super::sections`]. All weights are rows in the form of
//! [`super::rows`]; an FFN is one section per layer whose rows are gate, up and down of neuron 0, then of neuron 1, and
//! so on: a neuron block is one contiguous run.

use super::block_checksums::name_of;
use super::rows::Quant;
use super::sections::{self, SectionFile};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

pub use super::sections::{Content, Section, Writer, parse};

/// The first eight bytes of a store.
pub const MAGIC: [u8; 8] = *b"NEURONS\0";
/// The version of the format that is written, and the only one that is read.
const VERSION: u32 = 1;
/// The usual name ending of a store.
pub const EXTENSION: &str = "neurons";

/// The header of a store: what it was made from, the model's shape, and where each matrix lies.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// Hash of the published model's content, 32 hex digits. Profiles, predictors and placements name their model by it.
    pub fingerprint: String,
    /// The files it was made from, as they were then: if they have changed, the model is packed again.
    pub sources: Vec<SourceFile>,
    /// Type of attention and FFN weights; embeddings and head are at least q8_0.
    pub quant: Quant,
    /// The model's shape: a `model::Description` as JSON.
    #[serde(deserialize_with = "sections::few_values")]
    pub config: serde_json::Value,
    /// All sections, in the order in which they lie in the file.
    pub sections: Vec<Section>,
}

/// A file of the published model, as it was when the store was made from it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceFile {
    /// File name without its directory.
    pub name: String,
    /// Length of the file.
    pub bytes: u64,
    /// When it was last written to: seconds and nanoseconds since the Unix epoch.
    pub modified: (i64, i64),
}

impl SourceFile {
    /// Describes the file at `path` as it is now.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be looked at.
    pub fn of(path: &Path) -> Result<SourceFile> {
        use std::os::unix::fs::MetadataExt;
        let meta = std::fs::metadata(path).map_err(Error::io("stat", path))?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(SourceFile { name, bytes: meta.len(), modified: (meta.mtime(), meta.mtime_nsec()) })
    }
}

/// An open store.
pub type NeuronStore = SectionFile<Header>;

impl NeuronStore {
    /// Whether each block of each FFN has a checksum.
    pub fn has_block_checksums(&self) -> bool {
        let mut ffns = self.header.sections.iter().filter(|section| section.name.ends_with(".ffn"));
        ffns.all(|ffn| self.section(&name_of(&ffn.name)).is_some())
    }

    /// The checksums of the `count` parts of blocks in section `name`, block by block ([`super::block_checksums`]); `None` in a store that was
    /// packed before there were any.
    ///
    /// # Errors
    /// [`Error::BadFile`] if they are damaged, or are not as many.
    pub fn block_checksums(&self, name: &str, count: usize) -> Result<Option<Vec<u32>>> {
        let Some(section) = self.section(&name_of(name)) else { return Ok(None) };
        if (section.content, section.bytes) != (Content::Numbers, (count * size_of::<u32>()) as u64) {
            let why = format!("is not {count} checksums; {}", <Header as sections::Header>::REMEDY);
            return Err(Error::bad_at(self.path(), &section.name, section.offset, why));
        }
        self.compare(section)?;
        Ok(Some(bytemuck::cast_slice(self.bytes(section)).to_vec()))
    }
}

impl sections::Header for Header {
    const MAGIC: [u8; 8] = MAGIC;
    const VERSION: u32 = VERSION;
    const NOUN: &'static str = "neuron store";
    const REMEDY: &'static str = "pack the model again";

    fn sections(&self) -> &[Section] {
        &self.sections
    }

    fn set_sections(&mut self, sections: Vec<Section>) {
        self.sections = sections;
    }
}
