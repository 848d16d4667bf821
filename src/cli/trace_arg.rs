//! `--trace FILE`: a timeline of what host and device did.

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
    /// Write a timeline of host and device to this file, for ui.perfetto.dev, and say at the end what both did at the same time.
    /// The last 262144 slices are kept, also of a run that fails or is interrupted
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
}

impl TraceArgs {
    pub fn is_on(&self) -> bool {
        self.trace.is_some()
    }

    /// Before anything long begins, a file that cannot be written is told of; then whatever the engine does is kept.
    pub fn begin(&self, engine: &mut Engine) -> Result<()> {
        let Some(path) = &self.trace else { return Ok(()) };
        super::output::check("--trace", path, |head| head.starts_with(BEGINS))?;
        write_whole(path, &[BEGINS, b"[]}"].concat())?;
        if engine.split.is_none() {
            engine.keep_timeline();
        }
        Ok(())
    }

    /// Writes what was kept, and says what it comes to.
    pub fn write(&self, engine: &mut Engine) -> Result<()> {
        let (Some(path), Some(timeline)) = (&self.trace, engine.timeline()) else { return Ok(()) };
        let bytes = serde_json::to_vec(&Chrome(timeline))
            .map_err(|e| Error::Failed(format!("the timeline cannot be written: {e}")))?;
        write_whole(path, &bytes)?;
        eprint!("{}", summary(timeline));
        eprintln!("timeline written to {}: open it at ui.perfetto.dev", path.display());
        Ok(())
    }

    /// As [`TraceArgs::write`], whatever came of the run; its own failure comes first.
    pub fn write_after<T>(&self, engine: &mut Engine, run: Result<T>) -> Result<T> {
        let written = self.write(engine);
        let answer = run?;
        written.map(|()| answer)
    }
}
