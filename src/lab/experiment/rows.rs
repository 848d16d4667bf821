//! The rows of an experiment, a file that is only ever added to: what was written stays, a half line that a kill left is taken away.

use super::Value;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// By name, with the unit in the name. `None` where there is no such figure: JSON has no NaN.
pub type Metrics = BTreeMap<String, Option<f64>>;

/// One measurement.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// Number of the arm, and its settings.
    pub arm: usize,
    pub settings: Vec<(String, Value)>,
    pub repeat: usize,
    pub metrics: Metrics,
    /// Why it does not count.
    pub refused: Option<String>,
    /// Seconds since the Unix epoch when it was done, and how long it took.
    pub unix: u64,
    pub seconds: f64,
    /// Of the program that made it.
    pub commit: String,
}

/// An open file of rows, one JSON object a line. Whoever has it open has it alone.
pub struct RowsFile {
    file: Locked,
    path: PathBuf,
    pub rows: Vec<Row>,
}

/// A locked file.
struct Locked(File);

impl Drop for Locked {
    /// Said, and not left to the closing: a child that another thread has just begun may still hold a copy of the open file.
    fn drop(&mut self) {
        // What cannot be unlocked is unlocked when the last copy is closed.
        let _ = self.0.unlock();
    }
}

impl RowsFile {
    /// Opens the file, or makes it.
    ///
    /// # Errors
    /// [`Error::BadFile`] for a whole line that is no row; [`Error::Failed`] where another process writes it.
    pub fn open(path: &Path) -> Result<RowsFile> {
        let io = |action| Error::io(action, path);
        let file = File::options().read(true).append(true).create(true).open(path).map_err(io("open"))?;
        if file.try_lock().is_err() {
            let why = "another run writes there; wait for it, or take another --out";
            return Err(Error::Failed(format!("{}: {why}", path.display())));
        }
        let mut file = Locked(file);
        let mut bytes = Vec::new();
        file.0.read_to_end(&mut bytes).map_err(io("read"))?;
        let whole = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
        if whole < bytes.len() {
            file.0.set_len(whole as u64).map_err(io("shorten"))?;
            file.0.seek(SeekFrom::End(0)).map_err(io("read"))?;
        }
        let mut rows = Vec::new();
        for (i, line) in bytes[..whole].split(|&b| b == b'\n').enumerate().filter(|(_, line)| !line.is_empty()) {
            let row = serde_json::from_slice(line).map_err(|e| {
                Error::bad(path, format!("line {}", i + 1), format!("not a row: {e}; take another --out"))
            })?;
            rows.push(row);
        }
        Ok(RowsFile { file, path: path.to_owned(), rows })
    }

    pub fn has(&self, arm: usize, repeat: usize) -> bool {
        self.rows.iter().any(|r| (r.arm, r.repeat) == (arm, repeat))
    }

    /// Adds a row; it is on the disk when this returns.
    pub fn add(&mut self, row: Row) -> Result<()> {
        let mut line = serde_json::to_vec(&row).expect("a row is plain data");
        line.push(b'\n');
        let written = self.file.0.write_all(&line).and_then(|()| self.file.0.sync_data());
        written.map_err(Error::io("write", &self.path))?;
        self.rows.push(row);
        Ok(())
    }
}
