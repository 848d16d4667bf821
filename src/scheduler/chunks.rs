//! Which part of a prompt's chunks each of two processors takes next: out-of-order subgraph execution (mllm-NPU 3.4, equations 2 to 6), as a
//! pure function of what is done and how long parts take.
//!
//! A chunk passes through the same subgraphs one after the other, each on its own processor: matrix products on an integer unit, all else
//! on a float unit. On one processor there is nothing to choose: an order that keeps to what each needs takes the same time.

use crate::prng::Prng;

/// One of the two processors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Processor {
    /// Norms, quantisation, attention, outliers: the paper's CPU or GPU.
    Float,
    /// Matrix products in int8: the paper's NPU.
    Integer,
}

/// Subgraph j of every chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stage {
    /// Where it runs.
    pub on: Processor,
    /// Which chunks' subgraph before it has to be done.
    pub needs: Needs,
    /// How many subgraphs its chunk may be ahead of each other chunk when it begins, where what they work in has room for no more.
    pub lead: Option<usize>,
}

/// The chunks whose subgraph j - 1 has to be done before a chunk's subgraph j.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// Its own (equation 3).
    Own,
    /// Its own and those of all chunks before it (equation 2): attention reads their keys and values.
    Earlier,
    /// Those of all chunks: what is brought for all of them at once.
    All,
}

/// The subgraphs of a prompt.
#[derive(Clone, Debug)]
pub struct Graph {
    /// Those of a chunk, in their order.
    pub stages: Vec<Stage>,
    /// How long each takes, ns, `[chunks][stages]`.
    pub times: Vec<Vec<u64>>,
}

/// A subgraph: number of its chunk, and of its stage there.
pub type Subgraph = (usize, usize);

/// Which subgraph a free processor runs next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// A chunk's subgraphs come when all of the chunk before that are its processor's are done. It is none where a subgraph needs those of all
    /// chunks.
    InOrder,
    /// Of those that are ready, one of the earliest chunk.
    EarliestChunk,
    /// Of those that are ready, the one with the largest contribution (equation 6); of equal ones the earliest chunk's.
    LargestContribution,
}

/// When each subgraph ran.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timeline {
    /// Begin of each, ns, `[chunks][stages]`.
    pub begins: Vec<Vec<u64>>,
    /// Time from the first begin to the last end, ns.
    pub span: u64,
    /// Time in which the integer unit did nothing, ns.
    pub idle: u64,
}

impl Graph {
    /// The chunks whose subgraph before this one has to be done.
    fn needed(&self, (chunk, stage): Subgraph) -> std::ops::Range<usize> {
        match self.stages[stage].needs {
            Needs::Own => chunk..chunk + 1,
            Needs::Earlier => 0..chunk + 1,
            Needs::All => 0..self.times.len(),
        }
    }

    /// Whether `subgraph` can begin when each chunk has done so many of its stages (equations 2 and 3).
    pub fn is_ready(&self, done: &[usize], (chunk, stage): Subgraph) -> bool {
        let near = |done: &usize| self.stages[stage].lead.is_none_or(|lead| done + lead >= stage);
        done[chunk] == stage
            && self.needed((chunk, stage)).all(|chunk| stage == 0 || done[chunk] >= stage)
            && done.iter().all(near)
    }

    /// By how much the end of `subgraph` shortens the integer unit's waiting (equation 6): the time of what becomes ready for it by that, or,
    /// if it runs there itself, the negative of the time of what becomes ready for the float unit. `done` counts each chunk's stages that
    /// have ended.
    pub fn contribution(&self, done: &[usize], subgraph: Subgraph) -> i64 {
        let (chunk, stage) = subgraph;
        let mut after = done.to_vec();
        after[chunk] = stage + 1;
        let candidates = (0..self.times.len()).map(|chunk| (chunk, after[chunk]));
        let opened = candidates.filter(|&next| {
            next.1 < self.stages.len() && self.is_ready(&after, next) && (next.0 == chunk || !self.is_ready(done, next))
        });
        let on = self.stages[stage].on;
        // What becomes ready on the same processor is no work for the other.
        let time = |(chunk, stage): Subgraph| if self.stages[stage].on == on { 0 } else { self.times[chunk][stage] };
        let sum = opened.map(time).sum::<u64>() as i64;
        if on == Processor::Float { sum } else { -sum }
    }

    /// The subgraph that a free processor takes, if there is one; each chunk has begun and ended so many stages.
    pub fn next(&self, order: Order, on: Processor, begun: &[usize], ended: &[usize]) -> Option<Subgraph> {
        let chunks = 0..self.times.len();
        let ready = |chunk: usize| {
            let subgraph = (chunk, begun[chunk]);
            let there = subgraph.1 < self.stages.len() && self.stages[subgraph.1].on == on;
            (there && self.is_ready(ended, subgraph)).then_some(subgraph)
        };
        match order {
            Order::InOrder => {
                let left = |chunk: usize| self.stages[begun[chunk]..].iter().any(|stage| stage.on == on);
                chunks.into_iter().find(|&chunk| left(chunk)).and_then(ready)
            }
            Order::EarliestChunk => chunks.into_iter().find_map(ready),
            Order::LargestContribution => {
                // Of equal ones the last wins, so from the last chunk to the first.
                chunks.rev().filter_map(ready).max_by_key(|&subgraph| self.contribution(ended, subgraph))
            }
        }
    }

    /// Runs all subgraphs in an order, each processor one at a time (equation 4).
    pub fn run(&self, order: Order) -> Timeline {
        let (chunks, stages) = (self.times.len(), self.stages.len());
        let mut begins = vec![vec![0; stages]; chunks];
        let (mut begun, mut ended) = (vec![0; chunks], vec![0; chunks]);
        let mut running: [Option<(u64, usize)>; 2] = [None; 2];
        let (mut now, mut busy) = (0, 0);
        loop {
            for on in [Processor::Integer, Processor::Float] {
                if running[on as usize].is_none()
                    && let Some((chunk, stage)) = self.next(order, on, &begun, &ended)
                {
                    let time = self.times[chunk][stage];
                    begins[chunk][stage] = now;
                    begun[chunk] += 1;
                    running[on as usize] = Some((now + time, chunk));
                    busy += if on == Processor::Integer { time } else { 0 };
                }
            }
            let Some(end) = running.iter().flatten().map(|(end, _)| *end).min() else {
                return Timeline { begins, span: now, idle: now - busy };
            };
            now = end;
            for slot in &mut running {
                if let Some((end, chunk)) = *slot
                    && end == now
                {
                    (ended[chunk], *slot) = (ended[chunk] + 1, None);
                }
            }
        }
    }

    /// The order in which one thread takes the subgraphs of a timeline, if it does those of the float unit itself and only puts those of the
    /// integer unit on a queue, which works through them in that order: each is put there as soon as what it needs of the thread is done, so
    /// that the integer unit does not wait for the thread to come back.
    pub fn taken_by_one_thread(&self, timeline: &Timeline) -> Vec<Subgraph> {
        let mut queues: [Vec<Subgraph>; 2] = [Vec::new(), Vec::new()];
        for (chunk, times) in self.times.iter().enumerate() {
            for stage in 0..times.len() {
                queues[self.stages[stage].on as usize].push((chunk, stage));
            }
        }
        // What takes no time begins when something else does: then the earlier stage is first.
        queues.iter_mut().for_each(|queue| {
            queue.sort_by_key(|&(chunk, stage)| (timeline.begins[chunk][stage], stage, chunk));
        });
        let (mut done, mut order) = (vec![0; self.times.len()], Vec::new());
        let [own, queued] = [Processor::Float as usize, Processor::Integer as usize];
        loop {
            let first =
                |of: usize, most: usize| queues[of].iter().take(most).position(|&next| self.is_ready(&done, next));
            // The last way out is for subgraphs that begin at the same time, none of which takes any.
            let found = first(queued, 1).map(|at| (queued, at)).or_else(|| first(own, usize::MAX).map(|at| (own, at)));
            let found = found.or_else(|| first(queued, usize::MAX).map(|at| (queued, at)));
            let Some((of, at)) = found else { return order };
            let (chunk, stage) = queues[of].remove(at);
            done[chunk] = stage + 1;
            order.push((chunk, stage));
        }
    }

    /// All subgraphs in an order by chance, each after those that it needs.
    pub fn at_random(&self, prng: &mut Prng) -> Vec<Subgraph> {
        let (mut done, mut order) = (vec![0; self.times.len()], Vec::new());
        loop {
            let ready: Vec<Subgraph> = (0..self.times.len())
                .map(|chunk| (chunk, done[chunk]))
                .filter(|&next| next.1 < self.stages.len() && self.is_ready(&done, next))
                .collect();
            let Some(&next) = ready.get(prng.below(ready.len().max(1) as u64) as usize) else { return order };
            done[next.0] += 1;
            order.push(next);
        }
    }

    /// The least time that any order takes, by trying all: for a handful of subgraphs.
    pub fn least(&self) -> u64 {
        let chunks = self.times.len();
        let mut best = self.run(Order::LargestContribution).span;
        self.search(&mut vec![0; chunks], &mut vec![vec![0; self.stages.len()]; chunks], [0; 2], &mut best);
        best
    }

    /// Tries every subgraph next, each as soon as its processor and what it needs are there.
    fn search(&self, begun: &mut Vec<usize>, ends: &mut Vec<Vec<u64>>, free: [u64; 2], best: &mut u64) {
        let mut is_last = true;
        for chunk in 0..self.times.len() {
            let stage = begun[chunk];
            if stage == self.stages.len() || !self.is_ready(begun, (chunk, stage)) {
                continue;
            }
            is_last = false;
            let needed = self.needed((chunk, stage));
            let ready = if stage == 0 { 0 } else { needed.map(|chunk| ends[chunk][stage - 1]).max().unwrap_or(0) };
            let last = self.stages[stage].lead.and_then(|lead| (stage - lead.min(stage)).checked_sub(1));
            let ready = last.map_or(ready, |last| ends.iter().map(|ends| ends[last]).max().unwrap_or(0).max(ready));
            let on = self.stages[stage].on as usize;
            let end = ready.max(free[on]) + self.times[chunk][stage];
            if end >= *best {
                continue;
            }
            let mut free = free;
            (free[on], ends[chunk][stage]) = (end, end);
            begun[chunk] += 1;
            self.search(begun, ends, free, best);
            begun[chunk] -= 1;
        }
        if is_last {
            *best = (*best).min(free[0].max(free[1]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLOAT: Stage = Stage { on: Processor::Float, needs: Needs::Own, lead: None };
    const ATTENTION: Stage = Stage { needs: Needs::Earlier, ..FLOAT };
    const INTEGER: Stage = Stage { on: Processor::Integer, ..FLOAT };
    /// Not before all other chunks have done what comes three subgraphs before it.
    const NEAR: Stage = Stage { lead: Some(2), ..INTEGER };
    /// What is copied for all chunks of a layer.
    const COPIED: Stage = Stage { needs: Needs::All, ..INTEGER };
    const LAYER: [Stage; 6] = [FLOAT, INTEGER, ATTENTION, INTEGER, FLOAT, INTEGER];

    fn random(prng: &mut Prng, chunks: usize, stages: &[Stage]) -> Graph {
        let times = (0..chunks).map(|_| stages.iter().map(|_| 1 + prng.below(20)).collect()).collect();
        Graph { stages: stages.to_vec(), times }
    }

    fn check(graph: &Graph, timeline: &Timeline) {
        let end = |chunk: usize, stage: usize| timeline.begins[chunk][stage] + graph.times[chunk][stage];
        let all = || (0..graph.times.len()).flat_map(|chunk| (0..graph.stages.len()).map(move |stage| (chunk, stage)));
        for (chunk, stage) in all() {
            let begin = timeline.begins[chunk][stage];
            let needed = match graph.stages[stage].needs {
                Needs::Own => chunk..chunk + 1,
                Needs::Earlier => 0..chunk + 1,
                Needs::All => 0..graph.times.len(),
            };
            if let Some(last) = graph.stages[stage].lead.and_then(|lead| stage.checked_sub(lead + 1)) {
                let ends = (0..graph.times.len()).map(|chunk| end(chunk, last));
                assert!(ends.max().unwrap() <= begin, "{chunk} {stage} is too far ahead");
            }
            if stage > 0 {
                assert!(needed.into_iter().all(|c| end(c, stage - 1) <= begin), "{chunk} {stage} is too early");
            }
            for other in all().filter(|&other| other != (chunk, stage)) {
                if graph.stages[other.1].on == graph.stages[stage].on {
                    let apart =
                        end(other.0, other.1) <= begin || end(chunk, stage) <= timeline.begins[other.0][other.1];
                    assert!(apart, "{chunk} {stage} and {other:?} at once");
                }
            }
        }
        assert_eq!(timeline.span, all().map(|(chunk, stage)| end(chunk, stage)).max().unwrap());
    }

    #[test]
    fn every_order_does_everything_once_and_after_what_it_needs() {
        let mut prng = Prng::new(1);
        for _ in 0..200 {
            let chunks = 1 + prng.below(5) as usize;
            let layer = if prng.below(2) == 0 { LAYER.to_vec() } else { vec![INTEGER, ATTENTION, NEAR, COPIED, FLOAT] };
            let stages = layer.repeat(1 + prng.below(3) as usize);
            let mut graph = random(&mut prng, chunks, &stages);
            // Some stages may take no time at all.
            let none = prng.below(stages.len() as u64) as usize;
            graph.times.iter_mut().for_each(|times| times[none] = 0);
            for order in [Order::InOrder, Order::EarliestChunk, Order::LargestContribution] {
                if order == Order::InOrder && stages.contains(&COPIED) && chunks > 1 {
                    // A chunk would wait for those behind it.
                    continue;
                }
                let timeline = graph.run(order);
                check(&graph, &timeline);
                let taken = graph.taken_by_one_thread(&timeline);
                assert_eq!(taken.len(), chunks * stages.len());
                let mut done = vec![0; chunks];
                for &(chunk, stage) in &taken {
                    assert!(graph.is_ready(&done, (chunk, stage)), "{taken:?}");
                    done[chunk] += 1;
                }
            }
        }
    }

    #[test]
    fn what_opens_more_work_for_the_other_unit_comes_first() {
        // Both chunks wait for the float unit; the second one's product is the longer one.
        let graph = Graph { stages: vec![FLOAT, INTEGER], times: vec![vec![5, 3], vec![5, 9]] };
        assert_eq!((graph.contribution(&[0, 0], (0, 0)), graph.contribution(&[0, 0], (1, 0))), (3, 9));
        assert_eq!(graph.next(Order::LargestContribution, Processor::Float, &[0, 0], &[0, 0]), Some((1, 0)));
        assert_eq!(graph.next(Order::EarliestChunk, Processor::Float, &[0, 0], &[0, 0]), Some((0, 0)));
        assert_eq!(graph.run(Order::LargestContribution).span, 17);
        assert_eq!(graph.run(Order::InOrder).span, 19);
        // On the integer unit it is the other way round: what opens little for the float unit.
        let graph = Graph { stages: vec![INTEGER, FLOAT], times: vec![vec![5, 9], vec![5, 3]] };
        assert_eq!((graph.contribution(&[0, 0], (0, 0)), graph.contribution(&[0, 0], (1, 0))), (-9, -3));
    }

    #[test]
    fn attention_of_a_chunk_waits_for_the_keys_of_all_before() {
        let graph = Graph { stages: vec![INTEGER, ATTENTION], times: vec![vec![10, 1], vec![1, 1]] };
        assert!(!graph.is_ready(&[0, 1], (1, 1)) && graph.is_ready(&[1, 1], (1, 1)));
        // Its end opens the attention of both.
        assert_eq!(graph.contribution(&[0, 1], (0, 0)), -2);
    }

    /// How far from the best order the rule ends, on cases that can be tried out.
    #[test]
    fn the_rule_is_near_the_best_of_all_orders() {
        let mut prng = Prng::new(7);
        let (mut worst, mut sums) = (1f64, [0.0; 3]);
        let cases = 100;
        for i in 0..cases {
            let (chunks, stages) = if i % 2 == 0 { (2, 6) } else { (3, 4) };
            let graph = random(&mut prng, chunks, &LAYER[..stages]);
            let best = graph.least() as f64;
            let orders = [Order::LargestContribution, Order::EarliestChunk, Order::InOrder];
            let shares = orders.map(|order| graph.run(order).span as f64 / best);
            assert!(shares.iter().all(|&share| share >= 1.0));
            worst = worst.max(shares[0]);
            sums.iter_mut().zip(shares).for_each(|(sum, share)| *sum += share);
        }
        let [rule, earliest, in_order] = sums.map(|sum| sum / f64::from(cases));
        // 1.088 (1.447 at most); earliest chunk first is 1.064, in order 1.366.
        assert!(rule < 1.1 && worst < 1.5 && in_order > 1.3, "{rule} {worst} {earliest} {in_order}");
    }
}
