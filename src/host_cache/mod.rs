//! The neuron cache in host memory (PowerInfer-2 4.2): neurons of a store that is larger than memory, in frames of fixed places, read from
//! disk when they are needed. Experts of a mixture are kept in the same way: what is said of neurons here is true of them.
//!
//! Each layer has as many frames as the memory allows, and a policy of the scheduler chooses the neurons that stay in them. A needed neuron
//! without a frame is read: into the frame that it gets, or, where several are read at once or no frame is free, into the **landing**, from
//! where the thread that computes it copies it into its frame. A neuron that gets no frame is computed in the landing and forgotten.
//!
//! A layer's use: [`HostCache::begin`] with the neurons that are needed, in units that are each computed by one thread; for each
//! [`HostCache::next_round`] a parallel call that finds them by [`Arriving`]; [`HostCache::end`]. One round has what one half of the landing
//! takes, and the reads of the next round are under way meanwhile. Where all neurons are needed, [`HostCache::begin_strips`] streams them
//! through the landing, in order and in large reads (4.1.1).
//!
//! For layers whose turn has not come, [`HostCache::prefetch`] asks for what they will probably need.
//!
//! Where the file has a checksum of each block, a block is compared with it when it is first read (`checksums`).
//!
//! Only the engine's thread changes anything here, between parallel calls; within one, threads look and wait (`reads`).

mod ahead;
mod blocks;
mod checksums;
mod fault;
mod memory;
mod plan;
mod reads;
mod rehearsal;
mod shares;
mod strips;

pub use blocks::{LayerBlocks, MAX_UNITS, Run, STRIP_READ, units_of};
pub use fault::{ReadFault, Unread};
pub use plan::{Arriving, Round};
pub use reads::{MAX_AHEAD, ReadCounts};
pub use rehearsal::{BEFORE, COUNTED, Rehearsal, Rehearsed};
pub use strips::Strip;

use crate::cache::{Frames, Location, SlotTable};
use crate::device::NONE;
use crate::disk::{Disk, DiskCosts};
use crate::ids::{SlotId, StoreId};
use crate::scheduler::policy::{ChooseMoves, LayerState, Scratch};
use crate::scheduler::{Move, Policy, Rules};
use ahead::{Ahead, Regions};
use blocks::Pieces;
use checksums::Checksums;
use memory::Memory;
use plan::{Filling, Listing, Plan, Room, Wanted};
use reads::Reads;
use shares::{Shares, frames_bytes};
use std::io;
use strips::Strips;

/// Neurons of a strip are a multiple of this where columns are many: as many as the matrix product takes at a time.
pub const STRIP: usize = 256;
/// Bytes of a half of the landing beyond which a larger one gains nothing: several hundred reads.
const HALF: usize = 8 << 20;
/// The landing's share of the memory where there is little of it: one part in so many for each half.
const HALF_SHARE: usize = 16;

/// How a cache works.
#[derive(Clone, Copy, Debug)]
pub struct HostCacheOptions {
    /// Memory for frames and landing together, bytes.
    pub bytes: u64,
    /// Chooses the neurons that stay in the frames.
    pub policy: Policy,
    /// Whether neighbours are read together where [`HostCacheOptions::costs`] say that it pays.
    pub together: bool,
    /// Whether what is there is computed while the rest is read.
    pub overlap: bool,
    /// For how many layers ahead neurons may be asked for, up to [`MAX_AHEAD`]; 0: none are.
    pub ahead: usize,
    /// What reads cost.
    pub costs: DiskCosts,
    /// Of policies that draw.
    pub seed: u64,
}

impl HostCacheOptions {
    /// With so many bytes, and defaults for everything else.
    pub fn new(bytes: u64) -> HostCacheOptions {
        HostCacheOptions {
            bytes,
            policy: Policy::TwoQueues,
            together: true,
            overlap: true,
            ahead: 0,
            costs: DiskCosts::USUAL,
            seed: 1,
        }
    }

    /// The longest run of unwanted bytes that is read along: the disk says what is worth it, and the memory how much room there is, so that a
    /// disturbed measurement of the disk leaves the frames theirs.
    fn gap(&self, layers: &[LayerBlocks], neurons: usize, align: usize) -> usize {
        let half = usize::try_from(self.bytes).unwrap_or(usize::MAX) / HALF_SHARE;
        let room = layers.iter().map(|layer| layer.longest_gap(neurons, align, half)).min().unwrap_or(0);
        if self.together { self.costs.gap().min(room) } else { 0 }
    }
}

/// What happened since the cache was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostCacheCounts {
    /// Neurons that were needed and in a frame.
    pub hits: u64,
    /// Neurons that were needed and had to be read.
    pub misses: u64,
    /// Neurons that were needed and had been asked for before their layer's turn.
    pub early: u64,
    /// Neurons that got a frame.
    pub kept: u64,
    /// Neurons that were streamed, all of a layer's.
    pub streamed: u64,
    /// Reads from disk.
    pub reads: ReadCounts,
    /// Nanoseconds that threads have waited for reads, all together.
    pub waited_ns: u64,
}

impl HostCacheCounts {
    /// What happened between `before` and now.
    pub fn since(&self, before: &HostCacheCounts) -> HostCacheCounts {
        HostCacheCounts {
            hits: self.hits - before.hits,
            misses: self.misses - before.misses,
            early: self.early - before.early,
            kept: self.kept - before.kept,
            streamed: self.streamed - before.streamed,
            reads: ReadCounts {
                reads: self.reads.reads - before.reads.reads,
                bytes: self.reads.bytes - before.reads.bytes,
                again: self.reads.again - before.reads.again,
                verified: self.reads.verified - before.reads.verified,
                verified_bytes: self.reads.verified_bytes - before.reads.verified_bytes,
            },
            waited_ns: self.waited_ns - before.waited_ns,
        }
    }
}

impl std::ops::AddAssign for HostCacheCounts {
    fn add_assign(&mut self, more: HostCacheCounts) {
        self.hits += more.hits;
        self.misses += more.misses;
        self.early += more.early;
        self.kept += more.kept;
        self.streamed += more.streamed;
        self.reads.reads += more.reads.reads;
        self.reads.bytes += more.reads.bytes;
        self.reads.again += more.reads.again;
        self.reads.verified += more.reads.verified;
        self.reads.verified_bytes += more.reads.verified_bytes;
        self.waited_ns += more.waited_ns;
    }
}

struct Layer {
    number: usize,
    blocks: LayerBlocks,
    table: SlotTable,
    /// Its frames, and how each is laid out.
    frames: Memory,
    pieces: Pieces,
    /// Bytes of the frames that the disk is told of at most.
    told: usize,
    /// Token at which each neuron was computed last, `[neurons]`.
    last: Vec<u32>,
    /// How often each was computed lately, 0 to 1, `[neurons]`.
    frequencies: Vec<f32>,
    /// Neurons that a device is copying from their frames.
    held: Vec<StoreId>,
}

impl Layer {
    /// The frame of a slot.
    fn frame(&self, slot: SlotId) -> *mut u8 {
        self.frames.start().wrapping_add(slot.index() * self.pieces.frame_bytes)
    }

    /// Where a piece of a slot's block goes.
    fn frame_of(&self, slot: SlotId, piece: usize) -> *mut u8 {
        self.frame(slot).wrapping_add(self.pieces.starts[piece])
    }
}

/// The neurons of all layers that are in host memory, and the reads of others.
pub struct HostCache {
    // Dropped first: the kernel may write to the memory while one is under way.
    reads: Reads,
    layers: Vec<Layer>,
    neurons: usize,
    align: usize,
    options: HostCacheOptions,
    rules: Rules,
    policy: Box<dyn ChooseMoves>,
    scratch: Scratch,
    moves: Vec<Move>,
    /// 255 for neurons that are needed now, `[neurons]`.
    needed: Vec<u8>,
    /// The slot that a neuron comes to now, or [`NONE`], `[neurons]`.
    slot_for: Vec<u32>,
    /// Slots that are being filled.
    filling: Vec<Filling>,
    landing: Memory,
    half: usize,
    /// Unwanted bytes that are read along, at most.
    gap: usize,
    regions: Regions,
    plan: Plan,
    /// What was asked for of layers whose turn has not come: of layer l at `l % len`.
    aheads: Vec<Ahead>,
    strips: Strips,
    /// The layer at hand, and that of the last use of listed neurons.
    layer: usize,
    begun: Option<usize>,
    token: u32,
    counts: HostCacheCounts,
    fault: Option<ReadFault>,
}

// SAFETY: its pointers are into memory of its own.
unsafe impl Send for HostCache {}

/// Bytes of a half of the landing for layers of `neurons` neurons, at least: the largest unit and the shortest strip.
fn least_half(layers: &[LayerBlocks], neurons: usize, align: usize, gap: usize) -> usize {
    let of = |layer: &LayerBlocks| layer.least_half(neurons, align, gap);
    layers.iter().map(of).max().unwrap_or(0).next_multiple_of(PAGE)
}

/// Frames and halves begin at multiples of this.
const PAGE: usize = 4096;

/// The fewest bytes that a cache for these layers works with, without a frame.
pub fn least_bytes(layers: &[LayerBlocks], neurons: usize, align: usize) -> u64 {
    2 * least_half(layers, neurons, align, 0) as u64
}

impl HostCache {
    /// An empty cache for layers of `neurons` neurons each, which `disk` reads.
    ///
    /// # Errors
    /// The system does not give the memory.
    ///
    /// # Panics
    /// If the bytes are fewer than [`least_bytes`].
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
                frames: Memory::new(bytes(neurons), bytes(shares.slots(pieces.frame_bytes, neurons)))?,
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

    /// Frames of all layers, and neurons of all layers.
    pub fn frames(&self) -> (usize, usize) {
        (self.layers.iter().map(|l| l.table.slots().len()).sum(), self.neurons * self.layers.len())
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
    fn mark(&mut self, neurons: &[StoreId], needed: u8) {
        neurons.iter().for_each(|n| self.needed[n.index()] = needed);
    }

    /// Asks the policy which of these neurons, which are marked, get a frame, and takes the frames.
    fn choose(&mut self, layer: usize, neurons: &[StoreId]) {
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
            rules,
        };
        policy.computed(&state, neurons);
    }

    /// Waits for the layer's reads; the neurons that they brought are found from now on.
    fn settle(&mut self) {
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
