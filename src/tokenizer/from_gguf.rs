//! A tokenizer from the metadata of a GGUF file.
//!
//! A key that is missing, or names a token beyond the vocabulary, has llama.cpp's default for this kind of tokenizer, but for one: byte-level
//! vocabularies begin and end texts with token 11, Falcon's `<|endoftext|>`, which in others is a comma. There it is no token at all.

use super::byte_tokens::byte_of;
use super::pre_tokenizers::pre_tokenizer;
use super::spec::{
    BpeSpec, ChatSpec, Keys, ModelSpec, SpmSpec, TokenKind, TokenizerSpec, add_end_texts, check, is_end_text, warn,
};
use crate::error::{Error, Result};
use crate::formats::gguf::Metadata;
use std::path::Path;

const GGUF: Keys = Keys {
    tokens: "tokenizer.ggml.tokens",
    scores: "tokenizer.ggml.scores",
    kinds: "tokenizer.ggml.token_type",
    bos: "tokenizer.ggml.bos_token_id",
    eos: "tokenizer.ggml.eos_token_id",
    unk: "tokenizer.ggml.unknown_token_id",
};
const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";

/// What token ids a vocabulary has where its file names none.
struct Defaults {
    bos: Option<u32>,
    eos: Option<u32>,
    unk: Option<u32>,
}

/// Whether a file has a tokenizer at all: converters write `no_vocab` for a model that takes token ids only.
pub fn has_tokenizer(meta: &Metadata) -> bool {
    let none = |value: &str| matches!(value, "no_vocab" | "none");
    meta.get(MODEL).is_some() && !matches!(meta.str(MODEL), Ok(Some(value)) if none(value))
}

/// The tokenizer of a GGUF file.
///
/// # Errors
/// [`Error::BadFile`] with the metadata key: missing, of the wrong type, of the wrong length, or a kind of tokenizer that is not supported.
pub fn from_gguf(meta: &Metadata, path: &Path) -> Result<TokenizerSpec> {
    let missing = |key: &str| Error::bad(path, key, "the file has no such key, so it has no tokenizer");
    let model = meta.str(MODEL)?.ok_or_else(|| missing(MODEL))?;
    if !matches!(model, "llama" | "gpt2" | "gemma4") {
        let known = "supported are \"llama\" (SentencePiece BPE), \"gpt2\" (byte-level BPE) and \"gemma4\"";
        return Err(Error::bad(path, MODEL, format!("tokenizer \"{model}\" is not supported; {known}")));
    }
    let tokens = meta.strings(GGUF.tokens)?.ok_or_else(|| missing(GGUF.tokens))?.to_vec();
    let said = Ids { meta, path, tokens: tokens.len() };
    let usual = if model == "llama" { Defaults::SENTENCEPIECE } else { Defaults::NONE };
    let named = [said.id(GGUF.bos)?.or(usual.bos), said.id(GGUF.unk)?.or(usual.unk)];
    let kinds = match meta.i32s(GGUF.kinds)? {
        Some(numbers) => kinds_of(numbers, &tokens),
        None => (0..).zip(&tokens).map(|(id, text)| guess_kind(text, named.contains(&Some(id)))).collect(),
    };
    let defaults = if model == "gpt2" { Defaults::of_bytes(&tokens, &kinds) } else { usual };
    let mut eos: Vec<u32> = said.or(GGUF.eos, defaults.eos)?.into_iter().collect();
    for key in ["tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
        eos.extend(said.or(key, None)?);
    }
    let [bos, unk] = [said.or(GGUF.bos, defaults.bos)?, said.or(GGUF.unk, defaults.unk)?];
    let (model, begins) = if model == "llama" {
        let model = SpmSpec {
            scores: scores(meta, tokens.len())?,
            tokens,
            kinds,
            add_space_prefix: meta.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true),
            remove_extra_whitespaces: meta.bool("tokenizer.ggml.remove_extra_whitespaces")?.unwrap_or(false),
        };
        (ModelSpec::Spm(model), true)
    } else {
        let pre = pre_of(meta, model, path)?;
        let merges = match meta.strings("tokenizer.ggml.merges")? {
            Some(merges) => merges.to_vec(),
            // Kimi's vocabulary is one of words that need none.
            None if pre == "kimi-k2" => Vec::new(),
            None => return Err(missing("tokenizer.ggml.merges")),
        };
        (ModelSpec::Bpe(BpeSpec { tokens, merges, kinds, pre: pre.to_owned() }), pre_tokenizer(pre, path)?.add_bos)
    };
    let add_bos = bos.is_some() && meta.bool("tokenizer.ggml.add_bos_token")?.unwrap_or(begins);
    let mut spec = TokenizerSpec {
        model,
        bos,
        eos,
        unk,
        add_bos,
        add_eos: meta.bool("tokenizer.ggml.add_eos_token")?.unwrap_or(false),
        chat_template: meta.str("tokenizer.chat_template")?.map(str::to_owned),
        chat: ChatSpec {
            begins_with_bos: add_bos,
            sep: said.id("tokenizer.ggml.seperator_token_id")?,
            pad: said.id("tokenizer.ggml.padding_token_id")?,
        },
    };
    check(&spec, &GGUF, path)?;
    add_end_texts(&mut spec);
    Ok(spec)
}

impl Defaults {
    const NONE: Defaults = Defaults { bos: None, eos: None, unk: None };
    const SENTENCEPIECE: Defaults = Defaults { bos: Some(1), eos: Some(2), unk: Some(0) };

    /// Token 11, where it is one that ends texts.
    fn of_bytes(tokens: &[String], kinds: &[TokenKind]) -> Defaults {
        const FALCON: u32 = 11;
        let at = FALCON as usize;
        let ends = kinds.get(at) == Some(&TokenKind::Control) || tokens.get(at).is_some_and(|text| is_end_text(text));
        if ends {
            return Defaults { bos: Some(FALCON), eos: Some(FALCON), unk: None };
        }
        Defaults::NONE
    }
}

/// The ids of special tokens in a file's metadata.
struct Ids<'a> {
    meta: &'a Metadata,
    path: &'a Path,
    /// How many tokens the vocabulary has.
    tokens: usize,
}

impl Ids<'_> {
    /// The token that `key` names, if it is there and in the vocabulary.
    fn id(&self, key: &str) -> Result<Option<u32>> {
        Ok(self.meta.u32(key)?.filter(|&id| (id as usize) < self.tokens))
    }

    /// The same, and `default` where there is none, as llama.cpp does. A token beyond the vocabulary is warned of.
    fn or(&self, key: &str, default: Option<u32>) -> Result<Option<u32>> {
        let default = default.filter(|&id| (id as usize) < self.tokens);
        if let Some(id) = self.meta.u32(key)?.filter(|&id| id as usize >= self.tokens) {
            let instead = default.map_or("it is left out".to_owned(), |id| format!("token {id} is taken instead"));
            let n = self.tokens;
            warn(self.path, key, format!("token {id} is not in the vocabulary of {n} tokens; {instead}"));
        }
        Ok(self.id(key)?.or(default))
    }
}

/// The pre-tokeniser's name. Files from before llama.cpp's `tokenizer.ggml.pre` (May 2024), PowerInfer's among them, have none: the
/// architecture decides where all its models share one.
fn pre_of<'a>(meta: &'a Metadata, model: &str, path: &Path) -> Result<&'a str> {
    if model == "gemma4" {
        return Ok("gemma4");
    }
    if let Some(pre) = meta.str(PRE)?.filter(|pre| !pre.is_empty()) {
        return Ok(pre);
    }
    Ok(match meta.str("general.architecture")?.unwrap_or_default() {
        "falcon" => "falcon",
        "opt" | "gpt2" | "mpt" => "gpt-2",
        "starcoder" => "starcoder",
        architecture => {
            let reason = format!(
                "the file does not name its pre-tokeniser and architecture \"{architecture}\" does not imply one; \"default\" is \
                 taken, and answers may be worse: convert the model again with a converter from May 2024 or later"
            );
            warn(path, PRE, reason);
            "default"
        }
    })
}

/// Scores of `tokens` tokens; 0 for all where the file has none.
fn scores(meta: &Metadata, tokens: usize) -> Result<Vec<f32>> {
    let mut scores = match (meta.get(GGUF.scores), meta.i32s(GGUF.scores)) {
        (None, _) => vec![0.0; tokens],
        (_, Ok(Some(scores))) => scores.iter().map(|&score| score as f32).collect(),
        _ => meta.f32s(GGUF.scores)?.unwrap_or_default().to_vec(),
    };
    scores.truncate(tokens);
    Ok(scores)
}

/// Kinds by their numbers. What is no number of a kind, such as 0, says nothing: it is guessed by the text.
fn kinds_of(numbers: &[i32], tokens: &[String]) -> Vec<TokenKind> {
    let kind =
        |(&n, text): (&i32, &String)| TokenKind::from_number(i64::from(n)).unwrap_or_else(|| guess_kind(text, false));
    numbers.iter().zip(tokens).map(kind).collect()
}

fn guess_kind(text: &str, control: bool) -> TokenKind {
    match byte_of(text) {
        Some(_) => TokenKind::Byte,
        None if control => TokenKind::Control,
        None if is_end_text(text) || text == "</s>" => TokenKind::Control,
        None => TokenKind::Normal,
    }
}
