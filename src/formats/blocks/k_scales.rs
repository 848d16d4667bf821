//! The packed scales of Q4_K and Q5_K.

/// The 6-bit scale and minimum of each group of 32: eight of either, in twelve bytes. The first four groups have
/// bytes of their own; the rest take four bits from the last bytes and two from the tops of the first ones.
pub(super) fn scales_and_mins(packed: &[u8]) -> [(f32, f32); 8] {
    std::array::from_fn(|j| {
        let (scale, min) = if j < 4 {
            (packed[j] & 63, packed[j + 4] & 63)
        } else {
            (packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4)
        };
        (f32::from(scale), f32::from(min))
    })
}

/// The opposite of [`scales_and_mins`].
pub(super) fn put_scales_and_mins(scales: [u8; 8], mins: [u8; 8], packed: &mut [u8]) {
    for j in 0..4 {
        packed[j] = scales[j] | scales[4 + j] >> 4 << 6;
        packed[4 + j] = mins[j] | mins[4 + j] >> 4 << 6;
        packed[8 + j] = scales[4 + j] & 15 | mins[4 + j] << 4;
    }
}
