//! One model on one machine with one memory budget: its plan, and the simulated result of a policy.

use super::prompts::{PromptOutcome, whole_layers};
use super::{Calls, Outcome, SimulateOptions, experts_offload, layer_offload, scaled, simulate};
use crate::engine::session::{CHUNK, CHUNKS};
use crate::error::{Error, Result};
use crate::formats::machine_profile::MachineProfile;
use crate::formats::trace_file::TraceFile;
use crate::lab::replay::{frequencies, rules};
use crate::placement::memory_plan::{Footprint, KvPlace, Request, plan};
use crate::placement::policy::{self, PlacementPolicy as Placement};
use crate::scheduler::Policy;

/// Bytes of trained predictors as a share of the model's (powerinfer 5.1).
pub const PREDICTOR_SHARE: f64 = 0.06;
/// Mean position of a decoded token in DynamicInfer 5.1: after 64 tokens of input and half of 128 of output.
pub const POSITION: usize = 128;

/// What to simulate.
#[derive(Clone, Copy)]
pub struct Case<'a> {
    /// Activations, probabilities and thresholds to decode with.
    pub trace: &'a TraceFile,
    /// Rates of the machine.
    pub machine: &'a MachineProfile,
    /// Sizes of the real model, which may be larger than the trace.
    pub real: &'a Footprint,
    /// Mean number of token positions whose keys and values a token reads.
    pub position: usize,
    /// Device memory for everything, bytes; `None` is no device.
    pub vram: Option<u64>,
    /// Which neurons are on the device at the beginning.
    pub placement: Placement,
    /// Under the static policy, too, layers get their slots by how many activations these hold, and not by the time that they save.
    pub by_impact: bool,
    /// Bytes of all layers' predictors of the real model; 0 for none.
    pub predictor_bytes: u64,
    /// Probability from which on a neuron is computed, 0 to 1; 0 computes all, and `None` takes the trace's threshold of each layer.
    pub threshold: Option<f32>,
    /// Whether copies take host memory bandwidth from the CPU.
    pub contention: bool,
    /// What the start of a copy is charged for.
    pub calls: Calls,
    /// Time that the CPU loses at a neuron block that does not follow the one before in memory, ns.
    pub gap_ns: f64,
    /// Seed of random placements and of policies that draw random numbers.
    pub seed: u64,
    /// Of a mixture with a device, tokens at the beginning of each text that are a prompt and are not decoded; 0 for none.
    pub prompt: usize,
    /// Tokens of a prompt's chunk, one of [`CHUNKS`]; `None` takes the plan's choice.
    pub chunk: Option<usize>,
}

impl Case<'_> {
    /// Number of texts that only teach which neurons are frequent and are not simulated: the first half.
    ///
    /// # Errors
    /// [`Error::Usage`] for a trace of one text.
    pub fn skip(trace: &TraceFile) -> Result<usize> {
        match trace.header().texts.len() {
            1 => Err(Error::Usage(
                "the trace has one text, and the first half of the texts only teaches what is frequent; record two or more"
                    .into(),
            )),
            texts => Ok(texts / 2),
        }
    }

    fn kv_read(&self) -> u64 {
        self.real.position_bytes * self.position as u64
    }

    /// That each text has a prompt of so many tokens, and a token behind it.
    fn check_prompt(&self) -> Result<()> {
        let (n, h) = (self.prompt, self.trace.header());
        let bad = |why: String| Err(Error::Usage(format!("a prompt of {n} tokens: {why}")));
        match h.texts.iter().map(|text| text.tokens).min() {
            _ if self.chunk.is_some_and(|chunk| !CHUNKS.contains(&chunk)) => {
                Err(Error::Usage(format!("--prompt-chunk {}: take one of {CHUNKS:?}", self.chunk.unwrap_or(0))))
            }
            _ if n == 0 => Ok(()),
            _ if self.real.experts_used.is_none() => {
                bad("only those of mixtures are simulated; of other models a prompt is dense, whatever the policy"
                    .into())
            }
            _ if self.vram.is_none() => bad("it is simulated beside a device; give --vram".into()),
            Some(least) if least <= n => bad(format!("the trace's shortest text has {least}; record more of it")),
            _ => Ok(()),
        }
    }

    /// Prompts with whole layers of experts on the device, the others computed by the CPU, or copied if `copies` is set; `None` without
    /// prompts.
    ///
    /// # Errors
    /// [`Error::Usage`] for a trace that has no such prompts.
    pub fn whole_layers(&self, copies: bool) -> Result<Option<PromptOutcome>> {
        self.check_prompt()?;
        if self.prompt == 0 {
            return Ok(None);
        }
        let (on, texts) = (self.layer_offload().1, (Case::skip(self.trace)?, self.prompt));
        Ok(whole_layers(self.trace, self.machine, self.real, (on, copies), texts))
    }

    /// Simulates decoding under a policy.
    ///
    /// # Errors
    /// [`Error::Memory`] for a budget that attention, head, predictors and buffers do not fit into; [`Error::Usage`] for a trace of one
    /// text; [`Error::Interrupted`] after Ctrl-C.
    pub fn run(&self, policy: Policy) -> Result<Outcome> {
        let h = self.trace.header();
        if (h.experts_used, self.real.experts_used.map(|_| h.ffn))
            != (self.real.experts_used, h.experts_used.map(|_| self.real.ffn))
        {
            return Err(Error::Usage(format!(
                "the trace has {}, the model {}; record one of such a model",
                parts(h.experts_used, h.ffn),
                parts(self.real.experts_used, self.real.ffn)
            )));
        }
        self.check_prompt()?;
        let skip = Case::skip(self.trace)?;
        let history = frequencies(self.trace, |text| text < skip);
        let counts: Vec<Vec<u64>> =
            history.iter().map(|f| f.iter().map(|&f| (f64::from(f) * 1e9) as u64).collect()).collect();
        let (slots, placed, half, chunk) = match self.vram {
            None => (vec![0; h.layers], vec![Vec::new(); h.layers], 0, CHUNK),
            Some(vram) => {
                let small = scaled(self.real, h.layers, h.ffn);
                let per_layer = h.layers as f64 / self.real.layers as f64;
                let part = |bytes: u64| (bytes as f64 * per_layer) as u64;
                let request = Request {
                    sequences: 1,
                    vram: Some(part(vram)),
                    ram: None,
                    ffn_share: None,
                    kv: KvPlace::Host,
                    predictor_bytes: part(self.predictor_bytes),
                    // The counts are of active neurons; a model without a predictor computes all.
                    computed_share: if self.threshold == Some(0.0) { 1.0 } else { active_share(&history) },
                    ilp_seconds: None,
                    chunk: self.chunk,
                    host: None,
                    streamed_layers: Some(0),
                    skips_host: policy == Policy::Static && h.experts_used.is_none() && !self.by_impact,
                };
                let plan = plan(&small, &counts, self.machine, &request).map_err(|e| match e {
                    // Written anew, because the original message gives the bytes of the scaled model.
                    Error::Memory(_) => Error::Memory(format!(
                        "a budget of {vram} bytes is below the {} that attention, head, predictors and buffers take on the \
                         device; give a larger --vram, or a smaller --quant",
                        self.real.least_bytes() + self.predictor_bytes
                    )),
                    other => other,
                })?;
                let slots: Vec<usize> = plan.layers.iter().map(|l| l.slots).collect();
                let placed = policy::neurons(self.placement, &counts, &slots, self.seed);
                (slots, placed, (plan.streamed_bytes / small.block_bytes.max(1)) as usize / 2, plan.chunk)
            }
        };
        let setting = SimulateOptions {
            machine: self.machine,
            real: self.real,
            policy,
            rules: rules(policy, h),
            slots,
            placed,
            history,
            device: self.vram.is_some(),
            predictor_bytes: self.predictor_bytes,
            kv_bytes: self.kv_read(),
            thresholds: h.thresholds(self.threshold),
            contention: self.contention,
            calls: self.calls,
            gap_ns: self.gap_ns,
            seed: self.seed,
            skip,
            prompt: self.prompt,
            chunk,
            half,
        };
        simulate(self.trace, &setting)
    }

    /// Decoding with whole layers on the device, for comparison: ms per token, and the number of layers on the device. Of a mixture these are
    /// layers of experts.
    pub fn layer_offload(&self) -> (f64, usize) {
        let of = if self.real.experts_used.is_some() { experts_offload } else { layer_offload };
        of(self.real, self.machine, self.vram.unwrap_or(0), self.kv_read())
    }
}

/// Mean of the neurons' frequencies, 0 to 1.
fn active_share(history: &[Vec<f32>]) -> f64 {
    let neurons = history.iter().map(Vec::len).sum::<usize>().max(1);
    (history.iter().flatten().map(|&f| f64::from(f)).sum::<f64>() / neurons as f64).max(f64::MIN_POSITIVE)
}

/// What a layer consists of, in words.
fn parts(experts_used: Option<usize>, n: usize) -> String {
    match experts_used {
        None => "neurons".into(),
        Some(used) => format!("{used} of {n} experts"),
    }
}
