//! The products of a row with few columns, of types that have a scale for each 32 numbers and codes of 4 or 5 bits.
//!
//! Decoding one token meets every weight once, so what unpacking costs counts: on a Zen 4 the kernel for many columns, which brings codes
//! into lanes that each belong to one group, took 5.7 ns for 256 numbers of q4_k in L2, mostly for shuffles and shifts. Here codes are
//! masked where they lie, in runs of 16 ([`UnitBlock`]): four lanes belong to a run, and two runs to a group. A code in the upper half of a
//! byte is not shifted down: it counts sixteenfold, and the sum is divided, without rounding.

use super::{Few, MAX_STEP, Unpack, lanes, prefetch_step, step};
use crate::cpu::Columns;
use crate::cpu::arch::*;
use crate::cpu::columns::{BLOCK, UnitBlock};

/// Which codes count sixteenfold.
pub(super) enum Sixteenfold {
    None,
    /// Those of the second run of each group.
    SecondRuns,
    /// Those of every second group.
    OddGroups,
}

/// Types with a scale for each 32 numbers.
///
/// # Safety
/// As [`Unpack`].
pub(super) trait By32: Unpack {
    const SIXTEENFOLD: Sixteenfold;

    /// How often the second numbers of [`By32::eight`], times the sums of the inputs, are taken off.
    const LESS: f32;

    /// Of eight groups the scales, and numbers that [`By32::LESS`] makes their minima. What counts sixteenfold does not change them.
    unsafe fn eight(at: *const u8) -> [__m256; 2];

    /// The codes as unsigned bytes in the order of [`UnitBlock::codes`].
    unsafe fn units(at: *const u8) -> [__m512i; 4];
}

/// The [`Few`] of a type.
pub(super) const fn few<T: By32>() -> [Few; 4] {
    [dot::<T, 1>, dot::<T, 2>, dot::<T, 3>, dot::<T, 4>]
}

/// The products of a row with N columns. Two rows at a time, which share the inputs of one, were no faster from L2 and twice as slow from memory.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
unsafe fn dot<T: By32, const N: usize>(
    row: *const u8,
    x: &Columns,
    first: usize,
    ahead: usize,
    y: *mut f32,
    stride: usize,
) {
    // Of even and odd groups, four lanes for each.
    let (mut even, mut odd) = ([_mm512_setzero_ps(); N], [_mm512_setzero_ps(); N]);
    let mut less = [_mm256_setzero_ps(); N];
    let places = [lanes!(|lane| lane / 4 * 2), lanes!(|lane| lane / 4 * 2 + 1)];
    let mut tail = [0; MAX_STEP];
    let xs: [*const UnitBlock; N] = std::array::from_fn(|b| x.unit_blocks(first + b).as_ptr());
    for i in 0..x.cols.div_ceil(BLOCK) {
        prefetch_step::<T>(row, i, ahead);
        // SAFETY: a step of the row.
        let (units, [scales, minima]) = unsafe {
            let at = step::<T>(row, i, x.cols, &mut tail);
            (T::units(at), T::eight(at))
        };
        for b in 0..N {
            // SAFETY: columns are padded to whole steps.
            let input = unsafe { &*xs[b].add(i) };
            // SAFETY: registers of numbers.
            let [steps, sums] = [&input.steps, &input.sums].map(|numbers| unsafe { _mm256_load_ps(numbers.as_ptr()) });
            less[b] = _mm256_fmadd_ps(minima, sums, less[b]);
            let factors = _mm512_castps256_ps512(_mm256_mul_ps(scales, steps));
            let two = |k: usize| {
                // SAFETY: registers of codes.
                let [first, second] = [k, k + 1].map(|k| unsafe { _mm512_load_si512(input.codes[k].as_ptr().cast()) });
                let mut dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), units[k + 1], second);
                if matches!(T::SIXTEENFOLD, Sixteenfold::SecondRuns) {
                    dot = _mm512_srai_epi32::<4>(dot);
                }
                _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(dot, units[k], first))
            };
            even[b] = _mm512_fmadd_ps(two(0), _mm512_permutexvar_ps(places[0], factors), even[b]);
            odd[b] = _mm512_fmadd_ps(two(2), _mm512_permutexvar_ps(places[1], factors), odd[b]);
        }
    }
    let part = if matches!(T::SIXTEENFOLD, Sixteenfold::OddGroups) { 0.0625 } else { 1.0 };
    for b in 0..N {
        let all = _mm512_fmadd_ps(odd[b], _mm512_set1_ps(part), even[b]);
        let eight = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps::<1>(all));
        let eight = _mm256_fnmadd_ps(less[b], _mm256_set1_ps(T::LESS), eight);
        let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        // SAFETY: the caller's promises.
        unsafe { *y.add(b * stride) = _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two))) };
    }
}

/// The runs of 16 bytes of 128 that belong to even, and those that belong to odd places.
///
/// # Safety
/// 128 readable bytes.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
pub(super) unsafe fn by_turns(at: *const u8) -> [__m512i; 2] {
    // SAFETY: the caller's promise.
    let (first, last) = unsafe { (_mm512_loadu_si512(at.cast()), _mm512_loadu_si512(at.add(64).cast())) };
    [_mm512_shuffle_i32x4::<0b10_00_10_00>(first, last), _mm512_shuffle_i32x4::<0b11_01_11_01>(first, last)]
}

/// 16 bytes of each of the even, and of the odd ones of eight blocks of `BYTES`, `FROM` bytes behind their beginning: two of either are in
/// one register and two in another, of which a permutation takes them.
///
/// # Safety
/// The blocks can be read.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
pub(super) unsafe fn of_blocks<const BYTES: usize, const FROM: usize>(at: *const u8) -> [__m512i; 2] {
    let load = |byte: usize| {
        // SAFETY: all four end within the blocks.
        unsafe { _mm512_loadu_si512(at.add(byte).cast()) }
    };
    let take = |first: usize, last: usize, places: &[i16; 32]| {
        // SAFETY: 64 bytes.
        let places = unsafe { _mm512_loadu_si512(places.as_ptr().cast()) };
        _mm512_permutex2var_epi16(load(first), places, load(last))
    };
    // The last register ends with the last block.
    const { assert!(FROM + 64 <= 4 * BYTES && 2 * BYTES <= 48) };
    let (even, odd) = const { (&runs(0, 2 * BYTES, 0, 2 * BYTES), &runs(0, 2 * BYTES, 48 - 2 * BYTES, 48)) };
    [take(FROM, 4 * BYTES + FROM, even), take(BYTES + FROM, 8 * BYTES - 64, odd)]
}

/// Words of two runs of 16 bytes of a register and of two of another, by their first bytes.
const fn runs(first: usize, second: usize, third: usize, fourth: usize) -> [i16; 32] {
    let starts = [first / 2, second / 2, 32 + third / 2, 32 + fourth / 2];
    let (mut words, mut i) = ([0; 32], 0);
    while i < 32 {
        words[i] = (starts[i / 8] + i % 8) as i16;
        i += 1;
    }
    words
}

/// Codes of 4 bits, number j of a group in the low and 16 + j in the high half of its byte j: second runs count sixteenfold.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
pub(super) fn nibbles_in_place([even, odd]: [__m512i; 2]) -> [__m512i; 4] {
    let (low, high) = (_mm512_set1_epi8(0x0F), _mm512_set1_epi8(-0x10));
    [_mm512_and_si512(even, low), _mm512_and_si512(even, high), _mm512_and_si512(odd, low), _mm512_and_si512(odd, high)]
}

/// The levels that such codes stand for.
#[inline]
#[cfg_attr(not(emulated), target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,f16c"))]
pub(super) fn levels_of([even, odd]: [__m512i; 2], levels: &[u8; 16]) -> [__m512i; 4] {
    let low = _mm512_set1_epi8(0x0F);
    let high = |codes: __m512i| _mm512_and_si512(_mm512_srli_epi16::<4>(codes), low);
    super::levels::look_up([_mm512_and_si512(even, low), high(even), _mm512_and_si512(odd, low), high(odd)], levels)
}
