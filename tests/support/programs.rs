//! Which of the two programs has a verb with these arguments.

use std::ffi::OsStr;

const LAB_VERBS: [&str; 6] = ["synth", "record", "replay", "simulate", "experiment", "logits-hash"];
const LAB_OPTIONS: [&str; 4] = ["--vram-schedule", "--fail-after", "--barrier", "--prompt-parts"];

/// The laboratory's where a verb or an option is its own, else the product's.
pub fn program<A: AsRef<OsStr>>(args: &[A]) -> &'static str {
    let verb = args.first().is_some_and(|verb| LAB_VERBS.iter().any(|lab| verb.as_ref() == *lab));
    let option = args.iter().any(|arg| LAB_OPTIONS.iter().any(|lab| arg.as_ref() == *lab));
    if verb || option { env!("CARGO_BIN_EXE_dynamicinfer-lab") } else { env!("CARGO_BIN_EXE_dynamicinfer") }
}
