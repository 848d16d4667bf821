//! Records which neurons a model activates on texts: an activation trace ([`crate::formats::trace_file`]) for `replay`.

use crate::cpu::MAX_COLUMNS;
use crate::engine::{Engine, Logits, Observer, Seen, Session, Sparsity};
use crate::error::{Error, Result};
use crate::formats::trace_file::{Header, TextInfo, TraceSection, TraceWriter};
use crate::ids::Permutation;
use crate::model::{Activation, KvType};
use crate::predictor::Predictor;
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
    /// Predictor whose probabilities are recorded.
    pub predictor: Arc<dyn Predictor>,
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
            ffn: c.ffn,
            block_bytes: model.layers[0].block().bytes(),
            ahead: self.ahead,
            predictor: self.predictor.kind().name().into(),
            thresholds: (0..c.layers).map(|layer| self.predictor.threshold(layer, 0)).collect(),
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
) -> Result<()> {
    let model = engine.model.clone();
    let (c, predictor, ahead) = (&model.config, &*request.predictor, request.ahead);
    for layer in 0..c.layers {
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
    let (mut texts, mut done, mut scores, mut row) = (Vec::new(), 0, Vec::new(), Vec::new());
    let mut ended = Ok(());
    'texts: for (name, tokens) in &request.texts {
        texts.push(TextInfo { name: name.clone(), tokens: 0 });
        for window in tokens.chunks(request.window) {
            session.truncate(0);
            for chunk in window.chunks(MAX_COLUMNS) {
                session.check(engine, chunk)?;
                engine.forward_observed(&mut session.kv, chunk, Logits::None, &mut looking);
                let n = chunk.len();
                scores.resize(n * c.ffn, 0.0);
                for layer in 0..c.layers {
                    let order = &model.layers[layer].order;
                    bits(&looking.active[layer], n, order, &mut row);
                    writer.write(TraceSection::Active, layer, done, bytemuck::cast_slice(&row))?;
                    for (part, back) in [(TraceSection::Own, 0), (TraceSection::Ahead, ahead)] {
                        if back > layer {
                            continue;
                        }
                        let table = predictor.calibration(layer, back).expect("looked at above");
                        let residual = &looking.residuals[layer - back];
                        predictor.score(&mut engine.tools(), layer, back, residual, n, &mut scores);
                        let mut bytes = vec![0u8; n * c.ffn];
                        for (scores, bytes) in scores.chunks_exact(c.ffn).zip(bytes.chunks_exact_mut(c.ffn)) {
                            for (neuron, &score) in order.in_store_order(c.ffn).zip(scores) {
                                bytes[neuron.index()] = (table.probability(score) * 255.0).round() as u8;
                            }
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
    ended
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
