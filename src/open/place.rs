//! Puts a plan into effect: gives the engine its device, with the plan's parts on it and the chosen neurons in their slots.

use crate::cache::{NeuronCache, Tier};
use crate::device::{Device, OutOfMemory};
use crate::engine::{ChunkCosts, Engine, ExpertCosts, Split};
use crate::error::{Error, Result};
use crate::formats::machine_profile::MachineProfile;
use crate::ids::PublishedId;
use crate::model::{KvCache, Model};
use crate::placement::memory_plan::{PartName, Plan, streamed_bytes};

pub(super) fn out_of_memory(e: OutOfMemory) -> Error {
    Error::Memory(format!("the device has {} bytes left and {} more are needed; give a larger --vram", e.left, e.asked))
}

/// Gives the engine `device`, with `plan`'s slots. `neurons` are the first residents of each layer, at most as many as it has slots. `pins`
/// says whether all neurons stay in host memory, so that they may be pinned there.
///
/// Parts of the plan that the engine does not use there (embeddings) are reserved, so that the budget is used as planned.
///
/// # Errors
/// [`Error::Memory`] where the device has too little memory, [`Error::Failed`] for neurons that cannot be placed, [`Error::Fatal`] if the
/// device fails.
pub fn place(
    engine: &mut Engine,
    device: Box<dyn Device>,
    plan: &Plan,
    machine: &MachineProfile,
    neurons: &[Vec<PublishedId>],
    pins: bool,
) -> Result<()> {
    let mut split = open_split(&engine.model, device, plan, machine, pins).map_err(out_of_memory)?;
    for (l, neurons) in neurons.iter().enumerate() {
        let neurons = engine.model.layers[l].order.positions(neurons);
        split
            .cache
            .load(&mut *split.device, l, &neurons)
            .map_err(|e| Error::Failed(format!("layer {l} cannot be placed: {e:?}")))?;
    }
    split.cache.settle(&mut *split.device);
    split.upload_predictors(engine.sparsity(), &engine.model.config).map_err(out_of_memory)?;
    // All copies have arrived; from here on the counters count what the text does.
    split.cache.counters = Default::default();
    engine.split = Some(split);
    engine.set_chunk(plan.chunk);
    engine.check()
}

/// Bytes of a plan's parts that neither the neuron cache nor the engine allocates itself.
pub(super) fn elsewhere(model: &Model, plan: &Plan, split: &Split) -> u64 {
    let (c, block_bytes) = (&model.config, plan.details.block_bytes as usize);
    // Except for the bias of up, which is a part of attention, the plan counts these among the buffers.
    let bias = if c.ffn_bias { c.widest_ffn() } else { 0 };
    let own: u64 = plan
        .slots()
        .into_iter()
        .map(|s| NeuronCache::layer_bytes(s, block_bytes, bias) - (s * block_bytes) as u64)
        .sum();
    let elsewhere: u64 =
        plan.parts.iter().filter(|p| p.name != PartName::FfnSlots).map(|p| p.bytes[Tier::Device]).sum();
    elsewhere.saturating_sub(own + split.bytes())
}

/// Gives the whole experts of a mixture, of `block_bytes` bytes each, `bytes` of device memory for those that are copied for a prompt's chunk.
pub(super) fn stream_experts(
    split: &mut Split,
    model: &Model,
    block_bytes: u64,
    machine: &MachineProfile,
    bytes: u64,
) -> std::result::Result<(), OutOfMemory> {
    let c = &model.config;
    if !c.has_whole_experts() {
        return Ok(());
    }
    let weights = c.ffn_kind.rows() * c.hidden * c.widest_ffn();
    split.stream_experts(model, ExpertCosts::of(machine, c.hidden, block_bytes as usize, weights), bytes)
}

fn open_split(
    model: &Model,
    device: Box<dyn Device>,
    plan: &Plan,
    machine: &MachineProfile,
    pins: bool,
) -> std::result::Result<Split, OutOfMemory> {
    let c = &model.config;
    let block_bytes = plan.details.block_bytes as usize;
    let kv = plan.part(PartName::Kv).bytes[Tier::Device];
    let context = KvCache::positions_in(c, kv) / plan.sequences.max(1);
    let (slots, kept) = (plan.slots(), (context, plan.sequences));
    // SAFETY: the store's map lives in the same engine, and is dropped after this.
    let mut split = unsafe { Split::new(device, &slots, model, kept, (plan.chunk, plan.streamed_layers), pins)? };
    if model.has_neurons() {
        split.stream(model, ChunkCosts::of(machine, c, block_bytes), streamed_bytes(c))?;
    }
    if c.neurons_inside() {
        let weights = c.ffn_kind.rows() * c.hidden * c.widest_ffn();
        let costs = ExpertCosts::of(machine, c.hidden, block_bytes * c.widest_ffn(), weights);
        split.stream_inside(model, costs, streamed_bytes(c))?;
    }
    stream_experts(&mut split, model, plan.details.block_bytes, machine, plan.streamed_bytes)?;
    split.reserved = split.device.reserve(elsewhere(model, plan, &split))?;
    Ok(split)
}
