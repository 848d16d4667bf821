//! The FFN on two memories: neurons in slots are computed by the device, the others by the CPU, at the same time (PowerInfer
//! 5.3). One copy in and one copy out per layer.
//!
//! The residual lies on the host here, so the halves are added there.

use super::ffn::{self, Counts, FfnBuffers, Selection, Work};
use crate::cache::NeuronCache;
use crate::cpu::{Columns, Kernels, MAX_COLUMNS, Team};
use crate::device::{Buffer, Call, OutOfMemory, SparseFfn, Stream};
use crate::model::config::ModelConfig;
use crate::model::weights::Layer;

/// Decides, between layers, what moves.
pub trait Migrator: Send {
    /// Called before layer `layer` of each pass is used, from the engine's thread; must not wait.
    fn between(&mut self, layer: usize, cache: &mut NeuronCache);
}

/// A device's part in the engine.
pub struct Hybrid {
    pub cache: NeuronCache,
    pub migrator: Option<Box<dyn Migrator>>,
    input: Buffer,
    output: Buffer,
    /// Host side of `input`: `[n, hidden]` f32, `[ffn]` masks.
    sent: Vec<u32>,
    /// Host side of `output`: `[n, hidden]` f32, one count.
    received: Vec<u32>,
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
        let input_bytes = SparseFfn::input_bytes(MAX_COLUMNS, config.hidden, config.ffn);
        let output_bytes = SparseFfn::output_bytes(MAX_COLUMNS, config.hidden);
        let input = cache.device.alloc(input_bytes as u64)?;
        let output = cache.device.alloc(output_bytes as u64)?;
        let all = Selection { neurons: (0..config.ffn as u32).collect(), masks: vec![0; config.ffn] };
        let room = |bytes: usize| vec![0u32; bytes / 4];
        let (sent, received) = (room(input_bytes), room(output_bytes));
        let rest = Selection { neurons: Vec::with_capacity(config.ffn), masks: Vec::with_capacity(config.ffn) };
        Ok(Hybrid { cache, migrator: None, input, output, sent, received, rest, all })
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
            let at = &cache.layers[l];
            let call = SparseFfn {
                quant: layer.ffn.quant,
                kind: config.ffn_kind,
                activation: config.activation,
                cut,
                hidden: h,
                ffn: config.ffn,
                slots,
                n,
                blocks: at.blocks,
                bucket: at.bucket,
                up_bias: at.up_bias,
                input: *input,
                output: *output,
            };
            let device = &mut cache.device;
            // SAFETY: both rooms live as long as `self` and are not touched before `synchronize`.
            unsafe {
                device.copy_in(Stream::Compute, sent.as_ptr().cast(), (n * h + config.ffn) * 4, *input, 0);
                device.launch(Stream::Compute, &Call::SparseFfn(call));
                device.copy_out(Stream::Compute, *output, 0, received.as_mut_ptr().cast(), received.len() * 4);
            }
            cache.used(l);
        }
        let read = ffn::ffn(team, kernels, config, layer, x, Work::Selected(rest), cut, &mut [], buffers, hidden);
        // Merge.
        if told || on_device {
            cache.device.synchronize(Stream::Compute);
        }
        cache.counters.misses += read.active;
        if on_device {
            let (half, active) = received.split_at(n * h);
            let half: &[f32] = bytemuck::cast_slice(half);
            hidden.iter_mut().zip(half).for_each(|(x, half)| *x += half);
            cache.counters.hits += active[0] as u64;
        }
        read
    }
}
