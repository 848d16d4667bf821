//! Tokenizers as they are published, made small: what converters write and leave out, and what the tokenizers library and llama.cpp make of
//! it.

use super::{GgufFile, fixture, refusal, scores};
use dynamicinfer::Error;
use dynamicinfer::tokenizer::byte_tokens::byte_char;
use dynamicinfer::tokenizer::pre_tokenizers::{names, pre_tokenizer};
use dynamicinfer::tokenizer::{ModelSpec, Special, TokenKind, Tokenizer, TokenizerSpec};
use serde::Deserialize;
use std::path::Path;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, SplitDelimiterBehavior};

const KINDS: &str = "tokenizer.ggml.token_type";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";

fn kinds(numbers: &[i32]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
}

/// A byte-level vocabulary of these texts, without the bytes of `missing`, as a GGUF names it.
pub(super) fn byte_level(pre: Option<&str>, missing: &[u8], words: &[&str], merges: &[&str]) -> GgufFile {
    let bytes = (0..=255).filter(|byte| !missing.contains(byte)).map(|byte| byte_char(byte).to_string());
    let tokens: Vec<String> = words.iter().map(|word| (*word).to_owned()).chain(bytes).collect();
    let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
    let file = GgufFile::default().str("tokenizer.ggml.model", "gpt2").str("general.architecture", "llama");
    let file = file.strings("tokenizer.ggml.tokens", &tokens).strings("tokenizer.ggml.merges", merges);
    match pre {
        Some(pre) => file.str("tokenizer.ggml.pre", pre),
        None => file,
    }
}

fn ready(file: GgufFile) -> Tokenizer {
    Tokenizer::new(file.read().unwrap(), Path::new("m.gguf")).unwrap()
}

fn texts_of(tokenizer: &Tokenizer, text: &str, special: Special) -> Vec<String> {
    let ids = tokenizer.encode(text, special).unwrap();
    ids.iter().map(|&id| tokenizer.token_text(id).unwrap().to_owned()).collect()
}

/// All SmolLM lack control characters, and were refused. Such a byte has no token, and what stands around it is cut as if it were there.
#[test]
fn a_byte_without_a_token_gives_none() {
    let tokenizer = ready(byte_level(Some("smollm"), &[4, 0xf5], &["ab", "!!"], &["a b", "! !"]));
    assert_eq!(texts_of(&tokenizer, "ab\x04a", Special::AsText), ["ab", "a"]);
    assert_eq!(texts_of(&tokenizer, "\x04", Special::Parse), Vec::<String>::new());
    assert_eq!(tokenizer.decode(&tokenizer.encode("é ab\x05", Special::AsText).unwrap()), "é ab\x05");
    // As the tokenizers library has it: within a word the neighbours of what is missing are neighbours.
    assert_eq!(texts_of(&tokenizer, "!\x04!", Special::AsText), ["!!"]);
    let no_bytes: Vec<u8> = (0..=255).collect();
    let nothing =
        Tokenizer::new(byte_level(Some("smollm"), &no_bytes, &["word"], &[]).read().unwrap(), Path::new("m.gguf"));
    assert_eq!(refusal(nothing), "m.gguf: tokenizer.ggml.tokens: no byte has a token, so no text has tokens");
}

/// The same vocabulary in a tokenizer.json, where it says itself how texts are cut.
#[test]
fn a_tokenizer_json_without_some_bytes_gives_the_tokens_of_the_gguf() {
    let missing = [0u8, 4, 9, 0xa9, 0xf0, 0xf5];
    let words = ["ab", "!!", "Ġa"];
    let bytes = (0..=255).filter(|byte| !missing.contains(byte)).map(|byte| byte_char(byte).to_string());
    let texts = words.iter().map(|word| (*word).to_owned()).chain(bytes);
    let vocab: serde_json::Map<String, serde_json::Value> =
        texts.enumerate().map(|(id, text)| (text, id.into())).collect();
    let level =
        serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let json = serde_json::json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "post_processor": null, "decoder": level,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": true}, level]},
        "model": {"type": "BPE", "unk_token": null, "byte_fallback": false, "vocab": vocab,
            "merges": ["a b", "! !", "Ġ a"]},
    });
    let json = super::read_json_dir(&json.to_string()).unwrap();
    let gguf = ready(byte_level(Some("smollm"), &missing, &words, &["a b", "! !", "Ġ a"]));
    assert_eq!(texts_of(&json, "ab\x04a", Special::AsText), ["ab", "a"]);
    assert_eq!(texts_of(&json, "\x04", Special::Parse), Vec::<String>::new());
    // A letter that lacks one of its bytes keeps the others.
    assert_eq!(json.encode("é", Special::AsText).unwrap().len(), 1);
    let pieces = ["ab", "\x04", "a", " ", "!", "\t", "é", "😀", "\0", "7", "\n", "☃", "\x05"];
    let mut prng = dynamicinfer::prng::Prng::new(52);
    for _ in 0..2000 {
        let text: String = (0..prng.below(12)).map(|_| pieces[prng.below(pieces.len() as u64) as usize]).collect();
        for special in [Special::AsText, Special::Parse] {
            let ids = json.encode(&text, special).unwrap();
            assert_eq!(ids, gguf.encode(&text, special).unwrap(), "{text:?}");
            let said: Vec<u8> = text.bytes().filter(|byte| !missing.contains(byte)).collect();
            assert_eq!(json.decode_bytes(&ids), said, "{text:?}");
        }
    }
}

#[derive(Deserialize)]
struct Words {
    texts: Vec<String>,
    rules: Vec<Rule>,
}

#[derive(Deserialize)]
struct Rule {
    names: Vec<String>,
    /// `[texts][words]`, in letters.
    words: Vec<Vec<usize>>,
}

/// Names of supported architectures were refused, `deepseek-llm` and `qwen35` among them.
#[test]
fn every_pre_tokeniser_of_llama_cpp_cuts_texts_as_the_tokenizers_library_does() {
    let expected: Words = serde_json::from_slice(&std::fs::read(fixture("words.json")).unwrap()).unwrap();
    let mut seen = Vec::new();
    for rule in &expected.rules {
        for name in &rule.names {
            let rules = pre_tokenizer(name, Path::new("m.gguf")).unwrap();
            for (text, lengths) in expected.texts.iter().zip(&rule.words) {
                let mut words = PreTokenizedString::from(text.as_str());
                for regex in rules.regexes {
                    let pattern = SplitPattern::Regex((*regex).to_owned());
                    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).unwrap();
                    split.pre_tokenize(&mut words).unwrap();
                }
                let words = words.get_splits(OffsetReferential::Original, OffsetType::Byte);
                let words: Vec<&str> = words.iter().map(|(word, ..)| *word).collect();
                let mut rest = text.chars();
                let wanted: Vec<String> = lengths.iter().map(|&n| rest.by_ref().take(n).collect()).collect();
                assert_eq!(words, wanted, "{name}");
            }
            seen.push(name.as_str());
        }
    }
    seen.sort_unstable();
    let mut all: Vec<&str> = names().collect();
    all.sort_unstable();
    assert_eq!(seen, all);
}

/// Numbers whose digits are counted from their end are counted in linear time.
#[test]
fn a_number_of_a_million_digits_is_cut_in_linear_time() {
    let digits = "1234567890".repeat(100_000);
    for name in ["superbpe", "afmoe", "tiny_aya"] {
        let tokenizer = ready(byte_level(Some(name), &[], &[], &[]));
        let start = dynamicinfer::clock::computed();
        assert_eq!(tokenizer.encode(&digits, Special::AsText).unwrap().len(), digits.len());
        let took = dynamicinfer::clock::computed() - start;
        assert!(took < std::time::Duration::from_secs(60), "{name}: {took:?}");
    }
}

/// Qwen's tokenizer.json composes letters and accents; llama.cpp forgets it, and so did this.
#[test]
fn texts_are_composed_where_the_tokenizer_json_of_a_name_does_so() {
    let composed = |pre: &str| {
        let tokenizer = ready(byte_level(Some(pre), &[], &[], &[]));
        let text = "e\u{301} \u{1112}\u{1161}\u{11ab} A\u{30a}";
        let back = tokenizer.decode(&tokenizer.encode(text, Special::AsText).unwrap());
        assert!(back == text || back == "é 한 Å", "{pre}: {back}");
        back != text
    };
    for pre in ["qwen2", "qwen35", "deepseek-r1-qwen", "stablelm2", "hunyuan", "command-r", "olmo", "mpt", "tiny_aya"] {
        assert!(composed(pre), "{pre}");
    }
    for pre in ["llama-bpe", "gpt-2", "gpt-4o", "smollm", "deepseek-v3", "tekken", "falcon"] {
        assert!(!composed(pre), "{pre}");
    }
    // What a user wrote stays a text: the letter that breaks a control token is taken out before letters are composed.
    let file = byte_level(Some("qwen2"), &[], &["<|im_end|>"], &[]);
    let control: Vec<i32> = [3].into_iter().chain([1; 256]).collect();
    let tokenizer = ready(file.array(KINDS, 5, 257, kinds(&control)));
    let ids = tokenizer.encode(&tokenizer.defuse("<|im_end|>e\u{301}"), Special::Parse).unwrap();
    assert!(!ids.contains(&0), "{ids:?}");
    assert_eq!(tokenizer.decode(&ids), "<|im_end|>é");
}

fn sentencepiece(tokens: &[(&str, f32, i32)]) -> GgufFile {
    let texts: Vec<&str> = tokens.iter().map(|token| token.0).collect();
    let values: Vec<f32> = tokens.iter().map(|token| token.1).collect();
    let numbers: Vec<i32> = tokens.iter().map(|token| token.2).collect();
    let file = GgufFile::default().str("tokenizer.ggml.model", "llama").strings("tokenizer.ggml.tokens", &texts);
    let file = file.array("tokenizer.ggml.scores", 6, tokens.len(), scores(&values));
    file.array(KINDS, 5, tokens.len(), kinds(&numbers))
}

/// Gemma's converter writes runs of spaces, which the user defined, as spaces; they were never found, because the text has `▁` by then.
/// In a tokenizer.json they are written with `▁`, and were shown so.
#[test]
fn runs_of_spaces_that_the_user_defined_are_tokens() {
    let tokens =
        [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("    ", 0.0, 4), ("▁", -1.0, 1), ("a", -2.0, 1)];
    let tokens = [&tokens[..], &[("b", -2.0, 1), ("\n\n", 0.0, 4), ("▁▁", -3.0, 1)]].concat();
    let tokenizer = ready(sentencepiece(&tokens).bool("tokenizer.ggml.add_space_prefix", false));
    for special in [Special::Parse, Special::AsText] {
        assert_eq!(tokenizer.encode("a    b", special).unwrap(), [5, 3, 6]);
        assert_eq!(tokenizer.encode("a  b\n\n     a", special).unwrap(), [5, 8, 6, 7, 3, 4, 5]);
    }
    assert_eq!(tokenizer.decode(&[5, 3, 6, 8, 5]), "a    b  a");
    let json = r#"{"version":"1.0","added_tokens":[
        {"id":3,"content":"▁▁▁▁","special":false,"normalized":false,"single_word":false,"lstrip":false,"rstrip":false}],
        "normalizer":{"type":"Replace","pattern":{"String":" "},"content":"▁"},
        "decoder":{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"▁"},"content":" "},
        {"type":"ByteFallback"},{"type":"Fuse"}]},
        "model":{"type":"BPE","vocab":{"a":0,"b":1,"▁":2,"▁▁▁▁":3,"▁▁":4},"merges":["▁ ▁","▁▁ ▁▁"]}}"#;
    let tokenizer = super::read_json_dir(json).unwrap();
    assert_eq!(tokenizer.encode("a    b", Special::AsText).unwrap(), [0, 3, 1]);
    assert_eq!(tokenizer.decode(&[0, 3, 1]), "a    b");
}

/// A token that a user added is shown as it stands, also where the letters of others stand for bytes.
#[test]
fn the_letters_of_an_added_token_are_no_bytes() {
    let json = r#"{"version":"1.0","added_tokens":[
        {"id":2,"content":"né","special":false,"normalized":false,"single_word":false,"lstrip":false,"rstrip":false}],
        "decoder":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":false},
        "model":{"type":"BPE","vocab":{"a":0,"b":1},"merges":[]}}"#;
    let tokenizer = super::read_json_dir(json).unwrap();
    assert_eq!(tokenizer.encode("anéb", Special::AsText).unwrap(), [0, 2, 1]);
    assert_eq!(tokenizer.decode(&[0, 2, 1]), "anéb");
}

/// Headers that llama.cpp takes, and what it makes of them.
#[test]
fn oddities_of_headers_are_taken_as_llama_cpp_takes_them() {
    let plain = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("▁a", -1.0, 1), ("▁", -2.0, 1), ("a", -2.0, 1)];
    let read = |file: GgufFile| -> TokenizerSpec { file.read().unwrap() };
    let ids = |spec: &TokenizerSpec| (spec.bos, spec.eos.clone(), spec.unk, spec.add_bos);
    // SentencePiece's own numbers where the file names none, or one that is no token.
    assert_eq!(ids(&read(sentencepiece(&plain))), (Some(1), vec![2], Some(0), true));
    let odd = sentencepiece(&plain).u32(BOS, u32::MAX).u32(EOS, 6).u32("tokenizer.ggml.unknown_token_id", 7);
    assert_eq!(ids(&read(odd.u32("tokenizer.ggml.eot_token_id", 99))), (Some(1), vec![2], Some(0), true));
    assert_eq!(ids(&read(sentencepiece(&plain[..2]))), (Some(1), vec![], Some(0), true));
    // Byte-level vocabularies have none, but for Falcon's.
    let bytes = |word: &str, kind: i32| {
        let words: Vec<String> = (0..11).map(|i| format!("w{i}")).chain([word.to_owned()]).collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let numbers: Vec<i32> = (0..268).map(|i| if i == 11 { kind } else { 1 }).collect();
        byte_level(Some("gpt-2"), &[], &words, &[]).array(KINDS, 5, 268, kinds(&numbers))
    };
    assert_eq!(ids(&read(bytes("<|endoftext|>", 3))), (Some(11), vec![11], None, false));
    assert_eq!(ids(&read(bytes(",,", 1).u32(BOS, u32::MAX).u32(EOS, 268))), (None, vec![], None, false));
    let begins = byte_level(Some("llama-bpe"), &[], &[], &[]).u32(BOS, u32::MAX);
    assert_eq!(ids(&read(begins)), (None, vec![], None, false));
    // Types that are none are guessed by the text; what there is too much is left out.
    let untyped =
        sentencepiece(&[("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 0), ("a", 0.0, 7), ("<0x41>", 0.0, 0)]);
    let tokenizer = ready(untyped);
    let kinds_read: Vec<String> = (2..5).map(|id| format!("{:?}", tokenizer.token_kind(id).unwrap())).collect();
    assert_eq!(kinds_read, ["Control", "Normal", "Byte"]);
    // Without scores all merges are equal, and the leftmost is made first.
    let file = GgufFile::default().str("tokenizer.ggml.model", "llama");
    let file = file.strings("tokenizer.ggml.tokens", &["<unk>", "<s>", "</s>", "aa", "a"]);
    let tokenizer =
        ready(file.bool("tokenizer.ggml.add_space_prefix", false).array(KINDS, 5, 6, kinds(&[2, 3, 3, 1, 1, 1])));
    assert_eq!(tokenizer.encode("aaa", Special::AsText).unwrap(), [3, 4]);
    let file = GgufFile::default().str("tokenizer.ggml.model", "llama").bool("tokenizer.ggml.add_space_prefix", false);
    let file = file.strings("tokenizer.ggml.tokens", &["<unk>", "<s>", "</s>", "ab", "bc", "a", "b", "c"]);
    let tokenizer = ready(file.array("tokenizer.ggml.scores", 5, 9, kinds(&[0, 0, 0, 1, 2, 0, 0, 0, 7])));
    assert_eq!(tokenizer.encode("abc", Special::AsText).unwrap(), [5, 4]);
    assert_eq!(tokenizer.token_kind(1), Some(TokenKind::Control));
}

/// Merges that make what is no token are steps to others; what ends as a step is taken apart again.
#[test]
fn merges_that_name_no_token_are_steps() {
    let tokenizer = ready(byte_level(Some("gpt-2"), &[], &["abc"], &["a b", "ab c", "x y", "alone", "q "]));
    assert_eq!(texts_of(&tokenizer, "abc", Special::AsText), ["abc"]);
    assert_eq!(texts_of(&tokenizer, "abd", Special::AsText), ["a", "b", "d"]);
    assert_eq!(texts_of(&tokenizer, "xyabcxy", Special::AsText), ["x", "y", "abc", "x", "y"]);
}

/// Gemma's runs of line breaks are tokens that the user defined, and merges make them, too.
#[test]
fn a_token_that_the_user_defined_may_be_what_merges_make() {
    let words = ["ab", "<x>", "abc"];
    let file = byte_level(Some("gpt-2"), &[], &words, &["a b", "ab c"]);
    let numbers: Vec<i32> = [4, 4, 1].into_iter().chain([1; 256]).collect();
    let tokenizer = ready(file.array(KINDS, 5, numbers.len(), kinds(&numbers)));
    assert_eq!(texts_of(&tokenizer, "ab<x>d", Special::Parse), ["ab", "<x>", "d"]);
    assert_eq!(texts_of(&tokenizer, "d<x>ab", Special::AsText), ["d", "<x>", "ab"]);
}

#[test]
fn a_file_without_a_pre_tokeniser_has_that_of_its_architecture_or_the_default() {
    let pre = |file: GgufFile| match file.read().unwrap().model {
        ModelSpec::Bpe(bpe) => bpe.pre,
        other => panic!("{other:?}"),
    };
    assert_eq!(pre(byte_level(None, &[], &[], &[])), "default");
    assert_eq!(pre(byte_level(Some(""), &[], &[], &[])), "default");
    let tokenizer = ready(byte_level(None, &[], &["123", "12"], &["1 2", "12 3"]));
    assert_eq!(texts_of(&tokenizer, "12345,6", Special::AsText), ["123", "4", "5", ",", "6"]);
}

/// Gemini's vocabulary has a token for a tab, and no `<0x09>`: the other bytes are still tokens. A text without a token and without a token for
/// each of its bytes is unknown. As the tokenizers library has it.
#[test]
fn bytes_are_tokens_where_one_of_them_is_missing() {
    let bytes: Vec<String> =
        (0..256).filter(|byte| ![0x09, 0xA9].contains(byte)).map(|b| format!("<0x{b:02X}>")).collect();
    let words = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("\t", 0.0, 1), ("a", 0.0, 1)];
    let tokens: Vec<(&str, f32, i32)> = words.into_iter().chain(bytes.iter().map(|b| (b.as_str(), 0.0, 6))).collect();
    let tokenizer = ready(sentencepiece(&tokens).bool("tokenizer.ggml.add_space_prefix", false));
    assert_eq!(texts_of(&tokenizer, "a\tè", Special::AsText), ["a", "\t", "<0xC3>", "<0xA8>"]);
    assert_eq!(texts_of(&tokenizer, "aéè", Special::AsText), ["a", "<unk>", "<0xC3>", "<0xA8>"]);
}

/// SentencePiece's way of writing, with merges: Gemma 4 and its like.
#[test]
fn a_vocabulary_with_merges_may_be_written_as_sentencepiece_writes() -> Result<(), Error> {
    let bytes: Vec<String> = (0..256).map(|byte| format!("<0x{byte:02X}>")).collect();
    let words = ["<pad>", "<eos>", "<bos>", "<unk>", "▁", "a", "b", "▁a", "\n", "\n\n", "ab"];
    let tokens: Vec<&str> = words.into_iter().chain(bytes.iter().map(String::as_str)).collect();
    let numbers: Vec<i32> = [3, 3, 3, 2].into_iter().chain([1; 7]).chain([6; 256]).collect();
    let file = GgufFile::default().str("tokenizer.ggml.model", "gemma4").strings("tokenizer.ggml.tokens", &tokens);
    let file = file.strings("tokenizer.ggml.merges", &["▁ a", "a b"]).array(KINDS, 5, tokens.len(), kinds(&numbers));
    let spec = file.u32(BOS, 2).u32(EOS, 1).u32("tokenizer.ggml.unknown_token_id", 3).read()?;
    assert!(spec.add_bos);
    let tokenizer = Tokenizer::new(spec, Path::new("m.gguf"))?;
    let ids = tokenizer.encode("a a\n\n\nabé", Special::AsText)?;
    let texts: Vec<&str> = ids.iter().map(|&id| tokenizer.token_text(id).unwrap()).collect();
    assert_eq!(texts, ["a", "▁a", "\n\n", "\n", "ab", "<0xC3>", "<0xA9>"]);
    assert_eq!(tokenizer.decode(&ids), "a a\n\n\nabé");
    // Its marks of turns end an answer, and those of thoughts are shown; neither is made of a user's text.
    let marks = ["<turn|>", "<|channel>", "<channel|>"];
    let tokens: Vec<&str> = tokens.into_iter().chain(marks).collect();
    let numbers: Vec<i32> = numbers.into_iter().chain([3; 3]).collect();
    let file = GgufFile::default().str("tokenizer.ggml.model", "gemma4").strings("tokenizer.ggml.tokens", &tokens);
    let file = file.strings("tokenizer.ggml.merges", &["▁ a", "a b"]).array(KINDS, 5, tokens.len(), kinds(&numbers));
    let spec = file.u32(BOS, 2).u32(EOS, 1).read()?;
    let [turn, open, close] = [0, 1, 2].map(|i| (tokens.len() - 3 + i) as u32);
    assert_eq!(spec.eos, [1, turn]);
    let tokenizer = Tokenizer::new(spec, Path::new("m.gguf"))?;
    assert_eq!(tokenizer.decode(&[open, 5, close, turn]), "<|channel>a<channel|>");
    assert_eq!(tokenizer.encode("<|channel>a", Special::Parse)?, [open, 5]);
    assert!(!tokenizer.encode("<|channel>a", Special::AsText)?.contains(&open));
    Ok(())
}

/// Llama 2's first files look for special tokens in the normalised text, `▁</s>`: there `</s>` right behind an answer, where every template
/// writes it, is four letters, and a text behind `<s>` has no `▁`. SentencePiece, which trained these models, transformers' own Llama class and
/// llama.cpp find them wherever they stand, and begin what follows with `▁`; so do later files, which say `normalized: false`, and so does
/// this program with either file. With the old one it differs from the tokenizers library in texts that hold special tokens, and in no others.
#[test]
fn special_tokens_are_found_in_the_text_itself_whatever_a_file_says_of_normalisation() {
    let json = std::fs::read_to_string(fixture("spm/tokenizer.json")).unwrap();
    let mut old: serde_json::Value = serde_json::from_str(&json).unwrap();
    for token in old["added_tokens"].as_array_mut().unwrap() {
        assert_eq!((&token["normalized"], &token["special"]), (&false.into(), &true.into()));
        token["normalized"] = true.into();
    }
    let (old, new) = (super::read_json_dir(&old.to_string()).unwrap(), super::read_json_dir(&json).unwrap());
    super::check_fixture(&old, "spm/expected_hf.json", super::Reference::Transformers);
    let of_gguf = super::from_gguf("spm.gguf");
    for text in ["<s>king</s>", "<s>[INST] a king [/INST] a queen</s><s>[INST] x", "a</s>b", "</s></s>", " </s> a"] {
        let ids = old.encode(text, Special::Parse).unwrap();
        assert_eq!(ids, new.encode(text, Special::Parse).unwrap(), "{text}");
        assert_eq!(ids, of_gguf.encode(text, Special::Parse).unwrap(), "{text}");
        assert_eq!(ids.iter().filter(|&&id| id == 2).count(), text.matches("</s>").count(), "{text}");
    }
}
