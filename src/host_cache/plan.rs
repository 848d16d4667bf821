//! Where each needed neuron will be found, and which reads bring those that are missing.

use super::Layer;
use super::reads::{Job, Reads};
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
struct Place {
    /// Its block.
    at: *const u8,
    /// The read that brings it; [`NONE`] if it is there.
    read: u32,
    /// Where it is copied to when it was computed; null if it is there or stays nowhere.
    keep: *mut u8,
}

/// Units that are computed by one parallel call, and the reads that bring their neurons.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Round {
    /// The units.
    pub units: Range<usize>,
    /// Numbers of the reads.
    pub(super) reads: Range<u32>,
}

impl Round {
    /// Whether all its neurons are in frames.
    pub fn is_here(&self) -> bool {
        self.reads.is_empty()
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
}

/// Neighbours that one read brings: numbers in the list, and bytes of the file.
#[derive(Clone)]
struct Group {
    numbers: Range<usize>,
    bytes: Range<u64>,
}

/// The plan of one use of a layer.
pub(super) struct Plan {
    places: Vec<Place>,
    rounds: Vec<Round>,
    /// The round that is computed next.
    next: usize,
    misses: u64,
}

// SAFETY: its pointers are into the cache's memory.
unsafe impl Send for Plan {}
unsafe impl Sync for Plan {}

impl Plan {
    /// For lists of up to `neurons`: nothing is allocated later.
    pub fn new(neurons: usize) -> Plan {
        Plan { places: Vec::with_capacity(neurons), rounds: Vec::with_capacity(MAX_UNITS), next: 0, misses: 0 }
    }

    /// Neurons that are read.
    pub fn misses(&self) -> u64 {
        self.misses
    }

    /// Reads that may begin: those of the rounds so far, and of the one that comes next. What lies in its half is computed.
    pub fn allowed(&self) -> usize {
        self.rounds.get(self.next).or(self.rounds.last()).map_or(0, |round| round.reads.end as usize)
    }

    /// The round that is computed now.
    pub fn next_round(&mut self) -> Option<Round> {
        let round = self.rounds.get(self.next)?.clone();
        self.next += 1;
        Some(round)
    }

    /// Finds a place for each of `neurons` and lists the reads. `slot_for` has the slots that they come to; those are added to `filling` with
    /// their reads.
    pub fn make(
        &mut self,
        room: &mut Room<'_>,
        neurons: &[StoreId],
        units: usize,
        slot_for: &[u32],
        reads: &mut Reads,
        filling: &mut Vec<(SlotId, u32)>,
    ) {
        self.places.clear();
        self.rounds.clear();
        (self.next, self.misses) = (0, 0);
        filling.clear();
        let (mut first, mut first_read, mut used, mut side) = (0, 0, 0, 0);
        for unit in 0..units {
            let range = unit * neurons.len() / units..(unit + 1) * neurons.len() / units;
            let (listed, filled) = (reads.listed(), filling.len());
            if self.unit(room, neurons, range.clone(), slot_for, (side, &mut used), reads, filling) {
                continue;
            }
            // The half is full: the unit begins a round, in the other half.
            reads.forget(listed);
            filling.truncate(filled);
            self.places.truncate(range.start);
            self.rounds.push(Round { units: first..unit, reads: first_read..listed as u32 });
            (first, first_read, used, side) = (unit, listed as u32, 0, 1 - side);
            let fits = self.unit(room, neurons, range, slot_for, (side, &mut used), reads, filling);
            assert!(fits, "a unit is longer than half of the landing");
        }
        self.rounds.push(Round { units: first..units, reads: first_read..reads.listed() as u32 });
        self.misses = self.places.iter().filter(|place| place.read != NONE).count() as u64;
    }

    /// The same for the numbers of one unit; `false` if the half has no room for them.
    #[allow(clippy::too_many_arguments)]
    fn unit(
        &mut self,
        room: &Room<'_>,
        neurons: &[StoreId],
        range: Range<usize>,
        slot_for: &[u32],
        (side, used): (usize, &mut usize),
        reads: &mut Reads,
        filling: &mut Vec<(SlotId, u32)>,
    ) -> bool {
        let layer = room.layer;
        let bytes = layer.blocks.block_bytes as u64;
        let mut group: Option<Group> = None;
        for i in range.clone() {
            let neuron = neurons[i];
            let offset = layer.offset(neuron.index());
            let inside = (offset % room.align as u64) as usize;
            if let Location::Device(slot) = layer.table.location(neuron) {
                let at = layer.frame(slot).wrapping_add(inside);
                self.places.push(Place { at, read: NONE, keep: std::ptr::null_mut() });
                continue;
            }
            // Filled in when its read is listed.
            self.places.push(Place { at: std::ptr::null(), read: 0, keep: std::ptr::null_mut() });
            group = match group {
                Some(open) if room.joins(&open, offset, bytes) => {
                    Some(Group { numbers: open.numbers.start..i + 1, bytes: open.bytes.start..offset + bytes })
                }
                open => {
                    if let Some(open) = open
                        && !self.read(room, neurons, open, slot_for, (side, used), reads, filling)
                    {
                        return false;
                    }
                    Some(Group { numbers: i..i + 1, bytes: offset..offset + bytes })
                }
            };
        }
        group.is_none_or(|open| self.read(room, neurons, open, slot_for, (side, used), reads, filling))
    }

    /// Lists the read of a group; `false` if the half has no room for it.
    #[allow(clippy::too_many_arguments)]
    fn read(
        &mut self,
        room: &Room<'_>,
        neurons: &[StoreId],
        Group { numbers, bytes }: Group,
        slot_for: &[u32],
        (side, used): (usize, &mut usize),
        reads: &mut Reads,
        filling: &mut Vec<(SlotId, u32)>,
    ) -> bool {
        let align = room.align as u64;
        let (begin, end) = (bytes.start / align * align, bytes.end.next_multiple_of(align));
        let length = (end - begin) as usize;
        let slot = |i: usize| match slot_for[neurons[i].index()] {
            NONE => None,
            slot => Some(SlotId(slot)),
        };
        let own_frame = if numbers.len() == 1 { slot(numbers.start) } else { None };
        let into = match own_frame {
            Some(slot) => room.layer.frame(slot),
            None if *used + length > room.half => return false,
            None => {
                *used += length;
                room.landing.wrapping_add(side * room.half + *used - length)
            }
        };
        let read = reads.list(Job { offset: begin, bytes: length, needed: (bytes.end - begin) as usize, into });
        for i in numbers {
            let place = &mut self.places[i];
            if place.read == NONE {
                continue;
            }
            let offset = room.layer.offset(neurons[i].index());
            place.at = into.wrapping_add((offset - begin) as usize);
            place.read = read;
            if let Some(slot) = slot(i) {
                filling.push((slot, read));
                if own_frame.is_none() {
                    place.keep = room.layer.frame(slot).wrapping_add((offset % align) as usize);
                }
            }
        }
        true
    }
}

impl Room<'_> {
    /// Whether a block at `offset` is read together with what is open.
    fn joins(&self, open: &Group, offset: u64, bytes: u64) -> bool {
        let (gap, all) = ((offset - open.bytes.end) as usize, (offset + bytes - open.bytes.start) as usize);
        self.together && gap <= self.gap && all <= MAX_READ
    }
}
