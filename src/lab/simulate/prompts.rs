//! A prompt of a mixture on a machine that is not here: chunk after chunk and layer after layer, as `engine/split/expert_chunk.rs` carries it
//! out. The device computes a chunk's attention and those of its experts that are in slots. The others are divided by the engine's own
//! function ([`ExpertCosts::divide`]): some are copied for the chunk and computed by the device, too, the CPU computes the rest at the same
//! time, each for all of its tokens at once. Nothing leaves a slot, and what the chunk showed is used from the first token on. What that takes
//! is arithmetic on the machine's rates; [`ASSUMED`] says what it leaves out.
//!
//! Beside it stand other ways with the same chunks: nothing is copied and the CPU computes all missing experts; and whole layers of experts
//! lie on the device, the others computed by the CPU, or copied, one after the other, before the device computes them (llama.cpp's
//! `--n-cpu-moe`).

use crate::cpu::MAX_COLUMNS;
use crate::engine::session::CHUNK;
use crate::engine::{Division, ExpertCosts, Missing};
use crate::formats::machine_profile::MachineProfile;
use crate::formats::trace_file::{TraceFile, TraceSection};
use crate::lab::trace_run::active;
use crate::placement::memory_plan::Footprint;
use serde::Serialize;
use std::ops::Range;

/// Tokens that llama.cpp computes at once, unless it is told otherwise.
pub const WHOLE_LAYERS_CHUNK: usize = 512;

/// What the figures take for granted, as sentences for reports.
pub const ASSUMED: [&str; 6] = [
    "the device's arithmetic is free: it takes what reading weights and starting kernels takes, its experts once for 32 tokens, all else once for a chunk",
    "the CPU computes at the profile's rate for a prompt's products, whatever the number of an expert's tokens, and reads each expert once",
    "attention over earlier positions, keys and values are free on all sides",
    "copies take nothing from the CPU's memory; those in flight when a prompt begins arrive and slow nothing down",
    "a last chunk of 32 tokens or fewer takes the same way",
    "whole layers: copies reach the link's full rate, each expert that a token has is one copy, and nothing is computed meanwhile",
];

/// Mean times of a text's prompt; nothing is measured.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PromptOutcome {
    /// Tokens of each prompt.
    pub tokens: usize,
    /// Tokens of a chunk.
    pub chunk: usize,
    /// Mean time of a prompt, ms.
    pub ms: f64,
    /// Time of each prompt, ms: the first begins with the placement, the others with what the text before has left.
    pub each_ms: Vec<f64>,
    /// Tokens per second.
    pub tokens_per_s: f64,
    /// Pairs of token and expert whose expert is in a slot / all of them.
    pub gpu_share: f64,
    /// Pairs of token and expert whose expert is copied for the chunk / all of them.
    pub copied_share: f64,
    /// Experts of a layer that a chunk has / all of them.
    pub needed_share: f64,
    /// Within the time, for how long the CPU computes experts, ms.
    pub cpu_ms: f64,
    /// Within the time, for how long the device reads experts or waits for copied ones, ms.
    pub device_ms: f64,
    /// Mean time of a prompt if the CPU computed all missing experts, ms; `None` where it does so, and where all missing ones are copied.
    pub on_cpu_ms: Option<f64>,
}

/// How many of a chunk's tokens have each expert of a layer.
#[derive(Clone, Debug, Default)]
pub(super) struct Asked {
    /// Of all of the chunk's tokens, `[experts]`.
    pub counts: Vec<u32>,
    /// Of as many tokens as the device's kernel takes, `[groups][experts]`.
    groups: Vec<Vec<u32>>,
    now: Vec<u32>,
}

impl Asked {
    /// How often the device reads an expert that it computes: once for each group that has it.
    fn reads(&self, expert: usize) -> u32 {
        self.groups.iter().map(|group| u32::from(group[expert] > 0)).sum()
    }

    /// Counts the experts of a layer for these tokens of a trace.
    pub fn count(&mut self, trace: &TraceFile, layer: usize, tokens: Range<usize>) {
        let experts = trace.header().ffn;
        self.groups.clear();
        for first in tokens.clone().step_by(MAX_COLUMNS) {
            let mut group = vec![0; experts];
            for token in first..tokens.end.min(first + MAX_COLUMNS) {
                active(trace.row(TraceSection::Active, layer, token), &mut self.now);
                self.now.iter().for_each(|&expert| group[expert as usize] += 1);
            }
            self.groups.push(group);
        }
        self.counts.clear();
        self.counts.extend((0..experts).map(|e| self.groups.iter().map(|group| group[e]).sum::<u32>()));
    }
}

/// Times of one layer of one chunk, ns.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LayerNs {
    /// All of it, as the engine does it.
    pub all: f64,
    /// All of it where nothing is copied.
    pub on_cpu: f64,
    device: f64,
    cpu: f64,
    /// Pairs of token and expert whose expert is copied.
    copied: u64,
}

/// Rates of a machine for the chunks of a model.
#[derive(Clone, Copy, Debug)]
pub(super) struct PromptCosts {
    /// Reading attention's weights once, and their arithmetic for a token.
    attention_ns: f64,
    attention_token_ns: f64,
    /// The head's, for the last token.
    pub head_ns: f64,
    experts: ExpertCosts,
    /// An expert, read from the device's memory and copied by itself.
    device_ns: f64,
    link_ns: f64,
    /// The CPU's arithmetic for one token of the router.
    router_ns: f64,
    /// A token's input or output over the link.
    cross_ns: f64,
    call_ns: f64,
    copy_ns: f64,
    sync_ns: f64,
}

impl PromptCosts {
    /// Those of a model on a machine with a device.
    pub fn of(m: &MachineProfile, real: &Footprint) -> PromptCosts {
        // GB/s are bytes per nanosecond, and GFLOP/s operations.
        let block = real.block_bytes as f64;
        PromptCosts {
            attention_ns: real.attention_bytes as f64 / real.layers as f64 / m.device_gb_s,
            attention_token_ns: 2.0 * real.attention_weights as f64 / real.layers as f64 / m.device_gflops,
            head_ns: real.head_bytes as f64 / m.device_gb_s,
            experts: ExpertCosts::of(m, real.hidden, real.block_bytes as usize, real.block_weights as usize),
            device_ns: block / m.device_gb_s,
            link_ns: block / m.link_gb_s,
            router_ns: 2.0 * (real.ffn * real.hidden) as f64 / m.host_gflops,
            cross_ns: (4 * real.hidden) as f64 / m.link_gb_s,
            call_ns: 1e3 * m.call_us,
            copy_ns: 1e3 * m.copy_us,
            sync_ns: 1e3 * m.sync_us,
        }
    }

    /// Attention's products: the longer of reading and of arithmetic. Scores over earlier positions are left out.
    fn attention(&self, n: f64) -> f64 {
        self.attention_ns.max(n * self.attention_token_ns)
    }

    /// Attention, the input's way to the host, and the choice of experts there, for `n` tokens.
    fn before(&self, n: f64) -> f64 {
        self.attention(n) + n * self.cross_ns + self.copy_ns + self.sync_ns + self.call_ns + n * self.router_ns
    }

    /// A layer with these experts on the device, and scratch memory for two times `half` copied ones.
    pub fn layer(&self, n: usize, asked: &Asked, here: &[bool], half: usize) -> LayerNs {
        let needed = |&expert: &usize| asked.counts[expert] > 0;
        let absent = (0..here.len()).filter(needed).filter(|&expert| !here[expert]);
        let as_missing = |expert| Missing { expert, tokens: asked.counts[expert], groups: asked.reads(expert) };
        let mut missing: Vec<Missing> = absent.map(as_missing).collect();
        let resident = (0..here.len()).filter(|&e| here[e]);
        let resident = resident.fold((0, 0), |(reads, tokens), e| {
            (reads + u64::from(asked.reads(e)), tokens + u64::from(asked.counts[e]))
        });
        let on_cpu = self.experts.divide(&mut missing, n, resident, 0);
        let divided = self.experts.divide(&mut missing, n, resident, half);
        let all = |division: &Division| self.before(n as f64) + 1e3 * division.us();
        LayerNs {
            all: all(&divided),
            on_cpu: all(&on_cpu),
            device: 1e3 * divided.device_us,
            cpu: 1e3 * divided.cpu_us,
            copied: missing[..divided.copied].iter().map(|missing| u64::from(missing.tokens)).sum(),
        }
    }

    /// A layer whose experts lie on the host, copied for the chunk before they are computed.
    fn copied(&self, n: usize, asked: &Asked) -> LayerNs {
        let needed = asked.counts.iter().filter(|&&tokens| tokens > 0).count() as f64;
        let tokens: u32 = asked.counts.iter().sum();
        let device = (needed * self.device_ns).max(f64::from(tokens) * 1e3 * self.experts.device_token_us);
        let all = self.attention(n as f64) + self.sync_ns + needed * (self.copy_ns + self.link_ns) + device;
        LayerNs { all, on_cpu: all, device, cpu: 0.0, copied: 0 }
    }
}

/// Sums over prompts.
#[derive(Clone, Debug, Default)]
pub(super) struct PromptSum {
    each_ns: Vec<f64>,
    on_cpu_ns: f64,
    device_ns: f64,
    cpu_ns: f64,
    /// Pairs of token and expert: all, those in slots, and those that are copied.
    pairs: (u64, u64, u64),
    /// Experts of chunks: all, and those that are needed.
    experts: (u64, u64),
}

impl PromptSum {
    /// A prompt begins.
    pub fn begin(&mut self) {
        self.each_ns.push(0.0);
    }

    /// A layer of one of its chunks, which stands for `times` layers of the real model.
    pub fn layer(&mut self, ns: LayerNs, times: f64, asked: &Asked, here: &[bool]) {
        self.add(ns.all * times, ns.on_cpu * times);
        self.pairs.2 += ns.copied;
        self.device_ns += ns.device * times;
        self.cpu_ns += ns.cpu * times;
        for (&tokens, &here) in asked.counts.iter().zip(here) {
            self.pairs.0 += u64::from(tokens);
            self.pairs.1 += if here { u64::from(tokens) } else { 0 };
            self.experts.1 += u64::from(tokens > 0);
        }
        self.experts.0 += here.len() as u64;
    }

    /// Time that passes as the engine does it, and where nothing is copied.
    pub fn add(&mut self, ns: f64, on_cpu: f64) {
        *self.each_ns.last_mut().expect("a prompt has begun") += ns;
        self.on_cpu_ns += on_cpu;
    }

    /// Means over the prompts of `tokens` tokens in chunks of `chunk`, of which missing experts were `copied` where that is faster; `None` if
    /// there was none.
    pub fn outcome(&self, (tokens, chunk): (usize, usize), copied: bool) -> Option<PromptOutcome> {
        let prompts = self.each_ns.len() as f64;
        let mean = |ns: f64| ns / prompts / 1e6;
        let ms = mean(self.each_ns.iter().sum());
        (prompts > 0.0).then(|| PromptOutcome {
            tokens,
            chunk,
            ms,
            each_ms: self.each_ns.iter().map(|ns| ns / 1e6).collect(),
            tokens_per_s: 1e3 * tokens as f64 / ms,
            gpu_share: self.pairs.1 as f64 / self.pairs.0.max(1) as f64,
            copied_share: self.pairs.2 as f64 / self.pairs.0.max(1) as f64,
            needed_share: self.experts.1 as f64 / self.experts.0.max(1) as f64,
            cpu_ms: mean(self.cpu_ns),
            device_ms: mean(self.device_ns),
            on_cpu_ms: copied.then(|| mean(self.on_cpu_ns)),
        })
    }
}

/// The chunks of a prompt that begins at token `first` of a trace.
pub(super) fn chunks(first: usize, tokens: usize, each: usize) -> impl Iterator<Item = Range<usize>> {
    let end = first + tokens;
    (first..end).step_by(each).map(move |at| at..end.min(at + each))
}

/// The first tokens of each text from `skip` on as a prompt, with the experts of `on` whole layers of the real model on the device; the
/// others are computed by the CPU, or copied for each chunk if `copies` is set.
pub fn whole_layers(
    trace: &TraceFile,
    machine: &MachineProfile,
    real: &Footprint,
    (on, copies): (usize, bool),
    (skip, tokens): (usize, usize),
) -> Option<PromptOutcome> {
    let (h, costs) = (trace.header(), PromptCosts::of(machine, real));
    let (times, mut asked, mut sum) = (real.layers as f64 / h.layers as f64, Asked::default(), PromptSum::default());
    let [all, none] = [true, false].map(|here| vec![here; h.ffn]);
    let each = if copies { WHOLE_LAYERS_CHUNK } else { CHUNK };
    let mut first = 0;
    for (i, text) in h.texts.iter().enumerate() {
        if i >= skip {
            sum.begin();
            for chunk in chunks(first, tokens, each) {
                for layer in 0..h.layers {
                    asked.count(trace, layer, chunk.clone());
                    // A layer of the trace may stand for several, of which some lie here.
                    let here = (on as f64 - layer as f64 * times).clamp(0.0, times);
                    let of = |here: &[bool]| costs.layer(chunk.len(), &asked, here, 0);
                    let missing = if copies { costs.copied(chunk.len(), &asked) } else { of(&none) };
                    sum.layer(of(&all), here, &asked, if here > 0.0 { &all } else { &none });
                    sum.add(missing.all * (times - here), missing.on_cpu * (times - here));
                    sum.cpu_ns += missing.cpu * (times - here);
                    sum.device_ns += missing.device * (times - here);
                }
            }
            sum.add(costs.head_ns, costs.head_ns);
        }
        first += text.tokens;
    }
    sum.outcome((tokens, each), false)
}
