//! The recurrence of linear attention: a state that each token scales, reads and adds to, for [`LANES`] numbers of a head's values at a time.
//!
//! The state of so many numbers is a row of them for each number of a key, so that a token's products with its key and its query are sums of rows
//! without sums over lanes. The versions for instruction sets are one function in plain Rust that is compiled for each.

/// Numbers of values that are computed side by side, whatever the instruction set.
pub const LANES: usize = 16;

/// What some tokens bring to a head: the numbers of token t begin at `t * stride` in `numbers`.
#[derive(Clone, Copy)]
pub struct Tokens<'a> {
    /// `[n, stride]`
    pub numbers: &'a [f32],
    /// Numbers of a token.
    pub stride: usize,
    /// Where the query begins, which is as long as the key.
    pub query: usize,
    /// Where the key begins.
    pub key: usize,
    /// Where the values of these lanes begin.
    pub value: usize,
    /// `[n]`, `gate_stride` apart.
    pub gates: &'a [Gates],
    /// Gates from a token to the next.
    pub gate_stride: usize,
}

/// What a token does to the state of a head.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Gates {
    /// The state is multiplied by this.
    pub decay: f32,
    /// How much of the difference between the token's value and what the state has for its key is added.
    pub beta: f32,
    /// The product of the token's key and query.
    pub key_query: f32,
}

/// Passes `n` tokens through `state`, `[keys, LANES]`, the delta rule: with S the state, e, k, q, v and beta the token's, d = beta (v - e S k),
/// S becomes e S + d k^T, and `out[t * out_stride..][..LANES]` = S q.
///
/// # Safety
/// `out` is writable at every index named, and the CPU has the instructions the function was compiled for.
pub type DeltaRule =
    unsafe fn(state: &mut [[f32; LANES]], tokens: Tokens<'_>, n: usize, out: *mut f32, out_stride: usize);

/// Each number times the sigmoid of itself.
///
/// # Safety
/// The CPU has the instructions the function was compiled for.
pub type Silu = unsafe fn(numbers: &mut [f32]);

/// The kernels of one instruction set.
#[derive(Clone, Copy)]
pub struct Recurrences {
    /// The delta rule.
    pub delta_rule: DeltaRule,
    /// The activation behind a convolution.
    pub silu: Silu,
}

/// a * b + c, rounded once where the instruction set does it so.
#[inline(always)]
fn multiply_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// The delta rule with U sums side by side, which do not wait for each other.
#[inline(always)]
unsafe fn delta_rule<const FUSED: bool, const U: usize>(
    state: &mut [[f32; LANES]],
    tokens: Tokens<'_>,
    n: usize,
    out: *mut f32,
    out_stride: usize,
) {
    let keys = state.len();
    assert!(keys.is_multiple_of(U));
    for t in 0..n {
        let numbers = &tokens.numbers[t * tokens.stride..];
        let (key, query) = (&numbers[tokens.key..][..keys], &numbers[tokens.query..][..keys]);
        let value: &[f32; LANES] = numbers[tokens.value..].first_chunk().expect("the values of these lanes");
        let Gates { decay, beta, key_query } = tokens.gates[t * tokens.gate_stride];
        // What the state has for the key, and for the query.
        let (mut had, mut seen) = ([[0f32; LANES]; U], [[0f32; LANES]; U]);
        let groups = state.chunks_exact(U).zip(key.chunks_exact(U)).zip(query.chunks_exact(U));
        for ((rows, key), query) in groups {
            for u in 0..U {
                for i in 0..LANES {
                    had[u][i] = multiply_add::<FUSED>(rows[u][i], key[u], had[u][i]);
                    seen[u][i] = multiply_add::<FUSED>(rows[u][i], query[u], seen[u][i]);
                }
            }
        }
        for u in 1..U {
            for i in 0..LANES {
                had[0][i] += had[u][i];
                seen[0][i] += seen[u][i];
            }
        }
        let mut added = [0f32; LANES];
        // SAFETY: the caller's promise.
        let out: &mut [f32; LANES] = unsafe { &mut *out.add(t * out_stride).cast() };
        for i in 0..LANES {
            added[i] = beta * (value[i] - decay * had[0][i]);
            out[i] = multiply_add::<FUSED>(key_query, added[i], decay * seen[0][i]);
        }
        for (row, &key) in state.iter_mut().zip(key) {
            for i in 0..LANES {
                row[i] = multiply_add::<FUSED>(key, added[i], decay * row[i]);
            }
        }
    }
}

#[inline(always)]
fn silu(numbers: &mut [f32]) {
    numbers.iter_mut().for_each(|x| *x = crate::exp::silu(*x));
}

/// The two kernels of an instruction set, by its features, whether it fuses, and the sums that it keeps side by side.
macro_rules! versions {
    ($module:ident, $fused:literal, $sums:literal $(, $features:literal)?) => {
        mod $module {
            use super::*;

            $(#[cfg_attr(not(emulated), target_feature(enable = $features))])?
            pub unsafe fn delta_rule(s: &mut [[f32; LANES]], t: Tokens<'_>, n: usize, out: *mut f32, stride: usize) {
                // SAFETY: the caller's promises.
                unsafe { super::delta_rule::<$fused, $sums>(s, t, n, out, stride) }
            }

            $(#[cfg_attr(not(emulated), target_feature(enable = $features))])?
            pub unsafe fn silu(numbers: &mut [f32]) {
                super::silu(numbers);
            }
        }
    };
}
versions!(portable, false, 1);
#[cfg(target_arch = "x86_64")]
versions!(avx2, true, 2, "avx2,fma");
#[cfg(target_arch = "x86_64")]
versions!(avx512, true, 4, "avx512f,avx512bw,avx512vl,avx512dq");

/// For every processor.
pub(super) const PORTABLE: Recurrences = Recurrences { delta_rule: portable::delta_rule, silu: portable::silu };
/// For AVX2 with FMA.
#[cfg(target_arch = "x86_64")]
pub(super) const AVX2: Recurrences = Recurrences { delta_rule: avx2::delta_rule, silu: avx2::silu };
/// For AVX-512.
#[cfg(target_arch = "x86_64")]
pub(super) const AVX512: Recurrences = Recurrences { delta_rule: avx512::delta_rule, silu: avx512::silu };
