//! Samples on which predictors are trained, calibrated and measured: for many tokens the residual before each layer's FFN and
//! which of its neurons were active, recorded while the model runs densely over text.
//!
//! They go to a file, since those of a large model do not fit into memory: per layer the residuals as f16, `[tokens, hidden]`,
//! then the labels as bits, `[tokens, used, ffn / 64]` words, neurons in the published numbering, and the experts that each token has,
//! `[tokens, used]`: of a mixture the labels are of these; other models have one expert, and every token has it. The training tokens come
//! first, then those held back. Only the trainer reads the file: it has no header, and its name says which samples it holds.

use super::profile::ProfileCounter;
use crate::engine::{Engine, Logits, Observer, Seen, SeenAttention, SeenExperts, Session};
use crate::error::{Error, Result};
use crate::formats::{MappedFile, temporary};
use crate::ids::Permutation;
use crate::model::{Activation, KvType, Model};
use crate::predictor::mlp;
use half::f16;
use half::slice::HalfFloatSliceExt;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Tokens per forward pass: a size at which the prompt's matrix products are fast.
const CHUNK: usize = 128;
/// Tokens of a window of text: long enough that most tokens see as much context as in use.
pub const WINDOW: usize = 512;
/// One of this many windows is held back for validation, spread over the whole text.
const HELD_BACK: usize = 8;
/// Sections of the file begin at multiples of this many bytes.
const ALIGN: u64 = 64;

/// Shape of the samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Layers of the model.
    pub layers: usize,
    /// Numbers of a residual.
    pub hidden: usize,
    /// Neurons of a layer; of a mixture, of an expert.
    pub ffn: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Experts that a token has.
    pub used: usize,
    /// Number of tokens to train on; they come first.
    pub train: usize,
    /// Number of tokens held back for validation, after those.
    pub held_back: usize,
}

impl Extent {
    /// All tokens, those held back included.
    pub fn tokens(&self) -> usize {
        self.train + self.held_back
    }

    /// 64-bit words of a token's labels in one layer, of each of its experts.
    pub fn words(&self) -> usize {
        self.ffn.div_ceil(64)
    }

    fn residual_bytes(&self) -> u64 {
        (self.tokens() as u64 * self.hidden as u64 * 2).next_multiple_of(ALIGN)
    }

    fn label_bytes(&self) -> u64 {
        (self.tokens() as u64 * (self.used * self.words()) as u64 * 8).next_multiple_of(ALIGN)
    }

    fn layer_bytes(&self) -> u64 {
        let experts = (self.tokens() as u64 * self.used as u64 * 4).next_multiple_of(ALIGN);
        self.residual_bytes() + self.label_bytes() + experts
    }

    /// Bytes of the file of samples.
    pub fn file_bytes(&self) -> u64 {
        self.layers as u64 * self.layer_bytes()
    }

    /// Approximate bytes of one token's samples over all layers.
    pub fn token_bytes(model: &Model) -> u64 {
        let c = &model.config;
        c.layers().len() as u64
            * (c.hidden as u64 * 2 + used(model) as u64 * (c.widest_ffn().div_ceil(64) as u64 * 8 + 4))
    }
}

/// Experts that a token has.
fn used(model: &Model) -> usize {
    model.config.most_used_experts().max(1)
}

/// Which windows of a text are sampled, and which of them are held back.
#[derive(Debug)]
pub struct Plan {
    /// Shape of the samples that the plan gives.
    pub extent: Extent,
    /// Of each window the first token in the text, its length, and the index of its first token among the samples.
    windows: Vec<(usize, usize, usize)>,
}

impl Plan {
    /// Plans at most about `limit` tokens of a text of `tokens` tokens, in windows spread evenly over it.
    ///
    /// # Errors
    /// [`Error::Usage`] where there are not two windows, one to train on and one to hold back.
    pub fn new(model: &Model, tokens: usize, limit: usize) -> Result<Plan> {
        let c = &model.config;
        if !c.is_mixture() && c.movable_layers() < c.layers().len() {
            let why = "some layers of this model have no FFN, so that no predictor can be trained or calibrated for it yet; \
                       --predictor exact leaves out what does not fire";
            return Err(Error::Usage(why.into()));
        }
        let size = WINDOW.min(c.context);
        let all: Vec<(usize, usize)> =
            (0..tokens).step_by(size).map(|first| (first, size.min(tokens - first))).collect();
        let wanted = limit.div_ceil(size).clamp(1, all.len().max(1));
        if all.len() < 2 || wanted < 2 {
            let why = format!(
                "{} tokens are too few: training and validation need a window of {size} each",
                tokens.min(limit)
            );
            return Err(Error::Usage(why));
        }
        let chosen: Vec<(usize, usize)> = (0..wanted).map(|i| all[i * all.len() / wanted]).collect();
        let held = |i: usize| i % HELD_BACK == HELD_BACK / 2 || (wanted <= HELD_BACK / 2 && i + 1 == wanted);
        let count = |back: bool| chosen.iter().enumerate().filter(|(i, _)| held(*i) == back).map(|(_, w)| w.1).sum();
        let extent = Extent {
            layers: c.layers().len(),
            hidden: c.hidden,
            ffn: c.widest_ffn(),
            experts: c.neurons() / c.widest_ffn(),
            used: used(model),
            train: count(false),
            held_back: count(true),
        };
        let mut at = [0, extent.train];
        let windows = chosen.iter().enumerate().map(|(i, &(first, len))| {
            let place = at[usize::from(held(i))];
            at[usize::from(held(i))] += len;
            (first, len, place)
        });
        Ok(Plan { windows: windows.collect(), extent })
    }
}

/// Training data of one layer: for each token the residual, which is the input, and which neurons were active, which is to be predicted. Of a
/// mixture a token has the neurons of a few experts; a layer without experts is one of one expert that every token has.
#[derive(Clone, Copy)]
pub struct Pairs<'a> {
    /// `[tokens, hidden]`
    pub residuals: &'a [f16],
    /// Active neurons of each of a token's experts, `[tokens, used, ffn / 64]` words, bit n for neuron n.
    pub labels: &'a [u64],
    /// The experts of each token, `[tokens, used]`.
    pub experts: &'a [u32],
    /// How many experts a token has.
    pub used: usize,
    /// Numbers of a residual.
    pub hidden: usize,
    /// Neurons of an expert.
    pub ffn: usize,
}

impl<'a> Pairs<'a> {
    /// Words of an expert's labels.
    fn words(&self) -> usize {
        self.ffn.div_ceil(64)
    }

    /// The experts of a token, each with its labels.
    pub fn of_token(&self, token: usize) -> impl Iterator<Item = (usize, &'a [u64])> {
        let (used, words) = (self.used, self.words());
        let labels = self.labels[token * used * words..(token + 1) * used * words].chunks_exact(words);
        self.experts[token * used..(token + 1) * used].iter().map(|expert| *expert as usize).zip(labels)
    }

    /// The labels of a token for an expert; `None` if the token does not have it.
    pub fn of_expert(&self, token: usize, expert: usize) -> Option<&'a [u64]> {
        self.of_token(token).find(|(of, _)| *of == expert).map(|(_, labels)| labels)
    }

    /// The input of a network for a token.
    pub fn input(&self, token: usize, out: &mut [f32]) {
        let mut residual = vec![0.0; self.hidden];
        self.residuals[token * self.hidden..][..self.hidden].convert_to_f32_slice(&mut residual);
        mlp::normalise(&residual, out);
    }

    /// How many of the tokens `tokens` have each of `experts` experts, and how often each neuron was active then, `[experts, ffn]`.
    pub fn counts(&self, experts: usize, tokens: Range<usize>) -> (Vec<usize>, Vec<u64>) {
        let (mut uses, mut counts) = (vec![0; experts], vec![0; experts * self.ffn]);
        for (expert, labels) in tokens.flat_map(|token| self.of_token(token)) {
            uses[expert] += 1;
            let counts = &mut counts[expert * self.ffn..];
            for (w, &word) in labels.iter().enumerate() {
                let mut left = word;
                while left != 0 {
                    counts[w * 64 + left.trailing_zeros() as usize] += 1;
                    left &= left - 1;
                }
            }
        }
        (uses, counts)
    }
}

/// A finished file of samples, mapped into memory.
pub struct Samples {
    file: MappedFile,
    /// Shape of the samples.
    pub extent: Extent,
}

impl Samples {
    /// Opens a file that [`collect`] finished; `None` where there is no file of the right size.
    pub fn open(path: &Path, extent: Extent) -> Option<Samples> {
        let file = MappedFile::open(path).ok()?;
        (file.bytes().len() as u64 == extent.file_bytes()).then_some(Samples { file, extent })
    }

    /// Residuals before a layer's FFN, `[tokens, hidden]`.
    pub fn residuals(&self, layer: usize) -> &[f16] {
        let at = (layer as u64 * self.extent.layer_bytes()) as usize;
        bytemuck::cast_slice(&self.file.bytes()[at..at + self.extent.tokens() * self.extent.hidden * 2])
    }

    /// Which neurons of a layer were active, `[tokens, used, words]`: bit n of an expert's words for its neuron n.
    pub fn labels(&self, layer: usize) -> &[u64] {
        let e = self.extent;
        let at = (layer as u64 * e.layer_bytes() + e.residual_bytes()) as usize;
        bytemuck::cast_slice(&self.file.bytes()[at..at + e.tokens() * e.used * e.words() * 8])
    }

    /// The experts of each token, `[tokens, used]`.
    pub fn experts(&self, layer: usize) -> &[u32] {
        let e = self.extent;
        let at = (layer as u64 * e.layer_bytes() + e.residual_bytes() + e.label_bytes()) as usize;
        bytemuck::cast_slice(&self.file.bytes()[at..at + e.tokens() * e.used * 4])
    }

    /// The samples of a layer, with the residual `ahead` layers before it.
    pub fn pairs(&self, layer: usize, ahead: usize) -> Pairs<'_> {
        let Extent { hidden, ffn, used, .. } = self.extent;
        let (residuals, labels, experts) = (self.residuals(layer - ahead), self.labels(layer), self.experts(layer));
        Pairs { residuals, labels, experts, used, hidden, ffn }
    }
}

/// Runs the engine's model densely over the windows of `plan` and writes the samples to `path`. A neuron is active when its activation is
/// not zero or, where its layer has an activation threshold in `activation_thresholds` (`[layers]`, 0 for none), when |act(gate)| is above
/// it. `step(done, total)` reports tokens.
///
/// # Errors
/// Those of `step`, after which no file is left; [`Error::Io`] where the file cannot be written; [`Error::Memory`] where keys and values do
/// not fit.
pub fn collect(
    engine: &mut Engine,
    tokens: &[u32],
    plan: &Plan,
    activation_thresholds: &[f32],
    path: &Path,
    step: impl FnMut(u64, u64) -> Result<()>,
) -> Result<Samples> {
    collect_and_count(engine, tokens, (plan, None), activation_thresholds, path, step)
}

/// As [`collect`]; `profile` counts in the same passes.
///
/// # Errors
/// As [`collect`]; [`Error::Failed`] where the model computes values that are not numbers.
pub fn collect_and_count(
    engine: &mut Engine,
    tokens: &[u32],
    (plan, mut profile): (&Plan, Option<&mut ProfileCounter>),
    activation_thresholds: &[f32],
    path: &Path,
    mut step: impl FnMut(u64, u64) -> Result<()>,
) -> Result<Samples> {
    let (file, temporary) = temporary::create(path)?;
    let remove = RemoveUnlessDone(&temporary);
    file.set_len(plan.extent.file_bytes()).map_err(Error::io("write", &temporary))?;
    let mut session = Session::new(engine, WINDOW.min(engine.model.config.context), KvType::F16)?;
    let orders: Vec<Permutation> = engine.model.layers.iter().map(|l| l.order.clone()).collect();
    let mut recorder = Recorder {
        file: &file,
        extent: plan.extent,
        activation_thresholds,
        activation: engine.model.config.activation,
        inside: engine.model.config.is_mixture(),
        orders: &orders,
        place: 0,
        halves: Vec::new(),
        bits: Vec::new(),
        experts: Vec::new(),
        failed: None,
    };
    let mut done = 0;
    for &(first, len, place) in &plan.windows {
        session.rewind(0);
        if let Some(profile) = &mut profile {
            profile.begin_window();
        }
        for (i, chunk) in tokens[first..first + len].chunks(CHUNK).enumerate() {
            session.check(engine, chunk)?;
            recorder.place = place + i * CHUNK;
            {
                let mut both = Both(&mut recorder, profile.as_mut().map(|profile| profile.observer()));
                engine.forward_observed(&mut session.kv, chunk, Logits::None, &mut both);
            }
            if let Some(error) = recorder.failed.take() {
                return Err(Error::io("write", &temporary)(error));
            }
            done += chunk.len() as u64;
            step(done, plan.extent.tokens() as u64)?;
        }
        if let Some(profile) = &mut profile {
            profile.end_window(&engine.model, first, len)?;
        }
    }
    file.sync_all().map_err(Error::io("write", &temporary))?;
    temporary::rename(&temporary, path).map_err(Error::io("rename to", path))?;
    std::mem::forget(remove);
    Samples::open(path, plan.extent)
        .ok_or_else(|| Error::Failed(format!("{} was changed while it was written", path.display())))
}

struct RemoveUnlessDone<'a>(&'a Path);

impl Drop for RemoveUnlessDone<'_> {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.0);
    }
}

/// Two observers of the same passes, the second where there is one.
struct Both<'a, 'b, O>(&'a mut Recorder<'b>, Option<O>);

impl<O: Observer> Observer for Both<'_, '_, O> {
    fn attention(&mut self, seen: &SeenAttention<'_>) {
        self.0.attention(seen);
        self.1.iter_mut().for_each(|second| second.attention(seen));
    }

    fn layer(&mut self, seen: &Seen<'_>) {
        self.0.layer(seen);
        self.1.iter_mut().for_each(|second| second.layer(seen));
    }

    fn looks_inside(&self) -> bool {
        self.0.looks_inside() || self.1.as_ref().is_some_and(O::looks_inside)
    }

    fn inside(&mut self, seen: &SeenExperts<'_>) {
        self.0.inside(seen);
        self.1.iter_mut().for_each(|second| second.inside(seen));
    }
}

struct Recorder<'a> {
    file: &'a File,
    extent: Extent,
    activation_thresholds: &'a [f32],
    activation: Activation,
    /// Of a mixture.
    inside: bool,
    orders: &'a [Permutation],
    /// Index among the samples of this pass's first token.
    place: usize,
    halves: Vec<f16>,
    bits: Vec<u64>,
    experts: Vec<u32>,
    failed: Option<std::io::Error>,
}

impl Recorder<'_> {
    /// Writes what is in `bytes` behind `place` parts of so many bytes per token, `after` the layer's first byte.
    fn write(&mut self, layer: usize, after: u64, bytes: &[u8], n: usize) {
        let at = layer as u64 * self.extent.layer_bytes() + after + (self.place * (bytes.len() / n)) as u64;
        if let Err(error) = self.file.write_all_at(bytes, at) {
            self.failed.get_or_insert(error);
        }
    }

    /// Writes the labels and experts of n tokens.
    fn write_labels(&mut self, layer: usize, n: usize) {
        let (bits, experts) = (std::mem::take(&mut self.bits), std::mem::take(&mut self.experts));
        let labels = self.extent.residual_bytes();
        self.write(layer, labels, bytemuck::cast_slice(&bits), n);
        self.write(layer, labels + self.extent.label_bytes(), bytemuck::cast_slice(&experts), n);
        (self.bits, self.experts) = (bits, experts);
    }
}

impl Observer for Recorder<'_> {
    fn layer(&mut self, seen: &Seen<'_>) {
        let (e, activation_threshold) = (self.extent, self.activation_thresholds[seen.layer]);
        self.halves.resize(seen.residual.len(), f16::ZERO);
        self.halves.convert_from_f32_slice(seen.residual);
        let halves = std::mem::take(&mut self.halves);
        self.write(seen.layer, 0, bytemuck::cast_slice(&halves), seen.n);
        self.halves = halves;
        if self.inside {
            return;
        }
        self.experts.clear();
        self.experts.resize(seen.n, 0);
        self.bits.clear();
        self.bits.resize(seen.n * e.words(), 0);
        let order = &self.orders[seen.layer];
        for (t, bits) in self.bits.chunks_exact_mut(e.words()).enumerate() {
            for (place, neuron) in order.in_store_order(e.ffn).enumerate() {
                let at = t * e.ffn + place;
                let active = match activation_threshold > 0.0 {
                    true => self.activation.apply(seen.gates[at]).abs() > activation_threshold,
                    false => seen.activations[at] != 0.0,
                };
                bits[neuron.index() / 64] |= u64::from(active) << (neuron.index() % 64);
            }
        }
        self.write_labels(seen.layer, seen.n);
    }

    fn looks_inside(&self) -> bool {
        self.inside
    }

    fn inside(&mut self, seen: &SeenExperts<'_>) {
        let e = self.extent;
        self.bits.clear();
        self.bits.resize(seen.n * e.used * e.words(), 0);
        self.experts.clear();
        self.experts.resize(seen.n * e.used, 0);
        // How many experts of each token were seen.
        let mut seen_of = vec![0; seen.n];
        for (group, routed, products) in seen.each() {
            let place = routed.token * e.used + seen_of[routed.token];
            seen_of[routed.token] += 1;
            self.experts[place] = group.expert as u32;
            let bits = &mut self.bits[place * e.words()..(place + 1) * e.words()];
            let (gates, ups) = products.split_at(e.ffn);
            for (neuron, (&gate, &up)) in gates.iter().zip(ups).enumerate() {
                bits[neuron / 64] |= u64::from(seen.active(self.activation, gate, up)) << (neuron % 64);
            }
        }
        self.write_labels(seen.layer, seen.n);
    }
}
