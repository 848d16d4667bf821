//! How much memory a model needs for a speed, and how fast it decodes with a memory, where the rest of its neurons come from disk
//! (PowerInfer-2, section 5). The paper gives equations 1 to 11 to an SMT solver; with these few variables trying all plans is exact.

use serde::Serialize;

/// What was measured of the machine.
#[derive(Clone, Debug, PartialEq)]
pub struct DiskMachine {
    /// Bytes of weights that the threads compute in a second, by number of threads from 1 on (F_cpu of equation 9): decoding is bound by
    /// how fast memory is read, which several share, so that two are not twice one.
    pub bytes_s: Vec<f64>,
    /// What a read takes however short it is, seconds of the whole disk.
    pub read_s: f64,
    /// What asking for a read and taking its end costs the thread that does it, seconds.
    pub ask_s: f64,
    /// Rate of the bytes themselves, bytes a second.
    pub disk_bytes_s: f64,
}

/// What is known of the model and its texts.
#[derive(Clone, Debug, PartialEq)]
pub struct DiskModel {
    /// Layers.
    pub layers: usize,
    /// Bytes that a token computes with in attention (C_attn) and predictors (C_pred), of all layers.
    pub attention_bytes: f64,
    /// Those of the head, behind the last layer.
    pub head_bytes: f64,
    /// Bytes of all neurons (C_ffn; N_total S_neuron).
    pub ffn_bytes: f64,
    /// Share of them that a token needs (P_activated).
    pub activated: f64,
    /// Bytes of memory that everything but the neurons takes.
    pub resident_bytes: f64,
    /// What a token reads, by memory for neurons, ascending (P_miss); between points on a line.
    pub points: Vec<DiskPoint>,
}

/// What a token reads with so much memory for neurons.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DiskPoint {
    /// Bytes of memory for neurons.
    pub bytes: f64,
    /// Share of the needed neurons that are not there, 0 to 1: P_miss(m).
    pub miss: f64,
    /// Share of those that were asked for before their layer's turn, 0 to 1.
    pub early: f64,
    /// Reads of a token.
    pub reads: f64,
    /// Bytes that they bring: V_io (equation 10), and the gaps between neurons that are read together.
    pub read_bytes: f64,
    /// Seconds that one thread takes to choose which neurons stay and which are read.
    pub choose_s: f64,
}

impl DiskPoint {
    /// The point at `bytes` on the line between this one and a later one.
    fn between(&self, to: &DiskPoint, bytes: f64) -> DiskPoint {
        let share = (bytes - self.bytes) / (to.bytes - self.bytes);
        let at = |from: f64, to: f64| from + share * (to - from);
        DiskPoint {
            bytes,
            miss: at(self.miss, to.miss),
            early: at(self.early, to.early),
            reads: at(self.reads, to.reads),
            read_bytes: at(self.read_bytes, to.read_bytes),
            choose_s: at(self.choose_s, to.choose_s),
        }
    }
}

/// What the user asks for (equations 3 and 5).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DiskLimits {
    /// Threads, at most (n_max).
    pub threads: usize,
    /// Bytes of memory, at most (m_max).
    pub bytes: f64,
    /// Tokens a second, at least (s_min).
    pub speed: f64,
}

/// What bounds a plan's speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Bound {
    /// The threads.
    Compute,
    /// The disk.
    Disk,
}

/// A plan and what it reaches.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct DiskPlan {
    /// Threads that compute (n); the one that waits looks after the disk, so that none is set aside (4).
    pub threads: usize,
    /// Bytes of memory (m).
    pub bytes: f64,
    /// Predicted tokens a second (s).
    pub speed: f64,
    /// What bounds it.
    pub bound: Bound,
}

impl DiskModel {
    /// What a token reads with so many bytes of memory; beyond the last point nothing.
    pub fn at(&self, bytes: f64) -> DiskPoint {
        let bytes = bytes - self.resident_bytes;
        let after = self.points.partition_point(|point| point.bytes < bytes);
        match (after.checked_sub(1).and_then(|before| self.points.get(before)), self.points.get(after)) {
            (Some(before), Some(after)) => before.between(after, bytes),
            (None, Some(first)) => *first,
            (_, None) => DiskPoint { bytes, ..DiskPoint::default() },
        }
    }
}

impl DiskMachine {
    /// Seconds of the disk for a token's reads: T_io (equation 11), with what each costs beside its bytes.
    pub fn io_s(&self, point: &DiskPoint) -> f64 {
        point.read_bytes / self.disk_bytes_s + point.reads * self.read_s
    }

    /// Seconds of attention and predictors (equation 7), of the FFNs (8) and of the head, with so many threads (9); choosing and asking for
    /// reads is the FFNs'.
    pub fn compute_s(&self, model: &DiskModel, threads: usize, point: &DiskPoint) -> [f64; 3] {
        let rate = self.bytes_s[threads - 1];
        let asking = point.choose_s + point.reads * self.ask_s;
        let ffn = model.ffn_bytes * model.activated / rate + asking;
        [model.attention_bytes / rate, ffn, model.head_bytes / rate]
    }

    /// Seconds of a token: equation 2, layer by layer. A layer's own reads begin when its neurons have been chosen, behind attention; what it was
    /// asked for ahead is read behind those of the layer before. Nothing is known ahead of the first layer, and nothing is read during
    /// the head.
    fn token_s(&self, model: &DiskModel, threads: usize, point: &DiskPoint) -> f64 {
        let layers = model.layers as f64;
        let [attention, ffn, head] = self.compute_s(model, threads, point);
        let (attention, ffn, io) = (attention / layers, ffn / layers, self.io_s(point) / layers);
        // The first layer has none of them.
        let early = io * (point.early * layers / (layers - 1.0).max(1.0)).min(1.0);
        let (mut now, mut read) = (0.0f64, 0.0f64);
        for layer in 0..model.layers {
            now += attention;
            let own = if layer == 0 { io } else { io - early };
            read = read.max(now) + own;
            now = read.max(now + ffn);
            read += if layer + 1 < model.layers { early } else { 0.0 };
        }
        now + head
    }

    /// What a plan reaches (equations 1 and 2).
    pub fn plan(&self, model: &DiskModel, threads: usize, bytes: f64) -> DiskPlan {
        let point = model.at(bytes);
        let [attention, ffn, head] = self.compute_s(model, threads, &point);
        // Where neurons are asked for ahead, the disk also works through attention.
        let beside = if point.early > 0.0 { attention + ffn + head } else { ffn };
        let bound = if self.io_s(&point) > beside { Bound::Disk } else { Bound::Compute };
        DiskPlan { threads, bytes, speed: 1.0 / self.token_s(model, threads, &point), bound }
    }

    /// The fastest plan within the limits, and of equally fast ones that with least memory; `None` if none reaches the least speed, or the
    /// memory has no room for what is not neurons.
    pub fn fastest(&self, model: &DiskModel, limits: &DiskLimits) -> Option<DiskPlan> {
        self.all(model, limits).max_by(|a, b| a.speed.total_cmp(&b.speed).then(b.bytes.total_cmp(&a.bytes)))
    }

    /// The plan with least memory that reaches the least speed, and of those the fastest.
    pub fn smallest(&self, model: &DiskModel, limits: &DiskLimits) -> Option<DiskPlan> {
        self.all(model, limits).min_by(|a, b| a.bytes.total_cmp(&b.bytes).then(b.speed.total_cmp(&a.speed)))
    }

    /// Every plan within the limits: each number of threads with each hundredth of the way from the least memory to all.
    fn all<'a>(&'a self, model: &'a DiskModel, limits: &'a DiskLimits) -> impl Iterator<Item = DiskPlan> + 'a {
        const STEPS: usize = 100;
        let (first, last) = match &model.points[..] {
            [first, .., last] => (first.bytes, last.bytes),
            _ => (model.ffn_bytes, model.ffn_bytes),
        };
        let at = move |step: usize| model.resident_bytes + first + (last - first) * step as f64 / STEPS as f64;
        // The most there may be is one of them, too.
        let sizes = move || (0..=STEPS).map(at).chain([limits.bytes].into_iter().filter(move |&all| all >= at(0)));
        let threads = 1..=limits.threads.min(self.bytes_s.len());
        let plans = threads.flat_map(move |n| sizes().map(move |bytes| self.plan(model, n, bytes)));
        plans.filter(|plan| plan.bytes <= limits.bytes && plan.speed >= limits.speed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FFN: f64 = 88_064.0 * 12_288.0;

    /// The 0.94 B model in f16 on two cores and an NVMe disk: what the first measurements of this tier were set against.
    fn small(ahead: bool) -> (DiskMachine, DiskModel) {
        let machine = DiskMachine { bytes_s: vec![14e9, 22e9], read_s: 12e-6, ask_s: 2e-6, disk_bytes_s: 1.8e9 };
        let needed = 88_064.0 * 0.104;
        let point = |(share, miss): (f64, f64)| DiskPoint {
            bytes: share * FFN,
            miss,
            early: if ahead { 15.0 / 16.0 } else { 0.0 },
            reads: needed * miss,
            read_bytes: needed * miss * 12_288.0,
            choose_s: 1e-3,
        };
        let model = DiskModel {
            layers: 16,
            attention_bytes: 571e6,
            head_bytes: 131e6,
            ffn_bytes: FFN,
            activated: 0.104,
            resident_bytes: 900e6,
            points: [(0.02, 1.0), (0.05, 0.74), (0.25, 0.37), (0.5, 0.18), (1.0, 0.0)].map(point).into(),
        };
        (machine, model)
    }

    #[test]
    fn a_token_takes_attention_and_predictors_and_the_slower_of_ffn_and_disk() {
        let (machine, model) = small(false);
        let half = 900e6 + 0.5 * FFN;
        assert!((model.at(half).miss - 0.18).abs() < 1e-9 && model.at(0.0).miss == 1.0 && model.at(1e12).reads == 0.0);
        // 88064 * 0.104 * 0.18 neurons of 12 KiB.
        let reads = 88_064.0 * 0.104 * 0.18;
        let io = reads * 12_288.0 / 1.8e9 + reads * 12e-6;
        let plan = machine.plan(&model, 2, half);
        let (rest, ffn) = (702e6 / 22e9, FFN * 0.104 / 22e9 + 1e-3 + reads * 2e-6);
        assert!((plan.speed - 1.0 / (rest + io)).abs() < 1e-9 && plan.bound == Bound::Disk && io > ffn);
        let all = machine.plan(&model, 2, 900e6 + FFN);
        let ffn = FFN * 0.104 / 22e9 + 1e-3;
        assert!((all.speed - 1.0 / (rest + ffn)).abs() < 1e-9 && all.bound == Bound::Compute);
    }

    #[test]
    fn what_is_asked_for_ahead_is_read_beside_attention_and_the_layer_before() {
        let (machine, model) = small(true);
        let compute = |bytes| machine.compute_s(&model, 2, &model.at(bytes));
        // With little to read only the first layer waits, for reads that could not begin earlier.
        let most = 900e6 + 0.9 * FFN;
        let ([attention, ffn, head], io) = (compute(most), machine.io_s(&model.at(most)));
        assert!(io < ffn && (1.0 / machine.plan(&model, 2, most).speed - (attention + ffn + head)).abs() < 1e-9);
        // With much to read the disk is never idle but in the first layer's attention and during the head.
        let least = 900e6 + 0.02 * FFN;
        let ([attention, ffn, head], io) = (compute(least), machine.io_s(&model.at(least)));
        let plan = machine.plan(&model, 2, least);
        assert!(io > attention + ffn && plan.bound == Bound::Disk);
        assert!((1.0 / plan.speed - (attention / 16.0 + io + head)).abs() < 1e-9);
        let (_, without) = small(false);
        assert!(plan.speed > machine.plan(&without, 2, least).speed);
    }

    #[test]
    fn the_fastest_plan_takes_what_there_is_and_the_smallest_no_more_than_its_speed_needs() {
        let (machine, model) = small(false);
        let limits = DiskLimits { threads: 2, bytes: 1.6e9, speed: 0.0 };
        let fastest = machine.fastest(&model, &limits).unwrap();
        assert!(fastest.threads == 2 && fastest.bytes == 1.6e9);
        for speed in [5.0, 10.0, 15.0] {
            let limits = DiskLimits { speed, ..limits };
            let smallest = machine.smallest(&model, &limits).unwrap();
            assert!(smallest.speed >= speed && smallest.bytes <= fastest.bytes);
            let less = machine.plan(&model, 2, smallest.bytes - 0.02 * FFN);
            assert!(smallest.bytes == model.resident_bytes + 0.02 * FFN || less.speed < speed);
        }
        // Neither a speed that nothing reaches, nor a memory without room for what is not neurons.
        assert_eq!(machine.fastest(&model, &DiskLimits { speed: 1e3, ..limits }), None);
        assert_eq!(machine.smallest(&model, &DiskLimits { bytes: 0.8e9, ..limits }), None);
    }

    /// More memory is never slower where it leaves fewer reads: equation 2 has no other term with m.
    #[test]
    fn more_memory_is_never_slower() {
        for ahead in [false, true] {
            let (machine, model) = small(ahead);
            let speed = |i: i32| machine.plan(&model, 2, 900e6 + f64::from(i) * 25e6).speed;
            assert!((0..50).all(|i| speed(i + 1) >= speed(i)));
        }
    }
}
