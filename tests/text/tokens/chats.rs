//! What a model's special tokens are to its chats: BOS once, and the others by their texts.

use super::{GgufFile, Tokenizer, from_gguf, json_dir, scores, small_json, spm_file};
use crate::gguf::{File, text};
use dynamicinfer::formats::gguf::Value;
use dynamicinfer::tokenizer::chat_template::{Input, Message, render_in_process};
use dynamicinfer::tokenizer::{self, Special};
use std::path::Path;
use std::process::Command;

const WITHOUT: &str = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}";
const WITH: &str = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}";

/// The prompt that a chat of these texts is, as `run` and the daemon make it.
fn chat(tokenizer: &Tokenizer, template: &str, texts: &[&str]) -> Vec<u32> {
    let message = |(i, text): (usize, &&str)| Message::new(["user", "assistant"][i % 2], &tokenizer.defuse(text));
    let messages: Vec<Message> = texts.iter().enumerate().map(message).collect();
    let text = render_in_process(&Input::of(template, &messages, tokenizer), tokenizer.path()).unwrap();
    tokenizer.encode_chat(&text).unwrap()
}

#[test]
fn a_whole_chat_begins_with_bos_once_whether_its_template_writes_it_or_not() {
    let dialogue = ["Once upon a time", "there lived a king.", "<s>Who are you?"];
    for (name, bos) in [("spm.gguf", 1), ("llama3.gguf", 595)] {
        let tokenizer = from_gguf(name);
        for texts in [&dialogue[..1], &dialogue] {
            let [without, with] = [WITHOUT, WITH].map(|template| chat(&tokenizer, template, texts));
            assert_eq!(without, with, "{name}");
            assert_eq!((without[0], without.iter().filter(|&&id| id == bos).count()), (bos, 1), "{name}");
        }
    }
    // A directory's template decides alone, as transformers has it.
    let tokenizer = super::from_dir("spm");
    assert_eq!(tokenizer.bos_if_added(), Some(1));
    let [without, with] = [WITHOUT, WITH].map(|template| chat(&tokenizer, template, &dialogue));
    assert_eq!((with[0], &with[1..]), (1, &without[..]));
}

#[test]
fn the_program_counts_bos_once_in_a_chats_prompt() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = |add_bos: Option<bool>, template: &str| -> u64 {
        let mut file = File::read("llama.gguf");
        file.remove("tokenizer.ggml.add_bos_token");
        file.set("tokenizer.chat_template", text(template));
        if let Some(add) = add_bos {
            file.set("tokenizer.ggml.add_bos_token", Value::Bool(add));
        }
        let path = dir.path().join("m.gguf");
        std::fs::write(&path, file.bytes()).unwrap();
        let mut run = Command::new(env!("CARGO_BIN_EXE_dynamicinfer"));
        run.env_clear().env("HOME", dir.path()).arg("run").arg(&path).args(["Once upon", "--json", "-n", "1"]);
        let done = run.output().unwrap();
        let said: serde_json::Value = serde_json::from_slice(&done.stdout)
            .unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&done.stderr)));
        said["prompt_tokens"].as_u64().unwrap()
    };
    let alone = tokens(Some(false), WITHOUT);
    for (add_bos, template) in [(Some(true), WITHOUT), (None, WITHOUT), (Some(true), WITH), (Some(false), WITH)] {
        assert_eq!(tokens(add_bos, template), alone + 1, "{add_bos:?} {template}");
    }
}

/// A byte-level `tokenizer.json` names no unknown token, and templates did not see the one that the configuration names.
#[test]
fn templates_know_a_directorys_special_tokens_by_their_texts() {
    let added = |id: u32, text: &str| {
        format!(
            r#"{{"id":{id},"content":"{text}","special":true,"normalized":false,"single_word":false,"lstrip":false,"rstrip":false}}"#
        )
    };
    let json = small_json(super::SMALL_MODEL, "");
    let tokens = format!("[{},{},{}]", added(3, "<sep>"), added(4, "<pad>"), added(5, "<unk>"));
    let json = json.replace(r#""added_tokens":[]"#, &format!(r#""added_tokens":{tokens}"#));
    let seen = |config: &str, map: &str| {
        let files =
            [("tokenizer.json", json.as_str()), ("tokenizer_config.json", config), ("special_tokens_map.json", map)];
        let dir = json_dir(&files);
        let tokenizer = Tokenizer::new(tokenizer::from_hf_dir(dir.path()).unwrap(), dir.path()).unwrap();
        let template = "{{ sep_token }} {{ pad_token }} {{ unk_token }}{{ pad_token is defined }}";
        render_in_process(&Input::of(template, &[], &tokenizer), dir.path()).unwrap()
    };
    let texts = r#"{"sep_token":"<sep>","pad_token":"<pad>","unk_token":"<unk>"}"#;
    let objects = r#"{"sep_token":{"content":"<sep>","lstrip":false},"pad_token":{"__type":"AddedToken","content":"<pad>"},
        "unk_token":{"content":"<unk>","special":true}}"#;
    for (config, map) in
        [(texts, "{}"), (objects, "{}"), ("{}", texts), ("{}", objects), (texts, r#"{"pad_token":"a"}"#)]
    {
        assert_eq!(seen(config, map), "<sep> <pad> <unk>True", "{config} {map}");
    }
    assert_eq!(seen(r#"{"pad_token":null,"unk_token":"<unk>"}"#, "{}"), "  <unk>False");
    assert_eq!(seen("{}", "{}"), "  False");
}

/// The tokens of "a" as a prompt.
fn prompt(file: GgufFile) -> Vec<u32> {
    Tokenizer::new(file.read().unwrap(), Path::new("m.gguf")).unwrap().encode_prompt("a", Special::AsText).unwrap()
}

#[test]
fn a_gguf_that_does_not_say_whether_it_adds_bos_does_what_llama_cpp_does_for_its_pre_tokeniser() {
    const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
    let file =
        |pre: &str| super::published::byte_level(Some(pre), &[], &["<s>"], &[]).u32("tokenizer.ggml.bos_token_id", 0);
    let a = 1 + u32::from(b'a');
    let llama_3 =
        ["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"];
    for pre in llama_3.into_iter().chain(["tekken", "chameleon"]) {
        assert_eq!(prompt(file(pre)), [0, a], "{pre}");
        assert_eq!(prompt(file(pre).bool(ADD_BOS, false)), [a], "{pre}");
    }
    for pre in ["default", "gpt-2", "qwen2", "qwen35", "smollm", "deepseek-v3", "gpt-4o", "falcon", "dbrx", "minicpm5"]
    {
        assert_eq!(prompt(file(pre)), [a], "{pre}");
        assert_eq!(prompt(file(pre).bool(ADD_BOS, true)), [0, a], "{pre}");
    }
}

#[test]
fn a_sentencepiece_gguf_that_does_not_say_begins_with_bos_and_a_space() {
    const SPACE: &str = "tokenizer.ggml.add_space_prefix";
    let file = || {
        spm_file(&["<unk>", "<s>", "</s>", "▁a", "a", "▁"])
            .array("tokenizer.ggml.scores", 6, 6, scores(&[0.0; 6]))
            .u32("tokenizer.ggml.bos_token_id", 1)
    };
    assert_eq!(prompt(file()), [1, 3]);
    assert_eq!(prompt(file().bool(SPACE, true)), [1, 3]);
    assert_eq!(prompt(file().bool(SPACE, false)), [1, 4]);
    assert_eq!(prompt(file().bool("tokenizer.ggml.add_bos_token", false)), [3]);
}
