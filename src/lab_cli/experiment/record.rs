//! The record of an experiment, which its folder holds beside the report.

use crate::error::{Error, Result, safe_text};
use crate::formats::machine_profile::MachineProfile;
use crate::lab::experiment::rows::{Row, RowsFile};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// `run.json`
#[derive(Serialize, Deserialize)]
pub struct Record {
    pub name: String,
    /// The experiment's file as it was.
    pub spec: String,
    pub seed: u64,
    /// What all arms share: on a machine without a card another thing than on one with a card.
    #[serde(default)]
    pub fixed: String,
    /// One for each time the program was started on it.
    pub sessions: Vec<Session>,
}

impl Record {
    pub fn read(path: &Path) -> Result<Record> {
        let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
        serde_json::from_slice(&bytes)
            .map_err(|e| Error::bad(path, "", format!("not the record of an experiment: {e}; take another --out")))
    }
}

#[derive(Serialize, Deserialize)]
pub struct Session {
    pub unix: u64,
    pub program: String,
    pub commit: String,
    pub cpu: String,
    pub threads: usize,
    /// As it was typed, `dynamicinfer-lab experiment FILE --out DIR`; empty in records of earlier versions.
    #[serde(default)]
    pub command: String,
    /// Measured when the session began; absent where no row is a measurement.
    pub machine: Option<MachineProfile>,
}

/// The rows of a folder, as far as they go.
pub fn read_rows(dir: &Path) -> Result<Vec<Row>> {
    Ok(RowsFile::open(&dir.join("rows.jsonl"))?.rows)
}

/// Whole or not at all. Nothing is left in the text that a terminal acts on: a reader may show the file there.
pub fn write(path: &Path, text: &str) -> Result<()> {
    crate::formats::temporary::write_whole(path, safe_text(text).as_bytes())
}
