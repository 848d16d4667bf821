//! The verbs that make predictors, as users meet them: what they write is found and used, what cannot be is said in words.

use serde_json::Value as Json;
use std::path::Path;
use std::process::{Command, Stdio};

struct Done {
    code: i32,
    out: String,
    err: String,
}

fn run(dir: &Path, args: &[&str]) -> Done {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dynamicinfer"));
    command.args(args).current_dir(dir).stdin(Stdio::null()).env_remove("DYNAMICINFER_LOG");
    command.env("XDG_CACHE_HOME", dir.join("cache")).env("XDG_DATA_HOME", dir.join("data"));
    let done = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Done { code: done.status.code().unwrap(), out: text(done.stdout), err: text(done.stderr) }
}

fn json(dir: &Path, args: &[&str]) -> Json {
    let done = run(dir, args);
    assert_eq!(done.code, 0, "{args:?}: {}", done.err);
    serde_json::from_str(&done.out).unwrap()
}

fn fixture(name: &str) -> String {
    format!("{}/tests/fixtures/models/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Any text: what the tiny models do is noise.
fn text(dir: &Path, words: usize) -> String {
    let words: Vec<&str> =
        ["once ", "upon ", "a ", "time ", "there ", "was ", "king, "].into_iter().cycle().take(words).collect();
    std::fs::write(dir.join("text.txt"), words.concat()).unwrap();
    "text.txt".into()
}

#[test]
fn a_calibrated_sign_predictor_is_found_by_its_model() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (model, text) = (fixture("relullama"), text(dir, 700));
    let made = json(dir, &["calibrate", &model, "--text", &text, "--recall", "0.8", "--ahead", "1", "--json"]);
    assert_eq!(made["rows"].as_array().unwrap().len(), 3);
    assert!(made["rows"][0]["alpha"].as_f64().unwrap() > 0.0 && made["recall"].as_f64().unwrap() >= 0.8, "{made}");
    // Samples are gone, the file is where the model looks.
    assert_eq!(std::fs::read_dir(dir.join("cache/dynamicinfer/training")).unwrap().count(), 0);
    let models = dir.join("data/dynamicinfer/models");
    let own = std::fs::read_dir(models).unwrap().next().unwrap().unwrap().path();
    let file = own.join("sign.predictor");
    let shown = json(dir, &["show", file.to_str().unwrap(), "--json", "--verify"]);
    assert_eq!((&shown["kind"], shown["tables"].as_array().unwrap().len()), (&"sign".into(), 3));
    // Its threshold makes another selection than that of the uncalibrated one.
    let score = |more: &[&str]| {
        let args = ["eval", &model, "--text", &text, "--predictor", "sign", "--json", "-c", "64"];
        json(dir, &[&args[..], more].concat())["computed_share"].as_f64().unwrap()
    };
    assert!((score(&[]) - made["computed_share"].as_f64().unwrap()).abs() < 0.05);
    let ahead = score(&["--ahead", "1"]);
    std::fs::remove_file(&file).unwrap();
    assert_ne!(score(&["--ahead", "1"]), ahead);
}

#[test]
fn a_trained_predictor_is_found_by_its_model_and_is_below_a_tenth_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let text = text(dir, 700);
    let shape =
        ["--hidden", "128", "--layers", "2", "--ffn", "512", "--heads", "4", "--kv-heads", "4", "--vocab", "300"];
    let made = run(dir, &[&["synth", "-o", "m.neurons", "-c", "512"], &shape[..]].concat());
    assert_eq!(made.code, 0, "{}", made.err);
    let args = ["train-predictor", "m.neurons", "--text", &text, "--ahead", "1", "--json"];
    let made = json(dir, &args);
    let bytes: u64 = made["rows"].as_array().unwrap().iter().map(|r| r["bytes"].as_u64().unwrap()).sum();
    let model = std::fs::metadata(dir.join("m.neurons")).unwrap().len();
    assert!(10 * bytes <= model, "{bytes} of {model}");
    let found = json(dir, &["eval", "m.neurons", "--text", &text, "--predictor", "mlp", "--json", "-c", "512"]);
    assert!(found["recall"].as_f64().unwrap() > 0.9, "{found}");
    let ahead = run(dir, &["eval", "m.neurons", "--text", &text, "--predictor", "mlp", "--ahead", "1"]);
    assert_eq!(ahead.code, 0, "{}", ahead.err);
}

/// It was said that there is none: the store that is packed from the model lies in the cache, and nothing beside it.
#[test]
fn a_predictor_is_found_beside_what_was_packed() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let shape =
        ["--hidden", "256", "--layers", "2", "--ffn", "512", "--heads", "4", "--kv-heads", "4", "--vocab", "300"];
    let made = run(dir, &[&["synth", "-o", "m.gguf", "--active", "0.1", "--quant", "q4_0"], &shape[..]].concat());
    assert_eq!(made.code, 0, "{}", made.err);
    assert!(dir.join("m.mlp.predictor").exists());
    for time in ["when it is packed", "when it is there"] {
        let ran = run(dir, &["run", "m.gguf", "x", "-n", "2", "--predictor", "mlp"]);
        assert_eq!(ran.code, 0, "{time}: {}", ran.err);
    }
}

/// A file of another kind than the predictor that was asked for was passed over, and the model's own one taken.
#[test]
fn a_predictor_file_is_used_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (model, text) = (fixture("relullama"), text(dir, 700));
    let made = run(dir, &["calibrate", &model, "--text", &text, "--recall", "0.6", "-o", "a.predictor"]);
    assert_eq!(made.code, 0, "{}", made.err);
    let asked = |more: &[&str]| {
        let args = ["eval", &model, "--text", &text, "-c", "64", "--json", "--predictor-file", "a.predictor"];
        run(dir, &[&args[..], more].concat())
    };
    for more in [&["--predictor", "dense"][..], &["--predictor", "exact"], &[]] {
        let done = asked(more);
        assert!(
            done.code == 2 && done.err.contains("a.predictor holds a sign predictor; add --predictor sign"),
            "{}",
            done.err
        );
    }
    let used = |args: &[&str]| -> Json { serde_json::from_str(&asked(args).out).unwrap() };
    let (auto, sign) = (used(&["--predictor", "auto"]), used(&["--predictor", "sign"]));
    assert_eq!(auto["computed_share"], sign["computed_share"]);
    assert!(sign["computed_share"].as_f64().unwrap() < 0.9, "{sign}");
}

#[test]
fn parts_with_layers_come_first_in_whatever_order_they_stand() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (model, text) = (fixture("relullama"), text(dir, 200));
    let named = |predictor: &str| {
        let args = ["eval", &model, "--text", &text, "-c", "64", "--json", "--predictor", predictor];
        json(dir, &args)["predictor"].as_str().unwrap().to_owned()
    };
    assert_eq!(named("sign@0,dense"), "sign@0,dense@1");
    assert_eq!(named("dense,sign@0"), "sign@0,dense@1");
    let args = ["eval", &model, "--text", &text, "-c", "64", "--predictor", "sign@0,dense", "--threshold", "0.5"];
    assert_eq!(run(dir, &args).code, 0, "a layer is predicted");
}

#[test]
fn what_cannot_be_made_is_refused_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (relu, silu, text) = (fixture("relullama"), fixture("llama"), text(dir, 700));
    let refused = |args: &[&str], wanted: &[&str]| {
        let done = run(dir, args);
        assert_eq!(done.code, 2, "{args:?}: {}", done.err);
        assert!(wanted.iter().all(|w| done.err.contains(w)), "{args:?}: {}", done.err);
    };
    refused(&["train-predictor", &silu, "--text", &text], &["silu", "dynamicinfer profile MODEL"]);
    refused(&["calibrate", &silu, "--text", &text], &["silu", "train-predictor MODEL"]);
    refused(&["train-predictor", &relu, "--text", &text, "--recall", "1.5"], &["--recall 1.5", "between 0 and 1"]);
    refused(&["train-predictor", &relu, "--text", &text, "--sparsity", "0.5"], &["--sparsity 0.5", "own zeros"]);
    refused(&["calibrate", &relu, "--text", &text, "--tokens", "9"], &["9 tokens are too few"]);
}
