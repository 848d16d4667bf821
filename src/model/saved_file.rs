//! Saved texts on disk: of one model, computed in one way, and of one owner.

pub use crate::formats::prompt_file::EXTENSION;

use super::kv_type::KvType;
use super::positions::{Form, SavedPositions, first_seen};
use super::saved::{Saved, SavedLayer};
use crate::error::Result;
use crate::formats::prompt_file::{self, Header, Layer, PromptFile, TOKENS};
use crate::formats::sections::{Content, Writer};
use std::path::Path;

/// What decides for which prompts a saved text can stand.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// Fingerprint of the model.
    pub fingerprint: String,
    /// Hash of all else that decides what is computed for a token.
    pub variant: String,
    /// Whose text it is.
    pub owner: u64,
}

/// A file as its header describes it.
pub struct Described {
    /// For which prompts its text can stand.
    pub key: Key,
    /// The text.
    pub tokens: Vec<u32>,
    /// Bytes of the file.
    pub bytes: u64,
    lens: Vec<usize>,
    layers: Vec<Layer>,
}

impl Described {
    fn of(file: &PromptFile) -> Option<Described> {
        let h = &file.header;
        let owner = u64::from_str_radix(&h.owner, 16).ok()?;
        let key = Key { fingerprint: h.fingerprint.clone(), variant: h.variant.clone(), owner };
        let tokens = bytemuck::pod_collect_to_vec(file.bytes(file.section(TOKENS)?));
        Some(Described { key, tokens, bytes: file.file_bytes(), lens: h.lens.clone(), layers: h.layers.clone() })
    }

    /// As [`Saved::reach`].
    pub fn reach(&self, len: usize) -> usize {
        let recurs = self.layers.iter().any(|layer| matches!(layer, Layer::Recurrent { .. }));
        let len = match recurs {
            true => self.lens.iter().rev().copied().find(|&kept| kept <= len).unwrap_or(0),
            false => len.min(self.tokens.len()),
        };
        let reaches = |layer: &Layer| match *layer {
            Layer::Positions { window, first, .. } => first_seen(window, len) >= first,
            _ => true,
        };
        if self.layers.iter().all(reaches) { len } else { 0 }
    }
}

/// Writes a text, which gets its name when it is complete; only this user can read it.
///
/// # Errors
/// [`Error::Io`](crate::Error::Io) if the system refuses.
pub fn write(path: &Path, saved: &Saved, key: &Key, tokens: &[u32]) -> Result<()> {
    assert_eq!(tokens.len(), saved.len());
    let mut writer = Writer::create_private(path)?;
    let section = writer.add(TOKENS, Content::Numbers, size_of_val(tokens) as u64);
    writer.write(section, 0, bytemuck::cast_slice(tokens))?;
    let mut layers = Vec::new();
    for (l, layer) in saved.layers.iter().enumerate() {
        let mut add = |parts: &[&[u8]]| {
            let bytes = parts.iter().map(|part| part.len() as u64).sum();
            let section = writer.add(&prompt_file::layer_name(l), Content::Bytes, bytes);
            parts.iter().try_fold(0, |at, part| writer.write(section, at, part).map(|()| at + part.len() as u64))
        };
        match layer {
            SavedLayer::Positions(positions) => {
                add(&[positions.content()])?;
                let (Form { parts, heads, head_bytes, window, .. }, first) = positions.shape();
                layers.push(Layer::Positions { parts, heads, head_bytes, window, first });
            }
            SavedLayer::Recurrent(states) => {
                let numbers = states.first().map_or(0, Vec::len);
                add(&states.iter().map(|state| bytemuck::cast_slice(state)).collect::<Vec<_>>())?;
                layers.push(Layer::Recurrent { numbers });
            }
            SavedLayer::Elsewhere => layers.push(Layer::Elsewhere),
        }
    }
    let header = Header {
        fingerprint: key.fingerprint.clone(),
        variant: key.variant.clone(),
        owner: format!("{:016x}", key.owner),
        kv: saved.kind.name().to_owned(),
        lens: saved.lens.clone(),
        layers,
        sections: Vec::new(),
    };
    writer.finish(header)
}

/// Reads a file's header and tokens; `None` for a header that says what cannot be.
///
/// # Errors
/// [`Error::BadFile`](crate::Error::BadFile) for what is no such file or damaged, [`Error::Io`](crate::Error::Io) if it cannot be read.
pub fn describe(path: &Path) -> Result<Option<Described>> {
    let file = prompt_file::open(path)?;
    if let Some(tokens) = file.section(TOKENS) {
        file.compare(tokens)?;
    }
    Ok(Described::of(&file))
}

/// Reads a text, and compares all its checksums before; `None` for a header that says what cannot be, and where there is no memory.
///
/// # Errors
/// As [`describe`].
pub fn read(path: &Path) -> Result<Option<(Described, Saved)>> {
    let file = prompt_file::open(path)?;
    file.verify(|_| ())?;
    Ok(read_verified(&file))
}

fn read_verified(file: &PromptFile) -> Option<(Described, Saved)> {
    let described = Described::of(file)?;
    let kind = KvType::ALL.into_iter().find(|kind| kind.name() == file.header.kv)?;
    let layer = |(l, layer): (usize, &Layer)| {
        let bytes = || file.section(&prompt_file::layer_name(l)).map(|section| file.bytes(section));
        match *layer {
            Layer::Positions { parts, heads, head_bytes, window, first } => {
                let form = Form { kind, parts, heads, head_bytes, window };
                SavedPositions::new(form, first, bytes()?).map(SavedLayer::Positions)
            }
            Layer::Recurrent { numbers } => {
                let states = bytes()?.chunks_exact(numbers * size_of::<f32>()).map(bytemuck::pod_collect_to_vec);
                Some(SavedLayer::Recurrent(states.collect()))
            }
            Layer::Elsewhere => Some(SavedLayer::Elsewhere),
        }
    };
    let layers = described.layers.iter().enumerate().map(layer).collect::<Option<Vec<_>>>()?;
    let recurs = layers.iter().any(|layer| matches!(layer, SavedLayer::Recurrent(_)));
    let saved = Saved { kind, lens: described.lens.clone(), recurs, layers };
    Some((described, saved))
}
