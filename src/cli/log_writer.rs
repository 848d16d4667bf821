//! The daemon's log on its way to stderr. A thread of its own writes it, so that a pipe without a reader, or a stopped terminal, delays
//! no answer; lines that find no room are dropped.

use crate::clock::Duration;
use crossbeam_channel::{Receiver, Sender, bounded};
use std::io::{self, Write};
use std::sync::OnceLock;

/// Lines that may wait to be written.
const WAITING: usize = 1024;
/// How long the end of the program waits for what was logged last.
const LAST_LINES: Duration = Duration::from_secs(1);

enum Item {
    Line(Vec<u8>),
    /// Everything before it is written once this is dropped.
    End(Sender<()>),
}

/// Takes lines; clones hand them to the same thread.
#[derive(Clone)]
pub struct LogWriter(Sender<Item>);

/// The daemon's; not set in other verbs.
static DAEMON: OnceLock<LogWriter> = OnceLock::new();

/// Writes a line that ends in a line feed to stderr, in the daemon between the lines of its log. A closed stderr is no
/// failure.
pub fn write_line(line: &str) {
    let _ = match DAEMON.get() {
        Some(log) => log.clone().write_all(line.as_bytes()),
        None => io::stderr().write_all(line.as_bytes()),
    };
}

/// Waits until all lines are written, but no longer than two seconds.
pub fn finish() {
    if let Some(log) = DAEMON.get() {
        log.finish();
    }
}

impl LogWriter {
    /// Starts the thread, for the daemon.
    ///
    /// # Errors
    /// The system allows no more threads.
    pub fn start() -> io::Result<LogWriter> {
        let (lines, waiting) = bounded(WAITING);
        std::thread::Builder::new().name("log".into()).spawn(move || write(&waiting))?;
        Ok(DAEMON.get_or_init(|| LogWriter(lines)).clone())
    }

    fn finish(&self) {
        let (done, written) = bounded(0);
        if self.0.send_timeout(Item::End(done), LAST_LINES).is_ok() {
            // It ends in an error: of time, or because the thread has dropped its end.
            let _ = written.recv_timeout(LAST_LINES);
        }
    }
}

fn write(waiting: &Receiver<Item>) {
    for item in waiting {
        match item {
            // A log that cannot be written is not complained of where it cannot be written either.
            Item::Line(line) => drop(io::stderr().write_all(&line)),
            Item::End(done) => drop(done),
        }
    }
}

impl Write for LogWriter {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        // Without room it is left out.
        let _ = self.0.try_send(Item::Line(line.to_vec()));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
