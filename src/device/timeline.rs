//! A trace of what host and device did and when, for people. It is kept while a model runs, in memory that is allocated once.
//!
//! All times are ns on the host's clock. With a virtual device that is the virtual clock, so that both sides fit together, and none of
//! its times is a measurement. Only the last spans are kept; the sums count all of them.

use super::types::Event;
use crate::clock::{self, Instant};

/// Spans that are kept: some hundred tokens of a model of 32 layers, 12 MB.
pub const SPANS: usize = 1 << 18;
/// Samples of the counters that are kept; each pass makes one.
const SAMPLES: usize = 1 << 14;
/// Most spans of one pass from which the overlap of host and device is computed; the later ones of a longer pass are left out.
const OF_A_PASS: usize = 1 << 14;

/// Which of the parallel workers a span belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Track {
    /// The host's engine: passes, the layers in each, the parts of each layer.
    Host,
    /// The device's compute stream.
    Compute,
    /// The device's copy stream.
    Copy,
}

/// What time is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// A whole pass.
    Pass,
    /// A layer of a pass.
    Layer,
    /// Attention, with its projections.
    Attention,
    /// Predicting scores and selecting the neurons to compute.
    Predictor,
    /// The host's or the device's part of a layer's FFN.
    Ffn,
    /// The last norm and the logits.
    Head,
    /// The device's work before the FFN's parts: what is left of the last layer, the norm, the scores, and copying them to the host.
    Exchange,
    /// Copying the host's part of an FFN's output to the device and adding both parts.
    Merge,
    /// Sending the scheduler an observation, and beginning the moves that it has decided.
    Scheduler,
    /// Putting work on the device's streams, and all that lies between the other stages.
    Drive,
    /// The host waits for the device.
    Wait,
    /// Neurons on their way to the device; on the host's track, the moment at which their move was begun.
    Move,
}

impl Stage {
    /// All parts, in the order of arrays by part.
    pub const ALL: [Stage; 12] = [
        Stage::Pass,
        Stage::Layer,
        Stage::Attention,
        Stage::Predictor,
        Stage::Ffn,
        Stage::Head,
        Stage::Exchange,
        Stage::Merge,
        Stage::Scheduler,
        Stage::Drive,
        Stage::Wait,
        Stage::Move,
    ];

    /// The part's name for people.
    pub const fn name(self) -> &'static str {
        match self {
            Stage::Pass => "pass",
            Stage::Layer => "layer",
            Stage::Attention => "attention",
            Stage::Predictor => "predictor",
            Stage::Ffn => "FFN half",
            Stage::Head => "head",
            Stage::Exchange => "exchange",
            Stage::Merge => "merge",
            Stage::Scheduler => "scheduler",
            Stage::Drive => "driving",
            Stage::Wait => "waiting",
            Stage::Move => "move",
        }
    }

    /// Whether the host's cores compute during this part.
    const fn computes(self) -> bool {
        matches!(self, Stage::Attention | Stage::Predictor | Stage::Ffn | Stage::Head)
    }
}

/// What the engine tells a trace about its work ([`super::Device::note`]).
#[derive(Clone, Copy, Debug)]
pub enum Note {
    /// A pass begins.
    Pass {
        /// Tokens of the pass.
        tokens: usize,
        /// Position of its first token.
        first: usize,
    },
    /// A layer of the pass begins.
    Layer(usize),
    /// The host has spent the time since the last note on this part.
    Host(Stage),
    /// What is put on the compute stream from now on belongs to this part; with `None`, no spans of it are kept.
    Compute(Option<Stage>),
    /// What is put on the copy stream next is a group of moves.
    Moves {
        /// The layer whose neurons are moved.
        layer: usize,
        /// Neurons of the group.
        neurons: usize,
    },
    /// The moves that this event stands behind have not landed, and their layer is used now.
    Late(Event),
    /// The pass is over, and so is its work on the compute stream.
    End {
        /// Neurons of all layers that are resident now.
        residents: usize,
        /// All neurons of all layers.
        neurons: usize,
    },
}

/// One span of time that was used for one thing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Whose time it is.
    pub track: Track,
    /// What it was used for.
    pub part: Stage,
    /// When it began, on the host's clock.
    pub begin_ns: u64,
    /// When it ended, on the host's clock.
    pub end_ns: u64,
    /// The layer that it belongs to; `None` for what belongs to the whole pass.
    pub layer: Option<u32>,
    /// Tokens of a pass, neurons of a move; 0 for other parts.
    pub count: u32,
    /// Position of a pass's first token, bytes of a move; 0 for other parts.
    pub value: u64,
    /// Whether a move's layer was used before the move had landed.
    pub late: bool,
}

/// Counters at the end of a pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// When the pass ended, on the host's clock.
    pub at_ns: u64,
    /// Resident neurons / all neurons, 0 to 1.
    pub resident_share: f64,
    /// Weights that the host read in the pass over the pass's time, GB/s.
    pub host_gb_s: f64,
    /// Weights that the device read in the pass over the pass's time, GB/s.
    pub device_gb_s: f64,
    /// Bytes that went to the device over the pass's time, GB/s.
    pub link_gb_s: f64,
}

/// Sums over passes; times are in ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    /// How many passes there were.
    pub passes: u64,
    /// Tokens of these passes.
    pub tokens: u64,
    /// Time from the beginning to the end of each pass.
    pub ns: u64,
    /// The host's time by [`Stage`].
    pub host_ns: [u64; Stage::ALL.len()],
    /// The compute stream's time by [`Stage`].
    pub compute_ns: [u64; Stage::ALL.len()],
    /// Time in which host and device computed.
    pub both_ns: u64,
    /// Time in which only the host computed.
    pub host_alone_ns: u64,
    /// Time in which only the device computed.
    pub device_alone_ns: u64,
    /// Time in which neither computed.
    pub neither_ns: u64,
    /// Time in which the compute stream was busy, by the device's own count.
    pub computing_ns: u64,
    /// Time in which the host computed what it told the device of.
    pub working_ns: u64,
    /// Times of the layers' FFNs.
    pub ffn: FfnSums,
}

/// Sums over FFNs of which both host and device computed a part; times are in ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FfnSums {
    /// How many such FFNs there were.
    pub layers: u64,
    /// From the end of [`Stage::Exchange`] on the device until the parts were added there.
    pub ns: u64,
    /// Time in which the device computed its parts.
    pub device_ns: u64,
    /// Time in which the host computed its parts.
    pub host_ns: u64,
    /// Time from the end of the exchange until the host saw it, and that in which the host's part was copied to the device and added.
    pub sync_ns: u64,
    /// For each FFN the longer of the device's part and of the host's part with its `sync_ns`.
    pub longer_ns: u64,
}

/// Sums over groups of moves that have landed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoveSums {
    /// How many groups there were.
    pub groups: u64,
    /// Neurons of these groups.
    pub neurons: u64,
    /// Bytes of these groups.
    pub bytes: u64,
    /// Time that these groups took, in ns.
    pub ns: u64,
    /// Groups whose layer was used before they had landed.
    pub late: u64,
}

/// One layer of the current pass: points in time and durations in ns, 0 for what has not happened.
#[derive(Clone, Copy, Debug, Default)]
struct LayerTimes {
    exchange_end: u64,
    /// When the host saw that the exchange had ended.
    seen: u64,
    device: u64,
    host: u64,
    merge: [u64; 2],
}

/// Bytes read and moved since the trace began, from which the rates of a [`Sample`] are made, and time spent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Read {
    /// Weights that the host read.
    pub host: u64,
    /// Weights that the device read.
    pub device: u64,
    /// Bytes that went to the device.
    pub link: u64,
    /// Time in which the compute stream was busy, ns ([`super::Totals::busy_ns`]).
    pub computing_ns: u64,
    /// Time in which the host computed, ns ([`super::Totals::host_ns`]).
    pub working_ns: u64,
}

/// The trace: spans and samples of the last passes, sums over all of them.
pub struct Timeline {
    /// The device's name; `None` if the host computes alone.
    pub device: Option<String>,
    /// Whether the times are those of a virtual device.
    pub is_virtual: bool,
    /// By how much, in ns, a span of the device may at most be misplaced in time against those of the host.
    pub uncertain_ns: u64,
    /// Spans of the device whose times are not known: there were too many at once, or the device has failed.
    pub unknown: u64,
    /// Sums over short passes, which decode, and over passes of more than `long` tokens, which are a prompt's.
    pub sums: [Sums; 2],
    /// Sums over the copy stream's groups of moves.
    pub moves: MoveSums,
    spans: Ring<Span>,
    samples: Ring<Sample>,
    /// A pass of more tokens than this is a long one.
    long: usize,
    origin: Instant,
    /// Where the host's next span begins.
    mark: u64,
    pass: Option<Span>,
    layer: Option<Span>,
    sum: Sums,
    /// Begin and end of each span of this pass in which the host's cores computed; `compute` has the device's.
    host: Vec<[u64; 2]>,
    compute: Vec<[u64; 2]>,
    layers: Vec<LayerTimes>,
    read: Read,
    /// The same when the current pass began.
    began: Read,
}

/// Keeps the last `room` items that were pushed.
struct Ring<T> {
    items: Vec<T>,
    room: usize,
    put: u64,
}

impl<T: Copy> Ring<T> {
    fn new(room: usize) -> Ring<T> {
        Ring { items: Vec::with_capacity(room), room, put: 0 }
    }

    fn push(&mut self, item: T) {
        match self.items.len() < self.room {
            true => self.items.push(item),
            false => self.items[(self.put % self.room as u64) as usize] = item,
        }
        self.put += 1;
    }

    fn iter(&self) -> impl Iterator<Item = &T> {
        let first = if self.items.len() < self.room { 0 } else { (self.put % self.room as u64) as usize };
        self.items[first..].iter().chain(&self.items[..first])
    }
}

impl Timeline {
    /// An empty trace for a model of `layers` layers, with room for [`SPANS`] spans. Passes of more than `long` tokens have sums of their
    /// own.
    pub fn new(layers: usize, long: usize) -> Timeline {
        Timeline::of(layers, long, SPANS)
    }

    /// As [`Timeline::new`], with room for `spans` spans.
    pub fn of(layers: usize, long: usize, spans: usize) -> Timeline {
        Timeline {
            device: None,
            is_virtual: false,
            uncertain_ns: 0,
            unknown: 0,
            sums: Default::default(),
            moves: MoveSums::default(),
            spans: Ring::new(spans),
            samples: Ring::new(SAMPLES),
            long,
            origin: clock::now(),
            mark: 0,
            pass: None,
            layer: None,
            sum: Sums::default(),
            host: Vec::with_capacity(OF_A_PASS),
            compute: Vec::with_capacity(OF_A_PASS),
            layers: vec![LayerTimes::default(); layers],
            read: Read::default(),
            began: Read::default(),
        }
    }

    /// The time on the host's clock: ns since the trace was made.
    pub fn now(&self) -> u64 {
        self.origin.elapsed().as_nanos() as u64
    }

    /// The spans that are kept, in the order in which they ended.
    pub fn spans(&self) -> impl Iterator<Item = &Span> {
        self.spans.iter()
    }

    /// The samples that are kept, one for each pass, the oldest first.
    pub fn samples(&self) -> impl Iterator<Item = &Sample> {
        self.samples.iter()
    }

    /// How many spans, the oldest ones, are not kept any more.
    pub fn left_out(&self) -> u64 {
        self.spans.put - self.spans.items.len() as u64
    }

    /// When the current pass began, in ns; `None` between passes.
    pub fn pass_began(&self) -> Option<u64> {
        self.pass.map(|pass| pass.begin_ns)
    }

    /// Records what a note at time `now` says about the host. `read` is what was read and moved so far.
    pub fn note(&mut self, note: Note, now: u64, read: Read) {
        match note {
            Note::Pass { tokens, first } => {
                self.began = read;
                self.begin(now, tokens, first);
            }
            Note::Layer(layer) => self.begin_layer(now, layer),
            Note::Host(part) => self.host(part, now),
            Note::Moves { layer, neurons } => {
                let (layer, count) = (Some(layer as u32), neurons as u32);
                let (begin_ns, end_ns) = (now, now);
                let span = Span {
                    track: Track::Host,
                    part: Stage::Move,
                    begin_ns,
                    end_ns,
                    layer,
                    count,
                    value: 0,
                    late: false,
                };
                self.spans.push(span);
            }
            Note::End { residents, neurons } => self.end(now, residents as f64 / neurons.max(1) as f64, read),
            // The head is no part of the last layer.
            Note::Compute(Some(Stage::Head)) => self.end_layer(now),
            Note::Compute(_) | Note::Late(_) => {}
        }
    }

    fn begin(&mut self, now: u64, tokens: usize, first: usize) {
        let (count, value) = (tokens as u32, first as u64);
        let (begin_ns, end_ns) = (now, now);
        let layer = None;
        self.pass =
            Some(Span { track: Track::Host, part: Stage::Pass, begin_ns, end_ns, layer, count, value, late: false });
        (self.mark, self.layer, self.sum) = (now, None, Sums::default());
        self.host.clear();
        self.compute.clear();
        self.layers.fill(LayerTimes::default());
    }

    fn begin_layer(&mut self, now: u64, layer: usize) {
        self.end_layer(now);
        if self.pass.is_none() {
            return;
        }
        let begun = Span { part: Stage::Layer, layer: Some(layer as u32), count: 0, value: 0, ..self.still(now) };
        self.layer = Some(begun);
    }

    fn end_layer(&mut self, now: u64) {
        self.host(Stage::Drive, now);
        if let Some(layer) = self.layer.take() {
            self.spans.push(Span { end_ns: now, ..layer });
        }
    }

    fn still(&self, now: u64) -> Span {
        let (begin_ns, end_ns, layer) = (now, now, self.layer.and_then(|layer| layer.layer));
        Span { track: Track::Host, part: Stage::Drive, begin_ns, end_ns, layer, count: 0, value: 0, late: false }
    }

    /// Records that the host has spent the time since its last span on `part`.
    fn host(&mut self, part: Stage, now: u64) {
        let begin_ns = std::mem::replace(&mut self.mark, now);
        if self.pass.is_none() || now <= begin_ns {
            return;
        }
        self.spans.push(Span { part, begin_ns, ..self.still(now) });
        let ns = now - begin_ns;
        self.sum.host_ns[part as usize] += ns;
        if part.computes() && self.host.len() < OF_A_PASS {
            self.host.push([begin_ns, now]);
        }
        if let Some(layer) = self.layer.and_then(|layer| self.layers.get_mut(layer.layer? as usize))
            && part == Stage::Ffn
        {
            layer.host += ns;
        }
    }

    /// Records that the host has seen the end of this layer's exchange.
    pub fn seen(&mut self, layer: u32, now: u64) {
        if let Some(layer) = self.layers.get_mut(layer as usize) {
            layer.seen = now;
        }
    }

    /// Records a span of the device's compute stream in the pass that ends. To be called in the order of the stream.
    pub fn compute(&mut self, part: Stage, layer: Option<u32>, [begin_ns, end_ns]: [u64; 2]) {
        let track = Track::Compute;
        self.spans.push(Span { track, part, begin_ns, end_ns, layer, count: 0, value: 0, late: false });
        self.sum.compute_ns[part as usize] += end_ns - begin_ns;
        if self.compute.len() < OF_A_PASS {
            self.compute.push([begin_ns, end_ns]);
        }
        if let Some(layer) = layer.and_then(|layer| self.layers.get_mut(layer as usize)) {
            match part {
                Stage::Exchange => layer.exchange_end = end_ns,
                Stage::Ffn => layer.device += end_ns - begin_ns,
                Stage::Merge => layer.merge = [begin_ns, end_ns],
                _ => {}
            }
        }
    }

    /// Records a group of moves that has landed.
    pub fn moved(&mut self, span: Span) {
        self.spans.push(span);
        self.moves.groups += 1;
        self.moves.neurons += u64::from(span.count);
        self.moves.bytes += span.value;
        self.moves.ns += span.end_ns - span.begin_ns;
        self.moves.late += u64::from(span.late);
    }

    fn end(&mut self, now: u64, resident_share: f64, read: Read) {
        self.end_layer(now);
        let before = std::mem::replace(&mut self.read, read);
        let Some(pass) = self.pass.take() else { return };
        self.spans.push(Span { end_ns: now, ..pass });
        let ns = now - pass.begin_ns;
        let busy = |spans: &[[u64; 2]]| spans.iter().map(|[begin, end]| end - begin).sum::<u64>();
        let (host, device, both) = (busy(&self.host), busy(&self.compute), overlap(&self.host, &self.compute));
        let mut sum = Sums { passes: 1, tokens: u64::from(pass.count), ns, both_ns: both, ..self.sum };
        sum.computing_ns = read.computing_ns.saturating_sub(self.began.computing_ns);
        sum.working_ns = read.working_ns.saturating_sub(self.began.working_ns);
        (sum.host_alone_ns, sum.device_alone_ns) = (host - both, device - both);
        sum.neither_ns = ns.saturating_sub(host + device - both);
        self.layers.iter().for_each(|layer| sum.ffn.add(layer));
        self.sums[usize::from(pass.count as usize > self.long)].add(&sum);
        // Bytes by nanoseconds are GB/s.
        let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / ns.max(1) as f64;
        self.samples.push(Sample {
            at_ns: now,
            resident_share,
            host_gb_s: rate(read.host, before.host),
            device_gb_s: rate(read.device, before.device),
            link_gb_s: rate(read.link, before.link),
        });
    }
}

impl FfnSums {
    fn add(&mut self, at: &LayerTimes) {
        let [merge, end] = at.merge;
        // Only where both computed a part, and every time is known.
        if at.host == 0 || at.device == 0 || at.exchange_end == 0 || end == 0 {
            return;
        }
        let sync = at.seen.saturating_sub(at.exchange_end) + (end - merge);
        self.layers += 1;
        self.ns += end.saturating_sub(at.exchange_end);
        self.device_ns += at.device;
        self.host_ns += at.host;
        self.sync_ns += sync;
        self.longer_ns += at.device.max(at.host + sync);
    }
}

impl Sums {
    fn add(&mut self, of: &Sums) {
        let each = |to: &mut [u64], of: &[u64]| to.iter_mut().zip(of).for_each(|(to, of)| *to += of);
        each(&mut self.host_ns, &of.host_ns);
        each(&mut self.compute_ns, &of.compute_ns);
        self.computing_ns += of.computing_ns;
        self.working_ns += of.working_ns;
        let numbers =
            |s: &Sums| [s.passes, s.tokens, s.ns, s.both_ns, s.host_alone_ns, s.device_alone_ns, s.neither_ns];
        let mut sums = numbers(self);
        each(&mut sums, &numbers(of));
        [self.passes, self.tokens, self.ns, self.both_ns, self.host_alone_ns, self.device_alone_ns, self.neither_ns] =
            sums;
        let numbers = |f: &FfnSums| [f.layers, f.ns, f.device_ns, f.host_ns, f.sync_ns, f.longer_ns];
        let mut sums = numbers(&self.ffn);
        each(&mut sums, &numbers(&of.ffn));
        let [layers, ns, device_ns, host_ns, sync_ns, longer_ns] = sums;
        self.ffn = FfnSums { layers, ns, device_ns, host_ns, sync_ns, longer_ns };
    }
}

/// The time that two lists of (begin, end) have in common; each is in order and without overlaps of its own.
fn overlap(a: &[[u64; 2]], b: &[[u64; 2]]) -> u64 {
    let (mut i, mut j, mut sum) = (0, 0, 0);
    while let (Some(&[a_begin, a_end]), Some(&[b_begin, b_end])) = (a.get(i), b.get(j)) {
        sum += a_end.min(b_end).saturating_sub(a_begin.max(b_begin));
        if a_end < b_end { i += 1 } else { j += 1 }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prng::Prng;

    fn stretches(rng: &mut Prng) -> Vec<[u64; 2]> {
        let mut at = 0;
        let mut next = |most: u64| {
            at += rng.below(most);
            at
        };
        (0..20).map(|_| [next(30), next(20)]).collect()
    }

    #[test]
    fn an_overlap_is_what_counting_every_instant_gives() {
        let mut rng = Prng::new(5);
        for _ in 0..200 {
            let (a, b) = (stretches(&mut rng), stretches(&mut rng));
            let within = |spans: &[[u64; 2]], t: u64| spans.iter().any(|[begin, end]| (*begin..*end).contains(&t));
            let counted = (0..1200).filter(|&t| within(&a, t) && within(&b, t)).count() as u64;
            assert_eq!(overlap(&a, &b), counted);
        }
    }

    #[test]
    fn the_last_spans_are_kept_and_sums_know_of_all() {
        let mut timeline = Timeline::of(1, 32, 10);
        for pass in 0..7u64 {
            let at = |ns| pass * 100 + ns;
            let before = Read { computing_ns: 30 * pass + 1000, working_ns: 40 * pass + 1000, ..Read::default() };
            timeline.note(Note::Pass { tokens: 1, first: pass as usize }, at(0), before);
            timeline.note(Note::Layer(0), at(0), Read::default());
            timeline.note(Note::Host(Stage::Attention), at(30), Read::default());
            timeline.note(Note::Host(Stage::Wait), at(50), Read::default());
            timeline.compute(Stage::Exchange, Some(0), [at(20), at(45)]);
            let read = Read {
                host: 200 * (pass + 1),
                device: 0,
                link: 0,
                computing_ns: 30 * (pass + 1) + 1000,
                working_ns: 40 * (pass + 1) + 1000,
            };
            timeline.note(Note::End { residents: 1, neurons: 4 }, at(100), read);
        }
        // Of each pass: attention, waiting, the device's exchange, driving, the layer and the pass.
        assert_eq!((timeline.spans().count(), timeline.left_out()), (10, 32));
        let last = timeline.spans().last().unwrap();
        assert_eq!((last.part, last.begin_ns, last.end_ns, last.value), (Stage::Pass, 600, 700, 6));
        let sums = timeline.sums[0];
        assert_eq!((sums.passes, sums.ns, timeline.sums[1].passes), (7, 700, 0));
        // Of what was counted before the pass began nothing is the pass's.
        assert_eq!([sums.computing_ns, sums.working_ns], [7 * 30, 7 * 40]);
        assert_eq!([sums.both_ns, sums.host_alone_ns, sums.device_alone_ns, sums.neither_ns], [70, 140, 105, 385]);
        assert!(timeline.samples().all(|s| (s.resident_share, s.host_gb_s) == (0.25, 2.0)));
    }
}
