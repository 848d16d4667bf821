//! What a tokenizer is made of, in a form that stands alone: it is stored inside packed model files.

use crate::error::{Error, Result};
use crate::formats::gguf::Metadata;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::path::Path;

pub use super::hf_dir::from_hf_dir;

/// A tokenizer, complete. Old packed files must stay readable: fields may be added with a default, never renamed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenizerSpec {
    pub model: ModelSpec,
    pub bos: Option<u32>,
    /// All tokens that end a generation: end of text, end of turn. The file's own `eos_token` first.
    pub eos: Vec<u32>,
    pub unk: Option<u32>,
    /// Whether a prompt begins with `bos`.
    pub add_bos: bool,
    /// Whether training texts ended with `eos`; prompts never do.
    pub add_eos: bool,
    /// Jinja source, unchecked.
    pub chat_template: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ModelSpec {
    /// A whole `tokenizer.json`.
    HfJson { json: String },
    /// SentencePiece BPE: Llama 1 and 2, Mistral.
    Spm(SpmSpec),
    /// Byte-level BPE whose pre-tokeniser is known by name: GGUF's "gpt2".
    Bpe(BpeSpec),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SpmSpec {
    pub tokens: Vec<String>,
    /// [tokens], finite.
    pub scores: Vec<f32>,
    /// [tokens]
    pub kinds: Vec<TokenKind>,
    pub add_space_prefix: bool,
    pub remove_extra_whitespaces: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BpeSpec {
    pub tokens: Vec<String>,
    /// `left right`, the first merged first.
    pub merges: Vec<String>,
    /// [tokens]
    pub kinds: Vec<TokenKind>,
    /// llama.cpp's name of the pre-tokeniser.
    pub pre: String,
}

/// SentencePiece's types, which GGUF numbers the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TokenKind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl TokenizerSpec {
    /// Tokens in the vocabulary: the largest id and one.
    ///
    /// # Errors
    /// [`Error::BadFile`] for a `tokenizer.json` that is not understood.
    pub fn vocab_len(&self, path: &Path) -> Result<usize> {
        Ok(match &self.model {
            ModelSpec::HfJson { json } => super::hf::read(json, path)?.tokens.len(),
            ModelSpec::Spm(spm) => spm.tokens.len(),
            ModelSpec::Bpe(bpe) => bpe.tokens.len(),
        })
    }
}

impl TokenKind {
    pub fn from_number(n: i64) -> Option<TokenKind> {
        Some(match n {
            1 => TokenKind::Normal,
            2 => TokenKind::Unknown,
            3 => TokenKind::Control,
            4 => TokenKind::UserDefined,
            5 => TokenKind::Unused,
            6 => TokenKind::Byte,
            _ => return None,
        })
    }
}

/// How the parts are called where they come from, for messages.
pub struct Keys {
    pub tokens: &'static str,
    pub scores: &'static str,
    pub kinds: &'static str,
    pub bos: &'static str,
    pub eos: &'static str,
    pub unk: &'static str,
}

pub const STORED: Keys = Keys {
    tokens: "tokenizer tokens",
    scores: "tokenizer scores",
    kinds: "tokenizer token kinds",
    bos: "tokenizer bos",
    eos: "tokenizer eos",
    unk: "tokenizer unk",
};

const GGUF: Keys = Keys {
    tokens: "tokenizer.ggml.tokens",
    scores: "tokenizer.ggml.scores",
    kinds: "tokenizer.ggml.token_type",
    bos: "tokenizer.ggml.bos_token_id",
    eos: "tokenizer.ggml.eos_token_id",
    unk: "tokenizer.ggml.unknown_token_id",
};

/// The largest vocabulary in use has 262,144 tokens; logits of more than this would be 64 MiB a position.
pub const MOST_TOKENS: usize = 1 << 24;

/// Tokens whose text alone says that a turn is over. Conversions often leave them out of the metadata (llama.cpp keeps
/// the same kind of list): a chat model would then talk to itself to the end of the context.
const END_TEXTS: [&str; 12] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|EOT|>",
    "<EOT>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
];

/// The tokenizer of a GGUF file.
///
/// # Errors
/// [`Error::BadFile`] with the metadata key: missing, of the wrong type, of the wrong length, out of range, or a kind of
/// tokenizer that is not supported.
pub fn from_gguf(meta: &Metadata, path: &Path) -> Result<TokenizerSpec> {
    let missing = |key: &str| Error::bad(path, key, "the file has no such key, so it has no tokenizer");
    let model = meta.str("tokenizer.ggml.model")?.ok_or_else(|| missing("tokenizer.ggml.model"))?;
    if !matches!(model, "llama" | "gpt2") {
        let known = "supported are \"llama\" (SentencePiece BPE) and \"gpt2\" (byte-level BPE)";
        return Err(Error::bad(
            path,
            "tokenizer.ggml.model",
            format!("tokenizer \"{model}\" is not supported; {known}"),
        ));
    }
    let tokens = meta.strings(GGUF.tokens)?.ok_or_else(|| missing(GGUF.tokens))?.to_vec();
    let bos = meta.u32(GGUF.bos)?;
    let unk = meta.u32(GGUF.unk)?;
    let mut eos = Vec::new();
    for key in [GGUF.eos, "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
        if let Some(id) = meta.u32(key)? {
            check_id(id, tokens.len(), key, path)?;
            eos.push(id);
        }
    }
    let kinds = match meta.i32s(GGUF.kinds)? {
        Some(numbers) => gguf_kinds(numbers, path)?,
        None => (0..).zip(&tokens).map(|(id, text)| guess_kind(text, [bos, unk].contains(&Some(id)))).collect(),
    };
    let mut add_bos = meta.bool("tokenizer.ggml.add_bos_token")?;
    let model = if model == "llama" {
        ModelSpec::Spm(SpmSpec {
            scores: meta.f32s(GGUF.scores)?.ok_or_else(|| missing(GGUF.scores))?.to_vec(),
            tokens,
            kinds,
            add_space_prefix: meta.bool("tokenizer.ggml.add_space_prefix")?.unwrap_or(true),
            remove_extra_whitespaces: meta.bool("tokenizer.ggml.remove_extra_whitespaces")?.unwrap_or(false),
        })
    } else {
        let pre = match meta.str("tokenizer.ggml.pre")? {
            Some(pre) => pre,
            None => pre_of_architecture(meta.str("general.architecture")?.unwrap_or_default(), path)?,
        };
        let known = super::bpe::pre_tokenizer(pre, path)?;
        add_bos = add_bos.or(Some(known.add_bos));
        let merges = meta.strings("tokenizer.ggml.merges")?.ok_or_else(|| missing("tokenizer.ggml.merges"))?;
        ModelSpec::Bpe(BpeSpec { tokens, merges: merges.to_vec(), kinds, pre: pre.to_owned() })
    };
    let add_bos = bos.is_some() && add_bos.unwrap_or(true);
    let mut spec = TokenizerSpec {
        model,
        bos,
        eos,
        unk,
        add_bos,
        add_eos: meta.bool("tokenizer.ggml.add_eos_token")?.unwrap_or(false),
        chat_template: meta.str("tokenizer.chat_template")?.map(str::to_owned),
    };
    check(&spec, &GGUF, path)?;
    add_end_texts(&mut spec);
    Ok(spec)
}

/// Files from before llama.cpp's `tokenizer.ggml.pre` (May 2024), PowerInfer's among them: the architecture decides where
/// all its models share one pre-tokeniser.
fn pre_of_architecture(architecture: &str, path: &Path) -> Result<&'static str> {
    match architecture {
        "falcon" => Ok("falcon"),
        "opt" | "gpt2" | "mpt" => Ok("gpt-2"),
        "starcoder" => Ok("starcoder"),
        _ => Err(Error::bad(
            path,
            "tokenizer.ggml.pre",
            format!(
                "the file does not name its pre-tokeniser and architecture \"{architecture}\" does not imply one; \
                     convert the model again with a converter from May 2024 or later"
            ),
        )),
    }
}

fn gguf_kinds(numbers: &[i32], path: &Path) -> Result<Vec<TokenKind>> {
    let kind = |(id, &n): (usize, &i32)| {
        TokenKind::from_number(i64::from(n))
            .ok_or_else(|| Error::bad(path, GGUF.kinds, format!("token {id} has type {n}; types are 1 to 6")))
    };
    numbers.iter().enumerate().map(kind).collect()
}

fn guess_kind(text: &str, control: bool) -> TokenKind {
    match super::spm::byte_of(text) {
        Some(_) => TokenKind::Byte,
        None if control => TokenKind::Control,
        None if END_TEXTS.contains(&text) || text == "</s>" => TokenKind::Control,
        None => TokenKind::Normal,
    }
}

/// Everything that encoding and decoding rely on. Run on specs that were just read and again on stored ones.
pub fn check(spec: &TokenizerSpec, keys: &Keys, path: &Path) -> Result<()> {
    let (tokens, kinds) = match &spec.model {
        // Its vocabulary is checked when it is parsed.
        ModelSpec::HfJson { .. } => return Ok(()),
        ModelSpec::Spm(spm) => (&spm.tokens, &spm.kinds),
        ModelSpec::Bpe(bpe) => (&bpe.tokens, &bpe.kinds),
    };
    if tokens.is_empty() {
        return Err(Error::bad(path, keys.tokens, "the vocabulary is empty"));
    }
    if tokens.len() > MOST_TOKENS {
        let n = tokens.len();
        return Err(Error::bad(path, keys.tokens, format!("{n} tokens; at most {MOST_TOKENS} are supported")));
    }
    check_len(kinds.len(), tokens.len(), keys.kinds, keys.tokens, path)?;
    if let ModelSpec::Spm(spm) = &spec.model {
        check_len(spm.scores.len(), tokens.len(), keys.scores, keys.tokens, path)?;
        if let Some(id) = spm.scores.iter().position(|s| !s.is_finite()) {
            return Err(Error::bad(path, keys.scores, format!("the score of token {id} is {}", spm.scores[id])));
        }
        let all_bytes = spm.kinds.iter().filter(|&&k| k == TokenKind::Byte).count() >= 256;
        if !all_bytes && spec.unk.is_none() {
            let reason = "there is neither a token for every byte nor an unknown token, so not every text has tokens";
            return Err(Error::bad(path, keys.unk, reason));
        }
    }
    let mut ids = HashMap::with_capacity(tokens.len());
    for ((text, kind), id) in tokens.iter().zip(kinds).zip(0u32..) {
        if text.is_empty() || *kind == TokenKind::Unused {
            continue;
        }
        if let Some(other) = ids.insert(text.as_str(), id) {
            return Err(Error::bad(path, keys.tokens, format!("tokens {other} and {id} are both \"{text}\"")));
        }
    }
    check_ids(spec, tokens.len(), keys, path)
}

/// That the named tokens are in a vocabulary of `len`.
pub fn check_ids(spec: &TokenizerSpec, len: usize, keys: &Keys, path: &Path) -> Result<()> {
    for (id, key) in [(spec.bos, keys.bos), (spec.unk, keys.unk)] {
        if let Some(id) = id {
            check_id(id, len, key, path)?;
        }
    }
    spec.eos.iter().try_for_each(|&id| check_id(id, len, keys.eos, path))
}

fn check_id(id: u32, len: usize, key: &str, path: &Path) -> Result<()> {
    if (id as usize) < len {
        return Ok(());
    }
    Err(Error::bad(path, key, format!("token {id} is not in the vocabulary of {len} tokens")))
}

fn check_len(len: usize, tokens: usize, key: &str, tokens_key: &str, path: &Path) -> Result<()> {
    if len == tokens {
        return Ok(());
    }
    Err(Error::bad(path, key, format!("{len} values, but {tokens_key} has {tokens}")))
}

/// Adds the tokens that end a turn by their text.
pub fn add_end_texts(spec: &mut TokenizerSpec) {
    let special = |kind: TokenKind| matches!(kind, TokenKind::Control | TokenKind::UserDefined | TokenKind::Unknown);
    let (tokens, kinds) = match &spec.model {
        ModelSpec::HfJson { .. } => return,
        ModelSpec::Spm(spm) => (&spm.tokens, &spm.kinds),
        ModelSpec::Bpe(bpe) => (&bpe.tokens, &bpe.kinds),
    };
    let found = tokens.iter().zip(kinds).zip(0u32..).filter(|((t, k), _)| special(**k) && is_end_text(t));
    spec.eos.extend(found.map(|(_, id)| id));
    drop_repeated(&mut spec.eos);
}

/// The first stays first: it is the one that chat templates call `eos_token`.
pub fn drop_repeated(ids: &mut Vec<u32>) {
    let mut seen = std::collections::HashSet::new();
    ids.retain(|&id| seen.insert(id));
}

pub fn is_end_text(text: &str) -> bool {
    END_TEXTS.contains(&text)
}

/// Whether a user-defined token's text is a marker of chat templates, which a user's text must not become.
pub fn looks_like_control(text: &str) -> bool {
    let pipes = |bar| text.starts_with(['<', bar]) && text.contains(bar) && text.ends_with('>');
    pipes('|') || pipes('｜') || is_end_text(text) || matches!(text, "<start_of_turn>" | "[INST]" | "[/INST]")
}
