//! Checksums of single blocks of a section, in a section of their own: what is read by itself can be compared by itself.

use xxhash_rust::xxh3::xxh3_64;

/// The checksum of a block: the low half of its xxh3-64.
#[inline]
pub fn block_checksum(block: &[u8]) -> u32 {
    xxh3_64(block) as u32
}

/// The name of the section with the checksums of the blocks of section `of`.
pub fn name_of(of: &str) -> String {
    format!("{of}_checksums")
}

/// A section of checksums that is still to be made.
pub(super) struct BlockChecksums {
    /// Its number, and that of the section that has the blocks.
    pub section: usize,
    pub of: usize,
    /// Bytes from one block to the next, and of the parts of each, which have a checksum each.
    pub stride: usize,
    pub parts: Vec<u64>,
}

impl BlockChecksums {
    /// The section's bytes, by those of the blocks: little-endian numbers.
    pub fn make(&self, blocks: &[u8]) -> Vec<u8> {
        let mut table = Vec::with_capacity(blocks.len() / self.stride * self.parts.len() * size_of::<u32>());
        for mut block in blocks.chunks_exact(self.stride) {
            for &bytes in &self.parts {
                let (part, rest) = block.split_at(bytes as usize);
                table.extend_from_slice(&block_checksum(part).to_le_bytes());
                block = rest;
            }
        }
        table
    }
}
