//! What a plan is told of a model, and what becomes of it.

use crate::engine::session::CHUNK;
use crate::engine::{Engine, Split};
use crate::error::{Error, Result};
use crate::formats::placement_file::PlacementFile;
use crate::ids::PublishedId;
use crate::model::Model;
use crate::placement::memory_plan::{Footprint, KvPlace, Plan, Request};
use bytemuck::allocation::TransparentWrapperAlloc;
use std::path::Path;

/// What host and device exchange in chunks of so many tokens, as it is planned or allocated.
#[derive(Clone, Copy)]
pub(super) struct Exchange {
    /// Bytes of host memory.
    pub bytes: u64,
    /// Tokens of a chunk.
    pub chunk: usize,
}

impl Exchange {
    /// Nothing: there is no device.
    pub const NONE: Exchange = Exchange { bytes: 0, chunk: CHUNK };

    /// What a device's part in an engine has allocated.
    pub fn of(split: Option<&Split>) -> Exchange {
        split.map_or(Exchange::NONE, |split| Exchange { bytes: split.pinned_bytes(), chunk: split.chunk() })
    }
}

/// What to say where no neuron or expert has a slot, or not even attention has room.
pub(super) fn nothing_fits(plan: &Plan, layers: usize) -> Option<String> {
    if plan.streamed_layers > 0 {
        return Some(format!(
            "the device has no room for the attention of {} of {layers} layers, which is copied for every token and every part of a prompt; \
             give a larger --vram, or pack the model in a smaller type (--quant q4_0)",
            plan.streamed_layers
        ));
    }
    let least = plan.details.min_neurons as u64 * plan.details.block_bytes;
    plan.slots().iter().all(|slots| *slots == 0).then(|| {
        format!(
            "the device has room for none of the FFNs: a layer is divided from {} bytes on; give --vram {} or more, or a larger --ffn-share",
            least,
            plan.without_neurons_bytes + least
        )
    })
}

/// Share of what can lie on the device that a token computes: of experts what the router chooses, of neurons what is active in `tokens`
/// tokens, in which `counts` were counted.
pub(super) fn computed_share(engine: &Engine, counts: &[Vec<u64>], tokens: u64) -> f64 {
    let config = &engine.model.config;
    if config.has_whole_experts() {
        return config.used_share();
    }
    if engine.sparsity().is_dense() && !config.is_mixture() {
        return 1.0;
    }
    let active = counts.iter().flatten().sum::<u64>() as f64;
    let all = (config.movable_layers() * config.movable()) as f64 * tokens.max(1) as f64;
    (active / all).min(1.0)
}

/// The neurons that a placement file names; its slots replace the plan's, and longer chunks of prompts, then keys and values, take what they
/// leave.
pub(super) fn placed_by_file(
    path: &Path,
    model: &Model,
    plan: &mut Plan,
    (request, footprint): (&Request, &Footprint),
) -> Result<Vec<Vec<PublishedId>>> {
    let (layers, ffn) = (model.config.layers().len(), model.config.movable());
    let file = PlacementFile::read(path)?;
    file.check_owner(path, model.fingerprint(), layers, ffn)?;
    let wanted: u64 = file.layers.iter().map(|l| l.slots as u64).sum();
    let needed = plan.without_neurons_bytes + wanted * plan.details.block_bytes;
    if needed > plan.budget_bytes {
        return Err(Error::Memory(format!(
            "{}: its {wanted} slots make {needed} bytes on the device and the budget is {}; give --vram {} or more, \
             or plan again",
            path.display(),
            plan.budget_bytes,
            // With more, all of attention lies there.
            needed + footprint.saved_by_streaming(plan.streamed_layers)
        )));
    }
    plan.layers.iter_mut().zip(&file.layers).for_each(|(l, placed)| l.slots = placed.slots);
    let longer = if request.chunk.is_none() { footprint.for_chunks(plan.chunk) } else { 0 };
    let (room, kv_bytes) = (plan.limit_chunk(longer, plan.budget_bytes - needed), footprint.kv_bytes);
    let sequences = if request.kv == KvPlace::Host { 0 } else { footprint.sequences_in(room) };
    plan.keep_sequences(request.sequences.max(1).min(sequences), footprint);
    plan.limit_streamed(room - plan.sequences as u64 * kv_bytes);
    Ok(file.layers.into_iter().map(|l| PublishedId::wrap_vec(l.neurons)).collect())
}
