//! The middle between two texts: `/infill` as editors ask it, and `suffix` of other APIs.

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

/// The text that goes on from a prompt in which the FIM tokens stand as control tokens, and the prompt's tokens.
fn continued(daemon: &Daemon, prompt: &str, stop: &Json) -> (String, u64) {
    let answer = asked(daemon, TEXT, &json!({"prompt": prompt, "max_tokens": 12, "temperature": 0, "stop": stop}));
    let text = answer["choices"][0]["text"].as_str().unwrap().to_owned();
    (text, answer["usage"]["prompt_tokens"].as_u64().unwrap())
}

#[test]
fn every_api_asks_for_a_middle_with_the_tokens_of_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = serve(dir.path());
    let (before, behind) = ("Once upon a time", " lived in a wood.");
    let prompt = format!("<|fim_prefix|>{before}<|fim_suffix|>{behind}<|fim_middle|>");
    let (text, tokens) = continued(&daemon, &prompt, &json!(["<|fim_pad|>"]));
    assert!(!text.is_empty(), "nothing to compare");
    // As many stops as there may be leave room for the end of a middle.
    let stops: Vec<String> = (0..16).map(|i| format!("never {i}")).collect();
    let body = json!({"prompt": before, "suffix": behind, "max_tokens": 12, "temperature": 0, "stop": stops});
    let answer = asked(&daemon, TEXT, &body);
    assert_eq!(answer["choices"][0]["text"], text);
    assert_eq!(answer["usage"]["prompt_tokens"], tokens);
    let body = json!({"prompt": before, "suffix": behind, "stream": false,
        "options": {"num_predict": 12, "temperature": 0}});
    let answer = asked(&daemon, "/api/generate", &body);
    assert_eq!((&answer["response"], &answer["prompt_eval_count"]), (&json!(text), &json!(tokens)));
    let refused = daemon.post("/api/generate", &json!({"prompt": "a", "suffix": "b", "raw": true}));
    assert_eq!(refused.status, 400, "{}", refused.text());
    assert!(asked(&daemon, "/api/show", &json!({}))["capabilities"].as_array().unwrap().contains(&json!("insert")));
    // As llama.vim sends it.
    let mut body = json!({
        "id_slot": 0, "input_prefix": before, "input_suffix": behind, "input_extra": [], "prompt": "", "n_predict": 12, "stop": [],
        "n_indent": 0, "top_k": 40, "top_p": 0.9, "temperature": 0, "samplers": ["top_k", "top_p", "infill"], "stream": false,
        "cache_prompt": true, "t_max_prompt_ms": 500, "t_max_predict_ms": 100_000, "response_fields": [],
    });
    let answer = asked(&daemon, "/infill", &body);
    assert_eq!((&answer["content"], &answer["tokens_evaluated"]), (&json!(text), &json!(tokens)));
    assert_eq!((&answer["stop"], &answer["truncated"]), (&json!(true), &json!(false)));
    assert_eq!(answer["generation_settings"]["n_ctx"], 256);
    assert!(answer["timings"]["predicted_ms"].as_f64().unwrap() > 0.0);
    body["response_fields"] = json!(["content", "timings/prompt_n", "generation_settings", "timings/none"]);
    let some = asked(&daemon, "/infill", &body);
    let names: Vec<&str> = some.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(names, ["content", "timings/prompt_n", "generation_settings"]);
    assert_eq!(some["content"], text);

    body["response_fields"] = json!([]);
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

    // The beginning of a middle, other files, and a word of the middle that ends it.
    let prompt = format!(
        "<|repo_name|>repository\n<|file_sep|>a.txt\nThe king.\n<|file_sep|>file\n<|fim_prefix|>{before}<|fim_suffix|>{behind}<|fim_middle|> a"
    );
    let (text, tokens) = continued(&daemon, &prompt, &json!(["<|fim_pad|>"]));
    let word = text.split_whitespace().nth(1).expect("two words").to_owned();
    body["stream"] = false.into();
    body["prompt"] = " a".into();
    body["stop"] = json!(["never", word]);
    body["input_extra"] = json!([{"filename": "a.txt", "text": "The king.", "time": 1}]);
    let answer = asked(&daemon, "/infill", &body);
    let wanted = &text[..text.find(&word).unwrap()];
    assert_eq!((&answer["content"], &answer["tokens_evaluated"]), (&json!(wanted), &json!(tokens)));
    assert_eq!((&answer["stop_type"], &answer["stopping_word"]), (&json!("word"), &json!(word)));

    // A prompt that is only read is there for the next request, and a text has no control tokens.
    body["input_prefix"] = "The king went into the wood and".into();
    body["n_predict"] = 0.into();
    let read = asked(&daemon, "/infill", &body);
    assert_eq!(
        (&read["content"], &read["tokens_predicted"], &read["stop_type"]),
        (&json!(""), &json!(0), &json!("limit"))
    );
    body["n_predict"] = 4.into();
    assert!(
        asked(&daemon, "/infill", &body)["tokens_cached"].as_u64().unwrap() + 1
            >= read["tokens_evaluated"].as_u64().unwrap()
    );
    let (_, plain) = continued(&daemon, "<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>", &json!([]));
    let answer = asked(&daemon, TEXT, &json!({"prompt": "x<|fim_suffix|>", "suffix": "y", "max_tokens": 1}));
    assert!(answer["usage"]["prompt_tokens"].as_u64().unwrap() > plain + 4, "{answer}");
    for (body, param) in [
        (json!({"input_prefix": "x"}), "input_suffix"),
        (json!({"input_suffix": "x"}), "input_prefix"),
        (json!({"input_prefix": "x", "input_suffix": "", "prompt": "x ".repeat(300)}), "prompt"),
        (json!({"input_prefix": "x", "input_suffix": "", "input_extra": vec![json!({}); 257]}), "input_extra"),
        (json!({"input_prefix": "x", "input_suffix": "", "response_fields": vec!["x"; 65]}), "response_fields"),
    ] {
        let refused = daemon.post("/infill", &body);
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!(param)), "{}", refused.text());
    }
}

/// An editor sends all that it has; what is nearest to the middle is kept.
#[test]
fn an_infill_that_is_too_long_loses_files_and_then_what_is_farthest() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = serve(dir.path());
    let words = "the king went into the wood ";
    let (before, behind) = (words.repeat(20), words.repeat(20));
    let ask = |before: &str, behind: &str, extra: Json| {
        let body = json!({"input_prefix": before, "input_suffix": behind, "input_extra": extra, "n_predict": 16, "temperature": 0});
        let answer = asked(&daemon, "/infill", &body);
        (answer["tokens_evaluated"].as_u64().unwrap(), answer["truncated"] == true)
    };
    let (tokens, cut) = ask(&before, &behind, json!([]));
    assert!(cut && (200..=256 - 16).contains(&tokens), "{tokens}");
    let (short, cut) = ask(words, words, json!([]));
    assert!(!cut);
    let file = |name: &str, n: usize| json!({"filename": name, "text": words.repeat(n)});
    let (with_last, cut) = ask(words, words, json!([file("a", 30), file("b", 5)]));
    assert!(cut && with_last > short + 20, "{with_last}");
    assert_eq!(ask(words, words, json!([file("a", 60)])), (short, true));
    assert_eq!(ask(words, words, json!([file("b", 5)])), (with_last, false));
    // Megabytes are as good as what fits; a character of several bytes is not cut in two.
    let far = "\u{20ac}".repeat(400_000);
    let (huge, cut) =
        ask(&format!("{far}{before}"), &format!("{behind}{far}"), json!([{"filename": "c", "text": far}]));
    assert!(cut && (200..=256 - 16).contains(&huge), "{huge}");
    // As a completion it is refused, as any other.
    let answer = daemon.post(TEXT, &json!({"prompt": before.repeat(2), "suffix": behind}));
    assert_eq!((answer.status, answer.json()["error"]["param"].clone()), (400, json!("prompt")), "{}", answer.text());
    let lists = daemon.post(TEXT, &json!({"prompt": ["a", "b"], "suffix": "c"}));
    assert!(lists.status == 400 && lists.text().contains("one text"), "{}", lists.text());
}

#[test]
fn an_answer_ends_with_a_line_where_its_time_or_its_indentation_is_over() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = serve(dir.path());
    let ask = |limits: Json| {
        let mut body = json!({"input_prefix": "\n\n", "input_suffix": "\n", "n_predict": 120, "seed": 3, "temperature": 1.5, "min_p": 0, "top_k": 0,
            "top_p": 1});
        body.as_object_mut().unwrap().extend(limits.as_object().unwrap().clone());
        let answer = asked(&daemon, "/infill", &body);
        (answer["content"].as_str().unwrap().to_owned(), answer["stop_type"].as_str().unwrap().to_owned())
    };
    let (free, _) = ask(json!({"t_max_predict_ms": 0, "n_indent": 0}));
    let first = free.find('\n').expect("a line break in the answer");
    let (indented, kind) = ask(json!({"n_indent": 90}));
    assert!(
        free.starts_with(&indented) && indented.len() < free.len() && kind == "limit",
        "{free:?} {indented:?} {kind}"
    );
    assert_eq!(indented.trim_end(), free[..first].trim_end());
    let (timed, kind) = ask(json!({"t_max_predict_ms": 1}));
    assert!(free.starts_with(&timed) && timed.ends_with('\n') && kind == "limit", "{free:?} {timed:?} {kind}");
}
