//! How much memory a model needs for a speed, and how fast it decodes with a memory, where the rest of its neurons come from disk
//! (PowerInfer-2, section 5). The paper gives equations 1 to 11 to an SMT solver; with these few variables trying all plans is exact.

/// What was measured of the machine.
#[derive(Clone, Debug, PartialEq)]
pub struct DiskMachine {
    /// Weights that the threads compute in a second, by number of threads from 1 on (F_cpu of equation 9). They read memory, which several
    /// share, so that two are not twice one.
    pub weights_s: Vec<f64>,
    /// What a read takes however short it is, seconds of the whole disk.
    pub read_s: f64,
    /// Rate of the bytes themselves, bytes a second.
    pub disk_bytes_s: f64,
}

/// What is known of the model and its texts.
#[derive(Clone, Debug, PartialEq)]
pub struct DiskModel {
    /// Weights of attention and head, of the predictors, and of all FFNs (C_attn, C_pred, C_ffn).
    pub attention: f64,
    /// See above.
    pub predictors: f64,
    /// See above.
    pub ffn: f64,
    /// Neurons of all layers (N_total).
    pub neurons: f64,
    /// Share of them that a token needs (P_activated).
    pub activated: f64,
    /// Bytes of a neuron on disk (S_neuron).
    pub neuron_bytes: f64,
    /// Bytes of memory that everything but the neurons takes.
    pub resident_bytes: f64,
    /// Misses by share of the neurons in memory (P_miss): points from (0, 1) on, ascending; between them on a line.
    pub miss: Vec<(f64, f64)>,
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// The threads.
    Compute,
    /// The disk.
    Disk,
}

/// A plan and what it reaches.
#[derive(Clone, Copy, Debug, PartialEq)]
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
    /// Misses with so many bytes of memory, 0 to 1: P_miss(m).
    pub fn miss(&self, bytes: f64) -> f64 {
        let share = ((bytes - self.resident_bytes) / (self.neurons * self.neuron_bytes)).clamp(0.0, 1.0);
        let after = self.miss.partition_point(|point| point.0 < share);
        match (after.checked_sub(1).and_then(|before| self.miss.get(before)), self.miss.get(after)) {
            (Some(&(x0, y0)), Some(&(x1, y1))) => y0 + (y1 - y0) * (share - x0) / (x1 - x0),
            (None, Some(&(_, miss))) | (Some(&(_, miss)), None) => miss,
            (None, None) => 1.0,
        }
    }

    /// Bytes that a token takes from disk: V_io (equation 10).
    pub fn disk_bytes(&self, bytes: f64) -> f64 {
        self.neurons * self.activated * self.miss(bytes) * self.neuron_bytes
    }
}

impl DiskMachine {
    /// Seconds of a token's reads: T_io (equation 11), with what each read costs beside its bytes.
    pub fn io_s(&self, model: &DiskModel, bytes: f64) -> f64 {
        let volume = model.disk_bytes(bytes);
        volume / self.disk_bytes_s + volume / model.neuron_bytes * self.read_s
    }

    /// Seconds of attention and predictors (equation 7), and of the FFNs (8), with so many threads (9).
    pub fn compute_s(&self, model: &DiskModel, threads: usize) -> (f64, f64) {
        let rate = self.weights_s[threads - 1];
        ((model.attention + model.predictors) / rate, model.ffn * model.activated / rate)
    }

    /// What a plan reaches (equations 1 and 2).
    pub fn plan(&self, model: &DiskModel, threads: usize, bytes: f64) -> DiskPlan {
        let (rest, ffn) = self.compute_s(model, threads);
        let io = self.io_s(model, bytes);
        let bound = if io > ffn { Bound::Disk } else { Bound::Compute };
        DiskPlan { threads, bytes, speed: 1.0 / (rest + ffn.max(io)), bound }
    }

    /// The fastest plan within the limits, and of equally fast ones that with least memory; `None` if none reaches the least speed, or the
    /// memory has no room for what is not neurons.
    pub fn fastest(&self, model: &DiskModel, limits: &DiskLimits) -> Option<DiskPlan> {
        self.all(model, limits).max_by(|a, b| a.speed.total_cmp(&b.speed).then(b.bytes.total_cmp(&a.bytes)))
    }

    /// The plan with least memory that reaches the least speed.
    pub fn smallest(&self, model: &DiskModel, limits: &DiskLimits) -> Option<DiskPlan> {
        self.all(model, limits).min_by(|a, b| a.bytes.total_cmp(&b.bytes).then(b.speed.total_cmp(&a.speed)))
    }

    /// Every plan within the limits: each number of threads with each hundredth of the neurons in memory.
    fn all<'a>(&'a self, model: &'a DiskModel, limits: &'a DiskLimits) -> impl Iterator<Item = DiskPlan> + 'a {
        const STEPS: usize = 100;
        let neurons = model.neurons * model.neuron_bytes;
        let sizes = move || (0..=STEPS).map(move |step| model.resident_bytes + neurons * step as f64 / STEPS as f64);
        let threads = 1..=limits.threads.min(self.weights_s.len());
        let plans = threads.flat_map(move |n| sizes().map(move |bytes| self.plan(model, n, bytes)));
        plans.filter(|plan| plan.bytes <= limits.bytes && plan.speed >= limits.speed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The 0.94 B model in f16 on two cores and an NVMe disk: what the first measurements of this tier were set against.
    fn small() -> (DiskMachine, DiskModel) {
        let machine = DiskMachine { weights_s: vec![7e9, 12e9], read_s: 12e-6, disk_bytes_s: 1.8e9 };
        let model = DiskModel {
            attention: 334e6,
            predictors: 17e6,
            ffn: 541e6,
            neurons: 88_064.0,
            activated: 0.104,
            neuron_bytes: 12_288.0,
            resident_bytes: 900e6,
            miss: vec![(0.0, 1.0), (0.05, 0.74), (0.25, 0.37), (0.5, 0.18), (1.0, 0.0)],
        };
        (machine, model)
    }

    #[test]
    fn a_token_takes_attention_and_predictors_and_the_slower_of_ffn_and_disk() {
        let (machine, model) = small();
        let half = 900e6 + 0.5 * 88_064.0 * 12_288.0;
        assert!((model.miss(half) - 0.18).abs() < 1e-9 && model.miss(0.0) == 1.0 && model.miss(1e12) == 0.0);
        // 88064 * 0.104 * 0.18 neurons of 12 KiB.
        let bytes = 88_064.0 * 0.104 * 0.18 * 12_288.0;
        assert!((model.disk_bytes(half) - bytes).abs() < 1.0);
        let io = bytes / 1.8e9 + bytes / 12_288.0 * 12e-6;
        let plan = machine.plan(&model, 2, half);
        let (rest, ffn) = machine.compute_s(&model, 2);
        assert!((plan.speed - 1.0 / (rest + io)).abs() < 1e-9 && plan.bound == Bound::Disk && io > ffn);
        let all = machine.plan(&model, 2, 900e6 + 88_064.0 * 12_288.0);
        assert!((all.speed - 1.0 / (rest + ffn)).abs() < 1e-9 && all.bound == Bound::Compute);
    }

    #[test]
    fn the_fastest_plan_takes_what_there_is_and_the_smallest_no_more_than_its_speed_needs() {
        let (machine, model) = small();
        let limits = DiskLimits { threads: 2, bytes: 1.6e9, speed: 0.0 };
        let fastest = machine.fastest(&model, &limits).unwrap();
        assert!(fastest.threads == 2 && fastest.bytes > 1.58e9 && fastest.bytes <= 1.6e9);
        for speed in [5.0, 10.0, 15.0] {
            let limits = DiskLimits { speed, ..limits };
            let smallest = machine.smallest(&model, &limits).unwrap();
            assert!(smallest.speed >= speed && smallest.bytes <= fastest.bytes);
            let less = machine.plan(&model, 2, smallest.bytes - 0.02 * 88_064.0 * 12_288.0);
            assert!(smallest.bytes == model.resident_bytes || less.speed < speed);
        }
        // Neither a speed that nothing reaches, nor a memory without room for what is not neurons.
        assert_eq!(machine.fastest(&model, &DiskLimits { speed: 1e3, ..limits }), None);
        assert_eq!(machine.smallest(&model, &DiskLimits { bytes: 0.8e9, ..limits }), None);
    }

    /// More memory is never slower, whatever the curve: equation 2 has no other term with m.
    #[test]
    fn more_memory_is_never_slower() {
        let (machine, model) = small();
        let speeds: Vec<f64> = (0..50).map(|i| machine.plan(&model, 2, 900e6 + f64::from(i) * 25e6).speed).collect();
        assert!(speeds.windows(2).all(|pair| pair[1] >= pair[0]));
    }
}
