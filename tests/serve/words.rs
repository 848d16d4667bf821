//! Names and texts that are not ours, as they are printed: a terminal does nothing with them but show them.

use crate::daemon::{Daemon, command};
use serde_json::json;
use std::io::Write;
use std::path::Path;
use std::process::Stdio;

/// What a program has said, without anything that a terminal would act on.
fn harmless(dir: &Path, args: &[&str], stdin: &str) -> String {
    let mut command = command(dir, args);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(stdin.as_bytes()).unwrap();
    let done = child.wait_with_output().unwrap();
    let said = String::from_utf8(done.stdout).unwrap() + &String::from_utf8(done.stderr).unwrap();
    let bad = |c: char| c.is_control() && !matches!(c, '\n' | '\t') || ('\u{202a}'..='\u{202e}').contains(&c);
    assert!(!said.contains(bad), "{args:?}: {said:?}");
    said
}

/// A daemon's `--name`, a talk that was read from a file and the bytes in a lock file went to the terminal as they were: they could set
/// its title, or write over what was there.
#[test]
fn names_and_files_of_others_are_no_commands_to_a_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let name = "\u{1b}]0;owned\u{7}\u{9b}2J\u{202e}\nready";
    let daemon = Daemon::start_in(dir.path(), &["--name", name]);
    assert!(harmless(dir.path(), &["ps"], "").contains("owned"));
    assert!(harmless(dir.path(), &["doctor"], "").contains("owned"));
    assert!(harmless(dir.path(), &["load", "demo"], "").contains("owned"));
    assert_eq!(harmless(dir.path(), &["load", "demo"], "").lines().count(), 1, "a name is one line");
    let look = harmless(dir.path(), &["top", "--json"], "");
    let look: serde_json::Value = serde_json::from_str(&look).unwrap();
    assert_eq!(look["ps"]["models"][0]["name"], name, "JSON says the same in other characters");
    let talk = json!({"model": name, "system": name, "set": {(name): 1}, "turns": [[name, name]]});
    std::fs::write(dir.path().join("talk.json"), talk.to_string()).unwrap();
    let said = harmless(dir.path(), &["chat"], "/load talk.json\n/system\n/show\n/load \u{1b}]0;no-file\n/\u{9b}\n");
    assert!(said.contains("1 turns") && said.matches("owned").count() >= 3 && said.contains("no-file"), "{said}");
    std::fs::write(dir.path().join("dynamicinfer.sock.lock"), name).unwrap();
    let second = harmless(dir.path(), &["serve"], "");
    assert!(second.contains(&format!("(process {})", daemon.child.id())), "{second}");
}

/// A log that goes into a file was full of colours.
#[test]
fn a_log_has_colours_on_a_terminal_only() {
    let dir = tempfile::tempdir().unwrap();
    let mut daemon = Daemon::spawn(dir.path(), &["serve"], &[("NOTIFY_SOCKET", "/nowhere")]);
    let said = daemon.wait_for("cannot tell systemd");
    assert!(said.contains("WARN") && !said.contains('\u{1b}'), "{said:?}");
}
