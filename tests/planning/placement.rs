//! The laws of plans: never above the budget, the same every time; and the verb `plan`.

use crate::programs;
use crate::support::{assumed_machine as machine, request};
use dynamicinfer::cache::Tier;
use dynamicinfer::formats::machine_profile::{MachineProfile, MoveMethod, MoveRate, Rate, StageRates};
use dynamicinfer::formats::placement_file::{LayerPlacement, PlacementFile, PlacementPolicy, VERSION};
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::ids::PublishedId;
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{KvType, Model};
use dynamicinfer::pack::{PackOptions, pack};
use dynamicinfer::placement::memory_plan::{Footprint, KvPlace, PartName, Plan, Request, plan};
use dynamicinfer::placement::problem::power_law;
use dynamicinfer::placement::shapes::shape;
use dynamicinfer::placement::{Costs, min_neurons, policy, ranking};
use dynamicinfer::prng::Prng;
use serde_json::{Value as Json, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A plan by time has whole layers where the host's fixed part is as large as its work for cold neurons, and is faster by the cost model; where the
/// work is much more, it is the plan with the most activations.
#[test]
fn layers_are_whole_where_the_fixed_part_of_the_host_counts() {
    let f = Footprint::of_shape(&shape("llama-7b").unwrap(), Quant::F16, 512, KvType::F16);
    let counts = power_law(f.layers, f.ffn);
    let stage = |split_us| Some(StageRates { always_us: 31.2, split_us });
    let of = |skips_host, split_us| {
        let machine = MachineProfile { stage: stage(split_us), ..machine() };
        let request = Request { vram: None, ffn_share: Some(0.4), skips_host, ..request(1) };
        let plan = plan(&f, &counts, &machine, &request).unwrap();
        check(&plan, &f);
        assert!(plan.gap < 0.03, "{}", plan.gap);
        plan
    };
    let (whole, spread, free) = (of(true, 300.0), of(false, 300.0), of(true, 0.0));
    assert!(whole.details.whole_layers > 3 && spread.details.whole_layers == 0 && free.details.whole_layers == 0);
    assert!(whole.details.ffn_us < 0.95 * whole.details.ffn_us_by_impact, "{:?}", whole.details);
    assert!(whole.objective < spread.objective && free.details.ffn_us <= free.details.ffn_us_by_impact);
    assert_eq!(whole.details.ffn_us_by_impact, spread.details.ffn_us);
}

#[test]
fn a_split_layer_has_just_enough_neurons_to_pay_for_its_synchronisation() {
    // 24 KiB, a neuron of a 7B model in f16.
    let costs = Costs::of(&machine(), 24576, 4096);
    assert!((costs.t_cpu_us - 0.49152).abs() < 1e-9 && (costs.t_gpu_us - 0.049152).abs() < 1e-9);
    assert!((costs.t_trans_us - 1.2288).abs() < 1e-9);
    // Two copies of 16 KiB, started at 5 us each, and one wait.
    assert!((costs.t_sync_us - (20.0 + 2.0 * 0.8192)).abs() < 1e-9);
    let pays = |c: usize| c as f64 * costs.t_gpu_us + costs.t_sync_us <= c as f64 * costs.t_cpu_us;
    let least = min_neurons(&costs, 11008);
    assert!(pays(least) && !pays(least - 1), "{least}");
    // A layer that lies on the device whole is not split.
    assert_eq!(min_neurons(&costs, 40), 40);
    assert_eq!(min_neurons(&Costs { t_gpu_us: 1.0, ..costs }, 11008), 11008);
    assert_eq!(min_neurons(&Costs { t_sync_us: 0.0, ..costs }, 11008), 1);
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models").join(name)
}

fn packed(name: &str, quant: Quant, dir: &Path) -> Model {
    let path = dir.join(format!("{name}.{}.neurons", quant.name()));
    let options = PackOptions { types: quant.into(), orders: None };
    pack(&Source::open(&fixture(name), None).unwrap(), &path, &options, &|_, _| Ok(())).unwrap();
    Model::open(&path).unwrap()
}

/// What holds for every plan.
fn check(plan: &Plan, footprint: &Footprint) {
    assert_eq!(plan.total_bytes, plan.parts.iter().map(|p| p.bytes[Tier::Device]).sum::<u64>());
    assert_eq!(plan.details.host_bytes, plan.parts.iter().map(|p| p.bytes[Tier::Host]).sum::<u64>());
    assert!(
        plan.without_neurons_bytes <= plan.total_bytes && plan.total_bytes <= plan.budget_bytes.min(plan.full_bytes)
    );
    let slots: u64 = plan.layers.iter().map(|l| l.slots as u64).sum();
    let ffn = plan.parts.iter().find(|p| p.name == PartName::FfnSlots).unwrap();
    assert_eq!(
        (ffn.bytes[Tier::Device], ffn.bytes[Tier::Host]),
        (slots * footprint.block_bytes, footprint.ffn_bytes())
    );
    let least = plan.details.min_neurons;
    assert!(plan.layers.iter().all(|l| l.slots == 0 || (least..=footprint.ffn).contains(&l.slots)));
    assert!((0.0..=1.0).contains(&plan.gap) && plan.details.value <= plan.details.bound);
}

#[test]
fn a_shape_has_the_bytes_of_the_packed_model() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["relullama", "opt"] {
        for quant in [Quant::F16, Quant::Q4] {
            let model = packed(name, quant, dir.path());
            let footprint = Footprint::of_model(&model, 100, KvType::F32);
            assert_eq!(footprint, Footprint::of_shape(&model.config, quant, 100, KvType::F32), "{name}");
            assert_eq!(footprint.ffn_bytes(), model.layers.iter().map(|l| l.ffn.bytes()).sum::<u64>());
        }
    }
}

#[test]
fn every_budget_is_kept_to_the_byte_and_both_ends_are_reached() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["relullama", "opt"] {
        let footprint = Footprint::of_model(&packed(name, Quant::F16, dir.path()), 64, KvType::F16);
        let counts = power_law(footprint.layers, footprint.ffn);
        let plan_of = |request: &Request| plan(&footprint, &counts, &machine(), request);
        let ends = plan_of(&request(1 << 40)).unwrap();
        let (min, full) = (ends.without_neurons_bytes, ends.full_bytes);
        let least = plan_of(&request(min)).unwrap();
        assert_eq!((least.total_bytes, least.objective), (min, 0));
        let most = plan_of(&request(full)).unwrap();
        assert_eq!((most.total_bytes, most.gap), (full, 0.0));
        assert!(most.layers.iter().all(|l| l.slots == footprint.ffn));
        let refused = plan_of(&request(min - 1)).unwrap_err();
        assert_eq!(refused.exit_code(), 6);
        assert!(refused.to_string().contains(&format!("give --vram {min} or more")), "{refused}");
        let mut last = (0, 0);
        for vram in (min..=full).step_by(((full - min) / 97) as usize) {
            check(&plan_of(&request(vram)).unwrap(), &footprint);
            // Nothing but neurons, so that more room is more of them.
            let plan = plan_of(&Request { kv: KvPlace::Host, ..request(vram) }).unwrap();
            check(&plan, &footprint);
            assert!((plan.objective, plan.total_bytes) >= last, "{vram}");
            last = (plan.objective, plan.total_bytes);
        }
    }
}

/// Keys and values on the device cost neurons, and save attention on the host: copies, waits, and reading them from its memory.
#[test]
fn keys_and_values_displace_the_neurons_that_cost_less_than_attention_on_the_host() {
    let counts = |f: &Footprint| power_law(f.layers, f.ffn);
    let on_device = |plan: &Plan| plan.parts.iter().find(|p| p.name == PartName::Kv).unwrap().bytes[Tier::Device];
    let mut displaced = 0;
    for (context, computed_share) in [(512, 0.1), (4096, 0.1), (4096, 1.0), (1 << 17, 0.1)] {
        let f = Footprint::of_shape(&shape("llama-7b").unwrap(), Quant::F16, context, KvType::F16);
        let counts = counts(&f);
        let of = |kv, vram| plan(&f, &counts, &machine(), &Request { kv, computed_share, ..request(vram) }).unwrap();
        let least = of(KvPlace::Host, u64::MAX / 2).without_neurons_bytes;
        for eighths in 0..=9 {
            let vram = least + f.ffn_bytes() / 8 * eighths;
            let (chosen, host) = (of(KvPlace::Auto, vram), of(KvPlace::Host, vram));
            check(&chosen, &f);
            let room = vram - least >= f.kv_bytes + f.for_chunks(chosen.chunk);
            let m = machine();
            // What the host's attention costs more, and what it costs that these neurons are the host's, us.
            let read = |bytes: f64| bytes / (m.dram_gb_s * 1e3) - bytes / (m.device_gb_s * 1e3);
            let waits = f.layers as f64 * (chosen.details.costs.t_sync_us + m.call_us);
            let gain = waits + read(f.kv_bytes as f64 / 4.0);
            let loss = |other: &Plan| other.details.ffn_us - host.details.ffn_us;
            match on_device(&chosen) {
                0 => {
                    assert_eq!(chosen.layers, host.layers);
                    // There is no room, or it would cost more.
                    assert!(!room || loss(&of(KvPlace::Device, vram)) >= gain, "{context}, {eighths}");
                }
                bytes => {
                    assert_eq!(bytes, f.kv_bytes);
                    assert!(loss(&chosen) < gain, "{context}, {eighths}");
                    displaced += u32::from(chosen.objective < host.objective);
                }
            }
        }
    }
    assert!((8..32).contains(&displaced), "{displaced}");
    // Where bits must not depend on a budget they take what neurons leave.
    let f = Footprint::of_shape(&shape("llama-7b").unwrap(), Quant::F16, 512, KvType::F16);
    let of = |kv, vram| plan(&f, &counts(&f), &machine(), &Request { kv, ..request(vram) }).unwrap();
    let most = of(KvPlace::Spare, u64::MAX / 2).full_bytes;
    for (vram, there) in [(most, f.kv_bytes), (most - f.embeddings_bytes - 1, 0), (most / 2, 0)] {
        assert_eq!(on_device(&of(KvPlace::Spare, vram)), there);
        assert_eq!(on_device(&of(KvPlace::Auto, vram)), f.kv_bytes);
    }
}

#[test]
fn a_share_sets_the_neurons_alone_and_the_host_has_a_budget_too() {
    let footprint = Footprint::of_shape(&shape("llama-7b").unwrap(), Quant::Q8, 4096, KvType::F16);
    let counts = power_law(footprint.layers, footprint.ffn);
    let plan_of = |request: &Request| plan(&footprint, &counts, &machine(), request);
    let half = Request { vram: None, ffn_share: Some(0.5), ..request(1) };
    let by_share = plan_of(&half).unwrap();
    check(&by_share, &footprint);
    assert_eq!(by_share.layers.iter().map(|l| l.slots).sum::<usize>() * 2, footprint.ffn * footprint.layers);
    assert_eq!(by_share.total_bytes, by_share.budget_bytes);
    // The same neurons; what else fits may come.
    let both = plan_of(&Request { ffn_share: Some(0.5), ..request(by_share.full_bytes) }).unwrap();
    assert_eq!(both.layers, by_share.layers);
    assert!(
        both.parts
            .iter()
            .filter(|p| p.name == PartName::Kv || p.name == PartName::Embeddings)
            .all(|p| p.bytes[Tier::Host] == 0)
    );
    // Longer chunks of prompts come beside the neurons, and make way for them.
    let least = by_share.total_bytes - footprint.for_chunks(by_share.chunk);
    assert_eq!((by_share.chunk, plan_of(&Request { vram: Some(least), ..half }).unwrap().chunk), (1024, 256));
    let refused = plan_of(&Request { vram: Some(least - 1), ..half }).unwrap_err();
    assert!(refused.to_string().contains(&format!("give --vram {least} or more")), "{refused}");

    let needed = by_share.details.host_bytes;
    assert!(plan_of(&Request { ram: Some(needed), ..half }).is_ok());
    let refused = plan_of(&Request { ram: Some(needed - 1), ..half }).unwrap_err();
    assert!(refused.to_string().contains(&format!("give --ram {needed} or more")), "{refused}");

    let on_device = plan_of(&Request { kv: KvPlace::Device, ..half }).unwrap();
    assert_eq!(on_device.min_bytes, by_share.min_bytes + footprint.kv_bytes);
    let on_host = plan_of(&Request { kv: KvPlace::Host, ..request(u64::MAX) }).unwrap();
    assert_eq!(on_host.parts.iter().find(|p| p.name == PartName::Kv).unwrap().bytes[Tier::Host], footprint.kv_bytes);
}

/// `plan` said 9,406,720 bytes where 8,227,072 were taken. Whatever is asked of it, the least that a plan names is taken, and a byte less is not.
#[test]
fn the_least_that_a_plan_names_is_the_least_that_is_taken() {
    for (name, quant) in [("llama-7b", Quant::Q4), ("mixtral-8x7b", Quant::Q4)] {
        let f = Footprint::of_shape(&shape(name).unwrap(), quant, 2048, KvType::F16);
        let counts = power_law(f.layers, f.ffn);
        for kv in [KvPlace::Auto, KvPlace::Host, KvPlace::Device] {
            for (sequences, chunk, predictor_bytes) in
                [(1, None, 0), (1, Some(1024), 0), (3, None, 0), (1, None, 1 << 24)]
            {
                for streamed_layers in [None, Some(0)].into_iter().take(if chunk.is_none() { 2 } else { 1 }) {
                    let of = |vram| {
                        let more = Request { sequences, chunk, predictor_bytes, ..request(vram) };
                        plan(&f, &counts, &machine(), &Request { kv, streamed_layers, ..more })
                    };
                    let case =
                        format!("{name} {quant:?} {kv:?} {sequences} {chunk:?} {predictor_bytes} {streamed_layers:?}");
                    let least = of(1 << 42).unwrap().min_bytes;
                    match of(least) {
                        Ok(plan) => assert_eq!(plan.min_bytes, least, "{case}"),
                        Err(why) => panic!("{case}: {why}"),
                    }
                    let refused = of(least - 1).err().unwrap_or_else(|| panic!("{case}: less than {least} was taken"));
                    assert!(refused.to_string().contains(&format!("--vram {least} or more")), "{case}: {refused}");
                }
            }
        }
    }
}

/// Longer chunks of prompts displace neurons, and are there where much more is copied for every chunk.
#[test]
fn chunks_are_longer_where_something_is_copied_and_they_take_a_sixteenth_of_the_room_at_most() {
    for (name, quant) in [("llama-7b", Quant::F16), ("llama-7b", Quant::Q4), ("mixtral-8x7b", Quant::Q4)] {
        let f = Footprint::of_shape(&shape(name).unwrap(), quant, 2048, KvType::F16);
        let counts = power_law(f.layers, f.ffn);
        let of = |request: &Request| plan(&f, &counts, &machine(), request).unwrap();
        let host = |vram| Request { kv: KvPlace::Host, ..request(vram) };
        let ends = of(&host(u64::MAX / 2));
        let longer = [512, 1024].map(|chunk| f.for_chunks(chunk));
        assert!(0 < longer[0] && longer[0] * 2 < longer[1] && f.for_chunks(256) == 0, "{name}: {longer:?}");
        let least = ends.without_neurons_bytes;
        for (room, chunk) in [
            (0, 256),
            (16 * longer[0] - 1, 256),
            (16 * longer[0], 512),
            (16 * longer[1] - 1, 512),
            (16 * longer[1], 1024),
            (f.ffn_bytes() / 4 * 3, 1024),
            (f.ffn_bytes() - 2 * longer[1], 1024),
            (f.ffn_bytes() - 2 * longer[1] + 1, 512),
            (f.ffn_bytes() - 2 * longer[0] + 1, 256),
            (f.ffn_bytes(), 256),
        ] {
            let plan = of(&host(least + room));
            check(&plan, &f);
            assert_eq!((plan.chunk, plan.without_neurons_bytes), (chunk, least), "{name}: {room} bytes");
            // What was asked for comes first, whatever it displaces.
            for asked in [256, 512, 1024] {
                let vram = least + room + f.for_chunks(asked);
                let plan = of(&Request { chunk: Some(asked), ..host(vram) });
                check(&plan, &f);
                assert_eq!((plan.chunk, plan.without_neurons_bytes), (asked, least + f.for_chunks(asked)));
            }
        }
    }
}

/// What chunks take of host memory was only looked at when the plan had chosen: a host with room for short ones was refused.
#[test]
fn chunks_are_as_long_as_host_memory_allows_too_and_keys_stay_there_where_it_has_no_room_for_copies_of_them() {
    for (name, quant) in [("llama-7b", Quant::F16), ("mixtral-8x7b", Quant::Q4)] {
        let f = Footprint::of_shape(&shape(name).unwrap(), quant, 2048, KvType::F16);
        let counts = power_law(f.layers, f.ffn);
        let vram = f.least_bytes() + 777 + f.ffn_bytes() / 4 * 3;
        let of = |request: Request| plan(&f, &counts, &machine(), &request).unwrap();
        for attends in [false, true] {
            let kv = if attends { KvPlace::Auto } else { KvPlace::Host };
            let with = |host| of(Request { kv, host, ..request(vram) });
            let [short, middle, long] = [256, 512, 1024].map(|tokens| f.on_host(tokens, attends));
            assert!(short < middle && middle < long, "{name}");
            for (host, chunk) in [
                (None, 1024),
                (Some(long), 1024),
                (Some(long - 1), 512),
                (Some(middle), 512),
                (Some(middle - 1), 256),
                (Some(short), 256),
                (Some(0), 256),
            ] {
                let plan = with(host);
                check(&plan, &f);
                let there = attends && host != Some(0);
                assert_eq!((plan.chunk, plan.sequences > 0), (chunk, there), "{name}: {host:?}");
            }
            // What was asked for is somebody's own choice.
            let asked = of(Request { kv, host: Some(0), chunk: Some(1024), ..request(vram) });
            assert_eq!((asked.chunk, asked.sequences), (1024, 0));
        }
    }
}

#[test]
fn policies_fill_the_same_slots() {
    let mut prng = Prng::new(3);
    let counts: Vec<Vec<u64>> = (0..4).map(|_| (0..100).map(|_| prng.below(9)).collect()).collect();
    let slots = [0, 1, 50, 100];
    let of = |policy, seed| policy::neurons(policy, &counts, &slots, seed);
    for (l, neurons) in of(PlacementPolicy::Static, 0).into_iter().enumerate() {
        assert_eq!(neurons, ranking(&counts[l])[..slots[l]]);
        let worst = neurons.iter().map(|n| counts[l][n.index()]).min().unwrap_or(0);
        let left = (0..100).map(PublishedId).filter(|n| !neurons.contains(n)).map(|n| counts[l][n.index()]);
        assert!(neurons.is_empty() || left.max().is_none_or(|best| best <= worst));
    }
    let random = of(PlacementPolicy::Random, 1);
    assert_eq!(random, of(PlacementPolicy::Random, 1));
    assert_ne!(random[2], of(PlacementPolicy::Random, 2)[2]);
    assert_eq!(random.iter().map(Vec::len).collect::<Vec<_>>(), slots);
    assert_eq!(random[3], (0..100).map(PublishedId).collect::<Vec<_>>());
    assert!(random.iter().all(|n| n.windows(2).all(|pair| pair[0] < pair[1])));
    assert!(of(PlacementPolicy::None, 1).iter().all(Vec::is_empty));
}

#[test]
fn a_placement_reads_back_and_a_wrong_one_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("x.json");
    let layers = vec![
        LayerPlacement { slots: 3, neurons: vec![4, 0, 2] },
        LayerPlacement { slots: 2, neurons: vec![] },
        LayerPlacement { slots: 0, neurons: vec![] },
    ];
    let good = PlacementFile {
        version: VERSION,
        fingerprint: "abc".into(),
        model: "m".into(),
        ffn: 5,
        policy: PlacementPolicy::Static,
        seed: None,
        layers,
    };
    good.write(&path).unwrap();
    assert_eq!(PlacementFile::read(&path).unwrap(), good);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    good.check_owner(&path, "abc", 3, 5).unwrap();
    for (fingerprint, layers, ffn, want) in [
        ("abd", 3, 5, "fingerprint: is abc, the model's is abd: this placement belongs to another model (m); "),
        ("abc", 4, 5, "it places 3 layers of 5 neurons and the model has 4 of 5; "),
        ("abc", 3, 6, "it places 3 layers of 5 neurons and the model has 3 of 6; "),
    ] {
        let error = good.check_owner(&path, fingerprint, layers, ffn).unwrap_err();
        let said = error.to_string();
        assert!(
            said.contains(want) && said.ends_with("make it again with `dynamicinfer plan MODEL --vram SIZE -o FILE`")
        );
        assert_eq!(error.exit_code(), 5);
    }
    let json = serde_json::to_value(&good).unwrap();
    let cases: [(&str, Json, &str); 9] = [
        ("/version", json!(2), "version: is 2; this program reads 1"),
        ("/ffn", json!(0), "ffn: is 0; it must be 1 to 1048576"),
        ("/ffn", json!(4), "layer 0: there is no neuron 4 among 4"),
        ("/layers", json!([]), "layers: are 0; it must be 1 to 4096"),
        ("/layers/0/slots", json!(2), "layer 0: 3 neurons in 2 slots of a layer of 5"),
        ("/layers/1/slots", json!(6), "layer 1: 0 neurons in 6 slots of a layer of 5"),
        ("/layers/0/neurons/1", json!(4), "layer 0: neuron 4 is there twice"),
        ("/layers/0/neurons/1", json!(-1), "not a placement: "),
        ("/policy", json!("best"), "not a placement: unknown variant `best`"),
    ];
    for (place, value, want) in cases {
        let mut wrong = json.clone();
        *wrong.pointer_mut(place).unwrap() = value;
        std::fs::write(&path, wrong.to_string()).unwrap();
        let said = PlacementFile::read(&path).unwrap_err().to_string();
        assert!(said.contains(want) && said.contains("make it again with"), "{place}: {said}");
    }
}

#[test]
fn a_machine_profile_reads_back_and_a_wrong_one_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pc.toml");
    let good = MachineProfile {
        measured_unix: Some(1_800_000_000),
        measured: vec![Rate::DramGbS, Rate::HostGflops, Rate::CallUs],
        assumed: vec![Rate::DeviceGbS, Rate::LinkGbS, Rate::CopyUs, Rate::SyncUs],
        moves: vec![MoveRate { method: MoveMethod::Gather, group_us: 12.0, piece_us: 0.5, gb_s: 21.5 }],
        ..machine()
    };
    good.write(&path).unwrap();
    assert_eq!(MachineProfile::read(&path).unwrap(), good);
    let text = std::fs::read_to_string(&path).unwrap();
    for (from, to, want) in [
        ("dram_gb_s = 50.0", "dram_gb_s = 0.0", "dram_gb_s: is 0; it must be above 0 and at most 1000000 GB/s"),
        ("\ngb_s = 21.5", "\ngb_s = 0.0", "moves: gather must stand once, with times from 0 and a rate above it"),
        ("piece_us = 0.5", "piece_us = -0.5", "moves: gather must stand once"),
        ("dram_gb_s = 50.0", "dram_gb_s = -1.0", "dram_gb_s: is -1; "),
        ("dram_gb_s = 50.0", "dram_gb_s = nan", "dram_gb_s: is NaN; "),
        ("dram_gb_s = 50.0", "dram_gb_s = inf", "dram_gb_s: is inf; "),
        ("dram_gb_s = 50.0", "dram_gb_s = 1e12", "dram_gb_s: is 1000000000000; "),
        (
            "sync_us = 10.0",
            "sync_us = 1e9",
            "sync_us: is 1000000000; it must be above 0 and at most 10000000 microseconds",
        ),
        ("dram_gb_s = 50.0", "dram_mb_s = 50.0", "not a machine profile: unknown field `dram_mb_s`"),
        ("dram_gb_s = 50.0", "", "not a machine profile: missing field `dram_gb_s`"),
        ("\"call_us\"", "\"sync_us\"", "assumed: call_us must stand once, in `measured` or in `assumed`"),
        ("\"test\"", "\"../x\"", "name: '../x' is no name: "),
        ("measured_unix = 1800000000", "", "measured_unix: must be there if, and only if, something was measured"),
    ] {
        assert!(text.contains(from), "{from} in {text}");
        std::fs::write(&path, text.replace(from, to)).unwrap();
        let said = MachineProfile::read(&path).unwrap_err().to_string();
        assert!(
            said.contains(want) && said.contains("make it again with `dynamicinfer measure --save NAME`"),
            "{to}: {said}"
        );
    }
}

#[test]
fn the_profiles_of_the_checkout_claim_no_measurement() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("profiles/machines");
    let mut profiles = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let profile = MachineProfile::read(&path).unwrap();
        assert_eq!(Some(profile.name.as_str()), path.file_stem().unwrap().to_str());
        assert_eq!((profile.measured, profile.measured_unix), (Vec::new(), None));
        assert_eq!(profile.assumed.len(), Rate::ALL.len());
        profiles += 1;
    }
    assert!(profiles >= 2);
}

/// The program in a place of its own: status, stdout, stderr.
fn program(place: &Path, args: &[&str]) -> (i32, String, String) {
    logging(place, args, None)
}

/// The same, with this in DYNAMICINFER_LOG.
fn logging(place: &Path, args: &[&str], filter: Option<&str>) -> (i32, String, String) {
    let mut command = Command::new(programs::program(args));
    command.args(args).current_dir(place).stdin(Stdio::null());
    command.env("XDG_CACHE_HOME", place.join("cache")).env("XDG_DATA_HOME", place.join("data"));
    command.env_remove("DYNAMICINFER_LOG").env_remove("DYNAMICINFER_ASSETS");
    command.envs(filter.map(|filter| ("DYNAMICINFER_LOG", filter)));
    let done = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let (out, err) = (text(done.stdout), text(done.stderr));
    assert!(!err.contains("panicked"), "{args:?}: {err}");
    (done.status.code().unwrap(), out, err)
}

#[test]
fn a_model_is_planned_and_its_placement_checked() {
    let place = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| program(place.path(), args);
    let (model, other) = (fixture("relullama"), fixture("opt"));
    let (model, other) = (model.to_str().unwrap(), other.to_str().unwrap());
    let base = ["plan", model, "--machine", "rtx-3060-12gb"];
    let plan = |more: &[&str]| run(&[&base[..], more].concat());

    let (code, out, err) = plan(&["--ffn-share", "0.5", "--json"]);
    assert_eq!(code, 0, "{err}");
    assert!(err.contains("this model has no activation profile, so every neuron counts the same"), "{err}");
    let json: Json = serde_json::from_str(&out).unwrap();
    let keys: Vec<&String> = json.as_object().unwrap().keys().collect();
    let wanted = "budget_bytes total_bytes min_bytes without_neurons_bytes full_bytes parts layers streamed_bytes streamed_layers chunk sequences objective gap details";
    assert_eq!(keys, wanted.split(' ').collect::<Vec<_>>());
    let pinned = &json["details"]["pinned_bytes"];
    assert_eq!(pinned, &json["parts"][6]["host_bytes"], "every neuron block, and nothing else");
    let names: Vec<_> = json["parts"].as_array().unwrap().iter().map(|p| p["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["attention", "embeddings", "head", "predictors", "kv", "buffers", "ffn_slots"]);
    let sum: u64 = json["parts"].as_array().unwrap().iter().map(|p| p["bytes"].as_u64().unwrap()).sum();
    assert_eq!(sum, json["total_bytes"].as_u64().unwrap());

    // The budget is asked for in the words of the refusal.
    let (code, out, err) = plan(&["--vram", "1"]);
    assert_eq!((code, out.as_str()), (6, ""));
    let min = json["min_bytes"].to_string();
    assert!(err.contains(&format!("a budget of 1 bytes is below the {min} that")), "{err}");
    let (code, out, _) = plan(&["--vram", &min]);
    assert_eq!(code, 0);
    for line in ["attention", "embeddings", "head", "predictors", "keys and values", "buffers", "FFN slots", "total"] {
        assert!(out.lines().any(|l| l.trim_start().starts_with(line)), "{line} in {out}");
    }
    assert!(
        out.contains("\npinned for the GPU: ") && out.contains("(all movable weights), which cannot be swapped"),
        "{out}"
    );
    let (code, out, _) = plan(&["--vram", "8GiB", "--parallel", "3"]);
    assert!(code == 0 && out.contains("keys and values (3 of 3 on the device)"), "{out}");
    assert_eq!(plan(&["--vram", "8GiB", "--parallel", "33"]).0, 2);

    let budget = json["budget_bytes"].to_string();
    for policy in ["static", "random", "none"] {
        let (code, _, err) = plan(&["--vram", &budget, "-o", "p.json", "--force", "--policy", policy]);
        assert_eq!(code, 0, "{err}");
        assert_eq!(plan(&["--vram", &budget, "--check", "p.json"]).0, 0);
    }
    let (code, _, err) = plan(&["--vram", &budget, "-o", "p.json"]);
    assert_eq!((code, err.trim()), (2, "dynamicinfer: p.json already exists; add --force to replace it"));
    let (code, _, err) = plan(&["--vram", &min, "--check", "p.json"]);
    assert_eq!(code, 6, "{err}");
    assert!(err.contains("or plan again"), "{err}");
    let (code, _, err) = run(&["plan", other, "--machine", "rtx-4090", "--vram", "8GiB", "--check", "p.json"]);
    assert_eq!(code, 5);
    assert!(err.contains("this placement belongs to another model") && err.contains("make it again with"), "{err}");
}

#[test]
fn a_profile_decides_which_neurons_are_taken() {
    let place = tempfile::tempdir().unwrap();
    let model = fixture("relullama");
    let model = model.to_str().unwrap();
    std::fs::write(place.path().join("text"), "once upon a time there was a model of a few neurons. ".repeat(8))
        .unwrap();
    let (code, _, err) = program(place.path(), &["profile", model, "--text", "text", "-o", "x.profile"]);
    assert_eq!(code, 0, "{err}");
    // Without a cost of synchronisation no layer is too small to be split.
    let profile = MachineProfile { copy_us: 1e-9, sync_us: 1e-9, link_gb_s: 1e6, ..machine() };
    profile.write(&place.path().join("m.toml")).unwrap();
    let args = [
        "plan",
        model,
        "--machine",
        "m.toml",
        "--profile",
        "x.profile",
        "--ffn-share",
        "0.5",
        "-o",
        "p.json",
        "--json",
    ];
    let (code, out, err) = program(place.path(), &args);
    assert_eq!(code, 0, "{err}");
    let json: Json = serde_json::from_str(&out).unwrap();
    assert!(json["details"]["impacts_from"].as_str().unwrap().ends_with("tokens of x.profile"), "{out}");
    let (objective, total) = (json["objective"].as_u64().unwrap(), json["details"]["total_impact"].as_u64().unwrap());
    assert!(2 * objective > total, "{objective} of {total}: half of the neurons, the best, have more than half");

    let file = dynamicinfer::formats::profile_file::open(&place.path().join("x.profile")).unwrap();
    let counts = dynamicinfer::profile::Profile::read(&file).unwrap();
    let placement = PlacementFile::read(&place.path().join("p.json")).unwrap();
    let on_device = placement.layers.iter().enumerate().flat_map(|(l, layer)| {
        let counts = counts.counts(l);
        layer.neurons.iter().map(move |&n| counts[n as usize]).collect::<Vec<_>>()
    });
    assert_eq!(on_device.sum::<u64>(), objective);
}

#[test]
fn wrong_budgets_are_refused_in_words() {
    let place = tempfile::tempdir().unwrap();
    std::fs::write(place.path().join("bad.toml"), "name = 3").unwrap();
    let cases: &[(&[&str], i32, &str)] = &[
        (&["--vram", "0"], 2, "'0' is zero; write 8GiB"),
        (&["--vram", "-8GiB"], 2, "'-8GiB' is negative; write 8GiB"),
        (&["--vram", "8Gib/s"], 2, "'8Gib/s' is not a size; write 8GiB"),
        (&["--vram", "99999999TiB"], 2, "'99999999TiB' is more than any memory holds (1024 TiB)"),
        (&["--vram", "8GiB", "--ram", "0"], 2, "'0' is zero"),
        (&["--vram", "8GiB", "--ram", "1GiB"], 6, "--ram 1073741824 is below the "),
        (&["--vram", "64KiB"], 6, "a budget of 65536 bytes is below the "),
        (&[], 2, "the plan needs a target: --vram 8GiB"),
        (&["--ffn-share", "0"], 2, "--ffn-share 0: give a share above 0 and at most 1"),
        (&["--ffn-share", "-0.5"], 2, "--ffn-share -0.5: give a share"),
        (&["--ffn-share", "1.01"], 2, "--ffn-share 1.01: give a share"),
        (&["--ffn-share", "nan"], 2, "--ffn-share NaN: give a share"),
        (&["--vram", "8GiB", "-c", "0"], 2, "-c 0: give 1 to 16777216"),
        (&["--vram", "8GiB", "--ilp", "0"], 2, "--ilp 0: give seconds above 0"),
        (&["--vram", "8GiB", "--predictor", "mlp"], 2, "--predictor mlp: this model has none yet"),
        (&["--vram", "8GiB", "--machine", "cray"], 2, "--machine cray: there is no such profile; make one with"),
        (&["--vram", "8GiB", "--machine", "a b"], 2, "--machine: 'a b' is no name"),
        (&["--vram", "8GiB", "--machine", "bad.toml"], 5, "bad.toml: not a machine profile: "),
        (&["--vram", "8GiB", "-o", "x.json"], 2, "cannot be used with"),
    ];
    for (args, code, want) in cases {
        // A machine that is named twice is another complaint.
        let named: &[&str] = if args.contains(&"--machine") { &[] } else { &["--machine", "rtx-4090"] };
        let (found, out, err) = program(place.path(), &[&["plan", "--shape", "llama-7b"], named, args].concat());
        assert_eq!((found, out.as_str()), (*code, ""), "{args:?}: {err}");
        assert!(err.contains(want), "{args:?}: {err}");
    }
    let (code, _, err) = program(place.path(), &["plan", "--shape", "llama-8b", "--vram", "8GiB"]);
    let known = "llama-7b, llama-13b, llama-70b, qwen3-30b-a3b, qwen3.5-35b-a3b, gpt-oss-20b, gpt-oss-120b, mixtral-8x7b, smallthinker-21b";
    assert_eq!((code, err.trim()), (2, &*format!("dynamicinfer: --shape llama-8b: known are {known}")));
    for (args, want) in [
        (&["measure", "--save", "x", "--device-gb-s", "0"][..], "--device-gb-s: is 0; it must be above 0"),
        (&["measure", "--save", "x", "--sync-us", "-3"], "--sync-us: is -3; it must be above 0"),
        (&["measure", "--save", "../", "--copy-us", "nan"], "--save: '' is no name"),
        (&["measure", "--save", "a b"], "--save: 'a b' is no name"),
        (&["measure", "--link-gb-s", "3"], "--save <NAME>"),
    ] {
        let (code, out, err) = program(place.path(), args);
        assert_eq!((code, out.as_str()), (2, ""), "{args:?}: {err}");
        assert!(err.contains(want), "{args:?}: {err}");
    }
}

#[test]
fn without_a_profile_the_machine_is_measured_and_said_to_be() {
    let place = tempfile::tempdir().unwrap();
    let args = ["plan", "--shape", "llama-7b", "--vram", "8GiB"];
    let (code, out, err) = program(place.path(), &args);
    assert_eq!(code, 0, "{err}");
    assert!(err.contains("there is no machine profile; measuring this one for two seconds"), "{err}");
    assert!(out.contains("measured dram_gb_s ") && out.contains("assumed device_gb_s 360.0000"), "{out}");

    let save = ["measure", "-t", "1", "--save", "default", "--device-gb-s", "900", "--link-gb-s", "25", "--force"];
    let (code, _, err) = program(place.path(), &save);
    assert_eq!(code, 0, "{err}");
    for rate in ["dram_gb_s", "host_gflops", "call_us"] {
        assert!(err.lines().any(|line| line.starts_with(rate) && line.ends_with(" in 5 rounds")), "{rate}: {err}");
    }
    let saved = MachineProfile::read(&place.path().join("data/dynamicinfer/machines/default.toml")).unwrap();
    assert_eq!((saved.name.as_str(), saved.device_gb_s, saved.link_gb_s), ("default", 900.0, 25.0));
    assert_eq!(saved.measured, [Rate::DramGbS, Rate::HostGflops, Rate::CallUs]);
    let (code, out, err) = program(place.path(), &args);
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.contains("machine default: measured dram_gb_s "), "{out}");
}

/// With gates that are computed, one threshold for device and CPU, or experts, the text is the same whatever the budget does meanwhile.
#[test]
fn no_budget_changes_a_text_that_is_to_be_deterministic() {
    let place = tempfile::tempdir().unwrap();
    let text = |model: &str, predictor: &str, more: &[&str]| -> String {
        let mut args = vec!["run", model, "Once upon a time", "--temp", "0", "-n", "60", "--ignore-eos", "--json"];
        args.extend(["--predictor", predictor, "--no-history"]);
        args.extend(more);
        let (code, out, err) = program(place.path(), &args);
        assert_eq!(code, 0, "{err}");
        let answer: Json = serde_json::from_str(&out).unwrap();
        if !more.is_empty() {
            let (peak, budget) = (&answer["peak_device_bytes"], &answer["budget_bytes"]);
            assert!(peak.as_u64().unwrap() <= budget.as_u64().unwrap(), "{answer}");
            assert!(answer["migrations"].as_u64().unwrap() > 0, "{answer}");
        }
        answer["text"].as_str().unwrap().to_owned()
    };
    for (model, predictor) in [("demo", "exact"), ("demo", "mlp"), ("demo-moe", "dense")] {
        let alone = text(model, predictor, &[]);
        for schedule in ["5=9MiB,20=16MiB,40=9MiB", "1=16MiB,30=8400000"] {
            let device = ["--device", "virtual", "--ffn-share", "0.5", "--machine", "demo-pc", "--deterministic"];
            let more = [&device[..], &["--vram-schedule", schedule]].concat();
            assert_eq!(text(model, predictor, &more), alone, "{model}, {predictor}, {schedule}");
        }
    }
}

#[test]
fn the_log_says_why_neurons_thresholds_and_the_budget_moved_and_only_if_asked() {
    let place = tempfile::tempdir().unwrap();
    let args = ["run", "demo", "Once upon a time", "--temp", "0", "-n", "150", "--ignore-eos", "--no-history"];
    let device = ["--predictor", "mlp", "--device", "virtual", "--ffn-share", "0.5", "--machine", "demo-pc"];
    let args = [&args[..], &device, &["--policy", "full", "--vram-schedule", "60=9MiB,100=12MiB"]].concat();
    let said = |filter: Option<&str>| {
        let (code, _, err) = logging(place.path(), &args, filter);
        assert_eq!(code, 0, "{err}");
        err
    };
    let (debug, trace) = (said(Some("debug")), said(Some("dynamicinfer=trace")));
    let with = |said: &str, all: &[&str]| said.lines().any(|line| all.iter().all(|word| line.contains(word)));
    let events: [&[&str]; 4] = [
        &["scheduler: moves token=", " layer=", " neurons=", " came=", " left=", " moving=true"],
        &["scheduler: thresholds token=", " cpu_before=", " device_after=", " cpu_ns=", " device_ns="],
        &["scheduler: rates token=", " link_gb_s=", " layer_us="],
        &["request{id=1 ", "budget bytes_before=", " bytes_after=9437184 ", " slots_after="],
    ];
    for all in events {
        assert!(with(&debug, all), "{all:?} is not in\n{debug}");
    }
    // What moves begins in a layer of a pass of the request.
    let begins = ["request{id=1 ", ":pass{number=", " tokens=1 sequences=1}:layer{number=", "moves begin layer="];
    assert!(with(&trace, &begins) && !with(&debug, &["layer{number="]), "{trace}");
    let silent = said(None);
    for word in ["moves", "thresholds", "rates", "bytes_before", "request{", "pass{"] {
        assert!(!silent.contains(word), "{word}: {silent}");
    }
}

/// Without a device: what a plan of memory and disk says is what the program takes, and what is asked for is kept to.
#[test]
fn a_plan_of_memory_and_disk_is_what_the_program_runs_with() {
    let place = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| program(place.path(), args);
    let size = ["--hidden", "512", "--layers", "2", "--ffn", "20000", "--heads", "4", "--kv-heads", "2"];
    let (code, _, err) = run(&[
        &["synth", "-o", "m.neurons", "--vocab", "300", "--quant", "f16", "--active", "0.1"],
        &size[..],
    ]
    .concat());
    assert_eq!(code, 0, "{err}");
    let plan = |args: &[&str]| {
        let (code, out, err) = run(&[&["plan", "m.neurons", "-c", "64", "-t", "1", "--json"], args].concat());
        assert_eq!(code, 0, "{err}");
        serde_json::from_str::<serde_json::Value>(&out).unwrap()
    };
    // A speed that the least memory reaches takes no more.
    let slow = plan(&["--min-speed", "0.001"]);
    let (least, all) = (slow["least_bytes"].as_u64().unwrap(), slow["all_bytes"].as_u64().unwrap());
    assert_eq!(slow["plan"]["bytes"].as_f64().unwrap() as u64, least);
    let between = (least + all) / 2;
    let planned = plan(&["--ram", &between.to_string()]);
    assert_eq!(planned["plan"]["bytes"].as_f64().unwrap() as u64, between);
    let others = planned["others"].as_array().unwrap();
    let misses: Vec<f64> = others.iter().map(|plan| plan["miss"].as_f64().unwrap()).collect();
    assert!(misses.windows(2).all(|pair| pair[1] <= pair[0] + 0.02), "{misses:?}");
    assert!(misses[0] > 0.5 && misses[misses.len() - 1] == 0.0, "{misses:?}");

    // Of a text that was recorded the neurons are those of its tokens. With one letter it is always the same tenth, of which nothing is missing
    // once it is there, where a drawn token always misses some.
    std::fs::write(place.path().join("a.txt"), "a".repeat(150)).unwrap();
    let (code, _, err) = run(&["record", "m.neurons", "--text", "a.txt", "-o", "a.trace"]);
    assert_eq!(code, 0, "{err}");
    let missing =
        |more: &[&str]| plan(&[&["--ram", &between.to_string()], more].concat())["plan"]["miss"].as_f64().unwrap();
    // Each plan measures the disk, which decides how much of the memory reads take: a disturbed measurement leaves no room in one of both.
    let fewer = |_| missing(&["--trace", "a.trace"]) < 0.8 * missing(&[]);
    assert!((0..5).any(fewer), "a recorded letter is missing as often as drawn neurons");
    let (code, _, err) = run(&["plan", "demo", "--ram", "1GiB", "--trace", "a.trace"]);
    assert!(code == 2 && err.contains("the trace belongs to another model"), "{err}");

    // Without a predictor all neurons come from disk, whatever the memory, until all of them fit.
    let dense = plan(&["--ram", &between.to_string(), "--predictor", "none"]);
    assert_eq!(dense["plan"]["miss"], 1.0);
    assert!(dense["plan"]["read_bytes"].as_f64().unwrap() >= f64::from(2 * 20_000 * 3 * 2 * 512), "{dense}");
    let speed = |more: &[&str]| plan(&[&["--ram", &between.to_string()], more].concat())["plan"]["speed"].as_f64();
    let sum = |more: &[&str]| (0..3).filter_map(|_| speed(more)).sum::<f64>();
    let speeds = [sum(&["--predictor", "none"]), sum(&[])];
    assert!(speeds[0] < speeds[1], "{speeds:?}");

    // The least memory is the least that it runs with.
    let answer = |ram: u64| {
        let ram = ram.to_string();
        run(&["run", "m.neurons", "a", "-n", "1", "-c", "64", "-t", "1", "--raw", "--ignore-eos", "--ram", &ram])
    };
    let (code, _, err) = answer(least);
    assert_eq!(code, 0, "{err}");
    // How much less it takes depends on the disk, but what it works with it always takes.
    let (code, _, err) = answer(60 << 20);
    assert!(code == 6 && err.contains("with all of its FFNs on disk"), "{code} {err}");
    let (code, _, err) = run(&["plan", "m.neurons", "-c", "64", "--ram", "60MiB"]);
    assert!(code == 6 && err.contains("with all of its FFNs on disk"), "{code} {err}");

    // What nothing reaches is said to be out of reach.
    let (code, _, err) = run(&["plan", "m.neurons", "-c", "64", "--min-speed", "1000000"]);
    assert!(code == 6 && err.contains("are out of reach"), "{code} {err}");
    let (code, out, _) = run(&["plan", "m.neurons", "-c", "64", "-t", "1", "--min-speed", "0.001"]);
    assert!(code == 0 && out.contains("run it: dynamicinfer run m.neurons --ram ") && out.contains(" -c 64"), "{out}");
    for (args, said) in [
        (&["--min-speed", "0"][..], "give tokens/s above 0"),
        (&["--ram", "100MiB", "-o", "p.json"], "--output needs a plan for a device"),
        (&["--ram", "100MiB", "--vram", "1GiB", "--min-speed", "5"], "cannot be used with"),
    ] {
        let (code, _, err) = run(&[&["plan", "m.neurons"], args].concat());
        assert!(code == 2 && err.contains(said), "{args:?}: {code} {err}");
    }
    let (code, _, err) = run(&["plan", "demo", "--ram", "1GiB"]);
    assert!(code == 2 && err.contains("nothing is to be planned"), "{code} {err}");
}
