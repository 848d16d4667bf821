//! An activation trace on disk: for every token and layer which neurons were active, and how likely a predictor thought each,
//! from the layer's own residual and from the one `ahead` layers before. In the form of [`super::sections`].
//!
//! Per layer three sections over all tokens: `active.L`, `[tokens, ffn / 32]` u32 words, bit n % 32 of word n / 32 for neuron
//! n; `own.L`, `[tokens, ffn]` u8, probability times 255; `ahead.L` likewise, for layers that have a layer `ahead` before them.
//! Neurons have the published model's numbers. A predictor that says only yes or no has its probabilities of 1 and 0 as bits, in the form of
//! `active.L` ([`Header::own_bits`], [`Header::ahead_bits`]): a trace of 50,000 tokens of a model with 24 layers of 4864 neurons takes
//! 2.2 GB, and 12 GB with bytes.

use super::sections::{self, Content, Section, SectionFile, Writer};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The usual name ending.
pub const EXTENSION: &str = "trace";

/// Most texts of a trace.
pub const MAX_TEXTS: usize = 4096;

/// The header of a trace: the model that it belongs to, and the texts that were recorded.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// Fingerprint of the model that it belongs to; empty for a synthetic trace.
    pub fingerprint: String,
    /// Name of that model, for people.
    pub model: String,
    /// Layers of the model.
    pub layers: usize,
    /// Neurons per layer, or experts of a mixture.
    pub ffn: usize,
    /// Bytes of a neuron block, for a replay's times.
    pub block_bytes: usize,
    /// Of a mixture, whose experts stand for neurons here: how many of them a token uses. `None` where they are neurons.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts_used: Option<usize>,
    /// `ahead.L` was predicted from the residual so many layers before layer L.
    pub ahead: usize,
    /// The kind of predictor that the probabilities are of, for people.
    pub predictor: String,
    /// Bits of a probability in `own.L`: 8, or 1 where all are 0 or 1.
    #[serde(default = "bytes", skip_serializing_if = "are_bytes")]
    pub own_bits: u8,
    /// Bits of a probability in `ahead.L`.
    #[serde(default = "bytes", skip_serializing_if = "are_bytes")]
    pub ahead_bits: u8,
    /// The model computes a layer's neurons from this probability on, `[layers]`; empty where that is not known.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub thresholds: Vec<f32>,
    /// The texts, in the order in which their tokens lie in the sections.
    pub texts: Vec<TextInfo>,
    /// How it was made: for people, not read by the program.
    #[serde(deserialize_with = "sections::few_values")]
    pub made: serde_json::Value,
    /// The sections of all layers, each layer's in the order of [`TraceSection`]; filled in when the file is written.
    pub sections: Vec<Section>,
}

/// Bits of a probability unless the header says otherwise.
fn bytes() -> u8 {
    8
}

fn are_bytes(bits: &u8) -> bool {
    *bits == bytes()
}

/// A text of a trace.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextInfo {
    /// File name without its directory, for people.
    pub name: String,
    /// Tokens of the text, each text being a sequence of its own.
    pub tokens: usize,
}

impl sections::Header for Header {
    const MAGIC: [u8; 8] = *b"TRACE\0\0\0";
    const VERSION: u32 = 1;
    const NOUN: &'static str = "trace";
    const REMEDY: &'static str = "make it again with `dynamicinfer-lab record MODEL --text FILE`";

    fn sections(&self) -> &[Section] {
        &self.sections
    }

    fn set_sections(&mut self, sections: Vec<Section>) {
        self.sections = sections;
    }
}

impl Header {
    /// Tokens of all texts together.
    pub fn tokens(&self) -> usize {
        self.texts.iter().map(|t| t.tokens).sum()
    }

    /// u32 words that hold a bit for each neuron of a layer.
    pub fn words(&self) -> usize {
        self.ffn.div_ceil(32)
    }

    /// Bytes that one token takes in all sections together.
    pub fn token_bytes(&self) -> u64 {
        let row = |part: TraceSection| part.row(self).0 as u64;
        let layers = self.layers as u64;
        let ahead = layers.saturating_sub(self.ahead as u64);
        layers * (row(TraceSection::Active) + row(TraceSection::Own)) + ahead * row(TraceSection::Ahead)
    }

    /// The probability from which on each layer's neurons are computed, `[layers]`: `given`, else what was recorded, else 0.5.
    pub fn thresholds(&self, given: Option<f32>) -> Vec<f32> {
        match given {
            None if !self.thresholds.is_empty() => self.thresholds.clone(),
            _ => vec![given.unwrap_or(0.5); self.layers],
        }
    }

    /// The error is the first field that is wrong, and what is wrong with it.
    fn check(&self) -> std::result::Result<(), (&'static str, String)> {
        // The bounds of `model::Description::check`: products stay far inside 64 bits.
        sections::check_bounds(&[
            ("layers", self.layers, 1 << 12),
            ("ffn", self.ffn, 1 << 20),
            ("block_bytes", self.block_bytes, 1 << 28),
            ("experts_used", self.experts_used.unwrap_or(1), self.ffn),
            ("ahead", self.ahead, 1 << 12),
        ])?;
        for (field, bits) in [("own_bits", self.own_bits), ("ahead_bits", self.ahead_bits)] {
            if bits != 1 && bits != 8 {
                return Err((field, format!("are {bits}; take 1 or 8")));
            }
        }
        if self.texts.is_empty() || self.texts.len() > MAX_TEXTS {
            return Err(("texts", format!("are {}; it must be 1 to {MAX_TEXTS}", self.texts.len())));
        }
        if !self.thresholds.is_empty() && self.thresholds.len() != self.layers {
            return Err((
                "thresholds",
                format!("are {}; there must be one for each layer, or none", self.thresholds.len()),
            ));
        }
        if let Some(t) = self.thresholds.iter().find(|t| !(0.0..=1.0).contains(*t)) {
            return Err(("thresholds", format!("has {t}; take 0 to 1")));
        }
        match self.texts.iter().find(|t| t.tokens == 0 || t.tokens > u32::MAX as usize) {
            Some(t) => Err(("texts", format!("{} has {} tokens", t.name, t.tokens))),
            None => Ok(()),
        }
    }
}

/// An open trace.
pub struct TraceFile {
    file: SectionFile<Header>,
    /// Where each section begins in the file, by layer and part.
    places: Vec<[usize; 3]>,
}

/// What a section of one layer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceSection {
    /// Which neurons were active, a bit each (`active.L`).
    Active,
    /// Probabilities predicted from the layer's own residual (`own.L`).
    Own,
    /// Probabilities predicted from the residual [`Header::ahead`] layers before (`ahead.L`).
    Ahead,
}

impl TraceSection {
    fn section(self, layer: usize) -> String {
        let name = match self {
            TraceSection::Active => "active",
            TraceSection::Own => "own",
            TraceSection::Ahead => "ahead",
        };
        format!("{name}.{layer}")
    }

    /// Bytes that one token takes in a section of this part, and what they are.
    fn row(self, header: &Header) -> (usize, Content) {
        match self.bits(header) {
            1 => (header.words() * 4, Content::Numbers),
            _ => (header.ffn, Content::Bytes),
        }
    }

    /// Bits that a neuron takes in a row.
    fn bits(self, header: &Header) -> u8 {
        match self {
            TraceSection::Active => 1,
            TraceSection::Own => header.own_bits,
            TraceSection::Ahead => header.ahead_bits,
        }
    }

    /// The parts that a layer has: the first `ahead` layers have no [`TraceSection::Ahead`].
    fn of(header: &Header, layer: usize) -> &'static [TraceSection] {
        if layer < header.ahead {
            &[TraceSection::Active, TraceSection::Own]
        } else {
            &[TraceSection::Active, TraceSection::Own, TraceSection::Ahead]
        }
    }
}

impl TraceFile {
    /// Opens a trace and checks every byte of it.
    ///
    /// # Errors
    /// [`Error::BadFile`] with the field or section that is wrong, [`Error::Io`] if it cannot be opened.
    pub fn open(path: &Path) -> Result<TraceFile> {
        let file = SectionFile::<Header>::open(path)?;
        let bad = |field: &str, why: String| {
            Error::bad(path, field, format!("{why}; {}", <Header as sections::Header>::REMEDY))
        };
        let header = &file.header;
        header.check().map_err(|(field, why)| bad(field, why))?;
        for layer in 0..header.layers {
            for &part in TraceSection::of(header, layer) {
                let (name, (row, content)) = (part.section(layer), part.row(header));
                let section = file.section(&name).ok_or_else(|| bad(&name, "the section is missing".into()))?;
                let wanted = (row * header.tokens()) as u64;
                if section.content != content || section.bytes != wanted {
                    let found = (section.content, section.bytes);
                    return Err(bad(&name, format!("is {found:?}, not {content:?} of {wanted} bytes")));
                }
            }
        }
        let (layers, ahead, sections) = (header.layers, header.ahead, header.sections.len());
        let wanted: usize = (0..layers).map(|layer| TraceSection::of(header, layer).len()).sum();
        if sections != wanted {
            let why =
                format!("{sections} sections, and {layers} layers with predictions from {ahead} before have {wanted}");
            return Err(bad("layers", why));
        }
        file.verify(|_| ())?;
        let place = |layer: usize| {
            let mut at = [usize::MAX; 3];
            for &part in TraceSection::of(&file.header, layer) {
                at[part as usize] = file.section(&part.section(layer)).expect("looked at above").offset as usize;
            }
            at
        };
        let places = (0..layers).map(place).collect();
        let trace = TraceFile { file, places };
        for layer in 0..layers {
            TraceSection::of(trace.header(), layer).iter().try_for_each(|&part| trace.check_bits(part, layer))?;
        }
        Ok(trace)
    }

    /// Checks that no bit is set behind a layer's last neuron: readers use the number of a set bit as an index.
    fn check_bits(&self, part: TraceSection, layer: usize) -> Result<()> {
        let ffn = self.header().ffn;
        if ffn.is_multiple_of(32) || part.bits(self.header()) != 1 {
            return Ok(());
        }
        let none = !0u32 << (ffn % 32);
        let (name, row) = (part.section(layer), self.header().words() * 4);
        let section = self.file.section(&name).expect("looked at above");
        for (token, bits) in self.file.bytes(section).chunks_exact(row).enumerate() {
            let last = u32::from_le_bytes(bits[row - 4..].try_into().expect("four bytes"));
            if last & none != 0 {
                let neuron = ffn / 32 * 32 + (last & none).trailing_zeros() as usize;
                let remedy = <Header as sections::Header>::REMEDY;
                let why = format!("token {token} has neuron {neuron} active, and a layer has {ffn}; {remedy}");
                let at = section.offset + ((token + 1) * row - 4) as u64;
                return Err(Error::bad_at(self.file.path(), name, at, why));
            }
        }
        Ok(())
    }

    /// The trace's header.
    pub fn header(&self) -> &Header {
        &self.file.header
    }

    /// The bytes of a token in one part of a layer, as they were written: `[words]` u32 or `[ffn]` u8.
    ///
    /// # Panics
    /// If the layer has no such part: [`TraceSection::Ahead`] begins with layer `ahead`.
    pub fn row(&self, part: TraceSection, layer: usize, token: usize) -> &[u8] {
        let row = part.row(&self.file.header).0;
        &self.file.file().bytes()[self.places[layer][part as usize] + token * row..][..row]
    }

    /// Whether the probabilities of this part are all 0 or 1, so that [`TraceFile::row`] has a bit for each neuron.
    pub fn has_bits(&self, part: TraceSection) -> bool {
        part.bits(&self.file.header) == 1
    }

    /// The probabilities of a token in one part of a layer, times 255, `[ffn]`. `memory` is for those that are written as bits.
    ///
    /// # Panics
    /// As [`TraceFile::row`].
    pub fn probabilities<'a>(
        &'a self,
        part: TraceSection,
        layer: usize,
        token: usize,
        memory: &'a mut Vec<u8>,
    ) -> &'a [u8] {
        let row = self.row(part, layer, token);
        if !self.has_bits(part) {
            return row;
        }
        memory.resize(8 * row.len(), 0);
        row.iter().zip(memory.as_chunks_mut().0).for_each(|(byte, out)| *out = BYTES_OF[usize::from(*byte)]);
        memory.truncate(self.file.header.ffn);
        memory
    }
}

/// 255 for each bit of a byte that is set, the lowest first.
const BYTES_OF: [[u8; 8]; 256] = {
    let mut all = [[0; 8]; 256];
    let mut at = 0;
    while at < 256 * 8 {
        all[at / 8][at % 8] = 255 * (((at / 8) >> (at % 8)) & 1) as u8;
        at += 1;
    }
    all
};

/// Writes a trace token by token.
pub struct TraceWriter {
    writer: Writer,
    /// The header that [`TraceWriter::finish`] completes and writes.
    pub header: Header,
}

impl TraceWriter {
    /// Creates a trace with room for as many tokens as `header.texts` have together. Fewer may be written, if
    /// [`TraceWriter::finish`] is told so.
    ///
    /// # Errors
    /// [`Error::Usage`] for a header with a number that cannot be, [`Error::Io`] if the system refuses.
    pub fn create(path: &Path, header: Header) -> Result<TraceWriter> {
        header.check().map_err(|(field, why)| Error::Usage(format!("a trace's {field} {why}")))?;
        let mut writer = Writer::create(path)?;
        for layer in 0..header.layers {
            for &part in TraceSection::of(&header, layer) {
                let (row, content) = part.row(&header);
                writer.add(&part.section(layer), content, (row * header.tokens()) as u64);
            }
        }
        Ok(TraceWriter { writer, header })
    }

    /// Writes the bytes of consecutive tokens in one part of a layer; the first of them is token `first` of the whole trace.
    pub fn write(&self, part: TraceSection, layer: usize, first: usize, rows: &[u8]) -> Result<()> {
        let section = |layer: usize| TraceSection::of(&self.header, layer).len();
        let before: usize = (0..layer).map(section).sum();
        let row = part.row(&self.header).0;
        self.writer.write(before + part as usize, (first * row) as u64, rows)
    }

    /// Completes the file with these texts, which may have fewer tokens than there is room for: the file is then as much shorter. Texts without tokens are left out.
    ///
    /// # Errors
    /// [`Error::Usage`] if no text has a token, [`Error::Io`] if the system refuses.
    pub fn finish(mut self, texts: Vec<TextInfo>) -> Result<()> {
        self.header.texts = texts.into_iter().filter(|t| t.tokens > 0).collect();
        self.header.check().map_err(|(field, why)| Error::Usage(format!("a trace's {field} {why}")))?;
        let (header, tokens) = (&self.header, self.header.tokens());
        let parts = (0..header.layers).flat_map(|layer| TraceSection::of(header, layer));
        for (section, part) in parts.enumerate() {
            self.writer.shorten(section, (part.row(header).0 * tokens) as u64);
        }
        self.writer.close_gaps()?;
        self.writer.finish(self.header)
    }
}
