//! A prompt's chunk in parts that take turns between host and device: while the host computes its share for one part, the device works on
//! another (mllm-NPU 3.4, whose rule is in [`crate::scheduler::chunks`]). What is copied for the chunk is copied once for all parts, which then
//! wait for each other in every layer, or for each part, where the link is not what takes longest.
//!
//! A part is some neighbouring tokens of the chunk, and has their rows of everything that the chunk works in. No number of a part depends on
//! the order of steps: each part's sums are added in the order in which one part alone would add them.

use super::streaming::{Beside, ChunkCosts, Run};
use crate::device::{Device, Event};
use crate::engine::forward::{Phase, Step};
use crate::ids::StoreId;
use crate::prng::Prng;
use crate::scheduler::chunks::{Graph, Needs, Order, Processor, Stage, Subgraph};
use std::ops::Range;

/// Most parts of a chunk.
pub const MAX_PARTS: usize = 4;
/// Fewest tokens of a part that is not asked for: with fewer, weights are read and unpacked so often that arithmetic waits for it.
const MIN_TOKENS: usize = 128;
/// Parts begin at multiples of so many tokens: there every row begins at a multiple of 16 bytes, and a tile that counts active neurons.
pub(super) const ALIGN: usize = 64;
/// Parts have to take at most this share of the time of one part, by the costs, to be taken.
const WORTH: f64 = 0.98;
/// Layers by which numbers of parts are compared.
const COMPARED_LAYERS: usize = 4;

/// How chunks go in parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartsSetting {
    /// So many parts, up to [`MAX_PARTS`], and fewer where a part would have less than 64 tokens; `None`: as many as take the least time by
    /// the costs.
    pub parts: Option<usize>,
    /// Whether what is copied is copied once for all parts; `None`: what takes less time by the costs.
    pub shared: Option<bool>,
    /// In this order; `None`: that of the two rules which takes less time by the costs.
    pub order: Option<PartOrder>,
}

/// In which order the steps of a chunk's parts come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartOrder {
    /// What is ready, of the earliest part.
    EarliestPart,
    /// What is ready, with the largest contribution (mllm-NPU, equation 6).
    LargestContribution,
    /// Any that is ready, by chance with this seed: to show that no result depends on the order.
    AtRandom(u64),
}

/// The tokens of the current part: their rows in what the pass works in.
#[derive(Clone, Copy, Default)]
pub(super) struct Rows {
    /// The first, and how many there are.
    pub first: usize,
    pub n: usize,
    /// Tokens of the pass.
    pub all: usize,
}

impl Rows {
    /// All tokens of a pass.
    pub fn whole(n: usize) -> Rows {
        Rows { first: 0, n, all: n }
    }

    /// As a range of tokens.
    pub fn range(&self) -> Range<usize> {
        self.first..self.first + self.n
    }

    /// Part `number` of `parts` of a pass of `all` tokens.
    pub(super) fn part(all: usize, parts: usize, number: usize) -> Rows {
        let start = |number: usize| if number == parts { all } else { all * number / parts / ALIGN * ALIGN };
        let first = start(number);
        Rows { first, n: start(number + 1) - first, all }
    }
}

/// Marks of a part on the compute stream.
pub(super) struct PartMarks {
    /// Queries, keys and values have come to the host.
    pub projected: Event,
    /// The FFN's input has come to the host.
    pub exchanged: Event,
    /// A layer is done; two layers take turns.
    pub done: [Event; 2],
}

/// How the neurons of a chunk's layer that are in no slot are divided.
#[derive(Default)]
pub(super) struct Divided {
    /// The layer, from 0; `None` before it is divided.
    pub layer: Option<usize>,
    /// Neurons that are in no slot, ascending.
    pub missing: Vec<StoreId>,
    /// The CPU computes the last ones of them.
    pub on_cpu: usize,
    /// The blocks that are copied for the others: neighbours together, and how many, gaps included.
    pub runs: Vec<Run>,
    pub carried: usize,
    /// Whether the host's list of their names is written.
    pub named: bool,
    /// In how many tokens the CPU's neurons were active, and of how many parts that is known.
    pub counts: Vec<u32>,
    pub counted: usize,
}

impl Divided {
    /// The CPU's neurons.
    pub fn on_cpu(&self) -> &[StoreId] {
        &self.missing[self.missing.len() - self.on_cpu..]
    }
}

/// How a chunk is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    /// Number of parts.
    pub parts: usize,
    /// Whether what is copied is copied once for all of them.
    pub shared: bool,
}

impl Cut {
    /// Not at all.
    pub(super) const WHOLE: Cut = Cut { parts: 1, shared: false };
}

/// What a chunk in parts needs.
pub(super) struct Parts {
    /// Parts of the current pass.
    pub count: usize,
    /// Whether what is copied is copied once for all of them.
    pub shared: bool,
    /// The part whose steps are done now.
    pub number: usize,
    pub marks: Vec<PartMarks>,
    /// Two layers take turns: a part may be a layer ahead of another.
    pub divided: [Divided; 2],
    /// By part, layers whose keys and values are in the host's caches, where the host attends.
    pub put: [usize; MAX_PARTS],
    /// Parts whose last layer's results the host has taken over.
    pub taken_over: usize,
    /// What else host and device do while the missing neurons are computed.
    pub beside: Beside,
    /// The rates by which a chunk is divided; `None`: nothing is known.
    pub costs: Option<ChunkCosts>,
    pub setting: PartsSetting,
}

impl Parts {
    /// Marks on a device. Not on the token path.
    pub fn new(device: &mut dyn Device) -> Parts {
        let mut event = || device.event();
        let marks = (0..MAX_PARTS)
            .map(|_| PartMarks { projected: event(), exchanged: event(), done: [event(), event()] })
            .collect();
        Parts {
            count: 1,
            shared: false,
            number: 0,
            marks,
            divided: Default::default(),
            put: [0; MAX_PARTS],
            taken_over: 0,
            beside: Beside::default(),
            costs: None,
            setting: PartsSetting::default(),
        }
    }

    /// Marks of the current part.
    pub fn marks(&self) -> &PartMarks {
        &self.marks[self.number]
    }

    pub(super) fn begin(&mut self, cut: Cut, beside: Beside) {
        (self.count, self.shared, self.number) = (cut.parts, cut.shared, 0);
        (self.beside, self.taken_over) = (beside, 0);
        self.put.fill(0);
        self.divided.iter_mut().for_each(|divided| divided.layer = None);
    }
}

/// What the steps of a chunk's layer take, by rates: the same for all layers, with the mean of what they have in slots.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerCosts {
    /// Of its neurons.
    pub costs: ChunkCosts,
    /// Weights by those of a neuron: of q k v, of the output matrix, and what a token's queries multiply at each position that they see.
    pub project: f64,
    pub output: f64,
    pub position: f64,
    /// A token's queries, keys, values and outputs over the link, by a token's input of the FFN and its output.
    pub crossing: f64,
    /// Neurons in slots and in none.
    pub slots: usize,
    pub missing: usize,
    /// Whether there is memory on the device for neurons that are copied.
    pub copies: bool,
    /// What the link takes for a layer's attention, where its matrices are copied, us.
    pub attention_link_us: f64,
    /// Whether the host computes attention over keys and values.
    pub host_attends: bool,
    /// Share of the layers that see a window alone, and how many positions that has.
    pub windowed: f64,
    pub window: usize,
    /// Positions before the chunk, and its tokens.
    pub first: usize,
    pub n: usize,
}

/// Positions that the tokens at these positions see together, each at most `window` of them.
fn seen(tokens: Range<usize>, window: usize) -> f64 {
    // Token p sees p + 1 positions up to the window.
    let whole = window.clamp(tokens.start, tokens.end);
    let of_whole = 0.5 * ((whole - tokens.start) * (tokens.start + whole + 1)) as f64;
    of_whole + (tokens.end - whole) as f64 * window as f64
}

/// The steps of a layer that are planned, in their order.
const STAGES: [Phase; 5] = [Phase::Project, Phase::Attention, Phase::Select, Phase::Copied, Phase::Ffn];

impl LayerCosts {
    /// Scores over keys and values for the tokens of `rows`, us.
    fn attention_us(&self, rows: Rows) -> f64 {
        let (from, to) = (self.first + rows.first, self.first + rows.range().end);
        let seen = (1.0 - self.windowed) * seen(from..to, usize::MAX) + self.windowed * seen(from..to, self.window);
        if !self.host_attends {
            return (seen * self.position * self.costs.device_us).max(seen * self.costs.seen_us);
        }
        let over = rows.n as f64 * self.crossing * self.costs.cross_us + self.costs.sync_us;
        seen * self.position * self.costs.column_us + over
    }

    /// What else a layer has host and device do while its missing neurons are computed, if it is cut so.
    pub fn beside(&self, Cut { parts, shared }: Cut) -> Beside {
        let copies = if shared { 1 } else { parts };
        let attention = (0..parts).map(|number| self.attention_us(Rows::part(self.n, parts, number))).sum::<f64>();
        let products = self.n as f64 * (self.project + self.output) * self.costs.device_us;
        // What comes while the device computes attention does not delay the neurons.
        let link_us = (self.attention_link_us - attention - products).max(0.0);
        if parts == 1 {
            return Beside { parts, copies, link_us, ..Beside::default() };
        }
        match self.host_attends {
            true => Beside { parts, copies, host_us: attention, device_us: products, link_us },
            false => Beside { parts, copies, host_us: 0.0, device_us: products + attention, link_us },
        }
    }

    /// The subgraphs of `layers` layers that are cut so.
    pub fn graph(&self, cut: Cut, layers: usize) -> Graph {
        let (c, Cut { parts, shared }) = (&self.costs, cut);
        let (missing, all) = (self.missing, (self.missing, self.slots));
        let on_cpu = if self.copies { c.on_cpu(all, (1, missing), self.n, self.beside(cut)) } else { missing };
        let carried = (missing - on_cpu) as f64;
        let link_us = if on_cpu < missing { c.copy_us + carried * c.link_us } else { 0.0 };
        let link_us = if shared { link_us / parts as f64 } else { link_us } + self.beside(cut).link_us / parts as f64;
        let of_part = |number: usize| {
            let rows = Rows::part(self.n, parts, number);
            let (n, device) = (rows.n as f64, rows.n as f64 * c.device_us);
            let copied = (carried * device).max(link_us);
            let resident = device * self.slots as f64;
            let cpu = on_cpu as f64 * (n * c.column_us).max(c.read_us) + n * c.cross_us + c.sync_us;
            // A chain has the CPU begin when the device is done with what it copies. It begins earlier: for one part that is taken into
            // account, for several it is left out, so that they are taken only where they are faster nevertheless.
            let cpu = if parts == 1 { (cpu - resident - copied).max(0.0) } else { cpu };
            let us = [
                device * self.project,
                self.attention_us(rows),
                device * self.output + resident,
                copied,
                if on_cpu > 0 { cpu } else { 0.0 },
            ];
            us.map(|us| (us * 1e3) as u64).repeat(layers)
        };
        let attends = if self.host_attends { Processor::Float } else { Processor::Integer };
        let on = [Processor::Integer, attends, Processor::Integer, Processor::Integer, Processor::Float];
        let copied = if shared { Needs::All } else { Needs::Own };
        let needs = [Needs::Own, Needs::Earlier, Needs::Own, copied, Needs::Own];
        // A layer's selection comes when all parts have ended the layer before: two layers take turns with what they are divided by.
        let lead = |i: usize| (i == 2).then_some(2);
        let stages = std::array::from_fn::<Stage, 5, _>(|i| Stage { on: on[i], needs: needs[i], lead: lead(i) });
        Graph { stages: stages.repeat(layers), times: (0..parts).map(of_part).collect() }
    }

    /// The rule by which these subgraphs take less time, and that time.
    fn faster(graph: &Graph) -> (Order, u64) {
        let rules = [Order::EarliestChunk, Order::LargestContribution].map(|order| (order, graph.run(order).span));
        if rules[1].1 < rules[0].1 { rules[1] } else { rules[0] }
    }

    /// The cut that takes the least time, of those that are allowed.
    pub fn cut(&self, parts: Option<usize>, shared: Option<bool>) -> Cut {
        let most = (self.n / MIN_TOKENS).clamp(1, MAX_PARTS);
        let numbers = parts.map_or(2..=most, |parts| parts..=parts);
        let ways = shared.map_or(vec![true, false], |shared| vec![shared]);
        let cuts = numbers.flat_map(|parts| ways.iter().map(move |&shared| Cut { parts, shared }));
        let span = |cut: Cut| LayerCosts::faster(&self.graph(cut, COMPARED_LAYERS)).1 as f64;
        let best = cuts.map(|cut| (cut, span(cut))).min_by(|a, b| a.1.total_cmp(&b.1));
        let one = span(Cut::WHOLE);
        let pays = |us: f64| parts.is_some() || us < one && us <= WORTH * one;
        best.filter(|&(_, us)| pays(us)).map_or(Cut::WHOLE, |(cut, _)| cut)
    }

    /// The order in which one thread takes the subgraphs of `layers` layers.
    pub(super) fn order(&self, cut: Cut, layers: usize, order: Option<PartOrder>) -> Vec<Subgraph> {
        let graph = self.graph(cut, layers);
        let rule = match order {
            Some(PartOrder::AtRandom(seed)) => return graph.at_random(&mut Prng::new(seed)),
            Some(PartOrder::EarliestPart) => Order::EarliestChunk,
            Some(PartOrder::LargestContribution) => Order::LargestContribution,
            None => LayerCosts::faster(&graph).0,
        };
        graph.taken_by_one_thread(&graph.run(rule))
    }
}

/// The steps of a pass that takes its subgraphs in this order.
pub(super) fn steps(order: &[Subgraph], layers: usize, shared: bool, out: &mut Vec<Step>) {
    out.push(Step { part: 0, layer: 0, phase: Phase::Begin });
    let mut copied = 0;
    for &(part, stage) in order {
        let (layer, phase) = (stage / STAGES.len(), STAGES[stage % STAGES.len()]);
        let step = |phase| Step { part, layer, phase };
        match phase {
            Phase::Project => out.extend([step(Phase::BeginLayer), step(phase)]),
            Phase::Ffn => out.extend([step(phase), step(Phase::EndLayer)]),
            // Once, for all parts.
            Phase::Copied if shared && layer < copied => {}
            Phase::Copied => {
                copied = layer + 1;
                out.push(step(phase));
            }
            _ => out.push(step(phase)),
        }
    }
    out.push(Step { part: 0, layer: layers - 1, phase: Phase::Logits });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of 7B's widths in f16 with half of the neurons in slots, on a card of 6 TFLOP/s beside a processor of 0.4.
    fn costs(host_attends: bool, n: usize, first: usize) -> LayerCosts {
        let weights = 3.0 * 4096.0;
        let costs = ChunkCosts {
            column_us: 2.0 * weights / 400e3,
            read_us: 0.5,
            device_us: 2.0 * weights / 6e6,
            seen_us: 4.0 * 4096.0 / 360e3,
            link_us: 1.0,
            copy_us: 10.0,
            cross_us: 1.0,
            sync_us: 20.0,
        };
        LayerCosts {
            costs,
            project: 4096.0,
            output: 4096.0 / 3.0,
            position: 8192.0 / weights,
            crossing: 2.0,
            slots: 5504,
            missing: 5504,
            copies: true,
            attention_link_us: 0.0,
            host_attends,
            windowed: 0.0,
            window: 0,
            first,
            n,
        }
    }

    #[test]
    fn every_order_of_every_plan_does_all_steps_once_and_after_those_that_they_need() {
        for seed in 0..200 {
            let mut prng = Prng::new(seed);
            let n = 128 + prng.below(900) as usize;
            let layers = 1 + prng.below(4) as usize;
            let plan = LayerCosts {
                slots: prng.below(2000) as usize,
                missing: prng.below(2000) as usize,
                copies: prng.below(3) > 0,
                attention_link_us: prng.below(2) as f64 * 3000.0,
                ..costs(prng.below(2) == 0, n, prng.below(3000) as usize)
            };
            for parts in 2..=MAX_PARTS.min(n / ALIGN) {
                let orders = [PartOrder::EarliestPart, PartOrder::LargestContribution, PartOrder::AtRandom(seed)];
                for (order, shared) in orders.map(Some).into_iter().chain([None]).zip([true, false, true, false]) {
                    let (cut, mut out) = (Cut { parts, shared: shared ^ (seed % 2 == 0) }, Vec::new());
                    steps(&plan.order(cut, layers, order), layers, cut.shared, &mut out);
                    Step::check(&out, parts, layers, cut.shared);
                }
            }
        }
    }

    #[test]
    fn tokens_see_what_is_before_them_up_to_their_window() {
        for (first, n, window) in [(0, 5, 3), (7, 9, usize::MAX), (7, 9, 10), (20, 4, 10), (0, 6, 6), (0, 6, 1)] {
            let all: usize = (first..first + n).map(|p: usize| (p + 1).min(window)).sum();
            assert_eq!(seen(first..first + n, window), all as f64, "{first}, {n}, {window}");
        }
    }

    #[test]
    fn parts_are_all_tokens_once_and_begin_at_tiles() {
        for all in 64..1025 {
            for parts in 1..=MAX_PARTS.min(all / ALIGN) {
                let rows: Vec<Rows> = (0..parts).map(|number| Rows::part(all, parts, number)).collect();
                assert_eq!((rows[0].first, rows[parts - 1].range().end), (0, all));
                assert!(rows.windows(2).all(|two| two[0].range().end == two[1].first && two[1].first % ALIGN == 0));
                assert!(rows.iter().all(|rows| rows.n >= ALIGN), "{all} in {parts}");
            }
        }
    }

    #[test]
    fn parts_are_taken_where_host_and_device_would_wait_for_each_other_and_nowhere_else() {
        // Attention on the host takes as long as the device's products at some length of the text.
        let balanced = costs(true, 1024, 1024);
        let cut = balanced.cut(None, None);
        let spans = [Cut::WHOLE, cut].map(|cut| LayerCosts::faster(&balanced.graph(cut, 32)).1 as f64);
        assert!(cut.parts > 1 && spans[1] < 0.8 * spans[0], "{cut:?}: {spans:?}");
        // The host has nothing to do: all is in slots, and attention is the device's.
        let alone = LayerCosts { slots: 11008, missing: 0, ..costs(false, 1024, 0) };
        assert_eq!(alone.cut(None, None), Cut::WHOLE);
        // Too few tokens.
        assert_eq!(costs(true, 255, 1024).cut(None, None), Cut::WHOLE);
    }
}
