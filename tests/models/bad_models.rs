//! What the file readers leave to the model layer: files that are well formed and describe no model that this program
//! can run. Each is refused with the file and the field, and never half packed.

#[path = "../bad_files/keys.rs"]
mod keys;

use crate::gguf_file::{File, Tensor, fixture, text};
use dynamicinfer::error::Error;
use dynamicinfer::formats::gguf::{Array, Value};
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::formats::safetensors;
use dynamicinfer::model::Activation;
use dynamicinfer::model::source::{Source, read_json};
use dynamicinfer::pack::{PackOptions, pack};
use serde_json::{Value as Json, json};
use std::path::Path;

/// The message of a refusal, which names the file.
fn refusal<T>(result: Result<T, Error>, file: &Path, case: &str) -> String {
    let Err(error) = result else { panic!("{case}: was accepted") };
    assert!(matches!(error, Error::BadFile(_)), "{case}: {error:?}");
    let message = error.to_string();
    assert!(!message.contains(char::is_control), "{case}: {message:?}");
    match message.strip_prefix(&format!("{}", file.display())) {
        Some(rest) => rest.trim_start_matches('/').to_owned(),
        None => panic!("{case}: {} is not named in: {message}", file.display()),
    }
}

fn assert_says(message: &str, wants: &[&str], case: &str) {
    for want in wants {
        assert!(message.contains(want), "{case}: no {want:?} in: {message}");
    }
}

/// Opens the changed file under `name`; the refusal without the file's path.
fn gguf_refusal(from: &str, name: &str, case: &str, change: impl FnOnce(&mut File)) -> String {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    let mut file = File::read(from);
    change(&mut file);
    std::fs::write(&path, file.bytes()).unwrap();
    refusal(Source::open(&path, None), &path, case)
}

#[test]
fn what_is_put_together_again_is_the_same_model() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["llama.gguf", "llama.q4_0.gguf", "llama-linear-rope.q8_0.gguf"] {
        let path = dir.path().join(name);
        std::fs::write(&path, File::read(name).bytes()).unwrap();
        let (again, first) = (Source::open(&path, None).unwrap(), Source::open(&fixture(name), None).unwrap());
        assert_eq!(again.fingerprint(), first.fingerprint());
    }
    // As many tokens as embeddings, or fewer, are right.
    for tokens in [320, 300] {
        let mut file = File::read("llama.gguf");
        file.vocabulary(tokens);
        file.set("llama.vocab_size", Value::U32(320));
        let path = dir.path().join("vocabulary.gguf");
        std::fs::write(&path, file.bytes()).unwrap();
        assert_eq!(Source::open(&path, None).unwrap().tokenizer.unwrap().vocab_len(&path).unwrap(), tokens);
    }
}

#[test]
fn ggufs_that_describe_no_model_are_refused() {
    type Change = fn(&mut File);
    let cases: &[(&str, Change, &[&str])] = &[
        ("no architecture", |f| f.remove("general.architecture"), &["general.architecture: missing"]),
        (
            "unknown architecture",
            |f| f.set("general.architecture", text("mamba")),
            &["general.architecture: architecture 'mamba' is not supported; known are llama"],
        ),
        (
            "architecture without end",
            |f| f.set("general.architecture", text(&"x".repeat(100_000))),
            &["general.architecture: architecture 'xxx", "xxx…' is not supported; known are llama"],
        ),
        (
            "escape in the architecture",
            |f| f.set("general.architecture", text("\x1b[31mllama\n")),
            &["general.architecture", r"\u{1b}[31mllama\n"],
        ),
        (
            "architecture is a number",
            |f| f.set("general.architecture", Value::U32(7)),
            &["general.architecture", "a string"],
        ),
        (
            "layers 4e9",
            |f| f.set("llama.block_count", Value::U32(4_000_000_000)),
            &["layer count is 4000000000; it must be 1 to 4096"],
        ),
        ("layers 0", |f| f.set("llama.block_count", Value::U32(0)), &["layer count is 0"]),
        ("layers -1", |f| f.set("llama.block_count", Value::I32(-1)), &["llama.block_count"]),
        ("layers missing", |f| f.remove("llama.block_count"), &["llama.block_count: missing"]),
        ("layers text", |f| f.set("llama.block_count", text("2")), &["llama.block_count", "a whole number"]),
        (
            "a layer more than there is",
            |f| f.set("llama.block_count", Value::U32(3)),
            &["blk.2.attn_norm.weight: the tensor is missing"],
        ),
        ("heads 0", |f| f.set("llama.attention.head_count", Value::U32(0)), &[": llama.attention.head_count: is 0"]),
        ("heads missing", |f| f.remove("llama.attention.head_count"), &["llama.attention.head_count: missing"]),
        (
            "heads not shared evenly",
            |f| f.set("llama.attention.head_count_kv", Value::U32(3)),
            &["4 heads cannot share 3 key/value heads"],
        ),
        (
            "key/value heads 0",
            |f| f.set("llama.attention.head_count_kv", Value::U32(0)),
            &["key/value head count is 0"],
        ),
        (
            "context 0",
            |f| f.set("llama.context_length", Value::U32(0)),
            &["context length is 0; it must be 1 to 16777216"],
        ),
        (
            "theta NaN",
            |f| f.set("llama.rope.freq_base", Value::F32(f32::NAN)),
            &["llama.rope.freq_base: NaN is not a positive number"],
        ),
        (
            "theta 0",
            |f| f.set("llama.rope.freq_base", Value::F32(0.0)),
            &["llama.rope.freq_base: 0 is not a positive number"],
        ),
        (
            "theta infinite",
            |f| f.set("llama.rope.freq_base", Value::F32(f32::INFINITY)),
            &["llama.rope.freq_base: inf"],
        ),
        ("theta text", |f| f.set("llama.rope.freq_base", text("1e4")), &["llama.rope.freq_base"]),
        (
            "unknown scaling",
            |f| f.set("llama.rope.scaling.type", text("yarn")),
            &[
                "llama.rope.scaling.type: RoPE scaling 'yarn' is not supported; supported are linear and rope_freqs.weight",
            ],
        ),
        (
            "scaling by NaN",
            |f| f.set("llama.rope.scaling.factor", Value::F32(f32::NAN)),
            &["llama.rope.scaling.factor: NaN is not a positive number"],
        ),
        (
            "scaling by infinity",
            |f| f.set("llama.rope.scaling.factor", Value::F32(f32::INFINITY)),
            &["llama.rope.scaling.factor: inf"],
        ),
        (
            "scaling by nothing",
            |f| {
                f.remove("llama.rope.scaling.factor");
                f.set("llama.rope.scaling.type", text("linear"))
            },
            &["llama.rope.scaling.factor: missing"],
        ),
        (
            "partial rotation",
            |f| f.set("llama.rope.dimension_count", Value::U32(8)),
            &["llama.rope.dimension_count: partial rotation is not supported: it must be the head dimension 16"],
        ),
        (
            "values narrower than keys",
            |f| f.set("llama.attention.value_length", Value::U32(8)),
            &["llama.attention.value_length: differs from the key length"],
        ),
        (
            "epsilon NaN",
            |f| f.set("llama.attention.layer_norm_rms_epsilon", Value::F32(f32::NAN)),
            &["norm epsilon NaN is not between 0 and 0.1"],
        ),
        ("epsilon 0", |f| f.set("llama.attention.layer_norm_rms_epsilon", Value::F32(0.0)), &["norm epsilon 0 "]),
        (
            "hidden size disagrees",
            |f| {
                f.set("llama.embedding_length", Value::U32(128));
                f.set("llama.attention.head_count", Value::U32(8))
            },
            &["token_embd.weight: has shape [320, 64], the model's configuration needs [320, 128] (at byte "],
        ),
        (
            "FFN size disagrees",
            |f| f.set("llama.feed_forward_length", Value::U32(97)),
            &["blk.0.ffn_up.weight: has shape [96, 64], the model's configuration needs [97, 64]"],
        ),
        ("no embedding", |f| f.drop_tensor("token_embd.weight"), &["token_embd.weight: the tensor is missing"]),
        ("no last norm", |f| f.drop_tensor("output_norm.weight"), &["output_norm.weight: the tensor is missing"]),
        ("no down", |f| f.drop_tensor("blk.1.ffn_down.weight"), &["blk.1.ffn_down.weight: the tensor is missing"]),
        (
            "norm of a wrong type",
            |f| {
                let t = f.tensor("blk.1.ffn_norm.weight");
                t.kind = 8;
                t.data = vec![0; 68]
            },
            &["blk.1.ffn_norm.weight: is Q8_0; a vector must be F32, F16 or BF16 (at byte "],
        ),
        (
            "matrix where a vector should be",
            |f| f.tensor("output_norm.weight").shape = vec![8, 8],
            &["output_norm.weight: has shape [8, 8], the model's configuration needs [64]"],
        ),
        (
            "too many RoPE factors",
            |f| {
                f.tensors.push(Tensor {
                    name: "rope_freqs.weight".into(),
                    kind: 0,
                    shape: vec![9],
                    data: vec![0x3f; 36],
                })
            },
            &["rope_freqs.weight: 9 numbers, the head dimension 16 needs half as many"],
        ),
        (
            "RoPE factor 0",
            |f| f.tensors.push(Tensor { name: "rope_freqs.weight".into(), kind: 0, shape: vec![8], data: vec![0; 32] }),
            &["a RoPE frequency is not a finite positive number"],
        ),
        (
            "unknown activation",
            |f| f.set("llama.hidden_act", text("swiglu")),
            &["llama.hidden_act: activation 'swiglu' is not known; known are relu"],
        ),
        ("activation is a number", |f| f.set("llama.hidden_act", Value::U32(1)), &["llama.hidden_act", "a string"]),
        (
            "fatrelu without threshold",
            |f| f.set("llama.hidden_act", text("fatrelu")),
            &["llama.hidden_act: fatrelu without its threshold"],
        ),
        (
            "fatrelu by NaN",
            |f| {
                f.set("llama.hidden_act", text("fatrelu"));
                f.set("llama.hidden_act_param", Value::F32(f32::NAN))
            },
            &["llama.hidden_act: fatrelu with threshold NaN"],
        ),
        (
            "one part of three",
            |f| f.set("split.count", Value::U16(3)),
            &[
                "split.no: this is part 1 of 3, and its name does not tell the names of the others: call it NAME-00001-of-00003.gguf",
            ],
        ),
        (
            "vocabulary 2^31",
            |f| f.set("llama.vocab_size", Value::U32(1 << 31)),
            &["vocabulary size is 2147483648; it must be 1 to 4194304"],
        ),
        (
            "more tokens than embeddings",
            |f| {
                f.vocabulary(321);
                f.set("llama.vocab_size", Value::U32(320))
            },
            &["vocabulary: the tokenizer has 321 tokens and the model 320 rows of embeddings"],
        ),
        (
            "more tokens than embeddings, no size",
            |f| {
                f.vocabulary(321);
                f.remove("llama.vocab_size")
            },
            &["token_embd.weight: has shape [320, 64], the model's configuration needs [321, 64]"],
        ),
        (
            "no token",
            |f| {
                f.vocabulary(0);
                f.set("llama.vocab_size", Value::U32(320))
            },
            &["tokenizer.ggml.", ": "],
        ),
        (
            "fewer scores than tokens",
            |f| {
                f.vocabulary(320);
                f.set("tokenizer.ggml.scores", Value::Array(Array::F32(vec![0.0; 319])))
            },
            &["tokenizer.ggml.scores: 319 values, but tokenizer.ggml.tokens has 320"],
        ),
        (
            "scores of another type",
            |f| {
                f.vocabulary(320);
                f.set("tokenizer.ggml.scores", Value::Array(Array::Str(vec![String::new(); 320])))
            },
            &["tokenizer.ggml.scores"],
        ),
    ];
    for (case, change, wants) in cases {
        assert_says(&gguf_refusal("llama.gguf", "model.gguf", case, change), wants, case);
    }
}

#[test]
fn a_llama_gguf_whose_name_says_relu_wants_its_activation_named() {
    let whole = ": llama.hidden_act: the name says that this is a ReLU model, but a GGUF of the llama architecture does not \
                 carry its activation and would run with SiLU; name it: --activation relu, or fatrelu(0.01) for ProSparse 7B, \
                 or drelu; relu is ReGLU, relu(gate) * up, as in ReluLLaMA and ProSparse; drelu is dReLU, relu(gate) * relu(up), \
                 as in TurboSparse and Bamboo";
    let by_name =
        gguf_refusal("llama.gguf", "model.gguf", "name", |f| f.set("general.name", text("SparseLLM ReluLLaMA-7B")));
    assert_eq!(by_name, whole);
    assert_eq!(gguf_refusal("llama.gguf", "prosparse-llama-2-7b.gguf", "file name", |_| ()), whole);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("prosparse-llama-2-7b.gguf");
    std::fs::copy(fixture("llama.gguf"), &path).unwrap();
    let fatrelu = Activation::Fatrelu(0.01);
    assert_eq!(Source::open(&path, Some(fatrelu.into())).unwrap().config.activation, fatrelu);
}

// Hugging Face directories: links to a fixture's files, some of them replaced.

/// The directory of `fixture_name` with `replaced` files in place of its own.
fn directory(fixture_name: &str, replaced: &[(&str, Vec<u8>)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture(fixture_name)).unwrap() {
        let entry = entry.unwrap();
        if !replaced.iter().any(|(name, _)| *name == entry.file_name()) {
            std::os::unix::fs::symlink(entry.path().canonicalize().unwrap(), dir.path().join(entry.file_name()))
                .unwrap();
        }
    }
    for (name, bytes) in replaced {
        std::fs::write(dir.path().join(name), bytes).unwrap();
    }
    dir
}

fn json_of(fixture_name: &str, file: &str) -> Json {
    read_json(&fixture(fixture_name).join(file), 1 << 20).unwrap()
}

/// The refusal of a fixture whose config.json has `changes`; null takes a key out.
pub fn config_refusal(fixture_name: &str, changes: Json) -> String {
    let mut config = json_of(fixture_name, "config.json");
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    let dir = directory(fixture_name, &[("config.json", config.to_string().into_bytes())]);
    refusal(Source::open(dir.path(), None), dir.path(), &changes.to_string())
}

#[test]
fn directories_that_describe_no_model_are_refused() {
    let cases = [
        (
            json!({"model_type": null}),
            "config.json: model_type: missing, so the model's family is not known; known are llama",
        ),
        (
            json!({"model_type": "gpt_neox"}),
            "config.json: model_type: family 'gpt_neox' is not supported; known are llama",
        ),
        (json!({"model_type": 7}), "config.json: model_type: is 7, not text"),
        (
            json!({"hidden_act": null}),
            "config.json: hidden_act: missing; name it on the command line: --activation relu, say",
        ),
        (
            json!({"hidden_act": "xielu"}),
            "config.json: hidden_act: activation 'xielu' is not known; known are relu, fatrelu(t), relu2",
        ),
        (json!({"hidden_act": "fatrelu"}), "config.json: hidden_act: fatrelu without its threshold"),
        (json!({"hidden_act": ["relu"]}), "config.json: hidden_act: is [\"relu\"], not text"),
        (
            json!({"num_hidden_layers": 4_000_000_000u64}),
            "config.json: num_hidden_layers: the layer count is 4000000000; it must be 1 to 4096",
        ),
        (json!({"num_hidden_layers": 3}), "model.layers.2.input_layernorm.weight: the tensor is missing"),
        (json!({"num_attention_heads": 0}), "config.json: head count is 0"),
        (json!({"num_key_value_heads": 3}), "config.json: 4 heads cannot share 3 key/value heads"),
        (
            json!({"num_key_value_heads": 1}),
            "self_attn.k_proj.weight: has shape [32, 64], the model's configuration needs [16, 64]",
        ),
        (json!({"head_dim": 15}), "config.json: head dimension 15 is odd"),
        (
            json!({"head_dim": 1_u64 << 40}),
            "config.json: head_dim: is 1099511627776, not a whole number from 0 to 4294967295",
        ),
        (
            json!({"hidden_size": 128}),
            "model.embed_tokens.weight: has shape [320, 64], the model's configuration needs [320, 128] (at byte ",
        ),
        (json!({"hidden_size": "64"}), "config.json: hidden_size: is \"64\", not a whole number"),
        (json!({"hidden_size": -64}), "config.json: hidden_size: is -64, not a whole number"),
        (json!({"hidden_size": 64.5}), "config.json: hidden_size: is 64.5, not a whole number"),
        (json!({"hidden_size": null}), "config.json: hidden_size: missing"),
        (json!({"max_position_embeddings": 0}), "config.json: context length is 0"),
        (json!({"rope_theta": 0}), "config.json: rope_theta: 0 is not a positive number"),
        (json!({"rope_theta": -1.5}), "config.json: rope_theta: -1.5 is not a positive number"),
        (json!({"rope_theta": "1e4"}), "config.json: rope_theta: is \"1e4\", not a number"),
        (json!({"rope_parameters": {"rope_theta": "1e4"}}), "config.json: rope_theta: NaN is not a positive number"),
        (
            json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
            "config.json: rope_scaling: RoPE scaling 'dynamic' is not supported; supported are linear and llama3",
        ),
        (
            json!({"rope_scaling": {"factor": 2.0}}),
            "config.json: rope_scaling: is {\"factor\":2.0}, which does not name its rope_type",
        ),
        (
            json!({"rope_scaling": {"rope_type": 3}}),
            "config.json: rope_scaling: is {\"rope_type\":3}, which does not name",
        ),
        (
            json!({"rope_scaling": "linear"}),
            "config.json: rope_scaling: is \"linear\", which does not name its rope_type",
        ),
        (
            json!({"rope_scaling": {"type": "linear", "factor": 0.0}}),
            "config.json: rope_scaling.factor: missing or not a positive number",
        ),
        (
            json!({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}),
            "config.json: rope_scaling.low_freq_factor: missing",
        ),
        (
            json!({"rope_scaling": null, "rope_parameters": {"rope_type": "yarn"}}),
            "config.json: rope_parameters: RoPE scaling 'yarn' is not supported",
        ),
        (json!({"mlp_bias": true}), "config.json: mlp_bias: is true; only false is supported"),
        (json!({"partial_rotary_factor": 0.5}), "config.json: partial_rotary_factor: is 0.5; only 1.0 is supported"),
        (json!({"attention_bias": true}), "model.layers.0.self_attn.q_proj.bias: the tensor is missing"),
        (json!({"attention_bias": "yes"}), "config.json: attention_bias: is \"yes\", not true or false"),
        (json!({"tie_word_embeddings": 1}), "config.json: tie_word_embeddings: is 1, not true or false"),
        (json!({"rms_norm_eps": 0.0}), "config.json: norm epsilon 0 is not between 0 and 0.1"),
        (json!({"rms_norm_eps": "small"}), "config.json: rms_norm_eps: is \"small\", not a number"),
        (json!({"model_type": "mistral", "sliding_window": 0}), "config.json: the attention window is 0"),
        (json!({"vocab_size": 0}), "config.json: vocabulary size is 0"),
        (
            json!({"vocab_size": 319}),
            "model.embed_tokens.weight: has shape [320, 64], the model's configuration needs [319, 64]",
        ),
    ];
    for (changes, want) in cases {
        let message = config_refusal("llama", changes.clone());
        assert_says(&message, &[want], &changes.to_string());
    }
    let opt = [
        (json!({"do_layer_norm_before": false}), "config.json: do_layer_norm_before: is false; only true is supported"),
        (json!({"word_embed_proj_dim": 32}), "config.json: word_embed_proj_dim: is 32; only 64 is supported"),
        (json!({"activation_function": "tanh"}), "config.json: activation_function: activation 'tanh' is not known"),
        (
            json!({"max_position_embeddings": 300}),
            "embed_positions.weight: has shape [258, 64], the model's configuration needs [302, 64]",
        ),
    ];
    for (changes, want) in opt {
        assert_says(&config_refusal("opt", changes.clone()), &[want], &changes.to_string());
    }
}

#[test]
fn what_a_family_does_not_do_is_refused_by_name() {
    let cases = [
        ("falcon", json!({"alibi": true}), "config.json: alibi: is true; only false is supported"),
        ("falcon", json!({"bias": true}), "config.json: bias: is true; only false is supported"),
        ("falcon", json!({"parallel_attn": false}), "config.json: parallel_attn: is false; only true is supported"),
        (
            "falcon",
            json!({"activation": "drelu"}),
            "config.json: activation: drelu is relu(gate) * relu(up), and FALCON",
        ),
        (
            "relufalcon",
            json!({"hidden_act": "gelu"}),
            "config.json: hidden_act: says another function than activation; name it: --activation relu, say",
        ),
        (
            "falcon",
            json!({"_name_or_path": "SparseLLM/ReluFalcon-40B"}),
            "config.json: activation: missing, and the name says that this is a ReLU model; name it: --activation relu",
        ),
        (
            "falcon",
            json!({"multi_query": false}),
            "query_key_value.weight: has shape [96, 64], the model's configuration needs [192, 64]",
        ),
        (
            "falcon",
            json!({"new_decoder_architecture": true, "num_kv_heads": 1}),
            "transformer.h.0.ln_attn.weight: the tensor is missing",
        ),
        ("falcon-40b", json!({"num_kv_heads": 3}), "config.json: 4 heads cannot share 3 key/value heads"),
        ("minicpm", json!({"scale_emb": null}), "config.json: scale_emb: missing"),
        ("minicpm", json!({"scale_depth": null}), "config.json: scale_depth: missing"),
        ("minicpm", json!({"dim_model_base": 0}), "config.json: logit scale 0 is not between 0.001 and 1000"),
        ("minicpm", json!({"scale_emb": -1}), "config.json: embedding scale -1 is not between 0.001 and 1000"),
        ("minicpm", json!({"hidden_act_param": null}), "config.json: hidden_act: fatrelu without its threshold"),
        (
            "minicpm",
            json!({"num_experts": 8, "num_experts_per_tok": 2}),
            "config.json: num_experts: says that its FFNs are mixtures of 8 experts, which is not supported for minicpm",
        ),
        (
            "llama",
            json!({"intermediate_size": [96, 64]}),
            "config.json: its layers have FFNs of 64 to 96 neurons; only one size for all is supported",
        ),
        (
            "mistral",
            json!({"sliding_window": 8, "layer_types": ["full_attention", "chunked_attention"]}),
            "config.json: layer_types: names layers of other kinds than",
        ),
        (
            "mistral",
            json!({"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
            "config.json: layer_types: names 3 layers of 2",
        ),
        ("qwen3-moe", json!({"num_experts_per_tok": 9}), "config.json: 9 experts for a token, of 8 that there are"),
        ("qwen3-moe", json!({"num_experts_per_tok": 0}), "config.json: 0 experts for a token, of 8 that there are"),
        ("qwen3-moe", json!({"num_experts": null}), "config.json: num_experts: missing"),
        (
            "qwen3-moe",
            json!({"num_experts": 7}),
            "model.layers.0.mlp.gate.weight: has shape [8, 64], the model's configuration needs [7, 64]",
        ),
        (
            "qwen3-moe",
            json!({"num_experts": 9}),
            "model.layers.0.mlp.gate.weight: has shape [8, 64], the model's configuration needs [9, 64]",
        ),
        (
            "qwen3-moe",
            json!({"moe_intermediate_size": 48}),
            "model.layers.0.mlp.experts.0.gate_proj.weight: has shape [32, 64], the model's configuration needs [48, 64]",
        ),
        ("qwen3-moe", json!({"mlp_only_layers": [1]}), "config.json: mlp_only_layers: is [1]; only [] is supported"),
        (
            "qwen2-moe",
            json!({"shared_expert_intermediate_size": null}),
            "config.json: shared_expert_intermediate_size: missing",
        ),
        (
            "qwen2-moe",
            json!({"shared_expert_intermediate_size": 0}),
            "config.json: the shared expert's size is 0; it must be 1 to",
        ),
        (
            "qwen2-moe",
            json!({"shared_expert_intermediate_size": 48}),
            "model.layers.0.mlp.shared_expert.gate_proj.weight: has shape [96, 64], the model's configuration needs [48, 64]",
        ),
        ("qwen2-moe", json!({"decoder_sparse_step": 2}), "config.json: decoder_sparse_step: is 2; only 1 is supported"),
        ("qwen2-moe", json!({"use_sliding_window": true}), "config.json: use_sliding_window: is true; only false"),
        (
            "qwen2-moe",
            json!({"model_type": "qwen3_moe"}),
            "its layers have shared experts, which is not supported for qwen3_moe",
        ),
        ("qwen3", json!({"head_dim": 8}), "q_proj.weight: has shape"),
        (
            "llama",
            json!({"intermediate_size": [96, "a"]}),
            "config.json: intermediate_size: is a list of something that is not a whole number",
        ),
        ("llama", json!({"intermediate_size": [96, 96, 48]}), "config.json: 3 FFN sizes for 2 layers"),
        ("gemma3", json!({"final_logit_softcapping": 30.0}), "config.json: final_logit_softcapping: is 30; no softcap"),
        ("gemma3", json!({"layer_types": ["full_attention"]}), "config.json: layer_types: names 1 layers of 7"),
        ("gemma3", json!({"query_pre_attn_scalar": 0}), "queries are multiplied by inf; it must be 0.01 to 100"),
        ("gemma4", json!({"layer_types": ["full_attention"]}), "config.json: layer_types: names 1 layers of 4"),
        (
            "gemma4",
            json!({"final_logit_softcapping": 0.5}),
            "the cap of logits is 0.5; it must be 1 to 1000, or 0 for none",
        ),
        (
            "gemma4",
            json!({"use_bidirectional_attention": "all"}),
            "use_bidirectional_attention: is \"all\"; only \"vision\"",
        ),
        ("gemma4", json!({"global_head_dim": 33}), "head dimension 33 is odd"),
        ("gemma4", json!({"global_head_dim": 64}), "self_attn.q_proj.weight: has shape [128, 64]"),
        ("gemma4", json!({"num_global_key_value_heads": 3}), "4 heads cannot share 3 key/value heads"),
        ("gemma4", json!({"attention_k_eq_v": false}), "layers.1.self_attn.k_proj.weight: has shape [32, 64]"),
        ("gemma4", json!({"num_kv_shared_layers": 4}), "num_kv_shared_layers: is 4: no layer before them has keys"),
        ("gemma4", json!({"num_kv_shared_layers": 5}), "num_kv_shared_layers: is 5, and there are 4 layers"),
        ("gemma4", json!({"hidden_size_per_layer_input": 8}), "embed_tokens_per_layer.weight: the tensor is missing"),
        (
            "gemma4",
            json!({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}),
            "rope_parameters.full_attention.rope_type: is 'yarn', which is not supported for gemma4",
        ),
        (
            "gemma4",
            json!({"rope_parameters": {"full_attention": {"partial_rotary_factor": 1.5}}}),
            "rope_parameters.full_attention.partial_rotary_factor: is 1.5; it must be above 0 and at most 1",
        ),
        ("gemma4-moe", json!({"top_k_experts": 7}), "7 experts for a token, of 6 that there are"),
        ("gemma4-moe", json!({"intermediate_size": 48}), "mlp.gate_proj.weight: has shape [32, 64]"),
        ("gemma4-moe", json!({"model_type": "gemma4-assistant"}), "config.json: model_type: is of a draft head"),
        ("glm4-moe", json!({"rope_scaling": {"type": "linear", "factor": 4.0}}), "config.json: rope_scaling: is {"),
        ("glm4-moe", json!({"partial_rotary_factor": 0.45}), "config.json: partial_rotary_factor: is 7; it must be"),
        ("glm4-moe", json!({"first_k_dense_replace": 9}), "no layer of a mixture has experts"),
        ("glm4-moe", json!({"n_group": 3}), "3 groups of 8 experts"),
        ("lfm2", json!({"layer_types": ["conv"]}), "config.json: layer_types: names 1 layers of 5"),
        ("lfm2", json!({"layer_types": ["conv", "conv", "conv", "conv", "conv"]}), "no layer has attention"),
        ("lfm2", json!({"conv_L_cache": 1}), "a convolution reads 1 positions; it must be 2 to 64"),
        ("lfm2", json!({"block_ffn_dim_multiplier": 1e300}), "config.json: block_ffn_dim_multiplier: is too large"),
        ("lfm2", json!({"conv_bias": true}), "config.json: conv_bias: is true; only false is supported"),
        (
            "ernie4.5-moe",
            json!({"moe_layer_interval": 2}),
            "config.json: moe_layer_interval: is 2; only 1 is supported",
        ),
        ("smollm3", json!({"no_rope_layers": [1, 0]}), "2 numbers say which of 5 layers are rotated"),
        (
            "qwen35",
            json!({"attn_output_gate": false}),
            "config.json: attn_output_gate: is false; only true is supported",
        ),
        ("qwen35", json!({"layer_types": ["full_attention"]}), "config.json: layer_types: names 1 layers of 5"),
        ("qwen35", json!({"layer_types": ["mamba"]}), "config.json: layer_types: names \"mamba\"; known are"),
        ("qwen35", json!({"linear_num_key_heads": null}), "config.json: linear_num_key_heads: missing"),
        (
            "qwen35",
            json!({"linear_num_key_heads": 0}),
            "the head count of keys of linear attention is 0; it must be 1 to 1024",
        ),
        (
            "qwen35",
            json!({"linear_num_value_heads": 4294967295u32}),
            "the head count of values of linear attention is 4294967295",
        ),
        ("qwen35", json!({"linear_num_value_heads": 5}), "5 value heads of linear attention cannot share 2 key heads"),
        ("qwen35", json!({"linear_key_head_dim": 32}), "config.json: linear_key_head_dim: is 32; only 16 is supported"),
        (
            "qwen35",
            json!({"linear_key_head_dim": 24, "linear_value_head_dim": 24}),
            "the head size of linear attention is 24; it must be a multiple of 16",
        ),
        ("qwen35", json!({"linear_conv_kernel_dim": 1}), "a convolution reads 1 positions; it must be 2 to 64"),
        ("qwen35-moe", json!({"shared_expert_intermediate_size": null}), "shared_expert_intermediate_size: missing"),
        ("qwen3-next", json!({"full_attention_interval": 9}), "no layer has attention"),
        ("nemotron-h", json!({"hybrid_override_pattern": null}), "hybrid_override_pattern: missing"),
        (
            "nemotron-h",
            json!({"hybrid_override_pattern": "M-X"}),
            "hybrid_override_pattern: names X; known are Mamba-2",
        ),
        ("nemotron-h", json!({"hybrid_override_pattern": "M--*"}), "has an FFN that follows no mixer"),
        ("nemotron-h", json!({"hybrid_override_pattern": "M-*E"}), "names both FFNs and experts"),
        ("nemotron-h", json!({"hybrid_override_pattern": "M-M-"}), "no layer has attention"),
        ("nemotron-h", json!({"hybrid_override_pattern": "M*"}), "no layer has an FFN"),
        ("nemotron-h", json!({"layers_block_type": ["mamba", "rwkv"]}), "layers_block_type: names \"rwkv\"; known are"),
        ("nemotron-h", json!({"mamba_num_heads": 5}), "5 value heads of linear attention cannot share 2 key heads"),
        (
            "nemotron-h",
            json!({"mamba_head_dim": 24}),
            "the head size of linear attention is 24; it must be a multiple of 16",
        ),
        (
            "nemotron-h",
            json!({"ssm_state_size": 18}),
            "the head size of keys of linear attention is 18; it must be a multiple of 4",
        ),
        ("nemotron-h", json!({"n_groups": null}), "config.json: n_groups: missing"),
        ("nemotron-h", json!({"conv_kernel": 1}), "a convolution reads 1 positions; it must be 2 to 64"),
        ("nemotron-h", json!({"time_step_limit": [0.0, 0.5]}), "config.json: time_step_limit: ends steps at 0.5"),
        ("nemotron-h", json!({"time_step_limit": [0.5, null]}), "config.json: time_step_limit: begins steps at 0.5"),
        ("nemotron-h", json!({"use_bias": true}), "config.json: use_bias: is true; only false is supported"),
        (
            "nemotron-h",
            json!({"mamba_hidden_act": "relu"}),
            "config.json: mamba_hidden_act: is \"relu\"; only \"silu\"",
        ),
        (
            "nemotron-h-moe",
            json!({"moe_latent_size": 32}),
            "moe_latent_size: says that experts read a projection to 32",
        ),
        ("nemotron-h-moe", json!({"moe_intermediate_size": null}), "moe_intermediate_size: missing"),
    ];
    for (model, changes, want) in cases {
        assert_says(&config_refusal(model, changes.clone()), &[want], &format!("{model} {changes}"));
    }
}

#[test]
fn a_size_for_each_layer_is_read_where_all_are_the_same() {
    let mut config = json_of("llama", "config.json");
    config["intermediate_size"] = json!([96, 96]);
    let dir = directory("llama", &[("config.json", config.to_string().into_bytes())]);
    let source = Source::open(dir.path(), None).unwrap();
    assert_eq!((source.config.widest_ffn(), source.config.width(1)), (96, 96));
    assert_eq!(source.fingerprint(), Source::open(&fixture("llama"), None).unwrap().fingerprint());
}

#[test]
fn parts_of_a_layer_that_only_tensors_tell_of_are_refused() {
    let extra = |name: &str| Tensor { name: name.into(), kind: 0, shape: vec![16], data: vec![0; 64] };
    let cases = [
        ("blk.0.attn_q_norm.weight", "blk.0.attn_k_norm.weight: the tensor is missing"),
        ("blk.0.attn_sinks.weight", "blk.0.attn_sinks.weight: has shape [16], the model's configuration needs [4]"),
        ("blk.0.post_ffw_norm.weight", "blk.0.post_attention_norm.weight: the tensor is missing"),
    ];
    for (name, want) in cases {
        let message = gguf_refusal("llama.gguf", "model.gguf", name, |f| f.tensors.push(extra(name)));
        assert_says(&message, &[want], name);
    }
    let after = gguf_refusal("llama.gguf", "model.gguf", "norms after", |f| {
        f.tensors.push(extra("blk.0.post_ffw_norm.weight"));
        f.drop_tensor("blk.0.attn_norm.weight")
    });
    assert_says(&after, &["blk.0.attn_norm.weight: the tensor is missing"], "norms after");
}

#[test]
fn ggufs_of_falcon_and_minicpm_say_what_they_need() {
    let old = gguf_refusal("minicpm.gguf", "model.gguf", "old", |f| f.remove("minicpm.residual_scale"));
    assert_says(&old, &["minicpm.residual_scale: missing: the file was made by an old converter"], "old");
    let silent = gguf_refusal("minicpm.gguf", "minicpm-s-1b.gguf", "silent", |f| f.remove("minicpm.hidden_act"));
    assert_says(
        &silent,
        &["minicpm.hidden_act: the name says that this is a ReLU model", "would run with SiLU"],
        "silent",
    );
    let relu = gguf_refusal("falcon.gguf", "relufalcon.gguf", "name", |_| ());
    assert_says(&relu, &["falcon.hidden_act: the name says that this is a ReLU model", "would run with GELU"], "name");
    let experts = gguf_refusal("llama.gguf", "model.gguf", "experts", |f| {
        f.set("llama.expert_count", Value::U32(8));
        f.set("llama.expert_used_count", Value::U32(2))
    });
    assert_says(&experts, &["blk.0.ffn_gate_inp.weight: the tensor is missing"], "experts");
}

#[test]
fn a_directory_needs_its_config_and_its_own_tokenizer() {
    let empty = tempfile::tempdir().unwrap();
    let message = refusal(Source::open(empty.path(), None), empty.path(), "empty");
    let whole =
        "not a model directory: there is no config.json; give a Hugging Face directory, a .gguf or a .neurons file";
    assert_eq!(message, format!(": {whole}"));
    for (case, config) in [("cut", &b"{\"model_type\": \"lla"[..]), ("not UTF-8", b"{\"a\": \"\xff\"}")] {
        let dir = directory("llama", &[("config.json", config.to_vec())]);
        assert_says(
            &refusal(Source::open(dir.path(), None), dir.path(), case),
            &["config.json: not understood: "],
            case,
        );
    }
    let mut tokenizer = json_of("llama", "tokenizer.json");
    let added = json!({"id": 320, "content": "<pad>", "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false});
    tokenizer["added_tokens"].as_array_mut().unwrap().push(added);
    let dir = directory("llama", &[("tokenizer.json", tokenizer.to_string().into_bytes())]);
    assert_eq!(
        refusal(Source::open(dir.path(), None), dir.path(), "an added token"),
        ": vocabulary: the tokenizer has 321 tokens and the model 320 rows of embeddings: it belongs to another model, or tokens \
         were added that the model does not know; take the tokenizer that was published with it"
    );
}

// Weights that are no weights are found when they are read: packing names the tensor and leaves nothing behind.

/// Packs and expects a refusal; the message, and that no file was left.
fn pack_refusal(model: &Path, quant: Quant, case: &str) -> String {
    let out = tempfile::tempdir().unwrap();
    let source = Source::open(model, None).unwrap();
    let packed = pack(
        &source,
        &out.path().join("x.neurons"),
        &PackOptions { types: quant.into(), orders: None },
        &|_, _| Ok(()),
    );
    assert_eq!(std::fs::read_dir(out.path()).unwrap().count(), 0, "{case}: packing left something behind");
    refusal(packed, model, case)
}

/// The llama fixture (F32) with one number of a tensor replaced.
fn with_number(tensor: &str, number: f32) -> tempfile::TempDir {
    let file = fixture("llama").join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let infos = safetensors::parse(&bytes, &file).unwrap();
    let info = infos.iter().find(|t| t.name == tensor).unwrap();
    let at = (info.offset + info.bytes / 2) as usize / 4 * 4;
    bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
    directory("llama", &[("model.safetensors", bytes)])
}

#[test]
fn numbers_that_no_store_can_hold_are_refused_by_the_tensors_name() {
    let tensors = [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.1.input_layernorm.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
    ];
    for tensor in tensors {
        for (number, says) in [(f32::NAN, "holds NaN"), (f32::NEG_INFINITY, "holds -inf")] {
            let dir = with_number(tensor, number);
            for quant in Quant::OWN {
                let case = format!("{tensor} {number} {}", quant.name());
                let message = pack_refusal(dir.path(), quant, &case);
                assert_says(&message, &["model.safetensors: ", tensor, says, "the model is damaged (at byte "], &case);
            }
        }
        let dir = with_number(tensor, -70_000.0);
        let out = tempfile::tempdir().unwrap();
        let source = Source::open(dir.path(), None).unwrap();
        let options = PackOptions { types: Quant::F32.into(), orders: None };
        pack(&source, &out.path().join("x.neurons"), &options, &|_, _| Ok(())).unwrap();
        if !tensor.contains("norm") {
            for quant in [Quant::F16, Quant::Q8, Quant::Q4] {
                let message = pack_refusal(dir.path(), quant, tensor);
                assert_says(&message, &[tensor, "holds 70000, which f16 cannot; pack it with --quant f32"], tensor);
            }
        }
    }
}

#[test]
fn a_scale_that_is_no_number_is_refused_even_where_blocks_are_copied() {
    for (file, quant) in [("llama-linear-rope.q8_0.gguf", Quant::Q8), ("llama.q4_0.gguf", Quant::Q4)] {
        for tensor in ["blk.0.attn_q.weight", "blk.1.ffn_up.weight", "blk.1.ffn_down.weight"] {
            for scale in [0x7e00u16, 0x7c00, 0xfc00] {
                let dir = tempfile::tempdir().unwrap();
                let path = dir.path().join("model.gguf");
                let mut changed = File::read(file);
                let data = &mut changed.tensor(tensor).data;
                let block = if quant == Quant::Q8 { 34 } else { 18 };
                let at = data.len() / 2 / block * block;
                data[at..at + 2].copy_from_slice(&scale.to_le_bytes());
                // A code of zero times infinity is NaN, any other infinite: both are refused.
                std::fs::write(&path, changed.bytes()).unwrap();
                for quant in [quant, Quant::F32] {
                    let case = format!("{file} {tensor} {scale:x} {}", quant.name());
                    assert_says(&pack_refusal(&path, quant, &case), &[tensor, "the model is damaged"], &case);
                }
            }
        }
    }
}
