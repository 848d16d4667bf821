//! 32 codes of 4 bits in 16 bytes: number j in the low half of byte j, number 16 + j in the high half.

/// Packs codes below 16.
pub(super) fn put(codes: &[u8; 32], out: &mut [u8]) {
    let (low, high) = codes.split_at(16);
    for ((byte, low), high) in out.iter_mut().zip(low).zip(high) {
        *byte = low | high << 4;
    }
}
