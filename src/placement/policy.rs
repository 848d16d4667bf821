//! Chooses the neurons that lie in a layer's slots.

use super::problem::ranking;
pub use crate::formats::placement_file::PlacementPolicy;
use crate::ids::PublishedId;
use crate::prng::Prng;

/// The neurons on the device, `[layers][slots]`: for `Static` those of the largest counts, in falling order; for `Random` a random set, in
/// rising order, the same for the same seed; for `None` none. `counts` is how often each neuron fired, `[layers][neurons]` in the published
/// order, `slots` the slots of each layer.
pub fn neurons(policy: PlacementPolicy, counts: &[Vec<u64>], slots: &[usize], seed: u64) -> Vec<Vec<PublishedId>> {
    let mut prng = Prng::new(seed);
    counts
        .iter()
        .zip(slots)
        .map(|(counts, &slots)| match policy {
            PlacementPolicy::Static => {
                let mut best = ranking(counts);
                best.truncate(slots);
                best
            }
            PlacementPolicy::Random => draw(counts.len(), slots, &mut prng),
            PlacementPolicy::None => Vec::new(),
        })
        .collect()
}

/// A random set of `slots` neurons out of `0..neurons`, each set equally likely: the beginning of a shuffle.
fn draw(neurons: usize, slots: usize, prng: &mut Prng) -> Vec<PublishedId> {
    let mut all: Vec<PublishedId> = (0..neurons).map(PublishedId::new).collect();
    for i in 0..slots {
        let other = i + prng.below((neurons - i) as u64) as usize;
        all.swap(i, other);
    }
    all.truncate(slots);
    all.sort_unstable();
    all
}
