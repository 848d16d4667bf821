//! Reads by io_uring: one call hands over a layer's reads, and their ends are found in memory.

use super::{DEPTH, Disk, Outcome, Read, file_of};
use io_uring::{IoUring, opcode, types};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// The largest piece of memory that can be registered by itself.
const PIECE: usize = 1 << 30;

/// A ring of reads of some files.
pub struct Uring {
    ring: IoUring,
    files: Vec<File>,
    align: usize,
    how: &'static str,
    /// Where each registered piece of memory begins, and its bytes, ascending; none if they were refused.
    registered: Vec<(usize, usize)>,
}

impl Uring {
    /// A ring for reads of `files` whose offsets, lengths and addresses are multiples of `align`.
    ///
    /// # Errors
    /// The system has no io_uring or does not allow it, as many containers do not.
    pub fn new(files: Vec<File>, align: usize, how: &'static str) -> io::Result<Uring> {
        Ok(Uring { ring: IoUring::new(DEPTH as u32)?, files, align, how, registered: Vec::new() })
    }

    /// Number of the registered piece in which the memory lies as a whole.
    fn piece(&self, into: *mut u8, bytes: usize) -> Option<u16> {
        let piece = self.registered.partition_point(|(start, _)| *start <= into.addr()).checked_sub(1)?;
        let (start, length) = self.registered[piece];
        (bytes > 0 && into.addr() + bytes <= start + length).then_some(piece as u16)
    }
}

impl Disk for Uring {
    fn name(&self) -> String {
        format!("io_uring, {}", self.how)
    }

    fn align(&self) -> usize {
        self.align
    }

    unsafe fn will_fill(&mut self, parts: &[(*mut u8, usize)]) {
        if !self.registered.is_empty() {
            self.registered.clear();
            let _ = self.ring.submitter().unregister_buffers();
        }
        // Registered memory is looked up once and not for each read. Where so much may not be locked, reads go there all the same.
        let pieces_of = |&(start, bytes): &(*mut u8, usize)| {
            let piece = move |at: usize| libc::iovec {
                iov_base: start.wrapping_add(at).cast(),
                iov_len: PIECE.min(bytes - at),
            };
            (0..bytes).step_by(PIECE).map(piece)
        };
        let mut pieces: Vec<libc::iovec> = parts.iter().flat_map(pieces_of).collect();
        pieces.sort_by_key(|piece| piece.iov_base.addr());
        // SAFETY: the caller's promise.
        if !pieces.is_empty() && unsafe { self.ring.submitter().register_buffers(&pieces) }.is_ok() {
            self.registered = pieces.iter().map(|piece| (piece.iov_base.addr(), piece.iov_len)).collect();
        }
    }

    unsafe fn begin(&mut self, reads: &[Read]) {
        for read in reads {
            let (file, offset) = file_of(read.offset);
            let (fd, bytes) = (types::Fd(self.files[file].as_raw_fd()), read.bytes as u32);
            let entry = match self.piece(read.into, read.bytes) {
                Some(piece) => opcode::ReadFixed::new(fd, read.into, bytes, piece).offset(offset).build(),
                None => opcode::Read::new(fd, read.into, bytes).offset(offset).build(),
            };
            // SAFETY: the caller's promise; the ring has room for DEPTH.
            let pushed = unsafe { self.ring.submission().push(&entry.user_data(u64::from(read.number))) };
            assert!(pushed.is_ok(), "more reads than the ring takes");
        }
        // What the system did not take stays in the ring, and is handed over when its end is waited for.
        let _ = self.ring.submit();
    }

    fn ended(&mut self, wait: bool, done: &mut dyn FnMut(u32, Outcome)) {
        if wait {
            // A signal may end it early: the caller that waits asks again.
            let _ = self.ring.submit_and_wait(1);
        }
        for entry in self.ring.completion() {
            let result = entry.result();
            done(entry.user_data() as u32, usize::try_from(result).map_err(|_| -result));
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        // The kernel keeps what reads under way go to until they end; the owner has waited for them.
        let _ = self.ring.submitter().unregister_buffers();
    }
}
