//! A tokenizer from the metadata of a GGUF file.

use super::bpe::pre_tokenizer;
use super::byte_tokens::byte_of;
use super::spec::{
    BpeSpec, ChatSpec, Keys, ModelSpec, SpmSpec, TokenKind, TokenizerSpec, add_end_texts, check, check_id, is_end_text,
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
    let vocab = tokens.len();
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
        let known = pre_tokenizer(pre, path)?;
        add_bos = add_bos.or(Some(known.add_bos));
        let merges = meta.strings("tokenizer.ggml.merges")?.ok_or_else(|| missing("tokenizer.ggml.merges"))?;
        ModelSpec::Bpe(BpeSpec { tokens, merges: merges.to_vec(), kinds, pre: pre.to_owned() })
    };
    let add_bos = bos.is_some() && add_bos.unwrap_or(true);
    // A template's variables; ids beyond the vocabulary name nothing.
    let known = |key: &str| Ok::<_, Error>(meta.u32(key)?.filter(|&id| (id as usize) < vocab));
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
            sep: known("tokenizer.ggml.seperator_token_id")?,
            pad: known("tokenizer.ggml.padding_token_id")?,
        },
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
    match byte_of(text) {
        Some(_) => TokenKind::Byte,
        None if control => TokenKind::Control,
        None if is_end_text(text) || text == "</s>" => TokenKind::Control,
        None => TokenKind::Normal,
    }
}
