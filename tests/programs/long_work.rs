//! Work that takes long, as its users meet it: what it says beforehand and meanwhile, what Ctrl-C leaves, and the forms of its results.

use crate::programs;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value as Json;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn command(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(programs::program(args));
    command.args(args).current_dir(dir).env_clear().env("PATH", "/usr/bin:/bin").env("HOME", dir).stdin(Stdio::null());
    command
}

/// Stdout and stderr of a command that ends well.
fn run(dir: &Path, args: &[&str]) -> (String, String) {
    let done = command(dir, args).output().unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert!(done.status.success(), "{args:?}: {said}");
    (String::from_utf8(done.stdout).unwrap(), said)
}

fn json(dir: &Path, args: &[&str]) -> Json {
    serde_json::from_str(&run(dir, args).0).unwrap()
}

fn fixture(name: &str) -> String {
    format!("{}/tests/fixtures/models/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Half a second, and what a machine that does much else adds to it.
const SOON: Duration = Duration::from_secs(4);

/// Starts a command, sends Ctrl-C when it has said `begun`, and returns what it printed then and said after that.
fn stopped(dir: &Path, args: &[&str], begun: &str) -> (String, String) {
    let mut child = command(dir, args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains(begun) {
        line.clear();
        assert!(said.read_line(&mut line).unwrap() > 0, "{args:?} ended without {begun:?}");
    }
    let start = Instant::now();
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    let status = child.wait().unwrap();
    let took = start.elapsed();
    assert_eq!(status.code(), Some(130), "{args:?}: {rest}");
    assert!(took < SOON, "{args:?} went on for {took:?}");
    let mut out = String::new();
    child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    (out, rest)
}

/// A chunk of a prompt is one step of `bench`, and takes seconds with a large model: Ctrl-C was looked at after it.
#[test]
fn ctrl_c_ends_a_bench_at_once_and_what_it_has_measured_is_printed() {
    let dir = tempfile::tempdir().unwrap();
    let shape =
        ["--hidden", "256", "--layers", "2", "--ffn", "1024", "--heads", "4", "--kv-heads", "4", "--vocab", "512"];
    run(dir.path(), &[&["synth", "-o", "m.neurons", "-c", "65536"][..], &shape].concat());
    // A row that is soon done, and one that takes long.
    let args = ["bench", "m.neurons", "-p", "0", "-n", "4", "-r", "1", "-d", "0,20000", "-t", "1", "-o", "csv"];
    let (out, said) = stopped(dir.path(), &args, "measuring: 10 %");
    assert_eq!(out.lines().count(), 2, "{out}");
    assert!(out.lines().nth(1).unwrap().contains("\"tg4\""), "{out}");
    assert!(said.contains("stopped after 1 measured row\n"), "{said}");
}

#[test]
fn ctrl_c_ends_a_replay_at_once_and_progress_never_passes_100() {
    let dir = tempfile::tempdir().unwrap();
    let (_, said) = run(dir.path(), &["record", "--synth", "--max-tokens", "60", "-o", "a.trace"]);
    // 720 tokens of 8 layers, each a bit and two bytes for 2048 neurons, but for the first layer's second.
    assert!(said.starts_with("a.trace becomes 22."), "the space is announced: {said}");
    let shown = std::fs::metadata(dir.path().join("a.trace")).unwrap().len() as f64 / (1 << 20) as f64;
    assert!((22.0..23.2).contains(&shown), "{shown} MiB");
    let replay = ["replay", "a.trace", "--policy", "static", "full", "--ffn-share", "0.3", "--link", "2", "5"];
    let (_, said) = run(dir.path(), &replay);
    let percent = |line: &str| line.strip_prefix("replaying: ")?.strip_suffix(" %")?.parse::<u32>().ok();
    assert!(said.lines().filter_map(percent).all(|percent| percent <= 100), "{said}");
    let (out, _) = stopped(dir.path(), &["replay", "a.trace"], "replaying: 10 %");
    assert_eq!(out, "");
}

#[test]
fn results_come_as_tables_csv_markdown_and_sql() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture("llama.q4_0.gguf");
    let bench =
        |form: &str| run(dir.path(), &["bench", &model, "-p", "8", "-n", "4", "-r", "1", "-t", "1", "-o", form]).0;
    let table = bench("table");
    assert!(table.starts_with("llama 102K Q4_0: 0.10 M parameters, 76.34 KiB\n1 threads, "), "{table}");
    assert!(table.lines().all(|line| line.chars().count() <= 80), "{table}");
    let csv = bench("csv");
    let at = csv.lines().next().unwrap().split(',').position(|name| name == "model_n_params").unwrap();
    assert!(csv.lines().skip(1).all(|line| line.split("\",\"").nth(at) == Some("102400")), "{csv}");
    let markdown = bench("md");
    assert!(
        markdown.starts_with("| model") && markdown.contains(" params ") && markdown.contains(" t/s |"),
        "{markdown}"
    );
    let sql = bench("sql");
    assert!(
        sql.starts_with("CREATE TABLE IF NOT EXISTS dynamicinfer (") && sql.matches("INSERT INTO").count() == 2,
        "{sql}"
    );
}

#[test]
fn a_simulated_speed_is_called_that_in_every_line_and_its_tables_fit_80_columns() {
    let dir = tempfile::tempdir().unwrap();
    let shape = ["--shape", "llama-7b", "--machine", "rtx-4090", "--vram", "8GiB", "--policy", "static", "full"];
    let (out, said) = run(dir.path(), &[&["simulate"][..], &shape].concat());
    let rows: Vec<&str> = out.lines().filter(|line| line.starts_with('|')).collect();
    assert!(rows.iter().all(|row| row.chars().count() <= 80), "{out}");
    let speeds: Vec<&&str> = rows.iter().skip(2).take(3).collect();
    assert!(speeds.iter().all(|row| row.contains(" sim. ")), "{out}");
    assert!(said.is_empty() || said.contains("making up a trace, 12."), "{said}");
    // A virtual device's, too.
    let device = ["--device", "virtual", "--ffn-share", "0.5", "--machine", "demo-pc", "--predictor", "exact"];
    let model = fixture("relullama");
    let (out, _) = run(dir.path(), &[&["bench", &*model, "-p", "0", "-n", "4", "-r", "1"][..], &device].concat());
    assert!(out.lines().filter(|line| line.contains("tg4")).all(|line| line.contains("tg4 (virtual)")), "{out}");
    let (_, said) = run(dir.path(), &[&["run", &*model, "Once", "-n", "4", "--temp", "0"][..], &device].concat());
    assert!(said.lines().filter(|line| line.contains("t/s")).all(|line| line.contains("t/s (virtual)")), "{said}");
}

/// Without a predictor a ReLU model ran by signs that nobody had compared with it, and lost more than anybody was told; `bench` measured
/// every neuron, which `run` did not compute.
#[test]
fn a_model_without_a_predictor_is_computed_whole_until_it_has_one() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture("relullama");
    let answer = |more: &[&str]| {
        let (out, said) =
            run(dir.path(), &[&["run", &*model, "Once", "-n", "4", "--temp", "0", "--json"][..], more].concat());
        let answer: Json = serde_json::from_str(&out).unwrap();
        (answer["predictor"].as_str().unwrap().to_owned(), said)
    };
    let bench =
        || json(dir.path(), &["bench", &model, "-p", "0", "-n", "2", "-r", "1", "-o", "json"])[0]["predictor"].clone();
    let (predictor, said) = answer(&[]);
    assert_eq!((predictor.as_str(), bench().as_str()), ("dense", Some("dense")));
    assert_eq!(said.matches("note: this model has no predictor yet, so every neuron is computed").count(), 1, "{said}");
    let (predictor, said) = answer(&["--predictor", "sign"]);
    assert_eq!(predictor, "sign");
    assert!(
        said.contains("warning: the sign predictor is not calibrated") && said.contains("perplexity by 2 %"),
        "{said}"
    );
    // Made at once where there is a text, and kept.
    let text = dir.path().join("text.txt");
    std::fs::write(&text, "Once upon a time there was a king who had a daughter. ".repeat(60)).unwrap();
    let (predictor, said) = answer(&["--calibrate", text.to_str().unwrap()]);
    assert_eq!(predictor, "sign");
    assert!(said.contains("calibrating the sign predictor on ") && !said.contains("warning"), "{said}");
    for more in [&[][..], &["--predictor", "sign"], &["--calibrate", "not-read-again.txt"]] {
        let (predictor, said) = answer(more);
        assert_eq!(predictor, "sign");
        assert!(!said.contains("calibrat") && !said.contains("every neuron"), "{said}");
    }
    assert_eq!(bench(), "sign");
}
