//! Memory for frames and for what is on its way: taken once, on pages as large as the system gives.

use memmap2::MmapMut;
use std::io;

/// Memory of the process's own, zero until it is written to.
pub struct Memory(MmapMut);

impl Memory {
    /// So many bytes, which begin a page.
    ///
    /// # Errors
    /// The system does not give them.
    pub fn new(bytes: usize) -> io::Result<Memory> {
        let map = MmapMut::map_anon(bytes.max(1))?;
        // A layer's frames lie all over it: with small pages most reads would miss the translation cache. Advice only.
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Memory(map))
    }

    /// Its first byte. What is written through it must be nobody else's then.
    pub fn start(&mut self) -> *mut u8 {
        self.0.as_mut_ptr()
    }

    /// How many bytes it has.
    pub fn bytes(&self) -> usize {
        self.0.len()
    }
}
