//! An activation profile on disk: how often each neuron fired on some texts, and what else was summed up on the way. In
//! the form of [`super::sections`]; `docs/predictors.md` says what each number means.
//!
//! Every number belongs to one text and is a sum over its tokens, so profiles merge by putting their texts together.
//! Neurons bear the published model's numbers, whatever order a store has them in.

use super::sections::{self, Content, Section, SectionFile, Writer};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// The usual name ending.
pub const EXTENSION: &str = "profile";

/// The similarity of hidden states is measured between a layer and those so many layers further.
pub const AHEADS: [usize; 3] = [1, 2, 4];
/// Bins of a histogram of magnitudes: 32 per power of two, from 2^-14 to 2^6.
pub const BINS: usize = 640;
/// Most texts of a profile: each has counts for every neuron of the model.
pub const MAX_TEXTS: usize = 4096;

/// The part of a text that holds [`Inputs`].
const INPUTS: &str = "inputs";
/// The part of a text that holds [`Text::inside`].
const INSIDE: &str = "inside";
/// Most numbers that attention's output matrix reads: as many as a model's hidden size may have, and more than any has.
const MAX_Q_DIM: u64 = 1 << 17;
/// Numbers of 8 bytes that a section of sums has for each layer: those of [`LayerSums`].
const SUMS: usize = 2 + AHEADS.len();
/// The sum of cosines may be above the number of tokens by this share, because of rounding.
const ROUNDING: f64 = 1e-4;

/// The header of a profile: the model that it belongs to, and the texts that were counted.
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
    /// The share of neurons, between 0 and 1, that the activation thresholds were chosen to leave inactive; `None` for ReLU models.
    pub sparsity: Option<f32>,
    /// `[layers]`: the magnitude |act(gate)| above which a neuron of the layer counts as active; zeros for ReLU models.
    #[serde(rename = "cuts")]
    pub activation_thresholds: Vec<f32>,
    /// The texts, in the order of their sections; no two have the same checksum.
    pub texts: Vec<TextInfo>,
    /// For an unfinished profile a hash of everything that was asked for, so that only the same request goes on with it; `None` for a
    /// finished one.
    pub request: Option<String>,
    /// How it was made: for people, not read by the program.
    #[serde(deserialize_with = "sections::few_values")]
    pub made: serde_json::Value,
    /// Each text's counts, sums and inputs and, with a sparsity, magnitudes; filled in by [`write()`].
    pub sections: Vec<Section>,
}

/// A text of a profile, and how much of it was counted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TextInfo {
    /// File name without its directory, for people.
    pub name: String,
    /// xxh3-64 of the whole text, in hex.
    pub checksum: String,
    /// Tokens that have been counted.
    pub tokens: usize,
    /// Tokens that are to be counted; more than `tokens` only in an unfinished profile.
    pub wanted: usize,
    /// Tokens per window: each window is run as a sequence of its own.
    pub window: usize,
}

/// The sums of one text.
#[derive(Clone, Debug, PartialEq)]
pub struct Text {
    /// Which text it is, and how much of it was counted.
    pub info: TextInfo,
    /// For each neuron the tokens for which it was active, `[layers, ffn]`.
    pub counts: Vec<u32>,
    /// The other sums, `[layers]`.
    pub sums: Vec<LayerSums>,
    /// Histogram of |act(gate)|, `[layers, BINS]`; empty for ReLU models.
    pub magnitudes: Vec<u64>,
    /// What the model's matrices read; `None` for a mixture of experts and in files made before it was counted.
    pub inputs: Option<Inputs>,
    /// Of a mixture whose experts have zeros inside, for each neuron of each expert the tokens for which it was active, `[layers, experts, neurons of
    /// an expert]`; `None` for other models and in files made before it was counted.
    pub inside: Option<Vec<u32>>,
}

/// How large the numbers are that a model's matrices read.
#[derive(Clone, Debug, PartialEq)]
pub struct Inputs {
    /// How many numbers attention's output matrix reads, at least 1.
    pub q_dim: usize,
    /// Sums of squares over the tokens, `[layers, hidden + q_dim + hidden]`: of what queries, keys and values read, of what attention's output
    /// matrix reads, of what gate and up read.
    pub squares: Vec<f64>,
}

/// What is summed per layer besides counts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerSums {
    /// Pairs of neighbouring tokens of a window of which at least one had an active neuron in this layer.
    pub pairs: u64,
    /// Sum over those pairs of the Jaccard distance between the two sets of active neurons, 0 to 1 each.
    pub jaccard: f64,
    /// Sums over tokens of the cosine between this layer's residual after attention and that of the layer [`AHEADS`]`[i]` further; 0
    /// where there is no such layer.
    pub cosines: [f64; AHEADS.len()],
}

/// An open profile.
pub type ProfileFile = SectionFile<Header>;

impl sections::Header for Header {
    const MAGIC: [u8; 8] = *b"PROFILE\0";
    const VERSION: u32 = 1;
    const NOUN: &'static str = "profile";
    const REMEDY: &'static str = "make it again with `dynamicinfer profile MODEL --fresh --text FILE`";

    fn sections(&self) -> &[Section] {
        &self.sections
    }

    fn set_sections(&mut self, sections: Vec<Section>) {
        self.sections = sections;
    }
}

const REMEDY: &str = <Header as sections::Header>::REMEDY;

/// Opens a finished profile and checks every number of it.
///
/// # Errors
/// [`Error::BadFile`] if something in it is wrong or it is not finished, [`Error::Io`] if it cannot be opened.
pub fn open(path: &Path) -> Result<ProfileFile> {
    let file = open_unfinished(path)?;
    if let Some(t) = file.header.texts.iter().find(|t| t.tokens != t.wanted) {
        let why = format!("holds {} of {} tokens: the profile is not finished; {REMEDY}", t.tokens, t.wanted);
        return Err(Error::bad(path, format!("text {}", t.name), why));
    }
    if file.header.request.is_some() {
        return Err(Error::bad(path, "request", format!("an interrupted run left this, not all texts; {REMEDY}")));
    }
    Ok(file)
}

/// As [`open`], but takes profiles that an interrupted run has left, whose last text may be counted in part.
pub fn open_unfinished(path: &Path) -> Result<ProfileFile> {
    let file = ProfileFile::open(path)?;
    let bad = |(field, why): (String, String)| Error::bad(path, field, format!("{why}; {REMEDY}"));
    check_header(&file.header).map_err(bad)?;
    // Checksums, too: a profile is read as a whole anyway, and a damaged count would look like a right one.
    file.verify(|_| ())?;
    let mut width = None;
    for text in 0..file.header.texts.len() {
        let Some(inputs) = read_text(&file, text)?.inputs else { continue };
        if *width.get_or_insert(inputs.q_dim) != inputs.q_dim {
            let why = "is as long as another model's".to_owned();
            return Err(bad((section_name(text, INPUTS), why)));
        }
    }
    Ok(file)
}

/// Checks the header. The error is the first field that is wrong, and what is wrong with it.
fn check_header(h: &Header) -> Result<(), (String, String)> {
    let bad = |field: &str, why: String| Err((field.to_owned(), why));
    sections::check_shape(h.layers, h.hidden, h.ffn)?;
    if h.activation_thresholds.len() != h.layers || h.activation_thresholds.iter().any(|c| !c.is_finite() || *c < 0.0) {
        return bad("cuts", format!("are not one magnitude for each of {} layers", h.layers));
    }
    match h.sparsity {
        Some(s) if !(s > 0.0 && s < 1.0) => return bad("sparsity", format!("is {s}, not a share between 0 and 1")),
        None if h.activation_thresholds.iter().any(|&c| c != 0.0) => {
            return bad("cuts", "are there without a sparsity".into());
        }
        _ => {}
    }
    if h.texts.is_empty() || h.texts.len() > MAX_TEXTS {
        return bad("texts", format!("are {}; it must be 1 to {MAX_TEXTS}", h.texts.len()));
    }
    let mut seen = std::collections::HashSet::new();
    for t in &h.texts {
        let name = format!("text {}", t.name);
        if !seen.insert(&t.checksum) {
            return bad(&name, "is there twice".into());
        }
        if t.wanted == 0 || t.wanted > u32::MAX as usize || t.tokens > t.wanted || t.window == 0 {
            return bad(&name, format!("says {} of {} tokens in windows of {}", t.tokens, t.wanted, t.window));
        }
    }
    Ok(())
}

/// The counts and sums of the text `text`, an index into `header.texts`.
///
/// # Errors
/// [`Error::BadFile`] with the section that is missing or holds a number that cannot be.
pub fn read_text(file: &ProfileFile, text: usize) -> Result<Text> {
    let h = &file.header;
    let info = h.texts[text].clone();
    let tokens = info.tokens as u64;
    let counts: Vec<u32> = words(section(file, text, "counts", Content::Numbers, h.layers * h.ffn * 4)?);
    let sums: Vec<u64> = words(section(file, text, "sums", Content::Bytes, h.layers * SUMS * 8)?);
    let magnitudes: Vec<u64> = match h.sparsity {
        Some(_) => words(section(file, text, "magnitudes", Content::Numbers, h.layers * BINS * 8)?),
        None => Vec::new(),
    };
    let bad = |part: &str, why: String| Error::bad(file.path(), section_name(text, part), format!("{why}; {REMEDY}"));
    if let Some(at) = counts.iter().position(|&c| c as u64 > tokens) {
        let (layer, neuron) = (at / h.ffn, at % h.ffn);
        return Err(bad("counts", format!("layer {layer}, neuron {neuron}: {} of {tokens} tokens", counts[at])));
    }
    let sums: Vec<_> = sums.chunks_exact(SUMS).map(LayerSums::from_words).collect();
    for (layer, s) in sums.iter().enumerate() {
        let why = |what: String| bad("sums", format!("layer {layer}: {what}"));
        if s.pairs > tokens {
            return Err(why(format!("{} pairs of neighbours in {tokens} tokens", s.pairs)));
        }
        // Written so that NaN fails.
        if !(s.jaccard >= 0.0 && s.jaccard <= s.pairs as f64) {
            return Err(why(format!("{} pairs have Jaccard distances of {} together", s.pairs, s.jaccard)));
        }
        let most = tokens as f64 * (1.0 + ROUNDING);
        if let Some(c) = s.cosines.iter().find(|c| c.is_nan() || c.abs() > most) {
            return Err(why(format!("the cosines of {tokens} tokens are {c} together")));
        }
    }
    let all = tokens * h.ffn as u64;
    for (layer, bins) in magnitudes.chunks_exact(BINS).enumerate() {
        let sum = bins.iter().try_fold(0u64, |sum, &n| sum.checked_add(n));
        if sum != Some(all) {
            return Err(bad("magnitudes", format!("layer {layer}: the bins do not hold {all} magnitudes")));
        }
    }
    let inputs = read_inputs(file, text)?;
    let inside = read_inside(file, text, &counts)?;
    Ok(Text { info, counts, sums, magnitudes, inputs, inside })
}

/// How often the neurons inside experts were active, of whom each was chosen as often as `counts` says; `None` where the file does not have it.
fn read_inside(file: &ProfileFile, text: usize, counts: &[u32]) -> Result<Option<Vec<u32>>> {
    let name = section_name(text, INSIDE);
    let Some(found) = file.section(&name) else { return Ok(None) };
    let bad = |why: String| Err(Error::bad(file.path(), &name, format!("{why}; {REMEDY}")));
    let (content, bytes, experts) = (found.content, found.bytes, counts.len());
    if content != Content::Numbers || bytes == 0 || !bytes.is_multiple_of(4 * experts as u64) {
        return bad(format!("is {content:?} of {bytes} bytes, not numbers for neurons of {experts} experts"));
    }
    let inside: Vec<u32> = words(file.bytes(found));
    let each = inside.len() / experts;
    match inside.iter().enumerate().find(|&(at, &active)| active > counts[at / each]) {
        None => Ok(Some(inside)),
        Some((at, active)) => {
            let (expert, neuron, chosen) = (at / each, at % each, counts[at / each]);
            bad(format!(
                "expert {expert}, neuron {neuron}: active for {active} tokens of {chosen} that have the expert"
            ))
        }
    }
}

/// What matrices read in a text; `None` where the file does not have it.
fn read_inputs(file: &ProfileFile, text: usize) -> Result<Option<Inputs>> {
    let (h, name) = (&file.header, section_name(text, INPUTS));
    let Some(found) = file.section(&name) else { return Ok(None) };
    let bad = |why: String| Err(Error::bad(file.path(), &name, format!("{why}; {REMEDY}")));
    let (layer_bytes, least) = (found.bytes / h.layers as u64, 2 * h.hidden as u64);
    if found.content != Content::Bytes
        || !found.bytes.is_multiple_of(8 * h.layers as u64)
        || !(least + 1..=least + MAX_Q_DIM).contains(&(layer_bytes / 8))
    {
        let (content, bytes, layers) = (found.content, found.bytes, h.layers);
        return bad(format!("is {content:?} of {bytes} bytes, not {layers} times more than {least} sums"));
    }
    let squares: Vec<f64> = words(file.bytes(found));
    let width = squares.len() / h.layers;
    // Written so that NaN fails.
    if let Some(at) = squares.iter().position(|s| !(*s >= 0.0 && *s < f64::INFINITY)) {
        return bad(format!("layer {}: a sum of squares is {}", at / width, squares[at]));
    }
    Ok(Some(Inputs { q_dim: width - 2 * h.hidden, squares }))
}

fn section_name(text: usize, part: &str) -> String {
    format!("text.{text}.{part}")
}

fn section<'a>(file: &'a ProfileFile, text: usize, part: &str, content: Content, bytes: usize) -> Result<&'a [u8]> {
    let name = section_name(text, part);
    let bad = |why: String| Error::bad(file.path(), name.clone(), format!("{why}; {REMEDY}"));
    let found = file.section(&name).ok_or_else(|| bad("the section is missing".into()))?;
    if found.content != content || found.bytes != bytes as u64 {
        return Err(bad(format!("is {:?} of {} bytes, not {content:?} of {bytes}", found.content, found.bytes)));
    }
    Ok(file.bytes(found))
}

/// Little-endian numbers at any address.
fn words<T: bytemuck::AnyBitPattern>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

impl LayerSums {
    fn from_words(words: &[u64]) -> LayerSums {
        let cosines = std::array::from_fn(|i| f64::from_bits(words[2 + i]));
        LayerSums { pairs: words[0], jaccard: f64::from_bits(words[1]), cosines }
    }

    fn to_words(self) -> impl Iterator<Item = u64> {
        [self.pairs, self.jaccard.to_bits()].into_iter().chain(self.cosines.map(f64::to_bits))
    }
}

/// Writes a profile of these texts; `header.texts` and `header.sections` are filled in.
///
/// # Errors
/// [`Error::Io`] if the system refuses.
pub fn write(path: &Path, mut header: Header, texts: &[Text]) -> Result<()> {
    let mut writer = Writer::create(path)?;
    let mut put = |text: usize, part: &str, content: Content, bytes: &[u8]| {
        let section = writer.add(&section_name(text, part), content, bytes.len() as u64);
        writer.write(section, 0, bytes)
    };
    for (i, text) in texts.iter().enumerate() {
        assert_eq!((text.counts.len(), text.sums.len()), (header.layers * header.ffn, header.layers));
        put(i, "counts", Content::Numbers, bytemuck::cast_slice(&text.counts))?;
        let sums: Vec<u64> = text.sums.iter().flat_map(|s| s.to_words()).collect();
        put(i, "sums", Content::Bytes, bytemuck::cast_slice(&sums))?;
        if header.sparsity.is_some() {
            assert_eq!(text.magnitudes.len(), header.layers * BINS);
            put(i, "magnitudes", Content::Numbers, bytemuck::cast_slice(&text.magnitudes))?;
        }
        if let Some(inside) = &text.inside {
            assert!(inside.len().is_multiple_of(text.counts.len()));
            put(i, INSIDE, Content::Numbers, bytemuck::cast_slice(inside))?;
        }
        if let Some(inputs) = &text.inputs {
            assert_eq!(inputs.squares.len(), header.layers * (2 * header.hidden + inputs.q_dim));
            put(i, INPUTS, Content::Bytes, bytemuck::cast_slice(&inputs.squares))?;
        }
    }
    header.texts = texts.iter().map(|t| t.info.clone()).collect();
    writer.finish(header)
}
