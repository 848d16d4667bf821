//! What a cache of a given size would read, found by running it without a disk and without arithmetic (PowerInfer-2 5: P_miss(m) by replay).

use super::blocks::LayerBlocks;
use super::fault::ReadFault;
use super::options::HostCacheOptions;
use super::state::HostCache;
use crate::clock;
use crate::disk::{DEPTH, Disk, Outcome, Read};
use crate::ids::StoreId;
use std::io;

/// Tokens after which the frames hold what they will hold: the two queues have been through once by then.
pub const BEFORE: usize = 60;
/// Tokens that are counted, where they are drawn.
pub const COUNTED: usize = 60;

/// A disk whose reads end at once and bring nothing.
struct Nowhere {
    align: usize,
    under_way: Vec<(u32, usize)>,
}

impl Disk for Nowhere {
    fn name(&self) -> String {
        "no disk".into()
    }

    fn align(&self) -> usize {
        self.align
    }

    unsafe fn begin(&mut self, reads: &[Read]) {
        self.under_way.extend(reads.iter().map(|read| (read.number, read.bytes)));
    }

    fn ended(&mut self, _wait: bool, done: &mut dyn FnMut(u32, Outcome)) {
        self.under_way.drain(..).for_each(|(number, bytes)| done(number, Ok(bytes)));
    }
}

/// The layers and what is known of their neurons.
pub struct Rehearsal<'a> {
    /// Where each layer's neurons lie.
    pub layers: &'a [LayerBlocks],
    /// What reads of the disk are multiples of.
    pub align: usize,
    /// How often each neuron was active, in the store's order, `[layers][ffn]`, of some tokens: the frames begin with the most frequent.
    pub counts: &'a [Vec<u64>],
    /// Number of those tokens.
    pub tokens: u64,
    /// Tokens that are run before any is counted, and those that are counted, one at least.
    pub runs: [usize; 2],
}

/// What a token does, on average.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rehearsed {
    /// Neurons that it needs.
    pub needed: f64,
    /// Those of them that are not in memory.
    pub missing: f64,
    /// Those of them that were asked for before their layer's turn.
    pub early: f64,
    /// Reads, and their bytes.
    pub reads: f64,
    /// See above.
    pub bytes: f64,
    /// Seconds that choosing and planning take one thread.
    pub seconds: f64,
}

impl Rehearsal<'_> {
    /// Runs a cache for tokens whose neurons `needs` says: it is given a layer, in order, layer 0 of the next token after the last one.
    /// Nothing is read, and the cache's memory is reserved and not touched.
    ///
    /// # Errors
    /// The system does not reserve the memory.
    ///
    /// # Panics
    /// If the options' bytes are fewer than [`super::least_bytes`].
    pub fn run(
        &self,
        options: HostCacheOptions,
        needs: &mut dyn FnMut(usize, &mut Vec<StoreId>),
    ) -> io::Result<Rehearsed> {
        let (layers, ffn) = (self.layers.len(), self.counts.iter().map(Vec::len).max().unwrap_or(0));
        let [uncounted, counted] = self.runs;
        let disk = Nowhere { align: self.align, under_way: Vec::with_capacity(DEPTH) };
        // What comes from nowhere has no checksums.
        let blocks: Vec<LayerBlocks> = self.layers.iter().map(|l| l.clone().with_checksums(Vec::new())).collect();
        let mut cache = HostCache::new(Box::new(disk), &blocks, ffn, options)?;
        for (layer, counts) in self.counts.iter().enumerate() {
            let unread = |fault: ReadFault| io::Error::other(fault.to_string());
            cache.place(layer, counts, self.tokens).map_err(unread)?;
        }
        let (mut here, mut next) = (Vec::new(), Vec::new());
        needs(0, &mut next);
        let (mut before, mut needed, mut seconds) = (cache.counts(), 0, Vec::with_capacity(uncounted + counted));
        for token in 0..uncounted + counted {
            if token == uncounted {
                (before, needed) = (cache.counts(), 0);
            }
            let mut took = 0.0;
            for layer in 0..layers {
                std::mem::swap(&mut here, &mut next);
                needs((layer + 1) % layers, &mut next);
                if self.layers[layer].is_idle() {
                    here.clear();
                }
                needed += here.len();
                let begin = clock::now();
                cache.begin(layer, &here, self.layers[layer].units(here.len()));
                if layer + 1 < layers {
                    cache.prefetch(layer + 1, &next);
                }
                while cache.next_round().is_some() {}
                cache.end(&here);
                took += begin.elapsed().as_secs_f64();
            }
            seconds.push(took);
        }
        let counts = cache.counts().since(&before);
        // What else runs on the machine only makes a token longer: the median of those that are counted.
        let took = &mut seconds[uncounted..];
        took.sort_by(f64::total_cmp);
        let a_token = |count: u64| count as f64 / counted as f64;
        Ok(Rehearsed {
            needed: needed as f64 / counted as f64,
            missing: a_token(counts.misses + counts.early),
            early: a_token(counts.early),
            reads: a_token(counts.reads.reads),
            bytes: a_token(counts.reads.bytes),
            seconds: took[counted / 2],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_cache::least_bytes;

    const FFN: usize = 600;
    const BLOCK: usize = 4096;

    fn layers() -> Vec<LayerBlocks> {
        (0..3).map(|l| LayerBlocks::of_neurons((l * FFN * BLOCK) as u64, BLOCK)).collect()
    }

    /// Each token needs the same neurons of every layer: `count` of them, apart.
    fn run(frames: usize, count: usize, ahead: usize) -> Rehearsed {
        let layers = layers();
        let counts = vec![vec![0; FFN]; 3];
        let rehearsal = Rehearsal { layers: &layers, align: 512, counts: &counts, tokens: 1, runs: [BEFORE, COUNTED] };
        let options = HostCacheOptions { ahead, together: false, ..HostCacheOptions::new(0) };
        let least = least_bytes(&layers, FFN, 512);
        let bytes = least + (3 * frames * (BLOCK + 512) * 3 / 2) as u64;
        let mut needs = |_: usize, list: &mut Vec<StoreId>| {
            list.clear();
            list.extend((0..count).map(|i| StoreId::new(i * FFN / count)));
        };
        rehearsal.run(HostCacheOptions { bytes, ..options }, &mut needs).unwrap()
    }

    #[test]
    fn what_fits_is_not_read_again_and_what_has_no_room_is_read_for_each_token() {
        for ahead in [0, 1] {
            let all = run(FFN, 100, ahead);
            assert_eq!((all.needed, all.missing, all.reads, all.bytes), (300.0, 0.0, 0.0, 0.0));
            let none = run(0, 100, ahead);
            assert!(none.missing == 300.0 && none.reads == none.missing, "{none:?}");
            assert_eq!(none.bytes, none.reads * BLOCK as f64);
            let some = run(30, 100, ahead);
            assert!(some.missing < none.missing && some.missing > 50.0, "{some:?}");
        }
    }
}
