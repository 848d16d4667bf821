//! All layers' slots on one device: what is there, what is on its way, and the moves between.
//!
//! A move never waits and is never waited for: the slot's old neuron is a miss at once, the copy runs on the copy stream
//! behind the layer's last use, and when it is seen done the neuron becomes a hit. With [`NeuronCache::barrier`] the engine
//! waits for a layer's copies before it uses it (DynamicInfer C.3), on the same path.

use super::slot_table::{Refused, Slot, SlotTable};
use crate::device::{Buffer, Device, Event, OutOfMemory, Stream};

/// Moves that may be on their way at once; a request beyond is refused, and may be made again.
pub const MAX_IN_FLIGHT: usize = 4096;

/// Brings a neuron (its place in the store) into a slot of its layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Migration {
    pub layer: u32,
    pub slot: u32,
    pub neuron: u32,
}

/// Why a move was not begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotBegun {
    /// [`MAX_IN_FLIGHT`] are on their way.
    Full,
    Refused(Refused),
}

/// Where a layer's neuron blocks lie in host memory.
#[derive(Clone, Copy)]
pub struct HostBlocks {
    pub first: *const u8,
    pub block_bytes: usize,
    pub neurons: usize,
}

// SAFETY: it points into a read-only map that outlives the cache, by the promise of `NeuronCache::new`'s caller.
unsafe impl Send for HostBlocks {}

/// What the cache did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounters {
    /// Active neurons times tokens computed on the device, and on the CPU.
    pub hits: u64,
    pub misses: u64,
    /// Moves begun, moves whose neuron became resident, and requests that were refused because too many were under way.
    pub migrations: u64,
    pub landed: u64,
    pub dropped: u64,
}

/// One layer on the device.
pub struct LayerCache {
    pub table: SlotTable,
    /// `[slots]` neuron blocks.
    pub blocks: Buffer,
    /// `gpu_bucket`, `[slots]` u32.
    pub bucket: Buffer,
    /// `[ffn]` f32, or no bytes.
    pub up_bias: Buffer,
    /// What the device's bucket will hold once the compute stream has come to the last update.
    mirror: Vec<u32>,
    host: HostBlocks,
    /// Recorded on the compute stream after the layer's last use.
    last_use: Event,
    /// Slots being filled, each with the event behind its copy.
    in_flight: Vec<(u32, Event)>,
}

pub struct NeuronCache {
    pub device: Box<dyn Device>,
    pub layers: Vec<LayerCache>,
    pub counters: CacheCounters,
    /// Whether a layer's copies are waited for before it is used.
    pub barrier: bool,
    /// Events that no move has now; as many moves can still be begun.
    events: Vec<Event>,
}

impl NeuronCache {
    /// Makes room for `slots[l]` neurons of each layer. `up_bias` has a vector per layer, empty where there is none.
    ///
    /// # Safety
    /// Every layer's host blocks are readable for as long as the cache lives.
    pub unsafe fn new(
        mut device: Box<dyn Device>,
        slots: &[usize],
        host: &[HostBlocks],
        up_bias: &[&[f32]],
    ) -> Result<NeuronCache, OutOfMemory> {
        let mut layers = Vec::with_capacity(slots.len());
        for ((&slots, &host), bias) in slots.iter().zip(host).zip(up_bias) {
            let slots = slots.min(host.neurons);
            // A layer without slots takes nothing on the device.
            let bias: &[f32] = if slots == 0 { &[] } else { bias };
            let up_bias = device.alloc(size_of_val(bias) as u64)?;
            // SAFETY: the copy is done before `bias` can go: `synchronize` below.
            unsafe { device.copy_in(Stream::Compute, bias.as_ptr().cast(), size_of_val(bias), up_bias, 0) };
            layers.push(LayerCache {
                table: SlotTable::new(slots, host.neurons),
                blocks: device.alloc((slots * host.block_bytes) as u64)?,
                bucket: device.alloc(slots as u64 * 4)?,
                up_bias,
                mirror: vec![0; slots],
                host,
                last_use: device.event(),
                in_flight: Vec::with_capacity(slots.min(MAX_IN_FLIGHT)),
            });
        }
        device.synchronize(Stream::Compute);
        let events = (0..MAX_IN_FLIGHT).map(|_| device.event()).collect();
        Ok(NeuronCache { device, layers, counters: CacheCounters::default(), barrier: false, events })
    }

    /// Bytes on the device for `slots` neurons of a layer.
    pub const fn layer_bytes(slots: usize, block_bytes: usize, bias_numbers: usize) -> u64 {
        if slots == 0 { 0 } else { (slots * (block_bytes + 4) + bias_numbers * 4) as u64 }
    }

    /// Begins to bring a neuron in. Between two uses of its layer only, which the borrow of `self` sees to.
    pub fn migrate(&mut self, m: Migration) -> Result<(), NotBegun> {
        let Some(layer) = self.layers.get_mut(m.layer as usize) else {
            return Err(NotBegun::Refused(Refused::OutOfRange));
        };
        if self.events.is_empty() {
            self.counters.dropped += 1;
            return Err(NotBegun::Full);
        }
        layer.table.fill(m.slot, m.neuron).map_err(NotBegun::Refused)?;
        let event = self.events.pop().expect("looked at above");
        let bytes = layer.host.block_bytes;
        // The last use may still be reading the slot.
        self.device.wait(Stream::Copy, layer.last_use);
        // SAFETY: `fill` has checked that there is such a neuron; host blocks outlive the cache.
        unsafe {
            let from = layer.host.first.add(m.neuron as usize * bytes);
            self.device.copy_in(Stream::Copy, from, bytes, layer.blocks, m.slot as u64 * bytes as u64);
        }
        self.device.record(Stream::Copy, event);
        layer.in_flight.push((m.slot, event));
        self.counters.migrations += 1;
        Ok(())
    }

    /// Before layer `l` is used: what has landed becomes resident, and the device learns of every change. Says whether there was
    /// one: the compute stream is then to be synchronised before the next commit of the layer.
    pub fn commit(&mut self, l: usize) -> bool {
        let NeuronCache { device, layers, counters, events, .. } = self;
        let LayerCache { table, mirror, bucket, in_flight, .. } = &mut layers[l];
        if self.barrier && !in_flight.is_empty() {
            device.synchronize(Stream::Copy);
        }
        in_flight.retain(|&(slot, event)| {
            let landed = device.is_done(event);
            if landed {
                table.landed(slot);
                events.push(event);
                counters.landed += 1;
            }
            !landed
        });
        let (mut first, mut end) = (mirror.len(), 0);
        table.take_stale(|slot, neuron| {
            let slot = slot as usize;
            mirror[slot] = neuron;
            (first, end) = (first.min(slot), end.max(slot + 1));
        });
        if first < end {
            let changed = &mirror[first..end];
            // SAFETY: the mirror lives as long as the cache, and changes again only after the layer's use, which ends with
            // the compute stream being synchronised.
            unsafe {
                let from = changed.as_ptr().cast();
                device.copy_in(Stream::Compute, from, size_of_val(changed), *bucket, first as u64 * 4);
            }
        }
        first < end
    }

    /// After the work of layer `l` was put on the compute stream.
    pub fn used(&mut self, l: usize) {
        self.device.record(Stream::Compute, self.layers[l].last_use);
    }

    /// Waits until everything on its way has arrived and is resident; what the device lost stays a miss.
    pub fn settle(&mut self) {
        self.device.synchronize(Stream::Copy);
        for l in 0..self.layers.len() {
            self.commit(l);
        }
        self.device.synchronize(Stream::Compute);
    }

    /// Fills slots from the first on with these neurons of a layer (a placement), waiting for them.
    pub fn load(&mut self, l: usize, neurons: &[u32]) -> Result<(), NotBegun> {
        for (slot, &neuron) in neurons.iter().enumerate() {
            let m = Migration { layer: l as u32, slot: slot as u32, neuron };
            if self.migrate(m) == Err(NotBegun::Full) {
                self.counters.dropped -= 1;
                self.settle();
                self.migrate(m)?;
            }
        }
        Ok(())
    }

    /// Moves on their way.
    pub fn in_flight(&self) -> usize {
        MAX_IN_FLIGHT - self.events.len()
    }

    /// A slot of layer `l` that holds nothing and is not being filled, if there is one.
    pub fn free_slot(&self, l: usize) -> Option<u32> {
        self.layers[l].table.slots().iter().position(|s| *s == Slot::Free).map(|s| s as u32)
    }
}
