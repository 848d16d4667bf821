//! `tools/gpu_check` as it runs beside a card: the stand-in's, with tiny models.

use crate::common::Machine;
use std::path::Path;
use std::process::{Command, Stdio};

#[test]
fn phases_compare_placements_and_leave_an_archive_each() {
    let machine = Machine::new();
    let (out, scratch) = (machine.dir.path().join("out"), machine.dir.path().join("scratch"));
    let mut script = Command::new("python3");
    script.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../gpu_check")).args(["models", "budget"]);
    script
        .args(["--size", "tiny", "--machine", "demo-pc", "--binary", env!("CARGO_BIN_EXE_program"), "--out"])
        .arg(&out);
    script.arg("--scratch").arg(&scratch).env("LD_LIBRARY_PATH", machine.dir.path()).env("HOME", machine.dir.path());
    let done = script.stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let (summary, said) = (text(done.stdout), text(done.stderr));
    assert!(done.status.success(), "{summary}{said}");
    let mut left: Vec<_> = std::fs::read_dir(out).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["budget.tar.gz", "models.tar.gz"]);
    let rows: Vec<&str> = summary.lines().filter(|line| line.contains("| tg8 |")).collect();
    let share = |name: &str| -> f64 {
        let row = rows.iter().find(|row| row.starts_with(&format!("| {name} |")));
        let row = row.unwrap_or_else(|| panic!("no row {name}: {summary}{said}"));
        row.split('|').nth(7).unwrap().trim().trim_end_matches('%').parse().unwrap()
    };
    // The same slots hold more of what is active where a profile says which.
    let (unprofiled, profiled) = (share("7b-static-unprofiled"), share("7b-static"));
    assert!(profiled > unprofiled + 10.0, "{unprofiled} and {profiled} %: {summary}");
    for name in ["7b-macro", "7b-full", "moe-static", "moe-full"] {
        share(name);
    }
    assert!(!summary.contains("exit "), "{summary}{said}");
}
