//! The placement problem as plain data.

use crate::cache::{PerTier, Tier};
use crate::ids::PublishedId;
use crate::scheduler::costs::StageCosts;

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
    /// What the first n batches on the device are worth, `[batches + 1]`, never falling: the sum of their impacts, or the picoseconds that they
    /// save a token.
    pub values: Vec<u64>,
    /// C_l in batches: either none or at least this many are on the device; 1 up to all of them.
    pub min_neurons: usize,
}

impl Problem {
    /// The problem for `counts`, how often each neuron fired, `[layers][neurons]`, which is its impact (powerinfer 6.2); a layer of which nothing
    /// is placed has none. `min_neurons` is C_l.
    ///
    /// # Errors
    /// The reason in words, where layers differ in size or all are empty, or the counts are too large to add up.
    pub fn new(counts: &[Vec<u64>], neuron_bytes: u64, min_neurons: usize) -> Result<Problem, String> {
        let neurons = counts.iter().map(Vec::len).max().unwrap_or(0);
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
        let neurons = counts.iter().map(Vec::len).max().unwrap_or(0);
        if neurons == 0 || neuron_bytes == 0 {
            return Err("there are no neurons to place".into());
        }
        if let Some(odd) = counts.iter().position(|c| !c.is_empty() && c.len() != neurons) {
            return Err(format!("layer {odd} has {} neurons and another {neurons}", counts[odd].len()));
        }
        let too_large = "the counts are too large to be added up";
        counts.iter().flatten().try_fold(0u64, |sum, &v| sum.checked_add(v)).ok_or(too_large)?;
        let layers: Vec<LayerProblem> = counts
            .iter()
            .map(|counts| {
                let ranked = ranking(counts);
                let sum = |neurons: &[PublishedId]| neurons.iter().map(|n| counts[n.index()]).sum();
                LayerProblem::by_impact(
                    ranked.chunks_exact(batch).map(sum).collect(),
                    min_neurons.div_ceil(batch).clamp(1, neurons / batch),
                )
            })
            .collect();
        let problem = Problem { batch, batch_bytes: neuron_bytes * batch as u64, layers };
        problem.weights().ok_or(too_large)?;
        Ok(problem)
    }

    /// The same problem, in which batches are worth the time that they save a token, for the numbers of neurons of `prices`. A layer that lies
    /// on the device whole is worth the fixed part of the host's lane, too.
    ///
    /// # Errors
    /// The reason in words, where the times are too large to be added up.
    pub fn by_time(mut self, prices: &Prices) -> Result<Problem, String> {
        for layer in &mut self.layers {
            let times_ns = prices.times_ns(layer, self.batch);
            let (mut least, mut value) = (times_ns[0], 0u64);
            // Where the device is the slower one, more neurons there save nothing. Differences are rounded, and not sums: equal ones stay equal.
            layer.values = Vec::with_capacity(times_ns.len());
            for &ns in &times_ns {
                value = value.saturating_add(((least - ns).max(0.0) * 1e3).round() as u64);
                least = least.min(ns);
                layer.values.push(value);
            }
        }
        self.weights().ok_or("the times are too large to be added up")?;
        Ok(self)
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

    /// Value of the first `batches[l]` batches of each layer l.
    pub fn value(&self, batches: &[usize]) -> u64 {
        self.layers.iter().zip(batches).map(|(layer, &n)| layer.values[n]).sum()
    }

    /// Weights of one unit of value and of one batch in the solver's order: value decides, then the number of batches (a slot that no
    /// neuron needs yet is of use when neurons move), then an even spread over the layers, by the sum of squares. `None` where 128 bits are
    /// too few.
    pub(super) fn weights(&self) -> Option<(i128, i128)> {
        let squares: i128 = self.layers.iter().map(|l| (l.impacts.len() as i128).pow(2)).sum();
        let batch = squares + 1;
        let value = batch.checked_mul(self.batches() as i128 + 1)?;
        let most = |layer: &LayerProblem| layer.values.last().copied().unwrap_or(0);
        let total = self.layers.iter().map(most).try_fold(0u64, u64::checked_add).map(i128::from)?;
        // Half of the range, so that sums of two stay inside.
        (total + 1).checked_mul(value).filter(|&top| top < i128::MAX / 2).map(|_| (value, batch))
    }
}

impl LayerProblem {
    /// A layer whose batches are worth their impacts.
    pub fn by_impact(impacts: Vec<u64>, min_neurons: usize) -> LayerProblem {
        let sums = impacts.iter().scan(0u64, |sum, &v| {
            *sum = sum.saturating_add(v);
            Some(*sum)
        });
        LayerProblem { values: std::iter::once(0).chain(sums).collect(), impacts, min_neurons }
    }
}

/// What a token takes, by the cost model and the neurons that it computes in the mean.
#[derive(Clone, Copy, Debug)]
pub struct Prices {
    costs: StageCosts,
    /// Neurons of a token for each unit of impact; infinite where every neuron is computed.
    scale: f64,
}

impl Prices {
    /// Prices of `problem`'s neurons for a token that computes the share `computed` of all neurons, 0 to 1: each as often as its share of the impact
    /// says, and at most once.
    pub fn new(problem: &Problem, costs: StageCosts, computed: f64) -> Prices {
        let batch = problem.batch as f64;
        let impacts = || problem.layers.iter().flat_map(|layer| &layer.impacts).map(|&v| v as f64);
        let wanted = computed * batch * problem.batches() as f64;
        let total = problem.total_impact() as f64;
        let computes = |scale: f64| impacts().map(|v| (v * scale).min(batch)).sum::<f64>();
        if computed >= 1.0 || total == 0.0 {
            return Prices { costs, scale: if computed >= 1.0 { f64::INFINITY } else { 0.0 } };
        }
        // What the most active neurons cannot have falls to the others; neurons that never fired get nothing.
        let mut scale = wanted / total;
        for _ in 0..50 {
            let found = computes(scale);
            if found >= wanted * 0.9999 {
                break;
            }
            scale *= wanted / found;
        }
        Prices { costs, scale }
    }

    /// Neurons of a batch of `batch` with this impact that a token computes.
    fn mean(&self, impact: u64, batch: usize) -> f64 {
        let batch = batch as f64;
        if self.scale.is_infinite() { batch } else { (impact as f64 * self.scale).min(batch) }
    }

    /// Time of a layer's FFN stage with its first n batches on the device, ns, `[batches + 1]`. The host has a part of every layer that is not there
    /// whole: neurons that never fired where they were counted may do so elsewhere.
    pub fn times_ns(&self, layer: &LayerProblem, batch: usize) -> Vec<f64> {
        let means: Vec<f64> = layer.impacts.iter().map(|&v| self.mean(v, batch)).collect();
        let all: f64 = means.iter().sum();
        // From the last batch on, so that none left is exactly 0.
        let mut on_host = vec![0.0; means.len() + 1];
        (0..means.len()).rev().for_each(|n| on_host[n] = on_host[n + 1] + means[n]);
        let stage = |(n, &host): (usize, &f64)| {
            let neurons = PerTier::all(host).with(Tier::Device, (all - host).max(0.0));
            if n < means.len() { self.costs.for_split(neurons) } else { self.costs.for_mean(neurons) }
        };
        on_host.iter().enumerate().map(stage).collect()
    }

    /// Time of all layers' FFN stages for a token, with the first `batches[l]` batches of each layer l on the device, ns.
    pub fn token_ns(&self, problem: &Problem, batches: &[usize]) -> f64 {
        problem.layers.iter().zip(batches).map(|(layer, &n)| self.times_ns(layer, problem.batch)[n]).sum()
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
