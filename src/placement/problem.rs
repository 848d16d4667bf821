//! The placement problem as plain data.

use crate::ids::PublishedId;

/// Neurons of a batch: "64 neurons with similar impacts from a layer into a single batch" (powerinfer 6.3.3).
const BATCH: usize = 64;
/// Largest number of cells of the solver's table (layers times batches of the budget), 4 bytes each. An 80-layer model with 448 batches a
/// layer has 2.9 million; a file that gives more is probably damaged, and is solved in larger batches.
const MAX_CELLS: u64 = 1 << 26;

/// The problem: how many batches of each layer, best first, are to lie on the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Neurons per batch; divides the neurons of a layer.
    pub batch: usize,
    /// Bytes that a batch takes.
    pub batch_bytes: u64,
    /// One entry per layer, `[layers]`.
    pub layers: Vec<LayerProblem>,
}

/// What a layer adds to the problem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerProblem {
    /// Impact v of each batch, in falling order, `[batches]`.
    pub impacts: Vec<u64>,
    /// C_l in batches: either none or at least this many are on the device; 1 up to all of them.
    pub min_neurons: usize,
}

impl Problem {
    /// The problem for `counts`, how often each neuron fired, `[layers][neurons]`, which is its impact (powerinfer 6.2). `min_neurons` is
    /// C_l.
    ///
    /// # Errors
    /// The reason in words, where layers differ in size or are empty, or the counts are too large to add up.
    pub fn new(counts: &[Vec<u64>], neuron_bytes: u64, min_neurons: usize) -> Result<Problem, String> {
        let neurons = counts.first().map_or(0, Vec::len);
        Problem::in_batches(counts, neuron_bytes, min_neurons, batch_size(counts.len(), neurons.max(1)))
    }

    /// As [`Problem::new`], in batches of `batch` neurons, which divides those of a layer: experts are placed one by one.
    ///
    /// # Errors
    /// Those of [`Problem::new`].
    pub fn in_batches(
        counts: &[Vec<u64>],
        neuron_bytes: u64,
        min_neurons: usize,
        batch: usize,
    ) -> Result<Problem, String> {
        let neurons = counts.first().map_or(0, Vec::len);
        if neurons == 0 || neuron_bytes == 0 {
            return Err("there are no neurons to place".into());
        }
        if let Some(odd) = counts.iter().position(|c| c.len() != neurons) {
            return Err(format!("layer {odd} has {} neurons and layer 0 {neurons}", counts[odd].len()));
        }
        let too_large = "the counts are too large to be added up";
        counts.iter().flatten().try_fold(0u64, |sum, &v| sum.checked_add(v)).ok_or(too_large)?;
        let layers: Vec<LayerProblem> = counts
            .iter()
            .map(|counts| {
                let ranked = ranking(counts);
                let sum = |neurons: &[PublishedId]| neurons.iter().map(|n| counts[n.index()]).sum();
                LayerProblem {
                    impacts: ranked.chunks_exact(batch).map(sum).collect(),
                    min_neurons: min_neurons.div_ceil(batch).clamp(1, neurons / batch),
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

    /// Number of batches that `budget_bytes` hold, at most all.
    pub fn capacity(&self, budget_bytes: u64) -> usize {
        (budget_bytes / self.batch_bytes).min(self.batches() as u64) as usize
    }

    /// Impact of the first `batches[l]` batches of each layer l.
    pub fn impact(&self, batches: &[usize]) -> u64 {
        self.layers.iter().zip(batches).flat_map(|(layer, &n)| &layer.impacts[..n]).sum()
    }

    /// Weights of one unit of impact and of one batch in the solver's order: impact decides, then the number of batches (a slot that no
    /// neuron needs yet is of use when neurons move), then an even spread over the layers, by the sum of squares. `None` where 128 bits are
    /// too few.
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

/// The largest divisor of `neurons` that is at most `BATCH`, so that all batches have the same size and a full layer is a whole number of
/// them; or the next divisor that keeps the solver's table below `MAX_CELLS`. For every published model it is 64.
fn batch_size(layers: usize, neurons: usize) -> usize {
    let fits = |batch: usize| (layers as u64).pow(2) * (neurons / batch) as u64 <= MAX_CELLS;
    let divisor = |batch: &usize| neurons.is_multiple_of(*batch);
    let small = (1..=BATCH.min(neurons)).rev().find(divisor).unwrap_or(1);
    if fits(small) { small } else { (BATCH..neurons).filter(divisor).find(|&b| fits(b)).unwrap_or(neurons) }
}

/// Neurons in the order of falling counts; of equal counts the lower number comes first.
pub fn ranking(counts: &[u64]) -> Vec<PublishedId> {
    let mut neurons: Vec<PublishedId> = (0..counts.len()).map(PublishedId::new).collect();
    neurons.sort_by_key(|&n| (std::cmp::Reverse(counts[n.index()]), n));
    neurons
}

/// Assumed share of a layer's neurons that make `HOT_IMPACT` of its activations, for a model without a profile. PowerInfer (section 3.1)
/// saw 26 % in OPT-30B and 43 % in ReGLU LLaMA2-70B.
const HOT_SHARE: f64 = 0.4;
const HOT_IMPACT: f64 = 0.8;

/// Assumed activations of the last layer / those of the first, for a model without a profile. The first layers fire least (powerinfer 3.1,
/// Figure 5a: most of OPT-30B's first 24 layers fire below 1 %); by how much depends on the model.
const LAST_OVER_FIRST: f64 = 3.0;

/// Assumed impacts of a model without a profile, `[layers][neurons]`, in falling order. In a layer the share q of the most active neurons
/// makes q^a of the activations, a power law with a such that 40 % of the neurons make 80 %. The layers' sums rise evenly to three times
/// that of the first, and are 10^9 on average.
pub fn power_law(layers: usize, neurons: usize) -> Vec<Vec<u64>> {
    let a = HOT_IMPACT.ln() / HOT_SHARE.ln();
    let up_to = |n: usize| (n as f64 / neurons as f64).powf(a);
    let sum = |layer: usize| {
        let along = layer as f64 / (layers.max(2) - 1) as f64;
        2e9 * (1.0 + (LAST_OVER_FIRST - 1.0) * along) / (1.0 + LAST_OVER_FIRST)
    };
    (0..layers).map(|l| (0..neurons).map(|n| (sum(l) * (up_to(n + 1) - up_to(n))).round() as u64).collect()).collect()
}
