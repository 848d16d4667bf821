//! Mixtures of experts in traces, replay, simulator and plans, where an expert stands for a neuron: made-up traces are as uneven and as
//! local as they were asked to be, and what policies and plans make of them keeps its bounds.

use dynamicinfer::cache::Tier;
use dynamicinfer::cpu::Kernels;
use dynamicinfer::engine::Engine;
use dynamicinfer::error::Error;
use dynamicinfer::formats::machine_profile::MachineProfile;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::formats::trace_file::{TraceFile, TraceSection};
use dynamicinfer::lab::bound::bound;
use dynamicinfer::lab::record::{Request as Recorded, record};
use dynamicinfer::lab::replay::{self, ReplayOptions, active, frequencies, rules};
use dynamicinfer::lab::simulate::Calls;
use dynamicinfer::lab::simulate::case::{Case, POSITION};
use dynamicinfer::lab::synth::experts::{ExpertTrace, Routing, write_experts};
use dynamicinfer::lab::synth::{Law, Mixture, Routing as Planted, Shape, write_gguf};
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{Activation, KvType, Model};
use dynamicinfer::placement::memory_plan::{Footprint, KvPlace, Plan, Request, plan};
use dynamicinfer::placement::policy::{self, PlacementPolicy as Placement};
use dynamicinfer::placement::shapes::{footprint, shape};
use dynamicinfer::prng::Prng;
use dynamicinfer::scheduler::Policy;
use std::path::Path;

const GIB: u64 = 1 << 30;

fn made(dir: &Path, shape: &ExpertTrace) -> TraceFile {
    let path = dir.join(format!("{}-{}-{:?}-{}.trace", shape.experts, shape.seed, shape.reuse, shape.skew));
    write_experts(shape, &path, |_, _| Ok(())).unwrap();
    TraceFile::open(&path).unwrap()
}

/// A small trace without locality.
fn plain() -> ExpertTrace {
    ExpertTrace {
        layers: 6,
        experts: 32,
        used: 4,
        texts: 6,
        tokens_per_text: 120,
        reuse: None,
        skew: 0.0,
        ..Default::default()
    }
}

#[test]
fn every_token_has_so_many_experts_and_its_own_router_knows_them() {
    let dir = tempfile::tempdir().unwrap();
    let trace = made(dir.path(), &plain());
    let mut now = Vec::new();
    for layer in 0..6 {
        for token in 0..720 {
            active(trace.row(TraceSection::Active, layer, token), &mut now);
            assert_eq!(now.len(), 4);
            let own = trace.row(TraceSection::Own, layer, token);
            assert!((0..32).all(|e| (own[e] == 255) == now.contains(&(e as u32)) && [0, 255].contains(&own[e])));
            if layer > 0 {
                let early = trace.row(TraceSection::Ahead, layer, token);
                assert_eq!(early.iter().filter(|&&p| p >= 128).count(), 4);
            }
        }
    }
    assert_eq!(trace.header().experts_used, Some(4));
}

#[test]
fn reuse_skew_topics_and_recall_are_those_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    for seed in [1, 2] {
        let of = |shape: ExpertTrace| Routing::of(&made(dir.path(), &ExpertTrace { seed, ..shape }));
        // 4 of 32 at random: half are back after ln 2 / -ln(7/8) tokens.
        let random = of(plain());
        assert!((4.6..5.6).contains(&random.reuse) && random.skew < 0.15, "{random:?}");
        assert!((0.36..0.44).contains(&random.lru), "an LRU of 40 % hits 40 % of what has no order: {random:?}");
        for reuse in [2.0, 3.0, 7.0] {
            let r = of(ExpertTrace { reuse: Some(reuse), ..plain() });
            assert!((r.reuse / reuse - 1.0).abs() < 0.2, "{reuse} asked for: {r:?}");
        }
        let [even, uneven] = [0.5, 1.0].map(|skew| of(ExpertTrace { skew, ..plain() }).skew);
        assert!((0.35..0.6).contains(&even) && (0.65..1.05).contains(&uneven), "{even} {uneven}");
        let topics = of(ExpertTrace { skew: 1.0, topics: 1.0, ..plain() });
        assert!(topics.skew < 0.75 * uneven && topics.skew_in_text > 0.8 * uneven, "{topics:?} beside {uneven}");
        let recall = of(ExpertTrace { recall: 0.7, ..plain() }).recall;
        assert!((recall - 0.7).abs() < 0.02, "{recall}");
    }
}

#[test]
fn what_cannot_be_made_is_refused_with_its_name() {
    let refused = |shape: ExpertTrace| match shape.check() {
        Err(Error::Usage(why)) => why,
        other => panic!("{other:?}"),
    };
    assert!(refused(ExpertTrace { used: 0, ..plain() }).contains("0 of 32 experts"));
    assert!(refused(ExpertTrace { used: 32, ..plain() }).contains("32 of 32 experts"));
    assert!(refused(ExpertTrace { ahead: 6, ..plain() }).contains("6 ahead"));
    assert!(refused(ExpertTrace { skew: f64::NAN, ..plain() }).contains("skew NaN"));
    assert!(refused(ExpertTrace { recall: 0.3, ..plain() }).contains("recall 0.3"));
    assert!(refused(ExpertTrace { reuse: Some(0.0), ..plain() }).contains("reuse 0"));
}

/// Hits of a policy as a share of the uses, and of the bound. The link carries `carried` experts while a layer is computed.
fn hits(trace: &TraceFile, policy: Policy, share: f64, carried: f64) -> (f64, f64) {
    let h = trace.header();
    let skip = h.texts.len() / 2;
    let history = frequencies(trace, |text| text < skip);
    let counts: Vec<Vec<u64>> =
        history.iter().map(|f| f.iter().map(|&f| (f64::from(f) * 1e9) as u64).collect()).collect();
    let slots = replay::slots(&counts, share);
    let placed = policy::neurons(Placement::Static, &counts, &slots, 1);
    let most = bound(trace, skip, &slots, &placed, carried);
    let setting = ReplayOptions {
        policy,
        rules: rules(policy, h),
        thresholds: h.thresholds(None),
        slots,
        link: carried,
        placed,
        history,
        cost: 0.0,
        foreseen: false,
        stage: None,
        seed: 1,
        skip,
    };
    let outcome = replay::replay(trace, &setting);
    assert!(outcome.hits <= most, "{policy:?} has more hits than are possible");
    (outcome.gpu_share(), most as f64 / outcome.active as f64)
}

/// Where the link carries as many experts as a token uses, half of what is missing to the bound is won; where it carries a quarter of that,
/// nothing is lost.
#[test]
fn full_wins_half_of_the_gap_and_never_loses_to_the_static_placement() {
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        ("local", ExpertTrace { reuse: Some(2.0), skew: 0.8, ..plain() }),
        ("uneven", ExpertTrace { skew: 1.0, ..plain() }),
        ("punishes lru", ExpertTrace { reuse: Some(7.0), skew: 0.15, ..plain() }),
        ("punishes frequency", ExpertTrace { skew: 1.0, topics: 1.0, ..plain() }),
    ];
    for (name, shape) in cases {
        let trace = made(dir.path(), &ExpertTrace { layers: 12, ahead: 2, recall: 0.8, ..shape });
        for share in [0.2, 0.4, 0.6] {
            for carried in [1.0, 4.0] {
                let of = |policy| hits(&trace, policy, share, carried);
                let ((fixed, most), (full, _)) = (of(Policy::Static), of(Policy::Full));
                let told = format!("{name}, {share}, {carried} experts: {fixed} static, {full} full, {most} bound");
                assert!(full > 0.99 * fixed, "{told}");
                assert!(carried < 4.0 || full - fixed >= 0.5 * (most - fixed), "{told}");
            }
        }
    }
}

fn request(vram: u64) -> Request {
    Request {
        vram: Some(vram),
        ram: None,
        ffn_share: None,
        kv: KvPlace::Host,
        sequences: 1,
        predictor_bytes: 0,
        computed_share: 1.0,
        ilp_seconds: None,
        chunk: None,
        host: None,
        streamed_layers: Some(0),
        skips_host: false,
    }
}

fn machine(name: &str) -> MachineProfile {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("profiles/machines");
    MachineProfile::read(&dir.join(format!("{name}.toml"))).unwrap()
}

#[test]
fn shapes_of_mixtures_have_their_published_sizes_and_are_placed_expert_by_expert() {
    // Billions of weights, and gigabytes of the file that most people have, where that is known.
    for (name, billions, gigabytes) in [
        ("qwen3-30b-a3b", 30.5, Some(18.6)),
        ("gpt-oss-20b", 20.9, Some(12.1)),
        ("gpt-oss-120b", 116.8, Some(63.4)),
        ("mixtral-8x7b", 46.7, None),
        ("smallthinker-21b", 21.5, None),
    ] {
        let config = shape(name).unwrap();
        let weights = config.parameters() as f64 / 1e9;
        assert!((weights / billions - 1.0).abs() < 0.01, "{name}: {weights} of {billions} billion");
        let (real, _) = footprint(name, None, 2048, KvType::F16).unwrap();
        let bytes = (real.ffn_bytes() + real.attention_bytes + real.embeddings_bytes + real.head_bytes) as f64 / 1e9;
        let near = |gigabytes: f64| (bytes / gigabytes - 1.0).abs() < 0.04;
        assert!(gigabytes.is_none_or(near), "{name}: {bytes} of {gigabytes:?} GB");
        let experts = config.mixtures().next().unwrap();
        assert_eq!((real.ffn, real.experts_used), (experts.count, Some(experts.used)));
        let counts = vec![vec![1; real.ffn]; real.layers];
        let planned = plan(&real, &counts, &machine("rtx-3060-12gb"), &request(8 * GIB)).unwrap();
        let slots: usize = planned.slots().iter().sum();
        let room = 8 * GIB - planned.without_neurons_bytes - planned.streamed_bytes - real.for_chunks(planned.chunk);
        assert_eq!(slots as u64, (room / real.block_bytes).min((real.ffn * real.layers) as u64), "{name}");
        assert_eq!(planned.details.batch, 1);
    }
    // In a type of our own, an expert is its neurons' blocks.
    let (own, _) = footprint("qwen3-30b-a3b", Some(Quant::Q4), 2048, KvType::F16).unwrap();
    assert_eq!(own.block_bytes, 768 * 3 * 2048 / 32 * 18);
    assert!(footprint("qwen9", None, 1, KvType::F16).unwrap_err().to_string().contains("gpt-oss-20b"));
}

/// Forty layers of 256 experts, eight for a token and one for all; three layers with a delta net for each with attention. Both keep what they
/// remember of a sequence in host memory.
#[test]
fn of_a_shape_with_delta_nets_and_shared_experts_all_but_chosen_experts_is_pinned() {
    let kv_heads = |context: u64| 10 * 2 * 2 * 256 * 2 * context;
    let (real, quant) = footprint("qwen3.5-35b-a3b", None, 2048, KvType::F16).unwrap();
    assert_eq!((real.layers, real.ffn, real.experts_used, quant.as_str()), (40, 256, Some(8), "Q4_K_M"));
    assert_eq!((real.block_weights, real.kv_bytes), (3 * 2048 * 512, 0));
    assert_eq!(real.state_bytes, 30 * 4 * (32 * 128 * 128 + 3 * (2 * 16 + 32) * 128));
    // The state before a token, the one behind it, and those at four earlier lengths.
    assert_eq!(real.host_kv_bytes, kv_heads(2048) + 6 * real.state_bytes);
    assert_eq!(real.position_bytes, kv_heads(1));
    // Two bytes a weight say how many there are: 35 billion, of which a token has 3, as its name says.
    let (f16, _) = footprint("qwen3.5-35b-a3b", Some(Quant::F16), 2048, KvType::F16).unwrap();
    let always = f16.attention_bytes + f16.head_bytes;
    let billions = |bytes: u64| bytes as f64 / 2e9;
    let (all, token) = (f16.ffn_bytes() + always + f16.embeddings_bytes, always + f16.block_bytes * 8 * 40);
    assert!((34.0..36.0).contains(&billions(all)), "{}", billions(all));
    assert!((2.5..3.5).contains(&billions(token)), "{}", billions(token));
    // Attention's matrices and shared experts are on the device before any expert that a router chooses.
    let counts = vec![vec![1; real.ffn]; real.layers];
    let of = |sequences| {
        plan(&real, &counts, &machine("rtx-3060-12gb"), &Request { sequences, ..request(8 * GIB) }).unwrap()
    };
    let (one, nine) = (of(1), of(9));
    assert_eq!(one.without_neurons_bytes, real.least_bytes());
    assert_eq!((one.sequences, nine.without_neurons_bytes), (0, one.without_neurons_bytes));
    let forced = Request { kv: KvPlace::Device, ..request(8 * GIB) };
    let refused = plan(&real, &counts, &machine("rtx-3060-12gb"), &forced).unwrap_err().to_string();
    assert!(refused.contains("take --kv-place host"), "{refused}");
    assert!(one.total_bytes <= 8 * GIB && nine.total_bytes <= 8 * GIB);
}

/// Experts that are copied for a chunk take little of the room, never more than a budget that is an expert larger brings, and nothing
/// where all experts lie on the device. Longer chunks take what they take at once: only there a larger budget has fewer slots.
#[test]
fn a_plan_has_room_for_copied_experts_and_a_larger_budget_has_fewer_slots_only_for_longer_chunks() {
    let m = machine("rtx-3060-12gb");
    for name in ["gpt-oss-20b", "mixtral-8x7b"] {
        let (real, _) = footprint(name, None, 2048, KvType::F16).unwrap();
        let counts: Vec<Vec<u64>> =
            (0..real.layers).map(|l| (0..real.ffn as u64).map(|e| e * 7 + l as u64).collect()).collect();
        let of = |request: &Request| plan(&real, &counts, &m, request).unwrap();
        let slots = |plan: &Plan| plan.slots().iter().sum::<usize>() as u64;
        let (least, all) = (real.least_bytes(), (real.ffn * real.layers) as u64);
        let (mut before, mut chunk, mut streamed) = (0u64, 256, Vec::new());
        for thirds in 0..=3 * all {
            let vram = least + thirds * real.block_bytes / 3;
            let plan = of(&request(vram));
            assert!(plan.total_bytes <= vram, "{name}: {} of {vram} bytes", plan.total_bytes);
            let displaced = real.for_chunks(plan.chunk).saturating_sub(real.for_chunks(chunk));
            let fewest = before.saturating_sub(displaced.div_ceil(real.block_bytes));
            assert!(slots(&plan) >= fewest, "{name}: {} slots of {vram} bytes, and {before} of less", slots(&plan));
            assert!(real.for_chunks(plan.chunk) * 16 <= vram - real.least_bytes(), "{name}");
            assert!(plan.streamed_bytes * 16 <= vram - least && plan.streamed_bytes % real.block_bytes == 0, "{name}");
            (before, chunk) = (slots(&plan), plan.chunk);
            streamed.push(plan.streamed_bytes / real.block_bytes);
        }
        assert_eq!((before, chunk, streamed[0], streamed[streamed.len() - 1]), (all, 256, 0, 0), "{name}");
        assert!((1..=8).all(|experts| streamed.contains(&experts)) && streamed.iter().all(|&experts| experts <= 8));
        // Beside the experts that a share asks for.
        let half = of(&Request { vram: None, ffn_share: Some(0.5), ..request(1) });
        assert_eq!((slots(&half), half.streamed_bytes), (all / 2, 8 * real.block_bytes), "{name}");
        assert_eq!(half.total_bytes, half.budget_bytes);
        let tight = half.budget_bytes - 5 * real.block_bytes;
        let tight = of(&Request { ffn_share: Some(0.5), ..request(tight) });
        assert_eq!((slots(&tight), tight.streamed_bytes), (all / 2, 3 * real.block_bytes), "{name}");
        let mut without = half.clone();
        without.limit_streamed(8 * real.block_bytes - 1);
        assert_eq!(half.total_bytes - without.total_bytes, 8 * real.block_bytes);
        assert_eq!(without.total_bytes, without.parts.iter().map(|part| part.bytes[Tier::Device]).sum::<u64>());
    }
}

fn case<'a>(trace: &'a TraceFile, machine: &'a MachineProfile, real: &'a Footprint, vram: Option<u64>) -> Case<'a> {
    Case {
        trace,
        machine,
        real,
        position: POSITION,
        vram,
        placement: Placement::Static,
        by_impact: false,
        predictor_bytes: 0,
        threshold: None,
        contention: true,
        calls: Calls::PerDecision,
        gap_ns: 0.0,
        seed: 1,
        prompt: 0,
        chunk: None,
    }
}

#[test]
fn a_simulated_token_reads_its_experts_and_no_others() {
    let dir = tempfile::tempdir().unwrap();
    let trace = made(dir.path(), &ExpertTrace { layers: 24, ahead: 2, ..plain() });
    let (m, (real, _)) = (machine("rtx-3060-12gb"), footprint("gpt-oss-20b", None, 2048, KvType::F16).unwrap());
    let alone = case(&trace, &m, &real, None).run(Policy::Full).unwrap();
    assert_eq!((alone.computed_share, alone.recall, alone.gpu_share), (0.125, 1.0, 0.0));
    let kv = real.kv_bytes / 2048 * POSITION as u64;
    let bytes = real.attention_bytes + real.head_bytes + kv + real.ffn_bytes() / 8;
    let ms = bytes as f64 / m.dram_gb_s / 1e6 + (4 * real.layers + 1) as f64 * m.call_us / 1e3;
    assert!((alone.token_ms / ms - 1.0).abs() < 1e-3, "{} and {ms} ms", alone.token_ms);
    // Whole layers beside the most frequent experts: where all are alike as many uses hit, but device and CPU work at the same time.
    let split = case(&trace, &m, &real, Some(8 * GIB));
    let (fixed, (layers_ms, layers)) = (split.run(Policy::Static).unwrap(), split.layer_offload());
    let told = format!("{} and {layers_ms} ms, {layers} layers", fixed.token_ms);
    assert!((10..20).contains(&layers) && (0.7..1.0).contains(&(fixed.token_ms / layers_ms)), "{told}");
    // A trace of another mixture, or of neurons, is refused.
    let other = made(dir.path(), &ExpertTrace { experts: 64, ..plain() });
    let error = case(&other, &m, &real, None).run(Policy::Full).unwrap_err();
    assert!(error.to_string().contains("4 of 64 experts, the model 4 of 32 experts"), "{error}");
}

/// Topics change, and what is learnt of one says nothing of the next: moving pays. Where nothing can be learnt, little is lost.
#[test]
fn simulated_moves_pay_where_texts_differ_and_cost_little_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let (m, (real, _)) = (machine("rtx-3060-12gb"), footprint("gpt-oss-20b", None, 2048, KvType::F16).unwrap());
    let over = |shape: ExpertTrace| {
        let trace = made(dir.path(), &ExpertTrace { layers: 24, ahead: 2, recall: 0.8, ..shape });
        let of = |policy| case(&trace, &m, &real, Some(8 * GIB)).run(policy).unwrap().tokens_per_s;
        of(Policy::Full) / of(Policy::Static)
    };
    let (topics, alike) = (over(ExpertTrace { skew: 1.0, topics: 1.0, ..plain() }), over(plain()));
    assert!(topics > 1.1, "{topics}");
    assert!(alike > 0.95, "{alike}");
}

/// A chunk is what the formulas say where they can be solved by hand: a prompt whose experts all lie on the device, or none of them.
#[test]
fn a_simulated_prompt_takes_what_its_chunks_take() {
    let dir = tempfile::tempdir().unwrap();
    let trace = made(dir.path(), &ExpertTrace { layers: 24, ahead: 2, ..plain() });
    let (m, (real, _)) = (machine("rtx-3060-12gb"), footprint("gpt-oss-20b", None, 2048, KvType::F16).unwrap());
    let prompt = |vram| Case { prompt: 96, ..case(&trace, &m, &real, Some(vram)) };
    let products = |weights: u64, tokens: f64| 2.0 * weights as f64 * tokens / m.device_gflops;
    let attention = (real.attention_bytes as f64 / m.device_gb_s).max(products(real.attention_weights, 96.0));
    let attention = attention + real.head_bytes as f64 / m.device_gb_s;
    let cross = 96.0 * 4.0 * real.hidden as f64 / m.link_gb_s;
    let route = 96.0 * 2.0 * (32 * real.hidden) as f64 / m.host_gflops;
    let before = attention + 24.0 * (cross + route + 1e3 * (m.copy_us + m.sync_us + m.call_us));
    // 128 draws of 32 experts by each 32 tokens: every expert is read once for them, and three such groups are the prompt: a kernel each,
    // and one that adds.
    let whole = prompt(24 * GIB).run(Policy::Full).unwrap().prompt.unwrap();
    let reads = (real.block_bytes as f64 * 32.0 * 3.0 / m.device_gb_s).max(products(real.block_weights, 4.0 * 96.0));
    let reads = 24.0 * (reads + 4e3 * m.call_us);
    assert_eq!((whole.gpu_share, whole.cpu_ms), (1.0, 0.0));
    assert!((0.9..=1.0).contains(&(whole.ms * 1e6 / (before + reads))), "{} of {} ns", whole.ms, before + reads);
    // Without a slot the CPU computes four experts for each token; each is read once at least.
    let least = prompt(real.least_bytes() + 100).run(Policy::Full).unwrap().prompt.unwrap();
    let columns = 24.0 * 384.0 * 2.0 * real.block_weights as f64 / m.host_gflops;
    let read = 24.0 * 32.0 * real.block_bytes as f64 / m.dram_gb_s;
    let floor = before + columns.max(read);
    assert_eq!((least.gpu_share, least.needed_share), (0.0, 1.0));
    assert!((1.0..1.1).contains(&(least.ms * 1e6 / floor)), "{} of {floor} ns", least.ms);
    // Whole layers are the same where all or none of them lie there.
    for (vram, policy) in [(24 * GIB, &whole), (real.least_bytes() + 100, &least)] {
        let layers = prompt(vram).whole_layers(false).unwrap().unwrap();
        assert!((layers.ms / policy.ms - 1.0).abs() < 1e-9, "{} and {} ms", layers.ms, policy.ms);
    }
    // What is wanted of a trace that has no such prompts is refused.
    for (case, why) in [
        (Case { prompt: 120, ..prompt(8 * GIB) }, "a prompt of 120 tokens: the trace's shortest text has 120"),
        (Case { vram: None, ..prompt(8 * GIB) }, "a prompt of 96 tokens: it is simulated beside a device; give --vram"),
    ] {
        assert!(case.run(Policy::Full).unwrap_err().to_string().contains(why));
    }
}

/// Nothing moves for a prompt, so the first one of the fixed placement and of every policy is the same; what moved in a text before is
/// another set of experts, as good as the fixed one for a prompt of another kind.
#[test]
fn a_prompt_finds_what_the_text_before_has_left_and_moves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (m, (real, _)) = (machine("rtx-3060-12gb"), footprint("gpt-oss-20b", None, 2048, KvType::F16).unwrap());
    for shape in [ExpertTrace { skew: 1.0, topics: 1.0, ..plain() }, ExpertTrace { skew: 1.0, ..plain() }, plain()] {
        let sub = tempfile::tempdir_in(dir.path()).unwrap();
        let trace = made(sub.path(), &ExpertTrace { layers: 24, ahead: 2, recall: 0.8, ..shape });
        let of = |policy, prompt| Case { prompt, ..case(&trace, &m, &real, Some(8 * GIB)) }.run(policy).unwrap();
        let fixed = of(Policy::Static, 80).prompt.unwrap();
        for policy in [Policy::Full, Policy::Lru] {
            let outcome = of(policy, 80);
            let moving = outcome.prompt.unwrap();
            assert_eq!(moving.each_ms[0], fixed.each_ms[0], "{}", policy.name());
            assert_eq!((moving.each_ms.len(), outcome.tokens), (3, 3 * 40));
            // Copying where that is faster is never slower, and with a link as fast as this one it is faster.
            assert!(moving.ms < 0.9 * moving.on_cpu_ms.unwrap() && moving.copied_share > 0.02, "{moving:?}");
        }
        let full = of(Policy::Full, 80).prompt.unwrap();
        assert!(full.ms < 1.01 * fixed.ms, "{} and {} ms", full.ms, fixed.ms);
        assert_eq!(of(Policy::Full, 0).prompt, None);
    }
}

/// A small mixture as weights, with this routing.
fn weights(routing: Option<Planted>) -> Shape {
    Shape {
        hidden: 256,
        layers: 4,
        ffn: 32,
        heads: 4,
        kv_heads: 2,
        vocab: 4000,
        context: 512,
        activation: Activation::Silu,
        active: None,
        seed: 3,
        outliers: 0,
        experts: Some(Mixture { routing, ..Mixture::flat(32, 4) }),
    }
}

/// What `record` measures of a model on texts in which hardly a token comes twice.
fn recorded(dir: &Path, shape: &Shape, name: &str) -> Routing {
    let (file, out) = (dir.join(format!("{name}.gguf")), dir.join(format!("{name}.trace")));
    write_gguf(shape, Quant::F16, &file, &|_, _| Ok(())).unwrap();
    let mut engine = Engine::new(Model::in_place(Source::open(&file, None).unwrap()).unwrap(), 1, Kernels::best());
    let mut prng = Prng::new(9);
    let mut text = |name: &str| (name.to_string(), (0..200).map(|_| 3 + prng.below(3997) as u32).collect::<Vec<u32>>());
    let request = Recorded {
        texts: vec![text("a"), text("b")],
        window: 256,
        kv: KvType::F32,
        predictor: None,
        activation_thresholds: vec![0.0; shape.layers],
        ahead: 1,
        lookaheads: Vec::new(),
        made: serde_json::Value::Null,
    };
    record(&mut engine, &request, &out, |_, _| Ok(())).unwrap();
    Routing::of(&TraceFile::open(&out).unwrap())
}

/// Skew and reuse stand in the weights: the engine, which knows nothing of it, routes so.
#[test]
fn a_mixture_routes_as_was_planted_in_its_weights() {
    let dir = tempfile::tempdir().unwrap();
    let flat = recorded(dir.path(), &weights(None), "flat");
    assert!(flat.skew < 0.2 && flat.reuse > 4.0, "{flat:?}");
    for (skew, reuse) in [(0.0, Some(2.0)), (0.8, None), (0.8, Some(1.5))] {
        let shape = weights(Some(Planted { skew, reuse }));
        let law = shape.law().unwrap().unwrap();
        let found = recorded(dir.path(), &shape, &format!("{skew}-{reuse:?}"));
        let told = format!("asked {skew} {reuse:?}, {law:?}, {found:?}");
        println!("{told}");
        let back = reuse.unwrap_or(law.reuse_by_chance);
        assert!((law.reuse / back - 1.0).abs() < 0.1 && (found.reuse / back - 1.0).abs() < 0.25, "{told}");
        assert!(if skew > 0.0 { (found.skew - skew).abs() < 0.15 } else { found.skew < 0.3 }, "{told}");
    }
    // What cannot be planted is refused, with what can.
    let refused = |routing| Law::find(&weights(None).config().unwrap(), (32, 4), routing, 1).unwrap_err().to_string();
    assert!(refused(Planted { skew: 0.0, reuse: Some(50.0) }).contains("--reuse 50: with this --skew half"));
    assert!(refused(Planted { skew: 2.0, reuse: None }).contains("--skew 2: take 0 to 1.5"));
    let few = Shape { heads: 64, kv_heads: 64, ..weights(Some(Planted { skew: 1.0, reuse: None })) };
    assert!(few.law().unwrap_err().to_string().contains("heads of 32 numbers or more; they have 4"));
}
