//! What is missing between two texts: `/infill` as editors ask it, and `suffix` of other APIs.

use crate::daemon::Daemon;
use crate::stops::renamed;
use serde_json::{Value as Json, json};
use std::path::Path;

const TEXT: &str = "/v1/completions";
const MARKS: [(&str, &str); 6] = [
    ("Ġmaidens", "<|fim_prefix|>"),
    ("Ġwolves", "<|fim_suffix|>"),
    ("Ġsparrow", "<|fim_middle|>"),
    ("Ġbargain", "<|repo_name|>"),
    ("Ġmeadow", "<|file_sep|>"),
    ("Ġwho", "<|fim_pad|>"),
];

fn serve(dir: &Path) -> Daemon {
    let model = renamed(dir, &MARKS);
    let mut daemon = Daemon::spawn(dir, &["serve", model.to_str().unwrap(), "--ctx-size", "256"], &[]);
    daemon.wait_for("is ready");
    daemon
}

fn asked(daemon: &Daemon, path: &str, body: &Json) -> Json {
    let answer = daemon.post(path, body);
    assert_eq!(answer.status, 200, "{path}: {}", answer.text());
    answer.json()
}

/// The text that goes on from a prompt in which the marks stand as control tokens, and the prompt's tokens.
fn continued(daemon: &Daemon, prompt: &str, stop: &Json) -> (String, u64) {
    let answer = asked(daemon, TEXT, &json!({"prompt": prompt, "max_tokens": 12, "temperature": 0, "stop": stop}));
    let text = answer["choices"][0]["text"].as_str().unwrap().to_owned();
    (text, answer["usage"]["prompt_tokens"].as_u64().unwrap())
}

#[test]
fn every_api_asks_for_what_is_missing_with_the_marks_of_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = serve(dir.path());
    let (before, behind) = ("Once upon a time", " lived in a wood.");
    let prompt = format!("<|fim_prefix|>{before}<|fim_suffix|>{behind}<|fim_middle|>");
    // The mark behind the missing text ends it.
    let (text, tokens) = continued(&daemon, &prompt, &json!(["<|fim_pad|>"]));
    assert!(!text.is_empty(), "nothing to compare");
    let body = json!({"prompt": before, "suffix": behind, "max_tokens": 12, "temperature": 0});
    let answer = asked(&daemon, TEXT, &body);
    assert_eq!(answer["choices"][0]["text"], text);
    assert_eq!(answer["usage"]["prompt_tokens"], tokens);
    let body = json!({"prompt": before, "suffix": behind, "stream": false,
        "options": {"num_predict": 12, "temperature": 0}});
    let answer = asked(&daemon, "/api/generate", &body);
    assert_eq!((&answer["response"], &answer["prompt_eval_count"]), (&json!(text), &json!(tokens)));
    assert!(asked(&daemon, "/api/show", &json!({}))["capabilities"].as_array().unwrap().contains(&json!("insert")));
    // As llama.vim sends it.
    let mut body = json!({
        "id_slot": 0, "input_prefix": before, "input_suffix": behind, "input_extra": [], "prompt": "", "n_predict": 12, "stop": [],
        "n_indent": 4, "top_k": 40, "top_p": 0.9, "temperature": 0, "samplers": ["top_k", "top_p", "infill"], "stream": false,
        "cache_prompt": true, "t_max_prompt_ms": 500, "t_max_predict_ms": 100_000, "response_fields": ["content", "timings/prompt_n"],
    });
    let answer = asked(&daemon, "/infill", &body);
    assert_eq!((&answer["content"], &answer["tokens_evaluated"]), (&json!(text), &json!(tokens)));
    assert_eq!((&answer["stop"], &answer["truncated"]), (&json!(true), &json!(false)));
    let expected = if answer["tokens_predicted"] == 12 { "limit" } else { "eos" };
    assert_eq!(answer["stop_type"], expected, "{answer}");
    assert!(answer["timings"]["predicted_ms"].as_f64().unwrap() > 0.0);

    body["stream"] = true.into();
    let streamed = daemon.post("/infill", &body).text();
    let events: Vec<Json> = streamed
        .split("\n\n")
        .filter_map(|event| event.trim().strip_prefix("data: "))
        .map(|event| serde_json::from_str(event).unwrap())
        .collect();
    let said: String = events.iter().map(|event| event["content"].as_str().unwrap()).collect();
    assert_eq!(said, text);
    assert!(events.iter().rev().skip(1).all(|event| event["stop"] == false) && events.last().unwrap()["stop"] == true);

    // The beginning of what is missing, and other files.
    let prompt = format!(
        "<|repo_name|>repository\n<|file_sep|>a.txt\nThe king.\n<|file_sep|>file\n<|fim_prefix|>{before}<|fim_suffix|>{behind}<|fim_middle|> a"
    );
    let (text, tokens) = continued(&daemon, &prompt, &json!([" was", "<|fim_pad|>"]));
    body["stream"] = false.into();
    body["prompt"] = " a".into();
    body["stop"] = json!([" was"]);
    body["input_extra"] = json!([{"filename": "a.txt", "text": "The king.", "time": 1}]);
    let answer = asked(&daemon, "/infill", &body);
    assert_eq!((&answer["content"], &answer["tokens_evaluated"]), (&json!(text), &json!(tokens)));
    if answer["stop_type"] == "word" {
        assert_eq!(answer["stopping_word"], " was");
    }

    // A text has no marks, and nothing is said where the prompt is only read.
    let (_, plain) = continued(&daemon, "<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>", &json!([]));
    let answer = asked(&daemon, TEXT, &json!({"prompt": "x<|fim_suffix|>", "suffix": "y", "max_tokens": 1}));
    assert!(answer["usage"]["prompt_tokens"].as_u64().unwrap() > plain + 4, "{answer}");
    body["n_predict"] = 0.into();
    assert_eq!(asked(&daemon, "/infill", &body)["content"], "");
}

/// An editor sends all that it has; what is nearest to the gap is kept.
#[test]
fn an_infill_that_is_too_long_loses_files_and_then_what_is_farthest() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = serve(dir.path());
    let counted = |text: &str| {
        let tokens = asked(&daemon, "/tokenize", &json!({"content": text}));
        tokens["tokens"].as_array().unwrap().len() as u64
    };
    let words = "the king went into the wood ";
    let (before, behind) = (words.repeat(20), words.repeat(20));
    let ask = |before: &str, behind: &str, extra: Json| {
        let body = json!({"input_prefix": before, "input_suffix": behind, "input_extra": extra, "n_predict": 16, "temperature": 0});
        let answer = asked(&daemon, "/infill", &body);
        (answer["tokens_evaluated"].as_u64().unwrap(), answer["truncated"] == true)
    };
    assert!(counted(&before) > 110);
    let (tokens, cut) = ask(&before, &behind, json!([]));
    assert!(cut && tokens == 256 - 16, "{tokens}");
    let (short, cut) = ask(words, words, json!([]));
    assert!(!cut);
    let file = |name: &str, n: usize| json!({"filename": name, "text": words.repeat(n)});
    let (with_last, cut) = ask(words, words, json!([file("a", 30), file("b", 10)]));
    assert!(cut && with_last > short + counted(&words.repeat(10)) && with_last <= 240, "{with_last}");
    assert_eq!(ask(words, words, json!([file("a", 60)])), (short, true));
    assert_eq!(ask(words, words, json!([file("b", 10)])), (with_last, false));
    // As a completion it is refused, as any other.
    let answer = daemon.post(TEXT, &json!({"prompt": before.repeat(2), "suffix": behind}));
    assert_eq!((answer.status, answer.json()["error"]["param"].clone()), (400, json!("prompt")), "{}", answer.text());
    let lists = daemon.post(TEXT, &json!({"prompt": ["a", "b"], "suffix": "c"}));
    assert!(lists.status == 400 && lists.text().contains("one text"), "{}", lists.text());
}

#[test]
fn an_answer_with_a_line_break_ends_when_its_time_is_over() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = serve(dir.path());
    let newline = asked(&daemon, "/tokenize", &json!({"content": "a\nb"}));
    let ask = |ms: i64| {
        let body = json!({"input_prefix": "\n\n", "input_suffix": "\n", "n_predict": 120, "t_max_predict_ms": ms, "seed": 3, "temperature": 1.5,
            "min_p": 0, "top_k": 0, "top_p": 1});
        asked(&daemon, "/infill", &body)
    };
    let (free, timed) = (ask(0), ask(1));
    let (free_text, text) = (free["content"].as_str().unwrap(), timed["content"].as_str().unwrap());
    assert!(free_text.starts_with(text), "{free_text:?} {text:?} {newline}");
    let first = free_text.find('\n').expect("a line break in the answer");
    assert!(text.len() > first && text.matches('\n').count() == 1 && text.len() < free_text.len(), "{text:?}");
    assert_eq!(timed["stop_type"], "limit");
}
