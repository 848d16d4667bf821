//! Every failure that the program reports, with the exit status it ends with.
//!
//! A message names its subject, what is wrong, and the remedy. Outcomes that are not failures are data, not errors.

use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};

/// A result whose error is the crate's own unless another is named.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure as the program reports it; each kind has its exit status.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The caller's request is impossible; exit 2.
    #[error("{0}")]
    Usage(String),
    /// A prompt or a conversation is longer than the model's context; exit 2.
    #[error("{0}")]
    TooLong(String),
    /// A model file (or a file made from one) is invalid; exit 5.
    #[error(transparent)]
    BadFile(Box<BadFile>),
    /// The operating system refused an operation; exit 1.
    #[error("cannot {action} {}: {source}", printable(&path.to_string_lossy()))]
    Io {
        /// The operation, as a verb for the message: `open`, `read`, `write`.
        action: &'static str,
        /// The file or directory of the operation.
        path: PathBuf,
        /// The system's own error.
        source: std::io::Error,
    },
    /// The system or a budget has too little: memory, threads, processes or descriptors; exit 6.
    #[error("{0}")]
    Memory(String),
    /// A refusal of the daemon, with the exit status of the same failure without a daemon.
    #[error("{message}")]
    Refused {
        /// The daemon's message.
        message: String,
        /// The exit status, not 0.
        exit: u8,
    },
    /// No daemon answers; exit 3.
    #[error("{0}")]
    NoDaemon(String),
    /// Another daemon runs already; exit 4.
    #[error("{0}")]
    Running(String),
    /// The engine has failed and cannot go on; exit 70.
    #[error("{0}")]
    Fatal(String),
    /// Ctrl-C; exit 130.
    #[error("interrupted")]
    Interrupted,
    /// Anything else; exit 1.
    #[error("{0}")]
    Failed(String),
}

/// The daemon's code for [`Error::BadFile`].
pub const BAD_FILE: &str = "bad_model_file";
/// The daemon's code for [`Error::Memory`].
pub const MEMORY: &str = "not_enough_memory";

/// An error in a file, with its place.
#[derive(Debug)]
pub struct BadFile {
    /// The file, as given to the program.
    pub path: PathBuf,
    /// The field, tensor or key concerned, as the file names it.
    pub field: String,
    /// Byte offset in the file, where one is known.
    pub offset: Option<u64>,
    /// What is wrong and, if one exists, the remedy: the rest of a sentence that begins with `field`.
    pub reason: String,
}

impl fmt::Display for BadFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", printable(&self.path.to_string_lossy()))?;
        if !self.field.is_empty() {
            write!(f, "{}: ", printable(&self.field))?;
        }
        write!(f, "{}", printable(&self.reason))?;
        match self.offset {
            Some(offset) => write!(f, " (at byte {offset})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for BadFile {}

impl Error {
    /// [`Error::BadFile`] with no offset; `field` is empty for the whole file.
    pub fn bad(path: &Path, field: impl Into<String>, reason: impl Into<String>) -> Error {
        Error::BadFile(Box::new(BadFile {
            path: path.to_owned(),
            field: field.into(),
            offset: None,
            reason: reason.into(),
        }))
    }

    /// [`Error::BadFile`] about the data at byte `offset` of the file.
    pub fn bad_at(path: &Path, field: impl Into<String>, offset: u64, reason: impl Into<String>) -> Error {
        Error::BadFile(Box::new(BadFile {
            path: path.to_owned(),
            field: field.into(),
            offset: Some(offset),
            reason: reason.into(),
        }))
    }

    /// For `map_err`: `File::open(path).map_err(Error::io("open", path))`.
    pub fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.to_owned();
        move |source| Error::Io { action, path, source }
    }

    /// The message for a client that may not know where the server keeps its files: a file by its name alone.
    pub fn without_folder(&self) -> String {
        let name = |path: &Path| PathBuf::from(path.file_name().unwrap_or_default());
        match self {
            Error::BadFile(bad) => {
                let BadFile { path, field, offset, reason } = &**bad;
                let bad = BadFile { path: name(path), field: field.clone(), offset: *offset, reason: reason.clone() };
                bad.to_string()
            }
            Error::Io { action, path, source } => {
                format!("cannot {action} {}: {source}", printable(&name(path).to_string_lossy()))
            }
            other => other.to_string(),
        }
    }

    /// The program's exit status for this kind of error; never 0.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Usage(_) | Error::TooLong(_) => 2,
            Error::BadFile(_) => 5,
            Error::Memory(_) => 6,
            Error::Refused { exit, .. } => *exit,
            Error::NoDaemon(_) => 3,
            Error::Running(_) => 4,
            Error::Fatal(_) => 70,
            Error::Interrupted => 130,
            Error::Io { .. } | Error::Failed(_) => 1,
        }
    }
}

/// Whether a terminal acts on a character instead of showing it: control characters, which begin escape sequences (the 8-bit ones
/// of Latin-1 included), and the Unicode characters that break lines or change the direction of the text after them.
pub fn is_unprintable(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Foreign text of several lines, made safe for a terminal: newlines and tabs stay, and every other character that a terminal would act on
/// becomes U+FFFD.
pub fn safe_text(text: &str) -> Cow<'_, str> {
    let bad = |c: char| is_unprintable(c) && !matches!(c, '\n' | '\t');
    match text.contains(bad) {
        true => text.replace(bad, "\u{fffd}").into(),
        false => text.into(),
    }
}

/// Foreign text (a name, a path, a file's words) as one line that is safe on a terminal: unprintable characters are escaped, and it
/// is cut after about 400 bytes.
pub fn printable(text: &str) -> String {
    printable_up_to(400, text)
}

/// A file's own words inside a message, as [`printable`] but cut after about 160 bytes, so that the rest of the message is still
/// read.
pub fn excerpt(text: impl fmt::Display) -> String {
    printable_up_to(160, &text.to_string())
}

/// A path as part of an address, in which no name reads as a scheme, query or fragment.
pub fn in_address(path: &str) -> String {
    percent_encoded(path, |byte| byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte))
}

/// A text whose bytes that are not `plain` are written as `%2C` and the like.
pub fn percent_encoded(text: &str, plain: impl Fn(u8) -> bool) -> String {
    let encode = |byte: u8| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(encode).collect()
}

/// `1.20 GiB` and the like: two digits behind the point, by powers of 1024.
pub fn human_bytes(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let power = (63 - bytes.max(1).leading_zeros() as usize) / 10;
    match power.checked_sub(1) {
        None => format!("{bytes} B"),
        Some(unit) => format!("{:.2} {}", bytes as f64 / (1u64 << (10 * power)) as f64, units[unit]),
    }
}

fn printable_up_to(longest: usize, text: &str) -> String {
    let mut out = String::with_capacity(text.len().min(longest));
    for c in text.chars() {
        if out.len() >= longest {
            out.push('…');
            break;
        }
        match c {
            '\n' => out.push_str("\\n"),
            c if is_unprintable(c) => out.extend(c.escape_default()),
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_written_in_the_largest_unit_that_they_fill() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1 << 10, "1.00 KiB"),
            (1_500, "1.46 KiB"),
            (1_500_000_000, "1.40 GiB"),
            (1_500_000_000_000, "1.36 TiB"),
            (u64::MAX, "16.00 EiB"),
        ] {
            assert_eq!(human_bytes(bytes), text);
        }
    }

    /// `run`, `ls`, `ps` and others printed names and texts as they were: a model's text set the terminal's title, a file's name
    /// read backwards.
    #[test]
    fn nothing_that_a_terminal_acts_on_is_left_in_text_that_is_not_ours() {
        let bad = (0..=u32::from(char::MAX)).filter_map(char::from_u32).filter(|c| is_unprintable(*c));
        for c in bad {
            let text = format!("a{c}b");
            assert!(printable(&text).chars().all(|c| c.is_ascii_graphic()), "{text:?}");
            let kept = matches!(c, '\n' | '\t');
            assert_eq!(safe_text(&text), if kept { &*text } else { "a\u{fffd}b" });
        }
        for c in ['\u{1b}', '\u{7}', '\r', '\u{7f}', '\u{80}', '\u{9b}', '\u{9d}', '\u{202e}', '\u{2066}'] {
            assert!(is_unprintable(c), "{c:?}");
        }
        let ordinary = "Größe, 大きさ, مرحبا, 👩‍🚀 and a no-break\u{a0}space";
        assert_eq!((printable(ordinary).as_str(), &*safe_text(ordinary)), (ordinary, ordinary));
    }
}
