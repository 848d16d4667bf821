//! Keys of one family's GGUFs that are missing or contradict each other.

use super::*;

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
    for (key, value, want) in cases {
        let key = format!("qwen35.{key}");
        let message = gguf_refusal("qwen35.gguf", "model.gguf", &key, |f| f.set(&key, Value::U32(value)));
        assert_says(&message, &[want], &key);
    }
    for key in ["ssm.inner_size", "ssm.group_count", "ssm.conv_kernel", "ssm.state_size", "ssm.time_step_rank"] {
        let key = format!("qwen35.{key}");
        let message = gguf_refusal("qwen35.gguf", "model.gguf", &key, |f| f.remove(&key));
        assert_says(&message, &[&format!("{key}: missing")], &key);
    }
    for name in ["ssm_a", "ssm_dt.bias", "ssm_norm.weight", "ssm_conv1d.weight", "ssm_out.weight", "attn_gate.weight"] {
        let name = format!("blk.1.{name}");
        let message = gguf_refusal("qwen35.gguf", "model.gguf", &name, |f| f.drop_tensor(&name));
        assert_says(&message, &["the tensor is missing"], &name);
    }
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
    for (key, value, want) in cases {
        let key = format!("nemotron_h.{key}");
        let message = gguf_refusal("nemotron-h.gguf", "model.gguf", &key, |f| f.set(&key, Value::U32(value)));
        assert_says(&message, &[want], &key);
    }
    for key in ["ssm.inner_size", "ssm.group_count", "ssm.conv_kernel", "ssm.state_size", "ssm.time_step_rank"] {
        let key = format!("nemotron_h.{key}");
        let message = gguf_refusal("nemotron-h.gguf", "model.gguf", &key, |f| f.remove(&key));
        assert_says(&message, &[&format!("{key}: missing")], &key);
    }
    for name in
        ["ssm_a", "ssm_d", "ssm_dt.bias", "ssm_norm.weight", "ssm_conv1d.weight", "ssm_conv1d.bias", "ssm_in.weight"]
    {
        let name = format!("blk.2.{name}");
        let message = gguf_refusal("nemotron-h.gguf", "model.gguf", &name, |f| f.drop_tensor(&name));
        assert_says(&message, &["the tensor is missing"], &name);
    }
}

#[test]
fn keys_of_gemma4_that_contradict_each_other_are_refused_by_name() {
    let bools = |list: &[bool]| Value::Array(Array::Bool(list.to_vec()));
    let ints = |list: &[i32]| Value::Array(Array::I32(list.to_vec()));
    let cases = [
        ("attention.sliding_window_pattern", bools(&[true, false]), "names 2 layers of 4"),
        ("attention.sliding_window_pattern", bools(&[true; 4]), "names no layer without a window"),
        ("attention.sliding_window", Value::U32(0), "missing: most layers of gemma4 have a window"),
        ("attention.head_count_kv", ints(&[2, 1, 1, 1]), "is 1 in one layer and 2 in another of its kind"),
        ("attention.head_count_kv", ints(&[2, 1]), "names 2 layers of 4"),
        ("attention.head_count_kv", ints(&[0, 1, 0, 1]), "is 0 in one layer and 0 in another of its kind"),
        ("attention.value_length_swa", Value::U32(8), "is 8; it must be 16, as attention.key_length_swa says"),
        ("attention.shared_kv_layers", Value::U32(9), "is 9, and there are 4 layers"),
        ("attn_logit_softcapping", Value::F32(50.0), "is 50; no softcap of attention is supported for gemma4"),
        ("rope.freq_base_swa", Value::F32(0.0), "0 is not a positive number"),
    ];
    for (key, value, want) in cases {
        let key = format!("gemma4.{key}");
        let message = gguf_refusal("gemma4.gguf", "model.gguf", &key, |f| f.set(&key, value.clone()));
        assert_says(&message, &[&key, want], &key);
    }
    for (name, tensor) in [
        ("gemma4.gguf", "blk.2.layer_output_scale.weight"),
        ("gemma4.gguf", "blk.0.attn_v.weight"),
        ("gemma4-moe.gguf", "blk.1.ffn_gate_inp.scale"),
        ("gemma4-moe.gguf", "blk.1.ffn_down_exps.scale"),
        ("gemma4-moe.gguf", "blk.3.pre_ffw_norm_2.weight"),
        ("gemma4-moe.gguf", "blk.3.post_ffw_norm_1.weight"),
        ("gemma4-moe.gguf", "blk.3.ffn_gate.weight"),
        ("gemma4-e2b.gguf", "per_layer_token_embd.weight"),
        ("gemma4-e2b.gguf", "per_layer_proj_norm.weight"),
        ("gemma4-e2b.gguf", "blk.4.inp_gate.weight"),
    ] {
        let message = gguf_refusal(name, "model.gguf", tensor, |f| f.drop_tensor(tensor));
        assert_says(&message, &["the tensor is missing"], tensor);
    }
    // A draft head is no model by itself.
    let message = gguf_refusal("gemma4.gguf", "model.gguf", "an assistant", |f| {
        f.set("general.architecture", text("gemma4-assistant"));
    });
    assert_says(&message, &["is of a draft head"], "an assistant");
}
