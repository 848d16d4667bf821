//! From slots per layer to the neurons that lie in them.

use super::problem::ranking;
pub use crate::formats::placement_file::Policy;
use crate::prng::Prng;

/// The neurons on the device, `[layers][slots]`, in falling impact (`Random`: rising number). `counts` is `[layers][neurons]`,
/// `slots` per layer as planned. `Random` takes the same ones for the same seed, layer by layer.
pub fn neurons(policy: Policy, counts: &[Vec<u64>], slots: &[usize], seed: u64) -> Vec<Vec<u32>> {
    let mut prng = Prng::new(seed);
    counts
        .iter()
        .zip(slots)
        .map(|(counts, &slots)| match policy {
            Policy::Static => {
                let mut best = ranking(counts);
                best.truncate(slots);
                best
            }
            Policy::Random => draw(counts.len(), slots, &mut prng),
            Policy::None => Vec::new(),
        })
        .collect()
}

/// `slots` of `0..neurons`, each set equally likely: the beginning of a shuffle.
fn draw(neurons: usize, slots: usize, prng: &mut Prng) -> Vec<u32> {
    let mut all: Vec<u32> = (0..neurons as u32).collect();
    for i in 0..slots {
        let other = i + prng.below((neurons - i) as u64) as usize;
        all.swap(i, other);
    }
    all.truncate(slots);
    all.sort_unstable();
    all
}
