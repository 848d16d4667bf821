//! Which neurons of a prompt's chunk are copied to the device for it, and which the CPU computes. Only arithmetic: it sees no device.
//!
//! Neurons in no slot are in host memory. A copied block serves every column of the chunk, while the CPU's work grows with them: at 256
//! columns a neuron of a 7B model in f16 is 6.3 million multiplications and additions, or 24 KiB over the link. So most neurons go over the
//! link, as in PowerInfer and llama.cpp, and the CPU takes what it can compute meanwhile.

use crate::ids::StoreId;
use crate::model::config::{Ffn, ModelConfig};

/// A machine's rates, as its profile has them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChunkRates {
    /// The CPU's arithmetic with the columns of a chunk: 10^9 operations a second, a multiplication and an addition counting as two.
    pub host_gflops: f64,
    /// What all cores together read from host memory, GB/s.
    pub host_gb_s: f64,
    /// What the link carries to the device, GB/s.
    pub link_gb_s: f64,
    /// Starting one copy, us.
    pub copy_us: f64,
    /// Waiting for the device once, us.
    pub sync_us: f64,
}

/// What the missing neurons of a layer cost, us.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChunkCosts {
    /// Arithmetic of the CPU for one neuron and one column.
    pub column_us: f64,
    /// Reading a neuron's block once from host memory.
    pub read_us: f64,
    /// Copying a neuron's block over the link.
    pub link_us: f64,
    /// Starting a copy, of one block or of many neighbours.
    pub copy_us: f64,
    /// Copying one column's input out and its output in, if the CPU computes.
    pub cross_us: f64,
    /// Starting these two copies and waiting once, if the CPU computes.
    pub sync_us: f64,
}

impl ChunkCosts {
    /// The costs of a model whose neurons have blocks of `block_bytes`.
    pub fn of(rates: &ChunkRates, c: &ModelConfig, block_bytes: usize) -> ChunkCosts {
        let us = |bytes: usize, gb_s: f64| bytes as f64 / (gb_s * 1e3);
        let rows = if c.ffn_kind == Ffn::Plain { 2 } else { 3 };
        ChunkCosts {
            column_us: (2 * rows * c.hidden) as f64 / (rates.host_gflops * 1e3),
            read_us: us(block_bytes, rates.host_gb_s),
            link_us: us(block_bytes, rates.link_gb_s),
            copy_us: rates.copy_us,
            cross_us: us(2 * 4 * c.hidden, rates.link_gb_s),
            sync_us: 2.0 * rates.copy_us + rates.sync_us,
        }
    }

    /// How many unwanted blocks between two neurons are copied along rather than start another copy.
    pub fn bridge(&self) -> usize {
        (self.copy_us / self.link_us) as usize
    }

    /// How many of a layer's `missing` neurons the CPU computes for `n` columns: as many as it finishes while the link brings the others.
    /// `runs` copies of `carried` blocks together would bring all of them. With c of m neurons on the CPU,
    ///
    /// ```text
    /// cross n + sync + c t_cpu = (m - c) t_link
    /// ```
    ///
    /// where t_cpu is the longer of a neuron's arithmetic and of reading it, and t_link what a missing neuron takes of the link.
    pub fn on_cpu(&self, missing: usize, runs: usize, carried: usize, n: usize) -> usize {
        let link = runs as f64 * self.copy_us + carried as f64 * self.link_us;
        let before = n as f64 * self.cross_us + self.sync_us;
        let cpu = (n as f64 * self.column_us).max(self.read_us);
        if missing == 0 || link <= before {
            return 0;
        }
        (((link - before) / (link / missing as f64 + cpu)) as usize).min(missing)
    }
}

/// Neighbouring blocks in the store that one copy brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Id in the store of the first.
    pub first: usize,
    /// Number of blocks, 1 or more.
    pub len: usize,
}

/// Writes to `out` the runs that bring `neurons`, ascending; up to `bridge` other blocks between two of them are copied along. Returns the
/// number of blocks in all runs.
pub fn runs(neurons: &[StoreId], bridge: usize, out: &mut Vec<Run>) -> usize {
    out.clear();
    for neuron in neurons.iter().map(|neuron| neuron.index()) {
        match out.last_mut() {
            Some(run) if neuron <= run.first + run.len + bridge => run.len = neuron + 1 - run.first,
            _ => out.push(Run { first: neuron, len: 1 }),
        }
    }
    out.iter().map(|run| run.len).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prng::Prng;

    /// Of a 7B model in f16, 256 columns: a PC of 500 GFLOP/s and a link of 25 GB/s.
    const COSTS: ChunkCosts =
        ChunkCosts { column_us: 0.05, read_us: 0.4, link_us: 1.0, copy_us: 1.5, cross_us: 1.3, sync_us: 11.0 };

    #[test]
    fn runs_bring_every_neuron_once_and_bridge_no_more_than_they_may() {
        for seed in 0..200 {
            let mut prng = Prng::new(seed);
            let most = 1 + prng.below(9);
            let neurons: Vec<u32> = (0..300).filter(|_| prng.below(most) == 0).collect();
            let (bridge, mut found) = (prng.below(5) as usize, Vec::new());
            let carried = runs(bytemuck::cast_slice(&neurons), bridge, &mut found);
            let brought: Vec<usize> = found.iter().flat_map(|run| run.first..run.first + run.len).collect();
            assert_eq!(brought.len(), carried);
            assert!(neurons.iter().all(|&n| brought.binary_search(&(n as usize)).is_ok()), "seed {seed}");
            // Each begins and ends with one that is wanted, and the next is too far away.
            for run in &found {
                assert!([run.first, run.first + run.len - 1].iter().all(|&n| neurons.contains(&(n as u32))));
                let inside: Vec<_> =
                    neurons.iter().filter(|&&n| (run.first..run.first + run.len).contains(&(n as usize))).collect();
                assert!(inside.windows(2).all(|two| (two[1] - two[0]) as usize <= bridge + 1));
            }
            assert!(found.windows(2).all(|two| two[1].first - (two[0].first + two[0].len) > bridge));
        }
    }

    #[test]
    fn most_neurons_go_over_a_fast_link_and_few_over_a_slow_one() {
        let fast = COSTS.on_cpu(8000, 100, 8200, 256);
        assert!((400..800).contains(&fast), "{fast}");
        let slow = ChunkCosts { link_us: 100.0, ..COSTS }.on_cpu(8000, 100, 8200, 256);
        assert!((6500..8000).contains(&slow), "{slow}");
        // What the crossing alone costs pays for no CPU.
        assert_eq!(COSTS.on_cpu(300, 1, 300, 256), 0);
        assert_eq!(COSTS.on_cpu(0, 0, 0, 256), 0);
    }

    #[test]
    fn the_slower_of_both_is_as_fast_as_can_be() {
        for seed in 0..300 {
            let mut prng = Prng::new(seed);
            let mut any = |least: f64, most: f64| least * (most / least).powf(prng.next_f64());
            let costs = ChunkCosts {
                column_us: any(0.001, 1.0),
                read_us: any(0.05, 5.0),
                link_us: any(0.05, 20.0),
                copy_us: any(0.1, 10.0),
                cross_us: any(0.1, 5.0),
                sync_us: any(1.0, 30.0),
            };
            let (missing, n) = (1 + seed as usize * 37, 33 + seed as usize % 224);
            let link = 5.0 * costs.copy_us + missing as f64 * costs.link_us;
            let time = |c: usize| {
                let cpu = if c == 0 {
                    0.0
                } else {
                    let each = (n as f64 * costs.column_us).max(costs.read_us);
                    n as f64 * costs.cross_us + costs.sync_us + c as f64 * each
                };
                cpu.max(link * (missing - c) as f64 / missing as f64)
            };
            let chosen = costs.on_cpu(missing, 5, missing, n);
            let best = (0..=missing).map(time).fold(f64::INFINITY, f64::min);
            // A whole neuron more or less.
            let one = link / missing as f64;
            assert!(
                time(chosen) <= best + one + 1e-9,
                "seed {seed}: {chosen} of {missing}: {} and {best}",
                time(chosen)
            );
        }
    }
}
