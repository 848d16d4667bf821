//! Host memory that stands in for a device's.

use crate::device::Buffer;
use crate::device::kernel::HostMemory;
use memmap2::{MmapMut, UncheckedAdvice};

/// A buffer.
pub(super) struct Bytes {
    /// Its bytes; empty if it is only counted.
    pub data: Region,
    /// Whether its bytes are only counted ([`crate::device::Device::reserve`]).
    pub reserved: bool,
    /// How often it was written to.
    pub writes: u64,
}

/// Bytes of a page of the host's memory. Where pages are larger, the system refuses to take them back, and they are zeroed instead.
const PAGE: usize = 4096;

/// Zeroed memory on pages of its own, which go back to the system when it shrinks.
pub(super) struct Region {
    map: MmapMut,
    /// Its length in f32 numbers.
    len: usize,
}

impl Region {
    /// `bytes` zeros with addresses for `most` bytes; the system gives each page when it is first used.
    pub fn new(bytes: u64, most: u64) -> Region {
        let map = MmapMut::map_anon((most as usize).max(1)).expect("addresses for the device's memory");
        Region { map, len: bytes.div_ceil(4) as usize }
    }

    /// Changes the length; new bytes are zero.
    pub fn resize(&mut self, bytes: u64) {
        let len = bytes.div_ceil(4) as usize;
        if len < self.len {
            // The rest of the last page is zeroed; whole pages behind it are given back, and read as zeros when they are used again.
            let from = (len * 4).next_multiple_of(PAGE).min(self.len * 4);
            self.map[len * 4..from].fill(0);
            if from < self.len * 4 {
                // SAFETY: private anonymous pages that nothing else uses.
                let dropped =
                    unsafe { self.map.unchecked_advise_range(UncheckedAdvice::DontNeed, from, self.len * 4 - from) };
                if dropped.is_err() {
                    self.map[from..self.len * 4].fill(0);
                }
            }
        }
        self.len = len;
    }

    /// The most bytes that it may grow to.
    pub fn most(&self) -> u64 {
        self.map.len() as u64
    }
}

impl std::ops::Deref for Region {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        &bytemuck::cast_slice(&self.map[..self.map.len() / 4 * 4])[..self.len]
    }
}

impl std::ops::DerefMut for Region {
    fn deref_mut(&mut self) -> &mut [f32] {
        let whole = self.map.len() / 4 * 4;
        &mut bytemuck::cast_slice_mut(&mut self.map[..whole])[..self.len]
    }
}

/// By id.
impl HostMemory for Vec<Option<Bytes>> {
    fn of(&self, buffer: Buffer) -> &[f32] {
        &self[buffer.id as usize].as_ref().expect("checked when it was put").data
    }

    fn of_mut(&mut self, buffer: Buffer) -> &mut [f32] {
        let bytes = self[buffer.id as usize].as_mut().expect("checked when it was put");
        bytes.writes += 1;
        &mut bytes.data
    }
}
