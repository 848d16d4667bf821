//! Printing without control characters, and the program's name.

use super::log_writer;
use crate::error::{Error, Result, is_unprintable, safe_text};
use std::fmt::Write as _;
use std::io::Write;
use std::sync::OnceLock;

static NAME: OnceLock<&'static str> = OnceLock::new();

/// Sets [`name`], once: a process is one program.
pub(super) fn set_name(name: &'static str) {
    let _ = NAME.set(name);
}

/// Name of the program that runs, with which errors begin.
pub(super) fn name() -> &'static str {
    NAME.get().copied().unwrap_or("dynamicinfer")
}

/// Prints a text of any origin to stdout, without characters that a terminal acts on. A closed pipe is an error that ends the program
/// quietly.
pub(crate) fn print(text: &str) -> Result<()> {
    print_as_it_is(&safe_text(text))
}

/// Prints bytes as they are: the text of a model that goes into a file or another program.
pub(super) fn print_as_it_is(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Error::io("write to", "stdout".as_ref()))
}

/// Writes a message to stderr, as safe as [`print`]. A closed stderr is no failure.
pub(crate) fn say(text: std::fmt::Arguments) {
    let mut line = safe_text(&text.to_string()).into_owned();
    line.push('\n');
    log_writer::write_line(&line);
}

/// Prints a document, as [`safe_json`] writes it.
pub(crate) fn print_json(value: &impl serde::Serialize) -> Result<()> {
    print(&safe_json(value))
}

/// A document with a line feed at its end. Characters that JSON allows and a terminal acts on are escaped, which is the same JSON.
pub(crate) fn safe_json(value: &impl serde::Serialize) -> String {
    let text = serde_json::to_string_pretty(value).expect("plain data");
    let mut safe = String::with_capacity(text.len() + 1);
    for c in text.chars() {
        if is_unprintable(c) && c != '\n' {
            write!(safe, "\\u{:04x}", u32::from(c)).expect("a string takes all");
        } else {
            safe.push(c);
        }
    }
    safe + "\n"
}
