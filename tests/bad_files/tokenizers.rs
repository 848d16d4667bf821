//! `tokenizer.json` files whose steps take time and memory without end: a stranger's program, of a few hundred bytes.

use crate::{HELD, measured, message};
use dynamicinfer::formats::gguf;
use dynamicinfer::prng::Prng;
use dynamicinfer::tokenizer::{ModelSpec, Special, Tokenizer, from_gguf};
use serde_json::{Value as Json, json};
use std::path::Path;
use std::process::{Command, Stdio};

const MODEL: &str = "tests/fixtures/models/qwen2";

/// The fixture's file with one part in place of its own.
fn with(part: &str, value: Json) -> Json {
    let mut tokenizer: Json =
        serde_json::from_slice(&std::fs::read(format!("{MODEL}/tokenizer.json")).unwrap()).unwrap();
    tokenizer[part] = value;
    tokenizer
}

fn sequence(part: &str, steps: Vec<Json>) -> Json {
    let list = match part {
        "normalizer" => "normalizers",
        "pre_tokenizer" => "pretokenizers",
        _ => "decoders",
    };
    json!({"type": "Sequence", list: steps})
}

fn replace(pattern: Json, content: &str) -> Json {
    json!({"type": "Replace", "pattern": pattern, "content": content})
}

fn double() -> Json {
    replace(json!({"String": "a"}), "aa")
}

fn split(pattern: Json) -> Json {
    json!({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false})
}

/// What breaks a file, its field, the value, and a word of the refusal.
fn bombs() -> Vec<(&'static str, &'static str, Json, &'static str)> {
    let prepend = json!({"type": "Prepend", "prepend": "▁"});
    let untyped = json!({"normalizers": vec![json!({"pattern": {"String": "a"}, "content": "aa"}); 40]});
    let hidden = json!({"type": "Sequence", "normalizers": [sequence("normalizer", vec![double(); 20]),
        sequence("normalizer", vec![double(); 20])]});
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let mut tree = json!({"type": "NFC"});
    tree["rest"] = json!(vec![json!([]); 200_000]);
    vec![
        ("forty doublings", "normalizer", sequence("normalizer", vec![double(); 40]), "1099511627776 bytes of one"),
        ("forty doublings of a token", "decoder", sequence("decoder", vec![double(); 40]), "it has 40 steps"),
        ("ten doublings of a token", "decoder", sequence("decoder", vec![double(); 10]), "1024 bytes of one"),
        ("doublings without types", "normalizer", untyped, "bytes of one"),
        ("doublings further in", "normalizer", hidden, "bytes of one"),
        (
            "a megabyte for a letter",
            "normalizer",
            replace(json!({"String": "a"}), &"x".repeat(1 << 20)),
            "has 1048576 bytes",
        ),
        ("a megabyte in a token", "decoder", replace(json!({"String": "a"}), &"x".repeat(1 << 20)), "bytes of one"),
        ("forty times byte by byte", "pre_tokenizer", sequence("pre_tokenizer", vec![byte_level; 40]), "bytes of one"),
        ("a thousand prefixes", "normalizer", sequence("normalizer", vec![prepend.clone(); 1000]), "it has 1000 steps"),
        ("a hundred prefixes", "normalizer", sequence("normalizer", vec![prepend; 100]), "it makes 301 bytes of \"a\""),
        ("replaces nothing", "normalizer", replace(json!({"Regex": ""}), "x"), "is empty"),
        ("replaces what may be nothing", "normalizer", replace(json!({"Regex": "x*"}), "y"), "fails on a text of"),
        ("replaces no text", "normalizer", replace(json!({"String": ""}), "x"), "is empty"),
        ("splits at nothing", "pre_tokenizer", split(json!({"Regex": ""})), "is empty"),
        ("splits at no text", "pre_tokenizer", split(json!({"String": ""})), "is empty"),
        ("decodes nothing", "decoder", replace(json!({"String": ""}), "x"), "is not supported"),
        (
            "decodes no space",
            "decoder",
            json!({"type": "Metaspace", "replacement": "", "prepend_scheme": "never"}),
            "is not supported",
        ),
        (
            "a rule that backtracks",
            "normalizer",
            replace(json!({"Regex": "(?:a|aa|aaa)+(?!a)b"}), "x"),
            "its rules take more than",
        ),
        ("a tree of nothing", "normalizer", tree, "it has 200005 values"),
    ]
}

/// The forty doublings passed the load as a normaliser and ended the daemon with the first prompt, as a decoder they ended it at
/// load; an empty pattern was a panic; a thousand prefixes took 9 s and 1.4 GiB a request.
#[test]
fn tokenizer_files_without_measure_are_5_and_name_their_part() {
    let mut accepted = Vec::new();
    for (case, part, value, word) in bombs() {
        let dir = tempfile::tempdir().unwrap();
        for file in ["config.json", "model.safetensors", "tokenizer_config.json"] {
            std::fs::copy(Path::new(MODEL).join(file), dir.path().join(file)).unwrap();
        }
        std::fs::write(dir.path().join("tokenizer.json"), with(part, value).to_string()).unwrap();
        // What blows up ends by this limit and not by the machine's.
        let mut shell = Command::new("/bin/sh");
        shell.args(["-c", r#"ulimit -v 2097152; ulimit -t 60; exec "$0" "$@""#, env!("CARGO_BIN_EXE_dynamicinfer")]);
        shell.args(["run", dir.path().to_str().unwrap(), &"a b".repeat(60), "-n", "1"]).env_clear();
        shell.env("HOME", dir.path()).env("XDG_CACHE_HOME", dir.path().join("cache")).stdin(Stdio::null());
        let done = shell.output().unwrap();
        let said = String::from_utf8_lossy(&done.stderr);
        let last = said.lines().last().unwrap_or_default();
        if done.status.code() != Some(5) || !last.contains(&format!(": {part}: ")) || !last.contains(word) {
            accepted.push(format!("{case}: {}, no {part} and {word:?} in: {said:.300}", done.status));
        }
    }
    assert!(accepted.is_empty(), "{}", accepted.join("\n"));
}

fn tokenizer(json: &Json) -> Result<Tokenizer, dynamicinfer::Error> {
    Tokenizer::new(ModelSpec::HfJson { json: json.to_string() }.into(), Path::new("model"))
}

/// Reading a refused file takes no more than some times its bytes, and what the fixture's own file takes.
#[test]
fn a_refused_tokenizer_file_takes_memory_by_its_length() {
    let (good, room) = measured(|| tokenizer(&with("normalizer", Json::Null)));
    assert!(good.is_ok());
    // What the library fails on is a panic, which may print a backtrace: that takes the memory, and not the file.
    for (case, part, value, _) in bombs().into_iter().filter(|bomb| !bomb.3.starts_with("fails")) {
        let json = with(part, value);
        let bytes = json.to_string().len();
        let (refused, peak) = measured(|| tokenizer(&json));
        message(refused.map(drop), case);
        // A tree of a part that is small enough to be kept; the texts of steps that are tried, a thousand times as long.
        assert!(peak < room + 20 * bytes + (16 << 20), "{case}: {peak} bytes of memory for a file of {bytes}");
    }
}

/// The library would keep ten thousand words in each thread, for every tokenizer that there ever was: 85 MB of long ones, for good.
#[test]
fn words_that_were_split_take_no_memory_afterwards() {
    let path = Path::new("tests/fixtures/tokenizers/qwen2.gguf");
    let file = gguf::parse(&std::fs::read(path).unwrap(), path).unwrap();
    let of_gguf = Tokenizer::new(from_gguf(&file.metadata, path).unwrap(), path).unwrap();
    let of_json = tokenizer(&with("normalizer", Json::Null)).unwrap();
    let mut prng = Prng::new(1);
    let mut word = || -> String { (0..200).map(|_| (b'a' + prng.below(26) as u8) as char).collect() };
    let words = (0..500).map(|_| word()).collect::<Vec<_>>().join(" ");
    for tokenizer in [of_gguf, of_json] {
        // What it needs for any text is there afterwards.
        let encode = |text: &str| drop(tokenizer.encode(text, Special::AsText).unwrap());
        encode("a king");
        let before = HELD.get();
        encode(&words);
        let kept = HELD.get() - before;
        assert!(kept < 64 << 10, "{kept} bytes are kept after a text of {} bytes", words.len());
    }
}

/// What a normaliser may do to one letter it may not do to a whole text: that text is refused, before it is there.
#[test]
fn a_text_that_its_normaliser_makes_many_times_as_long_is_refused() {
    let tokenizer = tokenizer(&with("normalizer", replace(json!({"String": "b"}), &"c".repeat(500)))).unwrap();
    let text = "b".repeat(1 << 20);
    let (encoded, peak) = measured(|| tokenizer.encode(&text, Special::AsText));
    let said = encoded.unwrap_err().to_string();
    assert!(said.contains("makes more than 4198400 bytes of a text of 1048576"), "{said}");
    assert!(peak < 64 << 20, "{peak} bytes of memory");
    assert_eq!(tokenizer.decode(&tokenizer.encode("b", Special::AsText).unwrap()), "c".repeat(500));
    // Compatibility forms make up to eleven bytes of one, and of ordinary text hardly more than there were.
    let compatible = self::tokenizer(&with("normalizer", json!({"type": "NFKC"}))).unwrap();
    let plain = self::tokenizer(&with("normalizer", Json::Null)).unwrap();
    let text = "Once upon a time there lived a king. ".repeat(1000);
    assert_eq!(compatible.encode(&text, Special::AsText).unwrap(), plain.encode(&text, Special::AsText).unwrap());
}
