//! The search for the scales with which a group of numbers is stored with the least error: the sum of weight times squared difference.
//!
//! For given codes the best scale is the one of least squares, and for a given scale the best codes are the nearest ones. The search
//! begins with a few scales that suggest themselves, takes the best, and then improves codes and scale in turns.

use super::levels::{Levels, Whole};

/// Numbers whose sums are kept apart, so that they become vector code. The length of every group is a multiple of it.
const LANES: usize = 8;
/// A group below it is all zeros: half the smallest number that an f16 scale (2^-24) times a code can give.
const NOTHING: f32 = 1.0 / (1u32 << 25) as f32;
/// How often codes and scale are improved in turns, at most. The first turn lowers the error by up to 1 %, a third by 0.02 %.
const TURNS: usize = 2;
/// What is better by less than this factor is the same but for rounding: of two scales that both fit exactly the first is kept, of which
/// the second may be no f16.
const GAIN: f32 = 1.0 + 1e-6;

/// Values with the weights of their errors, of the same length.
#[derive(Clone, Copy)]
pub struct Weighted<'a> {
    /// The values.
    pub values: &'a [f32],
    /// How much the squared error of each counts.
    pub weights: &'a [f32],
}

impl<'a> Weighted<'a> {
    /// Its parts of `len` numbers.
    pub(super) fn parts(self, len: usize) -> impl Iterator<Item = Weighted<'a>> {
        let parts = self.values.chunks_exact(len).zip(self.weights.chunks_exact(len));
        parts.map(|(values, weights)| Weighted { values, weights })
    }

    /// Sums of N products over all numbers, of what `terms(value, weight)` says.
    #[inline(always)]
    pub(super) fn sums<const N: usize>(self, terms: impl Fn(f32, f32) -> [f32; N]) -> [f32; N] {
        let mut sums = [[0f32; LANES]; N];
        for (values, weights) in self.values.as_chunks::<LANES>().0.iter().zip(self.weights.as_chunks::<LANES>().0) {
            for j in 0..LANES {
                let terms = terms(values[j], weights[j]);
                for n in 0..N {
                    sums[n][j] += terms[n];
                }
            }
        }
        sums.map(|lanes| lanes.iter().sum())
    }

    /// The number of largest magnitude.
    fn top(self) -> f32 {
        let (mut least, mut greatest) = (0f32, 0f32);
        for &x in self.values {
            least = if x < least { x } else { least };
            greatest = if x > greatest { x } else { greatest };
        }
        if -least > greatest { least } else { greatest }
    }

    /// Its error with levels of this scale and minimum.
    #[inline(always)]
    pub(super) fn error<L: Levels>(self, scale: f32, min: f32) -> f32 {
        let inverse = inverse(scale);
        let [error] = self.sums(|x, w| {
            let off = x - min - scale * L::nearest((x - min) * inverse);
            [w * off * off]
        });
        error
    }

    /// The codes of its numbers.
    pub(super) fn put_codes<L: Levels>(self, scale: f32, min: f32, codes: &mut [u8]) {
        let inverse = inverse(scale);
        codes.iter_mut().zip(self.values).for_each(|(code, x)| *code = L::code((x - min) * inverse));
    }

    /// The scale of the least error. `ends` are levels that the number of largest magnitude may stand at: the first is taken where the
    /// weights say nothing, the others are tried.
    pub(super) fn scale<L: Levels>(self, ends: &[f32]) -> f32 {
        let top = self.top();
        if top.abs() < NOTHING {
            return 0.0;
        }
        // With the best scale xl / ll the error is that of no codes at all, less xl² / ll.
        let sums = |inverse: f32| {
            let [xl, ll] = self.sums(|x, w| {
                let l = L::nearest(x * inverse);
                [w * x * l, w * l * l]
            });
            (xl * xl / ll, xl / ll)
        };
        let mut best = (0.0, top / ends[0]);
        for end in ends {
            let found = sums(end / top);
            if found.0 > best.0 * GAIN {
                best = found;
            }
        }
        for _ in 0..TURNS {
            let found = sums(1.0 / best.1);
            if found.0 > best.0 * GAIN {
                best = found;
            } else {
                break;
            }
        }
        best.1
    }

    /// Scale and minimum of the least error, for the codes 0 to `LAST`; `ends` are levels that the greatest number may stand at where the
    /// least stands at 0. The minimum is not above `highest`.
    pub(super) fn scale_and_min<const LAST: i32>(self, ends: &[f32], highest: f32) -> (f32, f32) {
        let (mut least, mut greatest) = (highest, f32::NEG_INFINITY);
        for &x in self.values {
            least = if x < least { x } else { least };
            greatest = if x > greatest { x } else { greatest };
        }
        let range = greatest - least;
        if range < NOTHING {
            return (0.0, least);
        }
        // Counted from the least number, which keeps what the sums lose by rounding small against the range.
        let solve = |scale: f32, min: f32| {
            let inverse = 1.0 / scale;
            let [w, x, l, xl, ll] = self.sums(|x, w| {
                let x = x - least;
                let l = Whole::<0, LAST>::nearest((x - min) * inverse);
                [w, w * x, w * l, w * x * l, w * l * l]
            });
            let determinant = w * ll - l * l;
            let scale = (w * xl - x * l) / determinant;
            let min = (x * ll - l * xl) / determinant;
            let most = highest - least;
            if min > most { ((xl - most * l) / ll, most) } else { (scale, min) }
        };
        let error = |(scale, min): (f32, f32)| {
            if scale > 0.0 { self.error::<Whole<0, LAST>>(scale, least + min) } else { f32::INFINITY }
        };
        let mut found = (range / LAST as f32, 0.0);
        let mut best = (error(found), found);
        for end in ends {
            found = solve(range / end, 0.0);
            let error = error(found);
            if error < best.0 {
                best = (error, found);
            }
        }
        for _ in 0..TURNS {
            found = solve(best.1.0, best.1.1);
            let error = error(found);
            if error < best.0 {
                best = (error, found);
            } else {
                break;
            }
        }
        (best.1.0, least + best.1.1)
    }
}

/// 1 / scale, and 0 for 0.
#[inline(always)]
pub(super) fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}
