//! The rows of an experiment, in a file that is only appended to. What was written stays; a partial last line, left by a kill, is removed.

use super::value::Value;
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Measured figures by name; the unit is part of the name. `None` where a figure is not a number, which JSON cannot express.
pub type Metrics = BTreeMap<String, Option<f64>>;

/// The measurement of one arm in one repeat.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// Index of the arm in `Spec::arms`.
    pub arm: usize,
    /// The arm: each axis and its value, in the order of the axes.
    pub settings: Vec<(String, Value)>,
    /// Number of the repeat, from 0.
    pub repeat: usize,
    /// What all of the experiment's methods measured.
    pub metrics: Metrics,
    /// Why the row does not count; `None` if it does.
    pub refused: Option<String>,
    /// When the row was finished, seconds since the Unix epoch.
    pub unix: u64,
    /// How long the row took, seconds.
    pub seconds: f64,
    /// Commit of the program that made the row.
    pub commit: String,
}

/// An open file of rows, one JSON object per line. It is locked: only one process has it open.
pub struct RowsFile {
    file: Locked,
    path: PathBuf,
    /// All rows of the file: those read when it was opened and those added since.
    pub rows: Vec<Row>,
}

/// A locked file, unlocked when dropped.
struct Locked(File);

impl Drop for Locked {
    /// Unlocks explicitly instead of relying on the close: a child process that another thread has just started may still hold a copy of
    /// the open file.
    fn drop(&mut self) {
        // If this fails, the lock ends when the last copy is closed.
        let _ = self.0.unlock();
    }
}

impl RowsFile {
    /// Opens the file, or creates it.
    ///
    /// # Errors
    /// [`Error::BadFile`] for a whole line that is not a row; [`Error::Failed`] where another process has the file open; [`Error::Io`]
    /// where it cannot be read.
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

    /// Whether this row was made already, whether it counts or not.
    pub fn has(&self, arm: usize, repeat: usize) -> bool {
        self.rows.iter().any(|r| (r.arm, r.repeat) == (arm, repeat))
    }

    /// Appends a row; it is on the disk when this returns.
    ///
    /// # Errors
    /// [`Error::Io`] where it cannot be written.
    pub fn add(&mut self, row: Row) -> Result<()> {
        let mut line = serde_json::to_vec(&row).expect("a row is plain data");
        line.push(b'\n');
        let written = self.file.0.write_all(&line).and_then(|()| self.file.0.sync_data());
        written.map_err(Error::io("write", &self.path))?;
        self.rows.push(row);
        Ok(())
    }
}
