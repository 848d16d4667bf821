//! Samples on which predictors are trained, calibrated and measured: for many tokens the residual before each layer's FFN and
//! which of its neurons were active, recorded while the model runs densely over text.
//!
//! They go to a file, since those of a large model do not fit into memory: per layer the residuals as f16, `[tokens, hidden]`,
//! then the labels as bits, `[tokens, ffn / 64]` words, neurons in the published numbering. The training tokens come first,
//! then those held back. Only the trainer reads the file: it has no header, and its name says which samples it holds.

use crate::engine::{Engine, Logits, Observer, Seen, Session};
use crate::error::{Error, Result};
use crate::formats::{MappedFile, temporary};
use crate::ids::Permutation;
use crate::model::{Activation, KvType, Model};
use half::f16;
use half::slice::HalfFloatSliceExt;
use std::fs::File;
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
    /// Neurons of a layer.
    pub ffn: usize,
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

    /// 64-bit words of a token's labels in one layer.
    pub fn words(&self) -> usize {
        self.ffn.div_ceil(64)
    }

    fn residual_bytes(&self) -> u64 {
        (self.tokens() as u64 * self.hidden as u64 * 2).next_multiple_of(ALIGN)
    }

    fn layer_bytes(&self) -> u64 {
        self.residual_bytes() + (self.tokens() as u64 * self.words() as u64 * 8).next_multiple_of(ALIGN)
    }

    /// Bytes of the file of samples.
    pub fn file_bytes(&self) -> u64 {
        self.layers as u64 * self.layer_bytes()
    }

    /// Approximate bytes of one token's samples over all layers.
    pub fn token_bytes(model: &Model) -> u64 {
        let c = &model.config;
        c.layers as u64 * (c.hidden as u64 * 2 + c.ffn.div_ceil(64) as u64 * 8)
    }
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
        let extent =
            Extent { layers: c.layers, hidden: c.hidden, ffn: c.ffn, train: count(false), held_back: count(true) };
        let mut at = [0, extent.train];
        let windows = chosen.iter().enumerate().map(|(i, &(first, len))| {
            let place = at[usize::from(held(i))];
            at[usize::from(held(i))] += len;
            (first, len, place)
        });
        Ok(Plan { windows: windows.collect(), extent })
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

    /// Which neurons of a layer were active, `[tokens, words]`: bit n of a token's words for neuron n.
    pub fn labels(&self, layer: usize) -> &[u64] {
        let at = (layer as u64 * self.extent.layer_bytes() + self.extent.residual_bytes()) as usize;
        bytemuck::cast_slice(&self.file.bytes()[at..at + self.extent.tokens() * self.extent.words() * 8])
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
        orders: &orders,
        place: 0,
        halves: Vec::new(),
        bits: Vec::new(),
        failed: None,
    };
    let mut done = 0;
    for &(first, len, place) in &plan.windows {
        session.truncate(0);
        for (i, chunk) in tokens[first..first + len].chunks(CHUNK).enumerate() {
            session.check(engine, chunk)?;
            recorder.place = place + i * CHUNK;
            engine.forward_observed(&mut session.kv, chunk, Logits::None, &mut recorder);
            if let Some(error) = recorder.failed.take() {
                return Err(Error::io("write", &temporary)(error));
            }
            done += chunk.len() as u64;
            step(done, plan.extent.tokens() as u64)?;
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

struct Recorder<'a> {
    file: &'a File,
    extent: Extent,
    activation_thresholds: &'a [f32],
    activation: Activation,
    orders: &'a [Permutation],
    /// Index among the samples of this pass's first token.
    place: usize,
    halves: Vec<f16>,
    bits: Vec<u64>,
    failed: Option<std::io::Error>,
}

impl Observer for Recorder<'_> {
    fn layer(&mut self, seen: &Seen<'_>) {
        let (e, activation_threshold) = (self.extent, self.activation_thresholds[seen.layer]);
        self.halves.resize(seen.residual.len(), f16::ZERO);
        self.halves.convert_from_f32_slice(seen.residual);
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
        let layer = seen.layer as u64 * e.layer_bytes();
        let residuals = layer + (self.place * e.hidden * 2) as u64;
        let labels = layer + e.residual_bytes() + (self.place * e.words() * 8) as u64;
        let written = self
            .file
            .write_all_at(bytemuck::cast_slice(&self.halves), residuals)
            .and_then(|()| self.file.write_all_at(bytemuck::cast_slice(&self.bits), labels));
        if let Err(error) = written {
            self.failed.get_or_insert(error);
        }
    }
}
