//! File bytes and nothing else: what a model file holds, never what it means.
//!
//! Every reader takes bytes and a path for its messages, checks every number before it is used, allocates nothing that
//! the file's own length does not pay for, and answers with [`crate::Error::BadFile`].

pub mod block_checksums;
pub mod blocks;
pub mod faults;
pub mod gguf;
pub mod gguf_writer;
mod guard;
pub mod history_file;
pub mod json;
pub mod machine_profile;
pub mod neuron_store;
pub mod placement_file;
pub mod predictor_file;
pub mod profile_file;
pub mod prompt_file;
pub mod rounding;
pub mod rows;
pub mod safetensors;
pub mod sections;
pub(crate) mod temporary;
pub mod trace_file;

pub use guard::survive;

use crate::error::{Error, Result};
use blocks::BlockType;
use guard::Guarded;
use memmap2::Mmap;
use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// How the numbers of a tensor are stored in a source file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// 32-bit floats.
    F32,
    /// 16-bit floats (IEEE 754 half precision).
    F16,
    /// One of GGUF's block types; bfloat16 among them.
    Block(BlockType),
}

impl DType {
    /// 16-bit floats with the exponent range of f32 (bfloat16).
    pub const BF16: DType = DType::Block(BlockType::BF16);
    /// GGUF blocks of 32 numbers: an f16 scale, then a signed byte each.
    pub const Q8_0: DType = DType::Block(BlockType::Q8_0);
    /// GGUF blocks of 32 numbers: an f16 scale, then 4 bits each, where v means v - 8.
    pub const Q4_0: DType = DType::Block(BlockType::Q4_0);

    /// Numbers per block.
    pub const fn block_len(self) -> usize {
        match self {
            DType::F32 | DType::F16 => 1,
            DType::Block(kind) => kind.form().numbers,
        }
    }

    /// Bytes per block.
    pub const fn block_bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 => 2,
            DType::Block(kind) => kind.form().bytes,
        }
    }

    /// Bytes of a row of `cols` numbers; `cols` is a multiple of [`DType::block_len`].
    pub const fn row_bytes(self, cols: usize) -> usize {
        cols / self.block_len() * self.block_bytes()
    }

    /// The type's name as GGUF and safetensors have it, for messages.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "F32",
            DType::F16 => "F16",
            DType::Block(kind) => kind.form().ggml_name,
        }
    }
}

/// One tensor of a source file.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// Name as the file has it, such as `blk.0.ffn_up.weight`.
    pub name: String,
    /// How its numbers are stored.
    pub dtype: DType,
    /// Row-major, outermost dimension first (a GGUF's `ne` reversed): `[rows, cols]` for a matrix.
    pub shape: Vec<usize>,
    /// From the start of the file.
    pub offset: u64,
    /// Length of its data.
    pub bytes: u64,
}

/// A read-only file in memory. Anything but a regular file is refused before it is read: a FIFO or a device would hang.
#[derive(Clone, Debug)]
pub struct MappedFile {
    /// The path that it was opened by, for messages.
    pub path: PathBuf,
    mapped: Arc<Mapped>,
}

#[derive(Debug)]
struct Mapped {
    /// Stands before `map`, so that it is dropped first: the map is watched over no longer than it exists.
    guarded: Option<Guarded>,
    map: Option<Mmap>,
    file: File,
    /// The file as it was opened; `standing` and `changed` as [`MappedFile::state`] last saw them.
    then: Mutex<Stamp>,
}

/// What tells a file from another, and from itself after it was written to. A file whose time was only set counts as written to.
#[derive(Debug, PartialEq)]
struct Stamp {
    file: (u64, u64),
    bytes: u64,
    modified: (i64, i64),
    /// Time of the last change that the kernel notes (ctime): no program can set it back, but a new name or other rights set it, too.
    changed: (i64, i64),
    /// Number of names (hard links), mode, owner and group.
    standing: (u64, u32, u32, u32),
}

impl Stamp {
    fn of(meta: &Metadata) -> Stamp {
        Stamp {
            file: (meta.dev(), meta.ino()),
            bytes: meta.len(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
            standing: (meta.nlink(), meta.mode(), meta.uid(), meta.gid()),
        }
    }
}

/// What became of a mapped file since it was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileState {
    /// It is unchanged, and still has its name.
    Same,
    /// Another file has its name now; what is mapped is the old one, and whole.
    Replaced,
    /// No file has its name any more; what is mapped is whole.
    Removed,
    /// What is mapped is no longer what was opened; the text says what happened to it.
    Changed(String),
}

/// Opens a file for reading that a user or another file has named. Anything but a regular file is refused at once: opening a pipe
/// without a writer would wait for ever.
///
/// # Errors
/// [`Error::Io`] if the system refuses, [`Error::BadFile`] if it is not a regular file.
pub fn open_regular(path: &Path) -> Result<(File, Metadata)> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let fd = rustix::fs::open(path, flags, Mode::empty()).map_err(|e| Error::io("open", path)(e.into()))?;
    let file = File::from(fd);
    let meta = file.metadata().map_err(Error::io("stat", path))?;
    if !meta.is_file() {
        let what = if meta.is_dir() { "a directory" } else { "a pipe, device or socket" };
        return Err(Error::bad(path, "", format!("not a regular file: it is {what}")));
    }
    Ok((file, meta))
}

/// The text of a file that a user or another file has named.
///
/// # Errors
/// As [`open_regular`]; [`Error::Io`] if it is not UTF-8.
pub fn read_text(path: &Path) -> Result<String> {
    std::io::read_to_string(open_regular(path)?.0).map_err(Error::io("read", path))
}

impl MappedFile {
    /// Maps a file; an empty one has no bytes.
    ///
    /// # Errors
    /// [`Error::Io`] if the system cannot open or map it, [`Error::BadFile`] if it is not a regular file.
    pub fn open(path: &Path) -> Result<MappedFile> {
        let (file, meta) = open_regular(path)?;
        let mut mapped = Mapped { guarded: None, map: None, file, then: Mutex::new(Stamp::of(&meta)) };
        if meta.len() > 0 {
            // SAFETY: the map is read-only. A file that is changed in place while it is mapped is the one thing that mmap cannot
            // guard against: `state` and `is_whole` tell of it (docs/neuron_store.md, "Crashes and changes").
            let map = unsafe { Mmap::map(&mapped.file) }.map_err(Error::io("map", path))?;
            // Huge pages, where the file system has them: 4 KiB pages cost a quarter of the read bandwidth (23 instead of 30
            // GB/s a thread). Said before the first touch, which would read the pages around it in as small ones. Advice only.
            let _ = map.advise(memmap2::Advice::HugePage);
            mapped.guarded = Guarded::new(&map);
            mapped.map = Some(map);
        }
        Ok(MappedFile { path: path.to_owned(), mapped: Arc::new(mapped) })
    }

    /// All bytes of the file.
    pub fn bytes(&self) -> &[u8] {
        self.mapped.map.as_ref().map_or(&[], |m| &m[..])
    }

    /// Brings the file into memory now. Advice only: a refusal costs speed, nothing else.
    pub fn load(&self) {
        if let Some(map) = &self.mapped.map {
            let _ = map.advise(memmap2::Advice::PopulateRead);
        }
    }

    /// The open file itself.
    pub fn file(&self) -> &File {
        &self.mapped.file
    }

    /// What tells the file as it was opened from another, and from itself after it was written to; for comparisons on this machine.
    pub fn identity(&self) -> String {
        let then = self.mapped.then.lock().unwrap_or_else(|e| e.into_inner());
        format!("{:?} {} {:?} {:?}", then.file, then.bytes, then.modified, then.changed)
    }

    /// Whether every page that was read so far could be read. Only a program that has called [`survive`] lives to see that one could not.
    #[inline]
    pub fn is_whole(&self) -> bool {
        self.mapped.guarded.as_ref().is_none_or(Guarded::is_whole)
    }

    /// Compares the file, and what has its name now, with what was opened.
    pub fn state(&self) -> FileState {
        let mut then = self.mapped.then.lock().unwrap_or_else(|e| e.into_inner());
        let changed = |what: String| FileState::Changed(what);
        if !self.is_whole() {
            return changed("a part of it can no longer be read: it was cut short, or its disk has failed".into());
        }
        let now = match self.mapped.file.metadata() {
            Ok(meta) => Stamp::of(&meta),
            Err(error) => return changed(format!("it cannot be looked at any more: {error}")),
        };
        if now.bytes != then.bytes {
            return changed(format!("it has {} bytes and had {}", now.bytes, then.bytes));
        }
        if now.modified != then.modified {
            return changed("it was written to".into());
        }
        match std::fs::metadata(&self.path) {
            Ok(meta) if Stamp::of(&meta).file != then.file => return FileState::Replaced,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return FileState::Removed,
            // A process that may not look at the name any more still has the file.
            _ => {}
        }
        if now.changed != then.changed && now.standing == then.standing {
            return changed("it was written to, and its time was set back".into());
        }
        // A name that came or went, or other rights.
        *then = now;
        FileState::Same
    }

    /// # Errors
    /// [`Error::BadFile`] if what is mapped is not what was opened.
    pub fn check_same(&self) -> Result<()> {
        match self.state() {
            FileState::Changed(what) => Err(Error::bad(
                &self.path,
                "",
                format!("{what}, while it was being read; leave it alone and try again"),
            )),
            FileState::Same | FileState::Replaced | FileState::Removed => Ok(()),
        }
    }
}

/// Asks the system to read these bytes of a mapped file from its disk, and does not wait for them. Advice only.
pub fn will_need(bytes: &[u8]) {
    use rustix::mm::{Advice, madvise};
    let page = rustix::param::page_size();
    let start = bytes.as_ptr().addr() / page * page;
    let first = bytes.as_ptr().with_addr(start).cast_mut().cast();
    // SAFETY: the pages are those of the bytes, and the advice changes nothing that a program can see.
    let _ = unsafe { madvise(first, bytes.as_ptr().addr() + bytes.len() - start, Advice::WillNeed) };
}

/// Reads these bytes of a mapped file into memory now. Advice only: a refusal costs speed, nothing else.
pub fn load(bytes: &[u8]) {
    use rustix::mm::{Advice, madvise};
    let page = rustix::param::page_size();
    let start = bytes.as_ptr().addr() / page * page;
    let first = bytes.as_ptr().with_addr(start).cast_mut().cast();
    // SAFETY: as in `will_need`.
    let _ = unsafe { madvise(first, bytes.as_ptr().addr() + bytes.len() - start, Advice::LinuxPopulateRead) };
}

/// For a file that is not a model: what it is, by its first bytes, and what to do about it.
fn other_file(bytes: &[u8]) -> Option<&'static str> {
    let start = &bytes[..bytes.len().min(512)];
    let text = start.trim_ascii_start().to_ascii_lowercase();
    let begins = |with: &[u8]| start.starts_with(with);
    if begins(b"version https://git-lfs") {
        Some("it is a git-LFS pointer to one, run: git lfs pull")
    } else if text.starts_with(b"<!doctype") || text.starts_with(b"<html") || text.starts_with(b"<?xml") {
        Some("it is a web page, the download link was wrong or asked for a login")
    } else if begins(b"PK\x03\x04") || begins(b"\x80\x02") {
        Some("it is a PyTorch checkpoint, convert it to safetensors or GGUF")
    } else if [&b"lmgg"[..], b"fmgg", b"tjgg", b"algg"].contains(&start.get(..4)?) {
        Some("it is of the GGML formats before GGUF (2023), convert the original model to GGUF")
    } else {
        None
    }
}

/// The tensors of a model, from one or several files.
#[derive(Debug, Default)]
pub struct Tensors {
    files: Vec<MappedFile>,
    infos: Vec<(usize, TensorInfo)>,
    by_name: std::collections::HashMap<String, usize>,
}

/// A tensor and its bytes.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a> {
    /// Its name, type and shape.
    pub info: &'a TensorInfo,
    /// `info.bytes` long.
    pub data: &'a [u8],
    /// The file that it stands in, for messages.
    pub path: &'a Path,
}

impl Tensors {
    /// Adds a file's tensors; a name that is already there is refused.
    pub fn add(&mut self, file: MappedFile, infos: Vec<TensorInfo>) -> Result<()> {
        let index = self.files.len();
        for info in infos {
            if let Some(first) = self.by_name.insert(info.name.clone(), self.infos.len()) {
                let first = self.files.get(self.infos[first].0).map_or(&file.path, |file| &file.path);
                let why = format!("the tensor is there twice, first in {}", first.display());
                return Err(Error::bad(&file.path, info.name, why));
            }
            self.infos.push((index, info));
        }
        self.files.push(file);
        Ok(())
    }

    /// The tensor of this name, if there is one.
    pub fn get(&self, name: &str) -> Option<TensorView<'_>> {
        self.by_name.get(name).map(|&i| self.view(i))
    }

    /// All tensors, in the order in which they were added.
    pub fn iter(&self) -> impl Iterator<Item = TensorView<'_>> {
        (0..self.infos.len()).map(|i| self.view(i))
    }

    /// Makes two matrices of one, its first half of rows and its second, each with its name. Where there is no such matrix, its rows are
    /// odd, or a name is taken by another tensor, nothing changes.
    pub fn halve_rows(&mut self, name: &str, halves: [String; 2]) {
        let Some(&index) = self.by_name.get(name) else { return };
        let is_taken = |half: &String| half != name && self.by_name.contains_key(half);
        let (file, whole) = self.infos[index].clone();
        let [rows, cols] = whole.shape[..] else { return };
        if !rows.is_multiple_of(2) || !whole.bytes.is_multiple_of(2) || halves.iter().any(is_taken) {
            return;
        }
        self.by_name.remove(name);
        let (bytes, places) = (whole.bytes / 2, [index, self.infos.len()]);
        for (number, (half, at)) in halves.into_iter().zip(places).enumerate() {
            let offset = whole.offset + number as u64 * bytes;
            let info =
                TensorInfo { name: half.clone(), dtype: whole.dtype, shape: vec![rows / 2, cols], offset, bytes };
            self.by_name.insert(half, at);
            match self.infos.get_mut(at) {
                Some(place) => *place = (file, info),
                None => self.infos.push((file, info)),
            }
        }
    }

    /// The files that the tensors stand in, in the order in which they were added.
    pub fn files(&self) -> &[MappedFile] {
        &self.files
    }

    fn view(&self, i: usize) -> TensorView<'_> {
        let (file, info) = &self.infos[i];
        let file = &self.files[*file];
        let start = info.offset as usize;
        TensorView { info, data: &file.bytes()[start..start + info.bytes as usize], path: &file.path }
    }
}
