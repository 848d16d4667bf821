//! Saved texts in a directory: what is there, and a thread that reads and writes, because the engine's thread waits for no disk. A file that
//! another program has removed, or damaged, is a text that is not found.

use super::prompt_cache::MIN_SAVED;
use super::prompt_policy::{Held, common, victim};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::model::saved_file::{self, Described, Key};
use crate::model::{KvType, Saved};
use crossbeam_channel::{Receiver, Sender, TryRecvError, unbounded};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use xxhash_rust::xxh3::xxh3_128;

/// Where texts are kept on disk.
#[derive(Clone, Debug)]
pub struct PromptDir {
    /// The directory, this user's alone.
    pub path: PathBuf,
    /// Bytes that its files may take.
    pub bytes: u64,
}

/// Bytes of a file beside what it holds: its header, and space between its sections.
const BESIDE: u64 = 1 << 20;

/// Bytes of a text's file, at most.
fn file_bytes(tokens: &[u32], saved_bytes: u64) -> u64 {
    saved_bytes + size_of_val(tokens) as u64 + BESIDE
}

enum Work {
    Write(PathBuf, Key, Vec<u32>, Arc<Saved>),
    Read(PathBuf),
    Remove(PathBuf),
}

/// What the thread has done.
pub enum Done {
    /// It has written a file, or could not.
    Written(PathBuf, Option<Described>),
    /// It has read a file, or could not.
    Read(PathBuf, Option<Box<(Described, Saved)>>),
}

/// A file that is there.
struct Entry {
    path: PathBuf,
    of: Described,
    /// The value of [`PromptFiles::uses`] when it was used last.
    used: u64,
}

/// The files of a directory, and the thread that reads and writes them.
pub struct PromptFiles {
    dir: PathBuf,
    budget: u64,
    /// Of the model that answers; the owner is each text's.
    key: Key,
    entries: Vec<Entry>,
    /// Bytes of all files.
    bytes: u64,
    uses: u64,
    /// Files of the directory that are no saved prompts, or damaged.
    pub ignored: u64,
    /// A file is being written.
    writing: bool,
    /// The file that is being read: one at a time, so that what was read takes no more memory than one text.
    reading: Option<PathBuf>,
    work: Option<Sender<Work>>,
    /// What the thread has done.
    pub done: Receiver<Done>,
    thread: Option<JoinHandle<()>>,
}

impl PromptFiles {
    /// Opens a directory, which is made if it is missing, for texts of the model with this fingerprint, computed as `variant` says.
    ///
    /// # Errors
    /// [`Error::Usage`] if others than this user can use the directory; [`Error::Io`].
    pub fn open(dir: PromptDir, fingerprint: String, variant: String) -> Result<PromptFiles> {
        make_private(&dir.path)?;
        let (work, works) = unbounded();
        let (dones, done) = unbounded();
        let run = move || works.iter().for_each(|work| do_work(work, &dones));
        let thread = std::thread::Builder::new().name("prompts".into()).spawn(run);
        let thread = thread.map_err(|e| Error::Failed(format!("cannot start the thread of saved prompts: {e}")))?;
        let mut files = PromptFiles {
            dir: dir.path,
            budget: dir.bytes,
            key: Key { fingerprint, variant, owner: 0 },
            entries: Vec::new(),
            bytes: 0,
            uses: 0,
            ignored: 0,
            writing: false,
            reading: None,
            work: Some(work),
            done,
            thread: Some(thread),
        };
        files.look()?;
        files.make_room(0);
        Ok(files)
    }

    /// Reads the headers of all files, the oldest first.
    fn look(&mut self) -> Result<()> {
        let entries = std::fs::read_dir(&self.dir).map_err(Error::io("read", &self.dir))?;
        let paths = entries.flatten().map(|entry| entry.path());
        let paths = paths.filter(|path| path.extension().is_some_and(|end| end == saved_file::EXTENSION));
        let modified = |path: &PathBuf| path.metadata().map_or((0, 0), |meta| (meta.mtime(), meta.mtime_nsec()));
        let mut paths: Vec<PathBuf> = paths.collect();
        paths.sort_by_cached_key(modified);
        for path in paths {
            match saved_file::describe(&path) {
                Ok(Some(of)) => self.add(path, of),
                Ok(None) => self.ignored += 1,
                Err(error) => {
                    // One line is enough.
                    if self.ignored == 0 {
                        tracing::warn!("a file of --prompt-cache is ignored: {error}");
                    }
                    self.ignored += 1;
                }
            }
        }
        Ok(())
    }

    fn add(&mut self, path: PathBuf, of: Described) {
        self.forget_file(&path);
        self.uses += 1;
        self.bytes += of.bytes;
        self.entries.push(Entry { path, of, used: self.uses });
    }

    fn forget_file(&mut self, path: &Path) {
        if let Some(at) = self.entries.iter().position(|entry| entry.path == path) {
            self.bytes -= self.entries.swap_remove(at).of.bytes;
        }
    }

    /// From now on the model computes as `variant` says.
    pub fn set_variant(&mut self, variant: String) {
        self.key.variant = variant;
    }

    fn key(&self, owner: u64) -> Key {
        Key { owner, ..self.key.clone() }
    }

    /// Whether a text was computed as this model computes now.
    pub fn is_current(&self, of: &Described) -> bool {
        self.key(of.key.owner) == of.key
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Tokens of the prompt from which the best file can go on, and that file.
    fn best(&self, prompt: &[u32], owner: u64) -> Option<(usize, usize)> {
        let key = self.key(owner);
        let mine = self.entries.iter().enumerate().filter(|(_, entry)| entry.of.key == key);
        mine.map(|(at, entry)| (entry.of.reach(common(&entry.of.tokens, prompt)), at)).max()
    }

    /// Has the file read from which more of a prompt can go on than `known`; the file's path if there is one. Larger ones than `most` bytes are
    /// left where they are, and all others while one is being read.
    pub fn fetch(&mut self, prompt: &[u32], owner: u64, known: usize, most: u64) -> Option<PathBuf> {
        let (len, at) = self.best(prompt, owner)?;
        let entry = &mut self.entries[at];
        let busy = self.reading.as_ref().is_some_and(|reading| *reading != entry.path);
        if len < known + MIN_SAVED || entry.of.bytes > most || busy {
            return None;
        }
        self.uses += 1;
        entry.used = self.uses;
        let path = entry.path.clone();
        if self.reading.is_none() {
            self.reading = self.send(Work::Read(path.clone())).then(|| path.clone());
        }
        self.reading.clone()
    }

    fn send(&self, work: Work) -> bool {
        self.work.as_ref().is_some_and(|thread| thread.send(work).is_ok())
    }

    /// Whether a text may be given to [`PromptFiles::keep`].
    pub fn is_idle(&self) -> bool {
        !self.writing
    }

    /// Whether a text that takes so many bytes would be written: most of it is not there, and there is room for it.
    pub fn wants(&self, owner: u64, tokens: &[u32], saved_bytes: u64) -> bool {
        let known = self.best(tokens, owner).map_or(0, |(len, _)| len);
        tokens.len() >= known + MIN_SAVED && file_bytes(tokens, saved_bytes) <= self.budget
    }

    /// Has a text written if it is wanted. One is written at a time.
    pub fn keep(&mut self, owner: u64, tokens: &[u32], saved: Arc<Saved>) {
        if self.writing || !self.wants(owner, tokens, saved.bytes()) {
            return;
        }
        self.make_room(file_bytes(tokens, saved.bytes()));
        let key = self.key(owner);
        let mut name = format!("{} {} {owner:x} ", key.fingerprint, key.variant).into_bytes();
        name.extend_from_slice(bytemuck::cast_slice(tokens));
        let path = self.dir.join(format!("{:032x}.{}", xxh3_128(&name), saved_file::EXTENSION));
        self.writing = self.send(Work::Write(path, key, tokens.to_vec(), saved));
    }

    /// Removes files until there is room for so many bytes, at most the budget.
    fn make_room(&mut self, bytes: u64) {
        while self.bytes + bytes > self.budget {
            let held = |entry: &Entry| Held { bytes: entry.of.bytes, age: self.uses - entry.used };
            let Some(at) = victim(&self.entries.iter().map(held).collect::<Vec<_>>()) else { return };
            self.remove(at);
        }
    }

    fn remove(&mut self, at: usize) {
        let entry = self.entries.swap_remove(at);
        self.bytes -= entry.of.bytes;
        self.send(Work::Remove(entry.path));
    }

    /// What the thread has done meanwhile; `Some(None)`: it has failed and will do nothing more.
    pub fn try_done(&self) -> Option<Option<Done>> {
        match self.done.try_recv() {
            Ok(done) => Some(Some(done)),
            Err(TryRecvError::Disconnected) => Some(None),
            Err(TryRecvError::Empty) => None,
        }
    }

    /// Notes what the thread has done. Returns the path of a file that was to be read, and what it held.
    pub fn note(&mut self, done: Done) -> Option<(PathBuf, Option<(Described, Saved)>)> {
        match done {
            Done::Read(path, read) => {
                self.reading = None;
                if read.is_none() {
                    self.forget_file(&path);
                    self.ignored += 1;
                }
                Some((path, read.map(|read| *read)))
            }
            Done::Written(path, of) => {
                self.writing = false;
                if let Some(of) = of {
                    self.drop_covered(&of);
                    self.add(path, of);
                }
                None
            }
        }
    }

    /// Removes the files of the beginnings of a text that is on disk now, from which it can be gone on all the same.
    fn drop_covered(&mut self, new: &Described) {
        for at in (0..self.entries.len()).rev() {
            let old = &self.entries[at].of;
            let len = old.tokens.len();
            let covered = old.key == new.key && len < new.tokens.len() && new.tokens.starts_with(&old.tokens);
            if covered && new.reach(len) == len {
                self.remove(at);
            }
        }
    }

    /// Waits until no file is being written.
    pub fn wait(&mut self) {
        while self.writing {
            match self.done.recv() {
                Ok(done) => drop(self.note(done)),
                Err(_) => self.writing = false,
            }
        }
    }
}

impl Drop for PromptFiles {
    fn drop(&mut self) {
        // Its queue has an end now, and so has the thread.
        self.work = None;
        if let Some(thread) = self.thread.take() {
            // A thread that has panicked has nothing to say.
            let _ = thread.join();
        }
    }
}

/// Hash of all that decides what is computed for a token, but for the published model's weights, its name and the owner of the text.
pub fn variant(engine: &Engine, kv: KvType) -> String {
    let (model, sparsity) = (&engine.model, engine.sparsity());
    let mut config = model.config.clone();
    config.name.clear();
    let thresholds: Vec<Option<f32>> =
        (0..model.config.layers().len()).map(|layer| sparsity.threshold(layer)).collect();
    let (program, prefill) = (env!("CARGO_PKG_VERSION"), engine.kernels.prefill);
    let all = (program, config, model.types(), prefill, sparsity.name(), thresholds, kv);
    format!("{:032x}", xxh3_128(format!("{all:?}").as_bytes()))
}

fn do_work(work: Work, done: &Sender<Done>) {
    let warned = |what: &str, error: Error| tracing::warn!("a saved prompt cannot be {what}: {error}");
    let done_now = match work {
        Work::Write(path, key, tokens, saved) => {
            let written = saved_file::write(&path, &saved, &key, &tokens).and_then(|()| saved_file::describe(&path));
            let of = written.map_err(|error| warned("written", error)).ok().flatten();
            Done::Written(path, of)
        }
        Work::Read(path) => {
            let read = saved_file::read(&path);
            let read = read.map_err(|error| warned("read", error)).ok().flatten();
            Done::Read(path, read.map(Box::new))
        }
        Work::Remove(path) => {
            // Another process may have removed it.
            let _ = std::fs::remove_file(path);
            return;
        }
    };
    // The worker may have ended.
    let _ = done.send(done_now);
}

/// Makes the directory, or checks that it is this user's alone.
///
/// # Errors
/// [`Error::Usage`] with what is wrong with it; [`Error::Io`].
fn make_private(dir: &Path) -> Result<()> {
    if !dir.exists() {
        std::fs::DirBuilder::new().mode(0o700).recursive(true).create(dir).map_err(Error::io("create", dir))?;
    }
    let meta = dir.metadata().map_err(Error::io("look at", dir))?;
    let shown = dir.display();
    if !meta.is_dir() {
        return Err(Error::Usage(format!("--prompt-cache {shown}: this is no directory; name one")));
    }
    if meta.uid() != rustix::process::geteuid().as_raw() {
        let why = "this directory belongs to another user; name one of your own";
        return Err(Error::Usage(format!("--prompt-cache {shown}: {why}")));
    }
    if meta.mode() & 0o077 != 0 {
        let why = format!("other users can read what prompts say in this directory: chmod 700 '{shown}'");
        return Err(Error::Usage(format!("--prompt-cache {shown}: {why}")));
    }
    Ok(())
}
