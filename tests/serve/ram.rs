//! The memory of a model of which a part lies on disk, while the daemon answers.

use crate::daemon::{Daemon, command};
use crate::files::{fails_closed_and_comes_back, text};
use dynamicinfer::formats::neuron_store::NeuronStore;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::lab::synth::{Shape, write_predictor, write_store};
use dynamicinfer::model::config::Activation;
use dynamicinfer::prng::Prng;
use serde_json::json;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::OnceLock;

/// A model of some 170 MiB with a predictor: its neurons take more than what is set aside for the program itself. Made once for all tests,
/// which takes a minute; each gets a copy.
fn model(dir: &Path) -> PathBuf {
    static MADE: OnceLock<PathBuf> = OnceLock::new();
    let made = MADE.get_or_init(|| made(&Path::new(env!("CARGO_TARGET_TMPDIR")).join("serve-ram")));
    let store = dir.join("model.neurons");
    for (from, to) in [(made, &store), (&predictor(made), &predictor(&store))] {
        std::fs::copy(from, to).unwrap();
    }
    store
}

fn predictor(store: &Path) -> PathBuf {
    store.with_extension("mlp.predictor")
}

fn made(dir: &Path) -> PathBuf {
    std::fs::create_dir_all(dir).unwrap();
    let shape = Shape {
        hidden: 512,
        layers: 10,
        ffn: 5632,
        heads: 4,
        kv_heads: 2,
        vocab: 300,
        context: 512,
        activation: Activation::Relu,
        active: Some(0.1),
        seed: 4,
        experts: None,
        outliers: 0,
    };
    let store = dir.join("model.neurons");
    write_store(&shape, Quant::F16, &store, &|_, _| Ok(())).unwrap();
    write_predictor(&shape, &store, &predictor(&store), 2, &|_, _| Ok(())).unwrap();
    store
}

/// Bytes of the process's own memory that are there.
fn resident(daemon: &Daemon) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.child.id())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")?.trim().strip_suffix(" kB"));
    line.unwrap().parse::<u64>().unwrap() << 10
}

#[test]
fn host_memory_changes_under_a_running_answer_and_its_text_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let store = model(dir.path());
    let serve = ["serve", store.to_str().unwrap(), "--ram", "140MiB", "-c", "256", "-t", "2", "--deterministic"];
    let mut daemon = Daemon::spawn(dir.path(), &serve, &[]);
    daemon.wait_for("is ready");
    let daemon = &daemon;
    let state = || daemon.get("/v1/x/budget");
    assert_eq!((&state()["ram_budget_bytes"], &state()["device"]), (&json!(140 << 20), &json!(null)));
    let set = |bytes: u64| daemon.call("PUT", "/v1/x/budget", &json!({"ram_budget_bytes": bytes}).to_string());

    // Below the least it is refused with the least, and stays what it was.
    let refused = set(1 << 20);
    let message = refused.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(refused.status == 400 && message.contains("--ram 1.00 MiB is below the "), "{message}");
    let (_, least) = message.split_once("give --ram ").unwrap();
    let least: u64 = least.split_once("MiB or more").unwrap().0.parse().unwrap();
    assert_eq!(state()["ram_budget_bytes"], 140 << 20);

    let ask = json!({"prompt": "Once upon a time", "max_tokens": 100, "temperature": 0, "ignore_eos": true});
    let answer = || daemon.post("/v1/completions", &ask).json()["choices"][0]["text"].clone();
    let alone = answer();
    let (mut prng, mut changes) = (Prng::new(1), 0);
    let together = std::thread::scope(|scope| {
        let running = scope.spawn(answer);
        while !running.is_finished() {
            let asked = (least << 20) + prng.below(30 << 20);
            let budget = set(asked).json();
            assert_eq!(budget["ram_budget_bytes"], asked, "{budget}");
            assert!(budget["ram_used_bytes"].as_u64().unwrap() <= asked, "{budget}");
            changes += 1;
        }
        running.join().unwrap()
    });
    assert!(changes >= 5, "{changes} changes");
    assert_eq!(together, alone);

    // More than all of it takes is room for all; and what a smaller budget does not allow goes back to the system.
    assert_eq!(set(1 << 30).status, 200);
    assert_eq!(answer(), alone);
    let (much, used) = (resident(daemon), state()["ram_used_bytes"].as_u64().unwrap());
    let little = set(least << 20).json()["ram_used_bytes"].as_u64().unwrap();
    let given_back = much.saturating_sub(resident(daemon));
    assert!(given_back > (used - little) / 10 * 9 && used > little + (10 << 20), "{given_back} of {used} - {little}");
    assert_eq!(daemon.metric("dynamicinfer_ram_budget_bytes"), (least << 20) as f64);
    assert_eq!(answer(), alone);
    the_verb(dir.path());
}

/// The same in the words of the verb.
fn the_verb(dir: &Path) {
    let verb = |args: &[&str]| {
        let done = command(dir, args).output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (done.status.code().unwrap(), text(done.stdout), text(done.stderr))
    };
    for (args, then) in [
        (&["budget", "set", "--ram", "144MiB"][..], "of 144.00 MiB"),
        (&["budget", "--ram=148M", "get"], ""),
        (&["budget", "--ram", "148M"], "of 148.00 MiB"),
        (&["budget"], "of 148.00 MiB"),
    ] {
        let (code, out, error) = verb(args);
        assert_eq!(code, if then.is_empty() { 2 } else { 0 }, "{args:?}: {error}");
        assert!(then.is_empty() || out.contains("host memory: ") && out.contains(then), "{out}");
    }
    let (code, _, error) = verb(&["budget", "set", "--ram", "2MiB"]);
    assert!(code == 6 && error.contains("is below the "), "{code} {error}");
    let (code, _, error) = verb(&["budget", "set", "1GiB"]);
    assert!(code == 1 && error.contains("CPU alone"), "{error}");
    // As `run` and `serve` refuse them.
    for (wrong, why) in
        [(&["--vram", "6MiB"][..], "engine.vram needs a device"), (&["--policy", "lru"], "engine.policy needs")]
    {
        let (code, _, error) = verb(&[&["load", "demo"], wrong].concat());
        assert!(code == 2 && error.contains(why), "{code} {error}");
    }
    assert!(verb(&["budget"]).1.contains("of 148.00 MiB"));
}

/// Where the whole model is in memory there is nothing that could be set, and it is said what to do.
#[test]
fn without_a_limit_there_is_none_to_change() {
    let dir = tempfile::tempdir().unwrap();
    let daemon = Daemon::start_in(dir.path(), &[]);
    assert_eq!(daemon.get("/v1/x/budget")["ram_budget_bytes"], json!(null));
    let refused = daemon.call("PUT", "/v1/x/budget", r#"{"ram_budget_bytes": 1073741824}"#);
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (409, &json!("no_ram_limit")));
    let both = daemon.call("PUT", "/v1/x/budget", r#"{"ram_budget_bytes": 1, "vram_budget_bytes": 1}"#);
    assert!(both.status == 400 && both.text().contains("ram_budget_bytes, for host memory"), "{}", both.text());
    // A limit above what it takes would be none again.
    for (asked, advice) in
        [("1GiB", "dynamicinfer load demo --ram SIZE"), ("1MiB", "dynamicinfer load demo --ram 1048576")]
    {
        let done = command(dir.path(), &["budget", "set", "--ram", asked]).stderr(Stdio::piped()).output().unwrap();
        let error = String::from_utf8(done.stderr).unwrap();
        assert!(done.status.code() == Some(1) && error.contains(advice), "{error}");
    }
}

/// A part of the model is read while answers are made, so what happens to its file meets reads, too, not the map alone: replaced, it goes on as
/// it was; cut or written to, requests are refused in words, and the daemon lives.
#[test]
fn a_file_under_a_limit_that_is_replaced_cut_or_written_to() {
    let dir = tempfile::tempdir().unwrap();
    let store = model(dir.path());
    let good = std::fs::read(&store).unwrap();
    let start = |store: &Path| {
        let args = ["serve", store.to_str().unwrap(), "--ram", "140MiB", "-c", "256", "-t", "2", "--deterministic"];
        let mut daemon = Daemon::spawn(dir.path(), &args, &[]);
        daemon.wait_for("is ready");
        assert_eq!(daemon.get("/v1/x/budget")["ram_budget_bytes"], 140 << 20);
        daemon
    };
    let daemon = start(&store);
    let before = text(&daemon);
    assert!(daemon.metric("dynamicinfer_disk_reads_total") > 0.0);
    std::fs::rename(&store, dir.path().join("old")).unwrap();
    std::fs::write(&store, "another model").unwrap();
    while daemon.get("/v1/x/ps")["models"][0]["file"] != "replaced" {}
    assert_eq!(text(&daemon), before);
    drop(daemon);
    std::fs::rename(dir.path().join("old"), &store).unwrap();

    let daemon = start(&store);
    assert_eq!(text(&daemon), before);
    File::options().write(true).open(&store).unwrap().set_len(1 << 20).unwrap();
    fails_closed_and_comes_back(&daemon, &store, &good, &before, "it has 1048576 bytes");
    drop(daemon);

    let daemon = start(&store);
    File::options().write(true).open(&store).unwrap().write_all_at(&[0x3c; 4096], 16 << 20).unwrap();
    fails_closed_and_comes_back(&daemon, &store, &good, &before, "was written to");
}

/// A bit of one neuron is wrong on disk: what needs it is refused and named, what does not goes on beside it, and the daemon lives.
#[test]
fn a_damaged_neuron_ends_the_answers_that_need_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = model(dir.path());
    let start = || {
        let args = ["serve", store.to_str().unwrap(), "--ram", "140MiB", "-c", "256", "-t", "2", "--deterministic"];
        let mut daemon = Daemon::spawn(dir.path(), &args, &[]);
        daemon.wait_for("is ready");
        daemon
    };
    let daemon = start();
    let before = text(&daemon);
    assert!(daemon.metric("dynamicinfer_disk_verified_bytes_total") > 0.0);
    assert_eq!(daemon.metric("dynamicinfer_disk_reads_again_total"), 0.0);
    drop(daemon);

    // A neuron that the short text does not need; a long prompt needs all.
    let (layer, neuron, bytes) = (5, 17, 3 * 512 * 2);
    let section = NeuronStore::open(&store).unwrap().section(&format!("layer.{layer}.ffn")).unwrap().offset;
    let at = section + neuron * bytes;
    let file = File::options().read(true).write(true).open(&store).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at + 1000).unwrap();
    file.write_all_at(&[byte[0] ^ 0x10], at + 1000).unwrap();

    let daemon = start();
    let long = json!({"prompt": "Once upon a time ".repeat(8), "max_tokens": 20, "temperature": 0});
    let name = store.file_name().unwrap().to_str().unwrap();
    let wanted = format!("{name}: layer {layer}, neuron {neuron}: its checksum is not");
    let failed = || {
        let refused = daemon.post("/v1/completions", &long);
        let why = refused.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(refused.status == 500 && why.starts_with(&wanted), "{} {why}", refused.status);
        assert!(why.contains("show --verify") && why.ends_with(&format!("(at byte {at})")), "{why}");
    };
    failed();
    std::thread::scope(|scope| {
        let beside: Vec<_> = (0..3).map(|_| scope.spawn(|| text(&daemon))).collect();
        failed();
        beside.into_iter().for_each(|text| assert_eq!(text.join().unwrap(), before));
    });
    assert_eq!(text(&daemon), before);
    assert!(daemon.metric("dynamicinfer_disk_reads_again_total") >= 6.0);
    assert_eq!(daemon.metric("dynamicinfer_request_failed_total"), 2.0);
}
