//! One read of a file, and what takes reads.

/// Reads that are under way at once, at most: NVMe disks reach their rate with 32 to 128 small ones, and reads that were begun
/// while a layer is computed must last through the next one's attention, when no others are begun.
pub const DEPTH: usize = 256;

/// Place of the first byte of the second of a disk's files; of each other one as far behind that before it.
const FILE_STRIDE: u64 = 1 << 44;

/// Where in a disk's files a byte lies: `offset` bytes from the beginning of file number `file`.
pub fn place(file: usize, offset: u64) -> u64 {
    debug_assert!(offset < FILE_STRIDE, "a file of 16 TiB");
    file as u64 * FILE_STRIDE + offset
}

/// The number of the file, and the offset in it, of a [`place`].
#[inline]
pub fn file_of(place: u64) -> (usize, u64) {
    ((place / FILE_STRIDE) as usize, place % FILE_STRIDE)
}

/// One read. Offset, length and address are multiples of the disk's alignment.
#[derive(Clone, Copy, Debug)]
pub struct Read {
    /// By which its end is told.
    pub number: u32,
    /// From the beginning of the file, of the first where there are several; else its [`place`].
    pub offset: u64,
    /// How many bytes.
    pub bytes: usize,
    /// Where they go.
    pub into: *mut u8,
}

// SAFETY: a plain description; the caller that submits it answers for the memory.
unsafe impl Send for Read {}

/// How a read has ended: with so many bytes, which may be fewer than asked for, or with the system's error number.
pub type Outcome = Result<usize, i32>;

/// Takes reads, and tells later how each has ended.
pub trait Disk: Send {
    /// How it reads, for people: `io_uring, direct reads`.
    fn name(&self) -> String;

    /// What offsets, lengths and addresses are multiples of, a power of two.
    fn align(&self) -> usize;

    /// Tells it of the memory that reads will go to, all or nearly all of them: parts that begin there and have so many bytes, in the place of
    /// those that it was told of before. Advice only. Nothing is under way.
    ///
    /// # Safety
    /// The memory is there until it is told again, or as long as the disk.
    unsafe fn will_fill(&mut self, _parts: &[(*mut u8, usize)]) {}

    /// Begins reads; no more than [`DEPTH`] are under way.
    ///
    /// # Safety
    /// Until the end of each has been reported, its memory stays valid and nothing else uses it.
    unsafe fn begin(&mut self, reads: &[Read]);

    /// Calls `done` for each read that has ended since the last call; with `wait` it waits for one first, if any is under way.
    fn ended(&mut self, wait: bool, done: &mut dyn FnMut(u32, Outcome));
}
