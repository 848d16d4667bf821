//! The codes of Q5_0 and Q5_1.

use super::halves;

/// 32 codes of 5 bits as `fifth bits u32 | low 4 bits u8[16]`: number j has bit j, and in byte j the low half; 16 + j the high one.
pub(super) fn codes(src: &[u8]) -> [u8; 32] {
    let fifth = u32::from_le_bytes([src[0], src[1], src[2], src[3]]);
    std::array::from_fn(|i| {
        let low = if i < 16 { src[4 + i] & 15 } else { src[4 + i - 16] >> 4 };
        low | ((fifth >> i & 1) << 4) as u8
    })
}

/// The opposite of [`codes`], of codes below 32.
pub(super) fn put(codes: &[u8; 32], out: &mut [u8]) {
    let fifth = codes.iter().enumerate().fold(0u32, |bits, (i, code)| bits | u32::from(code >> 4) << i);
    out[..4].copy_from_slice(&fifth.to_le_bytes());
    halves::put(&codes.map(|code| code & 15), &mut out[4..]);
}
