//! Byte-level BPE from a token list and a merge list, with the pre-tokeniser that llama.cpp knows by name.

use super::byte_tokens::byte_char;
use super::hf::{Encoder, STEP, WORDS_KEPT};
use super::pre_tokenizers::{PreTokenizer, Writing, pre_tokenizer};
use super::spec::{BpeSpec, TokenKind, looks_like_control, warn};
use super::special::BREAK;
use super::spm::SPACE;
use crate::error::{Error, Result};
use std::collections::HashMap;
use std::path::Path;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::{NFC, Replace, Sequence as Normalizers};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior};

/// The tokens of a spec by the numbers that they have inside the encoder, ordinary ones first, so that merges cannot make the text of a
/// control token.
#[derive(Default)]
struct Inside<'a> {
    /// Ordinary tokens and steps, by text.
    vocab: Vocab,
    /// The token of each number, [`STEP`] for a step.
    outside: Vec<u32>,
    /// What the merges make on the way to tokens without being one, by its number: the tokens that it is taken apart into.
    steps: HashMap<u32, Vec<u32>>,
    /// Tokens that are looked for before words are cut: text, whether it is special, token.
    added: Vec<(&'a str, bool, u32)>,
}

impl<'a> Inside<'a> {
    fn of(spec: &'a BpeSpec, writing: Writing) -> Inside<'a> {
        let mut inside = Inside::default();
        for ((text, kind), id) in spec.tokens.iter().zip(&spec.kinds).zip(0u32..) {
            let breaks = writing == Writing::Spaced && text.len() > 1 && text.bytes().all(|b| b == b'\n');
            match kind {
                _ if text.is_empty() => {}
                // Files of this kind have no merges of line breaks, which llama.cpp's merges are separated by.
                TokenKind::Normal if breaks => inside.added.push((text, false, id)),
                TokenKind::Byte if writing == Writing::Bytes => {}
                TokenKind::Normal | TokenKind::Byte => {
                    inside.vocab.insert(text.clone(), inside.outside.len() as u32);
                    inside.outside.push(id);
                }
                TokenKind::Control | TokenKind::UserDefined | TokenKind::Unknown => {
                    inside.added.push((text, *kind != TokenKind::UserDefined || looks_like_control(text), id));
                }
                TokenKind::Unused => {}
            }
        }
        inside
    }

    /// Gives a text that a merge names a number, where it is no token: llama.cpp merges such texts, and at the end takes apart what has
    /// not become a token.
    fn add_step(&mut self, text: &str) {
        if self.vocab.contains_key(text) {
            return;
        }
        let letters = text.chars().filter_map(|c| self.vocab.get(&*c.encode_utf8(&mut [0; 4])));
        let parts = letters.map(|&number| self.outside[number as usize]).filter(|&id| id != STEP).collect();
        let number = self.outside.len() as u32;
        self.steps.insert(number, parts);
        self.vocab.insert(text.to_owned(), number);
        self.outside.push(STEP);
    }

    /// The merges as pairs. Lines that are no two texts are left out, as llama.cpp does.
    fn merges(&mut self, spec: &BpeSpec, path: &Path) -> Vec<(String, String)> {
        let (mut merges, mut broken) = (Vec::with_capacity(spec.merges.len()), 0);
        let tokens = self.outside.len();
        for merge in &spec.merges {
            // The first half may itself begin with a space (llama.cpp reads it so).
            let at = merge.char_indices().skip(1).find(|&(_, c)| c == ' ').map(|(at, _)| at);
            let Some((left, right)) = at.map(|at| (&merge[..at], &merge[at + 1..])).filter(|pair| !pair.1.is_empty())
            else {
                broken += 1;
                continue;
            };
            for text in [left, right, &format!("{left}{right}")] {
                self.add_step(text);
            }
            merges.push((left.to_owned(), right.to_owned()));
        }
        let steps = self.outside.len() - tokens;
        if broken + steps > 0 {
            let reason = format!(
                "{broken} lines are not two texts, and {steps} texts in the others are not tokens; words may be cut otherwise \
                 than in training"
            );
            warn(path, "tokenizer.ggml.merges", reason);
        }
        merges
    }
}

/// An encoder for a checked spec.
///
/// # Errors
/// [`Error::BadFile`] for an unknown pre-tokeniser, or a vocabulary without a token for any byte.
pub fn encoder(spec: &BpeSpec, path: &Path) -> Result<Encoder> {
    let bad = |key: &str, reason: String| Error::bad(path, key, reason);
    let pre = pre_tokenizer(&spec.pre, path)?;
    let mut inside = Inside::of(spec, pre.writing);
    // A byte that has no token gives none, as in the tokenizers library: SmolLM lacks some control characters.
    let has_byte = |byte| inside.vocab.contains_key(&*byte_char(byte).encode_utf8(&mut [0; 4]));
    if pre.writing == Writing::Bytes && !(0..=255).any(has_byte) {
        let reason = "no byte has a token, so no text has tokens".to_owned();
        return Err(bad("tokenizer.ggml.tokens", reason));
    }
    let merges = inside.merges(spec, path);
    let Inside { vocab, mut outside, mut steps, added } = inside;
    let broken = |e| bad("tokenizer.ggml.merges", format!("{e}"));
    let model = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(pre.ignore_merges);
    let model = model.byte_fallback(pre.writing != Writing::Bytes).cache_capacity(WORDS_KEPT);
    let model = model.build().map_err(broken)?;
    let mut tokenizer = tokenizers::Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(Sequence::new(words(pre).map_err(broken)?)));
    tokenizer.with_normalizer(Some(Normalizers::new(normalizers(pre).map_err(broken)?))).map_err(broken)?;
    let tokens = added.iter().map(|(text, special, _)| AddedToken::from(*text, *special).normalized(false));
    tokenizer.add_tokens(tokens).map_err(broken)?;
    for &(text, _, id) in &added {
        // The tokenizers library gives an added token the number of a step that has the same text.
        let number = tokenizer.token_to_id(text).expect("it was added");
        steps.remove(&number);
        outside.resize(outside.len().max(number as usize + 1), STEP);
        outside[number as usize] = id;
    }
    Ok(Encoder { tokenizer, outside: Some(outside), steps, may_grow: false })
}

/// What is done with a text before it is cut into words.
fn normalizers(pre: &PreTokenizer) -> tokenizers::Result<Vec<NormalizerWrapper>> {
    let mut steps: Vec<NormalizerWrapper> = vec![Replace::new(BREAK.to_string(), "")?.into()];
    if pre.nfc {
        steps.push(NFC.into());
    }
    if pre.writing == Writing::Spaced {
        steps.push(Replace::new(" ", SPACE.to_string())?.into());
    }
    Ok(steps)
}

/// The steps that cut it.
fn words(pre: &PreTokenizer) -> tokenizers::Result<Vec<PreTokenizerWrapper>> {
    let mut steps: Vec<PreTokenizerWrapper> = Vec::new();
    for regex in pre.regexes {
        let pattern = SplitPattern::Regex((*regex).to_owned());
        steps.push(Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?.into());
    }
    if pre.writing == Writing::Bytes {
        steps.push(ByteLevel::new(false, false, false).into());
    }
    Ok(steps)
}
