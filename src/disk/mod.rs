//! Reading files from a disk with many reads under way at once, past the system's cache of pages.
//!
//! A [`Disk`] takes reads and says later which are done. [`open`] takes io_uring with direct reads where the system allows both; else it
//! says what it took instead. [`VirtualDisk`] stands in for one in tests: its reads end in any order, late, short or not at all.

mod cost;
mod curve;
mod read;
mod threads;
mod uring;
mod virtual_disk;

pub use cost::DiskCosts;
pub use curve::{DiskRate, TwoParts, curve, two_parts};
pub use read::{DEPTH, Disk, Outcome, Read, file_of, place};
pub use threads::ReadThreads;
pub use uring::Uring;
pub use virtual_disk::{Faults, Speed, VirtualDisk};

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

/// A disk, and what is to be said about how it reads; `None` where it is the best way there is.
pub struct OpenedDisk {
    /// The disk.
    pub disk: Box<dyn Disk>,
    /// A sentence for people.
    pub notice: Option<String>,
}

/// Opens the files that `files` are, for reading in the best way that the system allows.
///
/// # Errors
/// A file cannot be opened once more.
pub fn open(files: &[&File]) -> io::Result<OpenedDisk> {
    let opened = |direct: bool| files.iter().map(|file| reopen(file, direct)).collect::<io::Result<Vec<File>>>();
    let direct = opened(true).ok().and_then(|direct| {
        let aligns: Option<Vec<usize>> = direct.iter().map(alignment).collect();
        Some((aligns?.into_iter().max()?, direct))
    });
    let (align, files, why_not_direct) = match direct {
        Some((align, direct)) => (align, direct, None),
        None => (
            BUFFERED_ALIGN,
            opened(false)?,
            Some("its file system has no direct reads, so pages of it fill the system's cache"),
        ),
    };
    let how = if why_not_direct.is_none() { "direct reads" } else { "reads through the system's cache" };
    let again = files.iter().map(File::try_clone).collect::<io::Result<Vec<File>>>()?;
    let (disk, why_threads): (Box<dyn Disk>, _) = match Uring::new(again, align, how) {
        Ok(ring) => (Box::new(ring), None),
        Err(error) => (
            Box::new(ReadThreads::new(files, align, how)?),
            Some(format!("io_uring is not to be had ({error}), threads read instead")),
        ),
    };
    let said: Vec<String> = why_threads.into_iter().chain(why_not_direct.map(str::to_owned)).collect();
    Ok(OpenedDisk {
        disk,
        notice: (!said.is_empty()).then(|| format!("reading the model from disk: {}", said.join("; "))),
    })
}

/// Reads through the system's cache have none; this one keeps rows at the addresses that kernels want.
const BUFFERED_ALIGN: usize = 64;

/// The same file, whatever name it has now, opened once more.
fn reopen(file: &File, direct: bool) -> io::Result<File> {
    use std::os::fd::AsRawFd;
    let flags = if direct { libc::O_DIRECT } else { 0 };
    File::options().read(true).custom_flags(flags).open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// What direct reads of this file have to be multiples of, by trying; `None` if none of the usual sizes works.
fn alignment(file: &File) -> Option<usize> {
    #[repr(C, align(4096))]
    struct Page([u8; 8192]);
    let mut page = Box::new(Page([0; 8192]));
    // At an offset and an address that are no multiples of anything larger. A file that is shorter gives no bytes, which is no error.
    let mut works = |align: usize| file.read_at(&mut page.0[align..2 * align], align as u64).is_ok();
    [512, 4096].into_iter().find(|&align| works(align))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// Each of several files is read where it is meant.
    #[test]
    fn a_place_is_in_its_file() {
        let files = [3u8, 4, 5].map(|byte| {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            file.write_all(&[byte; 8192]).unwrap();
            file
        });
        let buffered: Vec<File> = files.iter().map(|file| reopen(file.as_file(), false).unwrap()).collect();
        let opened = open(&files.each_ref().map(tempfile::NamedTempFile::as_file)).unwrap().disk;
        for mut disk in [opened, Box::new(ReadThreads::new(buffered, 64, "").unwrap())] {
            let mut memory = vec![0u8; 3 * 4096 + 4096];
            let start = memory.as_mut_ptr();
            let start = start.wrapping_add(start.align_offset(4096));
            let into = |file: usize| start.wrapping_add(file * 4096);
            let reads = [2, 0, 1].map(|file| Read {
                number: file as u32,
                offset: place(file, 4096),
                bytes: 4096,
                into: into(file),
            });
            // SAFETY: each read has a part of the memory that nothing else uses.
            unsafe { disk.begin(&reads) };
            let mut left = 3;
            while left > 0 {
                disk.ended(true, &mut |_, outcome| {
                    assert_eq!(outcome, Ok(4096));
                    left -= 1;
                });
            }
            // SAFETY: they were read there.
            let found = [0, 1, 2].map(|file| unsafe { into(file).read() });
            assert_eq!(found, [3, 4, 5], "{}", disk.name());
        }
    }

    /// Every byte of a file, read in pieces in any order, by both ways of reading.
    #[test]
    fn what_is_read_is_what_the_file_holds() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let bytes: Vec<u8> = (0..300_000u32).map(|i| (i / 7 % 251) as u8).collect();
        file.write_all(&bytes).unwrap();
        let buffered = || reopen(file.as_file(), false).unwrap();
        let opened = open(&[file.as_file()]).unwrap().disk;
        let threads = ReadThreads::new(vec![buffered()], 64, "").unwrap();
        let scattered = VirtualDisk::new(buffered(), 64, 3, Faults::default());
        for mut disk in [opened, Box::new(threads), Box::new(scattered)] {
            let (align, name) = (disk.align(), disk.name());
            let piece = 8192;
            let mut memory = vec![0u8; bytes.len().next_multiple_of(piece) + align];
            let skip = memory.as_ptr().align_offset(align);
            let start = memory.as_mut_ptr().wrapping_add(skip);
            // SAFETY: the memory outlives the disk's work.
            unsafe { disk.will_fill(&[(start, memory.len() - skip)]) };
            let pieces = bytes.len().div_ceil(piece);
            let mut got = vec![0; pieces];
            for batch in (0..pieces).collect::<Vec<_>>().chunks(DEPTH) {
                let read = |&p: &usize| Read {
                    number: p as u32,
                    offset: (p * piece) as u64,
                    bytes: piece,
                    into: start.wrapping_add(p * piece),
                };
                let reads: Vec<Read> = batch.iter().map(read).collect();
                // SAFETY: each read has a part of the memory that nothing else uses.
                unsafe { disk.begin(&reads) };
                let mut left = batch.len();
                while left > 0 {
                    disk.ended(true, &mut |number, outcome| {
                        got[number as usize] = outcome.unwrap();
                        left -= 1;
                    });
                }
            }
            assert_eq!(got.iter().sum::<usize>(), bytes.len(), "{name}");
            assert!(memory[skip..skip + bytes.len()] == bytes, "{name}");
        }
    }
}
