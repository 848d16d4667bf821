//! `tokenizer.json` through the tokenizers crate: what is checked before the crate sees the file, and which bytes its tokens stand for.

use super::byte_tokens::{byte_of, token_bytes};
use super::growth::{Growth, OF_NORMALIZER, OF_PRE_TOKENIZER, Weight};
use super::spec::{MAX_TOKENS, TokenKind};
use super::special::BREAK;
use crate::error::{Error, Result};
use serde::Deserialize;
use serde_json::Value;
use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;
use tokenizers::normalizers::{Replace, Sequence};
use tokenizers::{ModelWrapper, NormalizedString, Normalizer, NormalizerWrapper, PostProcessorWrapper, PreTokenizer};

/// Bytes of a `tokenizer.json`, at most. The largest in use (Gemma 3) has 33 MB.
pub const MAX_JSON: u64 = 64 << 20;
/// JSON values in each part that is kept as a tree, at most; the largest in use have some hundreds, for tokens that are put before a text.
const MAX_VALUES: usize = 100_000;
/// Bytes that a decoder may make of one byte of a token; decoders in use make fewer.
const DECODER_GROWTH: f64 = 4.0;
/// Steps of a decoder, at most; each goes over every token. Decoders in use have up to five.
const DECODER_STEPS: usize = 16;
/// Bytes that a normaliser may make of one, over a whole text: a space becomes `▁`, which has three.
const TEXT_GROWTH: usize = 4;
/// Bytes that may be put before the first letter of a text: `▁` has three.
const MAX_PREFIX: usize = 16;
/// Bytes of all added tokens after normalisation, at most; the most in use have some hundred thousand.
const MAX_ADDED: f64 = (16 << 20) as f64;
/// Words that the crate's BPE keeps once it has split them: none. It would keep them in each thread, for every tokenizer that there ever was,
/// and a word of 255 bytes takes 8 KiB; what it saves is a tenth of the time.
pub const WORDS_KEPT: usize = 0;
/// Bytes that are normalised at a time when a text's growth is measured.
const CHUNK: usize = 4 << 10;

/// What stands in the place of a token's id for a text that is no token.
pub const STEP: u32 = u32::MAX;

/// A pipeline of the tokenizers crate. It never adds special tokens by itself.
#[derive(Debug)]
pub struct Encoder {
    /// The crate's tokenizer.
    pub tokenizer: tokenizers::Tokenizer,
    /// The model's token id for each id of the crate's tokenizer, [`STEP`] for one of `steps`; `None` if they are the same.
    pub outside: Option<Vec<u32>>,
    /// Texts that merges make and that are no tokens, by their id in the crate's tokenizer: the model's tokens that they are taken apart into.
    pub steps: HashMap<u32, Vec<u32>>,
    /// Whether the normaliser could make more than `TEXT_GROWTH` bytes of one; then each text's growth is checked.
    pub may_grow: bool,
}

impl Encoder {
    /// The tokens of a text. Special tokens in it are recognised unless a [`BREAK`] is inside them.
    ///
    /// # Errors
    /// [`Error::Usage`] for a text that normalisation makes many times as long.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        if self.may_grow {
            self.check_growth(text)?;
        }
        let encoding = self.tokenizer.encode_fast(text, false);
        let encoding = encoding.map_err(|e| Error::Failed(format!("cannot tokenize the text: {e}")))?;
        let ids = encoding.get_ids();
        Ok(match &self.outside {
            None => ids.to_vec(),
            Some(outside) if self.steps.is_empty() => ids.iter().map(|&id| outside[id as usize]).collect(),
            Some(outside) => {
                let tokens = |id: &u32| self.steps.get(id).cloned().unwrap_or_else(|| vec![outside[*id as usize]]);
                ids.iter().flat_map(tokens).collect()
            }
        })
    }

    /// Normalises piece by piece, so that a text that becomes too long is never in memory.
    fn check_growth(&self, text: &str) -> Result<()> {
        let Some(normalizer) = self.tokenizer.get_normalizer() else { return Ok(()) };
        let most = TEXT_GROWTH * text.len() + CHUNK;
        let (mut rest, mut grown) = (text, 0);
        while !rest.is_empty() {
            let (chunk, behind) = rest.split_at(rest.floor_char_boundary(CHUNK));
            let mut chunk = NormalizedString::from(chunk);
            normalizer.normalize(&mut chunk).map_err(|e| Error::Failed(format!("cannot normalize the text: {e}")))?;
            grown += chunk.len();
            if grown > most {
                let n = text.len();
                let reason = format!("the tokenizer's normalizer makes more than {most} bytes of a text of {n}");
                return Err(Error::Usage(reason));
            }
            rest = behind;
        }
        Ok(())
    }
}

/// A token of a `tokenizer.json`.
#[derive(Clone, Debug)]
pub struct HfToken {
    /// As the vocabulary writes it; empty for an id that is not used.
    pub text: String,
    /// Added tokens are control or user-defined ones; an id that is not used is [`TokenKind::Unused`].
    pub kind: TokenKind,
}

/// The parts of a `tokenizer.json` that this crate reads itself.
#[derive(Debug)]
pub struct HfVocab {
    /// All tokens by id, `[largest id + 1]`.
    pub tokens: Vec<HfToken>,
    /// The token for text that has no other; `None` if the file names none.
    pub unk: Option<u32>,
    /// The special token that the post-processor puts before a text; `None` if there is none.
    pub before: Option<u32>,
    /// How tokens become bytes.
    pub decoder: Decoder,
    /// Bytes that the normaliser can make of one.
    growth: f64,
}

impl HfVocab {
    /// The id of the token written as `text`; an added token wins over an ordinary one. `None` if there is no such token.
    pub fn id_of(&self, text: &str) -> Option<u32> {
        let special = |t: &HfToken| t.kind != TokenKind::Normal;
        let found = |t: &HfToken| t.text == text && !text.is_empty();
        let at = self.tokens.iter().position(|t| special(t) && found(t));
        at.or_else(|| self.tokens.iter().position(found)).map(|id| id as u32)
    }
}

/// How a token's text becomes bytes.
#[derive(Debug, Default, PartialEq)]
pub struct Decoder {
    steps: Vec<DecodeStep>,
    /// Whether the first space of a whole text is dropped.
    pub drops_leading_space: bool,
}

#[derive(Debug, PartialEq)]
enum DecodeStep {
    ByteLevel,
    ByteFallback,
    Replace(String, String),
}

#[derive(Deserialize)]
struct Root {
    model: Model,
    #[serde(default)]
    added_tokens: Vec<Added>,
    normalizer: Option<Value>,
    pre_tokenizer: Option<Value>,
    post_processor: Option<Value>,
    decoder: Option<Value>,
}

/// Only the model's kind, because the vocabularies of other models have other shapes; and the sizes of the parts that will be kept as
/// trees.
#[derive(Deserialize)]
struct RootKind {
    model: ModelKind,
    normalizer: Option<Weight>,
    pre_tokenizer: Option<Weight>,
    post_processor: Option<Weight>,
    decoder: Option<Weight>,
}

#[derive(Deserialize)]
struct ModelKind {
    #[serde(rename = "type")]
    kind: Option<String>,
}

#[derive(Deserialize)]
struct Model {
    vocab: HashMap<String, u32>,
    merges: Vec<Merge>,
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Line(String),
    Pair(String, String),
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
    #[serde(default)]
    special: bool,
}

/// Reads and checks the parts of a `tokenizer.json` that the tokenizers crate does not check; with some bad ones it panics (a merge longer
/// than every token, a broken precompiled map).
///
/// # Errors
/// [`Error::BadFile`] that names the part of the file that is wrong or not supported.
pub fn read(json: &str, path: &Path) -> Result<HfVocab> {
    let bad = |field: &str, reason: String| Error::bad(path, field, reason);
    if json.len() as u64 > MAX_JSON {
        return Err(bad("", format!("{} bytes; at most {MAX_JSON} are supported", json.len())));
    }
    let kind: RootKind = serde_json::from_str(json).map_err(|e| bad("", format!("not a tokenizer.json: {e}")))?;
    for (part, field) in [
        (kind.normalizer, "normalizer"),
        (kind.pre_tokenizer, "pre_tokenizer"),
        (kind.post_processor, "post_processor"),
        (kind.decoder, "decoder"),
    ] {
        if let Some(Weight(n)) = part.filter(|part| part.0 > MAX_VALUES) {
            return Err(bad(field, format!("it has {n} values; at most {MAX_VALUES} are supported")));
        }
    }
    let kind = kind.model.kind.unwrap_or_else(|| "BPE".to_owned());
    if kind != "BPE" {
        return Err(bad("model.type", format!("{kind} models are not supported; BPE ones are")));
    }
    let root: Root = serde_json::from_str(json).map_err(|e| bad("", format!("not a tokenizer.json: {e}")))?;
    for (part, field) in [(&root.normalizer, "normalizer"), (&root.decoder, "decoder")] {
        if part.as_ref().is_some_and(|p| mentions_type(p, "Precompiled")) {
            return Err(bad(field, "Precompiled is not supported".into()));
        }
    }
    let growth = Growth::of(root.normalizer.as_ref(), OF_NORMALIZER).map_err(|why| bad("normalizer", why))?;
    check_added(&root.added_tokens, growth, path)?;
    Growth::of(root.pre_tokenizer.as_ref(), OF_PRE_TOKENIZER).map_err(|why| bad("pre_tokenizer", why))?;
    check_merges(&root.model, path)?;
    let tokens = tokens_by_id(&root, path)?;
    let unk = match root.model.unk_token {
        None => None,
        Some(text) => match root.model.vocab.get(&text) {
            Some(&id) => Some(id),
            None => return Err(bad("model.unk_token", format!("\"{text}\" is not in the vocabulary"))),
        },
    };
    let Some(decoder) = root.decoder else {
        return Err(bad("decoder", "there is none, so tokens have no exact bytes".into()));
    };
    let mut vocab =
        HfVocab { tokens, unk, before: None, decoder: read_decoder(&decoder, path)?, growth: growth.factor };
    vocab.before = root.post_processor.as_ref().and_then(token_before).and_then(|text| vocab.id_of(text));
    Ok(vocab)
}

fn check_merges(model: &Model, path: &Path) -> Result<()> {
    let bad = |field: &str, reason: String| Error::bad(path, field, reason);
    for (part, field) in [
        (&model.continuing_subword_prefix, "model.continuing_subword_prefix"),
        (&model.end_of_word_suffix, "model.end_of_word_suffix"),
    ] {
        if let Some(text) = part.as_deref().filter(|t| !t.is_empty()) {
            return Err(bad(field, format!("\"{text}\" is not supported; models of text generation have none")));
        }
    }
    let mut joined = String::new();
    for (i, merge) in model.merges.iter().enumerate() {
        let (left, right) = match merge {
            Merge::Pair(left, right) => (left.as_str(), right.as_str()),
            Merge::Line(line) if line.starts_with("#version") => continue,
            Merge::Line(line) => line
                .split_once(' ')
                .filter(|(_, right)| !right.contains(' '))
                .ok_or_else(|| bad("model.merges", format!("merge {i}, \"{line}\", is not two tokens")))?,
        };
        joined.clear();
        joined.extend([left, right]);
        for token in [left, right, &joined] {
            if !model.vocab.contains_key(token) {
                let reason = format!("merge {i}, \"{left} {right}\", names \"{token}\", which is not a token");
                return Err(bad("model.merges", reason));
            }
        }
    }
    Ok(())
}

/// Checks added tokens, which the library normalises while it reads the file.
fn check_added(added: &[Added], growth: Growth, path: &Path) -> Result<()> {
    let grown: f64 = added.iter().map(|token| growth.factor * token.content.len() as f64 + growth.added).sum();
    if grown > MAX_ADDED {
        let reason = format!("normalised, their texts can have {grown:.0} bytes; at most {MAX_ADDED} are supported");
        return Err(Error::bad(path, "added_tokens", reason));
    }
    Ok(())
}

fn tokens_by_id(root: &Root, path: &Path) -> Result<Vec<HfToken>> {
    let bad = |field: &str, reason: String| Error::bad(path, field, reason);
    let ids = root.model.vocab.values().copied().chain(root.added_tokens.iter().map(|t| t.id));
    let Some(largest) = ids.max() else {
        return Err(bad("model.vocab", "the vocabulary is empty".into()));
    };
    // Some models leave gaps; a table many times the size of the file is not one of them.
    let count = root.model.vocab.len() + root.added_tokens.len();
    let len = largest as usize + 1;
    if len > MAX_TOKENS || len > 4 * count + 65_536 {
        return Err(bad("model.vocab", format!("token {largest} is out of range for a vocabulary of {count} tokens")));
    }
    let mut tokens = vec![HfToken { text: String::new(), kind: TokenKind::Unused }; len];
    for (text, &id) in &root.model.vocab {
        let token = &mut tokens[id as usize];
        if token.kind != TokenKind::Unused {
            return Err(bad("model.vocab", format!("\"{}\" and \"{text}\" are both token {id}", token.text)));
        }
        *token = HfToken { text: text.clone(), kind: TokenKind::Normal };
    }
    for Added { id, content, special } in &root.added_tokens {
        let kind = if *special { TokenKind::Control } else { TokenKind::UserDefined };
        tokens[*id as usize] = HfToken { text: content.clone(), kind };
    }
    Ok(tokens)
}

fn mentions_type(value: &Value, kind: &str) -> bool {
    match value {
        Value::Object(map) => {
            map.get("type").is_some_and(|t| t == kind) || map.values().any(|v| mentions_type(v, kind))
        }
        Value::Array(items) => items.iter().any(|v| mentions_type(v, kind)),
        _ => false,
    }
}

/// The special token with which a TemplateProcessing begins.
fn token_before(processor: &Value) -> Option<&str> {
    match processor.get("type")?.as_str()? {
        "TemplateProcessing" => processor.get("single")?.get(0)?.get("SpecialToken")?.get("id")?.as_str(),
        "Sequence" => processor.get("processors")?.as_array()?.iter().find_map(token_before),
        _ => None,
    }
}

fn read_decoder(value: &Value, path: &Path) -> Result<Decoder> {
    let mut decoder = Decoder::default();
    let parts = match value.get("decoders").and_then(Value::as_array) {
        Some(parts) if value.get("type").is_some_and(|t| t == "Sequence") => parts.as_slice(),
        _ => std::slice::from_ref(value),
    };
    for part in parts {
        let kind = part.get("type").and_then(Value::as_str).unwrap_or_default();
        let text = |key: &str| part.get(key).and_then(Value::as_str);
        let number = |key: &str| part.get(key).and_then(Value::as_u64).unwrap_or(0);
        let not_supported = || Error::bad(path, "decoder", format!("decoder {part} is not supported"));
        match kind {
            "ByteLevel" => decoder.steps.push(DecodeStep::ByteLevel),
            "ByteFallback" => decoder.steps.push(DecodeStep::ByteFallback),
            "Fuse" => {}
            "Replace" => {
                let from = part.get("pattern").and_then(|p| p.get("String")).and_then(Value::as_str);
                let from = from.filter(|f| !f.is_empty()).ok_or_else(not_supported)?;
                let to = text("content").ok_or_else(not_supported)?;
                decoder.steps.push(DecodeStep::Replace(from.to_owned(), to.to_owned()));
            }
            "Strip" => match (text("content"), number("start"), number("stop")) {
                (Some(" "), 1, 0) => decoder.drops_leading_space = true,
                (_, 0, 0) => {}
                _ => return Err(not_supported()),
            },
            "Metaspace" => {
                let replacement = text("replacement").unwrap_or("▁").to_owned();
                if replacement.is_empty() {
                    return Err(not_supported());
                }
                decoder.steps.push(DecodeStep::Replace(replacement, " ".to_owned()));
                let never = text("prepend_scheme") == Some("never");
                let off = part.get("add_prefix_space").is_some_and(|v| v == false);
                decoder.drops_leading_space |= !never && !off;
            }
            _ => return Err(not_supported()),
        }
    }
    let bad = |reason: String| Error::bad(path, "decoder", reason);
    if parts.len() > DECODER_STEPS {
        return Err(bad(format!("it has {} steps; at most {DECODER_STEPS} are supported", parts.len())));
    }
    let growth: f64 = decoder.steps.iter().map(DecodeStep::growth).product();
    if growth > DECODER_GROWTH {
        return Err(bad(format!(
            "its steps can make {growth:.0} bytes of one; at most {DECODER_GROWTH} are supported"
        )));
    }
    Ok(decoder)
}

impl DecodeStep {
    fn growth(&self) -> f64 {
        match self {
            DecodeStep::Replace(from, to) => (to.len() as f64 / from.len() as f64).max(1.0),
            DecodeStep::ByteLevel | DecodeStep::ByteFallback => 1.0,
        }
    }
}

impl Decoder {
    /// The bytes that a token stands for. The letters of an added one do not stand for bytes: the library reads them as if they did, and
    /// loses "é".
    pub fn bytes(&self, text: &str, kind: TokenKind) -> Vec<u8> {
        let mut text = text.to_owned();
        for step in &self.steps {
            match step {
                DecodeStep::ByteLevel if kind == TokenKind::UserDefined => {}
                DecodeStep::ByteLevel => return token_bytes(&text),
                DecodeStep::ByteFallback => {
                    if let Some(byte) = byte_of(&text) {
                        return vec![byte];
                    }
                }
                DecodeStep::Replace(from, to) => text = text.replace(from, to),
            }
        }
        text.into_bytes()
    }
}

/// An encoder for a `tokenizer.json` that [`read`] accepted.
///
/// # Errors
/// [`Error::BadFile`]: the tokenizers crate refuses it or panics on it, or its rules take too long.
pub fn encoder(json: &str, vocab: &HfVocab, path: &Path) -> Result<Encoder> {
    let broken = |e: &dyn std::fmt::Display| Error::bad(path, "", format!("not a tokenizer.json: {e}"));
    // `read` refuses what is known to panic in there; a panic that is not known yet must not end the process either.
    let parsed = std::panic::catch_unwind(|| tokenizers::Tokenizer::from_bytes(json.as_bytes()));
    let mut tokenizer = match parsed {
        Ok(parsed) => parsed.map_err(|e| broken(&e))?,
        Err(_) => return Err(broken(&"the tokenizers library failed on it")),
    };
    // Prompts are neither cut nor filled up, special tokens are added by name, and training's dropout is random.
    tokenizer.with_truncation(None).map_err(|e| broken(&e))?;
    tokenizer.with_padding(None);
    tokenizer.with_post_processor(None::<PostProcessorWrapper>);
    if let ModelWrapper::BPE(bpe) = tokenizer.get_model() {
        let mut bpe = bpe.clone();
        bpe.dropout = None;
        bpe.resize_cache(WORDS_KEPT);
        tokenizer.with_model(bpe);
    }
    let mut steps: Vec<NormalizerWrapper> = vec![Replace::new(BREAK.to_string(), "").map_err(|e| broken(&e))?.into()];
    steps.extend(tokenizer.get_normalizer().cloned());
    tokenizer.with_normalizer(Some(Sequence::new(steps))).map_err(|e| broken(&e))?;
    // A special token that is looked for after normalisation would be found where BREAK was taken out.
    let special = tokenizer.get_added_tokens_decoder().into_values().filter(|t| t.special && t.normalized);
    let special: Vec<_> = special.map(|t| t.normalized(false)).collect();
    if !special.is_empty() {
        tokenizer.add_tokens(special).map_err(|e| broken(&e))?;
    }
    // The library tells of each step where that is asked for, and what is timed is its rules.
    tracing::subscriber::with_default(tracing::subscriber::NoSubscriber::default(), || try_out(&tokenizer, path))?;
    Ok(Encoder { tokenizer, outside: None, steps: HashMap::new(), may_grow: vocab.growth > TEXT_GROWTH as f64 })
}

/// A good rule takes at most 2 us a byte, nearly all of it for the pieces; one that backtracks doubles with every character
/// until the regex library gives up after a million steps, which are some 10 ms. Beside other programs the processor time of a good
/// rule was seen to pass 1 ms three times in a row: caches are empty, and what a hypervisor takes is counted.
fn longest_split(bytes: usize) -> Duration {
    Duration::from_millis(4) + Duration::from_micros(10) * bytes as u32
}

/// How often a text is tried before a rule is called slow: the fastest counts.
const TRIES: usize = 5;

/// Tries the normaliser and the pre-tokeniser on texts of growing length, so that a file whose rules take exponential time, or at
/// which the library fails, is refused when it is loaded and not when a user types the wrong word. That they do not take all
/// memory was seen before ([`Growth`]).
fn try_out(tokenizer: &tokenizers::Tokenizer, path: &Path) -> Result<()> {
    let normalized = |text: &str| {
        let mut text = NormalizedString::from(text);
        tokenizer.get_normalizer().is_none_or(|normalizer| normalizer.normalize(&mut text).is_ok()).then_some(text)
    };
    check_time("normalizer", path, &|text| normalized(text).is_some())?;
    let before = normalized("a").map_or(0, |text| text.len());
    if before > MAX_PREFIX {
        let reason = format!("it makes {before} bytes of \"a\"; at most {MAX_PREFIX} are supported");
        return Err(Error::bad(path, "normalizer", reason));
    }
    if let Some(splitter) = tokenizer.get_pre_tokenizer() {
        check_time("pre_tokenizer", path, &|text| splitter.pre_tokenize(&mut text.into()).is_ok())?;
    }
    // The rules one after the other: what fails here, and did not alone, is what the normaliser left.
    TRIED
        .iter()
        .try_for_each(|unit| library(path, "normalizer", unit, || drop(tokenizer.encode_fast(unit.repeat(16), false))))
}

const TRIED: [&str; 10] = ["a", "A", " ", "1", "\n", "!", "é", "a ", "<a", "'s"];

/// That `step` takes a text of any length in time.
fn check_time(field: &str, path: &Path, step: &dyn Fn(&str) -> bool) -> Result<()> {
    for unit in TRIED {
        for bytes in [8, 16, 24, 32, 64, 256, 1024, 4096] {
            let text = unit.repeat(bytes / unit.len());
            let slow = || {
                (0..TRIES).all(|_| {
                    let start = crate::clock::computed();
                    !step(&text) || crate::clock::computed() - start > longest_split(bytes)
                })
            };
            if library(path, field, unit, slow)? {
                let longest = longest_split(bytes);
                let reason = format!("its rules take more than {longest:?} for {bytes} bytes of {unit:?}");
                return Err(Error::bad(path, field, reason));
            }
        }
    }
    Ok(())
}

/// A panic of the library's is the file's fault.
fn library<T>(path: &Path, field: &str, unit: &str, work: impl FnOnce() -> T) -> Result<T> {
    let failed = |_| Error::bad(path, field, format!("the tokenizers library fails on a text of {unit:?}"));
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).map_err(failed)
}
