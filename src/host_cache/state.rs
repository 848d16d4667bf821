//! The cache: its layers, its landing and its reads, and a use of a layer from beginning to end.

use super::blocks::{LayerBlocks, Pieces};
use super::checksums::Checksums;
use super::fault::{ReadFault, Unread};
use super::layer::Layer;
use super::memory::Memory;
use super::options::{HALF, HostCacheCounts, HostCacheOptions, least_half};
use super::plan::{Ahead, Arriving, Filling, Listing, Plan, Room, Round, Strips, Wanted};
use super::reads::{MAX_AHEAD, Reads};
use super::shares::{Regions, Shares, frames_bytes};
use crate::cache::{Frames, Location, SlotTable};
use crate::device::NONE;
use crate::disk::Disk;
use crate::ids::{SlotId, StoreId};
use crate::scheduler::policy::{ChooseMoves, LayerState, Scratch};
use crate::scheduler::{Move, Rules};
use std::io;

/// The neurons of all layers that are in host memory, and the reads of others.
pub struct HostCache {
    // Dropped first: the kernel may write to the memory while one is under way.
    pub(super) reads: Reads,
    pub(super) layers: Vec<Layer>,
    pub(super) neurons: usize,
    pub(super) align: usize,
    pub(super) options: HostCacheOptions,
    pub(super) rules: Rules,
    pub(super) policy: Box<dyn ChooseMoves>,
    pub(super) scratch: Scratch,
    pub(super) moves: Vec<Move>,
    /// 255 for neurons that are needed now, `[neurons]`.
    pub(super) needed: Vec<u8>,
    /// The slot that a neuron comes to now, or [`NONE`], `[neurons]`.
    pub(super) slot_for: Vec<u32>,
    /// Slots that are being filled.
    pub(super) filling: Vec<Filling>,
    pub(super) landing: Memory,
    pub(super) half: usize,
    /// Unwanted bytes that are read along, at most.
    pub(super) gap: usize,
    pub(super) regions: Regions,
    pub(super) plan: Plan,
    /// What was asked for of layers whose turn has not come: of layer l at `l % len`.
    pub(super) aheads: Vec<Ahead>,
    pub(super) strips: Strips,
    /// The layer at hand, and that of the last use of listed neurons.
    pub(super) layer: usize,
    pub(super) begun: Option<usize>,
    pub(super) token: u32,
    pub(super) counts: HostCacheCounts,
    pub(super) fault: Option<ReadFault>,
}

// SAFETY: its pointers are into memory of its own.
unsafe impl Send for HostCache {}

impl HostCache {
    /// An empty cache for layers of `neurons` neurons each, which `disk` reads.
    ///
    /// # Errors
    /// The system does not give the memory.
    ///
    /// # Panics
    /// If the bytes are fewer than [`super::least_bytes`].
    pub fn new(
        disk: Box<dyn Disk>,
        layers: &[LayerBlocks],
        neurons: usize,
        options: HostCacheOptions,
    ) -> io::Result<HostCache> {
        let align = disk.align();
        assert!(options.ahead <= MAX_AHEAD, "beyond the largest prefetch distance");
        let shares = Shares::of(layers, neurons, align, &options);
        let most = HALF.max(least_half(layers, neurons, align, options.costs.gap()));
        let landing = Memory::new(2 * most + (options.ahead + 1) * most / 2, shares.landing())?;
        let checksums = Checksums::new(layers, neurons);
        let layer = |(number, blocks): (usize, &LayerBlocks)| {
            let pieces = Pieces::new(blocks, neurons, align);
            let bytes = |slots: usize| frames_bytes(pieces.frame_bytes, slots);
            Ok(Layer {
                number,
                blocks: blocks.clone(),
                table: SlotTable::new(0, neurons),
                frames: Memory::new(bytes(neurons), bytes(shares.slots(blocks, pieces.frame_bytes, neurons)))?,
                pieces,
                told: usize::MAX,
                last: vec![0; neurons],
                frequencies: vec![0.0; neurons],
                held: Vec::with_capacity(neurons),
            })
        };
        let layers = layers.iter().enumerate().map(layer).collect::<io::Result<Vec<Layer>>>()?;
        let rules = options.policy.rules().on_demand();
        let most_reads = layers.iter().map(|l| l.blocks.most_reads(neurons)).max().unwrap_or(0);
        let most_pieces = layers.iter().map(|l| l.blocks.runs().len()).max().unwrap_or(1);
        let mut cache = HostCache {
            reads: Reads::new(disk, most_reads, checksums),
            policy: options.policy.start(layers.len(), neurons, &rules),
            layers,
            neurons,
            align,
            options,
            rules,
            scratch: Scratch::new(neurons, options.seed),
            moves: Vec::with_capacity(neurons),
            needed: vec![0; neurons],
            slot_for: vec![NONE; neurons],
            filling: Vec::with_capacity(neurons),
            regions: Regions { first: landing.start(), bytes: 0, count: 1 },
            landing,
            half: 0,
            gap: 0,
            plan: Plan::new(neurons, most_pieces),
            aheads: (0..MAX_AHEAD + 1).map(|_| Ahead::new(neurons, most_pieces)).collect(),
            strips: Strips::default(),
            layer: 0,
            begun: None,
            token: 0,
            counts: HostCacheCounts::default(),
            fault: None,
        };
        cache.set_budget(options.bytes)?;
        Ok(cache)
    }

    /// Fills a layer's frames with the neurons that were active most often, by `counts` of some `tokens`, `[ffn]` in the store's order, and
    /// lets the policy begin with these frequencies. Before the layer's first use.
    ///
    /// # Errors
    /// What could not be read. Damaged neurons are left out.
    pub fn place(&mut self, layer: usize, counts: &[u64], tokens: u64) -> Result<(), ReadFault> {
        self.come_to(layer);
        let HostCache { layers, slot_for, plan, aheads, reads, filling, align, .. } = self;
        let at = &mut layers[layer];
        let frequencies = counts.iter().map(|&count| count as f32 / tokens.max(1) as f32);
        at.frequencies.iter_mut().zip(frequencies).for_each(|(f, count)| *f = count);
        let mut neurons: Vec<StoreId> = (0..counts.len()).filter(|&n| counts[n] > 0).map(StoreId::new).collect();
        neurons.sort_by_key(|n| (std::cmp::Reverse(counts[n.index()]), *n));
        neurons.truncate(at.table.slots().len());
        neurons.sort();
        for (slot, &neuron) in neurons.iter().enumerate() {
            at.table.fill(SlotId::new(slot), neuron).expect("the frame is empty");
            slot_for[neuron.index()] = slot as u32;
        }
        // Each by itself, so that it goes straight to its frame.
        let room = Room { together: false, ..Room::new(at, *align, 0, std::ptr::null_mut(), 0) };
        let wanted = Wanted { neurons: &neurons, early: &aheads[layer % aheads.len()].early, slot_for };
        plan.make(&room, wanted, 1, &mut Listing { reads, filling });
        neurons.iter().for_each(|n| slot_for[n.index()] = NONE);
        let listed = reads.listed(0);
        // SAFETY: the frames are this cache's own, and nothing reads them yet.
        unsafe { reads.allow(0, listed) };
        self.settle();
        // What is damaged has no frame, and ends the answers that need it.
        let fault =
            self.fault.take().filter(|fault| !matches!(fault.why, Unread::Damaged { .. } | Unread::NotFinite { .. }));
        fault.map_or(Ok(()), Err)
    }

    /// How the disk reads, for people.
    pub fn disk_name(&mut self) -> String {
        self.reads.disk().name()
    }

    /// How it works.
    pub fn options(&self) -> &HostCacheOptions {
        &self.options
    }

    /// Frames of all layers, and neurons of all layers that have any.
    pub fn frames(&self) -> (usize, usize) {
        let used = self.layers.iter().filter(|layer| !layer.blocks.is_idle());
        (self.layers.iter().map(|l| l.table.slots().len()).sum(), self.neurons * used.count())
    }

    /// What happened so far.
    pub fn counts(&mut self) -> HostCacheCounts {
        let (reads, waited_ns) = self.reads.counts();
        HostCacheCounts { reads, waited_ns, ..self.counts }
    }

    /// The first read that failed for good since this was last asked: what was computed with it is worth nothing.
    pub fn take_fault(&mut self) -> Option<ReadFault> {
        self.fault.take()
    }

    /// The first read that failed for good, still there.
    pub fn fault(&self) -> Option<&ReadFault> {
        self.fault.as_ref()
    }

    /// Begins a use of a layer: these neurons are needed, ascending, in `units` of equal length (unit u those from u * n / units on). Their
    /// reads begin.
    ///
    /// # Panics
    /// If a unit is longer than the landing was made for.
    pub fn begin(&mut self, layer: usize, neurons: &[StoreId], units: usize) {
        if self.begun.is_none_or(|before| layer <= before) {
            self.token += 1;
        }
        self.begun = Some(layer);
        self.come_to(layer);
        self.filling.clear();
        self.mark(neurons, 255);
        self.choose(layer, neurons);
        let place = layer % self.aheads.len();
        let HostCache {
            layers,
            plan,
            reads,
            aheads,
            slot_for,
            filling,
            align,
            half,
            gap,
            landing,
            options,
            counts,
            ..
        } = self;
        let room =
            Room { together: options.together, ..Room::new(&layers[layer], *align, *gap, landing.start(), *half) };
        let wanted = Wanted { neurons, early: &aheads[place].early, slot_for };
        plan.make(&room, wanted, units, &mut Listing { reads, filling });
        let (misses, early) = plan.misses();
        counts.misses += misses;
        counts.early += early;
        counts.hits += neurons.len() as u64 - misses - early;
        filling.iter().for_each(|f| slot_for[f.neuron.index()] = NONE);
        self.take_over(place);
        self.mark(neurons, 0);
        let allowed = self.plan.allowed();
        // SAFETY: frames and halves are this cache's own; a half's reads begin when the round that used it before is computed.
        unsafe { self.reads.allow(0, allowed) };
    }

    /// Says of neurons whether they are needed: 255 or 0.
    pub(super) fn mark(&mut self, neurons: &[StoreId], needed: u8) {
        neurons.iter().for_each(|n| self.needed[n.index()] = needed);
    }

    /// Asks the policy which of these neurons, which are marked, get a frame, and takes the frames.
    pub(super) fn choose(&mut self, layer: usize, neurons: &[StoreId]) {
        let HostCache { layers, policy, rules, scratch, moves, needed, slot_for, token, .. } = self;
        let at = &mut layers[layer];
        let is_full = at.table.residents() == at.table.slots().len();
        moves.clear();
        // A static policy fills its frames once.
        // Those on their way, too: policies that do not look at slots being filled choose them once more.
        let missing = neurons.iter().filter(|n| !at.table.location(**n).is_device()).count();
        if missing > 0 && (rules.moves || !is_full) {
            let state = LayerState {
                layer,
                slots: at.table.slots(),
                probabilities: Some(needed),
                frequencies: &at.frequencies,
                last: &at.last,
                token: *token,
                move_cost: 0.0,
                host_fixed: 0.0,
                rules,
            };
            policy.choose(&state, missing, scratch, moves);
        }
        for m in moves.iter() {
            let held = at.table.slots()[m.slot().index()].resident();
            // A neuron that is needed or copied now is not evicted now, and only needed ones get a frame.
            let in_use = |held: StoreId| needed[held.index()] != 0 || at.held.contains(&held);
            let stays = held.is_some_and(|held| !rules.moves || in_use(held));
            if needed[m.neuron().index()] != 0 && !stays && at.table.fill(m.slot(), m.neuron()).is_ok() {
                slot_for[m.neuron().index()] = m.slot().0;
            }
        }
    }

    /// The next units to compute, each of them once; their reads are under way, and those of the round after begin. `None` after the last.
    pub fn next_round(&mut self) -> Option<Round> {
        let round = self.plan.next_round()?;
        let allowed = self.plan.allowed();
        // SAFETY: as in `begin`.
        unsafe { self.reads.allow(0, allowed) };
        if !self.options.overlap {
            self.plan.wait_for(&round, &self.reads);
        }
        Some(round)
    }

    /// The needed neurons, for the threads of a parallel call.
    pub fn arriving(&self) -> Arriving<'_> {
        Arriving::new(&self.plan, &self.reads, self.layers[self.layer].blocks.runs())
    }

    /// Ends the use: neurons that were read are found from now on.
    pub fn end(&mut self, neurons: &[StoreId]) {
        self.settle();
        let HostCache { layers, policy, rules, token, layer, .. } = self;
        let at = &mut layers[*layer];
        let decay = rules.decay;
        at.frequencies.iter_mut().for_each(|f| *f *= decay);
        for neuron in neurons {
            at.frequencies[neuron.index()] += 1.0 - decay;
            at.last[neuron.index()] = *token;
        }
        let state = LayerState {
            layer: *layer,
            slots: at.table.slots(),
            probabilities: None,
            frequencies: &at.frequencies,
            last: &at.last,
            token: *token,
            move_cost: 0.0,
            host_fixed: 0.0,
            rules,
        };
        policy.computed(&state, neurons);
    }

    /// Waits for the layer's reads; the neurons that they brought are found from now on.
    pub(super) fn settle(&mut self) {
        self.reads.finish(0);
        let HostCache { layers, filling, reads, counts, layer, .. } = self;
        let table = &mut layers[*layer].table;
        for Filling { slot, reads: by, .. } in filling.drain(..) {
            if reads.are_here(by) {
                table.landed(slot);
                counts.kept += 1;
            } else {
                table.abandon(slot);
            }
        }
        // What was foreseen and is not needed may fail.
        self.fault = self.fault.or(self.reads.fault(|read| self.plan.needs(read)));
    }

    /// Which neuron each frame of a layer holds, for tests.
    pub fn table(&self, layer: usize) -> &SlotTable {
        &self.layers[layer].table
    }
}

impl Frames for HostCache {
    fn part(&self, layer: usize, cluster: StoreId, part: usize) -> Option<*const u8> {
        let at = &self.layers[layer];
        let Location::Device(frame) = at.table.location(cluster) else { return None };
        let offset = at.blocks.runs()[part].at(cluster.index()) % self.align as u64;
        Some(at.frame_of(frame, part).wrapping_add(offset as usize))
    }

    fn hold(&mut self, layer: usize, cluster: StoreId) {
        self.layers[layer].held.push(cluster);
    }

    fn release(&mut self, layer: usize, slots: &SlotTable) {
        let Layer { held, table, .. } = &mut self.layers[layer];
        held.retain(|&cluster| {
            if let (true, Location::Device(frame)) = (slots.location(cluster).is_device(), table.location(cluster)) {
                // Two tiers hold more than one twice: its frame is for what only the disk has.
                table.clear(frame).expect("it is not being filled");
            }
            slots.is_coming(cluster)
        });
    }
}

impl Drop for HostCache {
    fn drop(&mut self) {
        // The kernel writes to the memory until then.
        (0..=MAX_AHEAD).for_each(|ahead| self.reads.finish(ahead));
    }
}
