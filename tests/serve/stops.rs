//! Stop strings against what a model produces: also control tokens, and channels that no reader sees.

use crate::daemon::{Answer, Daemon, changed_demo, command};
use serde_json::{Value as Json, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// The demo model with other names for some of its tokens, which are control tokens from then on.
pub fn renamed(dir: &Path, tokens: &[(&str, &str)]) -> PathBuf {
    let rename = |tokenizer: &mut Json, (token, name): &(&str, &str)| {
        let model = tokenizer["model"].as_object_mut().unwrap();
        let id = model["vocab"].as_object_mut().unwrap().remove(*token).expect("a token of the demo model");
        model["vocab"][*name] = id.clone();
        let merges = model["merges"].as_array_mut().unwrap();
        merges.retain(|pair| {
            let [left, right] = [0, 1].map(|side| pair[side].as_str().unwrap());
            ![left, right, &format!("{left}{right}")].contains(token)
        });
        let added = json!({
            "id": id, "content": name, "special": true, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false,
        });
        tokenizer["added_tokens"].as_array_mut().unwrap().push(added);
    };
    changed_demo(dir, "tokenizer.json", |tokenizer| tokens.iter().for_each(|token| rename(tokenizer, token)))
}

fn serve(dir: &Path, model: &Path) -> Daemon {
    let mut daemon = Daemon::spawn(dir, &["serve", model.to_str().unwrap()], &[]);
    daemon.wait_for("is ready");
    daemon
}

/// Its text, how it ended, and its tokens.
fn ended(answer: &Answer) -> (String, String, u64) {
    let answer = answer.json();
    let choice = &answer["choices"][0];
    let text = choice["text"].as_str().or(choice["message"]["content"].as_str());
    let text = text.unwrap_or_else(|| panic!("{answer}"));
    (
        text.to_owned(),
        choice["finish_reason"].as_str().unwrap().to_owned(),
        answer["usage"]["completion_tokens"].as_u64().unwrap(),
    )
}

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

/// It was ignored, and the answer ran past it: only the text that a reader sees was looked at.
#[test]
fn a_stop_that_is_the_name_of_a_control_token_ends_the_answer() {
    let dir = tempfile::tempdir().unwrap();
    let model = renamed(dir.path(), &[("Ġwho", "<|who|>")]);
    let daemon = serve(dir.path(), &model);
    let chat =
        json!({"messages": [{"role": "user", "content": "Once upon a time"}], "temperature": 0, "max_tokens": 16});
    let text = json!({"prompt": "Once upon a time", "temperature": 0, "max_tokens": 16});
    let (whole, reason, _) = ended(&daemon.post(CHAT, &chat));
    // " a man", the control token, " was a man".
    assert!(whole.starts_with(" a man was a man") && reason == "length", "{whole:?}");
    for (stop, want, tokens) in [
        (json!("<|who|>"), " a man", 3),
        (json!(["x never said", "<|who|>"]), " a man", 3),
        // Cut inside tokens, on one side or on both.
        (json!("an<|who|>"), " a m", 3),
        (json!("<|who|> w"), " a man", 4),
        (json!(["<|who|>x", "man<|who|> was"]), " a ", 4),
        // A reader sees it, though a control token stands in it.
        (json!("man was"), " a ", 4),
        // Of two the one that begins first, though the other is whole before it.
        (json!(["man was a", "<|who|> was"]), " a ", 5),
    ] {
        for (path, ask) in [(CHAT, &chat), (TEXT, &text)] {
            let mut ask = ask.clone();
            ask["stop"] = stop.clone();
            let whole = ended(&daemon.post(path, &ask));
            assert_eq!(whole, (want.to_owned(), "stop".to_owned(), tokens), "{path}: {stop}");
            ask["stream"] = true.into();
            assert_eq!(daemon.post(path, &ask).streamed(), (want.to_owned(), Some("stop".into())), "{path}: {stop}");
        }
    }
    // What is told of tokens is told of those before it.
    let mut ask = chat.clone();
    ask["stop"] = "<|who|>".into();
    ask["logprobs"] = true.into();
    let answer = daemon.post(CHAT, &ask).json();
    let tokens = answer["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    assert_eq!(tokens.iter().map(|token| token["token"].as_str().unwrap()).collect::<String>(), " a man");
    // The model's own end is part of what it produces.
    let mut ask = text.clone();
    ask["logit_bias"] = json!({"1": 100});
    ask["stop"] = "x</s>".into();
    assert_eq!(ended(&daemon.post(TEXT, &ask)), (String::new(), "stop".to_owned(), 1));
    ask["stop"] = "</s></s>".into();
    ask["ignore_eos"] = true.into();
    assert_eq!(ended(&daemon.post(TEXT, &ask)), (String::new(), "stop".to_owned(), 2));
}

/// As the daemon's: `run`, and a talk in this process.
#[test]
fn run_and_a_talk_end_at_a_control_token_that_is_their_stop() {
    let dir = tempfile::tempdir().unwrap();
    let model = renamed(dir.path(), &[("Ġwho", "<|who|>")]);
    let model = model.to_str().unwrap();
    let run = |stop: &str| {
        let args = ["run", model, "Once upon a time", "--temp", "0", "-n", "16", "--json", "--stop", stop];
        let done = command(dir.path(), &args).output().unwrap();
        let answer: Json = serde_json::from_slice(&done.stdout).unwrap_or_else(|e| panic!("{e}: {done:?}"));
        (answer["text"].as_str().unwrap().to_owned(), answer["finish_reason"].as_str().unwrap().to_owned())
    };
    assert_eq!(run("<|who|>"), (" a man".to_owned(), "stop".to_owned()));
    assert_eq!(run("man<|who|> was"), (" a ".to_owned(), "stop".to_owned()));
    assert_eq!(run("<|whom|>").1, "length");
    let args = ["chat", model, "--here", "--temp", "0", "-n", "16", "--stop", "<|who|>"];
    let mut talk = command(dir.path(), &args);
    let mut talk = talk.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    talk.stdin.take().unwrap().write_all(b"Once upon a time\n").unwrap();
    let said = talk.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&said.stdout).trim(), "a man", "{said:?}");
}

/// What a model thinks in a channel of its own was lost.
#[test]
fn what_is_thought_in_a_channel_comes_apart_from_the_answer() {
    let dir = tempfile::tempdir().unwrap();
    let markers = [("aff", "<|start|>"), ("gar", "<|channel|>"), ("ser", "<|message|>"), ("ah", "<|end|>")];
    let model = renamed(dir.path(), &markers);
    let channel = "<|start|>assistant<|channel|>{{ reasoning_effort }}<|message|>{{ messages[0].content }}";
    std::fs::write(model.join("chat_template.jinja"), channel).unwrap();
    let daemon = serve(dir.path(), &model);
    let ask = |channel: &str| {
        json!({"messages": [{"role": "user", "content": "Once upon a time"}], "reasoning_effort": channel,
            "temperature": 0, "max_tokens": 16})
    };
    let message = |channel: &str| daemon.post(CHAT, &ask(channel)).json()["choices"][0]["message"].clone();
    let (said, thought) = (message("final"), message("analysis"));
    assert_eq!((&said["reasoning_content"], &thought["content"]), (&Json::Null, &json!("")), "{said} {thought}");
    assert!(said["content"].as_str().unwrap().len() > 20, "{said}");
    let mut streamed = ask("analysis");
    streamed["stream"] = true.into();
    let events = daemon.post(CHAT, &streamed).events();
    let chunks = events.iter().filter_map(|event| serde_json::from_str::<Json>(event).ok());
    let pieces: String = chunks
        .filter_map(|chunk| chunk["choices"][0]["delta"]["reasoning_content"].as_str().map(str::to_owned))
        .collect();
    assert!(pieces.len() > 20 && thought["reasoning_content"] == pieces.as_str(), "{pieces} {thought}");
}

/// It had no effect while a model thought, however long that took.
#[test]
fn a_stop_ends_an_answer_in_a_channel_that_is_not_shown() {
    let dir = tempfile::tempdir().unwrap();
    let markers = [("aff", "<|start|>"), ("gar", "<|channel|>"), ("ser", "<|message|>"), ("ah", "<|end|>")];
    let model = renamed(dir.path(), &markers);
    let daemon = serve(dir.path(), &model);
    let ask = |channel: &str, stop: Json| {
        let prompt = format!("<|start|>assistant<|channel|>{channel}<|message|>Once upon a time");
        let ask = json!({"prompt": prompt, "temperature": 0, "max_tokens": 16, "stop": stop});
        ended(&daemon.post(TEXT, &ask))
    };
    let (said, reason, _) = ask("final", json!([]));
    assert!(said.len() > 20 && reason == "length", "{said:?}");
    assert_eq!(ask("analysis", json!([])), (String::new(), "length".to_owned(), 16));
    let (shown, reason, tokens) = ask("analysis", json!(["never thought", "e"]));
    assert_eq!((shown.as_str(), reason.as_str(), tokens < 16), ("", "stop", true), "after {tokens} tokens");
}
