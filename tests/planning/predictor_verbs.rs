//! The verbs that make predictors, as users meet them: what they write is found and used, what cannot be is said in words.

use crate::programs;
use serde_json::Value as Json;
use std::path::Path;
use std::process::{Command, Stdio};

struct Done {
    code: i32,
    out: String,
    err: String,
}

fn run(dir: &Path, args: &[&str]) -> Done {
    let mut command = Command::new(programs::program(args));
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

/// A mixture's own predictor says which neurons inside its experts may fire, once it is packed by neuron.
#[test]
fn a_mixtures_predictor_is_trained_on_its_file_and_used_where_it_is_packed() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let text = text(dir, 700);
    let shape = "--hidden 128 --layers 2 --ffn 256 --heads 4 --kv-heads 4 --vocab 300 --experts 4 --experts-used 2 --active 0.1";
    let shape: Vec<&str> = shape.split(' ').collect();
    let made = run(dir, &[&["synth", "-o", "m.gguf", "-c", "512", "--quant", "q8_0"], &shape[..]].concat());
    assert!(made.code == 0 && made.err.contains("from the layer's own residual: recall"), "{}", made.err);
    std::fs::remove_file(dir.join("m.mlp.predictor")).unwrap();
    assert_eq!(run(dir, &["pack", "m.gguf", "-o", "m.neurons"]).code, 0);
    let none = run(dir, &["run", "m.neurons", "x", "-n", "2"]);
    assert!(none.code == 0 && none.err.contains("this mixture has no predictor yet"), "{}", none.err);
    let made = json(dir, &["train-predictor", "m.gguf", "--text", &text, "--json"]);
    assert_eq!(made["rows"].as_array().unwrap().len(), 2, "{made}");
    let found = json(dir, &["eval", "m.neurons", "--text", &text, "--predictor", "mlp", "--json", "-c", "512"]);
    assert!(found["recall"].as_f64().unwrap() > 0.9 && found["computed_share"].as_f64().unwrap() < 0.9, "{found}");
    // It is what runs when nobody says, and audits see it.
    let ran = json(dir, &["run", "m.neurons", "x", "-n", "40", "--raw", "--audit", "1", "--json"]);
    assert_eq!(ran["predictor"], "mlp");
    assert!(ran["recall"].as_f64().unwrap() > 0.3 && ran["computed_share"].as_f64().unwrap() < 0.9, "{ran}");
    // What `bench` says of the gates is about the same neurons.
    let bench = |kind: &str| {
        let args = ["bench", "m.neurons", "-p", "0", "-n", "20", "-r", "1", "-o", "json", "--predictor", kind];
        json(dir, &args)[0].clone()
    };
    let (gates, network) = (bench("dense"), bench("mlp"));
    let share = |row: &Json, name: &str| row[name].as_f64().unwrap();
    assert!(gates["predictor"] == "exact" && network["predictor"] == "mlp", "{gates} {network}");
    assert!(share(&gates, "recall") == 1.0 && share(&network, "recall") < 1.0, "{gates} {network}");
    assert!((share(&gates, "computed_share") - share(&gates, "active_share")).abs() < 0.05, "{gates}");
    // `dense` and `exact` go by the gates: nothing is lost.
    let text_of = |kind: &str| {
        let args = ["run", "m.neurons", "x", "-n", "20", "--raw", "--temp", "0", "--json", "--predictor", kind];
        json(dir, &args)["text"].clone()
    };
    assert_eq!(text_of("dense"), text_of("exact"));
    let machine = Path::new(env!("CARGO_MANIFEST_DIR")).join("profiles/machines/demo-pc.toml");
    for (args, why) in [
        (vec!["run", "m.gguf", "x", "--predictor", "mlp"], "pack it first"),
        (vec!["run", "m.neurons", "x", "--predictor", "sign"], "a mixture takes mlp, exact or dense"),
        (vec!["run", "m.neurons", "x", "--predictor", "mlp", "--ahead", "1"], "--ahead: inside experts"),
        (vec!["run", "m.neurons", "x", "--calibrate", &text], "train-predictor makes a mixture's"),
        (vec!["run", "m.neurons", "x", "--predictor", "exact", "--threshold", "0.3"], "add --predictor mlp"),
        (vec!["calibrate", "m.gguf", "--text", &text], "train-predictor"),
        (vec!["train-predictor", "m.gguf", "--text", &text, "--ahead", "1"], "--ahead: neurons of experts"),
        (vec!["train-predictor", "m.gguf", "--text", &text, "--ram", "1GiB"], "--ram has no effect here"),
        (vec!["run", "m.neurons", "x", "--activation", "silu"], "--activation silu: "),
        (vec!["synth", "--experts", "1", "--experts-used", "1", "-o", "one.gguf"], "two experts or more"),
        (vec!["record", "m.neurons", "--text", &text, "-o", "m.trace", "--predictor", "mlp"], "routers predict that"),
    ] {
        let done = run(dir, &args);
        assert!(done.code == 2 && done.err.contains(why), "{args:?}: {}", done.err);
    }
    // A device takes both, and what was planned for it: experts of the file, and neurons of what was packed.
    for model in ["m.gguf", "m.neurons"] {
        let vram = ["--vram", "24MiB", "--machine", machine.to_str().unwrap()];
        // However many slots it has: keys and values take what they leave.
        for kv in ["auto", "host", "device"] {
            let plan = ["plan", model, "-o", "plan.toml", "-f", "--kv-place", kv];
            let plan = run(dir, &[&plan[..], &vram[..]].concat());
            assert_eq!(plan.code, 0, "{model}, {kv}: {}", plan.err);
            let device = ["--device", "virtual", "--placement", "plan.toml", "--no-history"];
            let ran = run(dir, &[&["run", model, "x", "-n", "4", "--raw"], &device[..], &vram[..]].concat());
            assert_eq!(ran.code, 0, "{model}, {kv}: {}", ran.err);
        }
    }
    // What was learnt is read by the next one: it was refused as another model's.
    let device = ["--device", "virtual", "--vram", "24MiB", "--machine", machine.to_str().unwrap()];
    for time in ["the first", "the second"] {
        let ran = run(dir, &[&["run", "m.neurons", "x", "-n", "4", "--raw"], &device[..]].concat());
        assert_eq!(ran.code, 0, "{time}: {}", ran.err);
    }
    // A plan goes by what is computed: all gates of the experts without the network.
    let plan = |predictor: &str| {
        let args = ["plan", "m.neurons", "--json", "--vram", "24MiB", "--machine", machine.to_str().unwrap()];
        json(dir, &[&args[..], &["--predictor", predictor]].concat())["details"].clone()
    };
    let (by_gates, by_network) = (plan("none"), plan("auto"));
    assert!(by_gates["predictor"] == "gates" && by_network["predictor"] == "trained", "{by_gates} {by_network}");
    let expected = |of: &Json| of["expected"]["cpu_tokens_per_s"].as_f64().unwrap();
    assert!(expected(&by_network) > expected(&by_gates), "{by_gates} {by_network}");
    let refused = run(dir, &["plan", "m.neurons", "--vram", "24MiB", "--predictor", "sign"]);
    assert!(refused.code == 2 && refused.err.contains("has mlp or none"), "{}", refused.err);
    // Before anything is trained.
    let done = run(dir, &["train-predictor", "m.gguf", "--text", &text, "-o", "nowhere/x.predictor"]);
    assert!(done.code == 1 && done.err.contains("the folder nowhere does not exist"), "{}", done.err);
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
    refused(&["train-predictor", &relu, "--text", &text, "--sparsity", "0.5"], &["--sparsity 0.5", "has zeros"]);
    refused(&["calibrate", &relu, "--text", &text, "--tokens", "9"], &["9 tokens are too few"]);
}
