//! Work of the host on each token's vector by itself.

use crate::cpu::ThreadPool;
use crate::cpu::thread_pool::Parts;

/// Calls `f(token, its part of out)` for each of n tokens, over the pool if there are many.
pub(super) fn each(pool: &mut ThreadPool, n: usize, out: &mut [f32], f: impl Fn(usize, &mut [f32]) + Sync) {
    let size = out.len() / n;
    if n < 8 {
        out.chunks_exact_mut(size).enumerate().for_each(|(t, out)| f(t, out));
        return;
    }
    let parts = Parts::new(out);
    // SAFETY: each task has its own part.
    pool.run(n, |_, t| f(t, unsafe { parts.part(t * size..(t + 1) * size) }));
}
