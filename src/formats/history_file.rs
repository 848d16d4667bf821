//! How often each neuron of a model was active in past runs. In the form of [`super::sections`]; `frequency.L` holds `[ffn]` f32 for
//! layer L, in the published model's numbering.

use super::sections::{self, Content, Section, SectionFile, Writer};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The header of a history: the model that it belongs to, and that model's shape.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// Fingerprint of the model that it belongs to (`neuron_store::Header::fingerprint`).
    pub fingerprint: String,
    /// Name of that model, for messages.
    pub model: String,
    /// Layers of the model.
    pub layers: usize,
    /// Numbers of the model's residual per token.
    pub hidden: usize,
    /// Neurons per layer.
    pub ffn: usize,
    /// Tokens in which they were counted; 0 in files made before this was written.
    #[serde(default)]
    pub tokens: u64,
    /// One section per layer; filled in by [`write()`].
    pub sections: Vec<Section>,
}

impl sections::Header for Header {
    const MAGIC: [u8; 8] = *b"HISTORY\0";
    const VERSION: u32 = 1;
    const NOUN: &'static str = "history";
    const REMEDY: &'static str = "delete it; it is written anew";

    fn sections(&self) -> &[Section] {
        &self.sections
    }

    fn set_sections(&mut self, sections: Vec<Section>) {
        self.sections = sections;
    }
}

/// An open history.
pub type HistoryFile = SectionFile<Header>;

/// Opens a history and checks every number of it.
///
/// # Errors
/// [`Error::BadFile`] with the field or section that is wrong, [`Error::Io`] if it cannot be opened.
pub fn open(path: &Path) -> Result<HistoryFile> {
    let file = HistoryFile::open(path)?;
    let h = &file.header;
    sections::check_shape(h.layers, h.hidden, h.ffn)
        .map_err(|(field, why)| Error::bad(path, field, format!("{why}; {}", <Header as sections::Header>::REMEDY)))?;
    file.verify(|_| ())?;
    for layer in 0..file.header.layers {
        read(&file, layer)?;
    }
    Ok(file)
}

/// The share of tokens for which each neuron of a layer was active, `[ffn]`, 0 to 1.
///
/// # Errors
/// [`Error::BadFile`] if the section is missing or holds a number that is no share.
pub fn read(file: &HistoryFile, layer: usize) -> Result<Vec<f32>> {
    let name = format!("frequency.{layer}");
    let bad =
        |why: String| Error::bad(file.path(), name.clone(), format!("{why}; {}", <Header as sections::Header>::REMEDY));
    let section = file.section(&name).ok_or_else(|| bad("the section is missing".into()))?;
    if section.content != Content::Numbers || section.bytes != file.header.ffn as u64 * 4 {
        return Err(bad(format!("is {:?} of {} bytes", section.content, section.bytes)));
    }
    let frequencies: Vec<f32> = bytemuck::pod_collect_to_vec(file.bytes(section));
    match frequencies.iter().find(|f| !(0.0..=1.0).contains(*f)) {
        Some(f) => Err(bad(format!("{f} is no frequency"))),
        None => Ok(frequencies),
    }
}

/// Writes a history of `frequencies`, `[layers][ffn]`; `header.sections` is filled in.
///
/// # Errors
/// [`Error::Io`] if the system refuses.
pub fn write(path: &Path, header: Header, frequencies: &[Vec<f32>]) -> Result<()> {
    let mut writer = Writer::create(path)?;
    for (layer, frequencies) in frequencies.iter().enumerate() {
        let bytes: &[u8] = bytemuck::cast_slice(frequencies);
        let section = writer.add(&format!("frequency.{layer}"), Content::Numbers, bytes.len() as u64);
        writer.write(section, 0, bytes)?;
    }
    writer.finish(header)
}
