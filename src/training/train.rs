//! Training of a model's predictors (PowerInfer 5.1): how large each network is, in which order they are trained, and the file
//! with all of them. `network` trains a single network.
//!
//! **Size.** How much there is to predict in a layer is the entropy of its neurons' activity: it falls with sparsity and with skew
//! (neurons that are always or never active add nothing). The search for a network's rank begins at the one that its layer's
//! entropy suggests. The rank is doubled while that pays: while the neurons that need no longer be computed for the wanted recall
//! have more bytes than the network grows by, for both are read for every token. Where the first doubling does not pay, it is
//! halved while that does. PowerInfer stops when perplexity is within 0.1 % of the dense model's; at a fixed recall perplexity is
//! the same for all sizes, and their costs can be compared without running the model for each.
//!
//! **Bytes.** All networks together stay below a share of the model's bytes. Each may take a part of what is left, in proportion
//! to the square root of its layer's entropy among the networks still to come (the first bytes help most); what it leaves goes to
//! those after it. Networks that predict from their own layer's residual come first and count `OWN_WEIGHT` times.

use crate::cpu::{Kernels, ThreadPool};
use crate::error::{Error, Result};
use crate::formats::predictor_file::{self, Header, Table};
use crate::model::weights::Layer;
use crate::model::{Matrix, Model};
use crate::predictor::mlp::{self, Measured, Network, NetworkWriter, RANK_STEP};
use crate::predictor::{Calibration, Kind, Predictor};
use crate::training::histogram::{self, Histogram, measure};
use crate::training::network::{BATCH, Training, Weights, log_odds};
use crate::training::samples::Samples;
use serde_json::json;
use std::path::{Path, PathBuf};

/// A network's first rank is the hidden size times the mean entropy in bits, divided by this. One neuron in 20 active gives at most 0.3
/// bits, and a rank of hidden / 14.
const ENTROPY_PER_RANK: f64 = 4.0;
/// Weight of a network without look-ahead when bytes are divided: it decides what is computed. One that looks ahead decides what is
/// fetched, where errors cost less; and the farther ahead, the less can be predicted.
const OWN_WEIGHT: f64 = 3.0;
/// Passes over the samples for a network that is kept, and the share of its steps that a network gets which only tries a size.
const PASSES: usize = 8;
const TRIAL_SHARE: f64 = 0.25;
/// Smallest number of steps of a network that is kept: small sets of samples are seen more often.
const MIN_STEPS: usize = 400;
/// Version of the training, raised when it changes, so that networks of different versions are never put into one file.
const VERSION: u32 = 2;

/// What is to be trained or calibrated.
#[derive(Clone, Debug)]
pub struct Options {
    /// Numbers of layers to look ahead, besides 0.
    pub ahead: Vec<usize>,
    /// Share of the active neurons that the predictors are to find, 0 to 1.
    pub recall: f64,
    /// Bytes of all networks together, at most.
    pub budget: u64,
    /// Seed of initial weights and of the order of samples.
    pub seed: u64,
    /// Activation thresholds: |act(gate)| above which a neuron is active, `[layers]`; zeros for ReLU models.
    pub activation_thresholds: Vec<f32>,
    /// How the samples were made, for the header: for people, not read by the program.
    pub made: serde_json::Value,
}

/// Bytes of all of the model's matrices, whatever their type: the budget of the networks is a share of these.
pub fn model_bytes(model: &Model) -> u64 {
    let of_layer = |l: &Layer| l.mixer_matrices().map(Matrix::bytes).sum::<u64>() + l.ffn.bytes();
    let layers: u64 = model.layers.iter().map(of_layer).sum();
    let edges = model.embed.bytes() + if model.config.tied { 0 } else { model.head.bytes() };
    layers + edges + model.positions.map_or(0, |p| p.bytes())
}

/// What training and calibrating work with.
#[derive(Clone, Copy)]
pub struct Job<'a> {
    /// The model to predict.
    pub model: &'a Model,
    /// CPU kernels that scores are computed with.
    pub kernels: &'a Kernels,
    /// Threads to measure predictors with.
    pub threads: usize,
    /// Residuals and active neurons to learn from.
    pub samples: &'a Samples,
    /// What is to be trained.
    pub options: &'a Options,
    /// The predictor file to write.
    pub output: &'a Path,
}

/// Hash of everything that training depends on, besides the program: finished networks of an interrupted run are taken over by a run with
/// the same key. `tokens` is the text, of which at most `limit` tokens are sampled.
pub fn key(model: &Model, options: &Options, tokens: &[u32], limit: usize) -> u64 {
    let text = xxhash_rust::xxh3::xxh3_64(bytemuck::cast_slice(tokens));
    let all = format!(
        "{VERSION}|{}|{:?}|{text}|{limit}|{:?}|{}|{}|{}|{:?}",
        model.fingerprint(),
        model.quant,
        options.ahead,
        options.recall,
        options.budget,
        options.seed,
        options.activation_thresholds
    );
    xxhash_rust::xxh3::xxh3_64(all.as_bytes())
}

/// (layer, look-ahead) of the networks in the order in which they are trained: those with look-ahead 0 first.
pub fn networks(layers: usize, ahead: &[usize]) -> Vec<(usize, usize)> {
    let mut ahead: Vec<usize> = ahead.iter().copied().filter(|&k| k > 0 && k < layers).collect();
    ahead.sort_unstable();
    ahead.dedup();
    [0].into_iter().chain(ahead).flat_map(|k| (k..layers).map(move |l| (l, k))).collect()
}

/// Mean entropy of a neuron's activity, bits, from its `counts` in `tokens` tokens.
pub fn entropy(counts: &[u64], tokens: usize) -> f64 {
    let bits = |&count: &u64| {
        let p = (count as f64 / tokens.max(1) as f64).clamp(0.0, 1.0);
        [p, 1.0 - p].into_iter().filter(|p| *p > 0.0).map(|p| -p * p.log2()).sum::<f64>()
    };
    counts.iter().map(bits).sum::<f64>() / counts.len().max(1) as f64
}

/// The largest rank whose rows of `outer` are as long as those of `rank`: they are padded to cache lines.
fn fill(rank: usize) -> usize {
    let row = |rank: usize| crate::formats::rows::Quant::Q8.row_bytes(rank);
    let mut filled = rank.next_multiple_of(RANK_STEP);
    while filled > 0 && row(filled + RANK_STEP) == row(filled) {
        filled += RANK_STEP;
    }
    filled
}

/// The rank at which the search begins, for a mean entropy in bits.
fn first_rank(hidden: usize, entropy: f64) -> usize {
    fill((hidden as f64 * entropy / ENTROPY_PER_RANK).round() as usize / RANK_STEP * RANK_STEP)
}

/// A rank that was tried, and the share of neurons that it has computed at the wanted recall.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Trial {
    /// Hidden size of the network.
    pub rank: usize,
    /// Computed / all neurons at the wanted recall, 0 to 1.
    pub computed_share: f64,
}

/// Finds a network's rank, beginning with `first` (see the module); returns it with all trials. `try_rank` trains at a rank and returns the
/// computed share at the wanted recall; `cost` is what a rank costs in units of that share, infinite where the byte budget does not allow
/// it.
///
/// # Errors
/// Those of `try_rank`.
pub fn search(
    first: usize,
    cost: impl Fn(usize) -> f64,
    mut try_rank: impl FnMut(usize) -> Result<f64>,
) -> Result<(usize, Vec<Trial>)> {
    let fits = |rank: usize| cost(rank).is_finite();
    let smaller = |rank: usize| if rank <= RANK_STEP { 0 } else { fill(rank / 2 / RANK_STEP * RANK_STEP) };
    let mut rank = first;
    while rank > 0 && !fits(rank) {
        // In single steps, so that the byte budget is used up.
        rank -= RANK_STEP;
    }
    let mut trials: Vec<Trial> = Vec::new();
    let mut attempt = |rank: usize| -> Result<f64> {
        let computed_share = try_rank(rank)?;
        trials.push(Trial { rank, computed_share });
        Ok(computed_share)
    };
    // Total cost of a rank with its computed share.
    let total = |rank: usize, share: f64| cost(rank) + share;
    let mut share = attempt(rank)?;
    let mut grew = false;
    loop {
        let next = fill((2 * rank).max(RANK_STEP));
        if !fits(next) {
            break;
        }
        let found = attempt(next)?;
        if total(next, found) >= total(rank, share) {
            break;
        }
        (rank, share, grew) = (next, found, true);
    }
    while !grew && rank > 0 {
        let next = smaller(rank);
        let found = attempt(next)?;
        if total(next, found) > total(rank, share) {
            break;
        }
        (rank, share) = (next, found);
    }
    Ok((rank, trials))
}

/// Size and quality of a finished predictor of one layer.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Row {
    /// Layer that it predicts.
    pub layer: usize,
    /// Number of layers between the residual that it reads and `layer`; 0 is the layer's own.
    pub ahead: usize,
    /// Hidden size of the network; 0 for the sign predictor.
    pub rank: usize,
    /// Bytes of its weights.
    pub bytes: u64,
    /// SparseInfer's alpha that computes the same neurons, for the sign predictor; `None` for networks, and where none or all neurons are
    /// computed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alpha: Option<f32>,
    /// Probability from which on a neuron is computed.
    pub threshold: f32,
    /// Active and computed / active neurons.
    pub recall: f32,
    /// Active and computed / computed neurons.
    pub precision: f32,
    /// Computed / all neurons.
    pub computed_share: f32,
    /// Truly active / all neurons.
    pub active_share: f32,
}

/// Quality of all predictors of a model.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Summary {
    /// Active and computed / active neurons, over all layers, predicted with look-ahead 0.
    pub recall: f32,
    /// Active and computed / computed neurons, over the same.
    pub precision: f32,
    /// Computed / all neurons, over the same.
    pub computed_share: f32,
    /// One row for each layer and look-ahead.
    pub rows: Vec<Row>,
}

/// A finished network: its file, and its quality on the tokens held back.
struct NetworkPart {
    path: PathBuf,
    table: Table,
    judged: Judged,
}

/// Trains every network and writes the predictor file. Finished networks are kept in the directory `parts`; those that are there already
/// are not trained again. `step(done, all)` counts networks, `done` with fractions.
///
/// # Errors
/// Those of `step`; [`Error::Usage`] for a budget that is too small for the smallest networks; [`Error::Io`] where files cannot be written;
/// [`Error::Interrupted`] after Ctrl-C.
pub fn train(job: Job<'_>, parts: &Path, step: &dyn Fn(f64, usize) -> Result<()>) -> Result<Summary> {
    let Job { model, kernels, threads, samples, options, output } = job;
    let e = samples.extent;
    std::fs::create_dir_all(parts).map_err(Error::io("create", parts))?;
    let list = networks(e.layers, &options.ahead);
    let activity: Vec<Activity> = (0..e.layers).map(|layer| Activity::of(samples, layer)).collect();
    let entropies: Vec<f64> = activity.iter().map(|layer| layer.entropy).collect();
    // Even a layer without entropy gets some weight.
    let weight = |&(layer, ahead): &(usize, usize)| {
        (entropies[layer].sqrt() + 1e-2) * if ahead == 0 { OWN_WEIGHT } else { 1.0 / ahead as f64 }
    };
    let least = list.len() as u64 * mlp::file_bytes(e.hidden, e.experts * e.ffn, 0);
    if options.budget < least {
        return Err(Error::Usage(format!(
            "{} networks need {least} bytes at least, and {} are given",
            list.len(),
            options.budget
        )));
    }
    // Bytes left to divide, besides the bias that each network has.
    let mut left = options.budget - least;
    let mut finished: Vec<NetworkPart> = Vec::new();
    let mut pool = ThreadPool::new(threads);
    for (i, &at) in list.iter().enumerate() {
        let path = parts.join(format!("layer-{}-ahead-{}.{}", at.0, at.1, predictor_file::EXTENSION));
        let bias = mlp::file_bytes(e.hidden, e.experts * e.ffn, 0);
        if part_table(&path, model, at).is_none() {
            let share = weight(&at) / list[i..].iter().map(weight).sum::<f64>();
            let cap = (left as f64 * share) as u64 + bias;
            let first = match finished.iter().find(|p| (p.table.layer, p.table.ahead) == (at.0, 0)) {
                Some(own) if at.1 > 0 => own.table.rank,
                _ => first_rank(e.hidden, entropies[at.0]),
            };
            let progress = |done: f64| step(i as f64 + done, list.len());
            let size = Size { first, cap, ffn_bytes: token_bytes(model, at.0) };
            let network = one(samples, options, at, &activity[at.0].odds, size, &progress)?;
            mlp::write(&path, header(model, options, 0.5), &[network])?;
        }
        let table = part_table(&path, model, at)
            .ok_or_else(|| Error::Failed(format!("{} was changed while it was written", path.display())))?;
        let predictor = crate::predictor::open(&path, model)?;
        let held_back = e.train..e.tokens();
        let histogram =
            measure(&*predictor, model, kernels, &mut pool, samples, at, held_back, crate::interrupt::check)?;
        left = left.saturating_sub(mlp::file_bytes(e.hidden, e.experts * e.ffn, table.rank) - bias);
        finished.push(NetworkPart { path, table, judged: Judged::new(at, histogram, options.recall) });
        step((i + 1) as f64, list.len())?;
    }
    let mut writer = NetworkWriter::create(output, e.hidden, e.experts * e.ffn)?;
    let mut rows = Vec::new();
    for part in &finished {
        let table = Table { rank: part.table.rank, ..part.judged.table() };
        rows.push(part.judged.row(mlp::file_bytes(e.hidden, e.experts * e.ffn, table.rank), table.rank));
        writer.copy(&predictor_file::open(&part.path)?, table)?;
    }
    let judged: Vec<&Judged> = finished.iter().map(|p| &p.judged).collect();
    writer.finish(header(model, options, common_threshold(&judged, options.recall)))?;
    Ok(Summary::new(&judged, rows))
}

/// A predictor of one layer with one look-ahead, and the threshold at which it reaches the wanted recall.
///
/// Each layer reaches the recall by itself. One threshold for all layers would find as many neurons with fewer computed, but at the cost of
/// layers that rarely fire and whose few neurons matter most (docs/predictors.md shows the effect on the demo model).
struct Judged {
    at: (usize, usize),
    histogram: Histogram,
    calibration: Calibration,
    threshold: f32,
    measured: Measured,
}

impl Judged {
    fn new(at: (usize, usize), histogram: Histogram, recall: f64) -> Judged {
        let calibration = histogram.calibration();
        let threshold = histogram::threshold_for(&[(&histogram, &calibration)], recall);
        let measured = histogram.measured(calibration.score_at(threshold));
        Judged { at, histogram, calibration, threshold, measured }
    }

    fn table(&self) -> Table {
        let (scores, probabilities) = self.calibration.points();
        let Measured { recall, precision, computed_share } = self.measured;
        Table {
            layer: self.at.0,
            ahead: self.at.1,
            rank: 0,
            scores: scores.to_vec(),
            probabilities: probabilities.to_vec(),
            threshold: Some(self.threshold),
            recall,
            precision,
            computed_share,
        }
    }

    fn row(&self, bytes: u64, rank: usize) -> Row {
        let Measured { recall, precision, computed_share } = self.measured;
        let active_share = self.histogram.active() as f32 / self.histogram.all().max(1) as f32;
        let (layer, ahead) = self.at;
        let threshold = self.threshold;
        Row { layer, ahead, rank, bytes, alpha: None, threshold, recall, precision, computed_share, active_share }
    }
}

/// The one threshold for all layers at which they together reach the recall, for the header.
fn common_threshold(judged: &[&Judged], recall: f64) -> f32 {
    let own = judged.iter().filter(|j| j.at.1 == 0).map(|j| (&j.histogram, &j.calibration));
    histogram::threshold_for(&own.collect::<Vec<_>>(), recall)
}

impl Summary {
    fn new(judged: &[&Judged], rows: Vec<Row>) -> Summary {
        let (mut hit, mut active, mut predicted, mut all) = (0.0, 0.0, 0.0, 0.0);
        for j in judged.iter().filter(|j| j.at.1 == 0) {
            hit += j.measured.recall as f64 * j.histogram.active() as f64;
            active += j.histogram.active() as f64;
            predicted += j.measured.computed_share as f64 * j.histogram.all() as f64;
            all += j.histogram.all() as f64;
        }
        let share = |part: f64, of: f64, none: f64| if of == 0.0 { none as f32 } else { (part / of) as f32 };
        Summary {
            recall: share(hit, active, 1.0),
            precision: share(hit, predicted, 1.0),
            computed_share: share(predicted, all, 0.0),
            rows,
        }
    }
}

/// How often the neurons of a layer are active in the tokens to train on.
struct Activity {
    /// Mean entropy of a neuron of a token's experts, bits.
    entropy: f64,
    /// Log-odds of each neuron, `[experts, ffn]`.
    odds: Vec<f32>,
}

impl Activity {
    fn of(samples: &Samples, layer: usize) -> Activity {
        let e = samples.extent;
        let (uses, counts) = samples.pairs(layer, 0).counts(e.experts, 0..e.train);
        let of_experts = || counts.chunks_exact(e.ffn).zip(&uses);
        let bits: f64 = of_experts().map(|(counts, &uses)| entropy(counts, uses) * uses as f64).sum();
        let odds = of_experts().flat_map(|(counts, &uses)| log_odds(counts, uses)).collect();
        Activity { entropy: bits / uses.iter().sum::<usize>().max(1) as f64, odds }
    }
}

/// Limits and costs that decide a network's size.
struct Size {
    /// The rank to begin with.
    first: usize,
    /// Bytes in the file at most.
    cap: u64,
    /// Bytes of its layer's FFN that a token reads when all neurons are computed.
    ffn_bytes: u64,
}

/// Bytes of a layer's FFN that a token reads when all neurons are computed: of a mixture those of its experts.
fn token_bytes(model: &Model, layer: usize) -> u64 {
    let ffn = &model.layers[layer].ffn;
    match model.config.experts(layer) {
        Some(experts) => experts.used as u64 * ffn.cluster_bytes(),
        None => ffn.bytes(),
    }
}

/// Searches for a rank and trains a network of it. `progress` is called with 0 to 1.
fn one(
    samples: &Samples,
    options: &Options,
    at: (usize, usize),
    odds: &[f32],
    size: Size,
    progress: &dyn Fn(f64) -> Result<()>,
) -> Result<Network> {
    let e = samples.extent;
    let pairs = samples.pairs(at.0, at.1);
    let steps = (e.train * PASSES / BATCH).max(MIN_STEPS);
    let trial_steps = (steps as f64 * TRIAL_SHARE) as usize;
    // Each network has its own random numbers, whatever was trained before it.
    let seed = options.seed ^ ((at.0 as u64) << 32 | at.1 as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    // Progress is estimated for three trials, as two or three are usual.
    let (mut done, expected) = (0usize, (steps + 3 * trial_steps) as f64);
    let mut run = |rank: usize, steps: usize| -> Result<Training> {
        let mut training = Training::new(e.hidden, rank, odds, e.experts, seed);
        training.run(&pairs, 0..e.train, steps, seed, || {
            done += 1;
            progress((done as f64 / expected).min(0.99))
        })?;
        Ok(training)
    };
    let cost = |rank: usize| {
        let bytes = |neurons: usize| mlp::file_bytes(e.hidden, neurons, rank);
        let fits = rank <= e.ffn.next_multiple_of(RANK_STEP) && bytes(e.experts * e.ffn) <= size.cap;
        // Of a mixture a token reads the rows of its experts' neurons.
        if fits { bytes(e.used * e.ffn) as f64 / size.ffn_bytes as f64 } else { f64::INFINITY }
    };
    let try_rank = |rank: usize| {
        let mut training = run(rank, trial_steps)?;
        Ok(training.histogram(&pairs, e.train..e.tokens()).share_at(options.recall))
    };
    let (rank, trials) = search(size.first, cost, try_rank)?;
    tracing::info!("layer {} from {} before: rank {rank} of {trials:?}", at.0, at.1);
    let Weights { inner, inner_bias, outer, outer_bias } = run(rank, steps)?.weights();
    let calibration = Calibration::new(vec![0.0], vec![0.0]);
    let measured = Measured::default();
    Ok(Network { layer: at.0, ahead: at.1, inner, inner_bias, outer, outer_bias, calibration, measured })
}

/// The table of a finished part, if there is one.
fn part_table(path: &Path, model: &Model, at: (usize, usize)) -> Option<Table> {
    let file = predictor_file::open(path).ok()?;
    let mine = file.header.fingerprint == model.fingerprint() && file.verify(|_| ()).is_ok();
    file.header.tables.iter().find(|t| mine && (t.layer, t.ahead) == at).cloned()
}

/// The header of a predictor file of this model, without tables.
pub fn header(model: &Model, options: &Options, threshold: f32) -> Header {
    Header {
        fingerprint: model.fingerprint().to_owned(),
        model: model.config.name.clone(),
        kind: Kind::Mlp.name().into(),
        layers: model.config.layers().len(),
        hidden: model.config.hidden,
        ffn: model.config.widest_ffn(),
        experts: model.config.neurons() / model.config.widest_ffn(),
        threshold,
        activation_thresholds: options.activation_thresholds.clone(),
        tables: Vec::new(),
        made: json!({ "how": options.made, "recall": options.recall, "seed": options.seed }),
        sections: Vec::new(),
    }
}

/// Calibrates the sign predictor and writes its file: for each layer and look-ahead how often neurons of each score are active, and the
/// threshold (SparseInfer's alpha) at which it reaches the wanted recall. `step(done, all)` counts tables, `done` with fractions.
///
/// # Errors
/// Those of `step`; [`Error::Io`] where the file cannot be written.
pub fn calibrate_sign(job: Job<'_>, step: &dyn Fn(f64, usize) -> Result<()>) -> Result<Summary> {
    let Job { model, kernels, threads, samples, options, output } = job;
    let e = samples.extent;
    let sign = crate::predictor::Sign::uncalibrated(model);
    let list = networks(e.layers, &options.ahead);
    let mut pool = ThreadPool::new(threads);
    let mut found = Vec::new();
    for (i, &at) in list.iter().enumerate() {
        let mut done = 0.0;
        let batches = e.tokens().div_ceil(crate::cpu::MAX_COLUMNS) as f64;
        // A table of about fifty numbers cannot overfit hundreds of thousands of neurons, so no tokens need to be held back.
        let histogram = measure(&sign, model, kernels, &mut pool, samples, at, 0..e.tokens(), || {
            done += 1.0 / batches;
            step(i as f64 + done, list.len())
        })?;
        found.push(Judged::new(at, histogram, options.recall));
    }
    let judged: Vec<&Judged> = found.iter().collect();
    let mut header = header(model, options, common_threshold(&judged, options.recall));
    header.kind = Kind::Sign.name().into();
    header.tables = found.iter().map(Judged::table).collect();
    crate::formats::sections::Writer::create(output)?.finish(header)?;
    let row = |j: &Judged| {
        let score = j.calibration.score_at(j.threshold);
        let alpha = score.is_finite().then(|| crate::predictor::sign::alpha_of_score(score));
        Row { alpha, ..j.row(sign.weight_bytes(j.at.0, j.at.1), 0) }
    };
    Ok(Summary::new(&judged, found.iter().map(row).collect()))
}
