//! Host memory that copies of a device use for as long as the device lives.

use memmap2::MmapMut;

/// u32 words on memory pages of their own: a device pins whole pages.
pub struct PinnedBuffer {
    map: MmapMut,
    words: usize,
}

impl PinnedBuffer {
    /// `words` zeros.
    pub fn new(words: usize) -> PinnedBuffer {
        let map = MmapMut::map_anon((words * 4).max(1)).expect("a few megabytes of host memory");
        PinnedBuffer { map, words }
    }
}

impl std::ops::Deref for PinnedBuffer {
    type Target = [u32];
    fn deref(&self) -> &[u32] {
        bytemuck::cast_slice(&self.map[..self.words * 4])
    }
}

impl std::ops::DerefMut for PinnedBuffer {
    fn deref_mut(&mut self) -> &mut [u32] {
        bytemuck::cast_slice_mut(&mut self.map[..self.words * 4])
    }
}
