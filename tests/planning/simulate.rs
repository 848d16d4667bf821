//! The simulator: its clock is that of the formulas where these can be solved by hand, its policies stand in the order of the paper,
//! and what it says does not depend on the size of the trace.

use dynamicinfer::error::{Error, Result};
use dynamicinfer::formats::machine_profile::MachineProfile;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::formats::trace_file::TraceFile;
use dynamicinfer::lab::simulate::assumption::{Assumption, given_up_for, held};
use dynamicinfer::lab::simulate::calibration::{SKEW, Statistics, TEXTS, TOKEN_TO_HOT, TOKENS, calibrate, furthest};
use dynamicinfer::lab::simulate::case::{Case, POSITION};
use dynamicinfer::lab::simulate::papers::SET_UPS;
use dynamicinfer::lab::simulate::{Calls, scaled};
use dynamicinfer::lab::synth::trace::{TraceShape, write_trace};
use dynamicinfer::model::KvType;
use dynamicinfer::placement::PlacementPolicy as Placement;
use dynamicinfer::placement::memory_plan::Footprint;
use dynamicinfer::placement::shapes::shape;
use dynamicinfer::scheduler::Policy;
use std::path::Path;
use std::process::Command;

const CONTEXT: usize = 2048;
const GIB: u64 = 1 << 30;

fn machine(name: &str) -> MachineProfile {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("profiles/machines");
    MachineProfile::read(&dir.join(format!("{name}.toml"))).unwrap()
}

fn trace(dir: &Path, active: f64, layers: usize, ffn: usize, seed: u64) -> TraceFile {
    trace_ahead(dir, active, layers, ffn, seed, 1)
}

fn trace_ahead(dir: &Path, active: f64, layers: usize, ffn: usize, seed: u64, ahead: usize) -> TraceFile {
    let path = dir.join(format!("{active}-{layers}-{ffn}-{seed}-{ahead}.trace"));
    let shape = TraceShape { layers, ffn, texts: 6, tokens_per_text: 80, active, ahead, seed, ..TraceShape::paper() };
    write_trace(&shape, &path, |_, _| Ok(())).unwrap();
    TraceFile::open(&path).unwrap()
}

fn footprint(name: &str, quant: Quant) -> Footprint {
    Footprint::of_shape(&shape(name).unwrap(), quant, CONTEXT, KvType::F16)
}

fn case<'a>(trace: &'a TraceFile, machine: &'a MachineProfile, real: &'a Footprint, vram: Option<u64>) -> Case<'a> {
    Case {
        trace,
        machine,
        real,
        position: POSITION,
        vram,
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
    }
}

fn near(a: f64, b: f64) -> bool {
    (a / b - 1.0).abs() < 1e-3
}

#[test]
fn alone_the_cpu_takes_what_its_bytes_and_calls_take() {
    let dir = tempfile::tempdir().unwrap();
    let (trace, m, real) = (trace(dir.path(), 0.1, 3, 512, 1), machine("rtx-4090"), footprint("llama-7b", Quant::F16));
    let outcome = Case { threshold: Some(0.0), ..case(&trace, &m, &real, None) }.run(Policy::Full).unwrap();
    let kv = real.kv_bytes / CONTEXT as u64 * POSITION as u64;
    let bytes = real.attention_bytes + real.ffn_bytes() + real.head_bytes + kv;
    // Per layer three regions of attention and one of the FFN, and the head.
    let calls = (4 * real.layers + 1) as f64 * m.call_us;
    let ms = bytes as f64 / m.dram_gb_s / 1e6 + calls / 1e3;
    assert!(near(outcome.token_ms, ms), "{} and {ms} ms", outcome.token_ms);
    assert_eq!((outcome.computed_share, outcome.recall, outcome.moved_bytes_per_token), (1.0, 1.0, 0.0));
    // Keys and values of every position before are read for a token.
    let long =
        Case { threshold: Some(0.0), position: 2000, ..case(&trace, &m, &real, None) }.run(Policy::Full).unwrap();
    let more = (real.kv_bytes / CONTEXT as u64 * (2000 - POSITION as u64)) as f64 / m.dram_gb_s / 1e6;
    assert!(near(long.token_ms, ms + more), "{} and {} ms", long.token_ms, ms + more);
    // Gaps cost what they are said to; of all neurons none has one.
    let gaps = Case { gap_ns: 50.0, ..case(&trace, &m, &real, None) }.run(Policy::Static).unwrap();
    let none = case(&trace, &m, &real, None).run(Policy::Static).unwrap();
    assert!(gaps.parts_ms.ffn > 1.1 * none.parts_ms.ffn);
    let dense =
        Case { gap_ns: 50.0, threshold: Some(0.0), ..case(&trace, &m, &real, None) }.run(Policy::Static).unwrap();
    assert!(near(dense.token_ms, ms));
}

#[test]
fn with_everything_on_the_device_a_token_takes_its_bytes_and_no_wait() {
    let dir = tempfile::tempdir().unwrap();
    let (trace, m, real) = (trace(dir.path(), 0.1, 3, 512, 1), machine("rtx-4090"), footprint("llama-7b", Quant::Q4));
    let all = case(&trace, &m, &real, Some(24 * GIB));
    let outcome = all.run(Policy::Full).unwrap();
    let computed = outcome.computed_share * real.ffn_bytes() as f64;
    let device = (real.attention_bytes + real.head_bytes) as f64 + computed;
    let kv = (real.kv_bytes / CONTEXT as u64 * POSITION as u64) as f64;
    let ms = device / m.device_gb_s / 1e6 + kv / m.dram_gb_s / 1e6;
    assert!(near(outcome.token_ms, ms), "{} and {ms} ms", outcome.token_ms);
    assert_eq!((outcome.gpu_share, outcome.moved_bytes_per_token), (1.0, 0.0));
    let (dense_ms, layers) = all.layer_offload();
    let bytes = real.attention_bytes + real.head_bytes + real.ffn_bytes();
    assert_eq!(layers, 32);
    assert!(near(dense_ms, (bytes as f64 + kv) / m.device_gb_s / 1e6), "{dense_ms} ms");
}

#[test]
fn the_same_seed_says_the_same_and_a_budget_that_is_too_small_is_refused_with_the_real_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let (trace, m, real) = (trace(dir.path(), 0.2, 3, 512, 1), machine("rtx-4090"), footprint("llama-13b", Quant::F16));
    let of = || case(&trace, &m, &real, Some(16 * GIB)).run(Policy::Random).unwrap();
    assert_eq!(of(), of());
    let error = case(&trace, &m, &real, Some(GIB)).run(Policy::Full).unwrap_err();
    let least = real.attention_bytes + real.head_bytes + real.buffers_bytes;
    assert!(matches!(&error, Error::Memory(why) if why.contains(&least.to_string())), "{error}");
}

/// What is decided one layer ahead is on the link while that layer's attention runs: a link that is fast enough brings it in time.
#[test]
fn what_is_predicted_one_layer_ahead_is_there_for_this_token() {
    let dir = tempfile::tempdir().unwrap();
    let real = footprint("llama-70b", Quant::Q4);
    let share = |link_gb_s, ahead| {
        let m = MachineProfile { link_gb_s, copy_us: 1e-3, ..machine("dynamicinfer-pc-high") };
        let trace = trace_ahead(dir.path(), 0.18, 6, 512, 1, ahead);
        let case = Case { contention: false, ..case(&trace, &m, &real, Some(23 * GIB)) };
        case.run(Policy::Micro).unwrap().gpu_share
    };
    let (slow, one, two) = (share(1.0, 1), share(1e6, 1), share(1e6, 2));
    assert!(one > two - 0.02, "{one} one ahead and {two} two ahead");
    assert!(one > slow + 0.1, "{one} with a fast link and {slow} with a slow one");
}

/// Micro, macro and full each add to the one before (DynamicInfer, figure 10), where copies are free, as the paper assumes, and where
/// predictions come early enough for them to land.
#[test]
fn policies_stand_in_the_order_of_the_papers_ablation() {
    let dir = tempfile::tempdir().unwrap();
    for seed in [1, 2, 3] {
        let trace = trace_ahead(dir.path(), 0.18, 12, 256, seed, 3);
        let (m, real) = (machine("dynamicinfer-pc-high"), footprint("llama-70b", Quant::Q4));
        let speed = |policy, placement| {
            let case = Case { placement, contention: false, ..case(&trace, &m, &real, Some(23 * GIB)) };
            case.run(policy).unwrap().tokens_per_s
        };
        for placement in [Placement::Static, Placement::Random] {
            let [fixed, micro, macro_, full] =
                [Policy::Static, Policy::Micro, Policy::Macro, Policy::Full].map(|p| speed(p, placement));
            let told = format!("seed {seed}, {placement:?}: {fixed} {micro} {macro_} {full}");
            assert!(fixed < micro && micro < macro_, "{told}");
            // From a random placement the device's threshold falls further, and more is computed there than pays: full is about as fast as
            // macro, and no faster (runs/2026-11-22-one-loop).
            let least = if placement == Placement::Static { 1.0 } else { 0.97 };
            assert!(full > least * macro_, "{told}");
        }
    }
}

#[test]
fn copies_that_share_the_memory_cost_the_cpu_and_starting_each_alone_costs_the_link() {
    let dir = tempfile::tempdir().unwrap();
    let trace = trace(dir.path(), 0.18, 4, 512, 1);
    let (m, real) = (machine("dynamicinfer-pc-high"), footprint("llama-70b", Quant::Q4));
    let shared = case(&trace, &m, &real, Some(23 * GIB));
    let apart = Case { contention: false, ..shared };
    let each = Case { calls: Calls::PerNeuron, ..apart };
    // It moves whatever it costs.
    let of = |case: &Case<'_>, policy| case.run(policy).unwrap();
    let gained = of(&apart, Policy::Lru).tokens_per_s / of(&shared, Policy::Lru).tokens_per_s;
    assert!(gained > 1.05, "{gained} times as fast where copies leave the memory to the CPU");
    // This one counts what a move costs.
    let [shared, apart, each] = [&shared, &apart, &each].map(|case| of(case, Policy::Macro));
    assert!(shared.moved_bytes_per_token < apart.moved_bytes_per_token);
    assert!(each.moved_bytes_per_token < 0.3 * apart.moved_bytes_per_token);
    assert!(each.tokens_per_s < apart.tokens_per_s);
    assert!([&shared, &apart, &each].iter().all(|o| o.link_busy <= 1.0 && o.gpu_share <= 1.0));
}

/// Each layer and neuron of a trace stands for several: how many must not matter much.
#[test]
fn a_trace_of_half_the_size_says_nearly_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let (m, real) = (machine("dynamicinfer-pc-high"), footprint("llama-70b", Quant::Q4));
    for policy in [Policy::Static, Policy::Macro, Policy::Full] {
        let speed = |layers, ffn| {
            let trace = trace(dir.path(), 0.18, layers, ffn, 5);
            case(&trace, &m, &real, Some(23 * GIB)).run(policy).unwrap().tokens_per_s
        };
        let (small, large) = (speed(4, 512), speed(8, 1024));
        assert!((small / large - 1.0).abs() < 0.15, "{policy:?}: {small} and {large} tokens/s");
    }
}

#[test]
fn a_scaled_model_keeps_its_bytes_a_layer_and_the_papers_set_ups_are_there() {
    let real = footprint("llama-70b", Quant::Q4);
    let small = scaled(&real, 8, 2048);
    assert_eq!(small.block_bytes, real.block_bytes * 14);
    assert!(near(small.ffn_bytes() as f64 * 10.0, real.ffn_bytes() as f64));
    assert!(near(small.attention_bytes as f64 * 10.0, real.attention_bytes as f64));
    for s in SET_UPS {
        machine(s.machine);
        let real = footprint(s.shape, s.quant);
        assert!(
            real.attention_bytes + real.head_bytes + real.buffers_bytes < (s.vram_gib * GIB as f64) as u64,
            "{}",
            s.name
        );
    }
    for name in ["powerinfer-pc-high", "powerinfer-pc-low"] {
        machine(name);
    }
}

/// A shape of the size that the papers' set-ups are simulated with, but for its layers.
fn uncalibrated(active: f64, seed: u64) -> TraceShape {
    TraceShape { layers: 3, ffn: 512, texts: 8, tokens_per_text: 100, active, seed, ..TraceShape::paper() }
}

fn measured(dir: &Path, shape: &TraceShape) -> Result<Statistics> {
    let path = dir.join("measured.trace");
    write_trace(shape, &path, |_, _| Ok(()))?;
    Ok(Statistics::of(&TraceFile::open(&path)?))
}

#[test]
fn calibrated_traces_are_as_far_apart_as_published_and_the_skew_gives_way() {
    let dir = tempfile::tempdir().unwrap();
    let within = |(from, to): (f64, f64), value: f64| (from..=to).contains(&value);
    for s in SET_UPS {
        for seed in [1, 2] {
            let start = uncalibrated(s.active, seed);
            let before = measured(dir.path(), &start).unwrap();
            let mut traces = 0;
            let shape = calibrate(&start, |shape| {
                traces += 1;
                measured(dir.path(), shape)
            })
            .unwrap();
            let after = measured(dir.path(), &shape).unwrap();
            let told = format!("{}, seed {seed}, {traces} traces: {before:?} and {after:?}", s.name);
            assert!(!within(TOKENS, before.token_distance), "{told}");
            assert!(within(TOKENS, after.token_distance) && within(TEXTS, after.text_distance.unwrap()), "{told}");
            assert!((after.active / s.active - 1.0).abs() < 0.05 && traces < 10, "{told}");
            // Not aimed at, and there.
            let (from, to) = TOKEN_TO_HOT;
            assert!(within((from - 0.01, to), after.token_to_hot), "{told}");
            // What gives way: more of it where more neurons are active.
            let gap = SKEW - after.skew;
            assert!((0.04..0.22).contains(&gap) && (after.skew_in_text > after.skew), "{told}");
            assert_eq!(shape.seed, seed);
            assert_eq!(format!("{shape:?}"), format!("{:?}", calibrate(&start, |s| measured(dir.path(), s)).unwrap()));
        }
    }
    assert!(furthest(0.30) < TOKENS.0 && furthest(0.22) > TOKENS.1, "{} {}", furthest(0.30), furthest(0.22));
}

#[test]
fn a_calibration_that_cannot_reach_its_aim_ends_and_one_that_fails_says_why() {
    let start = uncalibrated(0.2, 1);
    let mut traces = 0;
    let stubborn = Statistics { token_distance: 0.2, text_distance: Some(0.9), ..Statistics::default() };
    let shape = calibrate(&start, |_| {
        traces += 1;
        Ok(stubborn)
    })
    .unwrap();
    assert_eq!(traces, 20);
    assert!((0.0..=3.0).contains(&shape.exponent) && (0.0..=0.9).contains(&shape.locality), "{shape:?}");
    let error = calibrate(&start, |_| Err(Error::Usage("the disk is full".into()))).unwrap_err();
    assert_eq!(error.to_string(), "the disk is full");
}

#[test]
fn statistics_of_a_trace_in_which_everything_is_alike_are_those_of_chance() {
    let dir = tempfile::tempdir().unwrap();
    let alike = TraceShape { exponent: 0.0, locality: 0.0, ..uncalibrated(0.3, 1) };
    let s = measured(dir.path(), &alike).unwrap();
    // Two independent sets of a share p are 1 - p / (2 - p) apart; one of p and one of 0.4 that it does not depend on share 0.4 p.
    assert!((s.active - 0.3).abs() < 0.01 && (s.token_distance - (1.0 - 0.3 / 1.7)).abs() < 0.02, "{s:?}");
    assert!((0.4..0.5).contains(&s.skew), "the noise of counting alone: {s:?}");
    assert!((s.token_to_hot - (1.0 - 0.12 / 0.58)).abs() < 0.08, "{s:?}");
    // With everything common to its text, neighbours differ by noise alone.
    let still = measured(dir.path(), &TraceShape { locality: 0.9, ..uncalibrated(0.3, 1) }).unwrap();
    assert!(still.token_distance < 0.45, "{still:?}");
}

/// Which assumption makes a simulated system too fast: the less of it holds, the slower it is, and as much as may hold is found.
#[test]
fn an_assumption_is_given_up_as_far_as_a_speed_asks_for() {
    let dir = tempfile::tempdir().unwrap();
    let trace = trace(dir.path(), 0.18, 4, 512, 1);
    let (m, real) = (machine("dynamicinfer-pc-high"), footprint("llama-70b", Quant::Q4));
    let case = case(&trace, &m, &real, Some(23 * GIB));
    let all = case.run(Policy::Full).unwrap();
    for assumption in Assumption::ALL {
        assert_eq!(assumption.run(&case, Policy::Full, 1.0).unwrap().tokens, all.tokens);
        // What 10 % slower asks of each lies inside of what is tried.
        let wanted = 0.9 * all.tokens_per_s;
        let found = given_up_for(assumption, &case, wanted).unwrap();
        let told = format!("{found:?}, {wanted} of {} wanted", all.tokens_per_s);
        assert!(found.share.is_some_and(|share| (0.05..1.0).contains(&share)), "{told}");
        // The largest share, to a thousandth, with which it is no faster.
        let more = assumption.run(&case, Policy::Full, found.share.unwrap() + 1e-3).unwrap().tokens_per_s;
        assert!(found.tokens_per_s <= wanted && wanted < more, "{told}, {more} with more");
        // What cannot be reached is not said to be.
        assert_eq!(given_up_for(assumption, &case, 1e-3).unwrap().share, None);
    }
    // A prompt of half as many tokens, each as slow as a decoded one.
    let counted = Assumption::Prompt.run(&case, Policy::Full, 0.0).unwrap();
    assert!(near(counted.tokens_per_s * 1.5, all.tokens_per_s));
    // Neurons that the device cannot hold are not there, and only as few as asked for.
    let half = held(&case, &[Policy::Static, Policy::Full], 0.5).unwrap().unwrap();
    let [fixed, moving] = &half.outcomes[..] else { panic!("{half:?}") };
    let more = Assumption::NeuronMemory.run(&case, Policy::Static, half.share + 1e-3).unwrap().gpu_share;
    assert!(fixed.1.gpu_share <= 0.5 && 0.5 < more, "{more} with more: {half:?}");
    assert!(moving.1.gpu_share > fixed.1.gpu_share, "{half:?}");
    assert!(held(&case, &[Policy::Static], -1.0).unwrap().is_none());
    let fewer = given_up_for(Assumption::NeuronMemory, &case, 0.5 * all.tokens_per_s).unwrap();
    assert!(fewer.gpu_share.0 < fewer.gpu_share.1 && fewer.gpu_share.1 < all.gpu_share, "{fewer:?}");
}

#[test]
fn simulate_papers_prints_what_its_traces_reached_beside_the_papers_figures() {
    let dir = tempfile::tempdir().unwrap();
    let done = Command::new(env!("CARGO_BIN_EXE_dynamicinfer-lab"))
        .args(["simulate", "--papers", "--policy", "static", "--placement", "static"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .env("XDG_CACHE_HOME", dir.path())
        .output()
        .unwrap();
    let said = String::from_utf8(done.stdout).unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let is_table = |line: &&str| line.starts_with('|');
    let wide: Vec<&str> = said.lines().filter(is_table).filter(|line| line.chars().count() > 80).collect();
    assert!(wide.is_empty(), "tables fit a terminal: {wide:#?}");
    // Cells without what fills them up.
    let cells = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let count = |what: &str| said.lines().filter(|line| cells(line).contains(what)).count();
    assert_eq!(count("| tokens apart (figure 2c) | 0.70 to 0.75 | 0.7"), 4, "{said}");
    assert_eq!(count("| texts apart (2b) | 0.53 to 0.57 | 0.5"), 4, "{said}");
    assert_eq!((count("outside"), count("The skew gives way by")), (0, 4), "{said}");
    assert_eq!(count("independent tokens are at most"), 1, "at 30 % active it cannot be otherwise: {said}");
    assert_eq!(count("so that static computes 51 % of them on the GPU (5.3)"), 2, "{said}");
    // Trials are not left behind.
    let kept = std::fs::read_dir(dir.path().join("dynamicinfer/traces")).unwrap().count();
    assert_eq!(kept, 3);
}
