//! From a plan to an engine with a device: the parts of the plan on it, the neurons of the placement in their slots.

use super::plan::Plan;
use crate::cache::{HostBlocks, NeuronCache};
use crate::device::{Device, OutOfMemory};
use crate::engine::{Engine, Hybrid};
use crate::error::{Error, Result};
use crate::model::Model;

/// Gives the engine `device`, with `plan`'s slots. `neurons` are the first residents of each layer, in the numbering of the
/// published model; there are no more of them than slots.
///
/// Attention, head, predictors and what else of the plan lies on the device is computed by the CPU as yet: its bytes are
/// reserved, so that the budget means what it will mean.
pub fn place(engine: &mut Engine, device: Box<dyn Device>, plan: &Plan, neurons: &[Vec<u32>]) -> Result<()> {
    let slots: Vec<usize> = plan.layers.iter().map(|l| l.slots).collect();
    let mut hybrid = hybrid(&engine.model, device, plan, &slots).map_err(|e| {
        Error::Memory(format!(
            "the device has {} bytes left and {} more are needed; give a larger --vram",
            e.left, e.asked
        ))
    })?;
    for (l, neurons) in neurons.iter().enumerate() {
        let places = places(&engine.model, l, neurons);
        hybrid.cache.load(l, &places).map_err(|e| Error::Failed(format!("layer {l} cannot be placed: {e:?}")))?;
    }
    hybrid.cache.settle();
    // Nothing is on its way: what is counted from now on is what the text did.
    hybrid.cache.counters = Default::default();
    engine.hybrid = Some(hybrid);
    Ok(())
}

fn hybrid(
    model: &Model,
    mut device: Box<dyn Device>,
    plan: &Plan,
    slots: &[usize],
) -> std::result::Result<Hybrid, OutOfMemory> {
    let c = &model.config;
    // What the cache and the hybrid FFN take by themselves is part of "buffers", but for the bias of up, which is attention's.
    let block_bytes = plan.details.block_bytes as usize;
    let bias = if c.ffn_bias { c.ffn } else { 0 };
    let own: u64 =
        slots.iter().map(|&s| NeuronCache::layer_bytes(s, block_bytes, bias) - (s * block_bytes) as u64).sum();
    let elsewhere: u64 = plan.parts.iter().filter(|p| p.name != "ffn_slots").map(|p| p.bytes).sum();
    device.reserve(elsewhere.saturating_sub(own + Hybrid::buffer_bytes(c)))?;
    let blocks =
        |layer: &crate::model::weights::Layer| HostBlocks { first: layer.ffn.row_ptr(0), block_bytes, neurons: c.ffn };
    let host: Vec<HostBlocks> = model.layers.iter().map(blocks).collect();
    let bias: Vec<&[f32]> = model.layers.iter().map(|l| &l.up_bias[..]).collect();
    // SAFETY: the blocks lie in the store's map, which lives in the same engine as the cache.
    let cache = unsafe { NeuronCache::new(device, slots, &host, &bias)? };
    Hybrid::new(cache, c)
}

/// Places in the store of neurons that are named as in the published model.
fn places(model: &Model, layer: usize, neurons: &[u32]) -> Vec<u32> {
    let Some(order) = &model.layers[layer].order else { return neurons.to_vec() };
    let mut place_of = vec![0; order.len()];
    order.iter().enumerate().for_each(|(place, &neuron)| place_of[neuron as usize] = place as u32);
    neurons.iter().map(|&n| place_of[n as usize]).collect()
}
