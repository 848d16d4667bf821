//! Records which neurons a model activates on texts, or which experts its routers choose: an activation trace ([`crate::formats::trace_file`]) for `replay`.

use crate::cpu::MAX_COLUMNS;
use crate::engine::{Engine, Logits, Observer, Seen, Session, Sparsity};
use crate::error::{Error, Result};
use crate::formats::trace_file::{Header, TextInfo, TraceSection, TraceWriter};
use crate::ids::Permutation;
use crate::model::{Activation, KvType};
use crate::predictor::{Predictor, Router};
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
    /// How the trace was made, for the header: for people, not read by the program.
    pub made: serde_json::Value,
}

impl Request {
    /// The header of the trace, with the texts at their full length.
    pub fn header(&self, engine: &Engine) -> Header {
        let (model, c) = (&engine.model, &engine.model.config);
        let text = |(name, tokens): &(String, Vec<u32>)| TextInfo { name: name.clone(), tokens: tokens.len() };
        Header {
            fingerprint: model.fingerprint().to_owned(),
            model: c.name.clone(),
            layers: c.layers,
            ffn: c.clusters(),
            block_bytes: model.layers[0].ffn.cluster_bytes() as usize,
            experts_used: c.form.experts.map(|experts| experts.used),
            ahead: self.ahead,
            predictor: self.predictor.as_ref().map_or("router", |predictor| predictor.kind().name()).into(),
            // A router's experts have probability 1, all others 0.
            thresholds: (0..c.layers).map(|l| self.predictor.as_ref().map_or(0.5, |p| p.threshold(l, 0))).collect(),
            texts: self.texts.iter().map(text).collect(),
            made: self.made.clone(),
            sections: Vec::new(),
        }
    }
}

/// Runs the model densely over the texts and writes which neurons were active and what the predictor said about them. `step(done, total)`
/// reports tokens; an error it returns (Ctrl-C) ends the work, and the trace then holds what was recorded before.
///
/// # Errors
/// Those of `step`; [`Error::Usage`] for a predictor without tables for `ahead`; [`Error::Io`] where the trace cannot be written.
pub fn record(
    engine: &mut Engine,
    request: &Request,
    path: &Path,
    mut step: impl FnMut(u64, u64) -> Result<()>,
) -> Result<Recall> {
    let model = engine.model.clone();
    let (c, ahead) = (&model.config, request.ahead);
    if let Some(predictor) = &request.predictor {
        check_tables(&**predictor, c.layers, ahead)?;
    }
    let header = request.header(engine);
    let all = header.tokens() as u64;
    let writer = TraceWriter::create(path, header)?;
    let mut session = Session::new(engine, request.window, request.kv)?;
    let before = engine.set_sparsity(Sparsity::dense(c.layers));
    let mut looking = Looking {
        activation_thresholds: &request.activation_thresholds,
        activation: c.activation,
        residuals: vec![Vec::new(); c.layers],
        active: vec![Vec::new(); c.layers],
    };
    let (mut texts, mut done, mut row, mut recall) = (Vec::new(), 0, Vec::new(), Recall::default());
    let mut prediction = Prediction { request, scores: Vec::new() };
    let mut ended = Ok(());
    'texts: for (name, tokens) in &request.texts {
        texts.push(TextInfo { name: name.clone(), tokens: 0 });
        for window in tokens.chunks(request.window) {
            session.truncate(0);
            for chunk in window.chunks(MAX_COLUMNS) {
                session.check(engine, chunk)?;
                engine.forward_observed(&mut session.kv, chunk, Logits::None, &mut looking);
                let n = chunk.len();
                for layer in 0..c.layers {
                    let order = &model.layers[layer].order;
                    bits(&looking.active[layer], n, order, &mut row);
                    writer.write(TraceSection::Active, layer, done, bytemuck::cast_slice(&row))?;
                    for (part, back) in [(TraceSection::Own, 0), (TraceSection::Ahead, ahead)] {
                        if back > layer {
                            continue;
                        }
                        let bytes = prediction.bytes(engine, (layer, back), &looking, n);
                        if back > 0 {
                            recall.add(&row, &bytes, n);
                        }
                        writer.write(part, layer, done, &bytes)?;
                    }
                }
                done += n;
                texts.last_mut().expect("pushed above").tokens += n;
                ended = step(done as u64, all);
                if ended.is_err() {
                    break 'texts;
                }
            }
        }
    }
    engine.set_sparsity(before);
    writer.finish(texts)?;
    ended.map(|()| recall)
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

/// How much of what was active the prediction from layers before had called at least as likely as not.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Recall {
    /// Pairs of cluster and token that were active.
    pub active: u64,
    /// Those of them that were predicted.
    pub found: u64,
}

impl Recall {
    /// Adds what was active, `[n, clusters / 32]` words of bits, and its probabilities times 255, `[n, clusters]`; both in the published
    /// order.
    fn add(&mut self, active: &[u32], bytes: &[u8], n: usize) {
        let (words, clusters) = (active.len() / n, bytes.len() / n);
        for (active, bytes) in active.chunks_exact(words).zip(bytes.chunks_exact(clusters)) {
            for (cluster, &byte) in bytes.iter().enumerate() {
                let active = active[cluster / 32] >> (cluster % 32) & 1 == 1;
                self.active += u64::from(active);
                self.found += u64::from(active && byte >= 128);
            }
        }
    }

    /// Found by active, 0 to 1; `None` where nothing was active.
    pub fn share(self) -> Option<f64> {
        (self.active > 0).then(|| self.found as f64 / self.active as f64)
    }
}

/// What is predicted of a layer's clusters.
struct Prediction<'a> {
    request: &'a Request,
    scores: Vec<f32>,
}

impl Prediction<'_> {
    /// The probability of each cluster of layer `of.0`, times 255, from the residual `of.1` layers before, `[n, clusters]` in the published
    /// order.
    fn bytes(&mut self, engine: &mut Engine, of: (usize, usize), looking: &Looking<'_>, n: usize) -> Vec<u8> {
        let (model, (layer, back)) = (engine.model.clone(), of);
        let (clusters, residual) = (model.config.clusters(), &looking.residuals[layer - back]);
        let mut bytes = vec![0u8; n * clusters];
        self.scores.resize(n * clusters, 0.0);
        let Some(predictor) = &self.request.predictor else {
            match back {
                0 => bytes.iter_mut().zip(&looking.active[layer]).for_each(|(byte, &is)| *byte = 255 * u8::from(is)),
                _ => {
                    let router = Router::of(&model).expect("a model without a predictor is a mixture");
                    router.score(&mut engine.tools(), layer, back, residual, n, &mut self.scores);
                    bytes.iter_mut().zip(&self.scores).for_each(|(byte, &score)| *byte = (score * 255.0) as u8);
                }
            }
            return bytes;
        };
        let table = predictor.calibration(layer, back).expect("looked at before");
        predictor.score(&mut engine.tools(), layer, back, residual, n, &mut self.scores);
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
}

impl Observer for Looking<'_> {
    fn layer(&mut self, seen: &Seen<'_>) {
        let activation_threshold = self.activation_thresholds[seen.layer];
        self.residuals[seen.layer].clear();
        self.residuals[seen.layer].extend_from_slice(seen.residual);
        let active = &mut self.active[seen.layer];
        active.clear();
        active.extend(seen.activations.iter().zip(seen.gates).map(|(&a, &gate)| match activation_threshold > 0.0 {
            true => self.activation.apply(gate).abs() > activation_threshold,
            false => a != 0.0,
        }));
    }
}
