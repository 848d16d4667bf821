//! Which neurons or experts of a prompt's chunk are copied to the device for it, and which the CPU computes. Only arithmetic: it sees no
//! device.
//!
//! Neurons in no slot are in host memory. A copied block serves every column of the chunk, while the CPU's work grows with them: at 256
//! columns a neuron of a 7B model in f16 is 6.3 million multiplications and additions, or 24 KiB over the link. So most neurons go over the
//! link, as in PowerInfer and llama.cpp, and the CPU takes what it can compute meanwhile.
//!
//! Of a mixture each expert has tokens of its own. Copying one takes as long as copying any other, while the CPU's time grows with its
//! tokens: those with the most tokens are copied ([`ExpertCosts::divide`]).

use crate::cpu::MAX_COLUMNS;
use crate::formats::machine_profile::MachineProfile;
use crate::ids::StoreId;
use crate::model::config::ModelConfig;
use std::cmp::Reverse;

/// Copies of an expert: gate, up and down lie apart in the model's file.
const EXPERT_COPIES: f64 = 3.0;
/// Times that the pool's threads are set to work for a layer's experts: inputs, gate and up, activations, down.
const EXPERT_CALLS: f64 = 4.0;

/// Time to move so many bytes at a rate in GB/s, us.
fn bytes_us(bytes: usize, gb_s: f64) -> f64 {
    bytes as f64 / (gb_s * 1e3)
}

/// Time for the products of so many weights with one column, us: each is a multiplication and an addition.
fn products_us(weights: usize, gflops: f64) -> f64 {
    2.0 * weights as f64 / (gflops * 1e3)
}

/// What the missing neurons of a layer cost, us.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ChunkCosts {
    /// Arithmetic of the CPU for one neuron and one column.
    pub column_us: f64,
    /// Reading a neuron's block once from host memory.
    pub read_us: f64,
    /// Arithmetic of the device for one neuron and one column.
    pub device_us: f64,
    /// Reading the keys and values of one position from the device's memory, for one token.
    pub seen_us: f64,
    /// Copying a neuron's block over the link.
    pub link_us: f64,
    /// Starting a copy, of one block or of many neighbours.
    pub copy_us: f64,
    /// Copying one column's input out and its output in, if the CPU computes.
    pub cross_us: f64,
    /// Starting these two copies and waiting once, if the CPU computes.
    pub sync_us: f64,
}

/// What else host and device do while a layer's missing neurons are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Beside {
    /// Parts in which the chunk goes: the CPU reads its neurons, and waits, for each of them.
    pub parts: usize,
    /// How often each block is copied: once for all parts, or once for each.
    pub copies: usize,
    /// Other work of the host at the same time, us: none where the chunk goes as one part, for which each waits for the other.
    pub host_us: f64,
    /// The same of the device.
    pub device_us: f64,
    /// What else the link brings for each layer, us: attention's matrices, where they have no room on the device.
    pub link_us: f64,
}

impl ChunkCosts {
    /// Costs that are all alike, where nothing is known of them.
    pub const ONES: ChunkCosts = ChunkCosts {
        column_us: 1.0,
        read_us: 1.0,
        device_us: 1.0,
        seen_us: 1.0,
        link_us: 1.0,
        copy_us: 1.0,
        cross_us: 1.0,
        sync_us: 1.0,
    };

    /// The costs of a model whose neurons have blocks of `block_bytes`, on a machine.
    pub fn of(machine: &MachineProfile, c: &ModelConfig, block_bytes: usize) -> ChunkCosts {
        ChunkCosts {
            column_us: products_us(c.ffn_kind.rows() * c.hidden, machine.host_gflops),
            read_us: bytes_us(block_bytes, machine.dram_gb_s),
            device_us: products_us(c.ffn_kind.rows() * c.hidden, machine.device_gflops),
            seen_us: bytes_us(2 * 2 * c.most_of_attention(|a| a.kv_dim()), machine.device_gb_s),
            link_us: bytes_us(block_bytes, machine.link_gb_s),
            copy_us: machine.copy_us,
            cross_us: bytes_us(2 * 4 * c.hidden, machine.link_gb_s),
            sync_us: 2.0 * machine.copy_us + machine.sync_us,
        }
    }

    /// How many unwanted blocks between two neurons are copied along rather than start another copy.
    pub fn bridge(&self) -> usize {
        (self.copy_us / self.link_us) as usize
    }

    /// How many of a layer's neurons, `missing` of which are in no slot, the CPU computes for `n` columns: as many as it finishes while the
    /// link brings the others and the device computes them and those in its `slots`. `runs` copies of `carried` blocks together would bring
    /// all of them. With c of m neurons on the CPU,
    ///
    /// ```text
    /// host + cross n + parts sync + c t_cpu = max(link + (m - c) t_link, device + (slots + m - c) n t_device)
    /// ```
    ///
    /// where t_cpu is the longer of a neuron's arithmetic and of reading it for each part, t_link what a missing neuron takes of the link, once or for each part,
    /// t_device the device's arithmetic for one column, and host, link and device what they do `beside`.
    pub fn on_cpu(
        &self,
        (missing, slots): (usize, usize),
        (runs, carried): (usize, usize),
        n: usize,
        beside: Beside,
    ) -> usize {
        let parts = beside.parts.max(1) as f64;
        let before = beside.host_us + n as f64 * self.cross_us + parts * self.sync_us;
        let cpu = (n as f64 * self.column_us).max(parts * self.read_us);
        let (link, device) = (runs as f64 * self.copy_us + carried as f64 * self.link_us, n as f64 * self.device_us);
        if missing == 0 {
            return 0;
        }
        // Up to where the CPU takes as long as each of the two; the longer of them falls as the CPU takes more.
        let link = link * beside.copies.max(1) as f64;
        let beside_link = (beside.link_us + link - before) / (link / missing as f64 + cpu);
        let beside_device = (beside.device_us + (missing + slots) as f64 * device - before) / (device + cpu);
        (beside_link.max(beside_device).max(0.0) as usize).min(missing)
    }
}

/// What the experts of a mixture's layer cost for a chunk, us.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertCosts {
    /// Arithmetic of the CPU for one expert and one token.
    pub token_us: f64,
    /// Reading an expert once from host memory.
    pub read_us: f64,
    /// Copying an expert over the link, the start of its copies included.
    pub link_us: f64,
    /// Reading an expert once from the device's memory.
    pub device_us: f64,
    /// Arithmetic of the device for one expert and one token.
    pub device_token_us: f64,
    /// Starting a kernel of the device.
    pub call_us: f64,
    /// Setting the CPU's threads to work on a layer's experts.
    pub start_us: f64,
    /// Starting one copy.
    pub copy_us: f64,
    /// Copying the CPU's sum for one token to the device.
    pub cross_us: f64,
}

/// An expert that a chunk needs and that is in no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Its number in the layer.
    pub expert: usize,
    /// Tokens that have it, 1 or more.
    pub tokens: u32,
    /// Groups of [`MAX_COLUMNS`] tokens, one after the other in the chunk, of which some token has it: for each the device reads it anew.
    pub groups: u32,
}

/// How a layer's missing experts are divided, and what that takes by the costs, us.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Division {
    /// How many are copied: those with the most tokens. The CPU computes the others.
    pub copied: usize,
    /// When the device has computed the experts in slots and the copied ones, from the moment on in which the layer was divided.
    pub device_us: f64,
    /// When the CPU has computed the others; 0 if there are none.
    pub cpu_us: f64,
    /// Bringing the CPU's sum to the device and adding it, after both; 0 if there is none.
    pub merge_us: f64,
}

impl Division {
    /// When the layer's FFN is done.
    pub fn us(&self) -> f64 {
        self.device_us.max(self.cpu_us) + self.merge_us
    }
}

impl ExpertCosts {
    /// The costs of a mixture with `hidden` numbers a token whose experts have so many bytes and weights each, on a machine.
    pub fn of(machine: &MachineProfile, hidden: usize, expert_bytes: usize, expert_weights: usize) -> ExpertCosts {
        ExpertCosts {
            token_us: products_us(expert_weights, machine.host_gflops),
            read_us: bytes_us(expert_bytes, machine.dram_gb_s),
            link_us: bytes_us(expert_bytes, machine.link_gb_s) + EXPERT_COPIES * machine.copy_us,
            device_us: bytes_us(expert_bytes, machine.device_gb_s),
            device_token_us: products_us(expert_weights, machine.device_gflops),
            call_us: machine.call_us,
            start_us: EXPERT_CALLS * machine.call_us,
            copy_us: machine.copy_us,
            cross_us: bytes_us(4 * hidden, machine.link_gb_s),
        }
    }

    /// Starting the kernels for experts that lie side by side: one for each group of tokens, and one that adds their sum.
    fn calls_us(&self, n: usize) -> f64 {
        (n.div_ceil(MAX_COLUMNS) + 1) as f64 * self.call_us
    }

    /// The device's time for experts that it reads so many times for so many tokens of theirs.
    fn device(&self, reads: u64, tokens: u64) -> f64 {
        (reads as f64 * self.device_us).max(tokens as f64 * self.device_token_us)
    }

    /// Sorts a layer's `missing` experts, those with the most tokens first, and says how many of the first are to be copied so that the
    /// layer is done soonest. The chunk has `n` tokens, the device reads the experts in slots `reads` times for `tokens` of theirs, and there is scratch memory
    /// for two times `half` experts; with 0 nothing is copied. While one half is computed the next experts are copied to the other, and the
    /// CPU computes the rest meanwhile.
    pub fn divide(&self, missing: &mut [Missing], n: usize, (reads, tokens): (u64, u64), half: usize) -> Division {
        missing.sort_unstable_by_key(|missing| (Reverse(missing.tokens), missing.expert));
        let of_cpu = |missing: &Missing| (f64::from(missing.tokens) * self.token_us).max(self.read_us);
        let mut rest_us: f64 = missing.iter().map(of_cpu).sum();
        let merge_us = n as f64 * self.cross_us + self.copy_us + self.call_us;
        let division = |copied: usize, device_us: f64, rest_us: f64| match copied == missing.len() {
            true => Division { copied, device_us, ..Division::default() },
            false => Division { copied, device_us, cpu_us: self.start_us + rest_us, merge_us },
        };
        let resident_us = if reads > 0 { self.device(reads, tokens) + self.calls_us(n) } else { 0.0 };
        let mut best = division(0, resident_us, rest_us);
        let mut turns =
            Turns { done_us: [0.0; 2], link_us: 0.0, before_us: resident_us, after_us: resident_us, work_us: 0.0 };
        for (i, expert) in missing.iter().enumerate().take_while(|_| half > 0) {
            if i % half == 0 {
                turns.begin(i > 0, self.calls_us(n));
            }
            turns.add(self.link_us, self.device(expert.groups.into(), expert.tokens.into()));
            rest_us -= of_cpu(expert);
            let now = division(i + 1, turns.after_us, rest_us);
            if now.us() < best.us() {
                best = now;
            }
        }
        best
    }
}

/// When copies into two halves, which take turns, are computed, us.
struct Turns {
    /// When the two turns before this one were done, the older one first.
    done_us: [f64; 2],
    /// When the link is free.
    link_us: f64,
    /// When the device is done with what comes before this turn.
    before_us: f64,
    /// When it is done with this turn, too.
    after_us: f64,
    /// The device's work for this turn.
    work_us: f64,
}

impl Turns {
    /// Begins a turn, after another one or as the first. Its half is free once the turn before the last is done.
    fn begin(&mut self, another: bool, calls_us: f64) {
        if another {
            self.done_us = [self.done_us[1], self.after_us];
        }
        self.link_us = self.link_us.max(self.done_us[0]);
        (self.before_us, self.work_us) = (self.after_us, calls_us);
    }

    /// Copies one more expert for this turn, which is computed once all of the turn's have arrived.
    fn add(&mut self, link_us: f64, work_us: f64) {
        self.link_us += link_us;
        self.work_us += work_us;
        self.after_us = self.before_us.max(self.link_us) + self.work_us;
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
    const COSTS: ChunkCosts = ChunkCosts {
        column_us: 0.05,
        read_us: 0.4,
        device_us: 0.003,
        seen_us: 0.01,
        link_us: 1.0,
        copy_us: 1.5,
        cross_us: 1.3,
        sync_us: 11.0,
    };

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
        let fast = COSTS.on_cpu((8000, 0), (100, 8200), 256, Beside::default());
        assert!((400..800).contains(&fast), "{fast}");
        let slow = ChunkCosts { link_us: 100.0, ..COSTS }.on_cpu((8000, 0), (100, 8200), 256, Beside::default());
        assert!((6500..8000).contains(&slow), "{slow}");
        // What the crossing alone costs pays for no CPU.
        assert_eq!(COSTS.on_cpu((300, 0), (1, 300), 256, Beside::default()), 0);
        assert_eq!(COSTS.on_cpu((0, 8000), (0, 0), 256, Beside::default()), 0);
        // A device that is busy with its slots for as long as ten times the link leaves ten times as many to the CPU.
        let busy = COSTS.on_cpu((8000, 100_000), (100, 8200), 256, Beside::default());
        assert!((4800..6500).contains(&busy), "{busy}");
    }

    /// Of Qwen3-30B-A3B in 4 bits on a PC of 400 GFLOP/s, a link of 25 GB/s and a card of 360 GB/s.
    const EXPERTS: ExpertCosts = ExpertCosts {
        token_us: 23.6,
        read_us: 60.0,
        link_us: 120.0,
        device_us: 8.0,
        device_token_us: 0.25,
        call_us: 5.0,
        start_us: 20.0,
        copy_us: 2.0,
        cross_us: 0.33,
    };

    fn missing(tokens: &[u32]) -> Vec<Missing> {
        let of = |(expert, &tokens): (usize, &u32)| Missing { expert, tokens, groups: tokens.min(8) };
        tokens.iter().enumerate().map(of).collect()
    }

    /// When the device is done if the first of these experts are copied: by the clock of a device with two halves, turn after turn.
    fn device_us(costs: &ExpertCosts, copied: &[Missing], n: usize, (reads, tokens): (u64, u64), half: usize) -> f64 {
        let calls = (n.div_ceil(32) + 1) as f64 * costs.call_us;
        let (mut link, mut free) = (0f64, [0f64; 2]);
        let work = |reads: f64, tokens: f64| (reads * costs.device_us).max(tokens * costs.device_token_us);
        let mut device = if reads > 0 { work(reads as f64, tokens as f64) + calls } else { 0.0 };
        for (turn, experts) in copied.chunks(half.max(1)).enumerate() {
            link = link.max(free[turn % 2]) + experts.len() as f64 * costs.link_us;
            let each = |e: &Missing| work(e.groups.into(), e.tokens.into());
            device = device.max(link) + experts.iter().map(each).sum::<f64>() + calls;
            free[turn % 2] = device;
        }
        device
    }

    #[test]
    fn experts_with_most_tokens_are_copied_and_no_other_number_of_them_is_faster() {
        for seed in 0..400 {
            let mut prng = Prng::new(seed);
            let mut any = |least: f64, most: f64| least * (most / least).powf(prng.next_f64());
            let costs = ExpertCosts {
                token_us: any(0.1, 100.0),
                read_us: any(1.0, 500.0),
                link_us: any(1.0, 500.0),
                device_us: any(0.1, 100.0),
                device_token_us: any(0.01, 20.0),
                call_us: any(0.1, 20.0),
                start_us: any(1.0, 100.0),
                copy_us: any(0.1, 10.0),
                cross_us: any(0.01, 5.0),
            };
            let tokens: Vec<u32> = (0..prng.below(129)).map(|_| 1 + prng.below(40) as u32).collect();
            let (n, half) = (33 + prng.below(224) as usize, prng.below(6) as usize);
            let resident = (prng.below(300), prng.below(3000));
            let mut sorted = missing(&tokens);
            let found = costs.divide(&mut sorted, n, resident, half);
            let mut experts: Vec<usize> = sorted.iter().map(|missing| missing.expert).collect();
            assert!(sorted.windows(2).all(|two| two[0].tokens >= two[1].tokens), "seed {seed}");
            experts.sort_unstable();
            assert_eq!(experts, (0..tokens.len()).collect::<Vec<_>>());
            let us = |copied: usize| {
                let (first, rest) = sorted.split_at(copied);
                let each = |missing: &Missing| (f64::from(missing.tokens) * costs.token_us).max(costs.read_us);
                let device = device_us(&costs, first, n, resident, half);
                match rest {
                    [] => device,
                    rest => {
                        let cpu = costs.start_us + rest.iter().map(each).sum::<f64>();
                        device.max(cpu) + n as f64 * costs.cross_us + costs.copy_us + costs.call_us
                    }
                }
            };
            let most = if half == 0 { 0 } else { tokens.len() };
            let best = (0..=most).map(us).fold(f64::INFINITY, f64::min);
            let (told, made) = (found.us(), us(found.copied));
            assert!((made - best).abs() < 1e-6 * best, "seed {seed}: {found:?} takes {made}, the best {best}");
            assert!((told - made).abs() < 1e-6 * made.max(1.0), "seed {seed}: {found:?} says {told} and takes {made}");
        }
    }

    #[test]
    fn experts_stay_where_nothing_is_gained_by_copying_them() {
        let many = [16; 60];
        let fast = EXPERTS.divide(&mut missing(&many), 256, (500, 900), 4);
        assert!((30..60).contains(&fast.copied), "{fast:?}");
        // Neither waits long for the other: not longer than one expert takes.
        assert!((fast.device_us - fast.cpu_us).abs() < 16.0 * EXPERTS.token_us, "{fast:?}");
        for (why, costs, half) in [
            ("no room", EXPERTS, 0),
            ("a slow link", ExpertCosts { link_us: 1e6, ..EXPERTS }, 4),
            ("a device that is busy with what lies there", ExpertCosts { device_us: 100.0, ..EXPERTS }, 4),
            ("one that multiplies slowly", ExpertCosts { device_token_us: 100.0, ..EXPERTS }, 4),
        ] {
            assert_eq!(costs.divide(&mut missing(&many), 256, (500, 900), half).copied, 0, "{why}");
        }
        let nothing = EXPERTS.divide(&mut [], 256, (500, 900), 4);
        assert_eq!((nothing.copied, nothing.cpu_us, nothing.merge_us), (0, 0.0, 0.0));
    }

    #[test]
    fn the_slower_of_both_is_as_fast_as_can_be() {
        for seed in 0..300 {
            let mut prng = Prng::new(seed);
            let mut any = |least: f64, most: f64| least * (most / least).powf(prng.next_f64());
            let costs = ChunkCosts {
                column_us: any(0.001, 1.0),
                read_us: any(0.05, 5.0),
                device_us: any(0.0001, 0.1),
                seen_us: 0.0,
                link_us: any(0.05, 20.0),
                copy_us: any(0.1, 10.0),
                cross_us: any(0.1, 5.0),
                sync_us: any(1.0, 30.0),
            };
            let (missing, n) = (1 + seed as usize * 37, 33 + seed as usize % 224);
            let slots = prng.below(8000) as usize;
            let link = 5.0 * costs.copy_us + missing as f64 * costs.link_us;
            let beside = Beside { link_us: (seed % 3) as f64 * 200.0, ..Beside::default() };
            let time = |c: usize| {
                let cpu = if c == 0 {
                    0.0
                } else {
                    let each = (n as f64 * costs.column_us).max(costs.read_us);
                    n as f64 * costs.cross_us + costs.sync_us + c as f64 * each
                };
                let device = (slots + missing - c) as f64 * n as f64 * costs.device_us;
                cpu.max(beside.link_us + link * (missing - c) as f64 / missing as f64).max(device)
            };
            let chosen = costs.on_cpu((missing, slots), (5, missing), n, beside);
            let best = (0..=missing).map(time).fold(f64::INFINITY, f64::min);
            // A whole neuron more or less.
            let one = (link / missing as f64).max(n as f64 * costs.device_us);
            assert!(
                time(chosen) <= best + one + 1e-9,
                "seed {seed}: {chosen} of {missing}: {} and {best}",
                time(chosen)
            );
        }
    }
}
