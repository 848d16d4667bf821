//! Signs of rows and inputs as bits, and the count of those that differ: the kernel of the sign predictor (SparseInfer IV).
//!
//! A bit is 1 for a negative number. Rows of bits are padded with zeros to 512, in rows and inputs alike, so that padding
//! never differs and kernels read whole registers.

use super::Isa;

/// Rows are padded to a multiple of so many bits: a register of AVX-512 and a cache line.
pub const PAD_BITS: usize = 512;

/// A cache line of bits.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Zeroable, bytemuck::Pod)]
pub struct BitLine([u64; PAD_BITS / 64]);

/// How many [`BitLine`]s a row of `cols` signs takes.
pub const fn lines(cols: usize) -> usize {
    cols.div_ceil(PAD_BITS)
}

/// Packs the signs of `values` into `bits`, which is [`lines`] long. Zero counts as positive, whatever its sign bit.
pub fn pack(values: &[f32], bits: &mut [BitLine]) {
    assert_eq!(bits.len(), lines(values.len()));
    bits.fill(BitLine::default());
    let words: &mut [u64] = bytemuck::cast_slice_mut(bits);
    for (word, values) in words.iter_mut().zip(values.chunks(64)) {
        *word = values.iter().enumerate().fold(0, |word, (i, v)| word | u64::from(*v < 0.0) << i);
    }
}

/// scores[b * stride + r] = (matching - differing signs) / cols of row r and column b, in -1..=1. `rows` and `columns` hold
/// whole rows of [`lines`] each; `scores` has room for the last index.
pub fn scores(isa: Isa, rows: &[BitLine], columns: &[BitLine], cols: usize, scores: &mut [f32], stride: usize) {
    let lines = lines(cols);
    let (count, n) = (rows.len() / lines, columns.len() / lines);
    assert!(count > 0 && n > 0 && rows.len() == count * lines && columns.len() == n * lines);
    assert!((n - 1) * stride + count <= scores.len());
    // SAFETY: just checked.
    unsafe { kernel(isa)(rows.as_ptr(), count, columns.as_ptr(), n, cols, scores.as_mut_ptr(), stride) }
}

/// [`scores`] by pointers, for callers that have several threads write parts of the same scores.
///
/// # Safety
/// `rows` points to `count` and `columns` to `n` rows of [`lines`]`(cols)`; `scores` is writable at every index named; the
/// CPU has the instructions the function was compiled for.
pub type Scores = unsafe fn(
    rows: *const BitLine,
    count: usize,
    columns: *const BitLine,
    n: usize,
    cols: usize,
    scores: *mut f32,
    stride: usize,
);

/// The kernel for a machine that has `isa`.
pub fn kernel(isa: Isa) -> Scores {
    match isa {
        Isa::Portable => portable,
        // AVX-512 does not bring the instruction that counts bits of a register (VPOPCNTDQ); without it AVX2's way is used.
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 if cfg!(emulated) || is_x86_feature_detected!("avx512vpopcntdq") => x86::avx512,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 | Isa::AvxVnni | Isa::Avx2 => x86::avx2,
        #[cfg(not(target_arch = "x86_64"))]
        _ => portable,
    }
}

/// Defines a [`Scores`] kernel from a function that counts the differing bits of a row and a column.
macro_rules! scores {
    ($(#[$attribute:meta])? $name:ident, $count:ident) => {
        $(#[$attribute])?
        pub(super) unsafe fn $name(
            rows: *const BitLine,
            count: usize,
            columns: *const BitLine,
            n: usize,
            cols: usize,
            scores: *mut f32,
            stride: usize,
        ) {
            let (lines, share) = (lines(cols), 1.0 / cols as f32);
            for r in 0..count {
                for b in 0..n {
                    // SAFETY: the caller's promises.
                    unsafe {
                        let differing = $count(rows.add(r * lines), columns.add(b * lines), lines);
                        *scores.add(b * stride + r) = (cols as i64 - 2 * differing as i64) as f32 * share;
                    }
                }
            }
        }
    };
}

unsafe fn count_portable(row: *const BitLine, column: *const BitLine, lines: usize) -> u64 {
    // SAFETY: both have `lines`.
    let (row, column) = unsafe { (std::slice::from_raw_parts(row, lines), std::slice::from_raw_parts(column, lines)) };
    let words = row.iter().zip(column).flat_map(|(a, b)| a.0.iter().zip(&b.0));
    words.map(|(a, b)| u64::from((a ^ b).count_ones())).sum()
}

mod generic {
    use super::{BitLine, count_portable, lines};
    scores!(portable, count_portable);
}
use generic::portable;

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{BitLine, lines};
    use crate::cpu::arch::*;

    scores!(
        #[cfg_attr(not(emulated), target_feature(enable = "avx2"))]
        avx2,
        count_avx2
    );

    /// Eight rows at a time: adding up the lanes of a register costs more than counting the bits of a short row.
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512vl,avx512vpopcntdq"))]
    pub(super) unsafe fn avx512(
        rows: *const BitLine,
        count: usize,
        columns: *const BitLine,
        n: usize,
        cols: usize,
        scores: *mut f32,
        stride: usize,
    ) {
        let lines = lines(cols);
        for r in (0..count).step_by(8) {
            // Where fewer than eight rows are left, the last one is read again in place of the missing ones, whose scores are not stored.
            let last = (count - r).min(8) - 1;
            for b in 0..n {
                let mut sums = [_mm512_setzero_si512(); 8];
                // SAFETY: the caller's promises.
                unsafe {
                    for (k, sum) in sums.iter_mut().enumerate() {
                        let (row, column) = (rows.add((r + k.min(last)) * lines), columns.add(b * lines));
                        for i in 0..lines {
                            let row = _mm512_load_si512(row.add(i).cast());
                            let bits = _mm512_xor_si512(row, _mm512_load_si512(column.add(i).cast()));
                            *sum = _mm512_add_epi64(*sum, _mm512_popcnt_epi64(bits));
                        }
                    }
                    let differing = _mm512_cvtepi64_epi32(lane_sums(sums));
                    let more = _mm256_sub_epi32(_mm256_set1_epi32(cols as i32), _mm256_slli_epi32::<1>(differing));
                    let share = _mm256_mul_ps(_mm256_cvtepi32_ps(more), _mm256_set1_ps(1.0 / cols as f32));
                    _mm256_mask_storeu_ps(scores.add(b * stride + r), u8::MAX >> (7 - last), share);
                }
            }
        }
    }

    /// Lane k of the result is the sum of the lanes of `sums[k]`.
    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx512f"))]
    fn lane_sums(sums: [__m512i; 8]) -> __m512i {
        let pairs = |a, b| _mm512_add_epi64(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
        let blocks = |a, b| {
            _mm512_add_epi64(_mm512_shuffle_i64x2::<0b10_00_10_00>(a, b), _mm512_shuffle_i64x2::<0b11_01_11_01>(a, b))
        };
        let [a, b, c, d, e, f, g, h] = sums;
        blocks(blocks(pairs(a, b), pairs(c, d)), blocks(pairs(e, f), pairs(g, h)))
    }

    /// How many bytes ahead of the counting rows are prefetched. On a Zen 3, in two runs each, one thread read 12.2 and 11.9 GB/s
    /// without it and 15.6 and 15.1 with it, two threads 17.2 and 17.9 without and 19.8 and 20.6 with. Counting four rows together
    /// gained nothing more.
    const AHEAD: usize = 2048;

    /// The bits of each half byte are counted by a table of 16 entries, then sums of eight bytes are added up.
    #[inline]
    #[cfg_attr(not(emulated), target_feature(enable = "avx2"))]
    unsafe fn count_avx2(row: *const BitLine, column: *const BitLine, lines: usize) -> u64 {
        #[rustfmt::skip]
        let table = _mm256_setr_epi8(
            0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4,
            0, 1, 1, 2, 1, 2, 2, 3, 1, 2, 2, 3, 2, 3, 3, 4,
        );
        let low = _mm256_set1_epi8(15);
        let mut sum = _mm256_setzero_si256();
        for i in 0..2 * lines {
            if i % 2 == 0 {
                _mm_prefetch::<_MM_HINT_T1>(row.cast::<i8>().wrapping_add(i * 32 + AHEAD));
            }
            // SAFETY: both have `lines`, of two registers each.
            let (a, b) = unsafe {
                (_mm256_load_si256(row.cast::<__m256i>().add(i)), _mm256_load_si256(column.cast::<__m256i>().add(i)))
            };
            let bits = _mm256_xor_si256(a, b);
            let lower = _mm256_shuffle_epi8(table, _mm256_and_si256(bits, low));
            let upper = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16::<4>(bits), low));
            let counts = _mm256_add_epi8(lower, upper);
            sum = _mm256_add_epi64(sum, _mm256_sad_epu8(counts, _mm256_setzero_si256()));
        }
        let half = _mm_add_epi64(_mm256_castsi256_si128(sum), _mm256_extracti128_si256::<1>(sum));
        (_mm_cvtsi128_si64(half) + _mm_extract_epi64::<1>(half)) as u64
    }
}
