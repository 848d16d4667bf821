//! All neurons of a layer through the landing, in order and in large reads (PowerInfer-2 4.1.1): for prompts, and for layers that leave no
//! neuron out. One half is computed while the other is read.

use super::blocks::STRIP_READ;
use super::checksums::Check;
use super::plan::{Strip, Strips};
use super::reads::Job;
use super::state::HostCache;
use std::ops::Range;

impl HostCache {
    /// Begins to stream a layer that is cut into `parts`, of which number i ends with neuron `end(i)`, exclusive. A strip has whole parts.
    ///
    /// # Panics
    /// If a part is longer than half of the landing.
    pub fn begin_strips(&mut self, layer: usize, parts: usize, end: impl Fn(usize) -> usize) {
        self.come_to(layer);
        self.give_up(layer % self.aheads.len());
        self.reads.clear(0);
        self.strips.list.clear();
        self.strips.next = 0;
        let (align, run) = (self.align as u64, self.layers[layer].blocks.runs()[0].clone());
        let (mut part, mut neuron) = (0, 0);
        while part < parts {
            let first = part;
            let side = self.strips.list.len() % 2;
            let begin = run.at(neuron) / align * align;
            let fits = |neurons: usize| {
                let end = run.at(neurons).next_multiple_of(align);
                (end - begin) as usize <= self.half
            };
            assert!(fits(end(part)), "a part is longer than half of the landing");
            while part < parts && fits(end(part)) {
                part += 1;
            }
            let (from, to) = (run.at(neuron), run.at(end(part - 1)));
            let into = self.landing.start().wrapping_add(side * self.half);
            let reads = self.list_pieces(begin, to, into);
            let first_block = into.wrapping_add((from - begin) as usize);
            let neurons = neuron..end(part - 1);
            neuron = neurons.end;
            debug_assert_eq!((to - from) as usize, neurons.len() * run.bytes());
            self.strips.list.push(Strip {
                parts: first..part,
                neurons,
                first: first_block,
                start: into,
                reads,
                listed: self.reads.listed(0),
            });
        }
        self.allow_strips();
    }

    /// Lists the reads of the file's bytes from `begin` to `end`.
    fn list_pieces(&mut self, begin: u64, end: u64, into: *mut u8) -> Range<u32> {
        let align = self.align as u64;
        let mut numbers = 0..0;
        for at in (begin..end).step_by(STRIP_READ) {
            let needed = (end - at).min(STRIP_READ as u64) as usize;
            let bytes = needed.next_multiple_of(align as usize);
            let job = Job { offset: at, bytes, needed, into: into.wrapping_add((at - begin) as usize) };
            let number = self.reads.list(0, job);
            numbers = if numbers.is_empty() { number..number + 1 } else { numbers.start..number + 1 };
        }
        numbers
    }

    /// The strip that comes next may be read: what lies in its half is computed.
    fn allow_strips(&mut self) {
        let Strips { list, next } = &self.strips;
        if let Some(strip) = list.get(*next).or(list.last()) {
            let allowed = strip.listed;
            // SAFETY: the halves are this cache's own, and what lay there is computed.
            unsafe { self.reads.allow(0, allowed) };
        }
    }

    /// The next strip once it is there; the one after it is read meanwhile. `None` after the last.
    pub fn next_strip(&mut self) -> Option<Strip> {
        let strip = self.strips.list.get(self.strips.next)?.clone();
        self.strips.next += 1;
        self.allow_strips();
        self.counts.streamed += strip.neurons.len() as u64;
        // A failed read sets a fault, which is checked where the answer is used.
        self.reads.wait_for(strip.reads.clone());
        self.verify(&strip);
        if self.strips.next == self.strips.list.len() {
            self.reads.finish(0);
            self.fault = self.fault.or(self.reads.fault(|_| true));
        }
        Some(strip)
    }

    /// Compares the neurons of a strip, whose reads cut them, with their checksums.
    fn verify(&mut self, strip: &Strip) {
        let (layer, bytes) = (self.layer, self.layers[self.layer].blocks.runs()[0].bytes());
        let at = strip.first.addr() - strip.start.addr();
        let check = |(i, neuron): (usize, usize)| Check { layer, piece: neuron, at: at + i * bytes, bytes };
        let checks = strip.neurons.clone().enumerate().map(check);
        self.reads.verify(strip.reads.clone(), (strip.start, STRIP_READ), checks);
    }
}
