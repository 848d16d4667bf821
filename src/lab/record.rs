//! Records which neurons a model activates on texts, or which experts its routers choose: an activation trace ([`crate::formats::trace_file`]) for `replay`.

use crate::cpu::MAX_COLUMNS;
use crate::engine::{Engine, Logits, Observer, Seen, Session, Sparsity};
use crate::error::{Error, Result};
use crate::formats::trace_file::{Header, TextInfo, TraceSection, TraceWriter};
use crate::ids::Permutation;
use crate::model::{Activation, KvType, ModelConfig};
use crate::predictor::{Kind, Predictor, Router};
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;

/// What to record.
pub struct Request {
    /// Name and tokens of each text.
    pub texts: Vec<(String, Vec<u32>)>,
    /// Tokens per window; each window begins with an empty context.
    pub window: usize,
    /// Type in which keys and values are stored.
    pub kv: KvType,
    /// Predictor whose probabilities are recorded; `None` for a mixture of experts, whose routers predict.
    pub predictor: Option<Arc<dyn Predictor>>,
    /// Activation thresholds: |act(gate)| above which a neuron counts as active, `[layers]`; zeros for ReLU models.
    pub activation_thresholds: Vec<f32>,
    /// Number of layers before its own from whose residual a layer is predicted a second time.
    pub ahead: usize,
    /// Numbers of layers before its own from whose residual a layer is predicted for [`Recall`] alone; 0 is its own.
    pub lookaheads: Vec<usize>,
    /// How the trace was made, for the header: for people, not read by the program.
    pub made: serde_json::Value,
}

impl Request {
    /// Whether the predictor says yes or no, so that the trace has bits. Its own layer's gates are then what was computed.
    fn is_exact(&self) -> bool {
        self.predictor.as_ref().is_some_and(|predictor| predictor.kind() == Kind::Exact)
    }

    /// The header of the trace, with the texts at their full length.
    pub fn header(&self, engine: &Engine) -> Header {
        let (model, c) = (&engine.model, &engine.model.config);
        let text = |(name, tokens): &(String, Vec<u32>)| TextInfo { name: name.clone(), tokens: tokens.len() };
        let bits = if self.is_exact() { 1 } else { 8 };
        Header {
            fingerprint: model.fingerprint().to_owned(),
            model: c.name.clone(),
            layers: c.layers().len(),
            ffn: c.clusters(),
            block_bytes: model.layers.iter().map(|l| l.ffn.cluster_bytes()).max().unwrap_or(0) as usize,
            experts_used: c.is_mixture().then(|| c.most_used_experts()),
            ahead: self.ahead,
            predictor: self.predictor.as_ref().map_or("router", |predictor| predictor.kind().name()).into(),
            own_bits: bits,
            ahead_bits: bits,
            // A router's experts have probability 1, all others 0.
            thresholds: (0..c.layers().len())
                .map(|l| self.predictor.as_ref().map_or(0.5, |p| p.threshold(l, 0)))
                .collect(),
            texts: self.texts.iter().map(text).collect(),
            made: self.made.clone(),
            sections: Vec::new(),
        }
    }
}

/// Runs the model densely over the texts and writes which neurons were active and what the predictor said about them. `step(done, total)`
/// reports tokens; an error it returns (Ctrl-C) ends the work, and the trace then holds what was recorded before. Returns how good the
/// prediction was, first `ahead` layers before and then for each of [`Request::lookaheads`].
///
/// # Errors
/// Those of `step`; [`Error::Usage`] for a predictor without tables for `ahead`; [`Error::Io`] where the trace cannot be written.
pub fn record(
    engine: &mut Engine,
    request: &Request,
    path: &Path,
    mut step: impl FnMut(u64, u64) -> Result<()>,
) -> Result<Vec<Recall>> {
    let model = engine.model.clone();
    let c = &model.config;
    if let Some(predictor) = &request.predictor {
        for &ahead in std::iter::once(&request.ahead).chain(&request.lookaheads) {
            check_tables(&**predictor, c.layers().len(), ahead)?;
        }
    }
    let header = request.header(engine);
    let all = header.tokens() as u64;
    let writer = TraceWriter::create(path, header)?;
    let mut session = Session::new(engine, request.window, request.kv)?;
    let before = engine.set_sparsity(Sparsity::dense(c.layers().len()));
    let mut recording = Recording {
        request,
        writer: &writer,
        looking: Looking::new(request, c),
        scores: Vec::new(),
        row: Vec::new(),
        recalls: std::iter::once(request.ahead).chain(request.lookaheads.iter().copied()).map(Recall::new).collect(),
    };
    let (mut texts, mut done) = (Vec::new(), 0);
    let mut ended = Ok(());
    'texts: for (name, tokens) in &request.texts {
        texts.push(TextInfo { name: name.clone(), tokens: 0 });
        for window in tokens.chunks(request.window) {
            session.rewind(0);
            for chunk in window.chunks(MAX_COLUMNS) {
                session.check(engine, chunk)?;
                engine.forward_observed(&mut session.kv, chunk, Logits::None, &mut recording.looking);
                for layer in 0..c.layers().len() {
                    recording.layer(engine, layer, done, chunk.len())?;
                }
                done += chunk.len();
                texts.last_mut().expect("pushed above").tokens += chunk.len();
                ended = step(done as u64, all);
                if ended.is_err() {
                    break 'texts;
                }
            }
        }
    }
    engine.set_sparsity(before);
    let recalls = recording.recalls;
    writer.finish(texts)?;
    ended.map(|()| recalls)
}

fn check_tables(predictor: &dyn Predictor, layers: usize, ahead: usize) -> Result<()> {
    for layer in 0..layers {
        for back in if layer < ahead { vec![0] } else { vec![0, ahead] } {
            if predictor.calibration(layer, back).is_none() {
                return Err(Error::Usage(format!(
                    "the {} predictor has no table for layer {layer} from {back} layers before it; take an --ahead that \
                     it was made for, or make one: train-predictor, calibrate",
                    predictor.kind().name()
                )));
            }
        }
    }
    Ok(())
}

/// How good a prediction from layers before was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Recall {
    /// Layers from the residual that was read to the layer that was predicted.
    pub ahead: usize,
    /// Pairs of cluster and token that were active.
    pub active: u64,
    /// Pairs that were predicted: called at least as likely as not.
    pub predicted: u64,
    /// Pairs that were both.
    pub found: u64,
    /// Active pairs among as many of a layer's highest scores as it had active neurons; 0 where no scores were compared.
    pub found_by_rank: u64,
}

impl Recall {
    fn new(ahead: usize) -> Recall {
        Recall { ahead, ..Recall::default() }
    }

    /// Adds tokens of a layer: whether each cluster was active, and whether it was predicted, both `[n, clusters]`.
    fn add(&mut self, active: &[bool], predicted: impl Iterator<Item = bool>) {
        for (&active, predicted) in active.iter().zip(predicted) {
            self.active += u64::from(active);
            self.predicted += u64::from(predicted);
            self.found += u64::from(active && predicted);
        }
    }

    /// Adds the ranks of the same: `scores` are `[n, clusters]`.
    fn add_ranks(&mut self, active: &[bool], scores: &[f32], clusters: usize) {
        let mut order: Vec<usize> = Vec::with_capacity(clusters);
        for (active, scores) in active.chunks_exact(clusters).zip(scores.chunks_exact(clusters)) {
            let wanted = active.iter().filter(|&&active| active).count();
            if wanted == 0 {
                continue;
            }
            order.clear();
            order.extend(0..clusters);
            order.select_nth_unstable_by(wanted - 1, |&a, &b| scores[b].total_cmp(&scores[a]));
            self.found_by_rank += order[..wanted].iter().filter(|&&n| active[n]).count() as u64;
        }
    }

    /// Found by active, 0 to 1; `None` where nothing was active.
    pub fn share(self) -> Option<f64> {
        (self.active > 0).then(|| self.found as f64 / self.active as f64)
    }
}

/// What is written of a chunk of tokens.
struct Recording<'a> {
    request: &'a Request,
    writer: &'a TraceWriter,
    looking: Looking<'a>,
    scores: Vec<f32>,
    row: Vec<u32>,
    recalls: Vec<Recall>,
}

impl Recording<'_> {
    /// Writes a layer of the n tokens from token `done` of the trace.
    fn layer(&mut self, engine: &mut Engine, layer: usize, done: usize, n: usize) -> Result<()> {
        let model = engine.model.clone();
        let order = &model.layers[layer].order;
        let Recording { request, writer, .. } = *self;
        bits(&self.looking.active[layer], n, order, &mut self.row);
        writer.write(TraceSection::Active, layer, done, bytemuck::cast_slice(&self.row))?;
        if request.is_exact() {
            bits(&self.looking.fires[layer], n, order, &mut self.row);
            writer.write(TraceSection::Own, layer, done, bytemuck::cast_slice(&self.row))?;
        } else {
            let bytes = self.bytes(engine, (layer, 0), n);
            writer.write(TraceSection::Own, layer, done, &bytes)?;
        }
        for i in 0..self.recalls.len() {
            let back = self.recalls[i].ahead;
            if back > layer {
                continue;
            }
            if request.is_exact() {
                self.score(engine, (layer, back), n);
                let threshold = request.activation_thresholds[layer];
                let predicted: Vec<bool> = self.scores.iter().map(|&score| score > threshold).collect();
                self.recalls[i].add(&self.looking.active[layer], predicted.iter().copied());
                if i == 0 {
                    bits(&predicted, n, order, &mut self.row);
                    writer.write(TraceSection::Ahead, layer, done, bytemuck::cast_slice(&self.row))?;
                }
            } else {
                let bytes = self.bytes(engine, (layer, back), n);
                let clusters = bytes.len() / n;
                let rows = bytes.chunks_exact(clusters);
                let predicted = rows.flat_map(|row| order.in_store_order(clusters).map(|n| row[n.index()] >= 128));
                self.recalls[i].add(&self.looking.active[layer], predicted);
                if i == 0 {
                    writer.write(TraceSection::Ahead, layer, done, &bytes)?;
                }
            }
            if i > 0 && request.predictor.is_some() {
                let active = &self.looking.active[layer];
                self.recalls[i].add_ranks(active, &self.scores, model.config.clusters());
            }
        }
        Ok(())
    }

    /// Scores of a layer's clusters, from the residual so many layers before, `[n, clusters]` in the store's order.
    fn score(&mut self, engine: &mut Engine, (layer, back): (usize, usize), n: usize) {
        let model = engine.model.clone();
        let (clusters, residual) = (model.config.clusters(), &self.looking.residuals[layer - back]);
        self.scores.resize(n * clusters, 0.0);
        match &self.request.predictor {
            Some(predictor) => predictor.score(&mut engine.tools(), layer, back, residual, n, &mut self.scores),
            None => {
                let router = Router::of(&model).expect("a model without a predictor is a mixture");
                router.score(&mut engine.tools(), layer, back, residual, n, &mut self.scores);
            }
        }
    }

    /// The probability of each cluster of layer `of.0`, times 255, from the residual `of.1` layers before, `[n, clusters]` in the published
    /// order.
    fn bytes(&mut self, engine: &mut Engine, of: (usize, usize), n: usize) -> Vec<u8> {
        let (model, (layer, back)) = (engine.model.clone(), of);
        let Some(predictor) = &self.request.predictor else {
            if back == 0 {
                return self.looking.active[layer].iter().map(|&is| 255 * u8::from(is)).collect();
            }
            self.score(engine, of, n);
            return self.scores.iter().map(|&score| (score * 255.0) as u8).collect();
        };
        let table = predictor.calibration(layer, back).expect("looked at before").clone();
        self.score(engine, of, n);
        let clusters = model.config.clusters();
        let mut bytes = vec![0u8; n * clusters];
        let order = &model.layers[layer].order;
        for (scores, bytes) in self.scores.chunks_exact(clusters).zip(bytes.chunks_exact_mut(clusters)) {
            for (neuron, &score) in order.in_store_order(clusters).zip(scores) {
                bytes[neuron.index()] = (table.probability(score) * 255.0).round() as u8;
            }
        }
        bytes
    }
}

/// Turns flags of n tokens in store order, `[n, ffn]`, into words of bits in the published order, `[n, ffn / 32]`.
fn bits(active: &[bool], n: usize, order: &Permutation, words: &mut Vec<u32>) {
    let ffn = active.len() / n;
    let each = ffn.div_ceil(32);
    words.clear();
    words.resize(n * each, 0);
    for (active, words) in active.chunks_exact(ffn).zip(words.chunks_exact_mut(each)) {
        for (neuron, &active) in order.in_store_order(ffn).zip(active) {
            words[neuron.index() / 32] |= u32::from(active) << (neuron.index() % 32);
        }
    }
}

/// Observer that keeps a pass's residuals and active neurons.
struct Looking<'a> {
    activation_thresholds: &'a [f32],
    activation: Activation,
    /// `[layers][n, hidden]`
    residuals: Vec<Vec<f32>>,
    /// `[layers][n, ffn]`
    active: Vec<Vec<bool>>,
    /// Whether the gate alone says that a neuron is active, which is the exact predictor's word on its own layer, `[layers][n, ffn]`.
    fires: Vec<Vec<bool>>,
    /// |act(gate)| of the layer at hand, `[n, ffn]`.
    magnitudes: Vec<f32>,
}

impl<'a> Looking<'a> {
    fn new(request: &'a Request, c: &ModelConfig) -> Looking<'a> {
        Looking {
            activation_thresholds: &request.activation_thresholds,
            activation: c.activation,
            residuals: vec![Vec::new(); c.layers().len()],
            active: vec![Vec::new(); c.layers().len()],
            fires: vec![Vec::new(); c.layers().len()],
            magnitudes: Vec::new(),
        }
    }
}

impl Observer for Looking<'_> {
    fn layer(&mut self, seen: &Seen<'_>) {
        let threshold = self.activation_thresholds[seen.layer];
        self.residuals[seen.layer].clear();
        self.residuals[seen.layer].extend_from_slice(seen.residual);
        self.magnitudes.clear();
        self.magnitudes.extend(seen.gates.iter().map(|&gate| self.activation.apply(gate).abs()));
        let (active, fires) = (&mut self.active[seen.layer], &mut self.fires[seen.layer]);
        fires.clear();
        fires.extend(self.magnitudes.iter().map(|&magnitude| magnitude > threshold));
        active.clear();
        if threshold > 0.0 {
            active.extend_from_slice(fires);
        } else {
            active.extend(seen.activations.iter().map(|&a| a != 0.0));
        }
    }
}
