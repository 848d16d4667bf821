//! How an engine is to be opened, as plain data.

use super::model::ModelOptions;
use super::sparsity::SparsityOptions;
use crate::cache::PerTier;
use crate::cpu::{Isa, Prefill};
use crate::device::Tiles;
use crate::host_cache::{HostCacheOptions, MAX_AHEAD};
use crate::model::{KvCache, KvType, Model};
use crate::scheduler::Policy;
use std::path::PathBuf;

/// Default context length, tokens, for models that have as many positions, where memory or a device leaves no more.
const CONTEXT: usize = 4096;
/// A longer default is a multiple of so many tokens.
const CONTEXT_STEP: usize = 1024;

/// How to open an engine.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Which model to open.
    pub model: ModelOptions,
    /// Threads to compute with, 1 to 1024; `None` is one per core, or [`config::threads_beside_a_scheduler`](crate::config::threads_beside_a_scheduler).
    pub threads: Option<usize>,
    /// Instruction set of the CPU kernels; `None` is the best that the processor has.
    pub isa: Option<Isa>,
    /// How exact the processor's products of prompts are.
    pub prefill: Prefill,
    /// How keys and values are stored.
    pub kv: KvType,
    /// Tokens of a prompt and its answer together; `None` is [`EngineOptions::context_of`]'s choice.
    pub context: Option<usize>,
    /// Number of sequences that may be decoded together, 1 or more.
    pub sequences: usize,
    /// Bytes of host memory for the keys and values of texts that no sequence has, beside those of `sequences`.
    pub prompt_bytes: u64,
    /// Host memory that weights, keys and values may take, bytes; `None` is what is free. Of a packed model that takes more, neurons stay
    /// on disk until they are needed.
    pub ram: Option<u64>,
    /// How neurons are kept in memory where not all of them fit.
    pub neurons: RamOptions,
    /// Which neurons are computed.
    pub sparsity: SparsityOptions,
    /// Compare the predictor with the true activations in every `audit`-th decoding pass; 0 for never.
    pub audit: u64,
    /// Record what the device does and when, for [`Engine::timeline`](crate::engine::Engine::timeline).
    pub traced: bool,
    /// Device that computes a part of the model; `None` is the processor alone.
    pub device: Option<DeviceOptions>,
}

impl EngineOptions {
    /// The model at `model` with defaults for everything else: on the processor, with the best predictor that it has.
    pub fn new(model: impl Into<PathBuf>) -> EngineOptions {
        EngineOptions {
            model: ModelOptions::new(model),
            threads: None,
            isa: None,
            prefill: Prefill::default(),
            kv: KvType::F16,
            context: None,
            sequences: 1,
            prompt_bytes: 0,
            ram: None,
            neurons: RamOptions::default(),
            sparsity: SparsityOptions::default(),
            audit: 0,
            traced: false,
            device: None,
        }
    }

    /// Tokens of a prompt and its answer together, with this model. Without [`EngineOptions::context`] they are as many as the model was made
    /// for, if keys and values of all sequences then take at most a quarter of the memory that is free beside the weights, else fewer, down
    /// to 4096. With a device they are 4096 at most, because keys and values there take the place of neurons.
    pub fn context_of(&self, model: &Model) -> usize {
        let (most, sequences) = (model.config.context, self.sequences as u64);
        let Some(free) = crate::config::available_memory().filter(|_| self.device.is_none()) else {
            return self.context.unwrap_or(most.min(CONTEXT));
        };
        let room = free.min(self.ram.unwrap_or(free)).saturating_sub(model.memory_bytes()) / 4;
        let bytes = |tokens| KvCache::bytes_for(&model.config, tokens, self.kv).saturating_mul(sequences);
        self.context.unwrap_or_else(|| context_within(most, room, bytes))
    }
}

/// The longest context up to `most` tokens whose keys and values, `bytes` of them, have room: `most` itself or a multiple of
/// [`CONTEXT_STEP`], and [`CONTEXT`] where nothing longer has room.
fn context_within(most: usize, room: u64, bytes: impl Fn(usize) -> u64) -> usize {
    if bytes(most) <= room {
        return most;
    }
    let steps = CONTEXT / CONTEXT_STEP..=most / CONTEXT_STEP;
    // Fewer bytes for fewer tokens, so that a search by halves finds it.
    let (mut fits, mut not) = (*steps.start(), steps.end() + 1);
    while fits + 1 < not {
        let middle = (fits + not) / 2;
        if bytes(middle * CONTEXT_STEP) <= room { fits = middle } else { not = middle }
    }
    most.min(fits * CONTEXT_STEP)
}

/// Kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// An NVIDIA card.
    Cuda,
    /// An NVIDIA card if there is one that can be used, else no device.
    Auto,
    /// Host memory with a budget that stands in for a card: its results are real, its times are simulated.
    Virtual,
}

/// The processor that predicts what the layers ahead will need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LookaheadOn {
    /// The scheduler, on a core of its own.
    Scheduler,
    /// The device, beside its other work of a layer: it takes device memory for the predictors.
    Device,
}

/// Which neurons are on the device at the beginning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Those that the plan chooses: the most active ones.
    Static,
    /// Random ones, as many in each layer as the plan has slots.
    Random {
        /// Seed of the choice.
        seed: u64,
    },
    /// None; the slots stay free until the scheduler fills them.
    Empty,
    /// Those of a file that `plan -o` wrote, whose slots replace the plan's.
    File(PathBuf),
}

/// A device to use beside the processor, and how to use it.
#[derive(Clone, Debug)]
pub struct DeviceOptions {
    /// Kind of device.
    pub kind: DeviceKind,
    /// Budget for everything on the device, bytes. Without it `ffn_share` sets the budget, and without both it is most of a card's free
    /// memory; the virtual device needs one of them.
    pub vram: Option<u64>,
    /// In place of `vram`: a budget between the least that holds all of attention, 0, and one that holds everything, 1. It means the same for every model.
    pub vram_share: Option<f64>,
    /// Share of the neurons that may be on the device, above 0 and at most 1; `None` is all that fit.
    pub ffn_share: Option<f64>,
    /// Which neurons are on the device at the beginning.
    pub placement: Placement,
    /// Machine whose rates the plan uses: the name of a profile, or a .toml file; `None` takes the profile `default`, and measures if there
    /// is none.
    pub machine: Option<PathBuf>,
    /// Wait for a layer's copies before it is used (DynamicInfer C.3), instead of computing on the CPU the neurons that have not arrived.
    pub barrier: bool,
    /// Policy by which neurons move while a text is generated.
    pub policy: Policy,
    /// Whether the policy may be changed while it runs: then the scheduler is started for a static policy, too.
    pub live: bool,
    /// Start a layer's kernels and copies with a few driver calls instead of one each (CUDA graphs).
    pub graphs: bool,
    /// By what a card multiplies prompts; `None` takes tensor cores if they are faster in a trial and give the same bits there: for q8_0 and
    /// q4_0, and for f16 where inputs may be rounded.
    pub tiles: Option<Tiles>,
    /// Tokens of a prompt that go through together, one of [`CHUNKS`](crate::engine::session::CHUNKS); `None` takes the plan's choice, and [`CHUNK`](crate::engine::session::CHUNK) with `deterministic`. With
    /// `deterministic` and `live` no more than [`CHUNK`](crate::engine::session::CHUNK).
    pub chunk: Option<usize>,
    /// Parts in which a chunk of a dense model's prompt goes, 1 to [`MAX_PARTS`](crate::engine::split::parts::MAX_PARTS); `None` takes as many as take the least time by the machine's
    /// rates.
    pub parts: Option<usize>,
    /// Number of layers that the scheduler looks ahead; `None` is 2 if the predictor was made for that, else 1.
    pub lookahead: Option<usize>,
    /// The processor that predicts the layers ahead, where the engine has not done so to choose neurons.
    pub lookahead_on: LookaheadOn,
    /// Use one threshold for device and CPU, so that the text does not depend on where neurons lie; with `live` nothing moves, either.
    pub deterministic: bool,
    /// Without a profile, place neurons by what earlier runs have learnt.
    pub history: bool,
    /// Without a profile, learn from this run for the next start. [`DeviceSession::finish`](super::DeviceSession::finish) writes what was learnt, and so does the scheduler's
    /// thread every ten minutes.
    pub learn: bool,
    /// Lets the virtual device fail for good after this many kernels, as a GPU does after an illegal address; `None` never.
    pub fail_after: Option<u64>,
    /// On a virtual device, run the scheduler on a thread of its own for as long as it takes, instead of a stated time on the device's
    /// clock: then two runs of the same command differ.
    pub wall_clock: bool,
    /// Balance thresholds with 1 - p as the loss of a neuron that is left out, as the paper prints it, to see the effect.
    pub printed_loss: bool,
    /// A pair of thresholds for all layers, probabilities, instead of balancing them under a policy that does; for experiments.
    pub thetas: Option<PerTier<f32>>,
}

impl DeviceOptions {
    /// A device of this kind with defaults for everything else: the plan's neurons at the beginning, policy `full`.
    pub fn new(kind: DeviceKind) -> DeviceOptions {
        DeviceOptions {
            kind,
            vram: None,
            vram_share: None,
            ffn_share: None,
            placement: Placement::Static,
            machine: None,
            barrier: false,
            policy: Policy::default(),
            live: false,
            graphs: false,
            tiles: None,
            chunk: None,
            parts: None,
            lookahead: None,
            lookahead_on: LookaheadOn::Scheduler,
            deterministic: false,
            history: true,
            learn: true,
            fail_after: None,
            wall_clock: false,
            printed_loss: false,
            thetas: None,
        }
    }
}

/// What the device needs room for: keys and values of `sequences` sequences of `context` tokens each; those of other texts on the host; and the host memory that may be taken,
/// bytes, whether the whole model stays in it, and what of it is left for working memory and what host and device exchange.
#[derive(Clone, Copy)]
pub(super) struct Need {
    pub context: usize,
    pub kv: KvType,
    pub sequences: usize,
    pub prompt_bytes: u64,
    pub ram: Option<u64>,
    pub resident: bool,
    pub host: Option<u64>,
}

/// How neurons are kept in memory that do not all fit: values of one way of working, for comparisons.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RamOptions {
    /// Which neurons stay; `None` is the policy that measured fastest: two queues for experts, and for neurons our importance (`full`),
    /// which finds more of them and moves fewer (`runs/2026-11-24-ram-sweep`).
    pub policy: Option<Policy>,
    /// Whether neighbours are read together where that pays.
    pub together: bool,
    /// Whether what is there is computed while the rest is read.
    pub overlap: bool,
    /// Whether anything stays at all.
    pub keep: bool,
    /// Whether what later layers will need is asked for before their turn.
    pub prefetch: bool,
    /// Number of layers that are looked ahead; `None` is the least that the predictor was made for.
    pub lookahead: Option<usize>,
    /// In place of a number of bytes: memory for reading and for this share of the neurons or experts, 0 to 1. It means the same for every
    /// model, small ones included.
    pub share: Option<f64>,
}

impl RamOptions {
    /// The most layers that are looked ahead.
    pub const MAX_AHEAD: usize = MAX_AHEAD;
}

impl Default for RamOptions {
    fn default() -> RamOptions {
        let HostCacheOptions { together, overlap, .. } = HostCacheOptions::new(0);
        RamOptions { policy: None, together, overlap, keep: true, prefetch: true, lookahead: None, share: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_default_context_is_the_models_where_memory_allows() {
        let of = |most, room| context_within(most, room, |tokens| tokens as u64 * 10);
        assert_eq!(of(32_768, 327_680), 32_768);
        assert_eq!(of(32_768, 327_679), 31 * 1024);
        assert_eq!(of(32_768, 163_840), 16 * 1024);
        assert_eq!(of(32_000, 319_999), 31 * 1024, "no multiple of the step itself");
        // A short one is the same whatever there is.
        assert_eq!((of(32_768, 0), of(4096, 0), of(1000, 0), of(5000, 0)), (4096, 4096, 1000, 4096));
        for most in [100, 4096, 4097, 5119, 5120, 131_072] {
            for room in (0..1_400_000).step_by(9973) {
                let chosen = of(most, room);
                assert!(chosen <= most && chosen >= most.min(CONTEXT), "{most}, {room}: {chosen}");
                assert!(chosen == most.min(CONTEXT) || chosen as u64 * 10 <= room, "{most}, {room}: {chosen}");
                let more = (chosen / CONTEXT_STEP + 1) * CONTEXT_STEP;
                assert!(more > most || more as u64 * 10 > room, "{most}, {room}: {chosen}");
            }
        }
    }
}
