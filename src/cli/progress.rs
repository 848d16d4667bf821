//! Progress of long work: a bar on a terminal, one line with an estimate elsewhere, nothing for short work.

use crate::clock::{self, Duration, Instant};
use crate::error::Result;
use crate::interrupt;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, Ordering};

/// Work shorter than this shows nothing.
const PATIENCE: Duration = Duration::from_millis(400);

#[derive(Clone, Copy, PartialEq)]
pub enum Unit {
    Bytes,
    Tokens,
    Questions,
    Rows,
    /// Work whose parts have no meaning for users.
    Percent,
}

/// Runs long work so that Ctrl-C ends it within half a second, in the middle of a step if necessary. Unfinished files are removed, and `kept`
/// reports what remains.
pub fn stoppable<T>(kept: impl FnOnce() + Send + 'static, work: impl FnOnce() -> T) -> T {
    let restore = move || {
        crate::formats::temporary::remove_unfinished();
        // The bar's line stays; messages begin on a new one.
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
    /// Set once the line was written, where there is no terminal.
    told: AtomicBool,
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
        Progress { what, unit, start: clock::now(), bar, told: AtomicBool::new(false) }
    }

    /// Shows the progress, and ends the work after Ctrl-C.
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
                let (tenth, seconds) = (done * 10 / total.max(1), self.start.elapsed().as_secs_f64());
                if tenth > 0 && !self.told.swap(true, Ordering::Relaxed) {
                    let all = seconds * total as f64 / done as f64;
                    eprintln!("{}: {tenth}0 % after {seconds:.1} s, about {all:.0} s in all", self.what);
                }
            }
        }
        Ok(())
    }

    /// Removes the bar, and reports the time of work on bytes that took more than a second.
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
