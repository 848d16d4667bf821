#!/usr/bin/env python3
"""Make the fixtures of families whose layers differ from each other under tests/fixtures/models: tiny random models as
directories, their GGUF twins, and the answer of transformers.

    ref/bin/python tools/reference/make_families.py models          # or: models gemma3
    ref/bin/python tools/reference/make_families.py gguf            # needs the models
    LLAMA_PYTHON=llama/bin/python ref/bin/python tools/reference/make_families.py check

`check` runs llama.cpp on every GGUF twin; LLAMA_PYTHON is a Python with xllamacpp. Set-up as for make_fixtures.py, whose
helpers are used.
"""
import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import make_fixtures as base
from make_fixtures import CTX, HEADS, HIDDEN, KV, MODELS, VOCAB


def common(kind, cls, **more):
    return {
        "architectures": [cls], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_size": HIDDEN, "initializer_range": 0.02, "intermediate_size": 64,
        "max_position_embeddings": CTX, "model_type": kind, "num_attention_heads": HEADS,
        "num_key_value_heads": KV, "rms_norm_eps": 1e-06, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0", "use_cache": True, "vocab_size": VOCAB, **more}


# As google/gemma-3-4b: one layer of six sees all positions, by a rotation of its own that is scaled.
GEMMA3 = common(
    "gemma3_text", "Gemma3ForCausalLM", attn_logit_softcapping=None, cache_implementation="hybrid",
    final_logit_softcapping=None, head_dim=16, hidden_activation="gelu_pytorch_tanh", num_hidden_layers=7,
    query_pre_attn_scalar=16, rope_local_base_freq=10000.0, rope_scaling={"factor": 8.0, "rope_type": "linear"},
    rope_theta=1000000.0, sliding_window=8, sliding_window_pattern=6)

CONFIGS = {
    "gemma3": GEMMA3,
    # As the largest: queries are divided by another number than the root of a head's size. A model of pictures has
    # its text's part by itself.
    "gemma3-27b": {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
                   "torch_dtype": "bfloat16",
                   "text_config": GEMMA3 | {"query_pre_attn_scalar": 24, "rope_scaling": None}},
}
# As zai-org/GLM-4.5: the first layer has one FFN, half of each head is rotated, and a block that predicts later tokens
# stands behind the others.
CONFIGS["glm4-moe"] = common(
    "glm4_moe", "Glm4MoeForCausalLM", attention_bias=True, first_k_dense_replace=1, head_dim=16, hidden_act="silu",
    moe_intermediate_size=32, n_group=1, n_routed_experts=8, n_shared_experts=1, norm_topk_prob=True,
    num_experts_per_tok=3, num_hidden_layers=3, num_nextn_predict_layers=1, partial_rotary_factor=0.5, rope_scaling=None,
    rope_theta=1000000, rms_norm_eps=1e-05, routed_scaling_factor=1.5, tie_word_embeddings=False, topk_group=1,
    use_qk_norm=True)
# As LiquidAI/LFM2-1.2B and -8B-A1B: most layers have a short convolution in the place of attention.
LFM2 = common(
    "lfm2", "Lfm2ForCausalLM", block_auto_adjust_ff_dim=True, block_ff_dim=96, block_ffn_dim_multiplier=1.0,
    block_multiple_of=32, conv_L_cache=3, conv_bias=False, norm_eps=1e-05, num_hidden_layers=5, rope_theta=1000000.0,
    layer_types=["conv", "conv", "full_attention", "conv", "full_attention"], tie_embedding=True)
for key in ("rms_norm_eps", "intermediate_size", "attention_bias", "attention_dropout", "tie_word_embeddings"):
    del LFM2[key]
CONFIGS["lfm2"] = LFM2
CONFIGS["lfm2-moe"] = {k: v for k, v in LFM2.items() if not k.startswith(("block_", "tie_"))} | {
    "architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "intermediate_size": 96,
    "moe_intermediate_size": 32, "norm_topk_prob": True, "num_dense_layers": 2, "num_experts": 8, "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.0, "use_expert_bias": True}
# As baidu/ERNIE-4.5-21B-A3B: neighbouring rows are rotated, a softmax router with a selection bias.
CONFIGS["ernie4.5-moe"] = common(
    "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", hidden_act="silu", moe_intermediate_size=32, moe_k=2,
    moe_layer_end_index=1, moe_layer_interval=1, moe_layer_start_index=1, moe_num_experts=6, moe_num_shared_experts=2,
    num_hidden_layers=2, pad_token_id=0, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=500000.0, use_bias=False)
# As rednote-hilab/dots.llm1.inst: normed queries and keys.
CONFIGS["dots1"] = common(
    "dots1", "Dots1ForCausalLM", first_k_dense_replace=1, head_dim=16, hidden_act="silu", moe_intermediate_size=32,
    n_group=1, n_routed_experts=6, n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=2, num_hidden_layers=2,
    rope_scaling=None, rope_theta=10000000, routed_scaling_factor=2.5, tie_word_embeddings=False, topk_group=1)
# As HuggingFaceTB/SmolLM3-3B: every fourth layer knows no positions.
CONFIGS["smollm3"] = common(
    "smollm3", "SmolLM3ForCausalLM", hidden_act="silu", max_window_layers=5, mlp_bias=False, no_rope_layer_interval=4,
    no_rope_layers=[1, 1, 1, 0, 1], num_hidden_layers=5, pad_token_id=0, rope_scaling=None, rope_theta=5000000.0, use_sliding_window=False)
# As Qwen/Qwen3.5-0.8B: three layers of four keep a state in the place of keys and values (a gated delta rule), the
# fourth attends with a gate of its output, and a part of its heads is rotated.
QWEN35 = common(
    "qwen3_5_text", "Qwen3_5ForCausalLM", attn_output_gate=True, dtype="bfloat16", full_attention_interval=4, head_dim=16,
    hidden_act="silu", intermediate_size=48, layer_types=["linear_attention"] * 3 + ["full_attention", "linear_attention"],
    linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_value_head_dim=16, mamba_ssm_dtype="float32", mlp_only_layers=[], mtp_num_hidden_layers=0,
    mtp_use_dedicated_embeddings=False, num_hidden_layers=5, transformers_version="4.57.0.dev0",
    rope_parameters={"mrope_interleaved": True, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5,
                     "rope_theta": 10000000, "rope_type": "default"})
del QWEN35["torch_dtype"]
CONFIGS["qwen35"] = QWEN35
# As the file is published: the text's part by itself, beside pictures and a block that predicts later tokens.
CONFIGS["qwen35-vl"] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 316, "model_type": "qwen3_5",
    "text_config": {k: v for k, v in QWEN35.items() if k != "architectures"} | {
        "full_attention_interval": 3, "layer_types": ["linear_attention"] * 2 + ["full_attention"],
        "mtp_num_hidden_layers": 1, "num_hidden_layers": 3,
        "rope_parameters": QWEN35["rope_parameters"] | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}},
    "tie_word_embeddings": True, "transformers_version": "4.57.0.dev0", "video_token_id": 317,
    "vision_config": {
        "deepstack_visual_indexes": [], "depth": 1, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 16, "in_channels": 3,
        "initializer_range": 0.02, "intermediate_size": 32, "model_type": "qwen3_5", "num_heads": 2,
        "num_position_embeddings": 16, "out_hidden_size": HIDDEN, "patch_size": 4, "spatial_merge_size": 2,
        "temporal_patch_size": 2},
    "vision_end_token_id": 319, "vision_start_token_id": 318}
# As Qwen/Qwen3.5-35B-A3B: experts beside a shared one with a gate. Nothing says that weights are normalised; they are.
CONFIGS["qwen35-moe"] = {k: v for k, v in QWEN35.items() if k not in ("intermediate_size", "mlp_only_layers")} | {
    "architectures": ["Qwen3_5MoeForCausalLM"], "full_attention_interval": 3,
    "layer_types": ["linear_attention"] * 2 + ["full_attention"], "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3, "num_hidden_layers": 3,
    "output_router_logits": False, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 32,
    "tie_word_embeddings": False}
# As Qwen/Qwen3-Next-80B-A3B-Instruct: the same, its matrices' rows grouped by key head.
CONFIGS["qwen3-next"] = common(
    "qwen3_next", "Qwen3NextForCausalLM", decoder_sparse_step=1, full_attention_interval=2, head_dim=16, hidden_act="silu",
    linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_value_head_dim=16, mlp_only_layers=[], moe_intermediate_size=32, norm_topk_prob=True, num_experts=8,
    num_experts_per_tok=2, num_hidden_layers=3, output_router_logits=False, partial_rotary_factor=0.25, rope_scaling=None,
    rope_theta=10000000, router_aux_loss_coef=0.001, shared_expert_intermediate_size=32, tie_word_embeddings=False,
    transformers_version="4.57.0.dev0", use_sliding_window=False)
# As nvidia/NVIDIA-Nemotron-Nano-9B-v2: each layer is one mixer with one norm, a Mamba-2 (M), attention without rotation (*)
# or an FFN of two matrices (-). `expand` and `num_hidden_layers` are no sizes; the infinity is in the published file.
NEMOTRON = common(
    "nemotron_h", "NemotronHForCausalLM", chunk_size=32, conv_kernel=4, expand=2, head_dim=32, hidden_dropout=0.0,
    hybrid_override_pattern="M-M*-", intermediate_size=80, layer_norm_epsilon=1e-05, mamba_head_dim=16,
    mamba_hidden_act="silu", mamba_num_heads=6, mamba_proj_bias=False, mlp_bias=False, mlp_hidden_act="relu2", n_groups=2,
    num_hidden_layers=5, num_logits_to_keep=1, pad_token_id=0, rescale_prenorm_residual=True, residual_in_fp32=False,
    rms_norm_eps=1e-05, sliding_window=None, ssm_state_size=16, tie_word_embeddings=False, time_step_floor=0.0001,
    time_step_limit=[0.0, math.inf], time_step_max=0.1, time_step_min=0.001, time_step_rank=256, use_bias=False,
    use_conv_bias=True, use_mamba_kernels=True)
CONFIGS["nemotron-h"] = NEMOTRON
# As nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B: mixtures (E) in the place of FFNs. The fields of a rotation are not used.
CONFIGS["nemotron-h-moe"] = NEMOTRON | {
    "hybrid_override_pattern": "ME*ME", "intermediate_size": 24, "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 48, "n_group": 1, "n_routed_experts": 8, "n_shared_experts": 1, "norm_eps": 1e-05,
    "norm_topk_prob": True, "num_experts_per_tok": 3, "partial_rotary_factor": 1.0, "rope_theta": 10000,
    "routed_scaling_factor": 2.5, "time_step_limit": [0.0, {"__float__": "Infinity"}], "topk_group": 1}
# As nvidia/NVIDIA-Nemotron-3-Super-120B-A12B: the experts see a projection of their input; layers are named by words;
# a block that predicts later tokens stands behind the others.
CONFIGS["nemotron-h-latent"] = {k: v for k, v in CONFIGS["nemotron-h-moe"].items() if k != "hybrid_override_pattern"} | {
    "layers_block_type": ["mamba", "moe", "attention", "moe"], "moe_latent_size": 32,
    "mtp_layers_block_type": ["attention", "moe"], "num_experts_per_tok": 4, "num_hidden_layers": 4,
    "num_nextn_predict_layers": 1, "routed_scaling_factor": 5.0}
# As the text's part of google/gemma-4-31B-it: local layers, and others with larger heads, fewer of them for keys, of which a
# quarter is rotated, and whose keys' matrix makes the values, too.
GEMMA4 = common(
    "gemma4_text", "Gemma4ForCausalLM", attention_k_eq_v=True, dtype="bfloat16", enable_moe_block=False,
    final_logit_softcapping=30.0, global_head_dim=32, head_dim=16, hidden_activation="gelu_pytorch_tanh",
    hidden_size_per_layer_input=0, intermediate_size=48, moe_intermediate_size=None, num_experts=None,
    layer_types=["sliding_attention", "full_attention"] * 2, num_global_key_value_heads=1, num_hidden_layers=4,
    num_kv_shared_layers=0, pad_token_id=0, sliding_window=8, top_k_experts=None, transformers_version="5.5.0.dev0",
    use_bidirectional_attention="vision", use_double_wide_mlp=False, vocab_size_per_layer_input=VOCAB,
    rope_parameters={
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}})
del GEMMA4["torch_dtype"]
CONFIGS["gemma4"] = GEMMA4
# As google/gemma-4-E2B-it: each token has a row for each layer, and the last layers take keys and values of others. The
# text's part by itself, beside pictures, and matrices that are not used.
CONFIGS["gemma4-e2b"] = {
    "architectures": ["Gemma4ForConditionalGeneration"], "audio_config": None, "dtype": "bfloat16", "eos_token_id": 2,
    "image_token_id": 316, "model_type": "gemma4", "tie_word_embeddings": True, "transformers_version": "5.5.0.dev0",
    "text_config": {k: v for k, v in GEMMA4.items() if k != "architectures"} | {
        "attention_k_eq_v": False, "hidden_size_per_layer_input": 8, "intermediate_size": 32,
        "layer_types": ["sliding_attention"] * 2 + ["full_attention", "sliding_attention", "full_attention"],
        "num_global_key_value_heads": None, "num_hidden_layers": 5, "num_key_value_heads": 1, "num_kv_shared_layers": 2,
        "use_bidirectional_attention": None, "use_double_wide_mlp": True},
    "vision_config": {
        "head_dim": 8, "hidden_size": 16, "intermediate_size": 32, "model_type": "gemma4_vision", "num_attention_heads": 2,
        "num_hidden_layers": 1, "num_key_value_heads": 2, "patch_size": 4, "position_embedding_size": 16}}
# As the text's part of google/gemma-4-26B-A4B-it: experts beside the FFN.
CONFIGS["gemma4-moe"] = GEMMA4 | {
    "enable_moe_block": True, "intermediate_size": 32, "moe_intermediate_size": 16, "num_experts": 6, "top_k_experts": 2}
# As deepseek-ai/DeepSeek-V2: keys and values are made of one small vector a token (a latent), and of each head of queries and
# keys the last numbers are rotated, in neighbouring pairs; a softmax router that takes experts of the groups with the best one.
YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 4, "original_max_position_embeddings": 64, "type": "yarn"}
DEEPSEEK = common(
    "deepseek_v2", "DeepseekV2ForCausalLM", aux_loss_alpha=0.001, first_k_dense_replace=1, hidden_act="silu", intermediate_size=48,
    kv_lora_rank=32, moe_intermediate_size=16, moe_layer_freq=1, n_group=4, n_routed_experts=8, n_shared_experts=2,
    norm_topk_prob=False, num_experts_per_tok=3, num_hidden_layers=2, num_key_value_heads=HEADS, q_lora_rank=None,
    qk_nope_head_dim=16, qk_rope_head_dim=8, rope_scaling=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, rope_theta=10000,
    routed_scaling_factor=2.0, scoring_func="softmax", seq_aux=True, tie_word_embeddings=False, topk_group=2,
    topk_method="group_limited_greedy", v_head_dim=12)
CONFIGS["deepseek-v2"] = DEEPSEEK
# As deepseek-ai/DeepSeek-V3: queries are made of a latent, too; a sigmoid router with a selection bias, and groups by their two best.
CONFIGS["deepseek-v3"] = {k: v for k, v in DEEPSEEK.items() if k != "aux_loss_alpha"} | {
    "architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 48, "model_type": "deepseek_v3", "n_shared_experts": 1,
    "norm_topk_prob": True, "num_experts_per_tok": 3, "num_nextn_predict_layers": 0, "q_lora_rank": 24,
    "qk_rope_head_dim": 16, "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "v_head_dim": 24}
# As zai-org/GLM-4.7-Flash: the same without groups and scaling, and with more numbers of a value than of a key that is not rotated.
CONFIGS["glm4-moe-lite"] = {k: v for k, v in CONFIGS["deepseek-v3"].items() if k not in ("moe_layer_freq", "scoring_func", "seq_aux")} | {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "n_group": 1, "num_nextn_predict_layers": 1, "partial_rotary_factor": 1.0,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.8, "topk_group": 1}
# As arcee-ai/AFM-4.5B: Llama without gates, ReLU squared, YaRN without a word of its factor.
ARCEE = common(
    "arcee", "ArceeForCausalLM", eos_token_id=2, head_dim=16, hidden_act="relu2", mlp_bias=False, num_hidden_layers=2,
    rms_norm_eps=1e-05, rope_scaling={
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0, "original_max_position_embeddings": 64,
        "rope_type": "yarn"}, rope_theta=10000.0, tie_word_embeddings=False)
CONFIGS["arcee"] = ARCEE
# As nvidia/Nemotron-Mini-4B-Instruct: LayerNorm whose weights are stored less 1, half of each head rotated, ReLU squared.
CONFIGS["nemotron"] = {k: v for k, v in common(
    "nemotron", "NemotronForCausalLM", head_dim=16, hidden_act="relu2", mlp_bias=False, norm_eps=1e-05, num_hidden_layers=2,
    partial_rotary_factor=0.5, rope_theta=10000, tie_word_embeddings=False).items() if k != "rms_norm_eps"}
# As ibm-granite/granite-3.1-2b-instruct: numbers by which embeddings, scores, outputs and logits are scaled.
CONFIGS["granite"] = common(
    "granite", "GraniteForCausalLM", attention_multiplier=0.1, embedding_multiplier=1.5, hidden_act="silu", logits_scaling=4.0,
    mlp_bias=False, num_hidden_layers=2, pad_token_id=0, residual_multiplier=0.7, rms_norm_eps=1e-05, rope_scaling=None,
    rope_theta=5000000.0)
# As microsoft/phi-4: queries, keys and values in one matrix, gate and up in another.
PHI3 = common(
    "phi3", "Phi3ForCausalLM", embd_pdrop=0.0, hidden_act="silu", num_hidden_layers=2, original_max_position_embeddings=CTX,
    pad_token_id=0, partial_rotary_factor=1.0, resid_pdrop=0.0, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=250000,
    sliding_window=None, tie_word_embeddings=False)
CONFIGS["phi4"] = PHI3
# As microsoft/Phi-4-mini-instruct: three quarters of each head rotated, a divisor for each pair, up to the length of texts
# that it was trained with first and beyond; rotated numbers are scaled by what they are.
CONFIGS["phi4-mini"] = PHI3 | {
    "partial_rotary_factor": 0.75, "original_max_position_embeddings": CTX, "max_position_embeddings": 4096,
    "rope_scaling": {"long_factor": [1.0, 1.5, 2.5, 6.0, 14.0, 30.0], "short_factor": [1.0, 1.05, 1.2, 1.5, 1.9, 2.2],
                     "type": "longrope"},
    "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True}
# As bigcode/starcoder2-3b: LayerNorm, biases everywhere, no gate.
CONFIGS["starcoder2"] = {k: v for k, v in common(
    "starcoder2", "Starcoder2ForCausalLM", embedding_dropout=0.0, hidden_act="gelu_pytorch_tanh", mlp_type="default",
    norm_epsilon=1e-05, norm_type="layer_norm", num_hidden_layers=2, residual_dropout=0.0, rope_theta=999999.4420358813,
    sliding_window=4096, use_bias=True).items() if k not in ("attention_bias", "rms_norm_eps", "tie_word_embeddings")}
# As allenai/OLMo-2-1124-7B: norms behind attention and FFN, queries of all heads normed together, and so keys.
CONFIGS["olmo2"] = common(
    "olmo2", "Olmo2ForCausalLM", hidden_act="silu", num_hidden_layers=2, pad_token_id=0, rope_scaling=None, rope_theta=500000,
    tie_word_embeddings=False)
# As zai-org/GLM-4-9B-0414: neighbouring numbers of half of each head rotated, norms on both sides, gate and up in one matrix.
CONFIGS["glm4"] = common(
    "glm4", "Glm4ForCausalLM", attention_bias=True, head_dim=16, hidden_act="silu", num_hidden_layers=2, pad_token_id=0,
    partial_rotary_factor=0.5, rms_norm_eps=1e-05, rope_theta=10000.0, tie_word_embeddings=False)
DENSE = ("arcee", "nemotron", "granite", "phi3", "starcoder2", "olmo2", "glm4")  # of one kind of layers
SHARES_WEIGHTS = {"gemma3-27b": "gemma3"}
SEEDS = {"gemma4-moe": 332}  # where the usual one gives few different tokens


def delta(c):
    """Whether the model has layers with a gated delta rule."""
    return c["model_type"].startswith(("qwen3_5", "qwen3_next"))


def nemotron(c):
    return c["model_type"] == "nemotron_h"


def dense(c):
    return c["model_type"] in DENSE


def kinds(c):
    """The kind of each layer of a Nemotron-H, as a letter."""
    words = {"mamba": "M", "moe": "E", "attention": "*", "mlp": "-"}
    return c.get("hybrid_override_pattern") or "".join(words[kind] for kind in c["layers_block_type"])


def gemma4(c):
    return c["model_type"].startswith("gemma4")


def latent(c):
    """Whether keys and values are made of one latent."""
    return "kv_lora_rank" in c


def less_one(name, c):
    """Whether a norm is stored less 1."""
    if c["model_type"] == "nemotron":
        return name.endswith("norm.weight")
    return "norm" in name and (c["model_type"].startswith("gemma3") or delta(c) and "linear_attn.norm" not in name)


def grouped_rows(c, keys, values):
    """Where all queries, all keys, all values and all gates lie among rows that are grouped by key head: its `keys`, then
    its share of each of the `values`."""
    heads = c["linear_num_key_heads"]
    rows = np.arange(sum(keys) + sum(values)).reshape(heads, -1)
    ends = np.cumsum([n // heads for n in (*keys, *values)])[:-1]
    return [part.reshape(-1) for part in np.split(rows, ends, axis=1)]


def tiled(name, x, c):
    """Value heads in the order of llama.cpp's files of Qwen 3.5: the first of each key head, the second of each, ..."""
    keys, values = c["linear_num_key_heads"], c["linear_num_value_heads"]
    inner, key = values * c["linear_value_head_dim"], keys * c["linear_key_head_dim"]
    order = lambda rows: np.arange(rows).reshape(keys, values // keys, -1).swapaxes(0, 1).reshape(-1)
    part = name.partition(".linear_attn.")[2].removesuffix(".weight")
    if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias", "in_proj_z"):
        return x[order(len(x))]
    if part in ("in_proj_qkv", "conv1d"):
        return x[np.concatenate([np.arange(2 * key), 2 * key + order(inner)])]
    if part == "out_proj":
        return x[:, order(inner)]
    if part in ("in_proj_qkvz", "in_proj_ba"):
        kinds = ((key, key), (inner, inner)) if part == "in_proj_qkvz" else ((), (values, values))
        moved = np.arange(len(x))
        for rows in grouped_rows(c, *kinds)[-2:]:
            moved[rows] = rows[order(len(rows))]
        return x[moved]
    return x


def by_kind(x, c):
    """Rows of queries and gates, as they are found by one who takes all gates to stand behind all queries."""
    return x.reshape(2, c["num_attention_heads"], -1, x.shape[1]).swapaxes(0, 1).reshape(x.shape)


def ungated(name, x, c):
    if name.endswith("q_proj.weight"):
        halves = x.reshape(c["num_attention_heads"], 2, -1, x.shape[1]).clone()
        halves[:, 1] = 0
        return halves.reshape(x.shape)
    return x * 2 if name.endswith("o_proj.weight") else x


def on(part, change):
    """A mistake that amounts to other values of these tensors."""
    return lambda name, x, c: change(x, c) if part in name else x


DELTA = {
    "value heads in the other order": tiled, "no output gate": ungated, "gates behind the queries": on("q_proj", by_kind),
    "norms as stored": lambda name, x, c: x - 1 if less_one(name, c) else x,
    "the state's norm raised": on("linear_attn.norm", lambda x, c: x + 1), "no decay": on("A_log", lambda x, c: x - 100),
    "taps turned round": on("conv1d", lambda x, c: x.flip(-1))}
def mixers(model):
    """The Mamba-2 layers of a Nemotron-H."""
    return [m for m in model.modules() if type(m).__name__ == "NemotronHMamba2Mixer"]


def one_group(model):
    for m in mixers(model):
        m.norm.group_size = m.intermediate_size


def gate_last(model):
    from torch.nn.functional import silu

    for m in mixers(model):
        m.norm.forward = lambda x, gate, norm=m.norm: type(norm).forward(norm, x) * silu(gate)


def in_turn(model):
    """Head h takes the group h modulo their count."""
    module = sys.modules[type(model).__module__]
    scan, forward = module.mamba2_chunk_scan, model.forward

    def wrong(x, dt, a, b, c, **more):
        return scan(x, dt, a, *(y.repeat(1, 1, x.shape[2] // y.shape[2], 1) for y in (b, c)), **more)

    def forward_wrongly(*args, **more):
        with mock.patch.object(module, "mamba2_chunk_scan", wrong):
            return forward(*args, **more)

    model.forward = forward_wrongly


def rotated(model):
    """Queries and keys rotated, as in most families."""
    import torch

    def turn(module, given, out):
        x = out.unflatten(-1, (-1, model.config.head_dim))
        half = x.shape[-1] // 2
        angle = torch.arange(x.shape[1])[:, None, None] * 1e4 ** (-torch.arange(half) / half)
        cos, sin, a, b = angle.cos(), angle.sin(), x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)

    for name, module in model.named_modules():
        if name.endswith(("q_proj", "k_proj")):
            module.register_forward_hook(turn)


def exchanged(name, x, c):
    """B and C in the other order."""
    if ".in_proj." in name or ".conv1d." in name:
        inner, states = c["mamba_num_heads"] * c["mamba_head_dim"], c["n_groups"] * c["ssm_state_size"]
        start, x = inner * (2 if ".in_proj." in name else 1), x.clone()
        x[start:start + 2 * states] = x[start:start + 2 * states].roll(states, 0)
    return x


MAMBA = {
    "norm over one group": [one_group], "gate behind the norm": [gate_last], "groups in turn": [in_turn],
    "queries and keys rotated": [rotated], "B and C exchanged": exchanged, "no D": on(".mixer.D", lambda x, c: x * 0),
    "convolution without bias": on("conv1d.bias", lambda x, c: x * 0), "no decay": on("A_log", lambda x, c: x - 100),
    "no bias of the step": on("dt_bias", lambda x, c: x * 0),
    "taps turned round": on("conv1d.weight", lambda x, c: x.flip(-1)), "not squared": {"mlp_hidden_act": "relu"}}
ROUTED = {"no scale": {"routed_scaling_factor": 1.0}, "weights not normalised": {"norm_topk_prob": False},
          "no selection bias": on("e_score_correction_bias", lambda x, c: x * 0),
          "no shared expert": on("shared_experts.down_proj", lambda x, c: x * 0)}
def attentions(model):
    return [m for m in model.modules() if type(m).__name__ == "Gemma4TextAttention"]


def scaled(model):
    for m in attentions(model):
        m.scaling = m.head_dim**-0.5


def values_as_they_are(model):
    for m in attentions(model):
        if not m.is_kv_shared_layer:
            m.v_norm.forward = lambda x: x


def values_like_keys(model):
    for m in attentions(model):
        if m.v_proj is None:
            m.v_norm.forward = m.k_norm.forward


def by_rotated_part(model):
    """Frequencies by the size of the part that is rotated."""
    freq = model.model.rotary_emb.full_attention_inv_freq
    freq[freq > 0] **= len(freq) / (freq > 0).sum()


def rows_as_they_are(model):
    model.model.embed_tokens_per_layer.embed_scale.fill_(1)


def router_unscaled(model):
    for m in model.modules():
        if type(m).__name__ == "Gemma4TextRouter":
            m.scalar_root_size = 1.0


def in_halves(name, x, c):
    """Rows of pairs (i, i + half), as they are found by one who takes neighbours to be pairs."""
    rope, x = c["qk_rope_head_dim"], x.clone()
    order = np.arange(rope).reshape(2, -1).T.reshape(-1)
    if name.endswith(("q_proj.weight", "q_b_proj.weight")):
        heads = x.view(c["num_attention_heads"], -1, x.shape[-1])
        heads[:, -rope:] = heads[:, -rope:][:, order]
    elif "kv_a_proj" in name:
        x[-rope:] = x[-rope:][order]
    return x


def latents(model):
    """The attention of each layer of a model with latents."""
    return [m for m in model.modules() if hasattr(m, "kv_b_proj")]


def divided_by(numbers):
    def change(model):
        for m in latents(model):
            m.scaling = numbers(m) ** -0.5

    return [change]


def grouped_by(best):
    """A router whose groups have the sum of so many of their scores."""
    def change(model):
        for m in model.modules():
            if hasattr(m, "num_group"):
                m.forward = lambda x, m=m: route(m, x, best)

    return [change]


def route(m, x, best):
    import torch

    logits = torch.nn.functional.linear(x.view(-1, m.hidden_dim).float(), m.weight.float())
    sigmoid = hasattr(m, "e_score_correction_bias")
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    biased = scores + m.e_score_correction_bias if sigmoid else scores
    groups = biased.view(len(biased), m.num_group, -1)
    kept = groups.topk(best, -1).values.sum(-1).topk(m.topk_group, -1).indices
    mask = torch.zeros(groups.shape[:2], dtype=bool).scatter_(1, kept, True)[..., None].expand(groups.shape).reshape(scores.shape)
    chosen = biased.masked_fill(~mask, -math.inf).topk(m.top_k, -1).indices
    weights = scores.gather(1, chosen)
    return logits, weights / (weights.sum(-1, keepdim=True) if sigmoid else 1) * m.routed_scaling_factor, chosen


LATENT = {
    "pairs in halves": in_halves, "divided by the latent": divided_by(lambda m: m.kv_lora_rank + m.qk_rope_head_dim),
    "no norm of latents": on("kv_a_layernorm", lambda x, c: x * 0 + 1), "no scale": {"routed_scaling_factor": 1.0},
    "no shared expert": on("shared_experts.down_proj", lambda x, c: x * 0)}
SCALED = {"scores without YaRN's scale": divided_by(lambda m: m.qk_head_dim)}
OF_LATENT = {"no norm of the queries' latent": on("q_a_layernorm", lambda x, c: x * 0 + 1), "weights not normalised": {"norm_topk_prob": False},
             "no selection bias": on("e_score_correction_bias", lambda x, c: x * 0)}
LOCAL = GEMMA4["rope_parameters"]["sliding_attention"]
TWO_KINDS = {
    "no window": {"sliding_window": 4096}, "no softcap": {"final_logit_softcapping": None},
    "one rotation": {"rope_parameters": {"full_attention": LOCAL, "sliding_attention": LOCAL}},
    "frequencies by the rotated part": [by_rotated_part], "scaled queries": [scaled],
    "no norm of values": [values_as_they_are], "norms raised": on("norm", lambda x, c: x + 1),
    "no scale of layers": on("layer_scalar", lambda x, c: x * 0 + 1)}
K_IS_V = {"norm of values with the keys' weights": [values_like_keys]}
BY_LAYER = {"no input by layer": on("per_layer_projection.weight", lambda x, c: x * 0),
            "rows not scaled": [rows_as_they_are], "rows only": on("per_layer_projection_norm", lambda x, c: x * 0),
            "no rows": on("embed_tokens_per_layer", lambda x, c: x * 0)}
BESIDE = {"no scale of experts": on("per_expert_scale", lambda x, c: x * 0 + 1),
          "router's logits not divided": [router_unscaled],
          "no scale of the router": on("router.scale", lambda x, c: x * 0 + 1),
          "no dense part": on("layernorm_1", lambda x, c: x * 0),
          "no experts": on("post_feedforward_layernorm_2", lambda x, c: x * 0)}
SHARED = {"no shared expert": on("shared_expert.down_proj", lambda x, c: x * 0),
          "shared expert without gate": lambda name, x, c: (
              x * 0 if "shared_expert_gate" in name else x * 2 if "shared_expert.down_proj" in name else x)}
# Changes of the configuration or, functions, of the weights or, lists of one, of the model that a wrong implementation
# amounts to.
MISTAKES = {
    "gemma3": {"no window": {"sliding_window": 4096}, "one rotation": {"rope_local_base_freq": 1e6},
               "no scaling": {"rope_scaling": None}},
    "gemma3-27b": {"queries by the head's size": {"query_pre_attn_scalar": 16}},
    "ernie4.5-moe": {}, "dots1": {"no scale": {"routed_scaling_factor": 1.0}}, "smollm3": {"rotation everywhere": {"no_rope_layers": [1] * 5}},
    "lfm2": {}, "lfm2-moe": {"weights not normalised": {"norm_topk_prob": False}},
    "glm4-moe": {"whole heads rotated": {"partial_rotary_factor": 1.0}, "no scale": {"routed_scaling_factor": 1.0},
                 "weights not normalised": {"norm_topk_prob": False}},
}
for at, name in (QWEN35, "qwen35"), (CONFIGS["qwen35-vl"]["text_config"], "qwen35-vl"), (QWEN35, "qwen35-moe"):
    whole = {"whole heads rotated": {"rope_parameters": at["rope_parameters"] | {"partial_rotary_factor": 1.0}}}
    MISTAKES[name] = DELTA | whole | (SHARED if name.endswith("moe") else {})
MISTAKES["qwen3-next"] = DELTA | SHARED | {"whole heads rotated": {"partial_rotary_factor": 1.0},
                                           "weights not normalised": {"norm_topk_prob": False}}
MISTAKES |= {"nemotron-h": MAMBA, "nemotron-h-moe": MAMBA | ROUTED, "nemotron-h-latent": MAMBA | ROUTED}
MISTAKES |= {"gemma4": TWO_KINDS | K_IS_V, "gemma4-e2b": TWO_KINDS | BY_LAYER, "gemma4-moe": TWO_KINDS | K_IS_V | BESIDE}
MISTAKES |= {
    "deepseek-v2": LATENT | SCALED | {"groups by their two best": grouped_by(2), "no groups": {"topk_method": "greedy"}},
    "deepseek-v3": LATENT | SCALED | OF_LATENT | {
        "groups by their best": grouped_by(1), "no groups": {"n_group": 1, "topk_group": 1},
        "bounds not rounded": {"rope_scaling": CONFIGS["deepseek-v3"]["rope_scaling"] | {"truncate": False}}},
    "glm4-moe-lite": LATENT | OF_LATENT}




def halves_exchanged(name, x, c):
    """Gate and up in the other order."""
    return x.roll(len(x) // 2, 0) if "gate_up_proj" in name else x


def by_head(model):
    for m in model.modules():
        if type(m).__name__ == "Olmo2Attention":
            for norm in m.q_norm, m.k_norm:
                heads = norm.weight.view(-1, m.head_dim)
                norm.forward = lambda x, heads=heads, eps=norm.variance_epsilon: (
                    (y := x.unflatten(-1, heads.shape)) * (y.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * heads).flatten(-2)


RELU2 = {"not squared": {"hidden_act": "relu"}}
MISTAKES |= {
    "arcee": RELU2 | {"no YaRN": {"rope_scaling": None},
                      "rotated numbers not scaled": {"rope_scaling": ARCEE["rope_scaling"] | {"attention_factor": 1.0}},
                      "bounds not rounded": {"rope_scaling": ARCEE["rope_scaling"] | {"truncate": False}}},
    "nemotron": RELU2 | {"norms as stored": lambda name, x, c: x - 1 if less_one(name, c) else x,
                         "norms without bias": on("norm.bias", lambda x, c: x * 0), "whole heads rotated": {"partial_rotary_factor": 1.0}},
    "granite": {"scores by the root": {"attention_multiplier": 0.25}, "no scale of embeddings": {"embedding_multiplier": 1.0},
                "no scale of outputs": {"residual_multiplier": 1.0}, "no scale of logits": {"logits_scaling": 1.0}},
    "phi4": {"up before gate": halves_exchanged},
    "starcoder2": {"exact GELU": {"hidden_act": "gelu"},
                   "FFN without biases": on("mlp.c_fc.bias", lambda x, c: x * 0), "norms without bias": on("norm.bias", lambda x, c: x * 0)}}
MISTAKES["glm4"] = {"up before gate": halves_exchanged, "whole heads rotated": {"partial_rotary_factor": 1.0},
                    "no biases": on("_proj.bias", lambda x, c: x * 0)}
MISTAKES["olmo2"] = {"heads normed by themselves": [by_head]}
SCALING = CONFIGS["phi4-mini"]["rope_scaling"]
MISTAKES["phi4-mini"] = MISTAKES["phi4"] | {
    "divisors of longer texts": {"rope_scaling": SCALING | {"short_factor": SCALING["long_factor"]}},
    "no divisors": {"rope_scaling": SCALING | {"short_factor": [1.0] * 6}},
    "rotated numbers not scaled": {"rope_scaling": SCALING | {"attention_factor": 1.0}}}


def text_of(cfg):
    return cfg.get("text_config", cfg)


def of_today(c):
    """Whether transformers 5 reads the configuration as it is published."""
    return delta(c) or nemotron(c) or gemma4(c) or latent(c) or dense(c)


def rope_of(c):
    """What transformers 5 reads in place of the fields of older files."""
    if c["model_type"] == "gemma3_text":
        full = {"rope_type": "default", "rope_theta": c["rope_theta"], **(c["rope_scaling"] or {})}
        local = {"rope_type": "default", "rope_theta": c["rope_local_base_freq"]}
        return {"full_attention": full, "sliding_attention": local}
    return {"rope_type": "default", "rope_theta": c["rope_theta"],
            "partial_rotary_factor": c.get("partial_rotary_factor", 1.0)}


OLDER = ("rope_scaling", "rope_theta", "rope_local_base_freq", "sliding_window_pattern", "partial_rotary_factor")


def reference(cfg, **changes):
    """An f64 transformers model for this configuration (weights not set)."""
    import transformers

    c = json.loads(json.dumps(text_of(cfg))) | changes
    if not of_today(c):
        c["rope_parameters"] = rope_of(c)
    c.pop("time_step_limit", None)  # not read, and not a number in JSON
    if c["model_type"] == "gemma3_text":
        every = c["sliding_window_pattern"]
        kinds = ["full_attention" if (n + 1) % every == 0 else "sliding_attention"
                 for n in range(c["num_hidden_layers"])]
        c["layer_types"] = kinds
    for key in () if of_today(c) else OLDER:
        c.pop(key, None)
    cls = getattr(transformers, c.get("architectures", ["Gemma4ForCausalLM" if gemma4(c) else "Qwen3_5ForCausalLM"])[0])
    config = cls.config_class.from_dict(c)
    config._attn_implementation = config._experts_implementation = "eager"
    model = cls(config).double().eval()
    for module in model.modules():
        if type(module).__name__.endswith(("TopKRouter", "TopkRouter", "TextRouter")):
            module.register_forward_hook(seen_by_router)
    return model


GAPS = []  # distances of the last biased score that was taken from the first that was not


def seen_by_router(router, given, out):
    if hasattr(router, "moe_statics"):
        scores = router.moe_statics(out[0].softmax(-1))
    elif type(router).__name__.startswith("Qwen3"):
        scores = out[0].softmax(-1)
    elif type(router).__name__.startswith("Gemma4"):
        scores = out[0]
    elif hasattr(router, "num_group"):
        bias = getattr(router, "e_score_correction_bias", None)
        scores = out[0].softmax(-1) if bias is None else out[0].sigmoid() + bias
        if (router.num_group or 1) > 1:
            groups = scores.view(len(scores), router.num_group, -1)
            sums = groups.topk(1 if bias is None else 2, -1).values.sum(-1)
            best = sums.sort(-1, descending=True).values
            GAPS.append(float((best[:, router.topk_group - 1] - best[:, router.topk_group]).min()))
            scores = groups.masked_fill(sums[..., None] < best[:, router.topk_group - 1, None, None], -1).view(scores.shape)
    else:
        bias = given[1] if len(given) > 1 else router.e_score_correction_bias
        scores = out[0].sigmoid() + bias
    best = scores.sort(-1, descending=True).values
    taken = router.config.top_k_experts if type(router).__name__.startswith("Gemma4") else router.top_k
    GAPS.append(float((best[..., taken - 1] - best[..., taken]).min()))


def random_weights(model, cfg, seed):
    """As base.random_weights: every part of the network moves the logits by much more than rounding does."""
    import torch

    g, c = torch.Generator().manual_seed(seed), text_of(cfg)
    n = lambda p, std: torch.randn(p.shape, generator=g) * std
    unit, out = 1 / math.sqrt(c["hidden_size"]), {}
    gemma = c["model_type"].startswith("gemma")
    for name, p in model.state_dict().items():
        tied = c.get("tie_word_embeddings", True)
        if "rotary" in name or name == "lm_head.weight" and tied:
            continue
        if gemma4(c) and ("q_norm" in name or "k_norm" in name):
            w = torch.rand(p.shape, generator=g) * 0.5 + 0.25  # nothing else scales their product
        elif gemma4(c) and name.endswith(("scalar", "scale")):
            w = torch.rand(p.shape, generator=g) + 0.4
        elif gemma4(c) and name == "model.norm.weight":
            w = 4 * torch.rand(p.shape, generator=g) + 2  # logits that feel the softcap
        elif "router.proj" in name:
            w = n(p, 1.5)  # its input is divided by the root of the hidden size
        elif "embed_tokens_per_layer" in name:
            w = n(p, 1 / math.sqrt(c["hidden_size_per_layer_input"]))
        elif "norm" in name and name.endswith("bias"):
            w = n(p, 0.2)
        elif "norm" in name:
            w = torch.rand(p.shape, generator=g) - (0.5 if less_one(name, c) else -0.5)
        elif name.endswith("A_log"):
            # With the softplus behind it, a step keeps between 0.3 and 0.99 of a state.
            w = torch.rand(p.shape, generator=g) * 3 - 3
        elif ".conv1d." in name:
            w = n(p, 0.5)
        elif ".in_proj_qkv" in name:
            w = n(p, 2 * unit)
        elif ".mixer.in_proj." in name:
            w = n(p, 1.5 * unit)
        elif name.endswith(".D"):
            w = torch.rand(p.shape, generator=g) + 0.2
        elif name.endswith("bias"):
            w = n(p, 0.3)
        elif "embed_tokens" in name or "embeddings" in name:
            # Gemma's are multiplied by the root of the hidden size, and are the head, too.
            w = n(p, (0.8 if gemma else 2) * unit if tied else 0.7)
        elif "lm_head" in name:
            w = n(p, 2 * unit) * torch.exp(0.4 * torch.randn((p.shape[0], 1), generator=g))
        elif "qkv_proj" in name or "q_proj" in name or "k_proj" in name or "gate.weight" in name:
            w = n(p, 1.5 * unit)
        elif "q_b_proj" in name or "kv_b_proj" in name:
            w = n(p, (1.5 if "q_b" in name else 1) / math.sqrt(p.shape[-1]))
        elif ".conv.conv." in name:
            w = n(p, 0.7)
        elif "c_fc.weight" in name:
            w = n(p, 2 * unit)
        elif "down_proj" in name or name.endswith(("w2.weight", "c_proj.weight")):
            w = n(p, 1.5 / math.sqrt(p.shape[-1]))
        else:
            w = n(p, unit)
        out[name] = base.storable(w)
    return out


def load(model, weights):
    missing, unexpected = model.load_state_dict({k: v.double() for k, v in weights.items()}, strict=False)
    assert not unexpected and all("lm_head" in m for m in missing), (missing, unexpected)
    return model


def published(cfg, weights):
    """The same tensors as they are published."""
    # In the files of ERNIE the selection bias stands beside the router, not in it.
    out = {name.replace("mlp.gate.moe_statics", "mlp.moe_statics"): x for name, x in weights.items()}
    if nemotron(cfg):
        out = {name.replace("model.", "backbone.", 1): x for name, x in weights.items()}
        if cfg.get("num_nextn_predict_layers"):
            out |= nemotron_later(weights, kinds(cfg).rindex("*"), kinds(cfg).rindex("E"))
    if nemotron(cfg) or latent(cfg) or cfg["model_type"] == "qwen3_next":
        for name in [name for name in out if ".experts." in name]:
            at, _, kind = name.rpartition(".")
            for e, x in enumerate(out.pop(name)):
                parts = zip(("gate_proj", "up_proj"), x.chunk(2)) if kind == "gate_up_proj" else [(kind, x)]
                out |= {f"{at}.{e}.{part}.weight": rows for part, rows in parts}
    if cfg["model_type"] == "gemma4":
        first, c = "model.layers.0.self_attn.", text_of(cfg)
        for layer in range(c["num_hidden_layers"] - c["num_kv_shared_layers"], c["num_hidden_layers"]):
            own = first if c["layer_types"][layer] == "sliding_attention" else "model.layers.2.self_attn."
            out |= {f"model.layers.{layer}.self_attn.{part}.weight": weights[f"{own}{part}.weight"]
                    for part in ("k_proj", "v_proj", "k_norm")}
        out = {name.replace("model.", "model.language_model.", 1): x for name, x in out.items()}
        out["model.vision_tower.patch_embedder.input_proj.weight"] = weights["model.norm.weight"][:48].expand(16, 48)
    if cfg["model_type"] == "qwen3_5":
        later = predicts_later(weights, text_of(cfg)["num_hidden_layers"] - 1)
        out = {name.replace("model.", "model.language_model.", 1): x for name, x in out.items()}
        picture = out["model.language_model.embed_tokens.weight"].reshape(-1)[: 16 * 3 * 2 * 4 * 4]
        out |= later | {"model.visual.patch_embed.proj.weight": picture.reshape(16, 3, 2, 4, 4)}
    return out


def predicts_later(weights, layer):
    """A block that predicts later tokens, as Qwen's files have it behind the others; here with another block's numbers."""
    at, norm = f"model.layers.{layer}.", weights["model.norm.weight"]
    out = {name.replace(at, "mtp.layers.0."): x for name, x in weights.items() if name.startswith(at)}
    return out | {"mtp.fc.weight": weights[at + "self_attn.q_proj.weight"].T, "mtp.norm.weight": norm,
                  "mtp.pre_fc_norm_embedding.weight": norm, "mtp.pre_fc_norm_hidden.weight": norm}


def nemotron_later(weights, *layers):
    """As `predicts_later`, of two layers."""
    norm, out = weights["model.norm_f.weight"], {}
    for i, layer in enumerate(layers):
        at = f"model.layers.{layer}."
        out |= {name.replace(at, f"mtp.layers.{i}."): x.clone() for name, x in weights.items() if name.startswith(at)}
    return out | {"mtp.layers.0.enorm.weight": norm, "mtp.layers.0.hnorm.weight": norm,
                  "mtp.layers.0.eh_proj.weight": out["mtp.layers.0.mixer.q_proj.weight"].T,
                  "mtp.layers.1.final_layernorm.weight": norm}


def mistaken(cfg, weights, mistake):
    if isinstance(mistake, list):
        model = load(reference(cfg), weights)
        mistake[0](model)
        return model
    if isinstance(mistake, dict):
        return load(reference(cfg, **mistake), weights)
    return load(reference(cfg), {name: mistake(name, x, text_of(cfg)) for name, x in weights.items()})


def make_model(name, seed):
    import torch
    from safetensors.torch import load_file, save_file

    cfg, d = CONFIGS[name], MODELS / name
    shutil.rmtree(d, ignore_errors=True)
    d.mkdir(parents=True)
    print(name, flush=True)
    model, start = reference(cfg), SEEDS.get(name, 300 + seed)
    if name in SHARES_WEIGHTS:
        weights = load_file(MODELS / SHARES_WEIGHTS[name] / "model.safetensors")
        os.symlink(f"../{SHARES_WEIGHTS[name]}/model.safetensors", d / "model.safetensors")
    else:
        weights = random_weights(model, cfg, start)
        # Qwen 3.5 and Nemotron's mixtures have some of their small tensors in F32.
        wide = ("A_log", "linear_attn.norm.weight") if cfg["model_type"].startswith("qwen3_5") else ()
        if nemotron(cfg) and "n_routed_experts" in cfg:
            wide = ("A_log", ".D", "e_score_correction_bias")
        wide = ("e_score_correction_bias",) if latent(cfg) else wide
        stored = {k: v.to(torch.float32 if k.endswith(wide) else torch.bfloat16).contiguous()
                  for k, v in published(cfg, weights).items()}
        save_file(stored, d / "model.safetensors", metadata={"format": "pt"})
    (d / "config.json").write_text(json.dumps(cfg, indent=2, sort_keys=True) + "\n")
    shutil.copy(base.VOCABS / "spm.json", d / "tokenizer.json")
    shutil.copy(base.VOCABS / "tokenizer.model", d / "tokenizer.model")
    load(model, weights)
    c = text_of(cfg)
    distinct, gap = (24 if of_today(c) and not (latent(c) or dense(c)) else 12), (5e-4 if nemotron(c) or gemma4(c) or latent(c) else 2e-4)
    for more in range(20):
        prompt = base.pick_prompt(model, c, start + 1000 * more, 1e-2, 34 if latent(c) or dense(c) else 20 + seed, rounds=10, distinct=distinct)
        GAPS.clear()
        base.greedy(model, prompt)
        if min(GAPS, default=1) > gap:  # no expert is chosen by rounding
            break
    else:
        raise SystemExit(f"experts nearly tied by {min(GAPS)}; change the seed")
    right = base.logits(model, prompt)
    wrong = {m: float((base.logits(mistaken(cfg, weights, mistake), prompt) - right).abs().max())
             for m, mistake in MISTAKES[name].items()}
    base.write_expected(d / "expected", model, c, prompt, {"wrong_by": wrong})
    if of_today(c):
        # The directory as written must be what transformers itself loads, with the same answer.
        from transformers import AutoModelForCausalLM
        same, found = AutoModelForCausalLM.from_pretrained(
            d, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager", output_loading_info=True)
        strange = [k for k in (*found["missing_keys"], *found["unexpected_keys"]) if "vision" not in k]
        assert delta(c) or not strange, found
        assert (apart := (base.logits(same.double(), prompt) - right).abs().max()) < 1e-4, apart
    for f in d.iterdir():
        f.chmod(0o644)  # safetensors writes 0600


# ------------------------------------------------------------------ GGUF
# name of the file -> (model directory, architecture)
GGUFS = {"gemma3": ("gemma3", "gemma3"), "glm4-moe": ("glm4-moe", "glm4moe"),
         "ernie4.5-moe": ("ernie4.5-moe", "ernie4_5-moe"), "smollm3": ("smollm3", "smollm3"),
         "dots1": ("dots1", "dots1"),
         "lfm2": ("lfm2", "lfm2"), "lfm2-moe": ("lfm2-moe", "lfm2moe"), "qwen35": ("qwen35", "qwen35"),
         "qwen35-moe": ("qwen35-moe", "qwen35moe"), "qwen3-next": ("qwen3-next", "qwen3next"),
         "nemotron-h": ("nemotron-h", "nemotron_h"), "nemotron-h-moe": ("nemotron-h-moe", "nemotron_h_moe"),
         "nemotron-h-latent": ("nemotron-h-latent", "nemotron_h_moe"),
         "deepseek-v2": ("deepseek-v2", "deepseek2"), "deepseek-v3": ("deepseek-v3", "deepseek2"),
         "glm4-moe-lite": ("glm4-moe-lite", "deepseek2"),
         "arcee": ("arcee", "arcee"), "nemotron": ("nemotron", "nemotron"), "granite": ("granite", "granite"),
         "phi4": ("phi4", "phi3"), "phi4-mini": ("phi4-mini", "phi3"), "starcoder2": ("starcoder2", "starcoder2"),
         "olmo2": ("olmo2", "olmo2"), "glm4": ("glm4", "glm4"),
         "gemma4": ("gemma4", "gemma4"), "gemma4-e2b": ("gemma4-e2b", "gemma4"), "gemma4-moe": ("gemma4-moe", "gemma4")}

JOINED = {"deepseek-v2", "glm4-moe-lite"}  # twins with what makes keys and values of a latent in one tensor, as in older files
WITH_LATER = {"qwen35-moe"}  # twins with a block that predicts later tokens, which the directory has not

INSIDE = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp", "mlp.moe_statics.e_score_correction": "exp_probs_b", "mlp.gate.e_score_correction": "exp_probs_b",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp", "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp", "mlp.experts.down_proj": "ffn_down_exps", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm"}
INSIDE |= {
    "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "conv.in_proj": "shortconv.in_proj", "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj", "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm", "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down", "feed_forward.gate": "ffn_gate_inp", "feed_forward.expert": "exp_probs_b",
    "feed_forward.experts.down_proj": "ffn_down_exps"}
INSIDE |= {
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.dt": "ssm_dt", "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps", "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm", "hnorm": "nextn.hnorm", "shared_head.norm": "nextn.shared_head_norm"}
LATER = {"mtp.fc": "eh_proj", "mtp.pre_fc_norm_embedding": "enorm", "mtp.pre_fc_norm_hidden": "hnorm",
         "mtp.norm": "shared_head.norm"}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
           "model.embedding_norm": "token_embd_norm"}


INSIDE |= {
    "self_attn.q_a_proj": "attn_q_a", "self_attn.q_b_proj": "attn_q_b", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm", "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b", "self_attn.v_b_proj": "attn_v_b"}
INSIDE_NEMOTRON = {
    "norm": "attn_norm", "mixer.in_proj": "ssm_in", "mixer.conv1d": "ssm_conv1d", "mixer.dt": "ssm_dt", "mixer.norm": "ssm_norm",
    "mixer.out_proj": "ssm_out", "mixer.q_proj": "attn_q", "mixer.k_proj": "attn_k", "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output", "mixer.up_proj": "ffn_up", "mixer.down_proj": "ffn_down", "mixer.gate": "ffn_gate_inp",
    "mixer.gate.e_score_correction": "exp_probs_b", "mixer.experts.up_proj": "ffn_up_exps",
    "mixer.experts.down_proj": "ffn_down_exps", "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp", "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up", "enorm": "nextn.enorm", "hnorm": "nextn.hnorm", "eh_proj": "nextn.eh_proj",
    "post_attention_layernorm": "post_attention_norm", "final_layernorm": "nextn.shared_head_norm"}
INSIDE_GEMMA4 = INSIDE | {
    "layer_scalar": "layer_output_scale", "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm", "router.proj": "ffn_gate_inp", "experts.gate_up_proj": "ffn_gate_up_exps",
    "experts.down_proj": "ffn_down_exps", "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1", "post_feedforward_layernorm_2": "post_ffw_norm_2"}
OUTSIDE |= {"model.embed_tokens_per_layer": "per_layer_token_embd", "model.per_layer_model_projection": "per_layer_model_proj",
            "model.per_layer_projection_norm": "per_layer_proj_norm"}
INSIDE |= {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}
INSIDE |= {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up", "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}
OUTSIDE |= {"backbone.embeddings": "token_embd", "backbone.norm_f": "output_norm"}


def nemotron_tensors(cfg, weights):
    """As `gguf_tensors`, for Nemotron-H. What predicts later tokens is one block."""
    out, later = {}, f"backbone.layers.{len(kinds(cfg))}."
    weights = {name.replace("mtp.layers.1.norm", "mtp.layers.1.post_attention_layernorm"): x for name, x in weights.items()}
    weights = {name.replace("mtp.layers.0.", later).replace("mtp.layers.1.", later): x for name, x in weights.items()}
    for name, x in weights.items():
        at = f"blk.{name.removeprefix('backbone.layers.').partition('.')[0]}."
        if name.endswith("A_log"):
            out[at + "ssm_a"] = -np.exp(x)[:, None]
        elif name.endswith(".D"):
            out[at + "ssm_d"] = x[:, None]
        elif ".experts." not in name or ".experts.0." in name:
            if ".experts.0." in name:
                x = np.stack([weights[name.replace(".0.", f".{e}.")] for e in range(cfg["n_routed_experts"])])
                name = name.replace(".experts.0.", ".experts.")
            stem, kind = name.replace("dt_bias", "dt.bias").replace("correction_bias", "correction.bias").rsplit(".", 1)
            x = x.reshape(cfg["n_groups"], -1) if stem.endswith("mixer.norm") else x.squeeze()
            to = OUTSIDE[stem] if stem in OUTSIDE else at + INSIDE_NEMOTRON[stem.split(".", 3)[3]]
            out[f"{to}.{kind}"] = x
    return out


def nemotron_keys(w, cfg):
    """Write the keys of a Nemotron-H; those of a rotation are there, too, and are not used."""
    mixture = "n_routed_experts" in cfg
    width = cfg["moe_intermediate_size" if mixture else "intermediate_size"]
    later = cfg.get("num_nextn_predict_layers", 0)
    w.add_block_count(len(kinds(cfg)) + later)
    w.add_context_length(2**20)
    w.add_embedding_length(cfg["hidden_size"])
    w.add_vocab_size(cfg["vocab_size"])
    w.add_feed_forward_length([width if kind in "E-" else 0 for kind in kinds(cfg)] + [width] * later)
    w.add_head_count(cfg["num_attention_heads"])
    keys = cfg["num_key_value_heads"]
    w.add_head_count_kv([keys if kind == "*" else 0 for kind in kinds(cfg)] + [keys] * later)
    w.add_key_length(cfg["head_dim"])
    w.add_value_length(cfg["head_dim"])
    w.add_layer_norm_eps(cfg["layer_norm_epsilon"])  # asked for, but its norms take the next
    w.add_layer_norm_rms_eps(cfg["rms_norm_eps"])
    w.add_rope_dimension_count(cfg["hidden_size"] // cfg["num_attention_heads"])
    w.add_rope_freq_base(10000.0)
    w.add_rope_scaling_finetuned(False)
    w.add_ssm_conv_kernel(cfg["conv_kernel"])
    w.add_ssm_state_size(cfg["ssm_state_size"])
    w.add_ssm_group_count(cfg["n_groups"])
    w.add_ssm_inner_size(cfg["mamba_num_heads"] * cfg["mamba_head_dim"])
    w.add_ssm_time_step_rank(cfg["mamba_num_heads"])
    if mixture:
        w.add_expert_count(cfg["n_routed_experts"])
        w.add_expert_used_count(cfg["num_experts_per_tok"])
        w.add_expert_group_count(cfg["n_group"])
        w.add_expert_shared_count(cfg["n_shared_experts"])
        w.add_expert_feed_forward_length(cfg["moe_intermediate_size"])
        w.add_expert_shared_feed_forward_length(cfg["moe_shared_expert_intermediate_size"])
        w.add_expert_weights_norm(cfg["norm_topk_prob"])
        w.add_expert_weights_scale(cfg["routed_scaling_factor"])
    if "moe_latent_size" in cfg:
        w.add_moe_latent_size(cfg["moe_latent_size"])
    if later:
        w.add_nextn_predict_layers(later)


def gemma4_tensors(cfg, weights):
    """As `gguf_tensors`, for Gemma 4."""
    half, rope = cfg["global_head_dim"] // 2, cfg["rope_parameters"]["full_attention"]
    turned = int(half * rope["partial_rotary_factor"])
    out = {"rope_freqs.weight": np.array([1.0] * turned + [1e30] * (half - turned))}
    for name, x in weights.items():
        name = name.replace("model.language_model.", "model.")
        if name.startswith("model.vision_tower."):
            continue
        if ".experts." in name or name.endswith("layer_scalar"):
            name += ".weight"
        name = name.replace("router.scale", "router.proj.scale")
        stem, kind = name.replace("router.per_expert_scale", "experts.down_proj.scale").rsplit(".", 1)
        if stem in OUTSIDE:
            out[f"{OUTSIDE[stem]}.{kind}"] = x
        else:
            _, _, layer, rest = stem.split(".", 3)
            out[f"blk.{layer}.{INSIDE_GEMMA4[rest]}.{kind}"] = x
    return out


def gemma4_keys(w, cfg):
    """Write the keys of a Gemma 4."""
    local, layers = [kind == "sliding_attention" for kind in cfg["layer_types"]], cfg["num_hidden_layers"]
    own = layers - cfg["num_kv_shared_layers"]
    w.add_block_count(layers)
    w.add_context_length(cfg["max_position_embeddings"])
    w.add_embedding_length(cfg["hidden_size"])
    w.add_embedding_length_per_layer_input(cfg["hidden_size_per_layer_input"])
    width = cfg["intermediate_size"]
    wide = cfg["use_double_wide_mlp"]
    w.add_feed_forward_length([width] * own + [2 * width] * (layers - own) if wide else width)
    w.add_head_count(cfg["num_attention_heads"])
    keys, keys_full = cfg["num_key_value_heads"], cfg["num_global_key_value_heads"]
    w.add_head_count_kv([keys if near else keys_full for near in local] if keys_full else keys)
    w.add_shared_kv_layers(cfg["num_kv_shared_layers"])
    w.add_sliding_window(cfg["sliding_window"])
    w.add_sliding_window_pattern(local)
    w.add_layer_norm_rms_eps(cfg["rms_norm_eps"])
    w.add_final_logit_softcapping(cfg["final_logit_softcapping"])
    for add in w.add_key_length, w.add_value_length, w.add_rope_dimension_count:
        add(cfg["global_head_dim"])
    for add in w.add_key_length_swa, w.add_value_length_swa, w.add_rope_dimension_count_swa:
        add(cfg["head_dim"])
    w.add_rope_freq_base(cfg["rope_parameters"]["full_attention"]["rope_theta"])
    w.add_rope_freq_base_swa(cfg["rope_parameters"]["sliding_attention"]["rope_theta"])
    if cfg["enable_moe_block"]:
        w.add_expert_count(cfg["num_experts"])
        w.add_expert_used_count(cfg["top_k_experts"])
        w.add_expert_feed_forward_length(cfg["moe_intermediate_size"])


def converted(cfg, weights):
    """What llama.cpp's converter does to the layers with a gated delta rule, under the names of the directory."""
    out = {}
    for name, x in weights.items():
        if cfg["model_type"].startswith("qwen3_5"):
            x = tiled(name, x, cfg)
        if name.endswith("in_proj_qkvz.weight"):
            inner = cfg["linear_num_value_heads"] * cfg["linear_value_head_dim"]
            key = cfg["linear_num_key_heads"] * cfg["linear_key_head_dim"]
            *qkv, z = grouped_rows(cfg, (key, key), (inner, inner))
            out[name.replace("qkvz", "qkv")], out[name.replace("qkvz", "z")] = x[np.concatenate(qkv)], x[z]
        elif ".experts.0." in name:
            out[name.replace(".experts.0.", ".experts.")] = np.stack(
                [weights[name.replace(".experts.0.", f".experts.{e}.")] for e in range(cfg["num_experts"])])
        elif ".experts." not in name or name.endswith("_proj"):
            flat = "conv1d" in name or "shared_expert_gate" in name
            out[name.replace(".dt_bias", ".dt.bias")] = x.squeeze() if flat else x
    return out


def of_latents(name, cfg, weights):
    """As `converted`, of a model with latents."""
    out, heads, nope = {}, cfg["num_attention_heads"], cfg["qk_nope_head_dim"]
    for at, x in weights.items():
        if ".experts.0." in at:
            x = np.stack([weights[at.replace(".experts.0.", f".experts.{e}.")] for e in range(cfg["n_routed_experts"])])
            out[at.replace(".experts.0.", ".experts.")] = x
        elif at.endswith("kv_b_proj.weight") and name not in JOINED:
            keys, values = np.split(x.reshape(heads, -1, x.shape[-1]), [nope], axis=1)
            out |= {at.replace("kv_b", "k_b"): keys.swapaxes(1, 2), at.replace("kv_b", "v_b"): values}
        elif ".experts." not in at:
            out[at] = x
    return out


def latent_later(cfg):
    """Blocks that predict later tokens, of which the twin has the count only."""
    return cfg["num_nextn_predict_layers"] if cfg["model_type"] == "glm4_moe_lite" else 0


def latent_keys(w, cfg, name):
    """Write the keys of attention with latents."""
    import gguf

    rank, rope = cfg["kv_lora_rank"], cfg["qk_rope_head_dim"]
    key, value = cfg["qk_nope_head_dim"] + rope, cfg["v_head_dim"]
    if cfg["q_lora_rank"]:
        w.add_q_lora_rank(cfg["q_lora_rank"])
    w.add_kv_lora_rank(rank)
    w.add_head_count_kv(cfg["num_attention_heads"] if name in JOINED else 1)
    w.add_key_length(key if name in JOINED else rank + rope)
    w.add_value_length(value if name in JOINED else rank)
    if name not in JOINED:
        w.add_key_length_mla(key)
        w.add_value_length_mla(value)
    w.add_rope_dimension_count(rope)
    w.add_vocab_size(cfg["vocab_size"])
    if later := latent_later(cfg):
        w.add_nextn_predict_layers(later)
    mixture(w, cfg, "first_k_dense_replace", "n_routed_experts", shared="n_shared_experts", scaled=True)
    w.add_expert_group_count(cfg["n_group"])
    w.add_expert_group_used_count(cfg["topk_group"])
    sigmoid = cfg["model_type"] != "deepseek_v2"
    if sigmoid:  # files of V2 have been without it
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if scaling := cfg["rope_scaling"]:
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(scaling["factor"])
        w.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        w.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])


def gguf_tensors(name, cfg, weights):
    """Names and values as llama.cpp's converter writes them."""
    if latent(cfg):
        weights = of_latents(name, cfg, weights)
    if nemotron(cfg):
        return nemotron_tensors(cfg, weights)
    if gemma4(cfg):
        return gemma4_tensors(cfg, weights)
    out = {}
    if delta(cfg):
        weights = converted(cfg, weights)
    for name, x in weights.items():
        if name.endswith("A_log"):
            out[f"blk.{name.split('.')[2]}.ssm_a"] = -np.exp(x)
            continue
        if ".experts." in name and not name.endswith(".weight"):
            name += ".weight"
        if (h := base.heads_of(name, cfg)) and cfg["model_type"] in ("smollm3", "arcee", "granite"):
            x = base.permute(x, h)
        if "moe_statics" in name:
            x = x.squeeze(0)
        if name.endswith("conv.conv.weight"):
            x = x.squeeze(1)
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            name = name.removesuffix("_bias") + ".bias"
        stem, kind = name.rsplit(".", 1)
        if less_one(name, cfg):
            x = x + 1
        if stem in OUTSIDE:
            out[f"{OUTSIDE[stem]}.{kind}"] = x
        else:
            _, _, layer, rest = stem.split(".", 3)
            if rest.endswith(".experts.gate_up_proj"):
                gate, up = np.split(x, 2, axis=1)
                out |= {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
            else:
                # The FFN's norm has its usual name but in GLM and in Qwen, where it has the one of Gemma's other norm.
                usual = rest == "post_attention_layernorm" and not (
                    cfg["model_type"].startswith("gemma3") or cfg["model_type"] in ("glm4_moe", "olmo2") or delta(cfg))
                out[f"blk.{layer}.{'ffn_norm' if usual else INSIDE[rest]}.{kind}"] = x
    return out


def mixture(w, cfg, leading, count, used="num_experts_per_tok", shared=None, scaled=False):
    """Write the keys of a mixture of experts; the names are those of the family's config.json."""
    w.add_leading_dense_block_count(cfg[leading])
    w.add_expert_count(cfg[count])
    w.add_expert_used_count(cfg[used])
    if shared:
        w.add_expert_shared_count(cfg[shared])
    w.add_expert_feed_forward_length(cfg["moe_intermediate_size"])
    if scaled:
        w.add_expert_weights_scale(cfg["routed_scaling_factor"])
        w.add_expert_weights_norm(cfg["norm_topk_prob"])


def delta_keys(w, cfg, blocks):
    """Write the keys of a model with a gated delta rule."""
    w.add_ssm_conv_kernel(cfg["linear_conv_kernel_dim"])
    w.add_ssm_state_size(cfg["linear_key_head_dim"])
    w.add_ssm_group_count(cfg["linear_num_key_heads"])
    w.add_ssm_time_step_rank(cfg["linear_num_value_heads"])
    w.add_ssm_inner_size(cfg["linear_value_head_dim"] * cfg["linear_num_value_heads"])
    w.add_full_attention_interval(cfg["full_attention_interval"])
    rope = cfg.get("rope_parameters", cfg)
    w.add_rope_dimension_count(int(cfg["head_dim"] * rope["partial_rotary_factor"]))
    if "mrope_section" in rope:
        w.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if "num_experts" in cfg:
        w.add_expert_count(cfg["num_experts"])
        w.add_expert_used_count(cfg["num_experts_per_tok"])
        w.add_expert_feed_forward_length(cfg["moe_intermediate_size"])
        w.add_expert_shared_feed_forward_length(cfg["shared_expert_intermediate_size"])
    if blocks > cfg["num_hidden_layers"]:
        w.add_nextn_predict_layers(blocks - cfg["num_hidden_layers"])


def dense_keys(w, cfg):
    """Write the keys that a model of `DENSE` has beside those of all."""
    import gguf

    kind, scaling = cfg["model_type"], cfg.get("rope_scaling")
    w.add_vocab_size(cfg["vocab_size"])
    if kind != "starcoder2":
        head = cfg["hidden_size"] // cfg["num_attention_heads"]
        w.add_rope_dimension_count(int(head * cfg.get("partial_rotary_factor", 1.0)))
    if "rms_norm_eps" not in cfg:
        w.add_layer_norm_eps(cfg.get("norm_eps", cfg.get("norm_epsilon")))
    if kind == "arcee":
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(scaling["factor"])
        w.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if kind == "nemotron":
        w.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if kind == "granite":
        w.add_attention_scale(cfg["attention_multiplier"])
        w.add_embedding_scale(cfg["embedding_multiplier"])
        w.add_residual_scale(cfg["residual_multiplier"])
        w.add_logit_scale(cfg["logits_scaling"])
    if kind == "phi3":
        original = cfg["original_max_position_embeddings"]
        w.add_rope_scaling_orig_ctx_len(original)
        w.add_sliding_window(cfg["sliding_window"] or 0)
        if scaling:
            stretched = cfg["max_position_embeddings"] / original
            w.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretched) / math.log(original)))


WIDE = ("rope_factors", "ffn_gate_inp", "shortconv.conv", "ssm_conv1d", "ssm_norm")  # in F32, as all that is no .weight


def make_gguf(name):
    import gguf
    import sentencepiece as spm

    directory, arch = GGUFS[name]
    cfg = text_of(json.loads((MODELS / directory / "config.json").read_text()))
    weights, blocks = base.load_dir(MODELS / directory), cfg["num_hidden_layers"]
    if name in WITH_LATER:
        later = predicts_later(weights, blocks - 1)
        for at in LATER:
            weights[f"model.layers.{blocks}.{LATER[at]}.weight"] = later.pop(f"{at}.weight")
        weights |= {k.replace("mtp.layers.0.", f"model.layers.{blocks}."): x for k, x in later.items()}
        blocks += 1

    def layers(w):
        if nemotron(cfg) or gemma4(cfg):
            (nemotron_keys if nemotron(cfg) else gemma4_keys)(w, cfg)
            return
        if arch != "glm4moe":
            w.add_block_count(blocks + latent_later(cfg))
        w.add_context_length(cfg["max_position_embeddings"])
        w.add_embedding_length(cfg["hidden_size"])
        ffn = weights.get("model.layers.0.feed_forward.w1.weight")
        if ffn is not None or "intermediate_size" in cfg:
            w.add_feed_forward_length(cfg["intermediate_size"] if ffn is None else len(ffn))
        w.add_head_count(cfg["num_attention_heads"])
        if arch.startswith("lfm2"):
            w.add_head_count_kv([KV if kind == "full_attention" else 0 for kind in cfg["layer_types"]])
            w.add_vocab_size(cfg["vocab_size"])
            w.add_shortconv_l_cache(cfg["conv_L_cache"])
        elif latent(cfg):
            latent_keys(w, cfg, name)
        else:
            w.add_head_count_kv(cfg["num_key_value_heads"])
            if "head_dim" in cfg:
                w.add_key_length(cfg["head_dim"])
                w.add_value_length(cfg["head_dim"])
        if "rms_norm_eps" in cfg or not dense(cfg):
            w.add_layer_norm_rms_eps(cfg.get("rms_norm_eps", cfg.get("norm_eps")))
        w.add_rope_freq_base(cfg.get("rope_parameters", cfg)["rope_theta"])
        if dense(cfg):
            dense_keys(w, cfg)
            return
        if delta(cfg):
            delta_keys(w, cfg, blocks)
        if arch == "dots1":
            mixture(w, cfg, "first_k_dense_replace", "n_routed_experts", shared="n_shared_experts", scaled=True)
            w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        if arch == "ernie4_5-moe":
            mixture(w, cfg, "moe_layer_start_index", "moe_num_experts", used="moe_k", shared="moe_num_shared_experts")
        if arch == "lfm2moe":
            mixture(w, cfg, "num_dense_layers", "num_experts")
            w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        if cfg.get("rope_scaling") and not latent(cfg):
            w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            w.add_rope_scaling_factor(cfg["rope_scaling"]["factor"])
        if cfg.get("sliding_window"):
            w.add_sliding_window(cfg["sliding_window"])
        if arch == "glm4moe":
            w.add_block_count(cfg["num_hidden_layers"] + 1)
            w.add_uint32("glm4moe.nextn_predict_layers", 1)
            w.add_rope_dimension_count(int(cfg["head_dim"] * cfg["partial_rotary_factor"]))
            mixture(w, cfg, "first_k_dense_replace", "n_routed_experts", shared="n_shared_experts", scaled=True)

    def fill(w):
        layers(w)
        w.add_file_type(base.FILE_TYPE["F16"])
        base.add_spm_to_gguf(w, spm.SentencePieceProcessor(model_file=str(base.VOCABS / "tokenizer.model")))
        divisors = cfg.get("rope_scaling") or {}
        factors = {f"rope_factors_{length}.weight": np.array(divisors[f"{length}_factor"]) for length in ("long", "short")
                   if f"{length}_factor" in divisors}
        for tensor, x in (factors | gguf_tensors(name, cfg, weights)).items():
            x = np.ascontiguousarray(x, np.float32)
            wide = x.ndim == 1 or not tensor.endswith(".weight") or any(kind in tensor for kind in WIDE)
            w.add_tensor(tensor, x if wide else x.astype(np.float16))

    base.gguf_file(MODELS / f"{name}.gguf", arch, fill)
    print(f"{name}.gguf")


# ------------------------------------------------------------------ llama.cpp
ASK = """
import json, sys, xllamacpp
path, ids = sys.argv[1], json.loads(sys.argv[2])
params = xllamacpp.CommonParams()
params.model.path = path
params.n_ctx, params.n_parallel, params.warmup = 256, 1, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
server = xllamacpp.Server(params)

def ask(ids, seed):
    answer = server.handle_completions({"prompt": ids, "max_tokens": 1, "logprobs": 320, "cache_prompt": False,
                                        "temperature": 99, "top_k": 0, "top_p": 1, "min_p": 0, "seed": seed})
    found = answer["choices"][0]["logprobs"]
    return found and [[o["id"], o["logprob"]] for o in found["content"][0]["top_logprobs"]]

# An end of text or a part of a character has no probabilities; they are those before sampling, so any token serves.
out = [next(filter(None, (ask(ids[: i + 1], seed) for seed in range(99)))) for i in range(len(ids))]
json.dump(out, open(sys.argv[3], "w"))
"""


def check(name):
    """How far llama.cpp is from the expected answer: the largest difference of a prompt token's logarithm of probability
    over the largest logit, and how many of the 64 tokens are the same (each after those expected before it)."""
    from safetensors.numpy import load_file

    directory = MODELS / GGUFS[name][0]
    doc, expected = json.loads((directory / "expected.json").read_text()), load_file(directory / "expected.safetensors")
    with tempfile.NamedTemporaryFile() as out:
        ids = doc["prompt"] + doc["greedy"][:-1]
        run = subprocess.run([os.environ["LLAMA_PYTHON"], "-c", ASK, MODELS / f"{name}.gguf", json.dumps(ids), out.name],
                             capture_output=True, text=True)
        if run.returncode:
            print(f"{name}: {next((line for line in run.stderr.splitlines() if ' E ' in line), run.stderr)}", flush=True)
            return
        answers = json.load(open(out.name))
    best = [got[0][0] for got in answers[len(doc["prompt"]) - 1:]]
    same = next((i for i, (a, b) in enumerate(zip(best, doc["greedy"], strict=True)) if a != b), base.N_GREEDY)
    rows = [*zip(answers, expected["prompt_logits"]), (answers[-1], expected["last_logits"])]
    apart = 0.0
    for got, right in rows:
        assert len(got) == len(right), (len(got), len(right))
        right = right.astype(np.float64)
        right -= np.log(np.exp(right - right.max()).sum()) + right.max()
        apart = max(apart, *(abs(by - right[id]) for id, by in got))
    apart /= np.abs(expected["prompt_logits"]).max()
    print(f"{name}: {apart:.1e} of the largest logit, {same} of {base.N_GREEDY} tokens the same", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["models", "gguf", "check"])
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    if args.what == "models":
        for seed, name in enumerate(CONFIGS):
            if not args.names or name in args.names:
                make_model(name, seed)
    elif args.what == "gguf":
        for name in GGUFS:
            if not args.names or name in args.names:
                make_gguf(name)
    else:
        for name in args.names or GGUFS:
            check(name)


if __name__ == "__main__":
    main()
