//! What no policy can exceed: the bound in time of a replay, on random traces.

use dynamicinfer::cache::{PerTier, Tier};
use dynamicinfer::formats::trace_file::{Header, TextInfo, TraceFile, TraceSection, TraceWriter};
use dynamicinfer::ids::PublishedId;
use dynamicinfer::lab::bound::Uses;
use dynamicinfer::lab::replay::{self, ReplayOptions, frequencies};
use dynamicinfer::prng::Prng;
use dynamicinfer::scheduler::Policy;
use dynamicinfer::scheduler::costs::{Lane, StageCosts};
use std::path::Path;

/// A trace of these active neurons, `[layers][tokens]` each a bit for each of at most 32 neurons, with an exact predictor and a look-ahead that is exact, too.
fn trace(path: &Path, ffn: usize, uses: &[Vec<u32>]) -> TraceFile {
    let texts = vec![TextInfo { name: "random".into(), tokens: uses[0].len() }];
    let header = Header {
        fingerprint: String::new(),
        model: "random".into(),
        layers: uses.len(),
        ffn,
        block_bytes: 384,
        experts_used: None,
        ahead: 1,
        predictor: "exact".into(),
        own_bits: 1,
        ahead_bits: 1,
        thresholds: Vec::new(),
        texts: texts.clone(),
        made: serde_json::Value::Null,
        sections: Vec::new(),
    };
    let writer = TraceWriter::create(path, header).unwrap();
    for (layer, uses) in uses.iter().enumerate() {
        let parts = [TraceSection::Active, TraceSection::Own, TraceSection::Ahead];
        for part in &parts[..if layer == 0 { 2 } else { 3 }] {
            writer.write(*part, layer, 0, bytemuck::cast_slice(uses)).unwrap();
        }
    }
    writer.finish(texts).unwrap();
    TraceFile::open(path).unwrap()
}

/// Each neuron is active with a probability of its own, and stays as it was with another.
fn random(prng: &mut Prng, ffn: usize, layers: usize, tokens: usize) -> Vec<Vec<u32>> {
    let (stays, often) = (prng.next_f64(), prng.next_f64());
    let layer = |_| {
        let rates: Vec<f64> = (0..ffn).map(|_| often * prng.next_f64()).collect();
        let mut now = 0;
        let mut token = |_| {
            for (n, rate) in rates.iter().enumerate() {
                if prng.next_f64() >= stays {
                    now = now & !(1 << n) | u32::from(prng.next_f64() < *rate) << n;
                }
            }
            now
        };
        (0..tokens).map(&mut token).collect()
    };
    (0..layers).map(layer).collect()
}

/// Sums are taken in another order.
const ROUNDED: f64 = 1.0 + 1e-9;

fn costs(prng: &mut Prng) -> StageCosts {
    let mut upto = |most: f64| most * prng.next_f64();
    let host = Lane { fixed_ns: upto(200.0), neuron_ns: upto(20.0) };
    let lanes = PerTier::all(Lane::default()).with(Tier::Host, host);
    StageCosts { always_ns: upto(50.0), lanes, move_ns: upto(10.0) * f64::from(prng.below(2) as u32) }
}

#[test]
fn no_policy_is_faster_than_the_bound() {
    let dir = tempfile::tempdir().unwrap();
    for seed in 0..60 {
        let mut prng = Prng::new(seed);
        let (ffn, layers) = (4 + prng.below(29) as usize, 2 + prng.below(3) as usize);
        let tokens = 5 + prng.below(80) as usize;
        let trace = trace(&dir.path().join(seed.to_string()), ffn, &random(&mut prng, ffn, layers, tokens));
        let slots: Vec<usize> = (0..layers).map(|_| 1 + prng.below(ffn as u64) as usize).collect();
        let placed: Vec<Vec<PublishedId>> = slots.iter().map(|&n| (0..n).map(PublishedId::new).collect()).collect();
        let (link, costs) = (prng.next_f64() * 0.4 * ffn as f64, costs(&mut prng));
        let thresholds = vec![0.5; layers];
        let least = Uses::of(&trace, 0, &placed, &thresholds).least_ns(&slots, link, &costs);
        for policy in Policy::ALL {
            for foreseen in [false, true] {
                let setting = ReplayOptions {
                    policy,
                    rules: policy.rules(),
                    thresholds: thresholds.clone(),
                    slots: slots.clone(),
                    link,
                    placed: placed.clone(),
                    history: frequencies(&trace, |_| true),
                    cost: 0.0,
                    stage: None,
                    foreseen,
                    seed,
                    skip: 0,
                };
                let outcome = replay::replay(&trace, &setting);
                let took = outcome.stage_ns_by(&costs);
                assert!(
                    took * ROUNDED >= least,
                    "seed {seed}, {policy:?}: {took} ns, and {least} is the bound; {outcome:?}"
                );
            }
        }
    }
}

/// The least time of all choices of residents, token by token: at most `slots` of them and `loads` loads.
fn optimum(ffn: usize, uses: &[u32], slots: usize, loads: usize, costs: &StageCosts) -> f64 {
    let host = costs.lanes[Tier::Host];
    let took = |used: u32, there: u32| {
        let missing = (used & !there).count_ones();
        costs.always_ns + host.for_count(u64::from(missing))
    };
    // best[residents][loads]
    let mut best = vec![vec![f64::INFINITY; loads + 1]; 1 << ffn];
    best[(1 << slots) - 1][0] = 0.0;
    for &used in uses {
        let mut next = vec![vec![f64::INFINITY; loads + 1]; 1 << ffn];
        for (set, row) in best.iter().enumerate() {
            for (l, so_far) in row.iter().enumerate().filter(|(_, ns)| ns.is_finite()) {
                for (after, to) in next.iter_mut().enumerate().filter(|(after, _)| after.count_ones() as usize <= slots)
                {
                    let new = (after & !set).count_ones() as usize;
                    if l + new <= loads {
                        let ns = so_far + new as f64 * costs.move_ns + took(used, after as u32);
                        to[l + new] = to[l + new].min(ns);
                    }
                }
            }
        }
        best = next;
    }
    best.into_iter().flatten().fold(f64::INFINITY, f64::min)
}

#[test]
fn the_best_of_all_choices_is_no_faster_than_the_bound_and_near_it() {
    let dir = tempfile::tempdir().unwrap();
    let (mut bounds, mut best) = (0.0, 0.0);
    for seed in 0..60 {
        let mut prng = Prng::new(1000 + seed);
        let (ffn, tokens) = (2 + prng.below(4) as usize, 4 + prng.below(12) as usize);
        let uses = random(&mut prng, ffn, 1, tokens);
        let trace = trace(&dir.path().join(seed.to_string()), ffn, &uses);
        let (slots, loads) = (1 + prng.below(ffn as u64) as usize, prng.below(6) as usize);
        let placed = [(0..slots).map(PublishedId::new).collect()];
        let costs = costs(&mut prng);
        let link = (loads as f64 + 0.5) / tokens as f64;
        let bound = Uses::of(&trace, 0, &placed, &[0.5]).least_ns(&[slots], link, &costs);
        let least = optimum(ffn, &uses[0], slots, loads, &costs);
        assert!(bound <= least * ROUNDED, "seed {seed}: {bound} ns, and {least} is possible");
        (bounds, best) = (bounds + bound, best + least);
    }
    assert!(bounds > 0.9 * best, "in all {bounds} ns of {best}");
}
