//! The recurrence of linear attention: a state that each token scales, reads and adds to, for [`LANES`] numbers of a head's values at a time.
//!
//! The state of so many numbers is a row of them for each number of a key, so that a token's products with its key and its query are sums of rows
//! without sums over lanes. It is one function over vectors of an instruction set.

// Registers are indexed: iterators over them do not stay in registers.
#![allow(clippy::needless_range_loop)]

#[cfg(target_arch = "x86_64")]
use crate::cpu::arch::*;

/// Numbers of values that are computed side by side, whatever the instruction set.
pub const LANES: usize = 16;

/// What some tokens bring to a head. The numbers of token t begin at `t * stride` of a list.
#[derive(Clone, Copy)]
pub struct Tokens<'a> {
    /// Queries, each as long as a key.
    pub queries: &'a [f32],
    /// Keys.
    pub keys: &'a [f32],
    /// Values, of which those of the lanes are the first.
    pub values: &'a [f32],
    /// Numbers from a token to the next of queries and keys.
    pub stride: usize,
    /// The same of values.
    pub value_stride: usize,
    /// `[n]`
    pub gates: &'a [Gates],
}

/// What a token does to the state of a head.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gates {
    /// The state is multiplied by this.
    pub decay: f32,
    /// How much is added of the difference between the token's value and what the state has for its key, or of the value.
    pub beta: f32,
    /// The product of the token's key and query.
    pub key_query: f32,
}

/// Passes `n` tokens through `state`, `[keys, LANES]`: with S the state, e, k, q, v and beta the token's, d = beta (v - e S k) by the delta rule or
/// d = beta v, S becomes e S + d k^T, and `out[t * out_stride..][..LANES]` = S q.
///
/// # Safety
/// `out` is writable at every index named, and the CPU has the instructions the function was compiled for.
pub type Recur = unsafe fn(state: &mut [[f32; LANES]], tokens: Tokens<'_>, n: usize, out: *mut f32, out_stride: usize);

/// Each number times the sigmoid of itself.
///
/// # Safety
/// The CPU has the instructions the function was compiled for.
pub type Silu = unsafe fn(numbers: &mut [f32]);

/// The kernels of one instruction set.
#[derive(Clone, Copy)]
pub struct Recurrences {
    /// The delta rule.
    pub delta_rule: Recur,
    /// The same without what the state has for the key.
    pub additive_rule: Recur,
    /// The activation behind a convolution.
    pub silu: Silu,
}

/// [`LANES`] numbers, as an instruction set holds them.
trait Vector: Copy {
    fn splat(x: f32) -> Self;
    /// # Safety
    /// The CPU has the instructions, as for all functions here.
    unsafe fn load(from: &[f32; LANES]) -> Self;
    unsafe fn store(self, to: &mut [f32; LANES]);
    /// self * other + more, rounded once where the instruction set does it so.
    unsafe fn times_plus(self, other: Self, more: Self) -> Self;
}

impl Vector for [f32; LANES] {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(from: &[f32; LANES]) -> Self {
        *from
    }
    #[inline(always)]
    unsafe fn store(self, to: &mut [f32; LANES]) {
        *to = self;
    }
    #[inline(always)]
    unsafe fn times_plus(self, other: Self, more: Self) -> Self {
        std::array::from_fn(|i| self[i] * other[i] + more[i])
    }
}

/// The vectors of an instruction set: so many registers of a type, so many numbers each.
#[cfg(target_arch = "x86_64")]
macro_rules! registers {
    ($register:ty, $count:literal, $each:literal, $splat:ident, $load:ident, $store:ident, $fused:ident) => {
        impl Vector for [$register; $count] {
            #[inline(always)]
            fn splat(x: f32) -> Self {
                // SAFETY: only kernels that need these instructions have such vectors.
                unsafe { [$splat(x); $count] }
            }
            #[inline(always)]
            unsafe fn load(from: &[f32; LANES]) -> Self {
                let mut out = Self::splat(0.0);
                for i in 0..$count {
                    out[i] = unsafe { $load(from.as_ptr().add($each * i)) };
                }
                out
            }
            #[inline(always)]
            unsafe fn store(self, to: &mut [f32; LANES]) {
                for i in 0..$count {
                    unsafe { $store(to.as_mut_ptr().add($each * i), self[i]) };
                }
            }
            #[inline(always)]
            unsafe fn times_plus(mut self, other: Self, more: Self) -> Self {
                for i in 0..$count {
                    self[i] = unsafe { $fused(self[i], other[i], more[i]) };
                }
                self
            }
        }
    };
}
#[cfg(target_arch = "x86_64")]
registers!(__m256, 2, 8, _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_fmadd_ps);
#[cfg(target_arch = "x86_64")]
registers!(__m512, 1, 16, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_fmadd_ps);

/// A rule, the delta rule if `DELTA`, with U sums side by side, which do not wait for each other.
#[inline(always)]
unsafe fn recur<V: Vector, const U: usize, const DELTA: bool>(
    state: &mut [[f32; LANES]],
    tokens: Tokens<'_>,
    n: usize,
    out: *mut f32,
    out_stride: usize,
) {
    let keys = state.len();
    assert!(keys.is_multiple_of(U));
    for t in 0..n {
        let at = t * tokens.stride;
        let (key, query) = (&tokens.keys[at..][..keys], &tokens.queries[at..][..keys]);
        let value: &[f32; LANES] =
            tokens.values[t * tokens.value_stride..].first_chunk().expect("the values of these lanes");
        let Gates { decay, beta, key_query } = tokens.gates[t];
        // SAFETY: the caller's promises.
        unsafe {
            // What the state has for the key, and for the query.
            let (mut had, mut seen) = ([V::splat(0.0); U], [V::splat(0.0); U]);
            let groups = state.chunks_exact(U).zip(key.chunks_exact(U)).zip(query.chunks_exact(U));
            for ((rows, key), query) in groups {
                for u in 0..U {
                    let row = V::load(&rows[u]);
                    if DELTA {
                        had[u] = row.times_plus(V::splat(key[u]), had[u]);
                    }
                    seen[u] = row.times_plus(V::splat(query[u]), seen[u]);
                }
            }
            let (zero, one, decay) = (V::splat(0.0), V::splat(1.0), V::splat(decay));
            for u in 1..U {
                (had[0], seen[0]) = (had[0].times_plus(one, had[u]), seen[0].times_plus(one, seen[u]));
            }
            let missing = match DELTA {
                true => V::splat(-1.0).times_plus(decay.times_plus(had[0], zero), V::load(value)),
                false => V::load(value),
            };
            let added = V::splat(beta).times_plus(missing, zero);
            let out = &mut *out.add(t * out_stride).cast();
            V::splat(key_query).times_plus(added, decay.times_plus(seen[0], zero)).store(out);
            for (row, &key) in state.iter_mut().zip(key) {
                added.times_plus(V::splat(key), decay.times_plus(V::load(row), zero)).store(row);
            }
        }
    }
}

#[inline(always)]
fn silu(numbers: &mut [f32]) {
    numbers.iter_mut().for_each(|x| *x = crate::exp::silu(*x));
}

/// The kernels of an instruction set, by its vectors, the sums that it keeps side by side, and its features.
macro_rules! versions {
    ($module:ident, $vector:ty, $sums:literal $(, $features:literal)?) => {
        mod $module {
            use super::*;

            $(#[cfg_attr(not(emulated), target_feature(enable = $features))])?
            unsafe fn delta_rule(s: &mut [[f32; LANES]], t: Tokens<'_>, n: usize, out: *mut f32, stride: usize) {
                // SAFETY: the caller's promises.
                unsafe { super::recur::<$vector, $sums, true>(s, t, n, out, stride) }
            }

            $(#[cfg_attr(not(emulated), target_feature(enable = $features))])?
            unsafe fn additive_rule(s: &mut [[f32; LANES]], t: Tokens<'_>, n: usize, out: *mut f32, stride: usize) {
                // SAFETY: the caller's promises.
                unsafe { super::recur::<$vector, $sums, false>(s, t, n, out, stride) }
            }

            $(#[cfg_attr(not(emulated), target_feature(enable = $features))])?
            unsafe fn silu(numbers: &mut [f32]) {
                super::silu(numbers);
            }

            pub const ALL: Recurrences = Recurrences { delta_rule, additive_rule, silu };
        }
    };
}
versions!(portable, [f32; LANES], 1);
#[cfg(target_arch = "x86_64")]
versions!(avx2, [__m256; 2], 2, "avx2,fma");
#[cfg(target_arch = "x86_64")]
versions!(avx512, [__m512; 1], 4, "avx512f,avx512bw,avx512vl,avx512dq");

/// For every processor.
pub(super) const PORTABLE: Recurrences = portable::ALL;
/// For AVX2 with FMA.
#[cfg(target_arch = "x86_64")]
pub(super) const AVX2: Recurrences = avx2::ALL;
/// For AVX-512.
#[cfg(target_arch = "x86_64")]
pub(super) const AVX512: Recurrences = avx512::ALL;
