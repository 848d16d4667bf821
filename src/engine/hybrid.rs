//! The FFN on two memories: neurons in slots are computed by the device, the others by the CPU, at the same time (PowerInfer
//! 5.3). One copy in and one copy out per layer.
//!
//! The residual lies on the host here, so the halves are added there.

use super::ffn::{self, Counts, FfnBuffers, Selection, Work};
use super::sparsity::Sparsity;
use crate::cache::{LayerCache, NeuronCache};
use crate::clock;
use crate::cpu::{Columns, Kernels, MAX_COLUMNS, Team};
use crate::device::{Buffer, Call, HostRoom, OutOfMemory, SparseFfn, Stream};
use crate::model::config::ModelConfig;
use crate::model::weights::{Layer, Matrix};
use crate::scheduler::Policy;

/// What the engine knows of a layer before its FFN.
pub struct Between<'a> {
    pub layer: usize,
    /// Position of the first token in its sequence, and how many there are.
    pub first: usize,
    pub n: usize,
    /// Residual after attention, `[n, hidden]`.
    pub residual: &'a [f32],
    /// What will be computed; `None` for all.
    pub selection: Option<&'a Selection>,
    /// The own predictor's scores of this layer, `[n, ffn]`, where it has one.
    pub scores: Option<&'a [f32]>,
}

/// Decides, between layers, what moves and what is computed.
pub trait Migrator: Send {
    /// Called before a layer of a pass is used, from the engine's thread; must not wait.
    fn between(&mut self, at: &Between<'_>, cache: &mut NeuronCache, sparsity: &mut Sparsity);

    /// A layer of a prompt of `tokens` tokens, from position `first` on, was computed whole: for how many of them each neuron was
    /// active, `[ffn]`.
    fn prompt(&mut self, _layer: usize, _first: usize, _tokens: usize, _counts: &[u32]) {}

    /// What it goes by, if that has a name.
    fn policy(&self) -> Option<Policy> {
        None
    }

    /// Goes by another policy from the next layer on; `false` if it cannot.
    fn set_policy(&mut self, _policy: Policy) -> bool {
        false
    }

    /// What it did so far.
    fn counts(&self) -> MigratorCounts {
        MigratorCounts::default()
    }

    /// Ends it. Returns how often each neuron was active, `[layers][ffn]`, if it has learnt that.
    fn finish(self: Box<Self>) -> Option<Vec<Vec<f32>>> {
        None
    }
}

/// What a migrator did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct MigratorCounts {
    /// Layers that it was told of, and those that it had no time for.
    pub told: u64,
    pub untold: u64,
    /// Layers that it has decided on, and decisions that the engine had no time for.
    pub decided: u64,
    pub dropped: u64,
    /// Moves that the cache refused: slot or neuron had changed meanwhile.
    pub refused: u64,
    /// Whether neurons move now, or the static placement is kept because moving does not pay.
    pub moving: bool,
}

/// A device's part in the engine.
pub struct Hybrid {
    pub cache: NeuronCache,
    pub migrator: Option<Box<dyn Migrator>>,
    /// What of the plan lies on the device beside the cache and this.
    pub reserved: Buffer,
    input: Buffer,
    output: Buffer,
    /// Host side of `input`: `[n, hidden]` f32, `[ffn]` masks.
    sent: HostRoom,
    /// Host side of `output`: `[n, hidden]` f32, one count.
    received: HostRoom,
    /// What the CPU computes.
    rest: Selection,
    /// Every neuron, for dense layers.
    all: Selection,
}

impl Hybrid {
    /// Bytes on the device beside the cache's.
    pub const fn buffer_bytes(config: &ModelConfig) -> u64 {
        let input = SparseFfn::input_bytes(MAX_COLUMNS, config.hidden, config.ffn);
        (input + SparseFfn::output_bytes(MAX_COLUMNS, config.hidden)) as u64
    }

    pub fn new(mut cache: NeuronCache, config: &ModelConfig) -> Result<Hybrid, OutOfMemory> {
        let reserved = cache.device.reserve(0)?;
        let input_bytes = SparseFfn::input_bytes(MAX_COLUMNS, config.hidden, config.ffn);
        let output_bytes = SparseFfn::output_bytes(MAX_COLUMNS, config.hidden);
        let input = cache.device.alloc(input_bytes as u64)?;
        let output = cache.device.alloc(output_bytes as u64)?;
        let all = Selection { neurons: (0..config.ffn as u32).collect(), masks: vec![0; config.ffn] };
        let (sent, received) = (HostRoom::new(input_bytes / 4), HostRoom::new(output_bytes / 4));
        // SAFETY: rooms stay where they are, and the device is dropped first.
        unsafe {
            cache.device.pin(sent.as_ptr().cast(), input_bytes, false);
            cache.device.pin(received.as_ptr().cast(), output_bytes, true);
        }
        let rest = Selection { neurons: Vec::with_capacity(config.ffn), masks: Vec::with_capacity(config.ffn) };
        Ok(Hybrid { cache, migrator: None, reserved, input, output, sent, received, rest, all })
    }

    /// Lets the device take, once and for all, what it needs to compute these layers with any number of slots and tokens.
    pub fn prepare(&mut self, config: &ModelConfig, layers: &[Layer]) -> Result<(), OutOfMemory> {
        for (l, layer) in layers.iter().enumerate() {
            for n in (1..=MAX_COLUMNS).rev() {
                let buffers = [self.input, self.output];
                let call = call(&self.cache.layers[l], buffers, config, layer, 0.0, config.ffn, n);
                self.cache.device.prepare(&Call::SparseFfn(call))?;
            }
        }
        Ok(())
    }

    /// hidden += FFN(x) of layer `l`. `normed` is the same input as `x`, `[n, hidden]`, n at most [`MAX_COLUMNS`]; without a
    /// selection every neuron is computed. Returns the rows that the CPU read.
    #[allow(clippy::too_many_arguments)]
    pub fn ffn(
        &mut self,
        team: &mut Team,
        kernels: &Kernels,
        config: &ModelConfig,
        (l, layer): (usize, &Layer),
        (x, normed): (&Columns, &[f32]),
        selection: Option<&Selection>,
        cut: f32,
        buffers: &mut FfnBuffers,
        hidden: &mut [f32],
    ) -> Counts {
        let (n, h) = (x.n, config.hidden);
        let Hybrid { cache, input, output, sent, received, rest, all, .. } = self;
        // A dense layer computes everything, whatever the magnitude.
        let cut = if selection.is_some() { cut } else { -1.0 };
        let selection = selection.unwrap_or_else(|| {
            all.masks.fill(u32::MAX >> (MAX_COLUMNS - n));
            all
        });
        // Attention is the device's by the plan.
        let attention = |m: &Matrix| (m.rows * m.row_bytes) as u64;
        cache.device.worked(0, 0, attention(&layer.qkv) + attention(&layer.o));
        let began = cache.device.totals().clock_ns;
        // Split: slots to the device, rows to the CPU.
        let told = cache.commit(l);
        let slots = cache.layers[l].table.slots().len();
        let (values, masks) = sent[..n * h + config.ffn].split_at_mut(n * h);
        values.copy_from_slice(bytemuck::cast_slice(normed));
        masks.fill(0);
        rest.neurons.clear();
        rest.masks.clear();
        let mut on_device = false;
        for (&neuron, &mask) in selection.neurons.iter().zip(&selection.masks) {
            if cache.layers[l].table.place(neuron).is_some() {
                masks[neuron as usize] = mask;
                on_device = true;
            } else {
                rest.neurons.push(neuron);
                rest.masks.push(mask);
            }
        }
        // Together: the device's half is put on its stream, then the CPU computes its own.
        let received = &mut received[..n * h + 1];
        if on_device {
            let call = call(&cache.layers[l], [*input, *output], config, layer, cut, slots, n);
            let device = &mut cache.device;
            // SAFETY: both rooms live as long as `self` and are not touched before `synchronize`.
            unsafe {
                device.copy_in(Stream::Compute, sent.as_ptr().cast(), (n * h + config.ffn) * 4, *input, 0);
                device.launch(Stream::Compute, &Call::SparseFfn(call));
                device.copy_out(Stream::Compute, *output, 0, received.as_mut_ptr().cast(), received.len() * 4);
            }
            cache.used(l);
        }
        let mut lap = clock::now();
        let read = ffn::ffn(team, kernels, config, layer, x, Work::Selected(rest), cut, &mut [], buffers, hidden);
        cache.device.worked(read.rows() * layer.ffn.row_bytes as u64, clock::lap(&mut lap), 0);
        // Merge.
        if told || on_device {
            cache.device.synchronize(Stream::Compute);
        }
        cache.counters.ffn_ns += cache.device.totals().clock_ns - began;
        cache.counters.misses += read.active;
        cache.counters.tokens += if l == 0 { n as u64 } else { 0 };
        if on_device {
            let (half, active) = received.split_at(n * h);
            let half: &[f32] = bytemuck::cast_slice(half);
            hidden.iter_mut().zip(half).for_each(|(x, half)| *x += half);
            cache.counters.hits += active[0] as u64;
        }
        read
    }
}

/// The resident half of a layer with this many slots, for n tokens.
fn call(
    at: &LayerCache,
    [input, output]: [Buffer; 2],
    config: &ModelConfig,
    layer: &Layer,
    cut: f32,
    slots: usize,
    n: usize,
) -> SparseFfn {
    SparseFfn {
        quant: layer.ffn.quant,
        kind: config.ffn_kind,
        activation: config.activation,
        cut,
        hidden: config.hidden,
        ffn: config.ffn,
        slots,
        n,
        blocks: at.blocks,
        bucket: at.bucket,
        up_bias: at.up_bias,
        input,
        output,
    }
}
