//! The short convolution of layers without attention ([`crate::model::layer::Convolution`]).

use super::positions::{TokenPosition, runs};
use crate::cpu::ThreadPool;
use crate::cpu::thread_pool::Parts;
use crate::model::layer::Convolution;
use crate::model::{KvCache, Turn};

/// Numbers of a task at least: of fewer, handing them to another thread takes longer than computing them.
const NUMBERS: usize = 1 << 14;

/// What a task has: some numbers of the residual, of all tokens.
struct Task<'a> {
    form: Convolution,
    /// `[taps, hidden]`
    taps: &'a [f32],
    /// Number of the first, and how many.
    first: usize,
    count: usize,
}

/// out[t] = the convolution of token t. `projected` is `[n, 3 hidden]`: b, c and x of each token; `out` is `[n, hidden]`. The tokens of a sequence
/// follow each other, and the caches' states go on with them until the pass is committed.
pub(super) fn convolve(
    pool: &mut ThreadPool,
    (form, taps): (Convolution, &[f32]),
    caches: &mut [KvCache],
    layer: usize,
    positions: &[TokenPosition],
    projected: &[f32],
    out: &mut [f32],
) {
    assert_eq!((taps.len(), out.len()), (form.taps * form.hidden, positions.len() * form.hidden));
    let tasks = (positions.len() * form.hidden / NUMBERS).clamp(1, pool.threads());
    let out = Parts::new(out);
    for tokens in runs(positions) {
        let TokenPosition { sequence, position } = positions[tokens.start];
        let (first, n) = (tokens.start, tokens.len());
        let Turn { from, to } = caches[sequence].state(layer, position);
        from.into_iter().for_each(|from| to.copy_from_slice(from));
        let state = Parts::new(to);
        let projected = &projected[first * 3 * form.hidden..][..n * 3 * form.hidden];
        pool.run(tasks, |_, task| {
            let begin = task * form.hidden / tasks;
            let of = Task { form, taps, first: begin, count: (task + 1) * form.hidden / tasks - begin };
            // SAFETY: each task has numbers of its own, of the state and of every token's output.
            let state =
                |i: usize| unsafe { state.part(i * form.hidden + of.first..i * form.hidden + of.first + of.count) };
            let out = |t: usize| {
                let at = (first + t) * form.hidden + of.first;
                unsafe { out.part(at..at + of.count) }
            };
            run(&of, n, projected, state, out);
        });
    }
}

/// The tokens of one sequence, one after the other.
fn run<'s>(
    of: &Task<'_>,
    n: usize,
    projected: &[f32],
    state: impl Fn(usize) -> &'s mut [f32],
    out: impl Fn(usize) -> &'s mut [f32],
) {
    let Convolution { hidden, taps } = of.form;
    let row = |i: usize| &of.taps[i * hidden + of.first..][..of.count];
    for t in 0..n {
        let part = |number: usize| &projected[(3 * t + number) * hidden + of.first..][..of.count];
        let (b, c, x, y) = (part(0), part(1), part(2), out(t));
        for (((y, b), x), tap) in y.iter_mut().zip(b).zip(x).zip(row(taps - 1)) {
            *y = b * x * tap;
        }
        for i in 0..taps - 1 {
            y.iter_mut().zip(state(i)).zip(row(i)).for_each(|((y, u), tap)| *y += *u * tap);
        }
        y.iter_mut().zip(c).for_each(|(y, c)| *y *= c);
        for i in 1..taps - 1 {
            state(i - 1).copy_from_slice(state(i));
        }
        state(taps - 2).iter_mut().zip(b).zip(x).for_each(|((u, b), x)| *u = b * x);
    }
}
