//! Where each needed neuron will be found, and which reads bring those that are missing.

use super::blocks::Run;
use super::checksums::Check;
use super::layer::Layer;
use super::reads::{Job, Reads};
use crate::cache::Location;
use crate::device::NONE;
use crate::ids::{SlotId, StoreId};
use std::ops::Range;

/// Bytes of a read at most that brings several neurons: longer ones are no faster, and the disk has fewer at once.
const MAX_READ: usize = 256 << 10;

/// Where a piece of a needed neuron is found; a block of its own is one piece.
#[derive(Clone, Copy)]
pub(super) struct Place {
    /// Its first byte.
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
    /// Their pieces.
    pieces: Range<usize>,
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

/// The needed neurons of a layer, for the threads that compute them, piece by piece: of number n in the list, a neuron block is piece n, and
/// matrix m of an expert of three is piece 3 n + m.
#[derive(Clone, Copy)]
pub struct Arriving<'a> {
    places: &'a [Place],
    reads: &'a Reads,
    runs: &'a [Run],
}

// SAFETY: blocks are only read, and each frame is written to by the one thread that computes its neuron.
unsafe impl Sync for Arriving<'_> {}
unsafe impl Send for Arriving<'_> {}

impl<'a> Arriving<'a> {
    pub(super) fn new(plan: &'a Plan, reads: &'a Reads, runs: &'a [Run]) -> Arriving<'a> {
        Arriving { places: &plan.places, reads, runs }
    }

    /// Whether piece `i` can be read now.
    #[inline]
    pub fn is_here(&self, i: usize) -> bool {
        let read = self.places[i].read;
        read == NONE || self.reads.is_here(read)
    }

    /// The first byte of piece `i` once it is there; waits for it. `None` if it could not be read.
    #[inline]
    pub fn piece(&self, i: usize) -> Option<*const u8> {
        let Place { at, read, .. } = self.places[i];
        (read == NONE || self.reads.wait(read)).then_some(at)
    }

    /// Where piece `i` is or will be: to prefetch, not to read.
    #[inline]
    pub fn address(&self, i: usize) -> *const u8 {
        self.places[i].at
    }

    /// Copies piece `i` to its frame, if its neuron got one and did not come there by itself. To be called once for each, when it is
    /// there, by the thread that computes it.
    #[inline]
    pub fn keep(&self, i: usize) {
        let Place { at, keep, .. } = self.places[i];
        if !keep.is_null() {
            let bytes = self.runs[i % self.runs.len()].bytes();
            // SAFETY: the frame is its neuron's from now on, and it is not read before the use has ended.
            unsafe { std::ptr::copy_nonoverlapping(at, keep, bytes) };
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

/// Neighbours that one read brings: numbers in the list, which of their pieces, and bytes of the file.
#[derive(Clone)]
struct Group {
    numbers: Range<usize>,
    piece: usize,
    bytes: Range<u64>,
}

/// A slot that is being filled, and by what.
#[derive(Clone, Copy)]
pub(super) struct Filling {
    pub slot: SlotId,
    pub neuron: StoreId,
    /// The reads that bring it: the first, and how many.
    pub reads: (u32, u32),
    /// Whether they go to the frame itself; else the thread that computes the neuron copies it there.
    pub straight: bool,
}

/// The plan of one use of a layer.
pub(super) struct Plan {
    /// Piece by piece, as in [`Arriving`].
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

    /// For lists of up to `neurons` of so many pieces: nothing is allocated later.
    pub fn new(neurons: usize, pieces: usize) -> Plan {
        let (places, rounds) = (Vec::with_capacity(neurons * pieces), Vec::with_capacity(neurons));
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
        self.places[round.pieces.clone()].iter().filter(|place| place.read != NONE).for_each(|place| {
            reads.wait(place.read);
        });
    }

    /// The round that is computed now.
    pub fn next_round(&mut self) -> Option<Round> {
        let round = self.rounds.get(self.next)?.clone();
        self.next += 1;
        Some(round)
    }

    /// Finds a place for each neuron, in `units` of equal length (none where there is no neuron), and lists the reads of those that are neither in a frame nor early.
    pub fn make(&mut self, room: &Room<'_>, wanted: Wanted<'_>, units: usize, list: &mut Listing<'_>) {
        self.places.clear();
        self.rounds.clear();
        (self.next, self.misses, self.early) = (0, 0, 0);
        let pieces = room.layer.blocks.runs().len();
        let cut = |unit: usize| unit * wanted.neurons.len() / units.max(1);
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
            self.places.truncate(range.start * pieces);
            self.push_round(first..unit, cut(first) * pieces..range.start * pieces, listed);
            (first, side) = (unit, Side { number: 1 - side.number, used: 0 });
            let fits = self.unit(room, wanted, range, &mut side, list);
            assert!(fits.is_ok(), "a unit is longer than half of the landing");
        }
        self.push_round(first..units, cut(first) * pieces..self.places.len(), list.reads.listed(room.ahead));
        for (places, neuron) in self.places.chunks_exact(pieces).zip(wanted.neurons) {
            match wanted.early.places(*neuron) {
                Some(_) => self.early += 1,
                None => self.misses += u64::from(places[0].read != NONE),
            }
        }
    }

    /// Whether a read brings a neuron of the list.
    pub fn needs(&self, read: u32) -> bool {
        self.places.iter().any(|place| place.read == read)
    }

    fn push_round(&mut self, units: Range<usize>, pieces: Range<usize>, listed: usize) {
        let here = self.places[pieces.clone()].iter().all(|place| place.read == NONE);
        self.rounds.push(Round { units, pieces, listed, here });
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
        let runs = layer.blocks.runs();
        let mut group: Option<Group> = None;
        for i in range {
            let neuron = wanted.neurons[i];
            let inside = |run: &Run| (run.at(neuron.index()) % room.align as u64) as usize;
            if let Location::Device(slot) = layer.table.location(neuron) {
                let here = |(piece, run): (usize, &Run)| {
                    let at = layer.frame_of(slot, piece).wrapping_add(inside(run));
                    Place { at, read: NONE, keep: std::ptr::null_mut() }
                };
                self.places.extend(runs.iter().enumerate().map(here));
                continue;
            }
            if let Some(places) = wanted.early.places(neuron) {
                let first = places[0].read;
                let slot = wanted.slot(i);
                for (piece, (run, place)) in runs.iter().zip(places).enumerate() {
                    // It had no frame when it was asked for, and may have got one now.
                    let keep = slot.map_or(place.keep, |slot| layer.frame_of(slot, piece).wrapping_add(inside(run)));
                    let read = if list.reads.is_here(place.read) { NONE } else { place.read };
                    self.places.push(Place { read, keep, ..*place });
                }
                if let Some(slot) = slot {
                    list.filling.push(Filling { slot, neuron, reads: (first, runs.len() as u32), straight: false });
                }
                continue;
            }
            // Filled in when its reads are listed.
            let unknown = Place { at: std::ptr::null(), read: 0, keep: std::ptr::null_mut() };
            self.places.extend(runs.iter().map(|_| unknown));
            let own = |(piece, run): (usize, &Run)| {
                let first = run.at(neuron.index());
                Group { numbers: i..i + 1, piece, bytes: first..first + run.bytes() as u64 }
            };
            if runs.len() > 1 {
                // All its pieces or none.
                let listed = list.reads.listed(room.ahead);
                let mut pieces = runs.iter().enumerate().map(own);
                let read = pieces.try_for_each(|piece| self.read(room, wanted, piece, side, list));
                read.inspect_err(|_| list.reads.forget(room.ahead, listed))?;
                continue;
            }
            let own = own((0, &runs[0]));
            group = match group {
                Some(open) if room.joins(&open, &own) => {
                    Some(Group { numbers: open.numbers.start..i + 1, bytes: open.bytes.start..own.bytes.end, ..open })
                }
                open => {
                    if let Some(open) = open {
                        self.read(room, wanted, open, side, list)?;
                    }
                    Some(own)
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
        Group { numbers, piece, bytes }: Group,
        side: &mut Side,
        Listing { reads, filling }: &mut Listing<'_>,
    ) -> Result<(), usize> {
        let align = room.align as u64;
        let (begin, end) = (bytes.start / align * align, bytes.end.next_multiple_of(align));
        let length = (end - begin) as usize;
        let own_frame = if numbers.len() == 1 { wanted.slot(numbers.start) } else { None };
        let into = match own_frame {
            Some(slot) => room.layer.frame_of(slot, piece),
            None if side.used + length > room.half => return Err(numbers.start),
            None => {
                side.used += length;
                room.landing.wrapping_add(side.number * room.half + side.used - length)
            }
        };
        let needed = (bytes.end - begin) as usize;
        let read = reads.list(room.ahead, Job { offset: begin, bytes: length, needed, into });
        let runs = room.layer.blocks.runs();
        for i in numbers {
            let (neuron, place) = (wanted.neurons[i], &mut self.places[i * runs.len() + piece]);
            // A neuron between them may be in memory already.
            if place.read == NONE || wanted.early.places(neuron).is_some() {
                continue;
            }
            let offset = runs[piece].at(neuron.index());
            let at = (offset - begin) as usize;
            place.at = into.wrapping_add(at);
            place.read = read;
            let number = neuron.index() * runs.len() + piece;
            reads.check(room.ahead, Check { layer: room.layer.number, piece: number, at, bytes: runs[piece].bytes() });
            if let Some(slot) = wanted.slot(i) {
                // The reads of its pieces follow one another.
                if piece == 0 {
                    let (reads, straight) = ((read, runs.len() as u32), own_frame.is_some());
                    filling.push(Filling { slot, neuron, reads, straight });
                }
                if own_frame.is_none() {
                    place.keep = room.layer.frame_of(slot, piece).wrapping_add((offset % align) as usize);
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
    /// Pieces of each neuron.
    pieces: usize,
}

impl Early {
    /// Nothing.
    pub const NOTHING: Early = Early { plan: Plan::NOTHING, numbers: Vec::new(), pieces: 1 };

    /// For layers of `neurons` of so many pieces: nothing is allocated later.
    pub fn new(neurons: usize, pieces: usize) -> Early {
        Early { plan: Plan::new(neurons, pieces), numbers: vec![NONE; neurons], pieces: 1 }
    }

    /// Where the pieces of a neuron are or will be, if it was asked for.
    #[inline]
    pub fn places(&self, neuron: StoreId) -> Option<&[Place]> {
        let number = *self.numbers.get(neuron.index())? as usize;
        (number != NONE as usize).then(|| &self.plan.places[number * self.pieces..(number + 1) * self.pieces])
    }

    /// Finds places for neurons that are not there, as [`Plan::make`], as far as there is room for them, and lists their reads.
    pub fn make(&mut self, room: &Room<'_>, neurons: &[StoreId], slot_for: &[u32], list: &mut Listing<'_>) {
        let wanted = Wanted { neurons, early: &Early::NOTHING, slot_for };
        self.plan.places.clear();
        self.pieces = room.layer.blocks.runs().len();
        let made = self.plan.unit(room, wanted, 0..neurons.len(), &mut Side { number: 0, used: 0 }, list);
        let made = made.err().unwrap_or(neurons.len());
        for (number, neuron) in neurons[..made].iter().enumerate() {
            if self.plan.places[number * self.pieces].read != NONE {
                self.numbers[neuron.index()] = number as u32;
            }
        }
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.numbers.fill(NONE);
    }
}

impl<'a> Room<'a> {
    /// For a layer whose turn it is. The landing's halves begin at `landing`.
    pub fn new(layer: &'a Layer, align: usize, gap: usize, landing: *mut u8, half: usize) -> Room<'a> {
        Room { layer, align, gap, together: true, landing, half, ahead: 0 }
    }

    /// Whether a block is read together with what is open before it.
    fn joins(&self, open: &Group, block: &Group) -> bool {
        let gap = (block.bytes.start - open.bytes.end) as usize;
        let all = (block.bytes.end - open.bytes.start) as usize;
        self.together && gap <= self.gap && all <= MAX_READ
    }
}

/// What was asked for before the turn of its layer.
pub(super) struct Ahead {
    /// The layer; `None` if nothing was asked for.
    pub(super) layer: Option<usize>,
    /// Where it is or will be.
    pub early: Early,
    pub(super) filling: Vec<Filling>,
}

impl Ahead {
    /// For layers of `neurons` of so many pieces: nothing is allocated later.
    pub fn new(neurons: usize, pieces: usize) -> Ahead {
        Ahead { layer: None, early: Early::new(neurons, pieces), filling: Vec::with_capacity(neurons) }
    }
}

/// Neurons that lie one after the other in the landing.
#[derive(Clone, Debug)]
pub struct Strip {
    /// Which of the parts that the layer was cut into.
    pub parts: Range<usize>,
    /// The neurons.
    pub neurons: Range<usize>,
    /// The block of the first; the others follow as in the store.
    pub first: *const u8,
    /// Where its reads go, and which they are.
    pub(super) start: *const u8,
    pub(super) reads: Range<u32>,
    /// How many of the layer's reads are listed up to its end.
    pub(super) listed: usize,
}

/// The strips of one use of a layer.
#[derive(Default)]
pub(super) struct Strips {
    pub(super) list: Vec<Strip>,
    pub(super) next: usize,
}

// SAFETY: its pointers are into the cache's memory.
unsafe impl Send for Strips {}
