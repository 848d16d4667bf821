//! `--trace FILE`, as whoever opens it meets it: the file is whole whatever ends the run, slices nest, and a virtual device's clock is
//! called virtual. `tools/cuda_on_cpu/tests/cuda_timeline.rs` looks at one of a card.

use crate::programs;
use crate::timeline_laws::Trace;
use rustix::process::{Pid, Signal, kill_process};
use std::io::Read;
use std::process::{Command, Output, Stdio};

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        Place(tempfile::tempdir().unwrap())
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(programs::program(args));
        command.args(args).current_dir(self.0.path()).stdin(Stdio::null());
        command
            .env("XDG_CACHE_HOME", concat!(env!("CARGO_TARGET_TMPDIR"), "/cache"))
            .env("XDG_DATA_HOME", self.0.path());
        command.env("DYNAMICINFER_ASSETS", concat!(env!("CARGO_MANIFEST_DIR"), "/assets"));
        command
    }

    fn run(&self, args: &[&str], code: i32) -> (Trace, Output) {
        let output = self.command(args).args(["--trace", "trace.json"]).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{}", String::from_utf8_lossy(&output.stderr));
        (self.trace(), output)
    }

    fn trace(&self) -> Trace {
        Trace::read(&self.0.path().join("trace.json"))
    }
}

const RUN: [&str; 9] = ["run", "demo", "Once upon a time", "--temp", "0", "-n", "12", "--ignore-eos", "--no-history"];
const VIRTUAL: [&str; 6] = ["--device", "virtual", "--ffn-share", "0.4", "--machine", "demo-pc"];

#[test]
fn without_a_device_a_token_is_layers_and_a_layer_its_parts() {
    let (trace, output) = Place::new().run(&RUN, 0);
    trace.check();
    let names: Vec<String> = trace.host().into_iter().map(|s| s.name).collect();
    let count = |name: &str| names.iter().filter(|n| **n == name).count();
    // The prompt is one pass, and the first token comes of it.
    assert_eq!((count("token"), count("pass")), (11, 1));
    assert_eq!((count("head"), count("layer")), (12, 12 * trace.layers()));
    assert!(trace.host().iter().all(|s| s.name != "head" || s.args["layer"].is_null()), "the head is no layer's");
    assert!(count("attention") >= 12 && count("FFN half") >= 12, "{names:?}");
    assert!(trace.device().is_empty());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("timeline: 12 passes, "), "{said}");
    assert!(said.contains("open it at ui.perfetto.dev") && !said.contains("both computed"), "{said}");
}

#[test]
fn a_virtual_devices_clock_is_called_virtual() {
    let (trace, output) = Place::new().run(&[&RUN[..], &VIRTUAL].concat(), 0);
    trace.check();
    assert!(trace.text.contains("virtual device (virtual clock)") && trace.text.contains("no measurement"));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("all times are those of a virtual device") && said.contains("both computed"), "{said}");
    // By the given rates both halves take their time, and run beside each other.
    assert!(trace.overlap_of_halves_ns() > 0, "{said}");
    assert!(trace.moves().iter().any(|s| s.args["bytes"].as_u64() > Some(0)), "nothing moved: {said}");
}

/// The text is what it is without a timeline: marks on the streams order nothing.
/// What an observer looks at takes longer, and nobody waits for it: `bench` measures shares of neurons so, after the speeds.
#[test]
fn a_pass_that_is_observed_is_not_in_it() {
    let bench = ["bench", "demo", "-p", "0", "-n", "8", "-r", "1", "-o", "json", "--predictor", "mlp"];
    let (trace, output) = Place::new().run(&[&bench[..], &VIRTUAL, &["--no-history"]].concat(), 0);
    let rows: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(rows[0]["recall"].as_f64().is_some_and(|recall| recall > 0.5), "64 tokens were observed: {rows}");
    // Four tokens to warm up, and those that are timed.
    assert_eq!(trace.host().into_iter().filter(|s| s.name == "token").count(), 4 + 8);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("timeline: 12 passes, "), "{said}");
}

#[test]
fn a_timeline_changes_no_text() {
    let place = Place::new();
    let args = [&RUN[..], &VIRTUAL, &["--deterministic"]].concat();
    let (_, traced) = place.run(&args, 0);
    assert_eq!(place.command(&args).output().unwrap().stdout, traced.stdout);
}

#[test]
fn it_is_written_when_the_device_fails() {
    let (trace, output) = Place::new().run(&[&RUN[..], &VIRTUAL, &["--fail-after", "400"]].concat(), 70);
    trace.check();
    assert!(!trace.host().is_empty() && !trace.device().is_empty());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.lines().last().unwrap().starts_with("dynamicinfer-lab: the device has failed: "), "{said}");
}

#[test]
fn it_is_written_on_ctrl_c() {
    let place = Place::new();
    let mut args = [&RUN[..], &["--trace", "trace.json"]].concat();
    args[6] = "-1";
    let mut child = place.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // It is in the midst of its text.
    let mut first = [0; 40];
    child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
    kill_process(Pid::from_child(&child), Signal::INT).unwrap();
    let done = child.wait_with_output().unwrap();
    assert_eq!(done.status.code(), Some(130), "{}", String::from_utf8_lossy(&done.stderr));
    let trace = place.trace();
    trace.check();
    assert!(trace.host().iter().any(|s| s.name == "token"));
}

#[test]
fn a_file_that_cannot_be_written_is_told_before_anything_runs() {
    let output = Place::new().command(&RUN).args(["--trace", "no/such/folder.json"]).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.stdout.len(), output.status.code()), (0, Some(1)), "{said}");
    assert!(said.contains("no/such/folder.json"), "{said}");
}
