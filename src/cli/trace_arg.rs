//! `--trace FILE`: a timeline of host and device.

use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::evaluation::timeline::{Chrome, summary};
use crate::formats::temporary::write_whole;
use clap::Args;
use std::path::PathBuf;

/// How every timeline begins.
const BEGINS: &[u8] = b"{\"traceEvents\":";

#[derive(Args, Clone, Default)]
pub struct TraceArgs {
    /// Write a timeline of host and device to this file, for ui.perfetto.dev, and print a summary of their overlap
    ///
    /// The file keeps the last 262144 slices, also if the run fails or is interrupted.
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

impl TraceArgs {
    pub fn is_on(&self) -> bool {
        self.trace.is_some()
    }

    /// Reports a file that cannot be written before anything long begins; then records the engine.
    pub fn begin(&self, engine: &mut Engine) -> Result<()> {
        let Some(path) = &self.trace else { return Ok(()) };
        super::output::check("--trace", path, |head| head.starts_with(BEGINS))?;
        write_whole(path, &[BEGINS, b"[]}"].concat())?;
        if engine.split.is_none() {
            engine.keep_timeline();
        }
        Ok(())
    }

    /// Writes the timeline and prints its summary.
    pub fn write(&self, engine: &mut Engine) -> Result<()> {
        let (Some(path), Some(timeline)) = (&self.trace, engine.timeline()) else { return Ok(()) };
        let bytes = serde_json::to_vec(&Chrome(timeline))
            .map_err(|e| Error::Failed(format!("the timeline cannot be written: {e}")))?;
        write_whole(path, &bytes)?;
        eprint!("{}", summary(timeline));
        eprintln!("timeline written to {}: open it at ui.perfetto.dev", path.display());
        Ok(())
    }

    /// As [`TraceArgs::write`], also after a failed run; the run's own failure comes first.
    pub fn write_after<T>(&self, engine: &mut Engine, run: Result<T>) -> Result<T> {
        let written = self.write(engine);
        let answer = run?;
        written.map(|()| answer)
    }
}
