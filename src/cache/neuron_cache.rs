//! The slots of all layers on one device: which neurons they hold, which are on their way, and the moves that bring them.
//!
//! No move waits, and nothing waits for one: moves without room on the device are put off, and the scheduler asks again if they are still
//! wanted. The slot's old neuron is a miss at once, the copy runs on the copy stream after the layer's last use, and once it is seen to be
//! done the new neuron is a hit. With [`NeuronCache::barrier`] the engine waits for a layer's copies before it uses the layer (DynamicInfer
//! C.3), on the same code path.

use super::slot_table::{Refused, Slot, SlotTable};
use super::tier::PerTier;
use crate::device::{Block, Buffer, Device, Event, MoveRate, Note, OutOfMemory, PinnedBuffer, Stream, fastest, run};
use crate::ids::{LayerId, SlotId, StoreId};

/// Most groups of moves that are on their way at once. A further one is refused, and may be asked for again later.
pub const MAX_IN_FLIGHT: usize = 4096;

/// A move of one neuron into a slot of its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Migration {
    /// The layer.
    pub layer: LayerId,
    /// The slot of that layer; the neuron that is in it is replaced.
    pub slot: SlotId,
    /// The neuron.
    pub neuron: StoreId,
}

/// Memory of the host in which some of a model's clusters lie, where the others are on disk: the middle tier of three.
pub trait Frames {
    /// The first byte of a part of a layer's cluster; `None` if the cluster is not in memory, or on its way there.
    fn part(&self, layer: usize, cluster: StoreId, part: usize) -> Option<*const u8>;

    /// The cluster's bytes are being copied to a device: they stay where they are until [`Frames::release`].
    fn hold(&mut self, layer: usize, cluster: StoreId);

    /// The layer's clusters that are not on their way to a slot of `table` any more need not stay; those that are there leave their frames to
    /// others.
    fn release(&mut self, layer: usize, table: &SlotTable);
}

/// Why a move was not begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotBegun {
    /// [`MAX_IN_FLIGHT`] groups are on their way.
    Full,
    /// The layer's slot table refuses it.
    Refused(Refused),
}

/// Where a layer's clusters lie in host memory: neuron blocks, one part each, or experts, whose matrices are a part each, or the neurons of
/// experts that are packed by neuron, each of which has a row in every matrix.
#[derive(Clone)]
pub struct HostBlocks {
    parts: Vec<HostPart>,
    /// Clusters of the layer: all its neurons or experts.
    clusters: usize,
}

/// One part of each cluster.
#[derive(Clone)]
struct HostPart {
    starts: Starts,
    /// Bytes of the part of one cluster.
    bytes: usize,
}

/// The first byte of each cluster's part.
#[derive(Clone)]
enum Starts {
    /// One after the other from here on.
    Run(*const u8),
    /// In runs of `each`, which begin at these places.
    Runs { firsts: Box<[*const u8]>, each: usize },
}

impl HostBlocks {
    /// `neurons` blocks of `block_bytes` bytes, one after the other from `first` on.
    pub fn new(first: *const u8, block_bytes: usize, neurons: usize) -> HostBlocks {
        HostBlocks { parts: vec![HostPart { starts: Starts::Run(first), bytes: block_bytes }], clusters: neurons }
    }

    /// Clusters of several parts: for each part its bytes, the same for all clusters, and where each run of `each` clusters begins.
    ///
    /// # Panics
    /// If the parts are not of the same number of clusters.
    pub fn of_parts(parts: impl IntoIterator<Item = (usize, Vec<*const u8>)>, each: usize) -> HostBlocks {
        let part = |(bytes, firsts): (usize, Vec<*const u8>)| {
            let is_run = firsts.windows(2).all(|two| two[1].addr() == two[0].addr() + each * bytes);
            let count = firsts.len() * each;
            let starts = if is_run { Starts::Run(firsts[0]) } else { Starts::Runs { firsts: firsts.into(), each } };
            (count, HostPart { starts, bytes })
        };
        let (counts, parts): (Vec<usize>, Vec<HostPart>) = parts.into_iter().map(part).unzip();
        assert!(counts.iter().all(|&count| count == counts[0]), "{counts:?}");
        HostBlocks { clusters: counts[0], parts }
    }

    /// No clusters, where others are of so many parts.
    pub fn none(parts: usize) -> HostBlocks {
        let none = || HostPart { starts: Starts::Run(std::ptr::null()), bytes: 0 };
        HostBlocks { parts: std::iter::repeat_with(none).take(parts).collect(), clusters: 0 }
    }

    /// Bytes of all parts of one cluster.
    fn cluster_bytes(&self) -> usize {
        self.parts.iter().map(|part| part.bytes).sum()
    }
}

impl HostPart {
    /// The first byte of a cluster's part.
    #[inline]
    fn of(&self, cluster: StoreId) -> *const u8 {
        match &self.starts {
            Starts::Run(first) => first.wrapping_add(cluster.index() * self.bytes),
            Starts::Runs { firsts, each: 1 } => firsts[cluster.index()],
            Starts::Runs { firsts, each } => {
                firsts[cluster.index() / each].wrapping_add(cluster.index() % each * self.bytes)
            }
        }
    }

    /// How many clusters, of `cluster_bytes` bytes all parts together, `device` can take now without waiting, where they lie as this part does.
    fn room(&self, device: &mut dyn Device, clusters: usize, cluster_bytes: usize) -> usize {
        match &self.starts {
            Starts::Run(first) => device.room_for_moves(*first, clusters * self.bytes, cluster_bytes),
            Starts::Runs { firsts, each } => device.room_for_moves(firsts[0], each * self.bytes, cluster_bytes),
        }
    }

    /// Has the device pin all of them.
    ///
    /// # Safety
    /// As [`Device::pin`].
    unsafe fn pin(&self, device: &mut dyn Device, clusters: usize) {
        // SAFETY: the caller's promise.
        match &self.starts {
            Starts::Run(first) => unsafe { device.pin(*first, clusters * self.bytes, false) },
            Starts::Runs { firsts, each } => {
                firsts.iter().for_each(|&first| unsafe { device.pin(first, each * self.bytes, false) });
            }
        }
    }
}

// SAFETY: it points into a read-only map that outlives cache and device, by the promise of `NeuronCache::new`'s caller.
unsafe impl Send for HostBlocks {}

/// What a cache has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounters {
    /// Active neurons by the processor that computed them, summed over tokens: the device's are hits, the CPU's misses.
    pub computed: PerTier<u64>,
    /// Groups of moves by [`crate::device::MoveMethod`].
    pub groups: [u64; 3],
    /// Moves that were begun.
    pub migrations: u64,
    /// Moves whose neuron became resident.
    pub landed: u64,
    /// Moves that were asked for and not begun, because [`MAX_IN_FLIGHT`] groups were under way.
    pub dropped: u64,
    /// Moves that were asked for and not begun, because beginning them would have made the engine wait: for older copies, or for a disk that
    /// has the neuron.
    pub put_off: u64,
    /// Moves whose copy never arrived, found by [`NeuronCache::settle`].
    pub lost: u64,
    /// Time of the FFNs by the device's clock, ns: the slower part of each layer, and adding the parts.
    pub ffn_ns: u64,
    /// Time of the passes of few tokens by the device's clock, ns.
    pub pass_ns: u64,
    /// Tokens of all passes.
    pub tokens: u64,
}

/// What became of the moves of a group. Those that are neither begun nor refused had no room: they are counted in
/// [`CacheCounters::dropped`] or [`CacheCounters::put_off`], and may be asked for again later.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupOutcome {
    /// Moves that are on their way.
    pub begun: usize,
    /// Moves that the layer's slot table refused.
    pub refused: usize,
}

/// One layer's part of the cache.
pub struct LayerCache {
    /// What each slot of the layer holds.
    pub table: SlotTable,
    /// Active neurons by the processor that computed them, summed over tokens: the device's are hits, the CPU's misses.
    pub computed: PerTier<u64>,
    /// The clusters in the slots, a buffer for each of their parts, `[slots]`: neuron blocks, or gate, up and down of experts or of their
    /// neurons.
    pub blocks: Vec<Buffer>,
    /// The neuron in each slot, or [`crate::device::NONE`]: the paper's `gpu_bucket`, `[slots]` u32.
    pub bucket: Buffer,
    /// The bias of up, `[ffn]` f32; no bytes where there is none or the layer has no slots.
    pub up_bias: Buffer,
    /// What `bucket` will hold once the compute stream has come to the last update; room for every neuron.
    mirror: PinnedBuffer,
    host: HostBlocks,
    bias: Vec<f32>,
    /// Recorded on the compute stream after the layer's last use.
    last_use: Event,
    /// Slots that are being filled, each with the event that is recorded after its copy.
    in_flight: Vec<(SlotId, Event)>,
}

impl LayerCache {
    /// The neuron in each slot, or [`crate::device::NONE`], as the device's bucket had them when the layer was used last, `[slots]`.
    pub fn bucket_entries(&self) -> &[u32] {
        &self.mirror[..self.table.slots().len()]
    }

    /// Gives the layer `slots` slots while no move is on its way. If the device refuses some memory, the layer is left with no more slots
    /// than its buffers have room for.
    fn resize(&mut self, device: &mut dyn Device, slots: usize) -> Result<(), OutOfMemory> {
        let now = self.table.slots().len();
        let bytes = |part: &HostPart| (slots * part.bytes) as u64;
        let bias = if slots == 0 { 0 } else { size_of_val(&self.bias[..]) as u64 };
        let blocks = self.blocks.iter().zip(&self.host.parts).all(|(buffer, part)| buffer.bytes == bytes(part));
        if slots == now && blocks && [self.bucket.bytes, self.up_bias.bytes] == [slots as u64 * 4, bias] {
            return Ok(());
        }
        self.table.resize(slots.min(now));
        for (buffer, part) in self.blocks.iter_mut().zip(&self.host.parts) {
            *buffer = device.resize(*buffer, bytes(part))?;
        }
        self.bucket = device.resize(self.bucket, slots as u64 * 4)?;
        self.put_bias(device, slots)?;
        self.table.resize(slots);
        Ok(())
    }

    /// Puts the bias of up on the device if the layer is to have slots, else takes it away.
    fn put_bias(&mut self, device: &mut dyn Device, slots: usize) -> Result<(), OutOfMemory> {
        let bias: &[f32] = if slots == 0 { &[] } else { &self.bias };
        if self.up_bias.bytes != size_of_val(bias) as u64 {
            self.up_bias = device.resize(self.up_bias, size_of_val(bias) as u64)?;
            // SAFETY: the copy is done before anything else can happen to `bias`.
            unsafe { device.copy_in(Stream::Compute, bias.as_ptr().cast(), size_of_val(bias), self.up_bias, 0) };
            device.synchronize(Stream::Compute);
        }
        Ok(())
    }
}

/// The neuron cache of one device: the slots of all layers, and the moves that are on their way to them. It does not own the device;
/// methods that need it are given it, and it is the same one each time.
pub struct NeuronCache {
    /// One for each layer of the model.
    pub layers: Vec<LayerCache>,
    /// What was done since the cache was made.
    pub counters: CacheCounters,
    /// Whether [`NeuronCache::commit`] waits for the layer's copies.
    pub barrier: bool,
    /// The measured speed of each method by which the device can move blocks.
    moves: Vec<MoveRate>,
    /// The blocks of the group that is being sent; kept so that nothing is allocated.
    blocks: Vec<Block>,
    /// Events that are not in use: as many groups of moves can still be begun.
    events: Vec<Event>,
}

impl NeuronCache {
    /// A cache on `device` with `slots[l]` slots for layer `l`, but never more than the layer has neurons; all are empty. `up_bias` has
    /// a vector per layer, empty where there is none. Host blocks are pinned if `pins`: not where they may have to leave memory.
    ///
    /// # Errors
    /// If the device has no room for all; it has pinned nothing then.
    ///
    /// # Safety
    /// Every layer's host blocks are readable until both are dropped, and the device is dropped before the cache, whose memory it has
    /// pinned.
    pub unsafe fn new(
        device: &mut dyn Device,
        slots: &[usize],
        host: &[HostBlocks],
        up_bias: &[&[f32]],
        pins: bool,
    ) -> Result<NeuronCache, OutOfMemory> {
        let mut layers = Vec::with_capacity(slots.len());
        for ((&slots, host), bias) in slots.iter().zip(host).zip(up_bias) {
            let slots = slots.min(host.clusters);
            let grows = |device: &mut dyn Device, each: usize| {
                device.alloc_growable((slots * each) as u64, (host.clusters * each) as u64)
            };
            let mut layer = LayerCache {
                table: SlotTable::new(slots, host.clusters),
                computed: PerTier::default(),
                blocks: host.parts.iter().map(|part| grows(device, part.bytes)).collect::<Result<_, _>>()?,
                bucket: grows(device, 4)?,
                up_bias: device.alloc_growable(0, size_of_val(*bias) as u64)?,
                mirror: PinnedBuffer::new(host.clusters),
                host: host.clone(),
                bias: bias.to_vec(),
                last_use: device.event(),
                in_flight: Vec::with_capacity(host.clusters.min(MAX_IN_FLIGHT)),
            };
            layer.put_bias(device, slots)?;
            layers.push(layer);
        }
        if !pins {
            device.stage(host.iter().map(HostBlocks::cluster_bytes).max().unwrap_or(0));
        }
        // Only once nothing can fail: on a failure the layers are dropped before the device.
        for LayerCache { host, mirror, .. } in &layers {
            // SAFETY: host blocks and cache outlive the device by the caller's promise, and the mirror stays where it is.
            unsafe {
                host.parts
                    .iter()
                    .filter(|_| pins && host.clusters > 0)
                    .for_each(|part| part.pin(device, host.clusters));
                device.pin(mirror.as_ptr().cast(), size_of_val(&mirror[..]), false);
            }
        }
        device.synchronize(Stream::Compute);
        Ok(NeuronCache {
            layers,
            counters: CacheCounters::default(),
            barrier: false,
            moves: Vec::new(),
            blocks: Vec::with_capacity(host.iter().map(|host| host.clusters).max().unwrap_or(0)),
            events: (0..MAX_IN_FLIGHT).map(|_| device.event()).collect(),
        })
    }

    /// From now on blocks are moved by the method that is fastest by these rates; those of methods that the device does not have are
    /// ignored. Not on the token path.
    pub fn set_moves(&mut self, device: &mut dyn Device, rates: &[MoveRate]) {
        self.moves = rates.iter().filter(|rate| device.can_move(rate.method)).copied().collect();
    }

    /// Bytes that a layer with `slots` slots takes on the device; `bias_numbers` is the length of up's bias, 0 where there is none.
    pub const fn layer_bytes(slots: usize, block_bytes: usize, bias_numbers: usize) -> u64 {
        if slots == 0 { 0 } else { (slots * (block_bytes + 4) + bias_numbers * 4) as u64 }
    }

    /// Begins to move one neuron, as a group of its own; waits where the device has no room for it, so it is not for the token path. Only
    /// between two uses of its layer, which the borrow of `self` ensures.
    ///
    /// # Errors
    /// Why the move was not begun; no slot has changed then.
    pub fn migrate(&mut self, device: &mut dyn Device, m: Migration) -> Result<(), NotBegun> {
        let Some(layer) = self.layers.get_mut(m.layer.index()) else {
            return Err(NotBegun::Refused(Refused::OutOfRange));
        };
        if self.events.is_empty() {
            self.counters.dropped += 1;
            return Err(NotBegun::Full);
        }
        layer.table.fill(m.slot, m.neuron).map_err(NotBegun::Refused)?;
        layer.in_flight.push((m.slot, self.events[self.events.len() - 1]));
        self.send(device, m.layer.index(), 1, None);
        Ok(())
    }

    /// Begins to move several neurons of layer `l`, given as (slot, neuron), as one group with one event. Neighbours in the store that
    /// go to neighbouring slots can be one copy. Never waits: if the device has room for only some of the moves, those are the first ones,
    /// and the others leave their slots as they are. With `frames`, those that are not in memory are left out, too.
    pub fn migrate_all(
        &mut self,
        device: &mut dyn Device,
        l: usize,
        frames: Option<&mut dyn Frames>,
        moves: impl Iterator<Item = (SlotId, StoreId)>,
    ) -> GroupOutcome {
        let host = &self.layers[l].host;
        let room =
            host.parts.iter().map(|part| part.room(device, host.clusters, host.cluster_bytes())).min().unwrap_or(0);
        self.begin_group(device, (l, Some(room)), frames, moves)
    }

    /// As [`NeuronCache::migrate_all`], but waits where the device has no room, and for the disk. Not on the token path.
    pub fn migrate_all_waiting(
        &mut self,
        device: &mut dyn Device,
        l: usize,
        frames: Option<&mut dyn Frames>,
        moves: impl Iterator<Item = (SlotId, StoreId)>,
    ) -> GroupOutcome {
        self.begin_group(device, (l, None), frames, moves)
    }

    /// Begins to move the first `room` of these neurons that are in memory and the slot table takes; `None`: it waits for them all.
    fn begin_group(
        &mut self,
        device: &mut dyn Device,
        (l, room): (usize, Option<usize>),
        mut frames: Option<&mut dyn Frames>,
        moves: impl Iterator<Item = (SlotId, StoreId)>,
    ) -> GroupOutcome {
        let mut outcome = GroupOutcome::default();
        let Some(&event) = self.events.last() else {
            self.counters.dropped += moves.count() as u64;
            return outcome;
        };
        let LayerCache { table, in_flight, .. } = &mut self.layers[l];
        for (slot, neuron) in moves {
            let on_disk = frames.as_ref().is_some_and(|frames| frames.part(l, neuron, 0).is_none());
            if room.is_some_and(|room| outcome.begun == room || on_disk) {
                self.counters.put_off += 1;
            } else if table.fill(slot, neuron).is_ok() {
                in_flight.push((slot, event));
                outcome.begun += 1;
                if let Some(frames) = frames.as_mut().filter(|_| !on_disk) {
                    frames.hold(l, neuron);
                }
            } else {
                outcome.refused += 1;
            }
        }
        if outcome.begun > 0 {
            self.send(device, l, outcome.begun, frames.as_deref());
        }
        outcome
    }

    /// Puts the copies for the last `n` entries of layer `l`'s `in_flight` on the copy stream, and the last free event after them: from
    /// `frames` of those that are there.
    fn send(&mut self, device: &mut dyn Device, l: usize, n: usize, frames: Option<&dyn Frames>) {
        let NeuronCache { layers, counters, events, moves, blocks: group, .. } = self;
        let LayerCache { table, in_flight, blocks, host, last_use, .. } = &layers[l];
        device.note(Note::Moves { layer: l, neurons: n });
        // The last use may still be reading the slots.
        device.wait(Stream::Copy, *last_use);
        for (number, (part, &to)) in host.parts.iter().zip(blocks).enumerate() {
            let bytes = part.bytes;
            let framed = |neuron: StoreId| frames.and_then(|frames| frames.part(l, neuron, number));
            let from = |neuron: StoreId| framed(neuron).unwrap_or_else(|| part.of(neuron));
            group.clear();
            group.extend(in_flight[in_flight.len() - n..].iter().map(|&(slot, _)| match table.slots()[slot.index()] {
                Slot::Filling(neuron) => Block { from: from(neuron), slot: slot.0 },
                other => unreachable!("slot {} is {other:?}", slot.0),
            }));
            let (mut runs, mut rest) = (0, &group[..]);
            while !rest.is_empty() {
                (runs, rest) = (runs + 1, &rest[run(rest, bytes)..]);
            }
            let by = fastest(moves, n, runs, (n * bytes) as u64);
            counters.groups[by as usize] += 1;
            // SAFETY: host blocks outlive the device, frames are held until the copy has landed, and `fill` has checked that there are
            // such neurons.
            unsafe { device.move_blocks(by, group, bytes, to) };
        }
        device.record(Stream::Copy, events.pop().expect("looked at by the callers"));
        counters.migrations += n as u64;
    }

    /// To be called before layer `l` is used: neurons whose copies are done become resident, and the device's bucket is brought up to
    /// date. Returns whether the bucket has changed: the compute stream must then be synchronised before the next commit of the layer.
    pub fn commit(&mut self, device: &mut dyn Device, l: usize) -> bool {
        let NeuronCache { layers, counters, events, .. } = self;
        let LayerCache { table, mirror, bucket, in_flight, .. } = &mut layers[l];
        if self.barrier
            && let Some(&(_, last)) = in_flight.last()
        {
            device.synchronize_event(last);
        }
        // The slots of a group stand together in the list, so its event is asked, and given back, once.
        let mut asked: Option<(Event, bool)> = None;
        in_flight.retain(|&(slot, event)| {
            let landed = match asked {
                Some((same, landed)) if same == event => landed,
                _ => {
                    let landed = device.is_done(event);
                    match landed {
                        true => events.push(event),
                        false => device.note(Note::Late(event)),
                    }
                    asked = Some((event, landed));
                    landed
                }
            };
            if landed {
                table.landed(slot);
                counters.landed += 1;
            }
            !landed
        });
        let (mut first, mut end) = (table.slots().len(), 0);
        table.take_stale(|slot, entry| {
            let slot = slot.index();
            mirror[slot] = entry;
            (first, end) = (first.min(slot), end.max(slot + 1));
        });
        if first < end {
            let changed = &mirror[first..end];
            // SAFETY: the mirror lives as long as the cache, which outlives the device, and changes again only after the layer's use,
            // which ends with the compute stream being synchronised.
            unsafe {
                let from = changed.as_ptr().cast();
                device.copy_in(Stream::Compute, from, size_of_val(changed), *bucket, first as u64 * 4);
            }
        }
        first < end
    }

    /// To be called after the work of layer `l` was put on the compute stream: later moves wait for that work.
    pub fn used(&self, device: &mut dyn Device, l: usize) {
        device.record(Stream::Compute, self.layers[l].last_use);
    }

    /// Waits until all moves are done and their neurons resident. A move whose copy has not arrived by then was lost: its slot is free
    /// again.
    pub fn settle(&mut self, device: &mut dyn Device) {
        device.synchronize(Stream::Copy);
        for l in 0..self.layers.len() {
            self.commit(device, l);
            let LayerCache { table, in_flight, .. } = &mut self.layers[l];
            for (slot, event) in in_flight.drain(..) {
                table.abandon(slot);
                if self.events.last() != Some(&event) {
                    self.events.push(event);
                }
                self.counters.lost += 1;
            }
        }
        device.synchronize(Stream::Compute);
    }

    /// Gives each layer `l` `slots[l]` slots. Where there are fewer than before, the last slots go and their neurons become misses. First
    /// all layers shrink, then they grow. Waits for the device; not on the token path.
    ///
    /// # Errors
    /// If the device has no room for all slots; no layer has grown then.
    pub fn resize(&mut self, device: &mut dyn Device, slots: &[usize]) -> Result<(), OutOfMemory> {
        self.settle(device);
        let layers = &mut self.layers;
        let bytes = |layer: &LayerCache, slots: usize| {
            NeuronCache::layer_bytes(slots, layer.host.cluster_bytes(), layer.bias.len())
        };
        let of = |layer: &LayerCache| layer.table.slots().len();
        let wanted = |l: usize, layer: &LayerCache| slots[l].min(layer.host.clusters);
        for (l, layer) in layers.iter_mut().enumerate() {
            let slots = wanted(l, layer).min(of(layer));
            layer.resize(device, slots)?;
        }
        let more: u64 = layers.iter().enumerate().map(|(l, at)| bytes(at, wanted(l, at)) - bytes(at, of(at))).sum();
        let memory = device.memory();
        let left = memory.budget - memory.used;
        if more > left {
            return Err(OutOfMemory { asked: more, left });
        }
        for (l, layer) in layers.iter_mut().enumerate() {
            let slots = wanted(l, layer);
            layer.resize(device, slots)?;
        }
        Ok(())
    }

    /// Fills the slots of a layer, from the first on, with these neurons (a placement), and waits until they are there.
    pub fn load(&mut self, device: &mut dyn Device, l: usize, neurons: &[StoreId]) -> Result<(), NotBegun> {
        for (slot, &neuron) in neurons.iter().enumerate() {
            let m = Migration { layer: LayerId::new(l), slot: SlotId::new(slot), neuron };
            if self.migrate(device, m) == Err(NotBegun::Full) {
                self.counters.dropped -= 1;
                self.settle(device);
                self.migrate(device, m)?;
            }
        }
        Ok(())
    }

    /// How many moves are on their way: not seen to have landed, which is looked at when their layer is used.
    pub fn in_flight(&self) -> usize {
        let c = self.counters;
        (c.migrations - c.landed - c.lost) as usize
    }

    /// How many slots each layer has.
    pub fn slots(&self) -> Vec<usize> {
        self.layers.iter().map(|l| l.table.slots().len()).collect()
    }
}
