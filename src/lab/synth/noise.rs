//! Random numbers of a synthetic model, as a function of seed and position: they do not depend on the order of work.

use crate::ops::math;
use crate::prng::Prng;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Rows of a matrix that a task makes.
pub(super) const ROWS_PER_TASK: usize = 256;
/// Numbers of a row that come from one seed. GGUF stores `down` by output: a task takes a segment of each neuron's row, so that no number
/// is generated twice.
pub(super) const SEGMENT: usize = ROWS_PER_TASK;

/// What random numbers are used for; each use has numbers of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stream {
    Embed,
    Head,
    Q,
    K,
    V,
    O,
    Gate,
    Up,
    Down,
    Basis,
    Ranks,
    TokenLatent,
    NeuronLatent,
    /// Tokens to calibrate and to measure with.
    Tokens,
    Router,
    /// What all tokens of a planted routing share, and the ranks of its experts.
    Common,
}

/// The random numbers of a model, by position.
#[derive(Clone, Copy)]
pub(super) struct Noise {
    pub(super) seed: u64,
}

impl Noise {
    pub(super) fn rng(self, stream: Stream, layer: usize, row: usize, segment: usize) -> Prng {
        let place = [stream as u64, layer as u64, row as u64, segment as u64];
        Prng::new(xxh3_64_with_seed(bytemuck::bytes_of(&place), self.seed))
    }

    /// Uniform numbers of this deviation: number `first` and following of a row. `first` is a multiple of [`SEGMENT`].
    pub(super) fn fill(self, stream: Stream, layer: usize, row: usize, first: usize, deviation: f32, out: &mut [f32]) {
        debug_assert!(first.is_multiple_of(SEGMENT));
        let scale = deviation * 3f32.sqrt() / (1u32 << 31) as f32;
        for (s, out) in out.chunks_mut(SEGMENT).enumerate() {
            let mut rng = self.rng(stream, layer, row, first / SEGMENT + s);
            for pair in out.chunks_mut(2) {
                let bits = rng.next_u64();
                pair[0] = (bits as u32 as i32) as f32 * scale;
                if let Some(second) = pair.get_mut(1) {
                    *second = ((bits >> 32) as u32 as i32) as f32 * scale;
                }
            }
        }
    }
}

pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    math::sum(a.iter().zip(b).map(|(a, b)| a * b))
}
