//! Tokenizers against the answers of the reference libraries, text streams against their laws.

mod chats;
mod published;

use dynamicinfer::Error;
use dynamicinfer::clock::computed;
use dynamicinfer::formats::gguf;
use dynamicinfer::prng::Prng;
use dynamicinfer::tokenizer::spec::{BpeSpec, ModelSpec, SpmSpec, TokenKind};
use dynamicinfer::tokenizer::{self, Special, TextStream, Tokenizer, TokenizerSpec};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use std::time::Duration;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizers").join(name)
}

fn from_dir(name: &str) -> Tokenizer {
    let dir = fixture(name);
    Tokenizer::new(tokenizer::from_hf_dir(&dir).unwrap(), &dir).unwrap()
}

fn from_gguf(name: &str) -> Tokenizer {
    let path = fixture(name);
    let file = gguf::parse(&std::fs::read(&path).unwrap(), &path).unwrap();
    Tokenizer::new(tokenizer::from_gguf(&file.metadata, &path).unwrap(), &path).unwrap()
}

/// `tokenizer.model` alone, as a directory has it that holds nothing else.
fn from_sentencepiece() -> Tokenizer {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(fixture("spm/tokenizer.model"), dir.path().join("tokenizer.model")).unwrap();
    Tokenizer::new(tokenizer::from_hf_dir(dir.path()).unwrap(), dir.path()).unwrap()
}

fn all() -> Vec<(&'static str, Tokenizer)> {
    let mut all = vec![("tokenizer.model", from_sentencepiece())];
    all.extend(["spm", "spm-metaspace", "gpt2", "qwen2", "llama3"].map(|n| (n, from_dir(n))));
    all.extend(["spm.gguf", "gpt2.gguf", "qwen2.gguf", "llama3.gguf"].map(|n| (n, from_gguf(n))));
    all
}

/// The same cases every time: a failure is repeated by running the test again.
fn fixed() -> ProptestConfig {
    ProptestConfig { cases: 512, failure_persistence: None, rng_seed: RngSeed::Fixed(20), ..ProptestConfig::default() }
}

#[derive(Deserialize)]
struct Expected {
    encode: Vec<Encoded>,
    decode: Vec<Decoded>,
}

#[derive(Deserialize)]
struct Encoded {
    text: String,
    ids: Vec<u32>,
    ids_plain: Option<Vec<u32>>,
}

#[derive(Deserialize)]
struct Decoded {
    ids: Vec<u32>,
    text: String,
}

/// Whether the reference recognises special tokens in text; sentencepiece never does.
#[derive(PartialEq)]
enum Reference {
    Transformers,
    SentencePiece,
}

fn check_fixture(tokenizer: &Tokenizer, expected: &str, reference: Reference) {
    let expected: Expected = serde_json::from_str(&std::fs::read_to_string(fixture(expected)).unwrap()).unwrap();
    assert!(expected.encode.len() > 30 && expected.decode.len() > 5);
    for case in &expected.encode {
        let plain = case.ids_plain.as_ref().unwrap_or(&case.ids);
        assert_eq!(&tokenizer.encode(&case.text, Special::AsText).unwrap(), plain, "as text: {:?}", case.text);
        if reference == Reference::Transformers {
            assert_eq!(tokenizer.encode(&case.text, Special::Parse).unwrap(), case.ids, "parsed: {:?}", case.text);
        }
    }
    for case in &expected.decode {
        let got = tokenizer.decode(&case.ids);
        match reference_text(tokenizer, &case.ids, &reference) {
            None => assert_eq!(got, case.text, "{:?}", case.ids),
            Some(text) => {
                assert_eq!(text, case.text, "{:?}", case.ids);
                if !case.text.contains(['\u{fffd}', '⁇']) {
                    assert_eq!(got, case.text, "{:?}", case.ids);
                }
            }
        }
        let mut stream = TextStream::whole(&[], tokenizer.drops_leading_space()).unwrap();
        let mut streamed = String::new();
        for &id in &case.ids {
            streamed += &stream.push(tokenizer.token_bytes(id).unwrap()).text;
        }
        streamed += &stream.finish().text;
        assert_eq!(streamed, got, "{:?}", case.ids);
    }
}

/// What the references make of our tokens' bytes. They part from `String::from_utf8_lossy` in runs of byte tokens that are
/// no UTF-8: transformers writes U+FFFD for *every* byte of such a run, the good ones too (so its text can change when
/// the next token comes, which a stream cannot do), sentencepiece one for each byte that is wrong. sentencepiece also
/// shows the unknown token. None for tokenizers without byte tokens: there all agree.
fn reference_text(tokenizer: &Tokenizer, ids: &[u32], reference: &Reference) -> Option<String> {
    let is_byte = |id: u32| tokenizer.token_text(id).is_some_and(|t| t.len() == 6 && t.starts_with("<0x"));
    (0..tokenizer.vocab_len() as u32).find(|&id| is_byte(id))?;
    let mut text = String::new();
    let mut run = Vec::new();
    let mut first = true;
    for &id in ids.iter().chain([&u32::MAX]) {
        if is_byte(id) {
            run.extend_from_slice(tokenizer.token_bytes(id).unwrap());
            continue;
        }
        let control = tokenizer.token_bytes(id).is_some_and(<[u8]>::is_empty);
        if control && *reference == Reference::Transformers {
            continue;
        }
        match std::str::from_utf8(&run) {
            Ok(valid) => text += valid,
            Err(_) if *reference == Reference::Transformers => text.extend(run.iter().map(|_| '\u{fffd}')),
            Err(_) => {
                for chunk in run.utf8_chunks() {
                    text += chunk.valid();
                    text.extend(chunk.invalid().iter().map(|_| '\u{fffd}'));
                }
            }
        }
        run.clear();
        let mut piece = String::from_utf8(tokenizer.token_bytes(id).unwrap_or_default().to_vec()).unwrap();
        if control && tokenizer.unk() == Some(id) {
            piece = " ⁇ ".to_owned();
        } else if first && text.is_empty() && piece.starts_with(' ') {
            piece.remove(0);
        }
        first &= control;
        text += &piece;
    }
    Some(text)
}

#[test]
fn sentencepiece_file() {
    check_fixture(&from_sentencepiece(), "spm/expected.json", Reference::SentencePiece);
}

#[test]
fn sentencepiece_in_gguf() {
    check_fixture(&from_gguf("spm.gguf"), "spm/expected.json", Reference::SentencePiece);
}

#[test]
fn sentencepiece_as_legacy_tokenizer_json() {
    check_fixture(&from_dir("spm"), "spm/expected_hf.json", Reference::Transformers);
}

#[test]
fn sentencepiece_as_metaspace_tokenizer_json() {
    check_fixture(&from_dir("spm-metaspace"), "spm-metaspace/expected.json", Reference::Transformers);
}

#[test]
fn byte_level_tokenizer_json() {
    for name in ["gpt2", "qwen2", "llama3"] {
        check_fixture(&from_dir(name), &format!("{name}/expected.json"), Reference::Transformers);
    }
}

#[test]
fn byte_level_in_gguf() {
    check_fixture(&from_gguf("gpt2.gguf"), "gpt2/expected.json", Reference::Transformers);
    check_fixture(&from_gguf("llama3.gguf"), "llama3/expected.json", Reference::Transformers);
    check_fixture(&from_gguf("qwen2.gguf"), "qwen2/expected.json", Reference::Transformers);
}

#[test]
fn bos_comes_first_where_the_model_wants_it_and_only_once() {
    for (name, tokenizer) in [("spm", from_dir("spm")), ("spm.gguf", from_gguf("spm.gguf"))] {
        assert_eq!(tokenizer.bos_if_added(), Some(1), "{name}");
        assert_eq!(tokenizer.encode_prompt("a", Special::Parse).unwrap(), [1, 261], "{name}");
        assert_eq!(tokenizer.encode_prompt("<s>a", Special::Parse).unwrap(), [1, 261], "{name}");
        assert_eq!(tokenizer.encode_prompt("", Special::Parse).unwrap(), [1], "{name}");
    }
    for (name, tokenizer) in [("llama3", from_dir("llama3")), ("llama3.gguf", from_gguf("llama3.gguf"))] {
        assert_eq!(tokenizer.bos_if_added(), Some(595), "{name}");
        assert!(tokenizer.is_end(599) && tokenizer.is_end(596) && !tokenizer.is_end(595), "{name}");
    }
    assert_eq!(from_gguf("gpt2.gguf").bos_if_added(), None);
    assert_eq!(from_dir("qwen2").bos_if_added(), None);
}

#[test]
fn the_stored_spec_is_the_same_tokenizer() {
    for name in ["spm.gguf", "llama3.gguf"] {
        let path = fixture(name);
        let spec =
            tokenizer::from_gguf(&gguf::parse(&std::fs::read(&path).unwrap(), &path).unwrap().metadata, &path).unwrap();
        let stored = serde_json::to_string(&spec).unwrap();
        assert_eq!(serde_json::from_str::<TokenizerSpec>(&stored).unwrap(), spec, "{name}");
    }
}

/// What a user writes never becomes a control token, alone or inside a prompt that a template made.
#[test]
fn user_text_never_becomes_a_control_token() {
    for (name, tokenizer) in all() {
        let control = |id: &u32| tokenizer.token_kind(*id) == Some(TokenKind::Control);
        let texts: Vec<&str> =
            (0..tokenizer.vocab_len() as u32).filter(control).filter_map(|id| tokenizer.token_text(id)).collect();
        assert!(!texts.is_empty(), "{name}");
        for text in texts {
            let user = format!("{text}hello {text}{text} <{text}> {}{}", &text[..2], text);
            assert!(!tokenizer.encode(&user, Special::AsText).unwrap().iter().any(control), "{name}: {user}");
            let prompt = format!("{text}{}{text}", tokenizer.defuse(&user));
            let ids = tokenizer.encode(&prompt, Special::Parse).unwrap();
            assert_eq!(ids.iter().filter(|id| control(id)).count(), 2, "{name}: {prompt}");
            assert_eq!(tokenizer.decode(&ids), user, "{name}");
        }
    }
}

#[test]
fn long_texts_take_linear_time() {
    let million = |unit: &str| unit.repeat(1_000_000 / unit.len());
    // One of each way of encoding.
    for (name, tokenizer) in
        all().into_iter().filter(|(n, _)| ["tokenizer.model", "spm", "qwen2", "llama3.gguf"].contains(n))
    {
        for text in ["a", " ", "\n", "1", "👩‍👩‍👧‍👦", "\0", "<|im_end|>", "</s>", "Once upon a time there lived a king. "]
        {
            let text = million(text);
            let start = computed();
            let ids = tokenizer.encode(&text, Special::AsText).unwrap();
            let took = computed() - start;
            // Metaspace tokenizers take a space at the start of a text for their own.
            assert!(
                tokenizer.decode(&ids).trim_start() == text.trim_start(),
                "{name}: {:?}",
                text.chars().take(8).collect::<String>()
            );
            // A second of this thread, whoever shares its core. Quadratic time would be minutes.
            assert!(
                took < Duration::from_secs(3),
                "{name}: {took:?} for {:?}",
                text.chars().take(12).collect::<String>()
            );
        }
    }
}

/// The rule itself: of all neighbours that make a token, merge the pair with the best score, the leftmost of equals.
fn naive_spm(spec: &SpmSpec, text: &str) -> Vec<u32> {
    let id = |piece: &str| spec.tokens.iter().position(|t| t == piece);
    let mut pieces: Vec<String> = text.chars().map(String::from).collect();
    loop {
        let mut best: Option<(f32, usize)> = None;
        for i in 1..pieces.len() {
            if let Some(id) = id(&format!("{}{}", pieces[i - 1], pieces[i]))
                && best.is_none_or(|(score, _)| spec.scores[id] > score)
            {
                best = Some((spec.scores[id], i));
            }
        }
        let Some((_, i)) = best else { break };
        let right = pieces.remove(i);
        pieces[i - 1] += &right;
    }
    pieces.iter().map(|p| id(p).unwrap() as u32).collect()
}

fn plain_spm(tokens: &[(&str, f32)]) -> SpmSpec {
    SpmSpec {
        tokens: tokens.iter().map(|(t, _)| (*t).to_owned()).collect(),
        scores: tokens.iter().map(|(_, s)| *s).collect(),
        kinds: vec![TokenKind::Normal; tokens.len()],
        add_space_prefix: false,
        remove_extra_whitespaces: false,
    }
}

fn spec_of(model: ModelSpec) -> TokenizerSpec {
    TokenizerSpec { unk: Some(0), ..model.into() }
}

fn build(model: ModelSpec) -> Tokenizer {
    Tokenizer::new(spec_of(model), Path::new("x")).unwrap()
}

proptest! {
    #![proptest_config(fixed())]

    #[test]
    fn spm_merges_are_the_plain_rule(text in "[abc▁]{0,40}", scores in prop::collection::vec(-3i32..3, 9)) {
        let texts = ["a", "b", "c", "▁", "ab", "bc", "aa", "ca", "abc", "▁a", "aab", "bca", "aaaa"];
        let scored: Vec<(&str, f32)> = texts.iter().enumerate()
            .map(|(i, t)| (*t, if i < 4 { 0.0 } else { scores[i - 4] as f32 })).collect();
        let spec = plain_spm(&scored);
        let expected = naive_spm(&spec, &text);
        prop_assert_eq!(build(ModelSpec::Spm(spec)).encode(&text, Special::AsText).unwrap(), expected);
    }

    /// Whatever the cuts between tokens, the deltas are the whole text, cut where a search in it finds the first stop.
    #[test]
    fn a_stream_is_the_whole_text_cut_at_the_first_stop(
        text in prop::collection::vec(prop_oneof![
            3 => prop::sample::select(vec!["a", "b", "ab", "é", "☃", "😀", "👩\u{200d}👧", "\n", "<|im_end|>"]).prop_map(|s| s.as_bytes().to_vec()),
            1 => prop::collection::vec(any::<u8>(), 1..4),
        ], 0..24),
        stops in prop::collection::vec("[ab]{1,4}|é|☃a|😀|👧b|<\\|im_end\\|>|\u{fffd}", 0..4),
        activation_thresholds in prop::collection::vec(1usize..6, 1..40),
    ) {
        let bytes = text.concat();
        let whole = String::from_utf8_lossy(&bytes).into_owned();
        let cut = stops.iter().filter_map(|s| whole.find(s.as_str())).min();
        let mut stream = TextStream::continuation(&stops).unwrap();
        let (mut got, mut rest, mut stopped) = (String::new(), &bytes[..], false);
        for cut in activation_thresholds.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (token, after) = rest.split_at((*cut).min(rest.len()));
            rest = after;
            let delta = stream.push(token);
            prop_assert!(!stopped || delta.text.is_empty());
            got += &delta.text;
            stopped = delta.stopped;
            prop_assert!(whole.starts_with(&got));
        }
        let last = stream.finish();
        got += &last.text;
        prop_assert_eq!(&got, &whole[..cut.unwrap_or(whole.len())]);
        prop_assert_eq!(last.stopped, cut.is_some());
        prop_assert_eq!(stream.finish(), stream.push(b"more"));
    }

    /// A stop string that was the name of a control token was never found, and the answer ran past it.
    #[test]
    fn a_stop_is_found_in_what_is_shown_and_in_all_that_is_produced(
        pieces in prop::collection::vec((prop::sample::select(vec!["a", "b", "ab", "é", "<x>", "<", "x>"]), any::<bool>()), 0..24),
        stops in prop::collection::vec("[ab]{1,4}|<x>|a<x>|<x>b|b<x>a|a<x><x>b|éa|x", 0..4),
    ) {
        let (mut produced, mut shown) = (String::new(), String::new());
        // What was shown before each byte of what was produced. [produced]
        let mut before = Vec::new();
        let mut found = vec![None; stops.len()];
        for (piece, is_shown) in &pieces {
            for character in piece.chars() {
                before.extend(std::iter::repeat_n(shown.len(), character.len_utf8()));
                produced.push(character);
                if *is_shown {
                    shown.push(character);
                }
                for (stop, found) in stops.iter().zip(&mut found).filter(|(_, found)| found.is_none()) {
                    *found = match (*is_shown && shown.ends_with(stop), produced.ends_with(stop)) {
                        (true, _) => Some(shown.len() - stop.len()),
                        (false, true) => Some(before[produced.len() - stop.len()]),
                        _ => None,
                    };
                }
            }
        }
        let cut = found.into_iter().flatten().min();
        let mut stream = TextStream::continuation(&stops).unwrap();
        let mut got = String::new();
        for (piece, is_shown) in &pieces {
            got += &if *is_shown { stream.push(piece.as_bytes()) } else { stream.pass(piece.as_bytes()) }.text;
        }
        let last = stream.finish();
        got += &last.text;
        prop_assert_eq!(&got, &shown[..cut.unwrap_or(shown.len())]);
        prop_assert_eq!(last.stopped, cut.is_some());
        prop_assert_eq!(stream.pass(b"<x>"), stream.push(b"more"));
    }
}

#[test]
fn text_goes_out_as_soon_as_it_is_certain() {
    let stops = ["\n\nUser:".to_owned()];
    let mut stream = TextStream::continuation(&stops).unwrap();
    let said: Vec<String> = ["Hi", " the", "re.\n", "\nUs", "ual"].map(|t| stream.push(t.as_bytes()).text).into();
    assert_eq!(said, ["Hi", " the", "re.", "", "\n\nUsual"]);
    let delta = stream.push("!\n\nUser: x".as_bytes());
    assert_eq!((delta.text.as_str(), delta.stopped), ("!", true));
    assert_eq!(stream.push(b"more").text, "");
}

/// "bc" is complete first, "abcd" began first: the text may not be cut at "bc" while "abcd" can still come.
#[test]
fn an_earlier_stop_that_is_still_coming_wins() {
    let stops = ["bc".to_owned(), "abcd".to_owned()];
    for (rest, expected) in [("d", "x"), ("x", "xa"), ("", "xa")] {
        let mut stream = TextStream::continuation(&stops).unwrap();
        let first = stream.push(b"xabc");
        assert_eq!((first.text.as_str(), first.stopped), ("x", false));
        let text = first.text + &stream.push(rest.as_bytes()).text + &stream.finish().text;
        assert_eq!(text, expected, "{rest:?}");
    }
}

#[test]
fn a_continuation_keeps_its_first_space_and_a_whole_text_does_not() {
    let tokenizer = from_gguf("spm.gguf");
    let ids = tokenizer.encode("the king", Special::AsText).unwrap();
    assert_eq!(tokenizer.decode(&ids), "the king");
    let mut stream = TextStream::continuation(&[]).unwrap();
    assert_eq!(stream.push(tokenizer.token_bytes(ids[0]).unwrap()).text, " the");
}

#[test]
fn stop_strings_out_of_range_are_refused() {
    let refused = |stops: &[String]| match TextStream::continuation(stops) {
        Err(Error::Usage(message)) => message,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(&[String::new()]), "a stop string is empty; leave it out to generate without one");
    assert_eq!(refused(&["x".repeat(1 << 20)]), "a stop string has 1048576 bytes; at most 4096 are taken");
    assert_eq!(refused(&vec!["x".to_owned(); 17]), "17 stop strings; at most 16 are taken");
}

/// 1 MB that always almost stops: linear, and nothing leaks or is lost.
#[test]
fn stops_that_nearly_match_cost_linear_time() {
    let stops = vec!["a".repeat(4095) + "b"; 16];
    let mut stream = TextStream::continuation(&stops).unwrap();
    let start = computed();
    let mut out = 0;
    for _ in 0..250_000 {
        out += stream.push(b"aaaa").text.len();
    }
    out += stream.finish().text.len();
    assert_eq!(out, 1_000_000);
    let took = computed() - start;
    assert!(took < Duration::from_secs(3), "{took:?}");
}

// Files that are not what they must be.

fn refusal<T>(result: Result<T, Error>) -> String {
    match result {
        Err(error @ Error::BadFile(_)) => error.to_string(),
        Err(other) => panic!("not a BadFile: {other}"),
        Ok(_) => panic!("accepted"),
    }
}

/// A GGUF file of metadata only.
#[derive(Default)]
struct GgufFile {
    count: u64,
    body: Vec<u8>,
}

impl GgufFile {
    fn key(mut self, key: &str, kind: u32, value: &[u8]) -> GgufFile {
        self.count += 1;
        self.body.extend((key.len() as u64).to_le_bytes());
        self.body.extend(key.as_bytes());
        self.body.extend(kind.to_le_bytes());
        self.body.extend(value);
        self
    }

    fn str(self, key: &str, value: &str) -> GgufFile {
        self.key(key, 8, &string(value))
    }

    fn u32(self, key: &str, value: u32) -> GgufFile {
        self.key(key, 4, &value.to_le_bytes())
    }

    fn bool(self, key: &str, value: bool) -> GgufFile {
        self.key(key, 7, &[value.into()])
    }

    fn strings(self, key: &str, values: &[&str]) -> GgufFile {
        self.array(key, 8, values.len(), values.iter().flat_map(|v| string(v)).collect())
    }

    fn array(self, key: &str, kind: u32, len: usize, bytes: Vec<u8>) -> GgufFile {
        let mut value = kind.to_le_bytes().to_vec();
        value.extend((len as u64).to_le_bytes());
        value.extend(bytes);
        self.key(key, 9, &value)
    }

    fn read(self) -> Result<TokenizerSpec, Error> {
        let mut bytes = b"GGUF".to_vec();
        bytes.extend(3u32.to_le_bytes());
        bytes.extend(0u64.to_le_bytes());
        bytes.extend(self.count.to_le_bytes());
        bytes.extend(self.body);
        let path = Path::new("m.gguf");
        tokenizer::from_gguf(&gguf::parse(&bytes, path)?.metadata, path)
    }
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

fn spm_file(tokens: &[&str]) -> GgufFile {
    let file = GgufFile::default().str("tokenizer.ggml.model", "llama").strings("tokenizer.ggml.tokens", tokens);
    file.u32("tokenizer.ggml.unknown_token_id", 0)
}

/// A GGUF that asks for BOS got none in chats where its template writes none, as llama.cpp would; and templates did not know its
/// separator and padding.
#[test]
fn a_gguf_that_adds_bos_begins_chats_with_it_once() {
    let file = |add_bos: Option<bool>| {
        let file = spm_file(&["<unk>", "<s>", "</s>", "▁a", "<sep>", "<pad>"])
            .array("tokenizer.ggml.scores", 6, 6, scores(&[0.0; 6]))
            .u32("tokenizer.ggml.bos_token_id", 1)
            .u32("tokenizer.ggml.eos_token_id", 2)
            .u32("tokenizer.ggml.seperator_token_id", 4)
            .u32("tokenizer.ggml.padding_token_id", 5);
        let file = match add_bos {
            Some(add) => file.key("tokenizer.ggml.add_bos_token", 7, &[add.into()]),
            None => file,
        };
        Tokenizer::new(file.read().unwrap(), Path::new("m.gguf")).unwrap()
    };
    for tokenizer in [file(None), file(Some(true))] {
        assert_eq!(tokenizer.encode_chat("a").unwrap(), [1, 3]);
        assert_eq!(tokenizer.encode_chat("<s>a").unwrap(), [1, 3]);
    }
    let without = file(Some(false));
    assert_eq!(without.encode_chat("a").unwrap(), [3]);
    assert_eq!(without.encode_chat("<s>a").unwrap(), [1, 3]);
    let named = without.other_tokens();
    let named: Vec<(&str, &str)> = named.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
    assert_eq!(named, [("pad_token", "<pad>"), ("sep_token", "<sep>"), ("unk_token", "<unk>")]);
}

fn scores(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

#[test]
fn bad_gguf_tokenizers_are_refused_by_key() {
    const SCORES: &str = "tokenizer.ggml.scores";
    let good = || spm_file(&["<unk>", "a"]).array(SCORES, 6, 2, scores(&[0.0, 1.0]));
    assert!(good().read().is_ok());
    let cases = [
        (GgufFile::default(), "m.gguf: tokenizer.ggml.model: the file has no such key, so it has no tokenizer"),
        (spm_file(&["<unk>", "a"]).array(SCORES, 1, 2, vec![0, 1]), "tokenizer.ggml.scores"),
        (
            spm_file(&["<unk>", "a"]).array(SCORES, 6, 1, scores(&[0.0])),
            "m.gguf: tokenizer.ggml.scores: 1 values, but tokenizer.ggml.tokens has 2",
        ),
        (
            spm_file(&["<unk>", "a"]).array(SCORES, 6, 2, scores(&[0.0, f32::NAN])),
            "m.gguf: tokenizer.ggml.scores: the score of token 1 is NaN",
        ),
        (spm_file(&[]).array(SCORES, 6, 0, vec![]), "m.gguf: tokenizer.ggml.tokens: the vocabulary is empty"),
        (
            spm_file(&["<unk>", "a", "a"]).array(SCORES, 6, 3, scores(&[0.0; 3])),
            "m.gguf: tokenizer.ggml.tokens: tokens 1 and 2 are both \"a\"",
        ),
        (
            GgufFile::default().str("tokenizer.ggml.model", "bert"),
            "m.gguf: tokenizer.ggml.model: tokenizer \"bert\" is not supported; supported are \"llama\" (SentencePiece BPE), \
             \"gpt2\" (byte-level BPE) and \"gemma4\"",
        ),
    ];
    for (file, expected) in cases {
        let message = refusal(file.read());
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn unknown_pre_tokenisers_are_refused_by_name() {
    let file = |pre: Option<&str>, architecture: &str| {
        let file = GgufFile::default().str("tokenizer.ggml.model", "gpt2").str("general.architecture", architecture);
        let file = file.strings("tokenizer.ggml.tokens", &["a"]).strings("tokenizer.ggml.merges", &[]);
        match pre {
            Some(pre) => file.str("tokenizer.ggml.pre", pre),
            None => file,
        }
    };
    assert_eq!(
        refusal(file(Some("llama-9"), "llama").read()),
        "m.gguf: tokenizer.ggml.pre: pre-tokeniser \"llama-9\" is not known; use the model's tokenizer.json instead"
    );
    let ModelSpec::Bpe(bpe) = file(None, "falcon").read().unwrap().model else { panic!() };
    assert_eq!(bpe.pre, "falcon");
}

/// The 256 byte tokens and some words.
fn byte_level(words: &[&str], merges: &[&str]) -> BpeSpec {
    let bytes = (0..=255).map(|b| dynamicinfer::tokenizer::byte_tokens::byte_char(b).to_string());
    let tokens: Vec<String> = bytes.chain(words.iter().map(|w| (*w).to_owned())).collect();
    BpeSpec {
        kinds: vec![TokenKind::Normal; tokens.len()],
        tokens,
        merges: merges.iter().map(|m| (*m).to_owned()).collect(),
        pre: "llama-bpe".into(),
    }
}

/// `ignore_merges` looks whole words up: the text of a control token must not be one of them.
#[test]
fn a_word_is_no_control_token_even_where_merges_are_ignored() {
    let mut spec = byte_level(&["PAD", "word"], &[]);
    spec.kinds[256] = TokenKind::Control;
    let tokenizer = build(ModelSpec::Bpe(spec));
    assert_eq!(tokenizer.encode("word", Special::AsText).unwrap(), [257]);
    assert_eq!(tokenizer.encode("PAD", Special::AsText).unwrap(), b"PAD".map(u32::from));
    assert_eq!(tokenizer.encode("PAD", Special::Parse).unwrap(), [256]);
    assert_eq!(tokenizer.decode(&[256, 257]), "word");
}

fn json_dir(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    dir
}

fn read_json_dir(json: &str) -> Result<Tokenizer, Error> {
    let dir = json_dir(&[("tokenizer.json", json)]);
    Tokenizer::new(tokenizer::from_hf_dir(dir.path())?, dir.path())
}

fn small_json(model: &str, rest: &str) -> String {
    format!(
        r#"{{"version":"1.0","added_tokens":[],"decoder":{{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":false}},{rest}"model":{model}}}"#
    )
}

const SMALL_MODEL: &str = r#"{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]}"#;

#[test]
fn bad_tokenizer_json_is_refused() {
    assert!(read_json_dir(&small_json(SMALL_MODEL, "")).is_ok());
    let unigram = r#"{"type":"Unigram","unk_id":0,"vocab":[["a",0.0]]}"#;
    let deep = format!(r#""normalizer":{}1{},"#, "[".repeat(100_000), "]".repeat(100_000));
    let sequence = r#"{"type":"Sequence","normalizers":["#;
    let nested = format!(r#""normalizer":{}{},"#, sequence.repeat(60), "]}".repeat(60));
    let precompiled = r#""normalizer":{"type":"Precompiled","precompiled_charsmap":"AAAA"},"#;
    let cases = [
        ("{".to_owned(), "not a tokenizer.json"),
        ("[]".to_owned(), "not a tokenizer.json"),
        (small_json(unigram, ""), "model.type: Unigram models are not supported; BPE ones are"),
        (small_json(SMALL_MODEL, &deep), "recursion limit"),
        (small_json(SMALL_MODEL, precompiled), "normalizer: Precompiled is not supported"),
        (small_json(r#"{"type":"BPE","vocab":{},"merges":[]}"#, ""), "model.vocab: the vocabulary is empty"),
        (
            small_json(r#"{"type":"BPE","vocab":{"a":0,"b":4000000000},"merges":[]}"#, ""),
            "token 4000000000 is out of range for a vocabulary of 2 tokens",
        ),
        (small_json(r#"{"type":"BPE","vocab":{"a":0,"b":0},"merges":[]}"#, ""), "are both token 0"),
        // The merge is longer than every token: the library's buffer for it is too short.
        (
            small_json(r#"{"type":"BPE","vocab":{"a":0,"b":1},"merges":["a b"]}"#, ""),
            "merge 0, \"a b\", names \"ab\", which is not a token",
        ),
        (
            small_json(r#"{"type":"BPE","vocab":{"a":0},"merges":[],"unk_token":"?"}"#, ""),
            "model.unk_token: \"?\" is not in the vocabulary",
        ),
        (
            small_json(r###"{"type":"BPE","vocab":{"a":0},"merges":[],"continuing_subword_prefix":"##"}"###, ""),
            "continuing_subword_prefix",
        ),
        (
            small_json(
                SMALL_MODEL,
                r#""pre_tokenizer":{"type":"Split","pattern":{"Regex":"("},"behavior":"Isolated","invert":false},"#,
            ),
            "not a tokenizer.json",
        ),
    ];
    for (json, expected) in cases {
        let message = refusal(read_json_dir(&json));
        assert!(message.contains(expected), "{message}");
    }
    // As deep as JSON may be for the parser: read or refused, never a stack overflow.
    let _ = read_json_dir(&small_json(SMALL_MODEL, &nested));
}

#[test]
fn a_splitting_rule_that_backtracks_is_refused_at_load() {
    for regex in ["(?:a|aa|aaa)+(?!a)b", "(?:a|a?)+(?!a)x", r"(?:\\s|\\s\\s)+(?!\\S)x"] {
        let split = format!(
            r#""pre_tokenizer":{{"type":"Split","pattern":{{"Regex":"{regex}"}},"behavior":"Isolated","invert":false}},"#
        );
        let start = computed();
        let result = read_json_dir(&small_json(SMALL_MODEL, &split));
        assert!(result.is_err(), "{regex}");
        let message = refusal(result);
        assert!(message.contains("pre_tokenizer: its rules take more than "), "{regex}: {message}");
        let took = computed() - start;
        assert!(took < Duration::from_secs(3), "{regex}: {took:?}");
    }
}

#[test]
fn tokenizer_files_that_are_no_text_or_too_large_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tokenizer.json");
    std::fs::write(&path, b"{\"model\":\"\xff\"}").unwrap();
    assert!(refusal(tokenizer::from_hf_dir(dir.path())).ends_with("not UTF-8 text (at byte 10)"));
    std::fs::File::create(&path).unwrap().set_len(1 << 30).unwrap();
    assert!(refusal(tokenizer::from_hf_dir(dir.path())).contains("1073741824 bytes; at most 67108864 are supported"));
    std::fs::remove_file(&path).unwrap();
    assert!(
        refusal(tokenizer::from_hf_dir(dir.path()))
            .contains("there is no tokenizer.json, tokenizer.model or vocab.json")
    );
    std::fs::create_dir(&path).unwrap();
    let message = refusal(tokenizer::from_hf_dir(dir.path()));
    assert!(message.contains("it is a directory"), "{message}");
}

#[test]
fn every_cut_of_a_sentencepiece_file_is_refused_or_read() {
    let whole = std::fs::read(fixture("spm/tokenizer.model")).unwrap();
    let path = Path::new("tokenizer.model");
    let read = dynamicinfer::tokenizer::sentencepiece::read;
    assert!(read(&whole, path).is_ok());
    let refused = (0..whole.len()).filter(|&n| read(&whole[..n], path).is_err()).count();
    assert!(refused > whole.len() / 2, "{refused}");
    let mut prng = Prng::new(1);
    for _ in 0..2000 {
        let mut bad = whole.clone();
        bad[prng.below(whole.len() as u64) as usize] ^= 1 << prng.below(8);
        let _ = read(&bad, path);
    }
    assert!(refusal(read(b"<!doctype html>", path)).contains("this is not a SentencePiece model"));
    assert!(refusal(read(b"", path)).contains("no pieces"));
    // One piece, and a trainer that says Unigram (1), as T5's files do.
    assert!(
        refusal(read(&[0x0a, 3, 0x0a, 1, b'a', 0x12, 2, 0x18, 1], path)).contains("Unigram models are not supported")
    );
}

/// OPT's way: GPT-2's two files, BOS `</s>` and a special token in the vocabulary.
#[test]
fn vocab_and_merges_are_the_same_tokenizer_as_the_json() {
    let json: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(fixture("gpt2/tokenizer.json")).unwrap()).unwrap();
    let mut vocab = json["model"]["vocab"].as_object().unwrap().clone();
    vocab.insert("<|endoftext|>".into(), 599.into());
    let merge = |m: &serde_json::Value| match m.as_array() {
        Some(pair) => format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
        None => m.as_str().unwrap().to_owned(),
    };
    let merges: Vec<String> = json["model"]["merges"].as_array().unwrap().iter().map(merge).collect();
    let merges = format!("#version: 0.2\n{}\n", merges.join("\n"));
    let dir = json_dir(&[
        ("vocab.json", &serde_json::to_string(&vocab).unwrap()),
        ("merges.txt", &merges),
        (
            "tokenizer_config.json",
            r#"{"add_bos_token":true,"bos_token":{"content":"<|endoftext|>"},"eos_token":"<|endoftext|>"}"#,
        ),
        ("special_tokens_map.json", r#"{"unk_token":"<|endoftext|>"}"#),
    ]);
    let tokenizer = Tokenizer::new(tokenizer::from_hf_dir(dir.path()).unwrap(), dir.path()).unwrap();
    check_fixture(&tokenizer, "gpt2/expected.json", Reference::Transformers);
    assert_eq!((tokenizer.bos_if_added(), tokenizer.eos()), (Some(599), Some(599)));
}

#[test]
fn what_the_files_beside_the_vocabulary_say_is_heard() {
    let json = std::fs::read_to_string(fixture("llama3/tokenizer.json")).unwrap();
    let config = r#"{"bos_token":"<|begin_of_text|>","eos_token":"<|eot_id|>","chat_template":[
        {"name":"tools","template":"T"},{"name":"default","template":"D"}]}"#;
    let dir = json_dir(&[
        ("tokenizer.json", &json),
        ("tokenizer_config.json", config),
        ("generation_config.json", r#"{"eos_token_id":[596,597]}"#),
    ]);
    let spec = tokenizer::from_hf_dir(dir.path()).unwrap();
    assert_eq!((spec.bos, spec.add_bos), (Some(595), true));
    // The file's own first, then those of generation_config.json, then those known by their text.
    assert_eq!(spec.eos, [599, 596, 597]);
    assert_eq!(spec.chat_template.as_deref(), Some("D"));
    std::fs::write(dir.path().join("chat_template.jinja"), "J").unwrap();
    // An end that is no token can never come: it is warned of.
    std::fs::write(dir.path().join("config.json"), r#"{"eos_token_id":600}"#).unwrap();
    let spec = tokenizer::from_hf_dir(dir.path()).unwrap();
    assert_eq!((spec.eos.as_slice(), spec.chat_template.as_deref()), (&[599, 596, 597][..], Some("J")));
}

/// sentencepiece keeps user-defined tokens whole and merges nothing across them; unused ones are taken apart again.
#[test]
fn sentencepiece_kinds_of_tokens() {
    let mut spec =
        plain_spm(&[("<unk>", 0.0), ("a", 0.0), ("b", 0.0), ("ab", 1.0), ("<x>", 0.0), ("aab", 2.0), ("</s>", 0.0)]);
    spec.kinds[0] = TokenKind::Unknown;
    spec.kinds[3] = TokenKind::Unused;
    spec.kinds[4] = TokenKind::UserDefined;
    spec.kinds[6] = TokenKind::Control;
    let tokenizer = build(ModelSpec::Spm(spec));
    let ids = |text| tokenizer.encode(text, Special::AsText).unwrap();
    assert_eq!(ids("ab"), [1, 2]);
    assert_eq!(ids("aab"), [5]);
    assert_eq!(ids("a<x>b"), [1, 4, 2]);
    // A run of unknown characters is one token.
    assert_eq!(ids("a??b?"), [1, 0, 2, 0]);
    assert_eq!(ids("</s>"), [0]);
    assert_eq!(tokenizer.encode("a</s>", Special::Parse).unwrap(), [1, 6]);
}

/// Converters give the markers that a fine-tune added the kind "user-defined", which sentencepiece finds in every text.
#[test]
fn markers_of_turns_are_control_tokens_whatever_their_kind() {
    let mut spec = plain_spm(&[("<unk>", 0.0), ("a", 0.0), ("<|im_end|>", 0.0), ("<b>", 0.0)]);
    spec.kinds = vec![TokenKind::Unknown, TokenKind::Normal, TokenKind::UserDefined, TokenKind::UserDefined];
    let tokenizer = build(ModelSpec::Spm(spec));
    assert_eq!(tokenizer.encode("a<|im_end|>a<b>", Special::AsText).unwrap(), [1, 0, 1, 3]);
    assert_eq!(tokenizer.encode("a<|im_end|>a<b>", Special::Parse).unwrap(), [1, 2, 1, 3]);
    let prompt = format!("<|im_end|>{}", tokenizer.defuse("<|im_end|>"));
    assert_eq!(tokenizer.encode(&prompt, Special::Parse).unwrap(), [2, 0]);
}
