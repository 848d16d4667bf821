//! 32 codes of 4 bits in 16 bytes: number j in the low half of byte j, number 16 + j in the high half.

use super::fit::Weighted;
use super::levels::Levels;
use super::{finite_half, put_f16};

/// Packs codes below 16.
pub(super) fn put(codes: &[u8; 32], out: &mut [u8]) {
    let (low, high) = codes.split_at(16);
    for ((byte, low), high) in out.iter_mut().zip(low).zip(high) {
        *byte = low | high << 4;
    }
}

/// Encodes a block of 32 numbers that is an f16 scale and a code of 4 bits for each; `ends` are where the number of largest magnitude may
/// stand.
pub(super) fn encode<L: Levels>(numbers: Weighted, ends: &[f32], block: &mut [u8]) {
    let d = finite_half(numbers.scale::<L>(ends));
    let mut codes = [0; 32];
    numbers.put_codes::<L>(d.to_f32(), 0.0, &mut codes);
    put_f16(block, 0, d);
    put(&codes, &mut block[2..]);
}
