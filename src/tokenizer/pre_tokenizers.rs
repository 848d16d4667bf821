//! How byte-level tokenizers normalise a text and cut it into words, by the names that llama.cpp has for it (`tokenizer.ggml.pre`).
//!
//! Source: the list is that of llama.cpp's `llama-vocab.cpp` of October 2026. A regex is written as the models' own `tokenizer.json` has it
//! where that is known, because llama.cpp replaces what its regex engine lacks: categories of letters, contractions that ignore case, runs
//! that do not backtrack. NFC is llama.cpp's omission: transformers builds the tokenizers of Qwen, GPT-NeoX and Cohere with it.

use super::byte_tokens::{byte_of, token_bytes};
use super::spec::TokenKind;
use super::spm::SPACE;
use crate::error::{Error, Result};
use std::path::Path;

/// How a vocabulary writes the pieces of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writing {
    /// Each byte as a character (GPT-2's `bytes_to_unicode`).
    Bytes,
    /// As SentencePiece does: as text with `▁` for a space, and what has no token as bytes, `<0x0A>`.
    Spaced,
    /// As text, and what has no token as bytes, `<0x0A>`.
    Text,
}

impl Writing {
    /// The bytes that a token stands for in output.
    pub fn bytes(self, text: &str, kind: TokenKind) -> Vec<u8> {
        match (self, kind, byte_of(text)) {
            (Writing::Bytes, TokenKind::UserDefined, _) => text.into(),
            (Writing::Bytes, ..) => token_bytes(text),
            (_, TokenKind::Byte, Some(byte)) => vec![byte],
            (Writing::Spaced, ..) => text.replace(SPACE, " ").into_bytes(),
            (Writing::Text, ..) => text.into(),
        }
    }
}

/// What a pre-tokeniser's name stands for.
#[derive(Debug)]
pub struct PreTokenizer {
    /// Split the text one after the other, each working on the pieces that the one before left.
    pub regexes: &'static [&'static str],
    /// A word that is in the vocabulary is that token, whatever the merges say.
    pub ignore_merges: bool,
    /// Whether prompts begin with BOS if the file does not say.
    pub add_bos: bool,
    /// Whether texts are normalised to NFC first.
    pub nfc: bool,
    /// How the vocabulary writes pieces.
    pub writing: Writing,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Qwen 3.5: marks such as vowel signs stay with their letters.
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const MINICPM5: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Line breaks are words of their own.
const SEED_CODER: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const BAILING: &str =
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
/// Qwen2's without contractions: Turkish suffixes follow an apostrophe, too.
const UFAKZEKA: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Words of several letters with spaces between are one.
const EXAONE_MOE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";
/// White space goes in powers of two.
const JAIS2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// o200k: contractions stay with their word, and a capital after a small letter begins another.
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// o200k with a word for each digit, behind a rule for scripts.
const YOUTU: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// o200k with Han letters apart from all others.
const KIMI: &str = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const SPARK: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"##;
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";
/// Chinese and Japanese, as `deepseek-v3` cuts them out.
const CJK: &str = "[一-龥぀-ゟ゠-ヿ]+";
/// Chinese and Korean, as `deepseek-llm` cuts them out.
const HAN: &str = "[一-龥ࠀ-一가-퟿]+";
/// Letters of scripts with capitals, as `deepseek-llm` lists them.
const CASED: &str = concat!(
    "\\s?[A-Za-z\u{b5}\u{c0}-\u{d6}\u{d8}-\u{f6}\u{f8}-\u{1ba}\u{1bc}-\u{1bf}\u{1c4}-\u{293}\u{295}-\u{2af}",
    "\u{370}-\u{373}\u{376}\u{377}\u{37b}-\u{37d}\u{37f}\u{386}\u{388}-\u{38a}\u{38c}\u{38e}-\u{3a1}",
    "\u{3a3}-\u{3f5}\u{3f7}-\u{481}\u{48a}-\u{52f}\u{531}-\u{556}\u{10a0}-\u{10c5}\u{13a0}-\u{13f5}",
    "\u{13f8}-\u{13fd}\u{1c90}-\u{1cba}\u{1cbd}-\u{1cbf}\u{1d00}-\u{1d2b}\u{1d6b}-\u{1d77}\u{1d79}-\u{1d9a}",
    "\u{1e00}-\u{1f15}\u{1f18}-\u{1f1d}\u{1f20}-\u{1f45}\u{1f48}-\u{1f4d}\u{1f50}-\u{1f57}\u{1f59}\u{1f5b}",
    "\u{1f5d}\u{1f5f}-\u{1f7d}\u{1f80}-\u{1fb4}\u{1fb6}-\u{1fbc}\u{1fbe}\u{1fc2}-\u{1fc4}\u{1fc6}-\u{1fcc}",
    "\u{1fd0}-\u{1fd3}\u{1fd6}-\u{1fdb}\u{1fe0}-\u{1fec}\u{1ff2}-\u{1ff4}\u{1ff6}-\u{1ffc}\u{2102}\u{2107}",
    "\u{210a}-\u{2113}\u{2115}\u{2119}-\u{211d}\u{2124}\u{2126}\u{2128}\u{212a}-\u{212d}\u{212f}-\u{2134}",
    "\u{2139}\u{213c}-\u{213f}\u{2145}-\u{2149}\u{214e}\u{2183}\u{2184}\u{2c00}-\u{2c7b}\u{2c7e}-\u{2ce4}",
    "\u{2ceb}-\u{2cee}\u{2cf2}\u{2cf3}\u{a640}-\u{a66d}\u{a680}-\u{a69b}\u{a722}-\u{a76f}\u{a771}-\u{a787}",
    "\u{a78b}-\u{a78e}\u{ab70}-\u{abbf}\u{fb00}-\u{fb06}\u{fb13}-\u{fb17}\u{ff21}-\u{ff3a}\u{ff41}-\u{ff5a}",
    "\u{10400}-\u{1044f}\u{104b0}-\u{104d3}\u{104d8}-\u{104fb}\u{10c80}-\u{10cb2}\u{10cc0}-\u{10cf2}",
    "\u{118a0}-\u{118df}\u{1e900}-\u{1e943}]+",
);
/// Scripts without spaces between words, as `afmoe` cuts them out.
const NO_SPACES: &str = concat!(
    "[\u{4e00}-\u{9fff}\u{3400}-\u{4dbf}\u{f900}-\u{faff}\u{3040}-\u{309f}\u{30a0}-\u{30ff}\u{ff65}-\u{ff9f}",
    "\u{2f00}-\u{2fdf}\u{e40}-\u{e7f}\u{e80}-\u{eff}\u{1780}-\u{17ff}\u{1000}-\u{109f}\u{aa60}-\u{aa7f}",
    "\u{a9e0}-\u{a9ff}\u{ac00}-\u{d7af}\u{1100}-\u{11ff}]+",
);
/// Digits in threes, counted from the end of a number: 1 234 567. How far the end is looked for is bounded, because every group looks for it
/// again: of a number of more than 123 digits the last ones are counted so.
const THREES_FROM_THE_END: &str = r"\p{N}{1,3}(?=(?:\p{N}{3}){0,40}(?!\p{N}))|\p{N}{3}";
const LINES: &str = "[^\n]+|[\n]+";
/// A digit is a word.
const DIGIT: &str = r"\p{N}";

const PLAIN: PreTokenizer =
    PreTokenizer { regexes: &[GPT2], ignore_merges: false, add_bos: false, nfc: false, writing: Writing::Bytes };
const QWEN: PreTokenizer = PreTokenizer { regexes: &[QWEN2], ..PLAIN };

/// All names, with what they stand for; a text that several models have in common is in one row.
const ALL: &[(&[&str], PreTokenizer)] = &[
    (&["default"], PreTokenizer { regexes: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"], ..PLAIN }),
    (
        &[
            "gpt-2",
            "phi-2",
            "jina-es",
            "jina-de",
            "jina-v2-es",
            "jina-v2-de",
            "jina-v1-en",
            "jina-v2-code",
            "roberta-bpe",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
        ],
        PLAIN,
    ),
    // GPT-NeoX's vocabulary.
    (&["mpt", "olmo"], PreTokenizer { nfc: true, ..PLAIN }),
    (
        &["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"],
        PreTokenizer { regexes: &[LLAMA3], ignore_merges: true, add_bos: true, ..PLAIN },
    ),
    (&["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"], PreTokenizer { regexes: &[LLAMA3], ..PLAIN }),
    (&["minicpm5"], PreTokenizer { regexes: &[r"\p{N}{1,3}", MINICPM5], ignore_merges: true, ..PLAIN }),
    (&["jais-2"], PreTokenizer { regexes: &[JAIS2], ..PLAIN }),
    // Qwen's vocabulary, or its tokenizer with another.
    (&["qwen2", "deepseek-r1-qwen", "f2llmv2", "stablelm2", "hunyuan"], PreTokenizer { nfc: true, ..QWEN }),
    (&["megrez", "kormo", "solar-open", "grok-2"], QWEN),
    (&["qwen35"], PreTokenizer { regexes: &[QWEN35], nfc: true, ..PLAIN }),
    (&["ufakzeka"], PreTokenizer { regexes: &[UFAKZEKA], ..PLAIN }),
    (&["laguna"], PreTokenizer { regexes: &[LINES, QWEN2], ..PLAIN }),
    (&["seed-coder"], PreTokenizer { regexes: &[SEED_CODER], ..PLAIN }),
    (&["bailingmoe", "bailingmoe2", "llada-moe"], PreTokenizer { regexes: &[BAILING], ..PLAIN }),
    (&["exaone-moe"], PreTokenizer { regexes: &[EXAONE_MOE], ..PLAIN }),
    (
        &["starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"],
        PreTokenizer { regexes: &[DIGIT, GPT2], ..PLAIN },
    ),
    (&["command-r"], PreTokenizer { regexes: &[DIGIT, GPT2], nfc: true, ..PLAIN }),
    (&["falcon"], PreTokenizer { regexes: &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"], ..PLAIN }),
    (&["tekken"], PreTokenizer { regexes: &[TEKKEN], ignore_merges: true, add_bos: true, ..PLAIN }),
    (&["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"], PreTokenizer { regexes: &[GPT4O], ..PLAIN }),
    (&["granite-embed-multi-97m"], PreTokenizer { regexes: &[GPT4O], ignore_merges: true, ..PLAIN }),
    (
        &["tiny_aya", "cohere2moe"],
        PreTokenizer {
            regexes: &[r"\d{1,3}(?=(?:\d{3}){0,40}(?![\p{L}\p{M}\p{N}\p{Pc}]))", GPT4O],
            nfc: true,
            ..PLAIN
        },
    ),
    (
        &["youtu"],
        PreTokenizer {
            regexes: &["[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+", YOUTU],
            ignore_merges: true,
            ..PLAIN
        },
    ),
    (&["kimi-k2"], PreTokenizer { regexes: &[KIMI], ..PLAIN }),
    (&["superbpe"], PreTokenizer { regexes: &[r"\p{N}+", r"(?=(?:\d{3}){1,40}(?!\d))"], ..PLAIN }),
    (&["afmoe"], PreTokenizer { regexes: &[THREES_FROM_THE_END, NO_SPACES, DEEPSEEK3], ..PLAIN }),
    (
        &["chameleon"],
        PreTokenizer {
            regexes: &[
                "<sentinel:[0-9]+>",
                "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                "([\t\n]|    |  )",
                DIGIT,
                r"[\p{P}!-/:-@\[-`{-~]",
                GPT2,
            ],
            add_bos: true,
            ..PLAIN
        },
    ),
    (
        &["deepseek-llm"],
        PreTokenizer {
            regexes: &["[\r\n]", CASED, "\\s?[!-/:-~！-／：-～‘-‟\u{3000}-。]+", r"\s+$", HAN, r"\p{N}+"],
            ..PLAIN
        },
    ),
    (&["deepseek-coder"], PreTokenizer { regexes: &["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN, DIGIT], ..PLAIN }),
    (
        &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        PreTokenizer { regexes: &[r"\p{N}{1,3}", CJK, DEEPSEEK3], ..PLAIN },
    ),
    (&["spark2_5"], PreTokenizer { regexes: &[r"\p{N}{1,3}", CJK, SPARK, DIGIT], ..PLAIN }),
    (&["poro-chat", "bloom", "gpt3-finnish"], PreTokenizer { regexes: &[BLOOM], ..PLAIN }),
    (&["viking"], PreTokenizer { regexes: &[BLOOM, DIGIT], ..PLAIN }),
    (
        &["gemma4", "granite-embed-multi-311m"],
        PreTokenizer { regexes: &[LINES], add_bos: true, writing: Writing::Spaced, ..PLAIN },
    ),
    (&["sarvam-moe"], PreTokenizer { regexes: &[LINES], writing: Writing::Spaced, ..PLAIN }),
    (&["whitespace"], PreTokenizer { regexes: &[r"\S+"], writing: Writing::Text, ..PLAIN }),
];

/// All names that are known.
pub fn names() -> impl Iterator<Item = &'static str> {
    ALL.iter().flat_map(|(names, _)| names.iter().copied())
}

/// The pre-tokeniser that llama.cpp calls `name`; `path` is for the message.
///
/// # Errors
/// [`Error::BadFile`] for a name whose rules are not known here. Guessing would cut words where training did not, and the model would only
/// seem a little worse.
pub fn pre_tokenizer(name: &str, path: &Path) -> Result<&'static PreTokenizer> {
    let found = ALL.iter().find(|(names, _)| names.contains(&name)).map(|(_, rules)| rules);
    found.ok_or_else(|| {
        let reason = format!("pre-tokeniser \"{name}\" is not known; use the model's tokenizer.json instead");
        Error::bad(path, "tokenizer.ggml.pre", reason)
    })
}
