//! The `mlp` predictor of a sparse synthetic model, derived from the model's construction, and statistics of both.
//!
//! A gate matrix is low-rank plus noise, and its low-rank part is the network: the inner layer projects the residual onto the
//! latent space and the constant direction, the outer one holds each gate's coordinates there. Nothing is trained; random tokens
//! show where the residuals of each layer lie in the latent space, which probability a score means, and how good the predictor is.
//! The neurons of a mixture are those of all experts, and those count that a token's experts have.

use super::noise::{Noise, Stream, dot};
use super::shape::{RECIPE, Shape};
use super::sparse::{LATENT, Sparse};
use crate::cpu::{Kernels, ThreadPool};
use crate::engine::{Engine, Logits, Observer, Seen, SeenExperts};
use crate::error::{Error, Result};
use crate::formats::neuron_store::NeuronStore;
use crate::formats::predictor_file::{self, Header, Table};
use crate::formats::rows::{self, Quant};
use crate::model::config::ModelConfig;
use crate::model::source::Source;
use crate::model::{ExpertWeights, FfnWeights, KvCache, KvType, Model};
use crate::pack::{self, PackOptions};
use crate::predictor::mlp::{Measured, Network, NetworkWriter, RANK_STEP, normalise};
use crate::predictor::{self, Calibration, Predictor, Scratch, Tools};
use rayon::prelude::*;
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Hidden size of the networks, unless a larger one is wanted.
pub const RANK: usize = LATENT + 1;
/// Numbers of layers that the predictors look ahead.
const AHEADS: [usize; 4] = [0, 1, 2, 4];
/// Sequences of random tokens: the first four calibrate, the last two measure. Every neuron of a layer counts for every token, so a few
/// sequences give millions of cases per layer.
const SEQUENCES: usize = 6;
const CALIBRATING: usize = 4;
const SEQUENCE_TOKENS: usize = 128;
/// Added to the inner values, which have deviation 1, so that the network's ReLU leaves nearly all of them (but one in some thousand)
/// unchanged. A larger number would cost precision where they are rounded to eight bits.
const LIFT: f32 = 3.5;
/// The inner value of the constant direction: about as large as the lifted values, with which it shares a rounding scale.
const CONSTANT_VALUE: f32 = 3.5;
/// Recall that the threshold must reach: over all layers for each look-ahead, and in the worst layer from its own residual.
const RECALL: f64 = 0.965;
const WORST_RECALL: f64 = 0.955;
/// Scores are counted in bins of this width up to this magnitude, in deviations of a gate.
const BIN: f32 = 0.005;
const BINS_TO: f32 = 8.0;
const BINS: usize = (2.0 * BINS_TO / BIN) as usize;

/// Measured properties of a sparse synthetic model and its predictor, on random tokens.
#[derive(Clone, Debug, Serialize)]
pub struct Statistics {
    /// Mean share of neurons that are active for a token, over all layers.
    pub active_share: f64,
    /// The same share of each layer, `[layers]`.
    pub active_share_by_layer: Vec<f64>,
    /// Share of all activations that come from the most active 40 % of a layer's neurons, mean over layers.
    pub top_40_share: f64,
    /// Mean Jaccard distance between the active sets of neighbouring tokens.
    pub neighbour_jaccard: f64,
    /// Tokens that all shares were counted over.
    pub tokens: usize,
    /// Probability from which on the predictor lets a neuron be computed.
    pub threshold: f32,
    /// Quality of the predictor for each number of layers that it looks ahead.
    pub predictor: Vec<Distance>,
    /// Bytes of predictor weights that a token reads.
    pub predictor_bytes_per_token: u64,
    /// Bytes of model weights that a token reads when all neurons are computed.
    pub model_bytes_per_token: u64,
}

/// Quality of the predictor from `ahead` layers before, over all layers that have so many before them, on tokens that it was not calibrated
/// with.
#[derive(Clone, Debug, Serialize)]
pub struct Distance {
    /// Number of layers between the residual that it reads and the layer that it predicts; 0 is the layer's own.
    pub ahead: usize,
    /// Active and computed / active neurons.
    pub recall: f64,
    /// Active and computed / computed neurons.
    pub precision: f64,
    /// Computed / all neurons.
    pub computed_share: f64,
    /// Recall in the layer where it is smallest.
    pub worst_recall: f64,
}

/// Packs a GGUF that was just written into a temporary store beside it, with which its predictor is calibrated. The store has the GGUF's
/// fingerprint, as every store that is packed from it. `progress` is called with bytes, as in [`pack::pack`].
///
/// # Errors
/// Those of packing.
pub fn pack_draft(gguf: &Path, progress: &(dyn Fn(u64, u64) -> Result<()> + Sync)) -> Result<Draft> {
    let source = Source::open(gguf, None)?;
    let draft = Draft::beside(gguf);
    pack::pack(&source, draft.path(), &PackOptions { types: pack::Types::natural(&source)?, orders: None }, progress)?;
    Ok(draft)
}

/// A store, or a mixture in the file that it lies in.
fn open(path: &Path) -> Result<Model> {
    if NeuronStore::is_one(path) { Model::open(path) } else { Model::in_place(Source::open(path, None)?) }
}

/// Writes the predictor of the sparse model in `store` (of a mixture: its GGUF), which was made from `shape`, to `path`, and returns statistics of both.
/// `progress(done, total)` is called with tokens.
///
/// # Errors
/// Those of `progress`; [`Error::Usage`] for a shape without `active`; [`Error::Io`] and [`Error::BadFile`] for the files.
pub fn write_predictor(
    shape: &Shape,
    store: &Path,
    path: &Path,
    threads: usize,
    progress: &dyn Fn(u64, u64) -> Result<()>,
) -> Result<Statistics> {
    write_predictor_of_rank(shape, store, path, (threads, RANK), progress)
}

/// As [`write_predictor`], with networks of `rank` instead of the smallest that serves: the rest of each has bytes and no effect on its scores,
/// so that predicting costs what it costs a trained network of that rank.
///
/// # Errors
/// As [`write_predictor`]; [`Error::Usage`] for a rank that is below the smallest or no multiple of [`RANK_STEP`].
pub fn write_predictor_of_rank(
    shape: &Shape,
    store: &Path,
    path: &Path,
    (threads, rank): (usize, usize),
    progress: &dyn Fn(u64, u64) -> Result<()>,
) -> Result<Statistics> {
    if rank < RANK || !rank.is_multiple_of(RANK_STEP) {
        return Err(Error::Usage(format!("a rank of {rank}: take a multiple of {RANK_STEP}, {RANK} or more")));
    }
    let Some(active) = shape.active else {
        return Err(Error::Usage("only a model with --active has a predictor".into()));
    };
    let model = open(store)?;
    let sparse = Sparse::new(&model.config, Noise { seed: shape.seed }, active);
    let mut engine = Engine::new(open(store)?, threads, Kernels::best());
    let vocab = model.config.vocab as u64;
    let sequences: Vec<Vec<u32>> = (0..SEQUENCES)
        .map(|s| {
            let mut rng = Noise { seed: shape.seed }.rng(Stream::Tokens, 0, s, 0);
            (0..SEQUENCE_TOKENS).map(|_| rng.below(vocab) as u32).collect()
        })
        .collect();
    let total = ((CALIBRATING + SEQUENCES) * SEQUENCE_TOKENS) as u64;
    let mut done = 0;
    let mut observe = |engine: &mut Engine, tokens: &[u32], observer: &mut dyn Observer| -> Result<()> {
        let mut kv = KvCache::new(&engine.model.config, tokens.len(), KvType::F16)?;
        engine.forward_observed(&mut kv, tokens, Logits::None, observer);
        done += tokens.len() as u64;
        progress(done, total)
    };

    let mut places = Places::new(&sparse, model.config.layers().len());
    for tokens in &sequences[..CALIBRATING] {
        observe(&mut engine, tokens, &mut places)?;
    }
    let networks = networks(&model, &sparse, &places);
    let header = |threshold: f32| Header {
        fingerprint: model.fingerprint().to_owned(),
        model: model.config.name.clone(),
        kind: String::new(),
        layers: model.config.layers().len(),
        hidden: model.config.hidden,
        ffn: model.config.widest_ffn(),
        experts: model.config.neurons() / model.config.widest_ffn(),
        threshold,
        activation_thresholds: vec![0.0; model.config.layers().len()],
        tables: Vec::new(),
        made: serde_json::json!({
            "by": "synth", "recipe": RECIPE, "seed": shape.seed, "active": active,
            "calibration_tokens": CALIBRATING * SEQUENCE_TOKENS,
            "measured_tokens": (SEQUENCES - CALIBRATING) * SEQUENCE_TOKENS,
        }),
        sections: Vec::new(),
    };
    // The predictor is calibrated from a draft of its file, so that scores include the rounding of weights; then the tables are added.
    let draft = Draft::beside(path);
    let mut writer = NetworkWriter::create(draft.path(), model.config.hidden, model.config.neurons())?;
    networks.into_iter().try_for_each(|network| writer.add(&network.widened(rank)))?;
    writer.finish(header(0.5))?;
    let mut tally = Tally { rank, ..Tally::new(&model, predictor::open(draft.path(), &model)?, threads) };
    for (s, tokens) in sequences.iter().enumerate() {
        tally.calibrating = s < CALIBRATING;
        observe(&mut engine, tokens, &mut tally)?;
    }
    let (threshold, tables) = tally.tables();
    let mut writer = NetworkWriter::create(path, model.config.hidden, model.config.neurons())?;
    let draft_file = predictor_file::open(draft.path())?;
    for table in &tables {
        writer.copy(&draft_file, table.clone())?;
    }
    writer.finish(header(threshold))?;
    Ok(tally.statistics(threshold, &tables))
}

/// A temporary file that is removed when this is dropped.
pub struct Draft(PathBuf);

impl Draft {
    /// Path of the temporary file.
    pub fn path(&self) -> &Path {
        &self.0
    }

    fn beside(path: &Path) -> Draft {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(".draft");
        Draft(path.with_file_name(name))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Observer that sums up the coordinates of each layer's normalised residuals in the latent space and along the constant direction.
struct Places<'a> {
    sparse: &'a Sparse,
    /// Sums over tokens, and of squares, `[layers][RANK]`.
    sums: Vec<[f64; RANK]>,
    squares: Vec<[f64; RANK]>,
    tokens: Vec<u64>,
}

impl Places<'_> {
    fn new(sparse: &Sparse, layers: usize) -> Places<'_> {
        Places { sparse, sums: vec![[0.0; RANK]; layers], squares: vec![[0.0; RANK]; layers], tokens: vec![0; layers] }
    }

    fn mean(&self, layer: usize) -> [f32; RANK] {
        self.sums[layer].map(|sum| (sum / self.tokens[layer] as f64) as f32)
    }

    /// Mean deviation of a latent coordinate.
    fn deviation(&self, layer: usize) -> f32 {
        let n = self.tokens[layer] as f64;
        let pairs = self.sums[layer].iter().zip(&self.squares[layer]).take(LATENT);
        let variance: f64 = pairs.map(|(sum, square)| square / n - (sum / n).powi(2)).sum();
        (variance / LATENT as f64).sqrt() as f32
    }
}

impl Observer for Places<'_> {
    fn layer(&mut self, seen: &Seen<'_>) {
        let hidden = seen.residual.len() / seen.n;
        let mut normed = vec![0.0; hidden];
        for residual in seen.residual.chunks_exact(hidden) {
            normalise(residual, &mut normed);
            for (k, direction) in self.sparse.basis().enumerate() {
                let value = dot(direction, &normed) as f64;
                self.sums[seen.layer][k] += value;
                self.squares[seen.layer][k] += value * value;
            }
        }
        self.tokens[seen.layer] += seen.n as u64;
    }
}

/// One network per layer and look-ahead; tables and measures are added later.
fn networks(model: &Model, sparse: &Sparse, places: &Places<'_>) -> Vec<Network> {
    let c = &model.config;
    (0..c.layers().len())
        .flat_map(|layer| {
            let gates = gates(model, sparse, layer);
            let aheads = aheads(c).filter(move |&ahead| ahead <= layer);
            aheads.map(move |ahead| network(c.hidden, sparse, places, &gates, layer, ahead)).collect::<Vec<_>>()
        })
        .collect()
}

/// Numbers of layers that a model's predictor looks ahead: of a mixture none.
fn aheads(c: &ModelConfig) -> impl Iterator<Item = usize> + use<> {
    let mixture = c.is_mixture();
    AHEADS.into_iter().filter(move |&ahead| ahead == 0 || !mixture)
}

/// Coordinates of each gate along the basis, after its rounding, `[neurons, RANK]`.
fn gates(model: &Model, sparse: &Sparse, layer: usize) -> Vec<f32> {
    let (layer, ffn) = (&model.layers[layer], model.config.widest_ffn());
    let row = |neuron: usize| match &layer.ffn {
        FfnWeights::Experts(ExpertWeights { experts, .. }) => {
            let gates = &experts[neuron / ffn].input.parts()[0];
            (gates.quant, gates.row(neuron % ffn))
        }
        _ => {
            let part = layer.block().gate_or_up();
            (part.quant, layer.neurons().part(part, neuron))
        }
    };
    let mut along = vec![0.0; model.config.neurons() * RANK];
    along.par_chunks_exact_mut(RANK).enumerate().for_each_init(
        || vec![0.0; model.config.hidden],
        |gate, (neuron, along)| {
            let (quant, row) = row(neuron);
            rows::decode(quant, row, gate);
            along.iter_mut().zip(sparse.basis()).for_each(|(a, direction)| *a = dot(direction, gate));
        },
    );
    along
}

fn network(hidden: usize, sparse: &Sparse, places: &Places<'_>, gates: &[f32], layer: usize, ahead: usize) -> Network {
    let (from, to) = (places.mean(layer - ahead), places.mean(layer));
    let deviation = places.deviation(layer - ahead);
    let constant = from[LATENT];
    // The mean change of the residual by the layers between, in the scale of the earlier residual.
    let drift: [f32; RANK] = std::array::from_fn(|k| to[k] * constant / to[LATENT] - from[k]);
    // The latent part of a gate is a score of deviation 1.
    let latent: f32 = gates.chunks_exact(RANK).map(|gate| dot(&gate[..LATENT], &gate[..LATENT])).sum();
    let unit = 1.0 / (deviation * (latent / (gates.len() / RANK) as f32).sqrt());

    let mut inner = Vec::with_capacity(RANK * hidden);
    for (k, direction) in sparse.basis().enumerate() {
        let scale = if k < LATENT { 1.0 / deviation } else { CONSTANT_VALUE / constant };
        inner.extend(direction.iter().map(|v| v * scale));
    }
    let mut inner_bias = vec![LIFT; RANK];
    inner_bias[LATENT] = 0.0;
    let mut outer = Vec::with_capacity(gates.len());
    let mut outer_bias = Vec::with_capacity(gates.len() / RANK);
    let (mut row, mut rounded) = (vec![0; Quant::Q8.row_bytes(RANK)], [0.0; RANK]);
    for gate in gates.chunks_exact(RANK) {
        let factors: [f32; RANK] =
            std::array::from_fn(|k| gate[k] * unit * if k < LATENT { deviation } else { constant / CONSTANT_VALUE });
        // Subtracts what `LIFT` adds, computed from the rounded weights of the file.
        rows::encode(Quant::Q8, &factors, &mut row);
        rows::decode(Quant::Q8, &row, &mut rounded);
        outer_bias.push(unit * dot(gate, &drift) - LIFT * rounded[..LATENT].iter().sum::<f32>());
        outer.extend(factors);
    }
    let calibration = Calibration::step(0.0);
    Network { layer, ahead, inner, inner_bias, outer, outer_bias, calibration, measured: Measured::default() }
}

/// Counts of one layer and look-ahead: of all neurons and of the active ones, per bin of scores.
struct Bins {
    all: Vec<u64>,
    active: Vec<u64>,
}

impl Bins {
    fn new() -> Bins {
        Bins { all: vec![0; BINS], active: vec![0; BINS] }
    }

    fn add(&mut self, score: f32, active: bool) {
        let bin = (((score + BINS_TO) / BIN) as usize).min(BINS - 1);
        self.all[bin] += 1;
        self.active[bin] += u64::from(active);
    }

    fn centre(bin: usize) -> f32 {
        (bin as f32 + 0.5) * BIN - BINS_TO
    }

    fn fit(&self) -> Calibration {
        let bins: Vec<(f32, f64, f64)> =
            (0..BINS).map(|b| (Bins::centre(b), self.active[b] as f64, self.all[b] as f64)).collect();
        Calibration::fit(&bins)
    }

    /// Counts of all neurons, and of those that are computed if the score must be at least `score`.
    fn from(&self, score: f32) -> Share {
        let first = (0..BINS).find(|&b| Bins::centre(b) >= score).unwrap_or(BINS);
        Share {
            all: self.all.iter().sum(),
            active: self.active.iter().sum(),
            computed: self.all[first..].iter().sum(),
            hit: self.active[first..].iter().sum(),
        }
    }
}

#[derive(Clone, Copy, Default)]
struct Share {
    all: u64,
    active: u64,
    computed: u64,
    hit: u64,
}

impl Share {
    fn plus(self, o: Share) -> Share {
        Share {
            all: self.all + o.all,
            active: self.active + o.active,
            computed: self.computed + o.computed,
            hit: self.hit + o.hit,
        }
    }

    fn recall(self) -> f64 {
        self.hit as f64 / self.active.max(1) as f64
    }

    fn precision(self) -> f64 {
        self.hit as f64 / self.computed.max(1) as f64
    }

    fn computed_share(self) -> f64 {
        self.computed as f64 / self.all.max(1) as f64
    }
}

/// Observer that counts active neurons and the scores that the predictor gives them.
struct Tally<'a> {
    model: &'a Model,
    predictor: Arc<dyn Predictor>,
    rank: usize,
    pool: ThreadPool,
    kernels: Kernels,
    scratch: Scratch,
    calibrating: bool,
    /// Residuals of the layers so far, the latest last, as many as the farthest look-ahead needs.
    residuals: VecDeque<Vec<f32>>,
    scores: Vec<f32>,
    /// By layer and look-ahead: counts over the calibrating tokens, and over the measured ones.
    bins: BTreeMap<(usize, usize), [Bins; 2]>,
    /// How often each neuron was active, `[layers][neurons]`, and how many tokens had it, all neurons together.
    active: Vec<Vec<u64>>,
    had: Vec<u64>,
    tokens: Vec<u64>,
    /// Sum of the Jaccard distances between neighbouring tokens, and their number.
    jaccard: (f64, u64),
}

impl<'a> Tally<'a> {
    fn new(model: &'a Model, predictor: Arc<dyn Predictor>, threads: usize) -> Tally<'a> {
        let c = &model.config;
        Tally {
            model,
            predictor,
            rank: RANK,
            pool: ThreadPool::new(threads),
            kernels: Kernels::best(),
            scratch: Scratch::default(),
            calibrating: true,
            residuals: VecDeque::new(),
            scores: Vec::new(),
            bins: BTreeMap::new(),
            active: vec![vec![0; c.neurons()]; c.layers().len()],
            had: vec![0; c.layers().len()],
            tokens: vec![0; c.layers().len()],
            jaccard: (0.0, 0),
        }
    }

    /// The highest threshold with enough recall, and the tables with recall and precision at it.
    fn tables(&self) -> (f32, Vec<Table>) {
        let fits: BTreeMap<_, _> = self.bins.iter().map(|(&at, bins)| (at, bins[0].fit())).collect();
        let enough = |threshold: f32| {
            let shares = |ahead: usize| {
                let own = self.bins.iter().filter(move |((_, a), _)| *a == ahead);
                own.map(|(at, bins)| bins[0].from(fits[at].score_at(threshold)))
            };
            let worst = shares(0).map(Share::recall).fold(1.0, f64::min);
            let ahead = |a: usize| shares(a).reduce(Share::plus).is_none_or(|sum| sum.recall() >= RECALL);
            worst >= WORST_RECALL && aheads(&self.model.config).all(ahead)
        };
        // In steps of a hundredth: finer differences are within the noise of the measurement.
        let threshold = (1..=50).rev().map(|i| i as f32 / 100.0).find(|&t| enough(t)).unwrap_or(0.01);
        let tables = fits.iter().map(|(&(layer, ahead), fit)| {
            let (scores, probabilities) = fit.points();
            let share = self.bins[&(layer, ahead)][1].from(fit.score_at(threshold));
            Table {
                layer,
                ahead,
                rank: self.rank,
                scores: scores.to_vec(),
                probabilities: probabilities.to_vec(),
                threshold: None,
                recall: share.recall() as f32,
                precision: share.precision() as f32,
                computed_share: share.computed_share() as f32,
            }
        });
        (threshold, tables.collect())
    }

    fn statistics(&self, threshold: f32, tables: &[Table]) -> Statistics {
        let c = &self.model.config;
        let used = if c.is_mixture() { c.most_used_experts() } else { c.widest_ffn() } as u64;
        let shares: Vec<f64> = (self.active.iter().zip(&self.had))
            .map(|(active, &had)| active.iter().sum::<u64>() as f64 / had as f64)
            .collect();
        let top: f64 = (self.active.iter())
            .map(|active| {
                let mut sorted = active.clone();
                sorted.sort_unstable_by(|a, b| b.cmp(a));
                let top: u64 = sorted[..c.neurons() * 2 / 5].iter().sum();
                top as f64 / sorted.iter().sum::<u64>().max(1) as f64
            })
            .sum();
        let distances = aheads(c).filter(|&ahead| ahead < c.layers().len()).map(|ahead| {
            let own = tables.iter().filter(|t| t.ahead == ahead);
            let share = |t: &Table| {
                let fit = Calibration::new(t.scores.clone(), t.probabilities.clone());
                self.bins[&(t.layer, ahead)][1].from(fit.score_at(threshold))
            };
            let sum = own.clone().map(share).fold(Share::default(), Share::plus);
            Distance {
                ahead,
                recall: sum.recall(),
                precision: sum.precision(),
                computed_share: sum.computed_share(),
                worst_recall: own.map(|t| t.recall as f64).fold(1.0, f64::min),
            }
        });
        Statistics {
            active_share: shares.iter().sum::<f64>() / c.layers().len() as f64,
            active_share_by_layer: shares,
            top_40_share: top / c.layers().len() as f64,
            neighbour_jaccard: self.jaccard.0 / self.jaccard.1.max(1) as f64,
            tokens: self.tokens[0] as usize,
            threshold,
            predictor: distances.collect(),
            predictor_bytes_per_token: (0..c.layers().len()).map(|l| self.predictor.weight_bytes(l, 0)).sum(),
            model_bytes_per_token: self.model.bytes_outside_ffn()
                + self.model.layers.iter().map(|l| used * l.ffn.cluster_bytes()).sum::<u64>(),
        }
    }

    /// Counts a layer's neurons: which `fired`, `[n, neurons]`, of those that a token `has`, given its number and the neuron's.
    fn count(&mut self, layer: usize, n: usize, fired: &[bool], has: impl Fn(usize, usize) -> bool) {
        let neurons = self.model.config.neurons();
        for token in fired.chunks_exact(neurons) {
            self.active[layer].iter_mut().zip(token).for_each(|(count, &fired)| *count += u64::from(fired));
        }
        self.tokens[layer] += n as u64;
        for (a, b) in fired.chunks_exact(neurons).zip(fired.chunks_exact(neurons).skip(1)) {
            let count = |f: fn(bool, bool) -> bool| a.iter().zip(b).filter(|&(&a, &b)| f(a, b)).count();
            let (both, either) = (count(|a, b| a && b), count(|a, b| a || b));
            if either > 0 {
                self.jaccard = (self.jaccard.0 + 1.0 - both as f64 / either as f64, self.jaccard.1 + 1);
            }
        }
        self.scores.resize(n * neurons, 0.0);
        for ahead in aheads(&self.model.config).filter(|&ahead| ahead <= layer) {
            let residual = &self.residuals[self.residuals.len() - 1 - ahead];
            let (pool, kernels, scratch) = (&mut self.pool, &self.kernels, &mut self.scratch);
            let mut tools = Tools { model: self.model, pool, kernels, scratch };
            self.predictor.score(&mut tools, layer, ahead, residual, n, &mut self.scores);
            let bins = self.bins.entry((layer, ahead)).or_insert_with(|| [Bins::new(), Bins::new()]);
            let bins = &mut bins[usize::from(!self.calibrating)];
            let mut had = 0;
            for (at, (&score, &fired)) in self.scores.iter().zip(fired).enumerate() {
                if has(at / neurons, at % neurons) {
                    bins.add(score, fired);
                    had += 1;
                }
            }
            self.had[layer] += if ahead == 0 { had } else { 0 };
        }
    }
}

impl Observer for Tally<'_> {
    fn layer(&mut self, seen: &Seen<'_>) {
        if seen.layer == 0 {
            self.residuals.clear();
        }
        self.residuals.push_back(seen.residual.to_vec());
        if self.residuals.len() > AHEADS[AHEADS.len() - 1] + 1 {
            self.residuals.pop_front();
        }
        if !self.model.config.is_mixture() {
            let fired: Vec<bool> = seen.gates.iter().map(|&gate| gate > 0.0).collect();
            self.count(seen.layer, seen.n, &fired, |_, _| true);
        }
    }

    fn looks_inside(&self) -> bool {
        self.model.config.is_mixture()
    }

    fn inside(&mut self, seen: &SeenExperts<'_>) {
        let c = &self.model.config;
        let (ffn, neurons, experts) = (c.widest_ffn(), c.neurons(), c.clusters());
        let (mut fired, mut has) = (vec![false; seen.n * neurons], vec![false; seen.n * experts]);
        for (group, routed, products) in seen.each() {
            has[routed.token * experts + group.expert] = true;
            let fired = &mut fired[routed.token * neurons + group.expert * ffn..][..ffn];
            fired.iter_mut().zip(products).for_each(|(fired, gate)| *fired = *gate > 0.0);
        }
        self.count(seen.layer, seen.n, &fired, |token, neuron| has[token * experts + neuron / ffn]);
    }
}
