//! Simulates decoding on another machine: the engine's scheduler, slot tables, thresholds and placement ([`super::trace_run`]) on a
//! discrete-event clock, fed with a trace of activations and a machine profile. All results are computed from these; nothing is
//! measured.
//!
//! In a layer, attention, predictor and FFN take their time one after the other. The FFN takes max(t_gpu N_gpu, t_cpu N_cpu + t_split)
//! (DynamicInfer E.3.3), with the fixed part t_split only where N_cpu is not 0. Meanwhile the link works on its queue and may take host memory bandwidth from the CPU, which the paper leaves
//! out. A neuron that has not arrived when its layer's neurons are chosen is computed by the CPU. As in the engine, the scheduler
//! gets a layer after its neurons were chosen, its decisions are sent over the link when the next layer begins, and it knows rates
//! from what device and cache have counted by then.
//!
//! Of a mixture an expert stands where a neuron stands elsewhere: the CPU computes those that are missing, and waits for none. The first
//! tokens of each text may be a prompt ([`prompts`]).
//!
//! A trace may be smaller than the model: [`scaled`] makes each of its neurons and layers stand for several.

pub mod assumption;
pub mod calibration;
pub mod case;
pub mod chunks;
pub mod papers;
pub mod prompts;

use self::prompts::{Asked, PromptCosts, PromptOutcome, PromptSum, chunks};
use super::link::cpu_ns;
use super::trace_run::{Clock, Copies, OwnedDecision, TraceRun};
use crate::cache::{PerTier, Tier};
use crate::error::Result;
use crate::formats::machine_profile::MachineProfile;
use crate::formats::trace_file::TraceFile;
use crate::ids::PublishedId;
use crate::interrupt;
use crate::placement::Costs;
use crate::placement::memory_plan::Footprint;
use crate::scheduler::thresholds::LossWeight;
use crate::scheduler::{self, LayerTimes, Policy, Rules};
use serde::Serialize;

/// Sizes of a model with the trace's `layers` and `ffn` whose parts take as long as the real one's: each simulated layer stands for
/// `real.layers / layers` real ones, each simulated neuron for `real.ffn / ffn`. A memory budget has to be divided by the first, too.
pub fn scaled(real: &Footprint, layers: usize, ffn: usize) -> Footprint {
    let per_layer = layers as f64 / real.layers as f64;
    let part = |bytes: u64| (bytes as f64 * per_layer).round() as u64;
    Footprint {
        layers,
        hidden: real.hidden,
        ffn,
        placed_layers: layers,
        experts_used: real.experts_used,
        block_bytes: (real.block_bytes as f64 * real.ffn as f64 / ffn as f64).round() as u64,
        attention_bytes: part(real.attention_bytes),
        attention_layer_bytes: real.attention_layer_bytes,
        attention_made_bytes: real.attention_made_bytes,
        attention_weights: part(real.attention_weights),
        embeddings_bytes: part(real.embeddings_bytes),
        host_shared_bytes: part(real.host_shared_bytes),
        head_bytes: part(real.head_bytes),
        buffers_bytes: part(real.buffers_bytes),
        chunk_bytes: real.chunk_bytes.map(part),
        host_chunk_bytes: real.host_chunk_bytes,
        kv_bytes: part(real.kv_bytes),
        host_kv_bytes: part(real.host_kv_bytes),
        position_bytes: part(real.position_bytes),
        attention_waits: (real.attention_waits as f64 * per_layer).round() as usize,
        state_bytes: part(real.state_bytes),
        block_weights: (real.block_weights as f64 * real.ffn as f64 / ffn as f64).round() as u64,
    }
}

/// What starting a copy is charged for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Calls {
    /// Each neuron: one asynchronous copy per neuron block, as in DynamicInfer E.2.1 and this program's virtual device.
    PerNeuron,
    /// Each decision: all its blocks of a layer come by one kernel or one batched call.
    PerDecision,
}

/// What to simulate.
#[derive(Clone, Debug)]
pub struct SimulateOptions<'a> {
    /// Rates of the machine.
    pub machine: &'a MachineProfile,
    /// Sizes of the real model; its layers and neurons are compared with the trace's to scale times ([`scaled`]).
    pub real: &'a Footprint,
    /// Which neurons move to the device, and which they replace.
    pub policy: Policy,
    /// Which parts of the policy are on, and their constants.
    pub rules: Rules,
    /// Neuron slots of each layer on the device, in neurons of the trace, `[layers]`; all 0 without a device.
    pub slots: Vec<usize>,
    /// Neurons that are on the device at the beginning, `[layers]`, at most `slots` of each.
    pub placed: Vec<Vec<PublishedId>>,
    /// Frequency of each neuron that the scheduler knows at the beginning, `[layers][ffn]`, 0 to 1.
    pub history: Vec<Vec<f32>>,
    /// Whether there is a device, which then runs attention, head and predictors; without one everything is read from host memory.
    pub device: bool,
    /// Bytes of all layers' predictors of the real model; 0 for none.
    pub predictor_bytes: u64,
    /// Bytes of keys and values that a token reads from host memory, of all layers of the real model (DynamicInfer C.2).
    pub kv_bytes: u64,
    /// Probability from which on a neuron is computed, `[layers]`.
    pub thresholds: Vec<f32>,
    /// Whether copies take host memory bandwidth from the CPU.
    pub contention: bool,
    /// What the start of a copy is charged for.
    pub calls: Calls,
    /// Time that the CPU loses at a neuron block that does not follow the one before in memory, ns.
    pub gap_ns: f64,
    /// Seed of policies that draw random numbers.
    pub seed: u64,
    /// Number of texts at the beginning of the trace that are left out.
    pub skip: usize,
    /// Of a mixture with a device, tokens at the beginning of each text that are a prompt; they are not decoded. 0 for none.
    pub prompt: usize,
    /// Tokens of a prompt's chunk.
    pub chunk: usize,
    /// Experts in each half of the scratch memory that experts are copied to for a prompt's chunk; with 0 none are copied.
    pub half: usize,
}

/// Mean time of a token by part, ms. Device and CPU compute an FFN at the same time; `ffn` is the slower of the two, with merging.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Parts {
    /// Attention of all layers.
    pub attention: f64,
    /// Predictors of all layers.
    pub predictor: f64,
    /// FFNs of all layers.
    pub ffn: f64,
    /// The head.
    pub head: f64,
    /// Within `ffn`, time for which the device computed.
    pub ffn_device: f64,
    /// Within `ffn`, time for which the CPU computed.
    pub ffn_cpu: f64,
}

/// Result of a simulation; no figure is measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Outcome {
    /// Tokens that were decoded.
    pub tokens: usize,
    /// Mean time of a token, ms.
    pub token_ms: f64,
    /// Tokens per second; 0 if there were none.
    pub tokens_per_s: f64,
    /// Median time of a token, ms.
    pub token_ms_p50: f64,
    /// The 99th percentile of the time of a token, ms.
    pub token_ms_p99: f64,
    /// Mean time of a token by part, ms.
    pub parts_ms: Parts,
    /// Neurons computed on the device / all computed neurons.
    pub gpu_share: f64,
    /// Computed / all neurons.
    pub computed_share: f64,
    /// Active and computed / truly active neurons.
    pub recall: f64,
    /// Bytes that a token moves over the link, mean, in the real model.
    pub moved_bytes_per_token: f64,
    /// Share of the time for which the link was busy, 0 to 1.
    pub link_busy: f64,
    /// Share of the tokens during which the scheduler was moving neurons, 0 to 1.
    pub moving: f64,
    /// Mean thresholds of the device and of the CPU: probability from which on they compute a neuron, times 255.
    pub thresholds: (f64, f64),
    /// The texts' prompts, which the figures above do not contain; `None` if there were none.
    pub prompt: Option<PromptOutcome>,
}

/// Times and sizes of one simulated layer and neuron.
struct Scale {
    /// Real layers that a simulated one stands for.
    layers: f64,
    /// Real neurons that a simulated one stands for.
    neurons: f64,
    /// Bytes of a simulated neuron.
    block_bytes: f64,
    attention_ns: f64,
    predictor_ns: f64,
    /// Time of the head for a whole token.
    head_ns: f64,
    /// What an FFN takes wherever its neurons are.
    always_ns: f64,
    /// What it takes more where the CPU has a part beside a device.
    split_ns: f64,
    call_ns: f64,
}

impl Scale {
    fn of(setting: &SimulateOptions<'_>, layers: usize, ffn: usize) -> Scale {
        let (m, real) = (setting.machine, setting.real);
        // GB/s are bytes per nanosecond.
        let weights = if setting.device { m.device_gb_s } else { m.dram_gb_s };
        let call_ns = m.call_us * 1e3;
        // Without a device, matrices, scores and predictor are calls of the thread pool, as in the engine.
        let calls = |n: f64| if setting.device { 0.0 } else { n * call_ns };
        let each = |bytes: u64, gb_s: f64| bytes as f64 / real.layers as f64 / gb_s;
        let costs = Costs::of(m, real.block_bytes, real.hidden);
        let predictor =
            if setting.predictor_bytes > 0 { each(setting.predictor_bytes, weights) + calls(1.0) } else { 0.0 };
        Scale {
            layers: real.layers as f64 / layers as f64,
            neurons: real.ffn as f64 / ffn as f64,
            block_bytes: real.block_bytes as f64 * real.ffn as f64 / ffn as f64,
            attention_ns: each(real.attention_bytes, weights)
                + each(2 * real.state_bytes, m.dram_gb_s)
                + each(setting.kv_bytes, m.dram_gb_s)
                + calls(3.0),
            predictor_ns: predictor,
            head_ns: real.head_bytes as f64 / weights + calls(1.0),
            always_ns: if setting.device { costs.always_us * 1e3 } else { 0.0 },
            split_ns: if setting.device { costs.split_us * 1e3 } else { call_ns },
            call_ns,
        }
    }
}

/// Decodes the texts of the trace, token by token, on the machine of `setting`.
///
/// # Errors
/// [`crate::Error::Interrupted`] after Ctrl-C.
pub fn simulate(trace: &TraceFile, setting: &SimulateOptions<'_>) -> Result<Outcome> {
    simulate_with(trace, setting, |_, _, _| ())
}

/// As [`simulate`]. After each layer `decisions` is given the token, the layer and the decisions made.
///
/// # Errors
/// [`crate::Error::Interrupted`] after Ctrl-C.
pub fn simulate_with(
    trace: &TraceFile,
    setting: &SimulateOptions<'_>,
    mut decisions: impl FnMut(usize, usize, &[OwnedDecision]),
) -> Result<Outcome> {
    let mut sim = Simulation::new(trace, setting);
    let texts = &trace.header().texts;
    let mut first = 0;
    for (i, text) in texts.iter().enumerate() {
        if i >= setting.skip {
            interrupt::check()?;
            let prompt = setting.prompt.min(text.tokens);
            if prompt > 0 {
                sim.prompt(first, prompt);
            }
            for token in first + prompt..first + text.tokens {
                interrupt::check()?;
                sim.token(token, token == first, &mut decisions);
            }
        }
        first += text.tokens;
    }
    Ok(sim.outcome())
}

struct Simulation<'a> {
    trace: &'a TraceFile,
    setting: &'a SimulateOptions<'a>,
    scale: Scale,
    run: TraceRun<'a>,
    clock: Clock,
    tokens_ns: Vec<f64>,
    sum: Sum,
    prompts: PromptSum,
}

#[derive(Default)]
struct Sum {
    attention: f64,
    predictor: f64,
    ffn: f64,
    device: f64,
    cpu: f64,
    link_busy: f64,
    gpu: u64,
    computed: u64,
    active: u64,
    found: u64,
    moving: u64,
    thresholds: (f64, f64),
}

impl<'a> Simulation<'a> {
    fn new(trace: &'a TraceFile, setting: &'a SimulateOptions<'a>) -> Simulation<'a> {
        let (h, m) = (trace.header(), setting.machine);
        let scale = Scale::of(setting, h.layers, h.ffn);
        let scheduling = scheduler::SchedulerOptions {
            policy: setting.policy,
            // Where copies take nothing from the CPU, moves are free, and there is nothing that they could lose.
            rules: match setting.contention {
                true => setting.rules,
                false => Rules { gain: false, move_cost: Some(0.0), ..setting.rules },
            },
            loss: LossWeight::Probability,
            ahead: h.ahead.clamp(1, h.layers),
            predicts: true,
            block_bytes: scale.block_bytes as usize,
            history: setting.history.clone(),
            // A trace's neurons have their published numbers, and so have those of the scheduler that runs on it.
            placed: setting.placed.iter().map(|placed| bytemuck::cast_slice(placed).to_vec()).collect(),
            thresholds: setting.thresholds.iter().copied().map(Some).collect(),
            link_gb_s: m.link_gb_s,
            seed: setting.seed,
        };
        let (apart, each) = match setting.calls {
            // An expert is a copy by itself.
            _ if h.experts_used.is_some() => (true, scale.neurons),
            Calls::PerDecision => (false, 1.0),
            Calls::PerNeuron => (true, scale.neurons),
        };
        let start_ns = m.copy_us * 1e3 * each;
        let copies = Copies { block_bytes: scale.block_bytes, gb_s: m.link_gb_s, start_ns, apart };
        Simulation {
            trace,
            setting,
            run: TraceRun::new(trace, scheduling, &setting.slots, setting.thresholds.clone(), copies),
            scale,
            clock: Clock::default(),
            tokens_ns: Vec::new(),
            sum: Sum::default(),
            prompts: PromptSum::default(),
        }
    }

    /// A text's prompt: what is in slots stays there, and the scheduler is told what the prompt's tokens have needed.
    fn prompt(&mut self, first: usize, tokens: usize) {
        let (trace, costs) = (self.trace, PromptCosts::of(self.setting.machine, self.setting.real));
        let mut asked = Asked::default();
        self.prompts.begin();
        self.run.apply();
        for chunk in chunks(first, tokens, self.setting.chunk) {
            for layer in 0..trace.header().layers {
                asked.count(trace, layer, chunk.clone());
                self.run.find(layer);
                let ns = costs.layer(chunk.len(), &asked, &self.run.here, self.setting.half);
                self.prompts.layer(ns, self.scale.layers, &asked, &self.run.here);
                self.run.prompted(layer, chunk.len(), chunk.start == first, &asked.counts);
                self.pass(ns.all, 0.0);
            }
        }
        self.prompts.add(costs.head_ns, costs.head_ns);
    }

    fn token(&mut self, token: usize, begins: bool, decisions: &mut impl FnMut(usize, usize, &[OwnedDecision])) {
        let mut ns = 0.0;
        for layer in 0..self.trace.header().layers {
            ns += self.layer(layer, token, begins, decisions);
        }
        // The simulated layers stand for `scale.layers` times as many, so the clock runs for that part of the head only.
        let head = self.scale.head_ns / self.scale.layers;
        self.pass(head, 0.0);
        self.tokens_ns.push(ns * self.scale.layers + self.scale.head_ns);
        self.sum.moving += u64::from(self.run.scheduler.moving());
    }

    /// Lets `ns` nanoseconds pass, for `neurons` of which the device computes neurons. What else it computes is not counted: thresholds are
    /// balanced by the time that a neuron takes.
    fn pass(&mut self, ns: f64, neurons: f64) {
        self.clock.now_ns += ns;
        self.clock.device_ns += neurons;
        self.sum.link_busy += self.run.pass(ns);
    }

    /// One layer of one token. Returns how long it takes, ns.
    fn layer(
        &mut self,
        layer: usize,
        token: usize,
        begins: bool,
        decisions: &mut impl FnMut(usize, usize, &[OwnedDecision]),
    ) -> f64 {
        self.run.apply();
        let before = self.scale.attention_ns + self.scale.predictor_ns;
        self.pass(before, 0.0);
        self.run.choose(layer, token);
        let (gpu, cpu) = self.count(layer);
        let balances = self.setting.rules.thresholds && self.setting.device;
        decisions(token, layer, self.run.observe(layer, token, begins, self.clock, balances));
        let ffn = self.ffn(layer, gpu as f64, cpu as f64);
        self.sum.attention += self.scale.attention_ns;
        self.sum.predictor += self.scale.predictor_ns;
        self.sum.ffn += ffn;
        before + ffn
    }

    /// Counts the computed neurons of a layer. Returns how many the device computes, and how many the CPU.
    fn count(&mut self, layer: usize) -> (u64, u64) {
        let TraceRun { truth, computed, here, thresholds, .. } = &self.run;
        let gpu = computed.iter().filter(|&&n| here[n as usize]).count() as u64;
        let sum = &mut self.sum;
        sum.found += truth.iter().filter(|n| computed.binary_search(n).is_ok()).count() as u64;
        sum.active += truth.len() as u64;
        sum.computed += computed.len() as u64;
        sum.gpu += gpu;
        sum.thresholds.0 += f64::from(thresholds[layer][Tier::Device]);
        sum.thresholds.1 += f64::from(thresholds[layer][Tier::Host]);
        (gpu, computed.len() as u64 - gpu)
    }

    /// Time of a layer's FFN, ns, if the device computes `gpu` simulated neurons and the CPU `cpu`.
    fn ffn(&mut self, layer: usize, gpu: f64, cpu: f64) -> f64 {
        let (s, m, scale) = (self.setting, self.setting.machine, &self.scale);
        let device_ns = gpu * scale.block_bytes / m.device_gb_s;
        let ffn = self.run.here.len() as f64;
        let mut host_ns = 0.0;
        if cpu > 0.0 {
            let busy = if s.contention { self.run.link.busy_ns } else { 0.0 };
            // Of randomly spread neurons this share does not follow another computed one.
            let gaps = cpu * (1.0 - cpu / ffn) * scale.neurons;
            host_ns = gaps * s.gap_ns + cpu_ns(cpu * scale.block_bytes, m.dram_gb_s, m.link_gb_s, busy);
        }
        let fixed = if cpu > 0.0 { scale.split_ns } else { 0.0 };
        let all = scale.always_ns + device_ns.max(host_ns + fixed);
        // The call of the pool is the host's time, waiting is not.
        host_ns += if cpu > 0.0 { scale.call_ns } else { 0.0 };
        self.sum.device += device_ns;
        self.sum.cpu += host_ns;
        self.clock.host_ns += host_ns;
        let of = |host: f64, device: f64| PerTier::all(host as u64).with(Tier::Device, device as u64);
        self.run.times[layer] = LayerTimes {
            ffn_ns: of(host_ns, device_ns),
            fixed_ns: of(scale.call_ns, 0.0),
            neurons: of(cpu, gpu),
            merge_ns: (scale.split_ns - scale.call_ns).max(0.0) as u64,
            ..LayerTimes::default()
        };
        self.pass(all, device_ns);
        all
    }

    fn outcome(mut self) -> Outcome {
        let tokens = self.tokens_ns.len();
        let (h, n, scale) = (self.trace.header(), tokens.max(1) as f64, &self.scale);
        let ms = |ns: f64| ns * scale.layers / n / 1e6;
        let all_ns: f64 = self.tokens_ns.iter().sum();
        self.tokens_ns.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let rank = (share * tokens as f64).ceil() as usize;
            self.tokens_ns.get(rank.clamp(1, tokens.max(1)) - 1).map_or(0.0, |ns| ns / 1e6)
        };
        let sum = &self.sum;
        let of = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
        let layers = n * h.layers as f64;
        Outcome {
            tokens,
            token_ms: all_ns / n / 1e6,
            tokens_per_s: if all_ns > 0.0 { 1e9 * tokens as f64 / all_ns } else { 0.0 },
            token_ms_p50: at(0.5),
            token_ms_p99: at(0.99),
            parts_ms: Parts {
                attention: ms(sum.attention),
                predictor: ms(sum.predictor),
                ffn: ms(sum.ffn),
                head: scale.head_ns / 1e6,
                ffn_device: ms(sum.device),
                ffn_cpu: ms(sum.cpu),
            },
            gpu_share: of(sum.gpu, sum.computed),
            computed_share: sum.computed as f64 / (layers * h.ffn as f64),
            recall: of(sum.found, sum.active),
            moved_bytes_per_token: self.run.moves as f64 * scale.block_bytes * scale.layers / n,
            link_busy: sum.link_busy * scale.layers / all_ns.max(1.0),
            moving: sum.moving as f64 / n,
            thresholds: (sum.thresholds.0 / layers, sum.thresholds.1 / layers),
            prompt: self.prompts.outcome((self.setting.prompt, self.setting.chunk), self.setting.half > 0),
        }
    }
}

/// Dense decoding with as many whole layers on the device as `vram` bytes hold beside head and buffers (llama.cpp's `--n-gpu-layers`): ms
/// per token, and the number of these layers. A layer's keys and values lie where it does; a token reads `kv_read` bytes of them.
pub fn layer_offload(real: &Footprint, machine: &MachineProfile, vram: u64, kv_read: u64) -> (f64, usize) {
    let layers = real.layers as u64;
    let weights = (real.attention_bytes + real.ffn_bytes()) / layers;
    let room = vram.saturating_sub(real.head_bytes + real.buffers_bytes);
    let on = (room / (weights + real.kv_bytes / layers)).min(layers);
    let read = (weights + kv_read / layers) as f64;
    // Bytes over GB/s are nanoseconds. A residual crosses the link where the layers change sides.
    let device = (on as f64 * read + real.head_bytes as f64) / machine.device_gb_s;
    let host = (layers - on) as f64 * (read / machine.dram_gb_s + 4e3 * machine.call_us);
    let sync = if on < layers { machine.sync_us * 1e3 } else { 0.0 };
    ((device + host + sync) / 1e6, on as usize)
}

/// Decoding a mixture with attention on the device and the experts of as many whole layers as `vram` bytes hold beside (llama.cpp's
/// `--n-cpu-moe`): ms per token, and the number of these layers. A token reads `kv_read` bytes of keys and values from host memory.
pub fn experts_offload(real: &Footprint, machine: &MachineProfile, vram: u64, kv_read: u64) -> (f64, usize) {
    let always = real.always_bytes();
    let room = vram.saturating_sub(real.least_bytes());
    let on = (room / (real.block_bytes * real.ffn as u64)).min(real.layers as u64);
    let read = real.block_bytes as f64 * real.experts_used.unwrap_or(real.ffn) as f64;
    // Bytes over GB/s are nanoseconds.
    let device = (always as f64 + on as f64 * read) / machine.device_gb_s + kv_read as f64 / machine.dram_gb_s;
    let wait = 1e3 * (machine.call_us + Costs::of(machine, real.block_bytes, real.hidden).t_sync_us);
    let host = (real.layers as u64 - on) as f64 * (read / machine.dram_gb_s + wait);
    ((device + host) / 1e6, on as usize)
}
