//! Byte-level BPE from a token list and a merge list, with the pre-tokeniser that llama.cpp knows by name.

use super::byte_tokens::byte_char;
use super::hf::{Encoder, WORDS_KEPT};
use super::spec::{BpeSpec, TokenKind, looks_like_control};
use super::special::BREAK;
use crate::error::{Error, Result};
use std::path::Path;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::Replace;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior};

/// What a pre-tokeniser's name stands for in llama.cpp.
#[derive(Debug)]
pub struct PreTokenizer {
    /// Split the text one after the other, each working on the pieces that the one before left.
    regexes: &'static [&'static str],
    /// A word that is in the vocabulary is that token, whatever the merges say.
    ignore_merges: bool,
    /// Whether prompts begin with BOS if the file does not say.
    pub add_bos: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// o200k: contractions stay with their word, and a capital after a small letter begins another.
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";

/// The pre-tokeniser that llama.cpp calls `name`; `path` is for the message.
///
/// # Errors
/// [`Error::BadFile`] for a name whose rules are not known here. Guessing would cut words where training did not, and the model would only
/// seem a little worse.
pub fn pre_tokenizer(name: &str, path: &Path) -> Result<PreTokenizer> {
    let (regexes, ignore_merges, add_bos): (&[&str], bool, bool) = match name {
        "default" => (&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"], false, false),
        "gpt-2" | "phi-2" | "mpt" | "olmo" | "jais" | "trillion" | "exaone4" => (&[GPT2], false, false),
        "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2" => {
            (&[LLAMA3], true, true)
        }
        "dbrx" | "smaug-bpe" | "glm4" | "chatglm-bpe" => (&[LLAMA3], false, false),
        "qwen2" | "stablelm2" | "hunyuan" | "deepseek-r1-qwen" => (&[QWEN2], false, false),
        "starcoder" | "refact" | "command-r" | "smollm" | "codeshell" | "exaone" | "minerva-7b" => {
            (&[r"\p{N}", GPT2], false, false)
        }
        "falcon" => (&[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"], false, false),
        "tekken" => (&[TEKKEN], true, true),
        "gpt-4o" | "llama4" => (&[GPT4O], false, false),
        "deepseek-coder" => (&["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"], false, false),
        "deepseek-v3" => (&[r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3], false, false),
        "poro-chat" | "bloom" | "gpt3-finnish" => (&[BLOOM], false, false),
        "viking" => (&[BLOOM, r"\p{N}"], false, false),
        _ => {
            let reason = format!("pre-tokeniser \"{name}\" is not known; use the model's tokenizer.json instead");
            return Err(Error::bad(path, "tokenizer.ggml.pre", reason));
        }
    };
    Ok(PreTokenizer { regexes, ignore_merges, add_bos })
}

/// An encoder for a checked spec. Inside it tokens have numbers of their own, ordinary tokens first, so that merges cannot make the text of
/// a control token.
///
/// # Errors
/// [`Error::BadFile`] for an unknown pre-tokeniser, a missing byte token, or merges of texts that are not tokens.
pub fn encoder(spec: &BpeSpec, path: &Path) -> Result<Encoder> {
    let bad = |key: &str, reason: String| Error::bad(path, key, reason);
    let pre = pre_tokenizer(&spec.pre, path)?;
    let mut outside = Vec::with_capacity(spec.tokens.len());
    let mut vocab = Vocab::default();
    let mut added = Vec::new();
    for ((text, kind), id) in spec.tokens.iter().zip(&spec.kinds).zip(0u32..) {
        match kind {
            TokenKind::Normal if !text.is_empty() => {
                vocab.insert(text.clone(), outside.len() as u32);
                outside.push(id);
            }
            TokenKind::Control | TokenKind::UserDefined | TokenKind::Unknown if !text.is_empty() => {
                added.push((text, *kind != TokenKind::UserDefined || looks_like_control(text), id));
            }
            _ => {}
        }
    }
    // The other bytes do not occur in UTF-8.
    let mut alphabet = (0..=0xf4).filter(|b| !matches!(b, 0xc0 | 0xc1)).map(byte_char);
    if let Some(missing) = alphabet.find(|c| !vocab.contains_key(&*c.encode_utf8(&mut [0; 4]))) {
        let reason = format!("the byte token \"{missing}\" is missing, so not every text has tokens");
        return Err(bad("tokenizer.ggml.tokens", reason));
    }
    let mut merges = Vec::with_capacity(spec.merges.len());
    for (i, merge) in spec.merges.iter().enumerate() {
        // The first half may itself begin with a space (llama.cpp reads it so).
        let at = merge.char_indices().skip(1).find(|&(_, c)| c == ' ').map(|(at, _)| at);
        let Some((left, right)) = at.map(|at| (&merge[..at], &merge[at + 1..])) else {
            return Err(bad("tokenizer.ggml.merges", format!("merge {i}, \"{merge}\", is not two tokens")));
        };
        for token in [left, right, &format!("{left}{right}")] {
            if !vocab.contains_key(token) {
                let reason = format!("merge {i}, \"{merge}\", names \"{token}\", which is not a token");
                return Err(bad("tokenizer.ggml.merges", reason));
            }
        }
        merges.push((left.to_owned(), right.to_owned()));
    }
    let broken = |e| bad("tokenizer.ggml.merges", format!("{e}"));
    let model = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(pre.ignore_merges);
    let model = model.cache_capacity(WORDS_KEPT).build().map_err(broken)?;
    let mut tokenizer = tokenizers::Tokenizer::new(model);
    let mut steps: Vec<PreTokenizerWrapper> = Vec::new();
    for regex in pre.regexes {
        let pattern = SplitPattern::Regex((*regex).to_owned());
        steps.push(Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(broken)?.into());
    }
    steps.push(ByteLevel::new(false, false, false).into());
    tokenizer.with_pre_tokenizer(Some(Sequence::new(steps)));
    tokenizer.with_normalizer(Some(Replace::new(BREAK.to_string(), "").map_err(broken)?)).map_err(broken)?;
    let tokens = added.iter().map(|(text, special, _)| AddedToken::from(text.as_str(), *special).normalized(false));
    tokenizer.add_tokens(tokens).map_err(broken)?;
    outside.extend(added.iter().map(|(_, _, id)| id));
    Ok(Encoder { tokenizer, outside: Some(outside), may_grow: false })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_regex_compiles() {
        let names =
            "default gpt-2 llama-bpe qwen2 starcoder falcon tekken gpt-4o deepseek-coder deepseek-v3 bloom viking";
        for name in names.split(' ') {
            for regex in pre_tokenizer(name, Path::new("x")).unwrap().regexes {
                let pattern = SplitPattern::Regex((*regex).to_owned());
                Split::new(pattern, SplitDelimiterBehavior::Isolated, false).unwrap_or_else(|e| panic!("{name}: {e}"));
            }
        }
    }

    /// What the tokenizers library makes of o200k's published expression.
    #[test]
    fn words_of_gpt_4o_end_where_those_of_its_training_did() {
        use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};
        let cases = [
            ("We'VE seen JSONParser's aBC", "We'VE| seen| JSONParser's| a|BC"),
            ("HelloWorld 12345,67", "Hello|World| |123|45|,|67"),
            ("a//b\n\n  x</p>\n/\n", "a|//|b|\n\n| | x|</|p|>\n/\n"),
            ("Ünïcode ǅ中文字 ЖУК жук'll", "Ünïcode| ǅ中文字| ЖУК| жук'll"),
        ];
        let pattern = SplitPattern::Regex(GPT4O.to_owned());
        let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).unwrap();
        for (text, wanted) in cases {
            let mut words = PreTokenizedString::from(text);
            split.pre_tokenize(&mut words).unwrap();
            let words = words.get_splits(OffsetReferential::Original, OffsetType::Byte);
            let words: Vec<&str> = words.iter().map(|(word, ..)| *word).collect();
            assert_eq!(words.join("|"), wanted, "{text:?}");
        }
    }
}
