//! Where each needed neuron will be found, and which reads bring those that are missing.

use super::reads::{Job, Reads};
use super::{HostCacheOptions, Layer};
use crate::cache::Location;
use crate::device::NONE;
use crate::ids::{SlotId, StoreId};
use std::ops::Range;

/// Units per layer at most. Their buffers are written and added once per token: 32 of them are below 1 % of the weights.
pub const MAX_UNITS: usize = 32;
/// Block bytes per unit at least, so that a small model does not drown in buffers.
const MIN_UNIT_BYTES: usize = 128 << 10;
/// Bytes of a read at most that brings several neurons: longer ones are no faster, and the disk has fewer at once.
const MAX_READ: usize = 256 << 10;

/// Units into which the FFN cuts a list of `neurons` neurons: unit u has those from u * neurons / units on.
pub fn units_of(neurons: usize, block_bytes: usize) -> usize {
    (neurons * block_bytes / MIN_UNIT_BYTES).clamp(1, MAX_UNITS)
}

/// The most neurons of a unit of a layer of `neurons`.
pub(super) fn longest_unit(neurons: usize, block_bytes: usize) -> usize {
    neurons.div_ceil(MAX_UNITS).max(2 * MIN_UNIT_BYTES / block_bytes + 1).min(neurons)
}

/// Where a needed neuron is found.
#[derive(Clone, Copy)]
pub(super) struct Place {
    /// Its block.
    at: *const u8,
    /// The read that brings it; [`NONE`] if it is there.
    pub read: u32,
    /// Where it is copied to when it was computed; null if it is there or stays nowhere.
    pub keep: *mut u8,
}

/// Units that are computed by one parallel call, and the reads that bring their neurons.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Round {
    /// The units.
    pub units: Range<usize>,
    /// Their neurons, numbers in the list.
    numbers: Range<usize>,
    /// How many of the layer's reads are listed up to its end.
    listed: usize,
    /// Whether all its neurons are there.
    here: bool,
}

impl Round {
    /// Whether all its neurons are there.
    pub fn is_here(&self) -> bool {
        self.here
    }
}

/// The needed neurons of a layer, for the threads that compute them.
#[derive(Clone, Copy)]
pub struct Arriving<'a> {
    places: &'a [Place],
    reads: &'a Reads,
    block_bytes: usize,
}

// SAFETY: blocks are only read, and each frame is written to by the one thread that computes its neuron.
unsafe impl Sync for Arriving<'_> {}
unsafe impl Send for Arriving<'_> {}

impl<'a> Arriving<'a> {
    pub(super) fn new(plan: &'a Plan, reads: &'a Reads, block_bytes: usize) -> Arriving<'a> {
        Arriving { places: &plan.places, reads, block_bytes }
    }

    /// Whether number `i` of the list can be read now.
    #[inline]
    pub fn is_here(&self, i: usize) -> bool {
        let read = self.places[i].read;
        read == NONE || self.reads.is_here(read)
    }

    /// The block of number `i` of the list once it is there; waits for it. `None` if it could not be read.
    #[inline]
    pub fn block(&self, i: usize) -> Option<*const u8> {
        let Place { at, read, .. } = self.places[i];
        (read == NONE || self.reads.wait(read)).then_some(at)
    }

    /// Where the block of number `i` is or will be: to prefetch, not to read.
    #[inline]
    pub fn address(&self, i: usize) -> *const u8 {
        self.places[i].at
    }

    /// Copies number `i` of the list to its frame, if it got one and did not come there by itself. To be called once for each, when it is
    /// there, by the thread that computes it.
    #[inline]
    pub fn keep(&self, i: usize) {
        let Place { at, keep, .. } = self.places[i];
        if !keep.is_null() {
            // SAFETY: the frame is its neuron's from now on, and nobody reads it before the use has ended.
            unsafe { std::ptr::copy_nonoverlapping(at, keep, self.block_bytes) };
        }
    }
}

/// What the plan is made for.
pub(super) struct Room<'a> {
    pub layer: &'a Layer,
    pub align: usize,
    /// Unwanted bytes that are read along.
    pub gap: usize,
    /// Whether neighbours are read together.
    pub together: bool,
    pub landing: *mut u8,
    /// Bytes of one of the two halves.
    pub half: usize,
    /// How many layers ahead the reads are listed for.
    pub ahead: usize,
}

/// Neurons that a layer needs, ascending.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub neurons: &'a [StoreId],
    /// Those that were asked for before the layer's turn.
    pub early: &'a Early,
    /// The slot that a neuron comes to, or [`NONE`], `[ffn]`.
    pub slot_for: &'a [u32],
}

impl Wanted<'_> {
    /// The slot that number `i` comes to.
    fn slot(&self, i: usize) -> Option<SlotId> {
        match self.slot_for[self.neurons[i].index()] {
            NONE => None,
            slot => Some(SlotId(slot)),
        }
    }
}

/// Where a plan writes down what it asks for.
pub(super) struct Listing<'a> {
    pub reads: &'a mut Reads,
    pub filling: &'a mut Vec<Filling>,
}

/// A part of the landing, and how much of it is taken.
struct Side {
    number: usize,
    used: usize,
}

/// Neighbours that one read brings: numbers in the list, and bytes of the file.
#[derive(Clone)]
struct Group {
    numbers: Range<usize>,
    bytes: Range<u64>,
}

/// A slot that is being filled, and by what.
#[derive(Clone, Copy)]
pub(super) struct Filling {
    pub slot: SlotId,
    pub neuron: StoreId,
    /// The read that brings it.
    pub read: u32,
    /// Whether the read goes to the frame itself; else whoever computes the neuron copies it there.
    pub straight: bool,
}

/// The plan of one use of a layer.
pub(super) struct Plan {
    places: Vec<Place>,
    rounds: Vec<Round>,
    /// The round that is computed next.
    next: usize,
    misses: u64,
    early: u64,
}

// SAFETY: its pointers are into the cache's memory.
unsafe impl Send for Plan {}
unsafe impl Sync for Plan {}

impl Plan {
    /// For no neurons.
    pub const NOTHING: Plan = Plan { places: Vec::new(), rounds: Vec::new(), next: 0, misses: 0, early: 0 };

    /// For lists of up to `neurons`: nothing is allocated later.
    pub fn new(neurons: usize) -> Plan {
        let (places, rounds) = (Vec::with_capacity(neurons), Vec::with_capacity(MAX_UNITS));
        Plan { places, rounds, next: 0, misses: 0, early: 0 }
    }

    /// Neurons that are read now, and those that were asked for before the layer's turn.
    pub fn misses(&self) -> (u64, u64) {
        (self.misses, self.early)
    }

    /// Reads that may begin: those of the rounds so far, and of the one that comes next. What lies in its half is computed.
    pub fn allowed(&self) -> usize {
        self.rounds.get(self.next).or(self.rounds.last()).map_or(0, |round| round.listed)
    }

    /// Waits for all neurons of a round.
    pub fn wait_for(&self, round: &Round, reads: &Reads) {
        self.places[round.numbers.clone()].iter().filter(|place| place.read != NONE).for_each(|place| {
            reads.wait(place.read);
        });
    }

    /// The round that is computed now.
    pub fn next_round(&mut self) -> Option<Round> {
        let round = self.rounds.get(self.next)?.clone();
        self.next += 1;
        Some(round)
    }

    /// Finds a place for each neuron, in `units` of equal length, and lists the reads of those that are neither in a frame nor early.
    pub fn make(&mut self, room: &Room<'_>, wanted: Wanted<'_>, units: usize, list: &mut Listing<'_>) {
        self.places.clear();
        self.rounds.clear();
        (self.next, self.misses, self.early) = (0, 0, 0);
        let cut = |unit: usize| unit * wanted.neurons.len() / units;
        let (mut first, mut side) = (0, Side { number: 0, used: 0 });
        for unit in 0..units {
            let range = cut(unit)..cut(unit + 1);
            let (listed, filled) = (list.reads.listed(room.ahead), list.filling.len());
            if self.unit(room, wanted, range.clone(), &mut side, list).is_ok() {
                continue;
            }
            // The half is full: the unit begins a round, in the other half.
            list.reads.forget(room.ahead, listed);
            list.filling.truncate(filled);
            self.places.truncate(range.start);
            self.push_round(first..unit, cut(first)..range.start, listed);
            (first, side) = (unit, Side { number: 1 - side.number, used: 0 });
            let fits = self.unit(room, wanted, range, &mut side, list);
            assert!(fits.is_ok(), "a unit is longer than half of the landing");
        }
        self.push_round(first..units, cut(first)..wanted.neurons.len(), list.reads.listed(room.ahead));
        for (place, neuron) in self.places.iter().zip(wanted.neurons) {
            match wanted.early.place(*neuron) {
                Some(_) => self.early += 1,
                None => self.misses += u64::from(place.read != NONE),
            }
        }
    }

    /// Whether a read brings a neuron of the list.
    pub fn needs(&self, read: u32) -> bool {
        self.places.iter().any(|place| place.read == read)
    }

    fn push_round(&mut self, units: Range<usize>, numbers: Range<usize>, listed: usize) {
        let here = self.places[numbers.clone()].iter().all(|place| place.read == NONE);
        self.rounds.push(Round { units, numbers, listed, here });
    }

    /// Finds places for the numbers of one unit. The error is the first number for which the half has no room.
    fn unit(
        &mut self,
        room: &Room<'_>,
        wanted: Wanted<'_>,
        range: Range<usize>,
        side: &mut Side,
        list: &mut Listing<'_>,
    ) -> Result<(), usize> {
        let layer = room.layer;
        let bytes = layer.blocks.block_bytes as u64;
        let mut group: Option<Group> = None;
        for i in range.clone() {
            let neuron = wanted.neurons[i];
            let offset = layer.offset(neuron.index());
            let inside = (offset % room.align as u64) as usize;
            if let Location::Device(slot) = layer.table.location(neuron) {
                let at = layer.frame(slot).wrapping_add(inside);
                self.places.push(Place { at, read: NONE, keep: std::ptr::null_mut() });
                continue;
            }
            if let Some(mut place) = wanted.early.place(neuron) {
                // It had no frame when it was asked for, and has got one now.
                if let Some(slot) = wanted.slot(i) {
                    place.keep = layer.frame(slot).wrapping_add(inside);
                    list.filling.push(Filling { slot, neuron, read: place.read, straight: false });
                }
                let read = if list.reads.is_here(place.read) { NONE } else { place.read };
                self.places.push(Place { read, ..place });
                continue;
            }
            // Filled in when its read is listed.
            self.places.push(Place { at: std::ptr::null(), read: 0, keep: std::ptr::null_mut() });
            group = match group {
                Some(open) if room.joins(&open, offset, bytes) => {
                    Some(Group { numbers: open.numbers.start..i + 1, bytes: open.bytes.start..offset + bytes })
                }
                open => {
                    if let Some(open) = open {
                        self.read(room, wanted, open, side, list)?;
                    }
                    Some(Group { numbers: i..i + 1, bytes: offset..offset + bytes })
                }
            };
        }
        match group {
            Some(open) => self.read(room, wanted, open, side, list),
            None => Ok(()),
        }
    }

    /// Lists the read of a group. The error is its first number, if the half has no room for it.
    fn read(
        &mut self,
        room: &Room<'_>,
        wanted: Wanted<'_>,
        Group { numbers, bytes }: Group,
        side: &mut Side,
        Listing { reads, filling }: &mut Listing<'_>,
    ) -> Result<(), usize> {
        let align = room.align as u64;
        let (begin, end) = (bytes.start / align * align, bytes.end.next_multiple_of(align));
        let length = (end - begin) as usize;
        let own_frame = if numbers.len() == 1 { wanted.slot(numbers.start) } else { None };
        let into = match own_frame {
            Some(slot) => room.layer.frame(slot),
            None if side.used + length > room.half => return Err(numbers.start),
            None => {
                side.used += length;
                room.landing.wrapping_add(side.number * room.half + side.used - length)
            }
        };
        let needed = (bytes.end - begin) as usize;
        let read = reads.list(room.ahead, Job { offset: begin, bytes: length, needed, into });
        for i in numbers {
            let (neuron, place) = (wanted.neurons[i], &mut self.places[i]);
            // Who lies between them may be there already.
            if place.read == NONE || wanted.early.place(neuron).is_some() {
                continue;
            }
            let offset = room.layer.offset(neuron.index());
            place.at = into.wrapping_add((offset - begin) as usize);
            place.read = read;
            if let Some(slot) = wanted.slot(i) {
                filling.push(Filling { slot, neuron, read, straight: own_frame.is_some() });
                if own_frame.is_none() {
                    place.keep = room.layer.frame(slot).wrapping_add((offset % align) as usize);
                }
            }
        }
        Ok(())
    }
}

/// What was asked for of a layer before its turn.
pub(super) struct Early {
    plan: Plan,
    /// Per neuron: its number in the plan, or [`NONE`], `[ffn]`.
    numbers: Vec<u32>,
}

impl Early {
    /// Nothing.
    pub const NOTHING: Early = Early { plan: Plan::NOTHING, numbers: Vec::new() };

    /// For layers of `neurons`: nothing is allocated later.
    pub fn new(neurons: usize) -> Early {
        Early { plan: Plan::new(neurons), numbers: vec![NONE; neurons] }
    }

    /// Where a neuron is or will be, if it was asked for.
    pub fn place(&self, neuron: StoreId) -> Option<Place> {
        let number = *self.numbers.get(neuron.index())?;
        (number != NONE).then(|| self.plan.places[number as usize])
    }

    /// Finds places for neurons that are not there, as [`Plan::make`], as far as there is room for them, and lists their reads.
    pub fn make(&mut self, room: &Room<'_>, neurons: &[StoreId], slot_for: &[u32], list: &mut Listing<'_>) {
        let wanted = Wanted { neurons, early: &Early::NOTHING, slot_for };
        self.plan.places.clear();
        let made = self.plan.unit(room, wanted, 0..neurons.len(), &mut Side { number: 0, used: 0 }, list);
        let made = made.err().unwrap_or(neurons.len());
        for (number, neuron) in neurons[..made].iter().enumerate().filter(|(n, _)| self.plan.places[*n].read != NONE) {
            self.numbers[neuron.index()] = number as u32;
        }
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.numbers.fill(NONE);
    }
}

impl<'a> Room<'a> {
    /// For a layer whose turn it is. The landing's halves begin at `landing`.
    pub fn new(layer: &'a Layer, align: usize, options: &HostCacheOptions, landing: *mut u8, half: usize) -> Room<'a> {
        Room { layer, align, gap: options.gap(), together: options.together, landing, half, ahead: 0 }
    }

    /// Whether a block at `offset` is read together with what is open.
    fn joins(&self, open: &Group, offset: u64, bytes: u64) -> bool {
        let (gap, all) = ((offset - open.bytes.end) as usize, (offset + bytes - open.bytes.start) as usize);
        self.together && gap <= self.gap && all <= MAX_READ
    }
}
