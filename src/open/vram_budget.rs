//! The memory budget of a device, and how it is changed while a text is generated.

use super::place::{elsewhere, out_of_memory, stream_experts};
use crate::cache::{Frames, Slot};
use crate::device::OutOfMemory;
use crate::engine::{Engine, Split, pinned_bytes};
use crate::error::{Error, Result};
use crate::formats::machine_profile::MachineProfile;
use crate::ids::{PublishedId, SlotId};
use crate::model::{KvCache, Model};
use crate::placement::memory_plan::{Footprint, KvPlace, Plan, Request, plan};
use crate::placement::policy::{self, PlacementPolicy};

/// What a budget means for one model on one machine: how many slots each layer has, and which neurons begin in them.
pub struct VramBudget {
    /// Shape of the model and bytes of its parts.
    pub footprint: Footprint,
    /// How often each neuron was active, `[layers][ffn]`, in the published order.
    pub counts: Vec<Vec<u64>>,
    /// Machine that plans are made for.
    pub machine: MachineProfile,
    /// What the user asked for; a new budget replaces its `vram` and `ffn_share`.
    pub request: Request,
}

impl VramBudget {
    /// The plan for a budget of `vram` bytes.
    ///
    /// # Errors
    /// [`Error::Memory`] for a budget that is too small, with the smallest that will do.
    pub fn plan(&self, vram: u64) -> Result<Plan> {
        plan(&self.footprint, &self.counts, &self.machine, &self.request(vram))
    }

    fn request(&self, vram: u64) -> Request {
        Request { vram: Some(vram), ffn_share: None, ..self.request }
    }

    /// Neurons of the static placement for `slots` slots per layer, `[layers]`, the most important first.
    pub fn placed(&self, slots: &[usize]) -> Vec<Vec<PublishedId>> {
        policy::neurons(PlacementPolicy::Static, &self.counts, slots, 0)
    }

    /// Token positions of a sequence.
    fn context(&self, model: &Model) -> usize {
        KvCache::positions_in(&model.config, self.footprint.kv_bytes)
    }

    /// Changes the budget of a device in use to `vram` bytes, between two passes. A smaller budget is reached before this returns; for a
    /// larger one, copies of more neurons are on their way. Returns the plan that holds from now on.
    ///
    /// # Errors
    /// [`Error::Usage`] without a device; [`Error::Memory`] for a budget that is too small or that the device refuses.
    pub fn set(&self, engine: &mut Engine, vram: u64) -> Result<Plan> {
        let Engine { model, split, cached, .. } = &mut *engine;
        let Some(split) = split else {
            return Err(Error::Usage(
                "there is no device whose budget could change; begin with --device cuda (or virtual)".into(),
            ));
        };
        // Host memory through which keys and values come, once they are on the device for the first time.
        let exchanged = split.pinned_bytes();
        let more = pinned_bytes(&model.config, split.chunk(), true) - exchanged;
        let fits = cached.as_ref().is_none_or(|cached| more <= cached.spare());
        let request = self.request(vram);
        let may = matches!(request.kv, KvPlace::Auto | KvPlace::Spare);
        let kv = if may && !fits { KvPlace::Host } else { request.kv };
        // Working memory for prompts is what it was when the device was opened.
        let request = Request { kv, chunk: Some(split.chunk()), host: None, ..request };
        let plan = plan(&self.footprint, &self.counts, &self.machine, &request)?;
        let beside = cached.as_ref().map_or(0, |cached| cached.beside);
        if let Some(cached) = cached.as_mut().filter(|_| plan.sequences > 0 && more > 0) {
            // Nothing is copied from frames that go away.
            split.cache.settle(&mut *split.device);
            let refused = |e| Error::Memory(format!("frames of host memory cannot become fewer: {e}"));
            cached.set_beside(beside + more).map_err(refused)?;
        }
        let changed = self.change(engine, &plan);
        if let (Some(cached), Some(split)) = (&mut engine.cached, &mut engine.split) {
            let taken = beside + split.pinned_bytes() - exchanged;
            if taken != cached.beside {
                split.cache.settle(&mut *split.device);
                // The frames' memory was theirs a moment ago; without it there are fewer.
                let _ = cached.set_beside(taken);
            }
        }
        changed.map(|()| plan)
    }

    /// Changes what lies on the device to what a plan says.
    fn change(&self, engine: &mut Engine, plan: &Plan) -> Result<()> {
        let model = engine.model.clone();
        let mut cached = engine.cached.as_deref_mut();
        let Some(split) = &mut engine.split else { return Ok(()) };
        let slots = plan.slots();
        let (before, slots_before) = (split.device.memory().budget, split.cache.slots());
        let none = |e: OutOfMemory| out_of_memory(e);
        let least: Vec<usize> = slots_before.iter().zip(&slots).map(|(&now, &then)| now.min(then)).collect();
        split.cache.resize(&mut *split.device, &least).map_err(none)?;
        // First the reserved bytes are given back, then as many are reserved as the new plan wants, or as before if the new budget is
        // refused.
        let nothing = split.device.reserve(0).map_err(none)?;
        let reserved = std::mem::replace(&mut split.reserved, nothing);
        split.device.free(reserved);
        let (context, sequences) = (self.context(&model), split.sequences());
        let reserve = |split: &mut Split, bytes: u64| {
            let now = split.device.reserve(bytes)?;
            let nothing = std::mem::replace(&mut split.reserved, now);
            split.device.free(nothing);
            Ok(())
        };
        let stream = |split: &mut Split, bytes: u64| {
            stream_experts(split, &model, self.footprint.block_bytes, &self.machine, bytes)
        };
        let streamed = split.streamed_bytes();
        // Keys and values, and room for copied experts, leave the device before the budget shrinks, and come after it has grown.
        let set = split
            .set_sequences(&model, context, plan.sequences.min(sequences))
            .and_then(|()| stream(split, plan.streamed_bytes.min(streamed)))
            .and_then(|()| split.device.set_budget(plan.budget_bytes))
            .and_then(|()| split.set_sequences(&model, context, plan.sequences))
            .and_then(|()| stream(split, plan.streamed_bytes))
            .and_then(|()| {
                let bytes = elsewhere(&model, plan, split);
                reserve(split, bytes)
            });
        if set.is_err() {
            // Keys and values that find no room stay on the host, and nothing is copied without room.
            let _ = split
                .set_sequences(&model, context, sequences)
                .and_then(|()| stream(split, streamed))
                .and_then(|()| reserve(split, reserved.bytes));
        }
        set.map_err(none)?;
        let Split { device, cache, .. } = split;
        cache.resize(&mut **device, &slots).map_err(none)?;
        for (l, neurons) in self.placed(&slots).iter().enumerate() {
            let table = &cache.layers[l].table;
            let mut free: Vec<SlotId> =
                (0..).map(SlotId).zip(table.slots()).filter(|(_, s)| **s == Slot::Free).map(|(i, _)| i).collect();
            free.reverse();
            let mut missing = model.layers[l].order.positions(neurons);
            missing.retain(|&n| !table.location(n).is_device());
            let frames = cached.as_mut().map(|cached| &mut cached.cache as &mut dyn Frames);
            cache.migrate_all_waiting(
                &mut **device,
                l,
                frames,
                missing.into_iter().map_while(|n| Some((free.pop()?, n))),
            );
        }
        let total = |slots: &[usize]| slots.iter().sum::<usize>();
        tracing::debug!(
            bytes_before = before,
            bytes_after = plan.budget_bytes,
            slots_before = total(&slots_before),
            slots_after = total(&slots),
            sequences = plan.sequences,
            "budget"
        );
        Ok(())
    }
}

/// How much of `free` bytes of host memory may be pinned for a card: a tenth is left to the rest of the system, because pinned pages cannot
/// be swapped.
pub const fn pinnable(free: u64) -> u64 {
    free / 10 * 9
}
