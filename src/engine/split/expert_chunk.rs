//! A mixture's FFN of a prompt's chunk on host and device. The device computes the experts in slots and those that are copied for the chunk;
//! the CPU computes the others at the same time ([`super::streaming`] divides). Copied experts lie in scratch memory in two halves, one of
//! which is filled while the other is computed, and are gone after the layer: nothing leaves a slot for them.

use super::experts::{by_columns, choose};
use super::scheduling::Beside;
use super::scratch::{ExpertStreaming, Scratch, distinct};
use super::state::{Split, frames};
use super::streaming::{ExpertCosts, Missing};
use super::weights::expert_parts;
use crate::cache::Frames;
use crate::cpu::MAX_COLUMNS;
use crate::device::{Call, ExpertFfn, NONE, OutOfMemory, Stream, View};
use crate::engine::forward::Pass;
use crate::engine::mixture::mixture;
use crate::engine::routing::{Group, Routed};
use crate::formats::will_need;
use crate::host_cache::HostCache;
use crate::ids::StoreId;
use crate::model::layer::Experts;
use crate::model::{ExpertWeights, FfnWeights, Model};
use std::ops::Range;

/// Bytes of gate, up and down of an expert, or of up and down; of the largest where they differ from layer to layer.
fn part_bytes(model: &Model) -> Vec<u64> {
    let mut most = vec![0; model.config.ffn_kind.rows()];
    for layer in &model.layers {
        let FfnWeights::Experts(weights) = &layer.ffn else { continue };
        let parts = weights.experts.first().into_iter().flat_map(|expert| expert.parts());
        most.iter_mut().zip(parts).for_each(|(most, part)| *most = part.bytes().max(*most));
    }
    most
}

impl Split {
    /// Gives experts that are copied for a chunk up to `bytes` of device memory, in place of what they have: two halves of as many whole
    /// experts. Without room for one in each, the CPU computes what is in no slot. Not to be called while tokens are made.
    ///
    /// # Errors
    /// The device has no room: then they have none.
    pub fn stream_experts(&mut self, model: &Model, costs: ExpertCosts, bytes: u64) -> Result<(), OutOfMemory> {
        let parts = part_bytes(model);
        let half = (bytes / 2).checked_div(parts.iter().sum()).unwrap_or(0).min(model.config.clusters() as u64);
        let device = &mut self.device;
        match self.expert_streaming.scratch.take() {
            Some(scratch) if scratch.half as u64 == half => {
                self.expert_streaming.scratch = Some(Scratch { costs, ..scratch });
                return Ok(());
            }
            Some(scratch) => scratch.buffers().for_each(|buffer| {
                self.bytes -= buffer.bytes;
                device.free(buffer);
            }),
            None => {}
        }
        if half == 0 {
            return Ok(());
        }
        let mut buffers = Vec::new();
        for bytes in parts.iter().chain(&parts).map(|part| half * part) {
            match device.alloc(bytes) {
                Ok(buffer) => buffers.push(buffer),
                Err(refused) => {
                    buffers.into_iter().for_each(|buffer| device.free(buffer));
                    return Err(refused);
                }
            }
        }
        self.bytes += buffers.iter().map(|buffer| buffer.bytes).sum::<u64>();
        let (first, second) = buffers.split_at(parts.len());
        let blocks = [expert_parts(first), expert_parts(second)];
        self.expert_streaming.scratch = Some(Scratch { costs, half: half as usize, blocks });
        Ok(())
    }

    /// Bytes of device memory for experts that are copied for a chunk.
    pub fn streamed_bytes(&self) -> u64 {
        let of = |scratch: &Scratch| scratch.buffers().map(|buffer| buffer.bytes).sum();
        self.expert_streaming.scratch.as_ref().map_or(0, of)
    }

    /// The chosen experts of a chunk's layer: from slots, from copies, and on the CPU.
    pub(super) fn expert_chunk(&mut self, pass: &mut Pass<'_, '_>, l: usize) {
        let (n, c) = (pass.n(), &pass.model.config);
        let (experts, weights) = mixture(pass, l);
        self.divide_experts(pass, l, experts);
        self.divide_missing(pass, l, experts);
        self.begin_beside_copies(pass, l);
        let (resident, on_cpu) = (self.active[l], self.experts.on_host.tokens.len() as u64);
        if resident > 0 || weights.shared.is_some() {
            self.send_chosen(c, l, n);
        }
        self.launch_shared(pass, l, weights);
        if resident > 0 {
            self.launch_experts(c, l, n, weights);
            self.add_output(c, n);
        }
        let (at_hand, turns) = self.turns(pass, l, weights);
        self.copy_experts(pass, l, weights, 0..at_hand);
        self.teach(pass, l);
        // The order in which parts are added stays what it is: the CPU's is the last.
        let read =
            if on_cpu > 0 || pass.cached.is_some() { self.host_experts(pass, l, weights, Beside::Nothing) } else { 0 };
        self.copy_experts(pass, l, weights, at_hand..turns);
        if on_cpu > 0 {
            self.add_partial(c);
        }
        self.end_sum(c, l);
        self.device.record(Stream::Compute, self.parts.marks().done[l % 2]);
        let all = pass.buffers.routes.tokens.len();
        self.chunks.resident += resident;
        self.chunks.streamed += all as u64 - resident - on_cpu;
        self.chunks.on_cpu += on_cpu;
        let read = crate::engine::ffn::ExpertsRead { bytes: read + weights.router_bytes(), ..Default::default() };
        pass.probe.report.add_experts(l, c, all, read);
    }

    /// Divides the experts that are in no slot between link and CPU: `missing` becomes all of them, of which the first are copied, and
    /// `on_host` what is left for the CPU.
    fn divide_missing(&mut self, pass: &Pass<'_, '_>, l: usize, experts: Experts) {
        let (n, routes, table) = (pass.n(), &pass.buffers.routes, &self.cache.layers[l].table);
        let ExpertStreaming { scratch, missing, copied, is_copied, chosen, .. } = &mut self.expert_streaming;
        *copied = 0;
        let Some(Scratch { costs, half, .. }) = scratch else { return };
        let in_slot = |expert: usize| table.location(StoreId::new(expert)).is_device();
        let tokens = |group: &Group| &routes.tokens[group.first..group.first + group.tokens];
        // The device reads the shared expert for all tokens, as if it were so many others.
        let (_, weights) = mixture(pass, l);
        let Some(expert) = weights.experts.first() else { return self.experts.on_host.take(routes, |_| false) };
        let of_shared = weights.shared_bytes().div_ceil(expert.bytes());
        let (mut reads_here, mut tokens_here) = (of_shared * n.div_ceil(MAX_COLUMNS) as u64, of_shared * n as u64);
        missing.clear();
        for group in &routes.groups {
            let reads = reads(tokens(group));
            match in_slot(group.expert) {
                true => (reads_here, tokens_here) = (reads_here + u64::from(reads), tokens_here + group.tokens as u64),
                false => missing.push(Missing { expert: group.expert, tokens: group.tokens as u32, groups: reads }),
            }
        }
        *copied = costs.divide(missing, n, (reads_here, tokens_here), *half).copied;
        is_copied.clear();
        is_copied.resize(experts.count, false);
        missing[..*copied].iter().for_each(|missing| is_copied[missing.expert] = true);
        let words = ExpertFfn::chosen_words(n, experts.used);
        for (copied, chosen) in missing[..*copied].chunks(*half).zip(chosen.chunks_exact_mut(words)) {
            chosen.fill(NONE);
            for (slot, missing) in copied.iter().enumerate() {
                let group =
                    routes.groups.iter().find(|group| group.expert == missing.expert).expect("it is one of them");
                choose(chosen, experts.used, tokens(group), ExpertFfn::choice(slot as u32, missing.expert));
            }
        }
        self.experts.on_host.take(routes, |expert| !in_slot(expert) && !is_copied[expert]);
    }

    /// Begins to read what is left for the CPU. What frames have of the experts that are copied stays there meanwhile, and is not displaced later:
    /// nothing else comes to a layer's frames before its next use, by when the copies are long done.
    fn begin_beside_copies(&mut self, pass: &mut Pass<'_, '_>, l: usize) {
        if let Some(frames) = frames(&mut pass.cached) {
            for missing in &self.expert_streaming.missing[..self.expert_streaming.copied] {
                let expert = StoreId::new(missing.expert);
                if frames.part(l, expert, 0).is_some() {
                    frames.hold(l, expert);
                }
            }
        }
        self.begin_host_experts(pass, l);
        if let Some(frames) = frames(&mut pass.cached) {
            frames.release(l, &self.cache.layers[l].table);
        }
    }

    /// How often a half of the scratch memory is filled for the layer, and how often at first without keeping the host: what is in no frame comes
    /// from disk by way of the system's cache, and what is not pinned may have to wait for the link. The system is asked for what it is to bring.
    fn turns(&mut self, pass: &Pass<'_, '_>, l: usize, weights: &ExpertWeights) -> (usize, usize) {
        let (cache, streaming) = (pass.cached.as_deref().map(|cached| &cached.cache), &self.expert_streaming);
        let copied = &streaming.missing[..streaming.copied];
        let (Some(Scratch { half, .. }), Some(first)) = (&streaming.scratch, copied.first()) else { return (0, 0) };
        let in_memory = |expert: usize| cache.is_none_or(|cache| cache.part(l, StoreId::new(expert), 0).is_some());
        for missing in copied.iter().filter(|missing| !in_memory(missing.expert)) {
            weights.experts[missing.expert].parts().for_each(|part| will_need(part.all()));
        }
        let bytes = weights.experts[first.expert].bytes() as usize;
        let part = sources(cache, l, weights, first.expert).next();
        let room = part.map_or(0, |(from, part)| self.device.room_for_moves(from, part, bytes));
        let mut count = 0;
        let at_hand = copied.chunks(*half).take_while(|turn| {
            count += turn.len();
            count <= room && turn.iter().all(|missing| in_memory(missing.expert))
        });
        (at_hand.count(), copied.len().div_ceil(*half))
    }

    /// Copies experts to the device, one half of the scratch memory after the other, and has each half computed while the next is filled: those of
    /// these turns.
    fn copy_experts(&mut self, pass: &Pass<'_, '_>, l: usize, weights: &ExpertWeights, turns: Range<usize>) {
        let (c, n, cache) = (&pass.model.config, pass.n(), pass.cached.as_deref().map(|cached| &cached.cache));
        let streaming = &self.expert_streaming;
        let (Some(Scratch { half, blocks, .. }), copied) = (&streaming.scratch, streaming.copied) else { return };
        let (half, blocks, arrived, done) = (*half, *blocks, streaming.arrived, streaming.done);
        let words = ExpertFfn::chosen_words(n, c.experts(l).map_or(0, |experts| experts.used));
        for turn in turns {
            let (streaming, device) = (&self.expert_streaming, &mut self.device);
            let experts = &streaming.missing[turn * half..copied.min((turn + 1) * half)];
            let (which, slots) = (turn % 2, experts.len());
            device.wait(Stream::Copy, done[which]);
            for (slot, missing) in experts.iter().enumerate() {
                let to = distinct(&blocks[which]);
                for ((from, bytes), buffer) in sources(cache, l, weights, missing.expert).zip(to) {
                    // SAFETY: a matrix of the model's file, which outlives the device, or of a frame, which has it until the layer's next use.
                    unsafe { device.copy_in(Stream::Copy, from, bytes, buffer, (slot * bytes) as u64) };
                }
            }
            let chosen = &streaming.chosen[turn * words..(turn + 1) * words];
            let to = View { buffer: self.workspace.copied, at: which as u64 * self.workspace.copied.bytes / 2 };
            // SAFETY: the words change again only in the next layer, after its input was waited for, which comes behind this.
            unsafe { device.copy_in(Stream::Copy, chosen.as_ptr().cast(), words * 4, to.buffer, to.at) };
            device.record(Stream::Copy, arrived[which]);
            device.wait(Stream::Compute, arrived[which]);
            let call =
                ExpertFfn { slots, blocks: blocks[which], chosen: to, ..self.expert_call(c, l, n, weights, slots) };
            by_columns(call).for_each(|call| self.launch(Call::ExpertFfn(call)));
            self.add_output(c, n);
            self.device.record(Stream::Compute, done[which]);
        }
    }
}

/// Where the matrices of an expert lie, and their bytes: in its frame of host memory if it has one, else in the mapped file.
fn sources<'a>(
    cache: Option<&'a HostCache>,
    l: usize,
    weights: &'a ExpertWeights,
    expert: usize,
) -> impl Iterator<Item = (*const u8, usize)> + 'a {
    weights.experts[expert].parts().enumerate().map(move |(number, matrix)| {
        let frame = cache.and_then(|cache| cache.part(l, StoreId::new(expert), number));
        (frame.unwrap_or_else(|| matrix.row_ptr(0)), matrix.bytes() as usize)
    })
}

/// How often the device reads an expert that these tokens have, ascending: once for each group of tokens that its kernel takes.
fn reads(tokens: &[Routed]) -> u32 {
    tokens.chunk_by(|a, b| a.token / MAX_COLUMNS == b.token / MAX_COLUMNS).count() as u32
}
