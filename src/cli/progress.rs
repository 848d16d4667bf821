//! Progress of long work: a bar on a terminal, a line per tenth elsewhere, nothing for work that is soon done.

use crate::clock::{self, Duration, Instant};
use crate::error::Result;
use crate::interrupt;
use indicatif::{ProgressBar, ProgressStyle};
use parking_lot::Mutex;
use std::io::IsTerminal;

/// Work shorter than this shows nothing.
const PATIENCE: Duration = Duration::from_millis(400);

#[derive(Clone, Copy, PartialEq)]
pub enum Unit {
    Bytes,
    Tokens,
    Questions,
    Rows,
    /// Work whose parts mean nothing to people.
    Percent,
}

/// Runs long work so that Ctrl-C ends it within half a second, in the midst of a step if need be: what it has not finished writing is
/// removed, and `kept` says what is left.
pub fn stoppable<T>(kept: impl FnOnce() + Send + 'static, work: impl FnOnce() -> T) -> T {
    let restore = move || {
        crate::formats::temporary::remove_unfinished();
        // The bar's line stays; what is said begins on one of its own.
        if std::io::stderr().is_terminal() {
            eprintln!("");
        }
        kept();
        eprintln!("{}: interrupted", super::name());
    };
    interrupt::hurried(restore, work)
}

pub struct Progress {
    what: String,
    unit: Unit,
    start: Instant,
    bar: Option<ProgressBar>,
    tenths: Mutex<u64>,
}

impl Progress {
    pub fn new(what: impl Into<String>, unit: Unit) -> Progress {
        let what = what.into();
        let bar = std::io::stderr().is_terminal().then(|| {
            let count = match unit {
                Unit::Bytes => "{bytes}/{total_bytes}, {bytes_per_sec}",
                Unit::Tokens => "{pos}/{len} tokens, {per_sec}",
                Unit::Questions => "{pos}/{len} questions",
                Unit::Rows => "{pos}/{len} rows",
                Unit::Percent => "{percent} %",
            };
            let style = ProgressStyle::with_template(&format!("{{msg}} {{wide_bar}} {count}, {{eta}} left"));
            let bar = ProgressBar::hidden().with_message(what.clone());
            bar.set_style(style.expect("the template is well formed"));
            bar
        });
        Progress { what, unit, start: clock::now(), bar, tenths: Mutex::new(0) }
    }

    /// Shows how far it is, and ends the work after Ctrl-C.
    pub fn step(&self, done: u64, total: u64) -> Result<()> {
        interrupt::check()?;
        if self.start.elapsed() < PATIENCE {
            return Ok(());
        }
        match &self.bar {
            Some(bar) => {
                if bar.is_hidden() {
                    bar.set_draw_target(indicatif::ProgressDrawTarget::stderr());
                }
                bar.set_length(total);
                bar.set_position(done);
            }
            None => {
                let tenth = done * 10 / total.max(1);
                let mut shown = self.tenths.lock();
                if tenth > *shown {
                    *shown = tenth;
                    eprintln!("{}: {}0 %", self.what, tenth);
                }
            }
        }
        Ok(())
    }

    /// Takes the bar away; the time it took, where it took any.
    pub fn finish(self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        let seconds = self.start.elapsed().as_secs_f64();
        if seconds > 1.0 && self.unit == Unit::Bytes {
            eprintln!("{} took {seconds:.1} s", self.what);
        }
    }
}
