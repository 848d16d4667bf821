#!/usr/bin/env python3
"""Make the fixtures of families whose layers differ from each other under tests/fixtures/models: tiny random models as
directories, their GGUF twins, and the answer of transformers.

    ref/bin/python tools/reference/make_families.py models          # or: models gemma3
    ref/bin/python tools/reference/make_families.py gguf            # needs the models
    LLAMA_PYTHON=llama/bin/python ref/bin/python tools/reference/make_families.py check

`check` runs llama.cpp on every GGUF twin. Set-up as for make_fixtures.py, whose helpers are used.
"""
import argparse
import json
import math
import os
import shutil
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import make_fixtures as base
import make_mixtures as mixtures
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
SHARES_WEIGHTS = {"gemma3-27b": "gemma3"}
# Changes of the configuration that a wrong implementation amounts to.
MISTAKES = {
    "gemma3": {"no window": {"sliding_window": 4096}, "one rotation": {"rope_local_base_freq": 1e6},
               "no scaling": {"rope_scaling": None}},
    "gemma3-27b": {"queries by the head's size": {"query_pre_attn_scalar": 16}},
    "ernie4.5-moe": {}, "dots1": {"no scale": {"routed_scaling_factor": 1.0}}, "smollm3": {"rotation everywhere": {"no_rope_layers": [1] * 5}},
    "lfm2": {}, "lfm2-moe": {"weights not normalised": {"norm_topk_prob": False}},
    "glm4-moe": {"whole heads rotated": {"partial_rotary_factor": 1.0}, "no scale": {"routed_scaling_factor": 1.0},
                 "weights not normalised": {"norm_topk_prob": False}},
}


def text_of(cfg):
    return cfg.get("text_config", cfg)


def rope_of(c):
    """What transformers 5 reads in place of the fields of older files."""
    if c["model_type"] == "gemma3_text":
        full = {"rope_type": "default", "rope_theta": c["rope_theta"], **(c["rope_scaling"] or {})}
        local = {"rope_type": "default", "rope_theta": c["rope_local_base_freq"]}
        return {"full_attention": full, "sliding_attention": local}
    return {"rope_type": "default", "rope_theta": c["rope_theta"],
            "partial_rotary_factor": c.get("partial_rotary_factor", 1.0)}


def reference(cfg, **changes):
    """An f64 transformers model for this configuration (weights not set)."""
    import transformers

    c = json.loads(json.dumps(text_of(cfg))) | changes
    c["rope_parameters"] = rope_of(c)
    if c["model_type"] == "gemma3_text":
        every = c["sliding_window_pattern"]
        kinds = ["full_attention" if (n + 1) % every == 0 else "sliding_attention"
                 for n in range(c["num_hidden_layers"])]
        c["layer_types"] = kinds
    for key in ("rope_scaling", "rope_theta", "rope_local_base_freq", "sliding_window_pattern", "partial_rotary_factor"):
        c.pop(key, None)
    cls = getattr(transformers, c["architectures"][0])
    config = cls.config_class.from_dict(c)
    config._attn_implementation = config._experts_implementation = "eager"
    model = cls(config).double().eval()
    for module in model.modules():
        if type(module).__name__.endswith(("TopKRouter", "TopkRouter")):
            module.register_forward_hook(seen_by_router)
    return model


GAPS = []  # distances of the last biased score that was taken from the first that was not


def seen_by_router(router, given, out):
    if hasattr(router, "moe_statics"):
        scores = router.moe_statics(out[0].softmax(-1))
    else:
        bias = given[1] if len(given) > 1 else router.e_score_correction_bias
        scores = out[0].sigmoid() + bias
    best = scores.sort(-1, descending=True).values
    GAPS.append(float((best[..., router.top_k - 1] - best[..., router.top_k]).min()))


def random_weights(model, cfg, seed):
    """As base.random_weights: every part of the network moves the logits by much more than rounding does."""
    import torch

    g, c = torch.Generator().manual_seed(seed), text_of(cfg)
    n = lambda p, std: torch.randn(p.shape, generator=g) * std
    unit, out = 1 / math.sqrt(c["hidden_size"]), {}
    gemma = c["model_type"].startswith("gemma3")
    for name, p in model.state_dict().items():
        tied = c.get("tie_word_embeddings", True)
        if "rotary" in name or name == "lm_head.weight" and tied:
            continue
        if "norm" in name:
            w = torch.rand(p.shape, generator=g) - (0.5 if gemma else -0.5)
        elif name.endswith("bias"):
            w = n(p, 0.3)
        elif "embed_tokens" in name:
            # Gemma's are multiplied by the root of the hidden size, and are the head, too.
            w = n(p, (0.8 if gemma else 2) * unit if tied else 0.7)
        elif "lm_head" in name:
            w = n(p, 2 * unit) * torch.exp(0.4 * torch.randn((p.shape[0], 1), generator=g))
        elif "q_proj" in name or "k_proj" in name or "gate.weight" in name:
            w = n(p, 1.5 * unit)
        elif ".conv.conv." in name:
            w = n(p, 0.7)
        elif "down_proj" in name or name.endswith("w2.weight"):
            w = n(p, 1.5 / math.sqrt(p.shape[-1]))
        else:
            w = n(p, unit)
        out[name] = base.storable(w)
    return out


def load(model, weights):
    missing, unexpected = model.load_state_dict({k: v.double() for k, v in weights.items()}, strict=False)
    assert not unexpected and all("lm_head" in m for m in missing), (missing, unexpected)
    return model


def make_model(name, seed):
    import torch
    from safetensors.torch import load_file, save_file

    cfg, d = CONFIGS[name], MODELS / name
    shutil.rmtree(d, ignore_errors=True)
    d.mkdir(parents=True)
    print(name, flush=True)
    model = reference(cfg)
    if name in SHARES_WEIGHTS:
        weights = load_file(MODELS / SHARES_WEIGHTS[name] / "model.safetensors")
        os.symlink(f"../{SHARES_WEIGHTS[name]}/model.safetensors", d / "model.safetensors")
    else:
        weights = random_weights(model, cfg, 300 + seed)
        # In the published files of ERNIE the selection bias stands beside the router, not in it.
        published = lambda name: name.replace("mlp.gate.moe_statics", "mlp.moe_statics")
        stored = {published(k): v.to(torch.bfloat16).contiguous() for k, v in weights.items()}
        save_file(stored, d / "model.safetensors", metadata={"format": "pt"})
    (d / "config.json").write_text(json.dumps(cfg, indent=2, sort_keys=True) + "\n")
    shutil.copy(base.VOCABS / "spm.json", d / "tokenizer.json")
    shutil.copy(base.VOCABS / "tokenizer.model", d / "tokenizer.model")
    load(model, weights)
    c = text_of(cfg)
    prompt = base.pick_prompt(model, c, 300 + seed, 1e-2, 20 + seed, rounds=10, distinct=12)
    right = base.logits(model, prompt)
    wrong = {m: float((base.logits(load(reference(cfg, **change), weights), prompt) - right).abs().max())
             for m, change in MISTAKES[name].items()}
    GAPS.clear()
    base.write_expected(d / "expected", model, c, prompt, {"wrong_by": wrong})
    # No expert is chosen by rounding.
    assert min(GAPS, default=1) > 2e-4, min(GAPS)
    for f in d.iterdir():
        f.chmod(0o644)  # safetensors writes 0600


# ------------------------------------------------------------------ GGUF
GGUFS = {"gemma3": ("gemma3", "gemma3"), "glm4-moe": ("glm4-moe", "glm4moe"),
         "ernie4.5-moe": ("ernie4.5-moe", "ernie4_5-moe"), "smollm3": ("smollm3", "smollm3"),
         "dots1": ("dots1", "dots1"),
         "lfm2": ("lfm2", "lfm2"), "lfm2-moe": ("lfm2-moe", "lfm2moe")}  # name of the file -> (model directory, architecture)

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
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
           "model.embedding_norm": "token_embd_norm"}


def gguf_tensors(cfg, weights):
    """Names and values as llama.cpp's converter writes them."""
    out = {}
    for name, x in weights.items():
        if ".experts." in name and not name.endswith(".weight"):
            name += ".weight"
        if (h := base.heads_of(name, cfg)) and cfg["model_type"] == "smollm3":
            x = base.permute(x, h)
        if "moe_statics" in name:
            x = x.squeeze(0)
        if name.endswith("conv.conv.weight"):
            x = x.squeeze(1)
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            name = name.removesuffix("_bias") + ".bias"
        stem, kind = name.rsplit(".", 1)
        if stem.endswith("norm") and cfg["model_type"].startswith("gemma3"):
            x = x + 1
        if stem in OUTSIDE:
            out[f"{OUTSIDE[stem]}.{kind}"] = x
        else:
            _, _, layer, rest = stem.split(".", 3)
            if rest.endswith(".experts.gate_up_proj"):
                gate, up = np.split(x, 2, axis=1)
                out |= {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
            else:
                # The FFN's norm has its usual name but in GLM, where it stands for what it is in Gemma.
                usual = rest == "post_attention_layernorm" and not cfg["model_type"].startswith(("gemma3", "glm4"))
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


def make_gguf(name):
    import gguf
    import sentencepiece as spm

    directory, arch = GGUFS[name]
    cfg = text_of(json.loads((MODELS / directory / "config.json").read_text()))
    weights = base.load_dir(MODELS / directory)

    def fill(w):
        if arch != "glm4moe":
            w.add_block_count(cfg["num_hidden_layers"])
        w.add_context_length(cfg["max_position_embeddings"])
        w.add_embedding_length(cfg["hidden_size"])
        ffn = weights.get("model.layers.0.feed_forward.w1.weight")
        w.add_feed_forward_length(cfg["intermediate_size"] if ffn is None else len(ffn))
        w.add_head_count(cfg["num_attention_heads"])
        if arch.startswith("lfm2"):
            w.add_head_count_kv([KV if kind == "full_attention" else 0 for kind in cfg["layer_types"]])
            w.add_vocab_size(cfg["vocab_size"])
            w.add_shortconv_l_cache(cfg["conv_L_cache"])
        else:
            w.add_head_count_kv(cfg["num_key_value_heads"])
            if "head_dim" in cfg:
                w.add_key_length(cfg["head_dim"])
                w.add_value_length(cfg["head_dim"])
        w.add_layer_norm_rms_eps(cfg.get("rms_norm_eps", cfg.get("norm_eps")))
        w.add_rope_freq_base(cfg["rope_theta"])
        if arch == "dots1":
            mixture(w, cfg, "first_k_dense_replace", "n_routed_experts", shared="n_shared_experts", scaled=True)
            w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        if arch == "ernie4_5-moe":
            mixture(w, cfg, "moe_layer_start_index", "moe_num_experts", used="moe_k", shared="moe_num_shared_experts")
        if arch == "lfm2moe":
            mixture(w, cfg, "num_dense_layers", "num_experts")
            w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        if cfg.get("rope_scaling"):
            w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            w.add_rope_scaling_factor(cfg["rope_scaling"]["factor"])
        if cfg.get("sliding_window"):
            w.add_sliding_window(cfg["sliding_window"])
        if arch == "glm4moe":
            w.add_block_count(cfg["num_hidden_layers"] + 1)
            w.add_uint32("glm4moe.nextn_predict_layers", 1)
            w.add_rope_dimension_count(int(cfg["head_dim"] * cfg["partial_rotary_factor"]))
            mixture(w, cfg, "first_k_dense_replace", "n_routed_experts", shared="n_shared_experts", scaled=True)
        w.add_file_type(base.FILE_TYPE["F16"])
        base.add_spm_to_gguf(w, spm.SentencePieceProcessor(model_file=str(base.VOCABS / "tokenizer.model")))
        for tensor, x in gguf_tensors(cfg, weights).items():
            x = np.ascontiguousarray(x, np.float32)
            w.add_tensor(tensor, x if x.ndim == 1 or "ffn_gate_inp" in tensor or "shortconv.conv" in tensor else x.astype(np.float16))

    base.gguf_file(MODELS / f"{name}.gguf", arch, fill)
    print(f"{name}.gguf")


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
        mixtures.check_ggufs(args.names or list(GGUFS))


if __name__ == "__main__":
    main()
