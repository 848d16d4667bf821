//! Any bytes as an activation trace, as they are and put right: refused, or its rows are those of its header and both of what reads
//! traces, replay and simulator, come to an end.
#![no_main]

mod support;

use dynamicinfer::formats::machine_profile::MachineProfile;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::formats::trace_file::{TraceFile, TraceSection};
use dynamicinfer::lab::bound::{Uses, bound};
use dynamicinfer::lab::replay::{ReplayOptions, active, frequencies, likeness, replay, rules, slots};
use dynamicinfer::lab::simulate::Calls;
use dynamicinfer::lab::simulate::case::{Case, POSITION};
use dynamicinfer::model::KvType;
use dynamicinfer::placement::memory_plan::Footprint;
use dynamicinfer::placement::policy::{self, PlacementPolicy as Placement};
use dynamicinfer::placement::shapes::shape;
use dynamicinfer::scheduler::Policy;
use dynamicinfer::scheduler::h200;
use libfuzzer_sys::fuzz_target;
use std::path::Path;
use std::sync::LazyLock;

const CONTEXT: usize = 2048;

static MACHINE: LazyLock<MachineProfile> =
    LazyLock::new(|| MachineProfile::read(&support::seeds().join("machine/measured")).unwrap());

static REAL: LazyLock<Footprint> =
    LazyLock::new(|| Footprint::of_shape(&shape("llama-7b").unwrap(), Quant::F16, CONTEXT, KvType::F16));

fn check(path: &Path) {
    let Some(trace) = support::accepted(TraceFile::open(path), "make it again with") else { return };
    let h = trace.header();
    let mut now = Vec::new();
    for layer in 0..h.layers {
        for token in 0..h.tokens() {
            active(trace.row(TraceSection::Active, layer, token), &mut now);
            assert!(now.iter().all(|&n| (n as usize) < h.ffn) && now.is_sorted());
            assert_eq!(trace.row(TraceSection::Own, layer, token).len(), h.ffn);
            assert!(layer < h.ahead || trace.row(TraceSection::Ahead, layer, token).len() == h.ffn);
        }
    }
    let skip = h.texts.len() / 2;
    let history = frequencies(&trace, |text| text < skip);
    assert!(history.iter().flatten().all(|f| (0.0..=1.0).contains(f)));
    let (tokens, texts) = likeness(&trace);
    assert!((0.0..=1.0).contains(&tokens) && texts.is_none_or(|d| (0.0..=1.0).contains(&d)));
    let counts: Vec<Vec<u64>> =
        history.iter().map(|f| f.iter().map(|&f| (f64::from(f) * 1e9) as u64).collect()).collect();
    let slots = slots(&counts, 0.5);
    let placed = policy::neurons(Placement::Static, &counts, &slots, 1);
    let link = 0.1 * h.ffn as f64;
    let most = bound(&trace, skip, &slots, &placed, link);
    let (policy, rules, thresholds) = (Policy::Full, rules(Policy::Full, h), h.thresholds(None));
    let least = Uses::of(&trace, skip, &placed, &thresholds).least_ns(&slots, link, &h200::stage());
    let setting = ReplayOptions {
        policy,
        rules,
        thresholds,
        slots,
        link,
        placed,
        history,
        cost: 0.0,
        stage: None,
        foreseen: false,
        seed: 1,
        skip,
    };
    let outcome = replay(&trace, &setting);
    assert!(outcome.hits <= most && outcome.stage_ns_by(&h200::stage()) >= least);
    if skip > 0 {
        let case = Case {
            trace: &trace,
            machine: &MACHINE,
            real: &REAL,
            position: POSITION,
            vram: Some(8 << 30),
            placement: Placement::Static,
            predictor_bytes: 0,
            threshold: Some(0.5),
            contention: true,
            calls: Calls::PerDecision,
            gap_ns: 0.0,
            seed: 1,
            by_impact: true,
            prompt: 0,
            chunk: None,
        };
        let _ = case.run(Policy::Full);
    }
}

fuzz_target!(|bytes: &[u8]| support::both(bytes, b"TRACE\0\0\0", |_| (), check));
