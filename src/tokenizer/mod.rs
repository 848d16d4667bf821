//! Text to tokens and back.
//!
//! [`spec`] says what a tokenizer is made of; [`from_gguf`] and [`from_hf_dir`] read it from model files; [`Tokenizer`] is one ready for
//! use. Encoding is that of the model's own tooling: SentencePiece's merges ([`spm`]) or the tokenizers crate ([`hf`], [`bpe`]). Decoding
//! goes token by token: each stands for fixed bytes, which [`stream`] turns into text.

pub mod bpe;
pub mod byte_tokens;
pub mod channels;
pub mod chat_template;
pub mod fim;
mod from_gguf;
mod growth;
pub mod hf;
mod hf_dir;
pub mod infill;
mod jinja;
pub mod pre_tokenizers;
pub mod sentencepiece;
pub mod spec;
pub mod special;
pub mod spm;
pub mod stream;

pub use from_gguf::{from_gguf, has_tokenizer};
pub use hf_dir::from_hf_dir;
pub use spec::{ChatSpec, ModelSpec, SpmSpec, TokenKind, TokenizerSpec};
pub use stream::{Delta, TextStream};

use crate::error::{Error, Result};
use channels::Markers;
use pre_tokenizers::{Writing, pre_tokenizer};
use special::{Piece, SpecialTexts};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

impl TokenizerSpec {
    /// Tokens in the vocabulary: the largest id plus one. `path` is the file it came from, for messages.
    ///
    /// # Errors
    /// [`Error::BadFile`] for a `tokenizer.json` that cannot be read.
    pub fn vocab_len(&self, path: &Path) -> Result<usize> {
        Ok(match &self.model {
            ModelSpec::HfJson { json } => hf::read(json, path)?.tokens.len(),
            ModelSpec::Spm(spm) => spm.tokens.len(),
            ModelSpec::Bpe(bpe) => bpe.tokens.len(),
        })
    }
}

/// Whether text that looks like a control token is encoded as that token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Special {
    /// It is: in prompts that a chat template rendered, and where a user asked for it.
    Parse,
    /// It is not: in what users wrote, where `<|im_end|>` is ten characters.
    AsText,
}

/// Bytes per token that no text exceeds.
pub const MAX_BYTES_PER_TOKEN: usize = 16;
/// Bytes of a text, at most: positions in a text are 32 bits wide in some of the encoders.
const MAX_TEXT: usize = 1 << 30;

/// A tokenizer ready for use.
#[derive(Debug)]
pub struct Tokenizer {
    path: PathBuf,
    bos: Option<u32>,
    eos: Vec<u32>,
    unk: Option<u32>,
    add_bos: bool,
    chat: ChatSpec,
    chat_template: Option<String>,
    /// The bytes that each token stands for in output, `[vocab]`.
    bytes: Table,
    /// How the vocabulary writes each token, `[vocab]`.
    texts: Table,
    /// The kind of each token, `[vocab]`.
    kinds: Vec<TokenKind>,
    /// Tokens that only [`Special::Parse`] recognises.
    specials: SpecialTexts,
    encoder: Encoder,
    drops_leading_space: bool,
    markers: Option<Markers>,
    /// Found when they are asked for first.
    fim: OnceLock<Option<fim::FimTokens>>,
}

#[derive(Debug)]
enum Encoder {
    Spm(Box<spm::Spm>),
    Pipeline(Box<hf::Encoder>),
}

/// Many short byte strings in one allocation.
#[derive(Debug, Default)]
struct Table {
    bytes: Vec<u8>,
    ends: Vec<u32>,
}

impl Table {
    fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        self.ends.push(self.bytes.len() as u32);
    }

    fn get(&self, id: u32) -> Option<&[u8]> {
        let end = *self.ends.get(id as usize)?;
        let start = if id == 0 { 0 } else { self.ends[id as usize - 1] };
        Some(&self.bytes[start as usize..end as usize])
    }
}

impl Tokenizer {
    /// Checks `spec` and prepares it for use. `path` is the file it came from, for messages.
    ///
    /// # Errors
    /// [`Error::BadFile`] that names the bad part of the spec.
    pub fn new(spec: TokenizerSpec, path: &Path) -> Result<Tokenizer> {
        spec::check(&spec, &spec::STORED, path)?;
        // A user-defined token that marks turns: conversions give added tokens that kind.
        let marks_turns = |id: u32, text: &str| spec::looks_like_control(text) || spec.eos.contains(&id);
        let (mut bytes, mut texts, mut kinds) = (Table::default(), Table::default(), Vec::new());
        let mut add = |text: &str, kind: TokenKind, of: &dyn Fn(&str, TokenKind) -> Vec<u8>| {
            let kind = spec::shown_kind(text, kind);
            texts.push(text.as_bytes());
            kinds.push(kind);
            match kind {
                // llama.cpp and transformers leave them out of text; `token_text` shows them.
                TokenKind::Control | TokenKind::Unknown => bytes.push(b""),
                _ => bytes.push(&of(text, kind)),
            }
        };
        let (encoder, drops_leading_space) = match &spec.model {
            ModelSpec::Spm(model) => {
                let bytes = |text: &str, kind| Writing::Spaced.bytes(text, kind);
                model.tokens.iter().zip(&model.kinds).for_each(|(text, &kind)| add(text, kind, &bytes));
                (Encoder::Spm(Box::new(spm::Spm::new(model, spec.unk, &marks_turns))), model.add_space_prefix)
            }
            ModelSpec::Bpe(model) => {
                let writing = pre_tokenizer(&model.pre, path)?.writing;
                let bytes = |text: &str, kind| writing.bytes(text, kind);
                model.tokens.iter().zip(&model.kinds).for_each(|(text, &kind)| add(text, kind, &bytes));
                (Encoder::Pipeline(Box::new(bpe::encoder(model, path)?)), false)
            }
            ModelSpec::HfJson { json } => {
                let vocab = hf::read(json, path)?;
                let bytes = |text: &str, kind| vocab.decoder.bytes(text, kind);
                vocab.tokens.iter().for_each(|token| add(&token.text, token.kind, &bytes));
                spec::check_ids(&spec, vocab.tokens.len(), &spec::STORED, path)?;
                (Encoder::Pipeline(Box::new(hf::encoder(json, &vocab, path)?)), vocab.decoder.drops_leading_space)
            }
        };
        if texts.bytes.len().max(bytes.bytes.len()) > u32::MAX as usize {
            return Err(Error::bad(path, "tokenizer", "the texts of the tokens have more than 4 GiB"));
        }
        let text_of = |id: u32| std::str::from_utf8(texts.get(id).unwrap_or_default()).unwrap_or_default();
        let special = |id: &u32| match kinds[*id as usize] {
            TokenKind::Control | TokenKind::Unknown => true,
            TokenKind::UserDefined => marks_turns(*id, text_of(*id)),
            _ => false,
        };
        let specials = SpecialTexts::new((0..kinds.len() as u32).filter(special).map(|id| (text_of(id), id)));
        let special_id = |text: &str| {
            let found = specials.longest_at(text.as_bytes()).filter(|&(_, len)| len == text.len());
            found.map(|(id, _)| id)
        };
        let markers = Markers::find(special_id);
        Ok(Tokenizer {
            path: path.to_owned(),
            bos: spec.bos,
            eos: spec.eos,
            unk: spec.unk,
            add_bos: spec.add_bos,
            chat: spec.chat,
            chat_template: spec.chat_template,
            bytes,
            texts,
            kinds,
            specials,
            encoder,
            drops_leading_space,
            markers,
            fim: OnceLock::new(),
        })
    }

    /// The tokens of a text, without BOS.
    ///
    /// # Errors
    /// [`Error::Usage`] for a text of more than 1 GiB, or one that normalisation makes many times as long.
    pub fn encode(&self, text: &str, special: Special) -> Result<Vec<u32>> {
        if text.len() > MAX_TEXT {
            return Err(Error::Usage(format!("a text of {} bytes; at most {MAX_TEXT} are taken", text.len())));
        }
        match (&self.encoder, special) {
            (Encoder::Pipeline(pipeline), Special::Parse) => pipeline.encode(text),
            (Encoder::Pipeline(pipeline), Special::AsText) => pipeline.encode(&self.defuse(text)),
            (Encoder::Spm(spm), Special::AsText) => {
                let mut ids = Vec::with_capacity(text.len() / 3);
                spm.encode(text, true, &mut ids);
                Ok(ids)
            }
            (Encoder::Spm(spm), Special::Parse) => {
                let mut ids = Vec::with_capacity(text.len() / 3);
                // llama.cpp puts the space at the start and after every special token, as Llama's training did.
                for piece in self.specials.split(text) {
                    match piece {
                        Piece::Text(text) => spm.encode(text, true, &mut ids),
                        Piece::Token(id) => ids.push(id),
                    }
                }
                Ok(ids)
            }
        }
    }

    /// The tokens of a prompt: BOS first if the model wants it and the text does not begin with it already (chat templates write it
    /// themselves).
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_prompt(&self, text: &str, special: Special) -> Result<Vec<u32>> {
        let mut ids = self.encode(text, special)?;
        if let Some(bos) = self.bos_if_added()
            && ids.first() != Some(&bos)
        {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// The tokens of a prompt that a chat template rendered: BOS first where the model's file asks for it in chats and the template has not
    /// written it.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`].
    pub fn encode_chat(&self, text: &str) -> Result<Vec<u32>> {
        match self.chat.begins_with_bos {
            true => self.encode_prompt(text, Special::Parse),
            false => self.encode(text, Special::Parse),
        }
    }

    /// The texts of the special tokens beside BOS and EOS, by the names that chat templates know them by.
    pub fn other_tokens(&self) -> BTreeMap<String, String> {
        let named = [("unk_token", self.unk), ("sep_token", self.chat.sep), ("pad_token", self.chat.pad)];
        let text = |id: Option<u32>| id.and_then(|id| self.token_text(id)).map(str::to_owned);
        named.into_iter().filter_map(|(name, id)| Some((name.to_owned(), text(id)?))).collect()
    }

    /// The text with an invisible character inside every control token, so that none is recognised; [`Tokenizer::encode`] takes the
    /// character out again. For text that a chat template puts beside real control tokens. Templates may trim or join such text, but cannot
    /// make it a control token again.
    pub fn defuse(&self, text: &str) -> String {
        self.specials.defuse(text)
    }

    /// A text in pieces: what only [`Special::Parse`] recognises, and the text around it.
    pub fn pieces<'a>(&self, text: &'a str) -> Vec<Piece<'a>> {
        self.specials.split(text)
    }

    /// The control tokens in a text that do not end an answer: they have no text in output.
    pub fn controls_in(&self, text: &str) -> Vec<u32> {
        let token = |piece: Piece<'_>| if let Piece::Token(id) = piece { Some(id) } else { None };
        let is_control = |id: &u32| self.token_bytes(*id).is_some_and(<[u8]>::is_empty) && !self.is_end(*id);
        self.pieces(text).into_iter().filter_map(token).filter(is_control).collect()
    }

    /// The exact bytes that a token stands for in output; empty for control tokens. `None` for an id beyond the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.bytes.get(id)
    }

    /// Gives the next token of an answer to its text. `shown`: a reader sees what it stands for; stop strings look at every token, at the
    /// names of control tokens, too.
    pub fn say(&self, text: &mut TextStream, id: u32, shown: bool) -> Delta {
        match self.token_bytes(id).unwrap_or_default() {
            [] => text.pass(self.texts.get(id).unwrap_or_default()),
            bytes if shown => text.push(bytes),
            bytes => text.pass(bytes),
        }
    }

    /// How the vocabulary writes a token (`▁the`, `Ġthe`, `<s>`): for display, not for output. `None` for an id beyond the vocabulary.
    pub fn token_text(&self, id: u32) -> Option<&str> {
        self.texts.get(id).and_then(|t| std::str::from_utf8(t).ok())
    }

    /// The kind of a token; `None` for an id beyond the vocabulary.
    pub fn token_kind(&self, id: u32) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied()
    }

    /// The text of `ids`, as a text of its own: the leading space that encoding adds is dropped. Ids beyond the vocabulary are left out;
    /// bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        String::from_utf8_lossy(&self.decode_bytes(ids)).into_owned()
    }

    /// The same as bytes, not made UTF-8.
    pub fn decode_bytes(&self, ids: &[u32]) -> Vec<u8> {
        let mut out = Vec::with_capacity(ids.len() * 4);
        let mut drop = self.drops_leading_space;
        for &id in ids {
            let mut bytes = self.token_bytes(id).unwrap_or_default();
            if bytes.is_empty() {
                continue;
            }
            if std::mem::take(&mut drop) {
                bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
            }
            out.extend_from_slice(bytes);
        }
        out
    }

    /// Whether encoding puts a space before a whole text, which decoding drops again; for [`TextStream::whole`].
    pub fn drops_leading_space(&self) -> bool {
        self.drops_leading_space
    }

    /// The file it came from, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Tokens in the vocabulary: the largest id plus one.
    pub fn vocab_len(&self) -> usize {
        self.kinds.len()
    }

    /// The token that begins a text; `None` if the model has none.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The same if prompts begin with it, else `None`.
    pub fn bos_if_added(&self) -> Option<u32> {
        self.bos.filter(|_| self.add_bos)
    }

    /// The model's own `eos_token`; `None` if it has none.
    pub fn eos(&self) -> Option<u32> {
        self.eos.first().copied()
    }

    /// The token for text that has no other; `None` if the vocabulary needs none.
    pub fn unk(&self) -> Option<u32> {
        self.unk
    }

    /// Whether this token ends a generation.
    pub fn is_end(&self, id: u32) -> bool {
        self.eos.contains(&id)
    }

    /// The tokens that mark the messages of an answer, where it has channels.
    pub fn markers(&self) -> Option<Markers> {
        self.markers
    }

    /// The tokens by which the model writes the middle of a text; `None` if it has none.
    pub fn fim_tokens(&self) -> Option<&fim::FimTokens> {
        let id_of = |name: &str| (0..self.kinds.len() as u32).find(|&id| self.texts.get(id) == Some(name.as_bytes()));
        self.fim.get_or_init(|| fim::FimTokens::find(id_of)).as_ref()
    }

    /// The model's chat template as Jinja source, unchecked; `None` if its file has none.
    pub fn chat_template(&self) -> Option<&str> {
        self.chat_template.as_deref()
    }
}
