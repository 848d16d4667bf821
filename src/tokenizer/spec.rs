//! The parts of a tokenizer as plain data that need no other file: packed model files contain it.

use super::fim;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::path::Path;

/// A complete tokenizer. Old packed files must stay readable: fields may be added with a default, never renamed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenizerSpec {
    /// The vocabulary and how text is split into tokens.
    pub model: ModelSpec,
    /// The token that begins a text; `None` if there is none.
    pub bos: Option<u32>,
    /// All tokens that end a generation (end of text, end of turn), the file's own `eos_token` first.
    pub eos: Vec<u32>,
    /// The token for text that has no other; `None` if there is none.
    pub unk: Option<u32>,
    /// Whether a prompt begins with `bos`.
    pub add_bos: bool,
    /// Whether training texts ended with `eos`; prompts never do.
    pub add_eos: bool,
    /// Jinja source, unchecked; `None` if the file has none.
    pub chat_template: Option<String>,
    /// Special tokens that only chats need.
    #[serde(default)]
    pub chat: ChatSpec,
}

/// A tokenizer without special tokens but those that the model itself names.
impl From<ModelSpec> for TokenizerSpec {
    fn from(model: ModelSpec) -> TokenizerSpec {
        TokenizerSpec {
            model,
            bos: None,
            eos: Vec::new(),
            unk: None,
            add_bos: false,
            add_eos: false,
            chat_template: None,
            chat: ChatSpec::default(),
        }
    }
}

/// Special tokens that only chats need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatSpec {
    /// Whether a chat begins with BOS even if its template writes none: in GGUF files, as in llama.cpp. transformers leaves BOS to the
    /// template.
    pub begins_with_bos: bool,
    /// `sep_token`; `None` if there is none.
    pub sep: Option<u32>,
    /// `pad_token`; `None` if there is none.
    pub pad: Option<u32>,
}

/// How text is split into tokens, by the kind of tokenizer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ModelSpec {
    /// Byte-level or SentencePiece-like BPE as a Hugging Face file describes it.
    HfJson {
        /// The whole `tokenizer.json`.
        json: String,
    },
    /// SentencePiece BPE: Llama 1 and 2, Mistral.
    Spm(SpmSpec),
    /// Byte-level BPE with a pre-tokeniser that is known by name: GGUF's "gpt2".
    Bpe(BpeSpec),
}

/// A SentencePiece BPE vocabulary and its normalisation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SpmSpec {
    /// Texts by id, with `▁` for a space; bytes as `<0x0A>`.
    pub tokens: Vec<String>,
    /// `[tokens]`, finite; of two possible merges the one with the higher score is made first.
    pub scores: Vec<f32>,
    /// `[tokens]`
    pub kinds: Vec<TokenKind>,
    /// Whether a space is put before a text, and before text that follows a special token.
    pub add_space_prefix: bool,
    /// Whether runs of spaces become one, and spaces at both ends are removed.
    pub remove_extra_whitespaces: bool,
}

/// A byte-level BPE vocabulary.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BpeSpec {
    /// Texts by id, in the characters that stand for bytes (GPT-2's `bytes_to_unicode`).
    pub tokens: Vec<String>,
    /// Pairs of tokens, `left right`; earlier ones are merged first.
    pub merges: Vec<String>,
    /// `[tokens]`
    pub kinds: Vec<TokenKind>,
    /// llama.cpp's name of the pre-tokeniser.
    pub pre: String,
}

/// SentencePiece's types of tokens, which GGUF numbers in the same way, from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TokenKind {
    /// A piece of ordinary text.
    Normal,
    /// Stands for text that has no token; has no text in output.
    Unknown,
    /// Marks the structure of a text, such as its end; has no text in output.
    Control,
    /// A text that was added to the vocabulary: it is never split, and is printed as it stands.
    UserDefined,
    /// Encoding never yields it; merges may pass through it.
    Unused,
    /// One byte, written `<0x0A>`: for text that has no other token.
    Byte,
}

impl TokenKind {
    /// The kind that SentencePiece and GGUF write as `n`, 1 to 6; `None` for other numbers.
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

/// The names that a tokenizer's parts have in the file it was read from, for messages.
pub struct Keys {
    /// Name of the token texts.
    pub tokens: &'static str,
    /// Name of the scores.
    pub scores: &'static str,
    /// Name of the token kinds.
    pub kinds: &'static str,
    /// Name of the BOS id.
    pub bos: &'static str,
    /// Name of the EOS id.
    pub eos: &'static str,
    /// Name of the id of the unknown token.
    pub unk: &'static str,
}

/// The names used for a spec out of a packed model file.
pub const STORED: Keys = Keys {
    tokens: "tokenizer tokens",
    scores: "tokenizer scores",
    kinds: "tokenizer token kinds",
    bos: "tokenizer bos",
    eos: "tokenizer eos",
    unk: "tokenizer unk",
};

/// Tokens in a vocabulary, at most. The largest in use has 262,144; with more than this the logits of one position would take 64 MiB.
pub const MAX_TOKENS: usize = 1 << 24;

/// Tokens whose text alone says that a turn is over. Conversions often leave them out of the metadata (llama.cpp keeps a similar list), and
/// a chat model would then talk to itself to the end of the context.
const END_TEXTS: [&str; 15] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|EOT|>",
    "<EOT>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
];

/// Checks everything that encoding and decoding rely on: on specs that were just read, and again on stored ones.
///
/// # Errors
/// [`Error::BadFile`] that names the bad part.
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
    if tokens.len() > MAX_TOKENS {
        let n = tokens.len();
        return Err(Error::bad(path, keys.tokens, format!("{n} tokens; at most {MAX_TOKENS} are supported")));
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

/// Checks that BOS, EOS and the unknown token are in a vocabulary of `len` tokens.
///
/// # Errors
/// [`Error::BadFile`] that names the id that is not.
pub fn check_ids(spec: &TokenizerSpec, len: usize, keys: &Keys, path: &Path) -> Result<()> {
    for (id, key) in [(spec.bos, keys.bos), (spec.unk, keys.unk)] {
        if let Some(id) = id {
            check_id(id, len, key, path)?;
        }
    }
    spec.eos.iter().try_for_each(|&id| check_id(id, len, keys.eos, path))
}

/// Says that a part of a file is not as it should be, and is left out.
pub fn warn(path: &Path, key: &str, reason: impl Into<String>) {
    tracing::warn!("{}", Error::bad(path, key, reason));
}

/// Leaves out BOS, EOS and unknown tokens that are not in a vocabulary of `len` tokens, with a warning for each: no model produces them, and
/// other programs take files that name them.
pub fn drop_unknown_ids(spec: &mut TokenizerSpec, len: usize, keys: &Keys, path: &Path) {
    let known = |id: u32, key: &str| {
        let known = (id as usize) < len;
        if !known {
            warn(path, key, format!("token {id} is not in the vocabulary of {len} tokens; it is left out"));
        }
        known
    };
    spec.bos = spec.bos.filter(|&id| known(id, keys.bos));
    spec.unk = spec.unk.filter(|&id| known(id, keys.unk));
    spec.eos.retain(|&id| known(id, keys.eos));
    spec.add_bos &= spec.bos.is_some();
}

/// Checks that the token that `key` names is in a vocabulary of `len` tokens.
///
/// # Errors
/// [`Error::BadFile`] if it is not.
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

/// The ends of a turn in OpenAI's harmony format. Where both are tokens, `<|end|>` ends a message of several in a turn, such as what the model
/// thinks before it answers.
const HARMONY_ENDS: [&str; 2] = ["<|return|>", "<|call|>"];

/// Those of a vocabulary's special tokens, ids with their texts, that end a turn.
pub fn ends_of_turns<'a>(special: impl Iterator<Item = (u32, &'a str)>) -> Vec<u32> {
    let found: Vec<(u32, &str)> = special.filter(|(_, text)| is_end_text(text)).collect();
    let is_harmony = HARMONY_ENDS.iter().all(|end| found.iter().any(|(_, text)| text == end));
    found.into_iter().filter(|&(_, text)| !is_harmony || text != "<|end|>").map(|(id, _)| id).collect()
}

/// Adds tokens whose text ends a turn ([`ends_of_turns`]) to `eos`.
pub fn add_end_texts(spec: &mut TokenizerSpec) {
    let special = |kind: TokenKind| matches!(kind, TokenKind::Control | TokenKind::UserDefined | TokenKind::Unknown);
    let (tokens, kinds) = match &spec.model {
        ModelSpec::HfJson { .. } => return,
        ModelSpec::Spm(spm) => (&spm.tokens, &spm.kinds),
        ModelSpec::Bpe(bpe) => (&bpe.tokens, &bpe.kinds),
    };
    let special = tokens.iter().zip(kinds).zip(0u32..).filter(|((_, kind), _)| special(**kind));
    spec.eos.extend(ends_of_turns(special.map(|((text, _), id)| (id, &**text))));
    drop_repeated(&mut spec.eos);
}

/// Removes repeated ids. The first stays first: it is what chat templates call `eos_token`.
pub fn drop_repeated(ids: &mut Vec<u32>) {
    let mut seen = std::collections::HashSet::new();
    ids.retain(|&id| seen.insert(id));
}

/// Whether a token of this text ends a turn or a text, such as `<|im_end|>`.
pub fn is_end_text(text: &str) -> bool {
    END_TEXTS.contains(&text)
}

/// Gemma 4's marks of thoughts and calls, which a reader of the text needs: they are shown, whatever a file says of them.
const SHOWN_MARKS: [&str; 6] =
    ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<tool_response|>", "<|\"|>"];

/// The kind of a token by its text, where its file has another.
pub fn shown_kind(text: &str, kind: TokenKind) -> TokenKind {
    if kind == TokenKind::Control && SHOWN_MARKS.contains(&text) { TokenKind::UserDefined } else { kind }
}

/// Whether a user-defined token's text is a marker of chat templates, which text from users must not become.
pub fn looks_like_control(text: &str) -> bool {
    let pipes = |bar| text.starts_with(['<', bar]) && text.contains(bar) && text.ends_with('>');
    let is_other = matches!(text, "<start_of_turn>" | "[INST]" | "[/INST]") || fim::is_name(text);
    pipes('|') || pipes('｜') || is_end_text(text) || is_other
}
