//! Attention over latents: what is kept of a position, files of both kinds, and rotations that are scaled.

use crate::bad_models::config_refusal;
use crate::gguf_file::{File, fixture};
use crate::reference::{expected, relative_error};
use dynamicinfer::Error;
use dynamicinfer::cpu::Kernels;
use dynamicinfer::engine::{Engine, Logits, Session};
use dynamicinfer::formats::blocks::BlockType;
use dynamicinfer::formats::gguf::Value;
use dynamicinfer::formats::rows::{self, Quant};
use dynamicinfer::model::config::{RopeScaling, rope_frequencies};
use dynamicinfer::model::latent::LatentHeads;
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{KvCache, KvType, Model};
use serde_json::json;
use std::path::Path;

const VOCAB: usize = 320;

fn open(path: &Path) -> Model {
    Model::in_place(Source::open(path, None).unwrap()).unwrap()
}

fn logits(model: Model, tokens: &[u32], piece: usize, kind: KvType) -> Vec<f32> {
    let mut engine = Engine::new(model, 2, Kernels::best());
    let mut session = Session::new(&engine, tokens.len(), kind).unwrap();
    tokens.chunks(piece).flat_map(|piece| engine.forward(&mut session.kv, piece, Logits::All).to_vec()).collect()
}

#[test]
fn a_position_keeps_its_latent_and_its_rotated_part_alone() {
    for (name, kept) in [("deepseek-v2", 40), ("deepseek-v3", 64), ("deepseek-v3.gguf", 64)] {
        let config = open(&fixture(name)).config;
        assert_eq!(KvCache::bytes_for(&config, 10, KvType::F16), 10 * 2 * 2 * kept, "{name}");
        assert_eq!(KvCache::position_bytes(&config, KvType::F32), 2 * 4 * kept, "{name}");
    }
}

/// Numbers of a position that are no whole blocks are refused with the types that hold them.
#[test]
fn every_type_of_keys_and_values_holds_latents_of_whole_blocks() {
    let expected = expected("deepseek-v3");
    for (kind, most) in [(KvType::F32, 1e-4), (KvType::F16, 5e-3), (KvType::Q8_0, 0.05), (KvType::Q4_0, 0.5)] {
        let found = logits(open(&fixture("deepseek-v3")), &expected.prompt, 40, kind);
        // Of a few tokens another expert is chosen.
        let tokens = found.chunks_exact(VOCAB).zip(expected.prompt_logits.chunks_exact(VOCAB));
        let mut errors: Vec<f32> = tokens.map(|(found, wanted)| relative_error(found, wanted)).collect();
        errors.sort_by(f32::total_cmp);
        let error = errors[errors.len() / 2];
        println!("{}: {error:.1e}", kind.name());
        assert!(error <= most, "{}: {errors:?}", kind.name());
    }
    let refused = KvCache::new(&open(&fixture("deepseek-v2")).config, 10, KvType::Q8_0).map(drop).unwrap_err();
    assert!(matches!(refused, Error::Usage(why) if why.contains("this model's have 40: take f16 or f32")));
}

/// The same file with keys and values in one matrix, as older ones have them, makes the same numbers.
#[test]
fn keys_and_values_in_one_matrix_are_those_of_two() {
    let apart = open(&fixture("deepseek-v3.gguf"));
    assert!(matches!(apart.layers[0].latent.as_ref().unwrap().heads, LatentHeads::Apart(_)));
    let mut file = File::read("deepseek-v3.gguf");
    let [heads, rank, plain, values] = [4, 48, 16, 24];
    for layer in 0..2 {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        let numbers = |name: &str| {
            let tensor = file.tensors.iter().find(|tensor| tensor.name == name).unwrap();
            tensor.data.as_chunks::<2>().0.to_vec()
        };
        let (keys, of_values) = (numbers(&name("attn_k_b")), numbers(&name("attn_v_b")));
        let both = (0..heads).flat_map(|head| {
            let key = |p: usize| (0..rank).map(move |r| (head * rank + r) * plain + p);
            let keys = (0..plain).flat_map(key).map(|at| keys[at]).collect::<Vec<_>>();
            keys.into_iter().chain(of_values[head * values * rank..(head + 1) * values * rank].to_vec())
        });
        let data = both.flatten().collect();
        file.drop_tensor(&name("attn_v_b"));
        let tensor = file.tensor(&name("attn_k_b"));
        (tensor.name, tensor.data) = (name("attn_kv_b"), data);
        tensor.shape = vec![heads * (plain + values), rank];
    }
    for (key, value) in [("key_length", 32), ("value_length", 24), ("head_count_kv", 4)] {
        file.set(&format!("deepseek2.attention.{key}"), Value::U32(value));
    }
    file.remove("deepseek2.attention.key_length_mla");
    file.remove("deepseek2.attention.value_length_mla");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("joined.gguf");
    std::fs::write(&path, file.bytes()).unwrap();
    let joined = open(&path);
    assert!(matches!(joined.layers[0].latent.as_ref().unwrap().heads, LatentHeads::Joined(_)));
    let tokens: Vec<u32> = (0..300).map(|i| 5 + i * 37 % 90).collect();
    for piece in [1, 7, 300] {
        let wanted = logits(open(&fixture("deepseek-v3.gguf")), &tokens, piece, KvType::F32);
        let error = relative_error(&logits(open(&path), &tokens, piece, KvType::F32), &wanted);
        assert!(error < 2e-3, "{piece} at a time: {error}");
    }
}

/// Quantised keys and values in one matrix are not turned, which would round them once more: they are what the file's numbers are.
#[test]
fn quantised_matrices_of_latents_are_read_as_they_are() {
    let tokens: Vec<u32> = (0..60).map(|i| 5 + i * 37 % 90).collect();
    let quant = Quant::Block(BlockType::Q8_0);
    let dir = tempfile::tempdir().unwrap();
    let written = |in_blocks: bool| {
        let mut file = File::read("deepseek-v2.gguf").in_f32();
        for tensor in file.tensors.iter_mut().filter(|tensor| tensor.name.contains("attn_kv_b")) {
            let numbers: Vec<f32> = bytemuck::pod_collect_to_vec(&tensor.data);
            let mut bytes = vec![0; quant.number_bytes(numbers.len())];
            rows::encode(quant, &numbers, &mut bytes);
            let mut rounded = vec![0f32; numbers.len()];
            rows::decode(quant, &bytes, &mut rounded);
            (tensor.kind, tensor.data) = match in_blocks {
                true => (8, bytes),
                false => (0, bytemuck::cast_slice(&rounded).to_vec()),
            };
        }
        let path = dir.path().join(format!("{in_blocks}.gguf"));
        std::fs::write(&path, file.bytes()).unwrap();
        path
    };
    let (blocks, numbers) = (written(true), written(false));
    assert!(open(&blocks).types().contains("q8_0"));
    for piece in [1, 60] {
        let [found, wanted] = [&blocks, &numbers].map(|path| logits(open(path), &tokens, piece, KvType::F32));
        let error = relative_error(&found, &wanted);
        println!("{piece} at a time: {error:.1e}");
        // What they are multiplied by is rounded to 8 bits.
        assert!(error < 0.1, "{piece} at a time: {error}");
    }
}

/// As transformers' `_compute_yarn_parameters` has them for 16 numbers, base 10,000, factor 4, 64 positions, 32 and 1 turns.
#[test]
fn bounds_of_yarn_are_rounded_to_pairs_or_not() {
    let yarn = |rounded| RopeScaling::Yarn { factor: 4.0, fast: 32.0, slow: 1.0, original: 64.0, rounded };
    let (rounded, exact) = (rope_frequencies(16, 1e4, &yarn(true)), rope_frequencies(16, 1e4, &yarn(false)));
    // The first bound lies before pair 0; the second at 2.016, or 3.
    let base = |i: usize| 1e4f64.powf(-(i as f64) / 8.0);
    for (i, (rounded, exact)) in rounded.iter().zip(&exact).enumerate() {
        let scaled = |bound: f64| {
            let part = (i as f64 / bound).min(1.0);
            part * base(i) / 4.0 + (1.0 - part) * base(i)
        };
        let bound = 16.0 * (64.0 / std::f64::consts::TAU).ln() / (2.0 * 1e4f64.ln());
        assert!((f64::from(*rounded) / scaled(3.0) - 1.0).abs() < 1e-6, "{i}");
        assert!((f64::from(*exact) / scaled(bound) - 1.0).abs() < 1e-6, "{i}");
    }
}

#[test]
fn what_directories_say_of_latents_is_refused_by_name() {
    let cases = [
        ("deepseek-v3", json!({"kv_lora_rank": null}), "config.json: kv_lora_rank: missing"),
        ("deepseek-v3", json!({"kv_lora_rank": 0}), "config.json: kv_lora_rank: is 0; it must be 1 to 4096"),
        (
            "deepseek-v3",
            json!({"kv_lora_rank": 4090}),
            "the latent with the rotated part of latent attention has 4106 numbers",
        ),
        (
            "deepseek-v3",
            json!({"kv_lora_rank": 32}),
            "self_attn.kv_a_proj_with_mqa.weight: has shape [64, 64], the model's",
        ),
        ("deepseek-v3", json!({"q_lora_rank": 5000}), "config.json: q_lora_rank: is 5000; it must be 1 to 4096"),
        ("deepseek-v3", json!({"q_lora_rank": null}), "self_attn.q_proj.weight: the tensor is missing"),
        ("deepseek-v3", json!({"qk_rope_head_dim": 0}), "config.json: qk_rope_head_dim: is 0; it must be 1 to 4096"),
        ("deepseek-v3", json!({"qk_rope_head_dim": 15}), "both must be even"),
        ("deepseek-v3", json!({"qk_nope_head_dim": null}), "config.json: qk_nope_head_dim: missing"),
        (
            "deepseek-v3",
            json!({"v_head_dim": 1u64 << 31}),
            "config.json: v_head_dim: is 2147483648; it must be 1 to 4096",
        ),
        ("deepseek-v3", json!({"rope_interleave": false}), "config.json: rope_interleave: is false; only true is"),
        (
            "deepseek-v3",
            json!({"scoring_func": "softmax"}),
            "config.json: scoring_func: is \"softmax\"; only \"sigmoid\" is",
        ),
        (
            "deepseek-v3",
            json!({"topk_method": "greedy"}),
            "config.json: topk_method: is 'greedy', which is not supported",
        ),
        ("deepseek-v3", json!({"first_k_dense_replace": null}), "config.json: first_k_dense_replace: missing"),
        (
            "deepseek-v3",
            json!({"first_k_dense_replace": 2}),
            "config.json: first_k_dense_replace: is 2; a layer of 2 must have",
        ),
        ("deepseek-v3", json!({"moe_layer_freq": 2}), "config.json: moe_layer_freq: is 2; only 1 is supported"),
        ("deepseek-v3", json!({"n_group": 3}), "3 groups of 8 experts"),
        (
            "deepseek-v3",
            json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
            "rope_scaling.rope_type: is 'dynamic'; only",
        ),
        (
            "deepseek-v3",
            json!({"rope_scaling": {"factor": 2.0}}),
            "rope_scaling: is {\"factor\":2.0}, which does not name its",
        ),
        (
            "deepseek-v3",
            json!({"rope_scaling": "yarn"}),
            "rope_scaling: is \"yarn\", which does not name its rope_type",
        ),
        ("deepseek-v3", json!({"rope_scaling": {"type": "yarn"}}), "config.json: rope_scaling.factor: missing"),
        (
            "deepseek-v3",
            json!({"rope_scaling": {"type": "yarn", "factor": -4.0}}),
            "config.json: rope_scaling.factor: -4 is not a positive number",
        ),
        (
            "deepseek-v3",
            json!({"rope_scaling": {"type": "yarn", "factor": 1e30, "mscale_all_dim": 100, "original_max_position_embeddings": 64}}),
            "the scale of latent attention is",
        ),
        (
            "deepseek-v2",
            json!({"norm_topk_prob": true}),
            "config.json: norm_topk_prob: is true; only false is supported",
        ),
        (
            "deepseek-v2",
            json!({"topk_method": "noaux_tc"}),
            "config.json: topk_method: is 'noaux_tc', which is not supported",
        ),
        (
            "glm4-moe-lite",
            json!({"first_k_dense_replace": null, "mlp_layer_types": ["sparse", "dense"]}),
            "config.json: mlp_layer_types: does not name 2 layers, first dense, then sparse ones",
        ),
    ];
    for (model, changes, want) in cases {
        let case = format!("{model}: {changes}");
        let message = config_refusal(model, changes);
        assert!(message.contains(want), "{case}: {message}");
    }
}
