//! What a start knows of a model's neurons: a profile that making a predictor leaves, what earlier runs have learnt, or nothing, which is said.

use crate::support;
use dynamicinfer::cache::Slot;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::formats::{history_file, profile_file};
use dynamicinfer::lab::synth::{write_predictor, write_store};
use dynamicinfer::model::Model;
use dynamicinfer::open::{DeviceKind, DeviceOptions, EngineOptions, Listener, Opened, open};
use dynamicinfer::scheduler::Policy;
use parking_lot::Mutex;
use serde_json::Value as Json;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What is said where nothing is known.
const UNKNOWN: &str = "this model has no activation profile, so it is not known which neurons belong on the device";
const LEARNS: &str = "this run learns for the next start";

/// A home of its own, in which the program runs.
struct Home(tempfile::TempDir);

impl Home {
    fn new() -> Home {
        Home(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    /// What a verb wrote, and what it said.
    fn run(&self, args: &[&str]) -> (String, String) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dynamicinfer"));
        command.args(args).current_dir(self.path()).stdin(Stdio::null()).env_remove("DYNAMICINFER_LOG");
        command.env("XDG_CACHE_HOME", self.path().join("cache")).env("XDG_DATA_HOME", self.path().join("data"));
        let done = command.output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (out, said) = (text(&done.stdout), text(&done.stderr));
        assert!(done.status.success(), "{args:?}: {} {out} {said}", done.status);
        (out, said)
    }

    /// The files of the model's directory that end so.
    fn kept(&self, ending: &str) -> Vec<PathBuf> {
        let models = std::fs::read_dir(self.path().join("data/dynamicinfer/models")).into_iter().flatten().flatten();
        let files = models.flat_map(|model| std::fs::read_dir(model.path()).unwrap().flatten());
        files.map(|file| file.path()).filter(|path| path.to_string_lossy().ends_with(ending)).collect()
    }

    /// A made-up model whose neurons are as uneven as those of trained ones, with its predictor.
    fn uneven(&self) -> PathBuf {
        let shape = dynamicinfer::lab::synth::Shape { active: Some(0.1), ..support::synth(3, [256, 1024], 2048, 5) };
        let store = self.path().join("m.neurons");
        write_store(&shape, Quant::F16, &store, &|_, _| Ok(())).unwrap();
        write_predictor(&shape, &store, &store.with_extension("mlp.predictor"), 2, &|_, _| Ok(())).unwrap();
        store
    }

    /// A published model with true zeros, and a text of some thousand tokens.
    fn with_text(&self) -> (String, String) {
        let words = ["once ", "upon ", "a ", "time ", "there ", "was ", "king, "];
        let text: String = (0..3000).map(|i| words[i * i % 13 % 7]).collect();
        std::fs::write(self.path().join("text.txt"), text).unwrap();
        let model = format!("{}/tests/fixtures/models/relullama", env!("CARGO_MANIFEST_DIR"));
        (model, "text.txt".into())
    }
}

const VIRTUAL: [&str; 6] = ["--device", "virtual", "--machine", "demo-pc", "--ffn-share", "0.3"];

/// Runs a model for some tokens; its report and what was said.
fn report(home: &Home, store: &str, more: &[&str]) -> (Json, String) {
    let args = ["run", store, "Once upon a time", "--temp", "0", "-n", "60", "--ignore-eos", "--json"];
    let (out, said) = home.run(&[&args, &VIRTUAL[..], more].concat());
    (serde_json::from_str(&out).unwrap(), said)
}

fn share(report: &Json) -> f64 {
    report["gpu_share"].as_f64().unwrap()
}

#[test]
fn a_second_start_begins_with_the_neurons_that_the_first_has_seen() {
    let home = Home::new();
    let store = home.uneven();
    let store = store.to_str().unwrap();
    // Nothing moves: what is on the device is what was placed there.
    let (first, said) = report(&home, store, &["--policy", "static"]);
    assert!(
        said.contains(UNKNOWN) && said.contains("make one: dynamicinfer profile") && said.contains(LEARNS),
        "{said}"
    );
    let kept = home.kept("activation.history");
    let [kept] = &kept[..] else { panic!("{kept:?}") };
    let tokens = history_file::open(kept).unwrap().header.tokens;
    assert!(tokens >= 60, "{tokens} tokens were counted");
    let (second, said) = report(&home, store, &["--policy", "static"]);
    assert!(!said.contains(UNKNOWN), "{said}");
    // The same text, and nearly the same hits as a profile of it would give.
    assert!(share(&first) < 0.45 && share(&second) > 0.65, "{} and {}", share(&first), share(&second));
    // It goes on from what was known.
    assert!(history_file::open(kept).unwrap().header.tokens > tokens + 60);
    let (planned, _) = home.run(&["plan", store, "--vram", "8MiB", "--machine", "demo-pc"]);
    assert!(planned.contains("tokens of earlier runs, ") && planned.contains("activation.history"), "{planned}");
    // A profile is better, and with one nothing is learnt from runs.
    std::fs::write(home.path().join("text.txt"), "Once upon a time there was a king. ".repeat(20)).unwrap();
    home.run(&["profile", store, "--text", "text.txt"]);
    let before = std::fs::read(kept).unwrap();
    let (_, said) = report(&home, store, &[]);
    assert!(!said.contains(UNKNOWN) && std::fs::read(kept).unwrap() == before, "{said}");
}

#[test]
fn without_learning_nothing_is_written_or_used() {
    let home = Home::new();
    let store = home.uneven();
    let store = store.to_str().unwrap();
    for flag in ["--no-learn", "--no-history"] {
        let (_, said) = report(&home, store, &[flag]);
        assert!(said.contains(UNKNOWN) && !said.contains(LEARNS), "{said}");
        assert_eq!(home.kept("activation.history"), [] as [&Path; 0]);
    }
    // The tokens of a measurement are nobody's text.
    let (_, said) = home.run(&[&["bench", store, "-p", "0", "-n", "8", "-r", "1"], &VIRTUAL[..]].concat());
    assert!(said.contains(UNKNOWN) && !said.contains(LEARNS), "{said}");
    assert_eq!(home.kept("activation.history"), [] as [&Path; 0]);
    // What was learnt is there for those who want it.
    let (_, said) = report(&home, store, &[]);
    assert!(said.contains(LEARNS), "{said}");
    let (placed, said) = report(&home, store, &["--policy", "static"]);
    assert!(!said.contains(UNKNOWN), "{said}");
    let (_, said) = report(&home, store, &["--policy", "static", "--no-learn"]);
    assert!(said.contains(UNKNOWN), "{said}");
    assert!(share(&placed) > 0.5, "{}", share(&placed));
    // Where all neurons have room it does not matter which are active.
    let args = ["run", store, "Once", "-n", "2", "--device", "virtual", "--machine", "demo-pc", "--vram", "1GiB"];
    let (_, said) = home.run(&[&args[..], &["--no-learn", "--policy", "static"]].concat());
    assert!(!said.contains(UNKNOWN), "{said}");
}

/// Keeps what is said.
#[derive(Default)]
struct Notes(Mutex<Vec<String>>);

impl Listener for Notes {
    fn note(&self, text: &str) {
        self.0.lock().push(text.to_owned());
    }
}

/// Opens a store with its device at rest; the neurons in slots by their published numbers, and what was said.
fn residents(store: &Path) -> (Vec<Vec<usize>>, String) {
    let device = DeviceOptions {
        ffn_share: Some(0.25),
        machine: Some("demo-pc".into()),
        policy: Policy::Static,
        ..DeviceOptions::new(DeviceKind::Virtual)
    };
    let notes = Notes::default();
    let Opened { engine, .. } =
        open(&EngineOptions { device: Some(device), ..EngineOptions::new(store) }, &notes).unwrap();
    let split = engine.split.as_ref().unwrap();
    let layers = split.cache.layers.iter().zip(&engine.model.layers);
    let here = layers.map(|(cache, layer)| {
        let placed: Vec<bool> = (0..engine.model.config.widest_ffn())
            .map(|n| cache.table.slots().iter().filter_map(|s: &Slot| s.resident()).any(|r| r.index() == n))
            .collect();
        let placed = layer.order.into_published(&placed);
        placed.iter().enumerate().filter(|(_, here)| **here).map(|(n, _)| n).collect()
    });
    (here.collect(), notes.0.into_inner().join("\n"))
}

#[test]
fn planted_hot_neurons_are_resident_and_a_foreign_or_damaged_history_is_passed_over() {
    let home = Home::new();
    let store = home.uneven();
    let model = Model::open(&store).unwrap();
    let (layers, ffn) = (model.config.layers().len(), model.config.widest_ffn());
    // Every fourth neuron, another one in each layer.
    let hot = |layer: usize| (0..ffn).filter(move |n| n % 4 == layer).collect::<Vec<_>>();
    let planted: Vec<Vec<f32>> =
        (0..layers).map(|l| (0..ffn).map(|n| if n % 4 == l { 0.5 } else { 0.01 }).collect()).collect();
    let header = history_file::Header {
        fingerprint: model.fingerprint().to_owned(),
        model: model.config.name.clone(),
        layers,
        hidden: model.config.hidden,
        ffn,
        tokens: 3000,
        sections: Vec::new(),
    };
    let path = store.with_extension("activation.history");
    history_file::write(&path, header.clone(), &planted).unwrap();
    let (here, said) = residents(&store);
    assert!(here == (0..layers).map(hot).collect::<Vec<_>>() && !said.contains(UNKNOWN), "{said}");
    let good = std::fs::read(&path).unwrap();
    let bad = |write: &dyn Fn()| {
        write();
        let (here, said) = residents(&store);
        assert!(here != (0..layers).map(hot).collect::<Vec<_>>() && said.contains(UNKNOWN), "{said}");
        let warnings =
            said.lines().filter(|line| line.starts_with("warning: ") && line.contains("it was set aside as"));
        assert_eq!(warnings.count(), 1, "{said}");
    };
    bad(&|| {
        let foreign = history_file::Header { fingerprint: "11".repeat(16), ..header.clone() };
        history_file::write(&path, foreign, &planted).unwrap();
    });
    bad(&|| std::fs::write(&path, &good[..good.len() / 2]).unwrap());
}

#[test]
fn a_predictor_that_is_made_leaves_a_profile_that_plans_and_runs_begin_with() {
    let made = |verb: &[&str]| {
        let home = Home::new();
        let (model, text) = home.with_text();
        let (_, said) = home.run(&[&[verb[0], &model, "--text", &text], &verb[1..]].concat());
        assert!(said.contains("activation.profile: activation profile written"), "{said}");
        let kept = home.kept("activation.profile");
        let [kept] = &kept[..] else { panic!("{kept:?}") };
        let read = |path: &Path| {
            let file = profile_file::open(path).unwrap();
            profile_file::read_text(&file, 0).unwrap()
        };
        // As the verb for profiles counts the same text in the same windows, but for the order in which sums are made.
        home.run(&["profile", &model, "--text", &text, "-c", "256", "-o", "other.profile"]);
        let (on_the_way, counted) = (read(kept), read(&home.path().join("other.profile")));
        assert_eq!((&on_the_way.info, &on_the_way.counts), (&counted.info, &counted.counts));
        assert!(on_the_way.info.tokens > 1500 && on_the_way.inputs.is_some() && on_the_way.sums == counted.sums);
        // It is found.
        let (planned, said) = home.run(&["plan", &model, "--vram", "64M", "--machine", "demo-pc"]);
        assert!(planned.contains(" tokens of ") && planned.contains("activation.profile"), "{planned} {said}");
        let (_, said) = report(&home, &model, &["--predictor", "exact"]);
        assert!(!said.contains(UNKNOWN), "{said}");
        assert_eq!(home.kept("activation.history"), [] as [&Path; 0]);
        // One that is there stays as it is.
        let before = std::fs::read(kept).unwrap();
        let (_, said) = home.run(&["calibrate", &model, "--text", &text, "--ahead", "0", "--recall", "0.8"]);
        assert!(!said.contains("activation profile written") && std::fs::read(kept).unwrap() == before, "{said}");
    };
    made(&["calibrate", "--ahead", "0"]);
    made(&["train-predictor", "--ahead", "0"]);
}

#[test]
fn a_run_that_calibrates_begins_with_what_it_has_counted() {
    let home = Home::new();
    let (model, text) = home.with_text();
    let (_, said) = report(&home, &model, &["--calibrate", &text]);
    assert!(said.contains("activation profile written") && !said.contains(UNKNOWN), "{said}");
}
