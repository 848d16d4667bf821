//! Mixtures of experts beside what every model has to hold: what profilers and traces see of them, what cannot be asked of them, and files
//! that are none.

#[path = "support/gguf.rs"]
mod gguf_file;

use dynamicinfer::cpu::{Isa, Kernels};
use dynamicinfer::engine::{Engine, Logits, Observer, Seen, Session};
use dynamicinfer::error::Error;
use dynamicinfer::formats::gguf::Value;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::formats::trace_file::{TraceFile, TraceSection};
use dynamicinfer::formats::{TensorInfo, safetensors};
use dynamicinfer::lab::record::{Request, record};
use dynamicinfer::lab::replay::active;
use dynamicinfer::model::source::Source;
use dynamicinfer::model::weights::Layer;
use dynamicinfer::model::{FfnWeights, KvType, Model};
use dynamicinfer::open::{EngineOptions, ModelOptions, Quiet, layer_blocks, open};
use dynamicinfer::pack::{PackOptions, pack};
use gguf_file::{File, Tensor, fixture};
use std::path::{Path, PathBuf};

const MODELS: [&str; 4] = ["qwen3-moe", "mixtral.gguf", "turbosparse-mixtral", "smallthinker.gguf"];

fn engine(name: &str) -> Engine {
    Engine::new(Model::in_place(Source::open(&fixture(name), None).unwrap()).unwrap(), 2, Kernels::best())
}

fn ids(n: u32) -> Vec<u32> {
    (0..n).map(|i| 5 + i * 37 % 90).collect()
}

/// The weights of every layer, as an observer sees them.
#[derive(Default)]
struct Weights(Vec<Vec<f32>>);

impl Observer for Weights {
    fn layer(&mut self, seen: &Seen<'_>) {
        assert_eq!(seen.gates.len(), seen.activations.len());
        self.0.push(seen.activations.to_vec());
    }
}

#[test]
fn each_token_has_as_many_experts_as_the_model_says_and_their_weights_are_one_together() {
    for name in MODELS {
        let mut engine = engine(name);
        let experts = engine.model.config.mixtures().next().unwrap();
        let mut session = Session::new(&engine, 64, KvType::F32).unwrap();
        let mut weights = Weights::default();
        engine.forward_observed(&mut session.kv, &ids(40), Logits::None, &mut weights);
        assert_eq!(weights.0.len(), engine.model.config.layers().len());
        for token in weights.0.iter().flat_map(|layer| layer.chunks_exact(experts.count)) {
            assert_eq!(token.iter().filter(|&&weight| weight > 0.0).count(), experts.used, "{name}");
            assert!((token.iter().sum::<f32>() - 1.0).abs() < 1e-5, "{name}: {token:?}");
        }
    }
}

#[test]
fn the_report_counts_the_experts_that_were_computed_and_what_was_read_of_them() {
    let mut engine = engine("qwen3-moe");
    let (c, tokens) = (engine.model.config.clone(), ids(3));
    let experts = c.mixtures().next().unwrap();
    let mut session = Session::new(&engine, 64, KvType::F32).unwrap();
    let mut read = Vec::new();
    for &token in &tokens {
        engine.report.clear();
        engine.forward(&mut session.kv, &[token], Logits::Last);
        assert_eq!(engine.report.computed, vec![experts.used as u64; c.layers().len()]);
        read.push(engine.report.ffn_bytes);
    }
    // Three matrices of bf16 for each expert, and the router in bf16.
    let each = experts.used * 3 * c.hidden * c.widest_ffn() * 2 + experts.count * c.hidden * 2;
    assert_eq!(read, vec![(c.layers().len() * each) as u64; tokens.len()]);
    assert!((engine.report.computed_share(&c) - experts.used as f64 / experts.count as f64).abs() < 1e-9);
}

/// The trace that replay and simulator read: what the routers chose, surely at their own layer and mostly from the layer before.
#[test]
fn a_trace_holds_the_experts_that_were_chosen() {
    let dir = tempfile::tempdir().unwrap();
    let mut engines: Vec<(&str, Engine)> = MODELS.map(|name| (name, engine(name))).into();
    let biased = biased("qwen3-moe.gguf", dir.path(), 2);
    engines.push(("with a selection bias", Engine::new(opened(&biased), 2, Kernels::best())));
    for (name, mut engine) in engines {
        let path = dir.path().join("a.trace");
        let c = engine.model.config.clone();
        let experts = c.mixtures().next().unwrap();
        let request = Request {
            texts: vec![("a".into(), ids(50)), ("b".into(), ids(9))],
            window: 40,
            kv: KvType::F32,
            predictor: None,
            activation_thresholds: vec![0.0; c.layers().len()],
            ahead: 1,
            lookaheads: Vec::new(),
            made: serde_json::Value::Null,
        };
        let recall = record(&mut engine, &request, &path, |_, _| Ok(())).unwrap()[0];
        let trace = TraceFile::open(&path).unwrap();
        let h = trace.header();
        assert_eq!((h.layers, h.ffn, h.predictor.as_str()), (c.layers().len(), experts.count, "router"), "{name}");
        assert_eq!(h.block_bytes as u64, engine.model.layers[0].ffn.cluster_bytes());
        let (mut now, mut found, mut all) = (Vec::new(), 0, 0);
        for (layer, token) in (0..c.layers().len()).flat_map(|layer| (0..59).map(move |token| (layer, token))) {
            active(trace.row(TraceSection::Active, layer, token), &mut now);
            assert_eq!(now.len(), experts.used, "{name}");
            let sure: Vec<u32> = set(trace.row(TraceSection::Own, layer, token));
            assert_eq!(sure, now, "{name}, layer {layer}, token {token}");
            if layer > 0 {
                let early = set(trace.row(TraceSection::Ahead, layer, token));
                assert_eq!(early.len(), experts.used);
                all += now.len() as u64;
                found += now.iter().filter(|expert| early.contains(expert)).count() as u64;
            }
        }
        assert_eq!((recall.active, recall.found), (all, found), "{name}");
    }
}

/// The clusters with a probability of 1.
fn set(row: &[u8]) -> Vec<u32> {
    row.iter().enumerate().filter(|(_, byte)| **byte == 255).map(|(i, _)| i as u32).collect()
}

/// The many tokens of a prompt that have an expert go through other kernels than a few do, and give the same.
#[test]
fn a_prompt_in_one_piece_gives_what_small_pieces_give() {
    // A number that is rounded to int8 may fall to the other side once another order of summing has moved it.
    for (name, limit) in [("k256-moe.q4_k_m.gguf", 1e-2), ("mixtral", 1e-4), ("smallthinker.gguf", 1e-4)] {
        for isa in Isa::ALL {
            let Some(kernels) = Kernels::of(isa) else { continue };
            let model = || Model::in_place(Source::open(&fixture(name), None).unwrap()).unwrap();
            let logits = [200, 40, 7].map(|piece| {
                let mut engine = Engine::new(model(), 2, kernels);
                let mut session = Session::new(&engine, 256, KvType::F32).unwrap();
                let pieces = ids(200).chunks(piece).map(<[u32]>::to_vec).collect::<Vec<_>>();
                let each = |ids: Vec<u32>| engine.forward(&mut session.kv, &ids, Logits::All).to_vec();
                pieces.into_iter().flat_map(each).collect::<Vec<f32>>()
            });
            let top = logits[0].iter().fold(0f32, |top, x| top.max(x.abs()));
            for other in &logits[1..] {
                let far = logits[0].iter().zip(other).fold(0f32, |far, (a, b)| far.max((a - b).abs())) / top;
                assert!(far < limit, "{name} on {}: off by {far}", isa.name());
            }
        }
    }
}

/// Asking the system for experts is advice.
#[test]
fn asking_for_experts_changes_no_bit() {
    for name in MODELS {
        let bits = [false, true].map(|asks| {
            let mut engine = engine(name);
            if asks {
                engine.ask_for_experts();
            }
            let mut session = Session::new(&engine, 64, KvType::F16).unwrap();
            engine.forward(&mut session.kv, &ids(40), Logits::All).iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        });
        assert!(bits[0] == bits[1], "{name}");
    }
}

fn usage<T>(result: Result<T, Error>, part: &str) {
    match result {
        Err(Error::Usage(why)) => assert!(why.contains(part), "{why}"),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("was opened"),
    }
}

#[test]
fn what_a_mixture_cannot_do_is_said_before_anything_is_written() {
    let cache = tempfile::tempdir().unwrap();
    // SAFETY: the only test of this binary that looks at the environment.
    unsafe { std::env::set_var("XDG_CACHE_HOME", cache.path()) };
    for name in ["qwen3-moe", "qwen3-moe.gguf"] {
        let options = EngineOptions::new(fixture(name));
        assert!(!options.open_model(&Quiet).unwrap().has_neurons());
        for (name, why) in [(name, "mixture of experts with silu"), ("smallthinker.gguf", "pack it first")] {
            let mut predicted = EngineOptions::new(fixture(name));
            predicted.sparsity.predictor = "mlp".parse().unwrap();
            usage(open(&predicted, &Quiet), why);
        }
        let quantised = ModelOptions { quant: Some(Quant::Q8.into()), ..ModelOptions::new(fixture(name)) };
        usage(quantised.open(&Quiet), "--quant: a mixture of experts is read where it lies");
    }
    assert_eq!(std::fs::read_dir(cache.path()).unwrap().count(), 0, "something was written");
}

/// GGUF's numbers of types.
const F32: u32 = 0;
const F16: u32 = 1;

/// What opening a changed file says.
fn refused(from: &str, change: impl FnOnce(&mut File)) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let mut file = File::read(from);
    change(&mut file);
    std::fs::write(&path, file.bytes()).unwrap();
    let error = Source::open(&path, None).and_then(Model::in_place).err().expect("it was opened");
    assert_eq!(error.exit_code(), 5, "{error}");
    error.to_string()
}

#[test]
fn damaged_mixtures_are_refused_with_the_tensor() {
    let says = |why: String, part: &str| assert!(why.contains(part), "{part} is not in: {why}");
    let split = |name: &str| name.to_owned() + ".weight";
    says(refused("mixtral.split.gguf", |f| f.drop_tensor(&split("blk.1.ffn_up.2"))), "blk.1.ffn_up.2.weight or ");
    says(
        refused("mixtral.split.gguf", |f| {
            let tensor = f.tensor(&split("blk.0.ffn_down.3"));
            tensor.shape.swap(0, 1);
            tensor.shape[0] /= 2;
            tensor.data.truncate(tensor.data.len() / 2);
        }),
        "blk.0.ffn_down.3.weight: has shape",
    );
    says(
        refused("mixtral.split.gguf", |f| {
            let tensor = f.tensor(&split("blk.1.ffn_up.2"));
            assert_eq!(tensor.kind, F16);
            (tensor.kind, tensor.data) = (F32, vec![0; 2 * tensor.data.len()]);
        }),
        "blk.1.ffn_gate.2.weight: the experts of layer 1 have different types: number 2 is unlike number 0",
    );
    says(
        refused("mixtral.gguf", |f| f.set("llama.expert_count", Value::U32(3))),
        "blk.0.ffn_gate_inp.weight: has shape [4, 64], the model's configuration needs [3, 64]",
    );
    says(
        refused("mixtral.gguf", |f| {
            let tensor = f.tensor(&split("blk.1.ffn_gate_inp"));
            tensor.data[40..44].copy_from_slice(&f32::NAN.to_le_bytes());
        }),
        "blk.1.ffn_gate_inp.weight: holds NaN at byte",
    );
    says(refused("mixtral.gguf", |f| f.drop_tensor(&split("blk.0.ffn_down_exps"))), "ffn_down_exps.weight: the tensor");
    says(
        refused("mixtral.gguf", |f| f.set("llama.expert_used_count", Value::U32(5))),
        "5 experts for a token, of 4 that there are",
    );
    says(
        refused("qwen3-moe.gguf", |f| f.set("qwen3moe.expert_shared_count", Value::U32(1))),
        "qwen3moe.expert_shared_count: is 1; only mixtures without such parts are supported",
    );
}

#[test]
fn damaged_shared_experts_are_refused_with_the_tensor() {
    let says = |change: &dyn Fn(&mut File), part: &str| {
        let why = refused("qwen2-moe.gguf", change);
        assert!(why.contains(part), "{part} is not in: {why}");
    };
    says(&|f| f.drop_tensor("blk.1.ffn_up_shexp.weight"), "blk.1.ffn_up_shexp.weight: the tensor is missing");
    says(
        &|f| f.drop_tensor("blk.0.ffn_gate_inp_shexp.weight"),
        "blk.0.ffn_gate_inp_shexp.weight: the tensor is missing",
    );
    let key = "qwen2moe.expert_shared_feed_forward_length";
    says(&|f| f.set(key, Value::U32(0)), "the shared expert's size is 0");
    says(
        &|f| f.set(key, Value::U32(64)),
        "blk.0.ffn_gate_shexp.weight: has shape [96, 64], the model's configuration needs [64, 64]",
    );
    says(
        &|f| {
            let row = f.tensor("blk.1.ffn_gate_inp_shexp.weight");
            row.shape = vec![32];
            row.data.truncate(4 * 32);
        },
        "blk.1.ffn_gate_inp_shexp.weight: has shape [32], the model's configuration needs [1, 64]",
    );
    says(
        &|f| f.tensor("blk.1.ffn_gate_inp_shexp.weight").data[8..12].copy_from_slice(&f32::INFINITY.to_le_bytes()),
        "blk.1.ffn_gate_inp_shexp.weight: holds inf",
    );
    // Left out it would give other answers.
    let other = refused("qwen3-moe.gguf", |f| {
        let down = f.tensor("blk.0.ffn_down_exps.weight");
        let shared = Tensor {
            name: "blk.0.ffn_down_shexp.weight".into(),
            data: down.data.clone(),
            shape: down.shape.clone(),
            ..*down
        };
        f.tensors.push(shared);
    });
    assert!(other.contains("its layers have shared experts, which is not supported for qwen3moe"), "{other}");
}

#[test]
fn a_shared_expert_is_read_in_every_pass_and_counts_as_weights() {
    let mut engine = engine("qwen2-moe");
    let c = engine.model.config.clone();
    let experts = c.mixtures().next().unwrap();
    let width = experts.shared.unwrap().width;
    let mut session = Session::new(&engine, 64, KvType::F32).unwrap();
    engine.forward(&mut session.kv, &[7], Logits::Last);
    assert_eq!(engine.report.computed, vec![experts.used as u64; c.layers().len()], "experts that were chosen");
    let (of_shared, router) = (3 * c.hidden * width, experts.count * c.hidden);
    let read = 2 * c.layers().len() * (experts.used * 3 * c.hidden * c.widest_ffn() + of_shared + router);
    assert_eq!(engine.report.ffn_bytes, read as u64);
    // What may be left on disk is what the router chooses.
    let blocks = layer_blocks(&engine.model).unwrap();
    assert!(blocks.iter().all(|layer| layer.block_bytes() == 2 * 3 * c.hidden * c.widest_ffn()));
    // Everything is stored in 16 bits, and only matrices are counted; routers are no parameters here.
    let matrices: u64 = engine.model.bytes_by_type().iter().map(|(_, bytes)| bytes / 2).sum();
    let embeddings = 2 * c.vocab * c.hidden;
    assert_eq!(c.parameters(), matrices + (embeddings - c.layers().len() * router) as u64);
}

/// Logits of a prompt in one piece and of tokens by themselves, as bits.
fn bits(model: Model, kernels: Kernels) -> Vec<u32> {
    let mut engine = Engine::new(model, 2, kernels);
    let mut session = Session::new(&engine, 64, KvType::F32).unwrap();
    let pieces = [&ids(50)[..40], &ids(50)[40..41], &ids(50)[41..]].map(<[u32]>::to_vec);
    let each = |ids: Vec<u32>| engine.forward(&mut session.kv, &ids, Logits::All).to_vec();
    pieces.into_iter().flat_map(each).map(f32::to_bits).collect()
}

fn opened(path: &Path) -> Model {
    Model::in_place(Source::open(path, None).unwrap()).unwrap()
}

/// No family that is read has such a shared expert: half of twice as much is the same.
#[test]
fn a_shared_expert_without_a_weight_adds_what_one_with_weight_a_half_and_twice_the_output_does() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("halved.gguf");
    let mut file = File::read("qwen2-moe.gguf");
    for layer in 0..2 {
        file.tensor(&format!("blk.{layer}.ffn_gate_inp_shexp.weight")).data.fill(0);
        for number in file.tensor(&format!("blk.{layer}.ffn_down_shexp.weight")).data.chunks_exact_mut(2) {
            let twice = half::f16::from_le_bytes([number[0], number[1]]).to_f32() * 2.0;
            number.copy_from_slice(&half::f16::from_f32(twice).to_le_bytes());
        }
    }
    std::fs::write(&path, file.bytes()).unwrap();
    for kernels in Isa::ALL.into_iter().filter_map(Kernels::of) {
        let mut plain = opened(&fixture("qwen2-moe.gguf"));
        let weighted = bits(opened(&fixture("qwen2-moe.gguf")), kernels);
        for layer in &mut plain.layers {
            let FfnWeights::Experts(experts) = &mut layer.ffn else { panic!("a mixture") };
            experts.shared.as_mut().unwrap().router.clear();
        }
        let plain = bits(plain, kernels);
        assert!(plain == bits(opened(&path), kernels), "{}", kernels.isa.name());
        assert!(plain != weighted);
    }
}

/// A copy of a GGUF in `dir`, whose first layers have a selection bias: more than scores differ by, the more the later the expert.
fn biased(from: &str, dir: &Path, layers: usize) -> PathBuf {
    let mut file = File::read(from);
    for layer in 0..layers {
        let count = file.tensor(&format!("blk.{layer}.ffn_gate_inp.weight")).shape[0];
        let data = (0..count).flat_map(|expert| (2.0 * expert as f32).to_le_bytes()).collect();
        file.tensors.push(Tensor {
            name: format!("blk.{layer}.exp_probs_b.bias"),
            kind: F32,
            shape: vec![count],
            data,
        });
    }
    let path = dir.join("biased.gguf");
    std::fs::write(&path, file.bytes()).unwrap();
    path
}

/// The router's products and the weights of every layer, as an observer sees them.
#[derive(Default)]
struct Routers(Vec<[Vec<f32>; 2]>);

impl Observer for Routers {
    fn layer(&mut self, seen: &Seen<'_>) {
        self.0.push([seen.gates.to_vec(), seen.activations.to_vec()]);
    }
}

/// No family that is read has one, but a file may.
#[test]
fn a_selection_bias_chooses_experts_and_is_no_part_of_their_weights() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = Engine::new(opened(&biased("qwen3-moe.gguf", dir.path(), 2)), 2, Kernels::best());
    let experts = engine.model.config.mixtures().next().unwrap();
    let first = experts.count - experts.used;
    assert!(experts.selection_bias && experts.normalised && first > 0);
    let mut session = Session::new(&engine, 64, KvType::F32).unwrap();
    let mut routers = Routers::default();
    engine.forward_observed(&mut session.kv, &ids(40), Logits::None, &mut routers);
    for [products, weights] in &routers.0 {
        for (products, weights) in products.chunks_exact(experts.count).zip(weights.chunks_exact(experts.count)) {
            let sum: f32 = products[first..].iter().map(|product| product.exp()).sum();
            for (expert, (product, weight)) in products.iter().zip(weights).enumerate() {
                let wanted = if expert < first { 0.0 } else { product.exp() / sum };
                assert!((weight - wanted).abs() < 1e-5, "{expert}: {weight} is not {wanted}");
            }
        }
    }
}

#[test]
fn a_selection_bias_is_kept_and_refused_where_it_is_damaged_or_would_be_lost() {
    let dir = tempfile::tempdir().unwrap();
    let why = Source::open(&biased("mixtral.gguf", dir.path(), 1), None).map(drop).unwrap_err().to_string();
    assert!(why.contains("blk.1.exp_probs_b.bias: the tensor is missing"), "{why}");
    let source = Source::open(&biased("smallthinker.gguf", dir.path(), 5), None).unwrap();
    let options = PackOptions { types: Quant::F16.into(), orders: None };
    let store = dir.path().join("m.neurons");
    pack(&source, &store, &options, &|_, _| Ok(())).unwrap();
    let kept = |model: Model| {
        let of = |layer: &Layer| layer.ffn.experts().unwrap().selection_bias.clone();
        model.layers.iter().map(of).collect::<Vec<_>>()
    };
    let published = kept(Model::in_place(source).unwrap());
    assert!(published.iter().all(|bias| !bias.is_empty()));
    assert_eq!(kept(Model::open(&store).unwrap()), published);
    let from = fixture("qwen3-moe");
    for file in ["config.json", "tokenizer.json"] {
        std::fs::copy(from.join(file), dir.path().join(file)).unwrap();
    }
    let file = std::fs::read(from.join("model.safetensors")).unwrap();
    let data = |info: &TensorInfo| file[info.offset as usize..][..info.bytes as usize].to_vec();
    let tensors = safetensors::parse(&file, &from).unwrap();
    let mut written: Vec<_> = tensors.iter().map(|info| (info.name.clone(), info.shape.clone(), data(info))).collect();
    written.push(("model.layers.0.mlp.gate.e_score_correction_bias".into(), vec![8], vec![0; 16]));
    std::fs::write(dir.path().join("model.safetensors"), safetensors_of(&written)).unwrap();
    let why = Source::open(dir.path(), None).map(drop).unwrap_err().to_string();
    assert!(why.contains("its router has a selection bias, which is supported in a GGUF only; take a GGUF"), "{why}");
}

/// The first files of Qwen2's mixtures have one size of an FFN, which the shared expert has, and those that a token has together.
#[test]
fn sizes_of_experts_that_a_gguf_does_not_name_follow_from_its_ffn() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("first.gguf");
    let mut file = File::read("qwen2-moe.gguf");
    for key in ["expert_feed_forward_length", "expert_shared_feed_forward_length"] {
        file.remove(&format!("qwen2moe.{key}"));
    }
    std::fs::write(&path, file.bytes()).unwrap();
    let [named, unnamed] = [&fixture("qwen2-moe.gguf"), &path].map(|path| opened(path).description().form);
    assert_eq!(named, unnamed);
    let [named, unnamed] = [&fixture("qwen2-moe.gguf"), &path].map(|path| bits(opened(path), Kernels::best()));
    assert!(named == unnamed);
}

/// One tensor with each expert's gate and up, as llama.cpp's converter can write them.
#[test]
fn a_gguf_with_fused_gates_and_ups_is_the_same_model() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["mixtral.gguf", "qwen3-moe.gguf", "qwen2-moe.gguf", "smallthinker.gguf"] {
        let path = dir.path().join(name);
        let mut file = File::read(name);
        for layer in 0..opened(&fixture(name)).config.layers().len() {
            let [gate, up] = ["gate", "up"].map(|part| format!("blk.{layer}.ffn_{part}_exps.weight"));
            let up_data = file.tensor(&up).data.clone();
            file.drop_tensor(&up);
            let tensor = file.tensor(&gate);
            let each = tensor.data.len() / tensor.shape[0];
            tensor.name = format!("blk.{layer}.ffn_gate_up_exps.weight");
            tensor.shape[1] *= 2;
            tensor.data =
                tensor.data.chunks(each).zip(up_data.chunks(each)).flat_map(|(gate, up)| [gate, up].concat()).collect();
        }
        std::fs::write(&path, file.bytes()).unwrap();
        let [split, fused] = [&fixture(name), &path].map(|path| bits(opened(path), Kernels::best()));
        assert!(split == fused, "{name}");
    }
    let why = refused("mixtral.gguf", |f| {
        let tensor = f.tensor("blk.0.ffn_gate_exps.weight");
        tensor.name = "blk.0.ffn_gate_up_exps.weight".into();
    });
    assert!(
        why.contains(
            "blk.0.ffn_gate_up_exps.weight: has shape [4, 64, 64], the model's configuration needs [4, 128, 64]"
        ),
        "{why}"
    );
}

/// Experts stacked in two tensors of a layer, as transformers 5 writes them.
#[test]
fn a_directory_with_stacked_experts_is_the_same_model() {
    for name in ["qwen3-moe", "qwen2-moe"] {
        let (from, dir) = (fixture(name), tempfile::tempdir().unwrap());
        for file in ["config.json", "tokenizer.json"] {
            std::fs::copy(from.join(file), dir.path().join(file)).unwrap();
        }
        let file = std::fs::read(from.join("model.safetensors")).unwrap();
        let tensors = safetensors::parse(&file, &from).unwrap();
        let of = |info: &TensorInfo| (info.shape.clone(), file[info.offset as usize..][..info.bytes as usize].to_vec());
        let (experts, mut stacked): (Vec<_>, Vec<_>) = tensors.iter().partition(|t| t.name.contains(".experts."));
        let mut written: Vec<(String, Vec<usize>, Vec<u8>)> =
            stacked.drain(..).map(|info| (info.name.clone(), of(info).0, of(info).1)).collect();
        let config = opened(&from).config;
        let count = config.clusters();
        for layer in 0..config.layers().len() {
            let at = format!("model.layers.{layer}.mlp.experts");
            let expert = |expert: usize, part: &str| {
                let name = format!("{at}.{expert}.{part}_proj.weight");
                of(experts.iter().find(|info| info.name == name).unwrap()).1
            };
            let inputs = (0..count).flat_map(|e| [expert(e, "gate"), expert(e, "up")].concat()).collect();
            written.push((format!("{at}.gate_up_proj"), vec![count, 2 * config.widest_ffn(), config.hidden], inputs));
            let downs = (0..count).flat_map(|e| expert(e, "down")).collect();
            written.push((format!("{at}.down_proj"), vec![count, config.hidden, config.widest_ffn()], downs));
        }
        std::fs::write(dir.path().join("model.safetensors"), safetensors_of(&written)).unwrap();
        let [split, stacked] = [&*from, dir.path()].map(|path| bits(opened(path), Kernels::best()));
        assert!(split == stacked, "{name}");
    }
}

/// A file of these tensors in BF16.
fn safetensors_of(tensors: &[(String, Vec<usize>, Vec<u8>)]) -> Vec<u8> {
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, shape, bytes) in tensors {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name.clone(), serde_json::json!({"dtype": "BF16", "shape": shape, "data_offsets": offsets}));
        data.extend_from_slice(bytes);
    }
    let mut header = serde_json::to_vec(&header).unwrap();
    header.resize(header.len().next_multiple_of(8), b' ');
    [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()
}
