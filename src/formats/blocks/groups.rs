//! The search for the scales of types whose blocks of 256 numbers have groups, and these scales of their own: whole numbers of few bits,
//! times a scale of the block.
//!
//! First each group gets the scales that are best for it alone. The block's scale is what makes the largest of them the largest code. Of
//! the codes next to what a group wants the best is taken, and then the block's scale is fitted to all codes, and so on in turns.

use super::finite_half;
use super::fit::{Weighted, inverse};
use super::levels::{Levels, Whole};
use half::f16;

/// Numbers of a block.
const NUMBERS: usize = 256;
/// How often the scales of block and groups are chosen, at most. The second choice lowers the error by up to 0.2 %, a third by 0.1 %.
const TURNS: usize = 2;
/// The codes that are tried for a group's scale, counted from the nearest one.
const NEARBY: [f32; 3] = [0.0, -1.0, 1.0];

/// A block whose groups have scales of either sign: value = d scale level.
pub(super) struct Signed<const GROUPS: usize> {
    /// The block's scale.
    pub d: f16,
    /// The groups' scales, as codes from 0.
    pub scales: [u8; GROUPS],
    /// The codes of the numbers.
    pub codes: [u8; NUMBERS],
}

impl<const GROUPS: usize> Signed<GROUPS> {
    /// Fits a block. Groups' scales are the levels of `S`, the largest of them is given `most`; `ends` as in [`Weighted::scale`].
    pub fn fit<L: Levels, S: Levels>(block: Weighted, ends: &[f32], most: f32) -> Self {
        let mut wanted = [0f32; GROUPS];
        block.parts(NUMBERS / GROUPS).zip(&mut wanted).for_each(|(group, scale)| *scale = group.scale::<L>(ends));
        let top = wanted.iter().fold(0f32, |top, &scale| if scale.abs() > top.abs() { scale } else { top });
        let mut d = finite_half(top / most);
        let mut best = (f32::INFINITY, d, [0f32; GROUPS]);
        for _ in 0..TURNS {
            let (error, scales) = signed_scales::<L, S, GROUPS>(block, &wanted, d.to_f32());
            if error < best.0 {
                best = (error, d, scales);
                d = signed_step::<L, GROUPS>(block, &scales, d.to_f32());
            } else {
                break;
            }
        }
        let (_, d, scales) = best;
        let mut codes = [0; NUMBERS];
        for ((group, codes), scale) in parts(block, &mut codes, NUMBERS / GROUPS).zip(scales) {
            group.put_codes::<L>(d.to_f32() * scale, 0.0, codes);
        }
        Signed { d, scales: scales.map(S::code), codes }
    }
}

/// The best scales near the wanted ones for this step, and their error.
fn signed_scales<L: Levels, S: Levels, const GROUPS: usize>(
    block: Weighted,
    wanted: &[f32; GROUPS],
    step: f32,
) -> (f32, [f32; GROUPS]) {
    let (mut sum, mut scales) = (0.0, [0f32; GROUPS]);
    let inverse = inverse(step);
    for ((group, scale), wanted) in block.parts(NUMBERS / GROUPS).zip(&mut scales).zip(wanted) {
        let mut least = f32::INFINITY;
        for off in NEARBY {
            let tried = S::nearest(wanted * inverse + off);
            let error = group.error::<L>(step * tried, 0.0);
            if error < least {
                (least, *scale) = (error, tried);
            }
        }
        sum += least;
    }
    (sum, scales)
}

/// The step of least squares for these scales and the codes that they have with the old step.
fn signed_step<L: Levels, const GROUPS: usize>(block: Weighted, scales: &[f32; GROUPS], old: f32) -> f16 {
    let (mut xl, mut ll) = (0.0, 0.0);
    for (group, &scale) in block.parts(NUMBERS / GROUPS).zip(scales) {
        let inverse = inverse(old * scale);
        let sums = group.sums(|x, w| {
            let l = L::nearest(x * inverse) * scale;
            [w * x * l, w * l * l]
        });
        xl += sums[0];
        ll += sums[1];
    }
    finite_half(if ll > 0.0 { xl / ll } else { old })
}

/// A block whose groups have a scale and a minimum: value = d scale code - dmin min.
pub(super) struct WithMins<const GROUPS: usize> {
    /// The block's scale.
    pub d: f16,
    /// The scale of the groups' minima.
    pub dmin: f16,
    /// The groups' scales.
    pub scales: [u8; GROUPS],
    /// The groups' minima.
    pub mins: [u8; GROUPS],
    /// The codes of the numbers.
    pub codes: [u8; NUMBERS],
}

impl<const GROUPS: usize> WithMins<GROUPS> {
    /// Fits a block of codes 0 to `LAST`, with groups' scales and minima of 0 to `TOP`; `ends` as in [`Weighted::scale_and_min`].
    pub fn fit<const LAST: i32, const TOP: i32>(block: Weighted, ends: &[f32]) -> Self {
        let mut wanted = [(0f32, 0f32); GROUPS];
        for (group, wanted) in block.parts(NUMBERS / GROUPS).zip(&mut wanted) {
            let (scale, min) = group.scale_and_min::<LAST>(ends, 0.0);
            *wanted = (scale, -min);
        }
        let top = wanted.iter().fold((0f32, 0f32), |top, one| (top.0.max(one.0), top.1.max(one.1)));
        let mut steps = (finite_half(top.0 / TOP as f32), finite_half(top.1 / TOP as f32));
        let mut best = (f32::INFINITY, steps, [(0f32, 0f32); GROUPS]);
        for _ in 0..TURNS {
            let floats = (steps.0.to_f32(), steps.1.to_f32());
            let (error, scales) = scales_and_mins::<LAST, TOP, GROUPS>(block, &wanted, floats);
            if error < best.0 {
                best = (error, steps, scales);
                steps = both_steps::<LAST, GROUPS>(block, &scales, floats);
            } else {
                break;
            }
        }
        let (_, (d, dmin), scales) = best;
        let mut codes = [0; NUMBERS];
        for ((group, codes), (scale, min)) in parts(block, &mut codes, NUMBERS / GROUPS).zip(scales) {
            group.put_codes::<Whole<0, LAST>>(d.to_f32() * scale, -dmin.to_f32() * min, codes);
        }
        WithMins { d, dmin, scales: scales.map(|s| s.0 as u8), mins: scales.map(|s| s.1 as u8), codes }
    }
}

/// The best scales and minima near the wanted ones for these steps, and their error.
fn scales_and_mins<const LAST: i32, const TOP: i32, const GROUPS: usize>(
    block: Weighted,
    wanted: &[(f32, f32); GROUPS],
    (d, dmin): (f32, f32),
) -> (f32, [(f32, f32); GROUPS]) {
    let (mut sum, mut scales) = (0.0, [(0f32, 0f32); GROUPS]);
    let inverses = (inverse(d), inverse(dmin));
    for ((group, pair), wanted) in block.parts(NUMBERS / GROUPS).zip(&mut scales).zip(wanted) {
        let mut least = f32::INFINITY;
        for off in NEARBY {
            let scale = Whole::<0, TOP>::nearest(wanted.0 * inverses.0 + off);
            for off in NEARBY {
                let min = Whole::<0, TOP>::nearest(wanted.1 * inverses.1 + off);
                let error = group.error::<Whole<0, LAST>>(d * scale, -dmin * min);
                if error < least {
                    (least, *pair) = (error, (scale, min));
                }
            }
        }
        sum += least;
    }
    (sum, scales)
}

/// The steps of least squares for these scales and minima and the codes that they have with the old steps.
fn both_steps<const LAST: i32, const GROUPS: usize>(
    block: Weighted,
    scales: &[(f32, f32); GROUPS],
    old: (f32, f32),
) -> (f16, f16) {
    // Value = d a - dmin b, where a is scale times code and b the minimum.
    let [mut aa, mut ab, mut bb, mut xa, mut xb] = [0f32; 5];
    for (group, &(scale, min)) in block.parts(NUMBERS / GROUPS).zip(scales) {
        let (inverse, lift) = (inverse(old.0 * scale), old.1 * min);
        let [w, x, l, xl, ll] = group.sums(|x, w| {
            let l = Whole::<0, LAST>::nearest((x + lift) * inverse);
            [w, w * x, w * l, w * x * l, w * l * l]
        });
        aa += scale * scale * ll;
        ab += scale * min * l;
        bb += min * min * w;
        xa += scale * xl;
        xb += min * x;
    }
    let determinant = aa * bb - ab * ab;
    let found =
        if bb > 0.0 { ((xa * bb - xb * ab) / determinant, (xa * ab - xb * aa) / determinant) } else { (xa / aa, 0.0) };
    // No numbers, where the two cannot be told apart, are no better either.
    let (d, dmin) = if found.0 > 0.0 && found.1 >= 0.0 { found } else { old };
    (finite_half(d), finite_half(dmin))
}

/// The groups of a block, and their codes.
fn parts<'a>(
    block: Weighted<'a>,
    codes: &'a mut [u8; NUMBERS],
    len: usize,
) -> impl Iterator<Item = (Weighted<'a>, &'a mut [u8])> {
    block.parts(len).zip(codes.chunks_exact_mut(len))
}
