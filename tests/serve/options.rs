//! How a model is opened, as `serve` and `load` are told, and the budget of its device in the words of the verbs.

use crate::daemon::{Daemon, command};
use serde_json::json;
use std::process::Stdio;

#[test]
fn load_takes_the_engines_options_for_that_model_alone() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_in(dir.path(), &["--predictor", "dense", "--ctx-size", "128"]);
    let verb = |args: &[&str]| {
        let done = command(dir.path(), args).stderr(Stdio::piped()).stdout(Stdio::piped()).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (done.status.code().unwrap(), text(done.stdout), text(done.stderr))
    };
    let model = || daemon.get("/v1/x/ps")["models"][0].clone();
    assert_eq!((&model()["predictor"], &model()["context"]), (&json!("dense"), &json!(128)));

    // Without a device a budget is refused with what would give it one.
    let (code, _, error) = verb(&["budget", "set", "16MiB"]);
    assert!(
        code == 1 && error.contains("CPU alone") && error.contains("dynamicinfer load demo --device cuda"),
        "{error}"
    );

    let load = ["load", "demo", "--device", "virtual", "--vram", "64m", "--predictor", "Exact", "-c", "64", "-t", "1"];
    let load = [&load[..], &["--prefill", "exact"]].concat();
    let (code, _, error) = verb(&load);
    assert_eq!(code, 0, "{error}");
    let loaded = model();
    assert_eq!(
        (&loaded["predictor"], &loaded["context"], &loaded["threads"]),
        (&json!("exact"), &json!(64), &json!(1))
    );
    assert!(loaded["device"].as_str().unwrap().contains("virtual"), "{loaded}");

    // The verb takes its words in any of these ways, and the socket anywhere.
    let socket = dir.path().join("dynamicinfer.sock");
    let socket = socket.to_str().unwrap();
    let budget = |args: &[&str]| {
        let (code, out, error) = verb(args);
        assert_eq!(code, 0, "{args:?}: {error}");
        out.split("of ").nth(1).unwrap().split(';').next().unwrap().to_owned()
    };
    assert_eq!(budget(&["budget"]), "64.00 MiB");
    assert_eq!(budget(&["budget", "set", "32M"]), "32.00 MiB");
    assert_eq!(budget(&["budget", "40 MiB", "--socket", socket]), "40.00 MiB");
    assert_eq!(budget(&["budget", "set", "48MiB", "--socket", socket]), "48.00 MiB");
    assert_eq!(budget(&["--socket", socket, "budget", "get"]), "48.00 MiB");
    for (words, want) in [(&["set"][..], "needs a size: set 6GiB"), (&["much"], "'much' is not a size")] {
        let (code, _, error) = verb(&[&["budget"], words].concat());
        assert!(code == 2 && error.contains(want), "{error}");
    }

    // The next load is as the daemon was started.
    assert_eq!(verb(&["load", "demo"]).0, 0);
    assert_eq!(
        (&model()["predictor"], &model()["context"], &model()["device"]),
        (&json!("dense"), &json!(128), &json!(null))
    );
    // What is wrong has the exit status that it has without a daemon.
    std::fs::write(dir.path().join("damaged.gguf"), b"GGUF is what it says, and nothing behind it").unwrap();
    assert_eq!(verb(&["load", "damaged.gguf"]).0, 5);
    assert_eq!(verb(&["load", "demo", "--ram", "1MiB"]).0, 6);
    // A setting of the daemon itself is none of a model.
    let refused = daemon.post("/v1/x/models/load", &json!({"model": "demo", "settings": {"serve.queue": "1"}}));
    assert_eq!(refused.status, 400);
    assert!(refused.text().contains("'serve.queue' is not a setting of a model"), "{}", refused.text());
    assert_eq!(model()["name"], "demo", "and the model goes on");
}

/// A threshold and a predictor's file are those of the model that was named beside them: another one was refused, with advice that nobody could
/// follow while the daemon ran.
#[test]
fn what_was_typed_for_one_model_is_not_anothers() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_in(dir.path(), &["--predictor", "mlp", "--threshold", "0.7"]);
    let load = |args: &[&str]| {
        let done = command(dir.path(), &[&["load"], args].concat()).stderr(Stdio::piped()).output().unwrap();
        assert_eq!(done.status.code(), Some(0), "{args:?}: {}", String::from_utf8_lossy(&done.stderr));
    };
    let threshold = || daemon.get("/v1/x/cache")["layers"][1]["threshold"].clone();
    assert_eq!(threshold(), json!(0.7f32));
    load(&["demo-moe"]);
    assert_eq!(threshold(), json!(null));
    load(&["demo"]);
    assert_eq!(threshold(), json!(0.7f32));
}

#[test]
fn requests_that_name_no_sampling_get_that_of_the_settings() {
    let dir = tempfile::tempdir().unwrap();
    let environment = [("DYNAMICINFER_SAMPLING_TEMPERATURE", "0")];
    let mut daemon = Daemon::spawn(dir.path(), &["serve", "demo"], &environment);
    daemon.wait_for("is ready");
    let text = |more: serde_json::Value| {
        let mut request = json!({"prompt": "Once upon a time", "max_tokens": 16});
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        daemon.post("/v1/completions", &request).json()["choices"][0]["text"].as_str().unwrap().to_owned()
    };
    let likeliest = text(json!({"temperature": 0}));
    assert!((1..4).all(|seed| text(json!({"seed": seed})) == likeliest));
    assert!(
        (1..4).any(|seed| text(json!({"seed": seed, "temperature": 1.5})) != likeliest),
        "what is said comes first"
    );
}

#[test]
fn guesses_are_made_where_the_setting_says_so() {
    let said = "the cat sat on the mat and the dog sat on the mat and the cat sat on";
    let story = json!({"prompt": said, "max_tokens": 48, "ignore_eos": true, "temperature": 0});
    for (mode, guesses) in [("on", true), ("off", false)] {
        let dir = tempfile::tempdir().unwrap();
        let mut daemon = Daemon::spawn(dir.path(), &["serve", "demo"], &[("DYNAMICINFER_SERVE_SPECULATION", mode)]);
        daemon.wait_for("is ready");
        assert_eq!(daemon.post("/v1/completions", &story).status, 200);
        let [guessed, accepted] =
            ["guessed", "accepted"].map(|name| daemon.metric(&format!("dynamicinfer_{name}_tokens_total")));
        assert_eq!(guessed > 0.0, guesses, "{mode}: {guessed} guesses");
        assert!(accepted <= guessed);
    }
}
