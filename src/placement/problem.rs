//! The placement problem as plain data.

/// Neurons of a batch: "64 neurons with similar impacts from a layer into a single batch" (powerinfer 6.3.3).
pub const BATCH: usize = 64;
/// Cells of the solver's table at most (layers times batches of the budget), 4 bytes each. An 80-layer model with 448
/// batches a layer has 2.9 million; more than this comes from a damaged file, and is solved in larger batches.
pub const MAX_CELLS: u64 = 1 << 26;

/// Choose for each layer how many of its batches, best first, lie on the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Neurons per batch; divides the neurons of a layer.
    pub batch: usize,
    /// Bytes that a batch takes.
    pub batch_bytes: u64,
    pub layers: Vec<LayerProblem>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerProblem {
    /// Impact v of each batch, falling, `[batches]`.
    pub impacts: Vec<u64>,
    /// C_l in batches: none or at least these many are on the device; 1 to all of them.
    pub least: usize,
}

impl Problem {
    /// `counts` is how often each neuron fired, `[layers][neurons]`; its impact (powerinfer 6.2). `least_neurons` is C_l.
    ///
    /// # Errors
    /// In words, where layers differ in size or are empty.
    pub fn new(counts: &[Vec<u64>], neuron_bytes: u64, least_neurons: usize) -> Result<Problem, String> {
        let neurons = counts.first().map_or(0, Vec::len);
        if neurons == 0 || neuron_bytes == 0 {
            return Err("there are no neurons to place".into());
        }
        if let Some(odd) = counts.iter().position(|c| c.len() != neurons) {
            return Err(format!("layer {odd} has {} neurons and layer 0 {neurons}", counts[odd].len()));
        }
        let too_large = "the counts are too large to be added up";
        counts.iter().flatten().try_fold(0u64, |sum, &v| sum.checked_add(v)).ok_or(too_large)?;
        let batch = batch_size(counts.len(), neurons);
        let layers: Vec<LayerProblem> = counts
            .iter()
            .map(|counts| {
                let ranked = ranking(counts);
                let sum = |neurons: &[u32]| neurons.iter().map(|&n| counts[n as usize]).sum();
                LayerProblem {
                    impacts: ranked.chunks_exact(batch).map(sum).collect(),
                    least: least_neurons.div_ceil(batch).clamp(1, neurons / batch),
                }
            })
            .collect();
        let problem = Problem { batch, batch_bytes: neuron_bytes * batch as u64, layers };
        problem.weights().ok_or(too_large)?;
        Ok(problem)
    }

    /// Batches of all layers together.
    pub fn batches(&self) -> usize {
        self.layers.iter().map(|l| l.impacts.len()).sum()
    }

    /// Impact of all neurons together.
    pub fn total_impact(&self) -> u64 {
        self.layers.iter().flat_map(|l| &l.impacts).sum()
    }

    /// Batches that the budget holds.
    pub fn capacity(&self, budget_bytes: u64) -> usize {
        (budget_bytes / self.batch_bytes).min(self.batches() as u64) as usize
    }

    /// Impact of these many batches per layer.
    pub fn impact(&self, batches: &[usize]) -> u64 {
        self.layers.iter().zip(batches).flat_map(|(layer, &n)| &layer.impacts[..n]).sum()
    }

    /// What one unit of impact and one batch weigh in the solver's order: impact decides, then the number of batches
    /// (a place that no neuron needs yet is of use when neurons move), then evenness over the layers, the sum of squares.
    /// `None` where that leaves 128 bits.
    pub(super) fn weights(&self) -> Option<(i128, i128)> {
        let squares: i128 = self.layers.iter().map(|l| (l.impacts.len() as i128).pow(2)).sum();
        let batch = squares + 1;
        let impact = batch.checked_mul(self.batches() as i128 + 1)?;
        let total =
            self.layers.iter().flat_map(|l| &l.impacts).try_fold(0u64, |sum, &v| sum.checked_add(v)).map(i128::from)?;
        // Half of the range, so that sums of two stay inside.
        (total + 1).checked_mul(impact).filter(|&top| top < i128::MAX / 2).map(|_| (impact, batch))
    }
}

/// The largest divisor of `neurons` that is at most [`BATCH`], so that all batches weigh the same and a full layer is a
/// number of them; or the next that keeps the solver's table below [`MAX_CELLS`]. Every published model takes 64.
fn batch_size(layers: usize, neurons: usize) -> usize {
    let fits = |batch: usize| (layers as u64).pow(2) * (neurons / batch) as u64 <= MAX_CELLS;
    let divisor = |batch: &usize| neurons.is_multiple_of(*batch);
    let small = (1..=BATCH.min(neurons)).rev().find(divisor).unwrap_or(1);
    if fits(small) { small } else { (BATCH..neurons).filter(divisor).find(|&b| fits(b)).unwrap_or(neurons) }
}

/// Neurons by falling count, equal ones by their number.
pub fn ranking(counts: &[u64]) -> Vec<u32> {
    let mut neurons: Vec<u32> = (0..counts.len() as u32).collect();
    neurons.sort_by_key(|&n| (std::cmp::Reverse(counts[n as usize]), n));
    neurons
}

/// Share of a layer's neurons that make [`HOT_IMPACT`] of its activations, where nobody has counted them. PowerInfer
/// (section 3.1) saw 26 % in OPT-30B and 43 % in ReGLU LLaMA2-70B.
pub const HOT_SHARE: f64 = 0.4;
pub const HOT_IMPACT: f64 = 0.8;

/// Activations of the last layer over those of the first, where nobody has counted them. The first layers fire least
/// (powerinfer 3.1, Figure 5a: most of OPT-30B's first 24 layers fire below 1 %); by how much depends on the model.
pub const LAST_OVER_FIRST: f64 = 3.0;

/// Impacts of a model that was not profiled, `[layers][neurons]`. Within a layer the best share q of the neurons makes q^a
/// of the activations, a power law with a so that [`HOT_SHARE`] makes [`HOT_IMPACT`]; the layers' sums rise evenly to
/// [`LAST_OVER_FIRST`] times the first's, 10^9 on average. Neuron 0 has the most.
pub fn power_law(layers: usize, neurons: usize) -> Vec<Vec<u64>> {
    let a = HOT_IMPACT.ln() / HOT_SHARE.ln();
    let up_to = |n: usize| (n as f64 / neurons as f64).powf(a);
    let sum = |layer: usize| {
        let along = layer as f64 / (layers.max(2) - 1) as f64;
        2e9 * (1.0 + (LAST_OVER_FIRST - 1.0) * along) / (1.0 + LAST_OVER_FIRST)
    };
    (0..layers).map(|l| (0..neurons).map(|n| (sum(l) * (up_to(n + 1) - up_to(n))).round() as u64).collect()).collect()
}
