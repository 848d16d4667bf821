//! The cost model of a layer's FFN: the time of its stage on the host's clock, by how many neurons each memory computes and how many move. Thresholds,
//! policies, plans, replay and its bound use this one. Every function is pure; the numbers come from measurements ([`super::rates`]).

use crate::cache::{PerTier, Tier};

/// Time that one lane, the processor of one memory, takes for its share of a layer's FFN.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Lane {
    /// Time that any share takes, ns: launches, exchange, fork and join, partial sums. An empty share takes none of it.
    pub fixed_ns: f64,
    /// Time of each neuron, ns.
    pub neuron_ns: f64,
}

impl Lane {
    /// A lane that reads `bytes` of each neuron at `gb_s` GB/s.
    pub fn reading(fixed_ns: f64, bytes: f64, gb_s: f64) -> Lane {
        Lane { fixed_ns, neuron_ns: bytes / gb_s }
    }

    /// Time of a share of exactly `neurons` neurons, ns.
    pub fn for_count(self, neurons: u64) -> f64 {
        if neurons == 0 { 0.0 } else { self.fixed_ns + self.neuron_ns * neurons as f64 }
    }

    /// Mean time of shares of `neurons` neurons in the mean, ns. A share is taken to be empty as often as a Poisson variable of that mean is 0.
    pub fn for_mean(self, neurons: f64) -> f64 {
        self.fixed_ns * -(-neurons).exp_m1() + self.neuron_ns * neurons
    }
}

/// Times of a layer's FFN stage.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageCosts {
    /// Time that every stage takes, wherever its neurons are, ns.
    pub always_ns: f64,
    /// The lanes, which run at the same time. The host's fixed part contains what is only there because the layer is split: its part of the
    /// sum crosses the link and is added.
    pub lanes: PerTier<Lane>,
    /// Time that a neuron on its way to the device takes from the host's share, ns: beginning its copy, and memory that both read.
    pub move_ns: f64,
}

/// What the stages of many layers had to do, in all.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageCounts {
    /// Stages.
    pub stages: u64,
    /// Those in which the host had a share.
    pub split: u64,
    /// Neurons that the host computed.
    pub host: u64,
    /// Neurons that began to move.
    pub moves: u64,
}

impl StageCosts {
    /// Mean time of each lane for so many neurons in the mean, ns.
    pub fn lanes_ns(&self, neurons: PerTier<f64>) -> PerTier<f64> {
        PerTier::from_fn(|tier| self.lanes[tier].for_mean(neurons[tier]))
    }

    /// Mean time of the stage for so many neurons in the mean, ns: that of the slower lane. A layer whose host share is empty saves the host's
    /// fixed part.
    pub fn for_mean(&self, neurons: PerTier<f64>) -> f64 {
        let lanes = self.lanes_ns(neurons);
        self.always_ns + lanes[Tier::Device].max(lanes[Tier::Host])
    }

    /// Mean time of a stage of which the host has a part whatever the token, with so many neurons in the mean, ns.
    pub fn for_split(&self, neurons: PerTier<f64>) -> f64 {
        let host = self.lanes[Tier::Host];
        let host_ns = host.fixed_ns + host.neuron_ns * neurons[Tier::Host];
        self.always_ns + self.lanes_ns(neurons)[Tier::Device].max(host_ns)
    }

    /// Time of many stages, ns, whose device is no slower than the host.
    pub fn for_counts(&self, of: StageCounts) -> f64 {
        let host = self.lanes[Tier::Host];
        let shares = of.split as f64 * host.fixed_ns + of.host as f64 * host.neuron_ns;
        of.stages as f64 * self.always_ns + shares + of.moves as f64 * self.move_ns
    }

    /// Time of the stage for exactly so many neurons, ns.
    pub fn for_count(&self, neurons: PerTier<u64>) -> f64 {
        let lanes = PerTier::from_fn(|tier| self.lanes[tier].for_count(neurons[tier]));
        self.always_ns + lanes[Tier::Device].max(lanes[Tier::Host])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::h200;

    const RAW: &str = include_str!("../../runs/2026-11-26-h200/raw.csv");
    const NEURON: f64 = h200::NEURON_BYTES;
    /// Bytes of an expert of the mixtures.
    const EXPERT: f64 = 3.0 * 2048.0 * 768.0 * 18.0 / 32.0;
    /// Host memory's rate by that run's `machine.toml`, GB/s.
    const DRAM_GB_S: f64 = 119.16;
    /// Bytes of the last cache of a Xeon of that kind; the run did not record it.
    const LAST_CACHE: f64 = 105.0 * 1048576.0;

    /// A decoding row: neurons or experts that the CPU computed and that moved for a token and layer, and the times of a layer, ns: of its stage, and
    /// with attention.
    struct Row {
        on_cpu: f64,
        moves: f64,
        stage_ns: f64,
        layer_ns: f64,
        layers: f64,
    }

    /// `tokens` of the row's counters: the prompt where it has no chunks (twice 8), 4 to warm up, 48 timed, 64 audited afterwards.
    fn row(call: &str, name: &str, tokens: f64, layers: f64) -> Row {
        let columns: Vec<&str> = RAW.lines().next().unwrap().split(',').collect();
        let at = |column: &str| columns.iter().rev().position(|c| *c == column).unwrap();
        // Settings have commas in quotes: columns are counted from the end.
        let line = RAW.lines().find(|line| {
            line.starts_with(&format!("{call},")) && line.contains(&format!(",{name},")) && line.contains(",tg48,")
        });
        let fields: Vec<&str> = line.unwrap_or_else(|| panic!("no row {name}")).rsplit(',').collect();
        let number = |column: &str| fields[at(column)].parse::<f64>().unwrap();
        let ns = |ms: f64| ms * 1e6 / layers;
        Row {
            on_cpu: number("misses") / tokens / layers,
            moves: number("moves") / tokens / layers,
            stage_ns: ns(number("ffn_ms")),
            layer_ns: ns(number("attention_ms") + number("ffn_ms")),
            layers,
        }
    }

    /// The H200's costs for shares of `threads` threads, whose neurons have `bytes`, of which a token needs `of_token` on the CPU.
    fn costs(threads: f64, bytes: f64, of_token: f64) -> StageCosts {
        let of_cache = h200::stage();
        let shared = of_cache.lanes[Tier::Host].neuron_ns * h200::THREADS / threads * bytes / NEURON;
        let beyond_cache = bytes * of_token > LAST_CACHE;
        let neuron_ns = if beyond_cache { shared.max(bytes / DRAM_GB_S) } else { shared };
        let host = Lane { neuron_ns, ..of_cache.lanes[Tier::Host] };
        StageCosts { lanes: of_cache.lanes.with(Tier::Host, host), ..of_cache }
    }

    /// (predicted / measured) - 1. Of `used` experts of a token each is on the CPU with the same probability; of neurons some always are.
    fn error(row: &Row, threads: f64, bytes: f64, used: Option<i32>) -> f64 {
        let Lane { fixed_ns, neuron_ns } = costs(threads, bytes, row.on_cpu * row.layers).lanes[Tier::Host];
        let none = used.map_or(0.0, |used| (1.0 - row.on_cpu / f64::from(used)).powi(used));
        (h200::ALWAYS_NS + (1.0 - none) * fixed_ns + neuron_ns * row.on_cpu) / row.stage_ns - 1.0
    }

    /// Rows of the model of eight layers in which threads spin for 1 ms or longer, with their threads; graphs with moves left out.
    const FITTED: [(&str, f64); 8] = [
        ("s1000", 16.0),
        ("s5000", 16.0),
        ("sgraphs", 16.0),
        ("hk1000", 16.0),
        ("s1000t8", 8.0),
        ("s1000t4", 4.0),
        ("full1000", 16.0),
        ("full1000t8", 8.0),
    ];

    #[test]
    fn the_constants_are_the_least_squares_of_the_eight_layer_rows_and_predict_each_within_15_percent() {
        let rows = FITTED.map(|(name, threads)| (row("3", name, 132.0, 8.0), threads));
        // Of relative errors: stage = fixed + neuron x on_cpu / threads.
        let mut sums = [0.0; 5];
        for (row, threads) in &rows {
            let (x, y, w) = (row.on_cpu / threads, row.stage_ns, row.stage_ns.powi(-2));
            sums.iter_mut().zip([w, w * x, w * x * x, w * y, w * x * y]).for_each(|(sum, new)| *sum += new);
        }
        let [w, wx, wxx, wy, wxy] = sums;
        let determinant = w * wxx - wx * wx;
        let (fixed, neuron) = ((wy * wxx - wxy * wx) / determinant, (w * wxy - wx * wy) / determinant);
        assert!((fixed - h200::ALWAYS_NS - h200::HOST_FIXED_NS).abs() < 100.0, "{fixed}");
        assert!((neuron - h200::THREAD_NEURON_NS).abs() < 5.0, "{neuron}");
        let alone = ["all", "allgraphs"].map(|name| row("3", name, 132.0, 8.0).stage_ns);
        assert!((alone.iter().sum::<f64>() / 2.0 - h200::ALWAYS_NS).abs() < 100.0, "{alone:?}");
        let mut attention = rows.each_ref().map(|(row, _)| row.layer_ns - row.stage_ns);
        attention.sort_by(f64::total_cmp);
        assert!((attention[4] - h200::ATTENTION_NS).abs() < 3000.0, "{attention:?}");
        // With a lane of the device's own, the rows' stages take as long.
        for on_host in [522, 244, 0] {
            let neurons = PerTier::all(on_host).with(Tier::Device, 1060 - on_host);
            let [with, without] = [h200::with_device(), h200::stage()].map(|costs| costs.for_count(neurons));
            assert!((with - without).abs() < 1.0, "{on_host} on the host: {with} and {without}");
        }
        for (row, threads) in &rows {
            let error = error(row, *threads, NEURON, None);
            assert!(error.abs() < 0.15, "{} on the CPU, {threads} threads: {error:.3}", row.on_cpu);
        }
    }

    /// Where a token's neurons are more than the last cache holds, memory's measured rate replaces the fitted time of a neuron.
    #[test]
    fn static_rows_of_other_models_are_predicted_within_15_percent() {
        let seven = row("5", "7b-8GiB-static", 116.0, 32.0);
        assert!(error(&seven, 16.0, NEURON, None).abs() < 0.15);
        for (call, name, tokens, used) in
            [("5", "moe-2GiB-static", 116.0, 8), ("5", "moe-2GiB-full", 116.0, 8), ("3", "moe1s", 132.0, 6)]
        {
            let error = error(&row(call, name, tokens, 12.0), 16.0, EXPERT, Some(used));
            assert!(error.abs() < 0.15, "{name}: {error:.3}");
        }
    }

    /// (predicted / measured) - 1 of a whole layer, which takes `alone_ns` with everything on the card. Of neurons beyond the last cache's bytes, and
    /// only of those, memory's rate is the limit.
    fn layer_error(row: &Row, alone_ns: f64, threads: f64, bytes: f64, used: Option<i32>) -> f64 {
        let at = |of_token: f64| costs(threads, bytes, of_token).lanes[Tier::Host].neuron_ns;
        let beyond = (1.0 - LAST_CACHE / (bytes * row.on_cpu * row.layers)).max(0.0);
        let neuron_ns = at(0.0) * (1.0 - beyond) + at(f64::INFINITY) * beyond;
        let none = used.map_or(0.0, |used| (1.0 - row.on_cpu / f64::from(used)).powi(used));
        (alone_ns + (1.0 - none) * h200::HOST_FIXED_NS + neuron_ns * row.on_cpu) / row.layer_ns - 1.0
    }

    /// The stage's lap ends when the host has launched the device's last call of a layer; what the device is then still busy with is in the next
    /// layer's lap of attention. Where the host's share is often empty, that is much of the stage: the mixture of 64 with moves was predicted 44 % above
    /// its lap. With attention's lap, the same constants predict it and all others.
    #[test]
    fn with_attention_the_same_constants_predict_rows_whose_host_share_is_often_empty() {
        let eight = row("3", "all", 132.0, 8.0).layer_ns;
        for (name, threads) in FITTED.into_iter().filter(|(name, _)| *name != "hk1000") {
            let error = layer_error(&row("3", name, 132.0, 8.0), eight, threads, NEURON, None);
            assert!(error.abs() < 0.08, "{name}: {error:.3}");
        }
        for (call, name, all, tokens, used) in [
            ("3", "moe1s", "moeall", 132.0, 6),
            ("3", "moe1", "moeall", 132.0, 6),
            ("5", "moe-2GiB-static", "moe-all", 116.0, 8),
            ("5", "moe-2GiB-full", "moe-all", 116.0, 8),
        ] {
            let alone = row(call, all, tokens, 12.0).layer_ns;
            let error = layer_error(&row(call, name, tokens, 12.0), alone, 16.0, EXPERT, Some(used));
            assert!(error.abs() < 0.15, "{name}: {error:.3}");
        }
        // Layers of 7B are those of the model of eight.
        let error = layer_error(&row("5", "7b-8GiB-static", 116.0, 32.0), eight, 16.0, NEURON, None);
        assert!(error.abs() < 0.15, "{error:.3}");
    }

    /// 7B with moves is not explained. Counters of those rows contain 64 tokens that were audited after the timing, while moves caught up, so that what
    /// the 52 tokens before missed and moved is only known to be between the mean and all of it. By the mean the model says a third too little; if all
    /// misses and all moves were theirs, and a move read host memory at its rate, it would say 5 and 8 % too little.
    #[test]
    fn rows_of_7b_with_moves_are_only_bounded() {
        let eight = row("3", "all", 132.0, 8.0).layer_ns;
        for (name, by_mean, at_most) in [("7b-8GiB-full", -0.40, -0.08), ("7b-8GiB-full-2", -0.35, -0.05)] {
            let mean = row("5", name, 116.0, 32.0);
            let error = layer_error(&mean, eight, 16.0, NEURON, None);
            assert!((error - by_mean).abs() < 0.01, "{name}: {error:.3}");
            let all = row("5", name, 52.0, 32.0);
            let read_ns = (all.on_cpu + all.moves) * NEURON / DRAM_GB_S;
            let bound = (eight + h200::HOST_FIXED_NS + read_ns) / all.layer_ns - 1.0;
            assert!((bound - at_most).abs() < 0.01, "{name}: {bound:.3}");
        }
    }

    #[test]
    fn an_empty_host_share_saves_its_fixed_part_and_the_slower_lane_counts() {
        let lane = |fixed_ns, neuron_ns| Lane { fixed_ns, neuron_ns };
        let costs = StageCosts {
            always_ns: 10.0,
            lanes: PerTier::all(lane(100.0, 2.0)).with(Tier::Device, lane(20.0, 0.5)),
            move_ns: 3.0,
        };
        let of = |host: u64, device: u64| costs.for_count(PerTier::all(host).with(Tier::Device, device));
        assert_eq!((of(0, 0), of(0, 10), of(1, 10), of(30, 400)), (10.0, 35.0, 112.0, 230.0));
        // Where the host is the slower one, many stages take what they take one by one, and moves come beside them.
        let counts = StageCounts { stages: 3, split: 2, host: 31, moves: 4 };
        assert_eq!(costs.for_counts(counts), of(0, 0) + of(1, 10) + of(30, 10) + 12.0);
        // Means of many neurons are as counts, and means below one are charged for the passes in which there is one.
        let mean = |host: f64| costs.for_mean(PerTier::all(host).with(Tier::Device, 0.0));
        assert!((mean(40.0) - 190.0).abs() < 1e-9);
        assert!((mean(0.1) - (10.0 + 100.0 * 0.0951626 + 0.2)).abs() < 1e-3);
        assert_eq!(mean(0.0), 10.0);
        assert_eq!(costs.for_split(PerTier::all(0.0)), 110.0);
    }
}
