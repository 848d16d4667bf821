//! Keys of one family's GGUFs, and fields of its config.json, that are missing or contradict each other.

use super::*;

/// A model's GGUF with each of these keys changed says why; without one of `required`, or without one of `tensors`, that it is missing.
fn each_is_refused(model: &str, arch: &str, cases: &[(&str, Value, &str)], required: &[&str], tensors: &[&str]) {
    for (key, value, want) in cases {
        let key = format!("{arch}.{key}");
        let message = gguf_refusal(model, "model.gguf", &key, |f| f.set(&key, value.clone()));
        assert_says(&message, &[want], &key);
    }
    for key in required {
        let key = format!("{arch}.{key}");
        let message = gguf_refusal(model, "model.gguf", &key, |f| f.remove(&key));
        assert_says(&message, &[&format!("{key}: missing")], &key);
    }
    for name in tensors {
        let message = gguf_refusal(model, "model.gguf", name, |f| f.drop_tensor(name));
        assert_says(&message, &["the tensor is missing"], name);
    }
}

/// A case whose value is a number.
fn number<'a>((key, value, want): (&'a str, u32, &'a str)) -> (&'a str, Value, &'a str) {
    (key, Value::U32(value), want)
}

/// What both kinds of linear attention need.
const STATE: [&str; 5] =
    ["ssm.inner_size", "ssm.group_count", "ssm.conv_kernel", "ssm.state_size", "ssm.time_step_rank"];

#[test]
fn keys_of_a_delta_net_that_contradict_each_other_are_refused_by_name() {
    let cases = [
        ("ssm.inner_size", 65, "qwen35.ssm.inner_size: is 65; it must be 4 heads of 16"),
        ("ssm.group_count", 0, "the head count of keys of linear attention is 0; it must be 1 to 1024"),
        ("ssm.group_count", 3, "4 value heads of linear attention cannot share 3 key heads"),
        ("ssm.conv_kernel", u32::MAX, "a convolution reads 4294967295 positions; it must be 2 to 64"),
        ("nextn_predict_layers", 5, "qwen35.nextn_predict_layers: the layer count is 0; it must be 1 to 4096"),
        ("full_attention_interval", 0, "no layer has attention"),
        ("rope.dimension_count", 7, "qwen35.rope.dimension_count: is 7; it must be even"),
    ];
    let tensors =
        ["ssm_a", "ssm_dt.bias", "ssm_norm.weight", "ssm_conv1d.weight", "ssm_out.weight", "attn_gate.weight"];
    let tensors = tensors.map(|name| format!("blk.1.{name}"));
    each_is_refused("qwen35.gguf", "qwen35", &cases.map(number), &STATE, &tensors.each_ref().map(String::as_str));
}

#[test]
fn keys_of_mamba_that_contradict_each_other_are_refused_by_name() {
    let cases = [
        ("ssm.inner_size", 97, "nemotron_h.ssm.inner_size: is 97, not a multiple of 6 heads"),
        ("ssm.time_step_rank", 0, "nemotron_h.ssm.inner_size: is 96, not a multiple of 0 heads"),
        ("ssm.group_count", 4, "6 value heads of linear attention cannot share 4 key heads"),
        ("ssm.state_size", 0, "the head size of keys of linear attention is 0; it must be 1 to 1024"),
        ("ssm.state_size", u32::MAX, "the head size of keys of linear attention is 4294967295; it must be 1 to 1024"),
        ("ssm.conv_kernel", 1, "a convolution reads 1 positions; it must be 2 to 64"),
        ("moe_latent_size", 32, "nemotron_h.moe_latent_size: says that experts read a projection to 32 numbers"),
        ("feed_forward_length", 80, "nemotron_h.feed_forward_length: is the u32 80, expected an array of i32"),
        ("block_count", 9, "nemotron_h.attention.head_count_kv: names 5 blocks of 9"),
    ];
    let tensors =
        ["ssm_a", "ssm_d", "ssm_dt.bias", "ssm_norm.weight", "ssm_conv1d.weight", "ssm_conv1d.bias", "ssm_in.weight"];
    let tensors = tensors.map(|name| format!("blk.2.{name}"));
    let tensors = tensors.each_ref().map(String::as_str);
    each_is_refused("nemotron-h.gguf", "nemotron_h", &cases.map(number), &STATE, &tensors);
}

#[test]
fn keys_of_gemma4_that_contradict_each_other_are_refused_by_name() {
    let bools = |list: &[bool]| Value::Array(Array::Bool(list.to_vec()));
    let ints = |list: &[i32]| Value::Array(Array::I32(list.to_vec()));
    let cases = [
        (
            "attention.sliding_window_pattern",
            bools(&[true, false]),
            "gemma4.attention.sliding_window_pattern: names 2 layers of 4",
        ),
        (
            "attention.sliding_window_pattern",
            bools(&[true; 4]),
            "gemma4.attention.sliding_window_pattern: names no layer without a window",
        ),
        (
            "attention.sliding_window",
            Value::U32(0),
            "gemma4.attention.sliding_window: missing: most layers of gemma4 have a window",
        ),
        (
            "attention.head_count_kv",
            ints(&[2, 1, 1, 1]),
            "gemma4.attention.head_count_kv: is 1 in one layer and 2 in another of its kind",
        ),
        ("attention.head_count_kv", ints(&[2, 1]), "gemma4.attention.head_count_kv: names 2 layers of 4"),
        (
            "attention.head_count_kv",
            ints(&[0, 1, 0, 1]),
            "gemma4.attention.head_count_kv: is 0 in one layer and 0 in another of its kind",
        ),
        (
            "attention.value_length_swa",
            Value::U32(8),
            "gemma4.attention.value_length_swa: is 8; it must be 16, as attention.key_length_swa says",
        ),
        (
            "attention.shared_kv_layers",
            Value::U32(9),
            "gemma4.attention.shared_kv_layers: is 9, and there are 4 layers",
        ),
        (
            "attn_logit_softcapping",
            Value::F32(50.0),
            "gemma4.attn_logit_softcapping: is 50; no softcap of attention is supported for gemma4",
        ),
        ("rope.freq_base_swa", Value::F32(0.0), "gemma4.rope.freq_base_swa: 0 is not a positive number"),
    ];
    each_is_refused("gemma4.gguf", "gemma4", &cases, &[], &[]);
    for (model, tensors) in [
        ("gemma4.gguf", &["blk.2.layer_output_scale.weight", "blk.0.attn_v.weight"][..]),
        (
            "gemma4-moe.gguf",
            &[
                "blk.1.ffn_gate_inp.scale",
                "blk.1.ffn_down_exps.scale",
                "blk.3.pre_ffw_norm_2.weight",
                "blk.3.post_ffw_norm_1.weight",
                "blk.3.ffn_gate.weight",
            ],
        ),
        ("gemma4-e2b.gguf", &["per_layer_token_embd.weight", "per_layer_proj_norm.weight", "blk.4.inp_gate.weight"]),
    ] {
        each_is_refused(model, "gemma4", &[], &[], tensors);
    }
    // A draft head is no model by itself.
    let message = gguf_refusal("gemma4.gguf", "model.gguf", "an assistant", |f| {
        f.set("general.architecture", text("gemma4-assistant"));
    });
    assert_says(&message, &["is of a draft head"], "an assistant");
}

#[test]
fn keys_of_latents_that_contradict_each_other_are_refused_by_name() {
    let apart = [
        ("attention.kv_lora_rank", 0, "deepseek2.attention.kv_lora_rank: is 0; it must be 1 to 4096"),
        ("attention.kv_lora_rank", 4097, "deepseek2.attention.kv_lora_rank: is 4097; it must be 1 to 4096"),
        (
            "attention.kv_lora_rank",
            32,
            "deepseek2.attention.key_length: is 64; beside attention.key_length_mla it must be 48",
        ),
        ("attention.q_lora_rank", 0, "deepseek2.attention.q_lora_rank: is 0; it must be 1 to 4096"),
        (
            "attention.q_lora_rank",
            8,
            "blk.0.attn_q_a.weight: has shape [24, 64], the model's configuration needs [8, 64]",
        ),
        (
            "attention.key_length_mla",
            16,
            "deepseek2.attention.key_length_mla: is 16, of which 16 are rotated; it must be more",
        ),
        (
            "attention.value_length_mla",
            u32::MAX,
            "deepseek2.attention.value_length_mla: is 4294967295; it must be 1 to 4096",
        ),
        (
            "attention.value_length_mla",
            16,
            "blk.0.attn_output.weight: has shape [64, 96], the model's configuration needs [64, 64]",
        ),
        (
            "attention.head_count_kv",
            4,
            "deepseek2.attention.head_count_kv: is 4; beside attention.key_length_mla it must be 1",
        ),
        ("attention.head_count", 0, "deepseek2.attention.head_count: is 0"),
        ("rope.dimension_count", 0, "deepseek2.rope.dimension_count: is 0; it must be 1 to 4096"),
        (
            "rope.dimension_count",
            15,
            "deepseek2.attention.key_length: is 64; beside attention.key_length_mla it must be 63",
        ),
        ("expert_group_count", 3, "3 groups of 8 experts"),
        ("expert_group_used_count", 1, "3 experts for a token, of 2 in its groups"),
        ("expert_gating_func", 3, "deepseek2.expert_gating_func: is 3; known are 1 (softmax) and 2 (sigmoid)"),
        ("leading_dense_block_count", 2, "deepseek2.leading_dense_block_count: leaves none of 2 layers with experts"),
        (
            "attention.indexer.head_count",
            4,
            "deepseek2.attention.indexer.head_count: is 4; a sparse indexer beside latents",
        ),
    ];
    let scaling = [
        ("rope.scaling.type", text("linear"), "deepseek2.rope.scaling.type: is 'linear'; only yarn is supported"),
        ("rope.scaling.factor", Value::F32(0.0), "deepseek2.rope.scaling.factor: 0 is not a positive number"),
        ("rope.scaling.yarn_log_multiplier", Value::F32(f32::NAN), "yarn_log_multiplier: is NaN; it must be 0 to 10"),
        ("rope.scaling.yarn_log_multiplier", Value::F32(-1.0), "yarn_log_multiplier: is -1; it must be 0 to 10"),
    ];
    let cases: Vec<_> = apart.map(number).into_iter().chain(scaling).collect();
    let required = [
        "attention.kv_lora_rank",
        "attention.value_length_mla",
        "rope.dimension_count",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "expert_count",
        "expert_used_count",
    ];
    let tensors =
        ["attn_q_a_norm.weight", "attn_q_b.weight", "attn_kv_a_mqa.weight", "attn_kv_a_norm.weight", "attn_v_b.weight"];
    let tensors = tensors.map(|name| format!("blk.1.{name}"));
    let tensors = tensors.each_ref().map(String::as_str);
    each_is_refused("deepseek-v3.gguf", "deepseek2", &cases, &required, &tensors);
    // Older files have keys and values in one matrix.
    let joined = [
        (
            "attention.head_count_kv",
            1,
            "deepseek2.attention.head_count_kv: is 1; without attention.key_length_mla it must be",
        ),
        ("attention.key_length", 8, "deepseek2.attention.key_length: is 8, of which 8 are rotated; it must be more"),
        ("attention.value_length", 0, "deepseek2.attention.value_length: is 0; it must be 1 to 4096"),
        ("rope.dimension_count", 7, "latent attention keeps 32 and 7 numbers of a position; both must be even"),
    ];
    let required = ["attention.key_length", "attention.value_length"];
    each_is_refused("deepseek-v2.gguf", "deepseek2", &joined.map(number), &required, &["blk.1.attn_kv_b.weight"]);
}

#[test]
fn keys_of_dense_families_that_contradict_each_other_are_refused_by_name() {
    let yarn = [
        ("rope.scaling.type", text("longrope"), "arcee.rope.scaling.type: RoPE scaling 'longrope' is not supported"),
        ("rope.scaling.factor", Value::F32(0.0), "arcee.rope.scaling.factor: 0 is not a positive number"),
        ("rope.scaling.attn_factor", Value::F32(0.5), "arcee.rope.scaling.attn_factor: is 0.5; only 1 is supported"),
        ("rope.scaling.yarn_log_multiplier", Value::F32(0.1), "yarn_log_multiplier: is 0.1; only 0 is supported"),
        ("rope.dimension_count", Value::U32(8), "arcee.rope.dimension_count: partial rotation is not supported"),
        ("attention.head_count", Value::U32(0), "arcee.attention.head_count: is 0"),
    ];
    let required = ["rope.scaling.factor", "rope.scaling.original_context_length"];
    each_is_refused("arcee.gguf", "arcee", &yarn, &required, &["blk.1.ffn_up.weight"]);
    let nemotron = [
        ("rope.dimension_count", Value::U32(0), "nemotron.rope.dimension_count: is 0; it must be even"),
        ("rope.dimension_count", Value::U32(u32::MAX), "nemotron.rope.dimension_count: is 4294967295; it must be even"),
        ("rope.scaling.type", text("linear"), "nemotron.rope.scaling.type: scaling is not supported for nemotron"),
        ("attention.layer_norm_epsilon", Value::F32(0.0), "norm epsilon 0 is not between 0 and 0.1"),
    ];
    let tensors = ["blk.1.attn_norm.bias", "blk.1.ffn_norm.bias", "output_norm.bias", "blk.0.ffn_down.weight"];
    each_is_refused("nemotron.gguf", "nemotron", &nemotron, &[], &tensors);
    let granite = [
        ("attention.scale", Value::F32(0.0), "granite.attention.scale: is 0; it must be 0.001 to 1000"),
        ("attention.scale", Value::F32(f32::NAN), "granite.attention.scale: is NaN; it must be 0.001 to 1000"),
        ("logit_scale", Value::F32(f32::INFINITY), "granite.logit_scale: is inf; it must be 0.001 to 1000"),
        ("residual_scale", Value::F32(0.0), "residual scale 0 is not between 0.001 and 1000"),
        ("embedding_scale", Value::F32(-1.0), "embedding scale -1 is not between 0.001 and 1000"),
        (
            "rope.scaling.finetuned",
            Value::Bool(false),
            "granite.rope.scaling.finetuned: is false: a model without rotation",
        ),
    ];
    each_is_refused("granite.gguf", "granite", &granite, &["attention.scale", "logit_scale"], &[]);
    let phi = [
        ("rope.dimension_count", Value::U32(8), "phi3.rope.dimension_count: has 6 divisors for 4 rotated pairs"),
        (
            "rope.dimension_count",
            Value::U32(18),
            "phi3.rope.dimension_count: rotates 18 numbers of a head; it must be even",
        ),
        ("rope.scaling.type", text("yarn"), "phi3.rope.scaling.type: is 'yarn'; only longrope is supported for phi3"),
        ("rope.scaling.attn_factor", Value::F32(0.0), "rotated queries and keys are multiplied by 0; it must be"),
        ("rope.scaling.original_context_length", Value::U32(0), "context length is 0"),
        ("feed_forward_length", Value::U32(48), "blk.0.ffn_up.weight: has shape [128, 64]"),
        ("attention.head_count_kv", Value::U32(4), "blk.0.attn_qkv.weight: has shape [128, 64]"),
    ];
    let tensors = ["blk.1.ffn_down.weight", "blk.0.attn_qkv.weight"];
    each_is_refused("phi4-mini.gguf", "phi3", &phi, &["rope.scaling.original_context_length"], &tensors);
    let tensors = ["blk.1.ffn_up.bias", "blk.0.ffn_down.bias", "blk.1.attn_output.bias", "blk.1.attn_k.bias"];
    each_is_refused("starcoder2.gguf", "starcoder2", &[], &[], &tensors);
    let olmo = [(
        "attention.sliding_window",
        Value::U32(8),
        "olmo2.attention.sliding_window: is 8; OLMo 3, which has windows, is not supported",
    )];
    let tensors = ["blk.1.attn_q_norm.weight", "blk.0.attn_k_norm.weight", "blk.1.post_ffw_norm.weight"];
    each_is_refused("olmo2.gguf", "olmo2", &olmo, &[], &tensors);
    let sections = Value::Array(Array::I32(vec![2, 1, 1, 0]));
    let glm = [
        ("rope.dimension_sections", sections, "glm4.rope.dimension_sections: is of a model that sees pictures"),
        ("rope.dimension_count", Value::U32(7), "glm4.rope.dimension_count: is 7; it must be even"),
    ];
    let tensors = ["blk.1.post_attention_norm.weight", "blk.0.ffn_norm.weight", "blk.1.ffn_up.weight"];
    each_is_refused("glm4.gguf", "glm4", &glm, &[], &tensors);
}

#[test]
fn fields_of_dense_families_that_contradict_each_other_are_refused_by_name() {
    let cases = [
        ("arcee", json!({"mlp_bias": true}), "config.json: mlp_bias: is true; only false is supported"),
        ("arcee", json!({"hidden_act": "drelu"}), "hidden_act: drelu is relu(gate) * relu(up), and ARCEE has no gate"),
        ("arcee", json!({"rope_scaling": {"rope_type": "yarn"}}), "config.json: rope_scaling.factor: missing"),
        (
            "arcee",
            json!({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0}}),
            "rope_scaling.original_max_position_embeddings: 0 is not a positive number",
        ),
        (
            "arcee",
            json!({"rope_scaling": {"rope_type": "yarn", "factor": 1e300, "original_max_position_embeddings": 64}}),
            "rotated queries and keys are multiplied by 70.",
        ),
        (
            "arcee",
            json!({"rope_scaling": {"type": "longrope"}}),
            "rope_scaling: RoPE scaling 'longrope' is not supported",
        ),
        (
            "nemotron",
            json!({"partial_rotary_factor": 0.0}),
            "config.json: partial_rotary_factor: is 0; it must be even",
        ),
        (
            "nemotron",
            json!({"partial_rotary_factor": 1.5}),
            "config.json: partial_rotary_factor: is 24; it must be even",
        ),
        ("nemotron", json!({"rope_scaling": {"type": "linear", "factor": 4.0}}), "config.json: rope_scaling: is {"),
        ("nemotron", json!({"norm_eps": 0.0}), "config.json: norm epsilon 0 is not between 0 and 0.1"),
        ("nemotron", json!({"mlp_bias": true}), "config.json: mlp_bias: is true; only false is supported"),
        ("nemotron", json!({"hidden_act": null}), "config.json: hidden_act: missing"),
        ("granite", json!({"attention_multiplier": 0}), "attention_multiplier: is 0; it must be 0.001 to 1000"),
        ("granite", json!({"attention_multiplier": 900}), "rotated queries and keys are multiplied by 60"),
        ("granite", json!({"attention_multiplier": "a"}), "attention_multiplier: is \"a\", not a number"),
        ("granite", json!({"logits_scaling": -4}), "logits_scaling: is -4; it must be 0.001 to 1000"),
        ("granite", json!({"residual_multiplier": 0}), "residual scale 0 is not between 0.001 and 1000"),
        ("granite", json!({"embedding_multiplier": 1e9}), "embedding scale 1000000000 is not between 0.001 and 1000"),
        (
            "granite",
            json!({"num_local_experts": 4}),
            "num_local_experts: says that its FFNs are mixtures of 4 experts, which is not supported for granite",
        ),
        ("phi4", json!({"intermediate_size": 48}), "mlp.up_proj.weight: has shape [64, 64]"),
        ("phi4", json!({"num_key_value_heads": 4}), "qkv_proj.weight: has shape [128, 64]"),
        ("phi4", json!({"partial_rotary_factor": 0.45}), "rotates 7 numbers of a head; it must be even"),
        (
            "phi4",
            json!({"rope_scaling": {"type": "yarn", "factor": 4.0}}),
            "rope_scaling.rope_type: is 'yarn'; only longrope is supported for phi3",
        ),
        ("phi4-mini", json!({"partial_rotary_factor": 0.5}), "rope_scaling: has 6 divisors for 4 rotated pairs"),
        ("phi4-mini", json!({"original_max_position_embeddings": null}), "original_max_position_embeddings: missing"),
        (
            "phi4-mini",
            json!({"original_max_position_embeddings": 1}),
            "original_max_position_embeddings: is 1; it must be 2",
        ),
        (
            "phi4-mini",
            json!({"rope_scaling": {"type": "longrope", "short_factor": [1, 0, 1, 1, 1, 1]}}),
            "rope_scaling.short_factor: is no list of positive numbers",
        ),
        ("starcoder2", json!({"mlp_type": "gated"}), "config.json: mlp_type: is \"gated\"; only \"default\""),
        ("starcoder2", json!({"norm_type": "rms_norm"}), "config.json: norm_type: is \"rms_norm\"; only"),
        ("starcoder2", json!({"norm_epsilon": 1.0}), "config.json: norm epsilon 1 is not between 0 and 0.1"),
        ("glm4", json!({"partial_rotary_factor": 0.45}), "config.json: partial_rotary_factor: is 7; it must be even"),
        ("glm4", json!({"attention_bias": 1}), "config.json: attention_bias: is 1, not true or false"),
        ("glm4", json!({"intermediate_size": 48}), "mlp.up_proj.weight: has shape [64, 64]"),
        ("olmo2", json!({"num_key_value_heads": 4}), "self_attn.k_proj.weight: has shape [32, 64]"),
        (
            "olmo2",
            json!({"model_type": "qwen3"}),
            "its layers have norms behind attention and FFN, which is not supported",
        ),
        ("starcoder2", json!({"tie_word_embeddings": false}), "lm_head.weight: the tensor is missing"),
    ];
    for (model, changes, want) in cases {
        assert_says(&config_refusal(model, changes.clone()), &[want], &format!("{model} {changes}"));
    }
}
