#!/usr/bin/env python3
"""Make the fixtures of mixtures of experts under tests/fixtures/models: tiny random models, their GGUF twins
(fused and split expert tensors), and the answer of an independent implementation. Also dense Qwen3, whose
attention the mixtures share.

    ref/bin/python tools/reference/make_mixtures.py models          # or: models mixtral
    ref/bin/python tools/reference/make_mixtures.py gguf            # needs the models
    LLAMA_PYTHON=llama/bin/python ref/bin/python tools/reference/make_mixtures.py check
    LLAMA_PYTHON=llama/bin/python ref/bin/python tools/reference/make_mixtures.py kquant

The reference is transformers where it knows the family. Otherwise (dReLU experts, SmallThinker) it is the numpy
forward in this file, written from the published modelling code's description. That forward also computes the
families which transformers knows, and has to agree with it there: so what the families share is proved.
`check` runs llama.cpp on every GGUF twin. Set-up as for make_fixtures.py, whose helpers are used.
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
from types import SimpleNamespace

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import make_fixtures as base
from make_fixtures import CTX, FFN, HEADS, HIDDEN, KV, MODELS, VOCAB

# ------------------------------------------------------------------ configurations, as on the hub
def qwen_config(**more):
    return {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 317, "eos_token_id": 319,
        "head_dim": 32, "hidden_act": "silu", "hidden_size": HIDDEN, "initializer_range": 0.02,
        "intermediate_size": FFN, "max_position_embeddings": CTX, "max_window_layers": 2,
        "num_attention_heads": HEADS, "num_hidden_layers": 2, "num_key_value_heads": KV, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
        "use_sliding_window": False, "vocab_size": VOCAB, **more}


def mixtral_config(**more):
    return {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": HIDDEN, "initializer_range": 0.02, "intermediate_size": 64,
        "max_position_embeddings": CTX, "model_type": "mixtral", "num_attention_heads": HEADS,
        "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_key_value_heads": KV, "num_local_experts": 4,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.36.0", "use_cache": True, "vocab_size": VOCAB, **more}


def smallthinker_config(layers, window, **more):
    """As PowerInfer/SmallThinker-21BA3B: every fourth layer, from the first on, has neither rotation nor window."""
    layout = [int(n % 4 != 0) for n in range(layers)]
    return {
        "architectures": ["SmallThinkerForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_smallthinker.SmallThinkerConfig",
                     "AutoModel": "modeling_smallthinker.SmallThinkerForCausalLM",
                     "AutoModelForCausalLM": "modeling_smallthinker.SmallThinkerForCausalLM"},
        "attention_dropout": 0.0, "bos_token_id": 317, "eos_token_id": [319, 318], "head_dim": 16,
        "hidden_size": HIDDEN, "initializer_range": 0.02, "max_length": None, "max_position_embeddings": CTX,
        "model_name": "smallthinker_tiny", "model_type": "smallthinker", "moe_ffn_hidden_size": 32,
        "moe_num_active_primary_experts": 2, "moe_num_primary_experts": 4,
        "moe_primary_router_apply_softmax": False, "norm_topk_prob": True, "num_attention_heads": HEADS,
        "num_hidden_layers": layers, "num_key_value_heads": KV, "output_router_logits": False,
        "rms_norm_eps": 1e-06, "rope_layout": layout, "rope_scaling": None, "rope_theta": 1.5e6,
        "sliding_window_layout": layout, "sliding_window_size": window, "tie_word_embeddings": False,
        "tokenizer_class": "Qwen2Tokenizer", "torch_dtype": "bfloat16", "transformers_version": "4.53.3",
        "use_cache": True, "vocab_size": VOCAB, **more}


CONFIGS = {
    "qwen3": qwen_config(architectures=["Qwen3ForCausalLM"], model_type="qwen3"),
    "qwen3-moe": qwen_config(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", decoder_sparse_step=1, mlp_only_layers=[],
        moe_intermediate_size=32, norm_topk_prob=True, num_experts=8, num_experts_per_tok=3,
        output_router_logits=False, router_aux_loss_coef=0.001),
    "mixtral": mixtral_config(),
    # The class and type of PowerInfer/TurboSparse-Mixtral; hidden_act as Bamboo's file says it.
    "turbosparse-mixtral": mixtral_config(
        architectures=["TurboSparseMixtralForCausalLM"], model_type="turbosparsemixtral", hidden_act="relu",
        intermediate_size=32,
        auto_map={"AutoConfig": "configuration_turbosparsemixtral.TurboSparseMixtralConfig",
                  "AutoModelForCausalLM": "modeling_turbosparsemixtral.TurboSparseMixtralForCausalLM"}),
    # Sigmoid router; the window is shorter than the prompt, the last layer rotates nothing again.
    "smallthinker": smallthinker_config(5, 8),
    # Softmax router; the window is longer than the context. Not four layers: there llama.cpp would rotate all of them.
    "smallthinker-softmax": smallthinker_config(3, 4096, moe_primary_router_apply_softmax=True),
    # As PowerInfer/SmallThinker-4BA0.6B: rotation everywhere, no windows, tied.
    "smallthinker-4b": smallthinker_config(2, 4096, rope_layout=[1, 1], sliding_window_layout=[0, 0],
                                           tie_word_embeddings=True),
    # As Qwen/Qwen1.5-MoE-A2.7B: neither head_dim nor attention_bias is said; the shared expert is wider than the others.
    "qwen2-moe": qwen_config(
        architectures=["Qwen2MoeForCausalLM"], model_type="qwen2_moe", decoder_sparse_step=1,
        moe_intermediate_size=32, norm_topk_prob=False, num_experts=8, num_experts_per_tok=3,
        output_router_logits=False, router_aux_loss_coef=0.001, shared_expert_intermediate_size=96,
        sliding_window=32768, transformers_version="4.39.0.dev0", attention_bias=None, head_dim=None,
        rope_scaling=None),
}
CONFIGS["qwen2-moe"] = {k: v for k, v in CONFIGS["qwen2-moe"].items() if v is not None}
# What transformers knows.
KNOWN = {"qwen3", "qwen3_moe", "mixtral", "qwen2_moe"}
BYTE_LEVEL = {"qwen3", "qwen3_moe", "smallthinker", "qwen2_moe"}


# ------------------------------------------------------------------ names and weights
def shape_of(cfg):
    """What the families call differently: experts, experts used, width, the prefix of the FFN's tensors, the router's
    name, the names of gate, up and down."""
    kind = cfg["model_type"]
    if kind == "qwen3":
        return SimpleNamespace(experts=0, used=0, width=cfg["intermediate_size"], at="mlp.",
                               names=("gate_proj", "up_proj", "down_proj"))
    if kind in ("qwen3_moe", "qwen2_moe"):
        return SimpleNamespace(experts=cfg["num_experts"], used=cfg["num_experts_per_tok"],
                               width=cfg["moe_intermediate_size"], at="mlp.", router="gate",
                               names=("gate_proj", "up_proj", "down_proj"))
    if kind == "smallthinker":
        return SimpleNamespace(experts=cfg["moe_num_primary_experts"], used=cfg["moe_num_active_primary_experts"],
                               width=cfg["moe_ffn_hidden_size"], at="block_sparse_moe.", router="primary_router",
                               names=("gate", "up", "down"))
    return SimpleNamespace(experts=cfg["num_local_experts"], used=cfg["num_experts_per_tok"],
                           width=cfg["intermediate_size"], at="block_sparse_moe.", router="gate",
                           names=("w1", "w3", "w2"))


def head_dim(cfg):
    return cfg.get("head_dim") or cfg["hidden_size"] // cfg["num_attention_heads"]


def tensor_shapes(cfg):
    """The published tensors and their shapes, one tensor per expert and matrix."""
    s, d, hidden = shape_of(cfg), head_dim(cfg), cfg["hidden_size"]
    q, kv = cfg["num_attention_heads"] * d, cfg["num_key_value_heads"] * d
    out = {"model.embed_tokens.weight": (cfg["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not cfg["tie_word_embeddings"]:
        out["lm_head.weight"] = (cfg["vocab_size"], hidden)
    for n in range(cfg["num_hidden_layers"]):
        at = f"model.layers.{n}."
        out |= {f"{at}input_layernorm.weight": (hidden,), f"{at}post_attention_layernorm.weight": (hidden,),
                f"{at}self_attn.q_proj.weight": (q, hidden), f"{at}self_attn.k_proj.weight": (kv, hidden),
                f"{at}self_attn.v_proj.weight": (kv, hidden), f"{at}self_attn.o_proj.weight": (hidden, q)}
        if cfg["model_type"] == "qwen2_moe":
            shared = cfg["shared_expert_intermediate_size"]
            out |= {f"{at}self_attn.q_proj.bias": (q,), f"{at}self_attn.k_proj.bias": (kv,),
                    f"{at}self_attn.v_proj.bias": (kv,), f"{at}mlp.shared_expert_gate.weight": (1, hidden),
                    f"{at}mlp.shared_expert.gate_proj.weight": (shared, hidden),
                    f"{at}mlp.shared_expert.up_proj.weight": (shared, hidden),
                    f"{at}mlp.shared_expert.down_proj.weight": (hidden, shared)}
        if cfg["model_type"].startswith("qwen3"):
            out |= {f"{at}self_attn.q_norm.weight": (d,), f"{at}self_attn.k_norm.weight": (d,)}
        if s.experts:
            out[f"{at}{s.at}{s.router}.weight"] = (s.experts, hidden)
        for e in range(s.experts) if s.experts else [None]:
            to = f"{at}{s.at}" + ("" if e is None else f"experts.{e}.")
            gate, up, down = s.names
            out |= {f"{to}{gate}.weight": (s.width, hidden), f"{to}{up}.weight": (s.width, hidden),
                    f"{to}{down}.weight": (hidden, s.width)}
    return out


def random_weights(cfg, seed):
    """As base.random_weights: every part of the network moves the logits by much more than rounding does."""
    rng, unit, s = np.random.default_rng(seed), 1 / math.sqrt(cfg["hidden_size"]), shape_of(cfg)
    relu = 1.4 if s.experts and cfg["model_type"] in ("smallthinker", "turbosparsemixtral") else 1.0
    out = {}
    for name, shape in tensor_shapes(cfg).items():
        if "norm" in name:
            out[name] = 0.5 + rng.random(shape)
            continue
        if name.endswith(".bias"):
            std = 0.5
        elif "embed_tokens" in name:
            std = 2 * unit if cfg["tie_word_embeddings"] else 0.7
        elif "lm_head" in name:
            std = 2 * unit
        elif "q_proj" in name or "k_proj" in name:
            std = 1.3 * unit
        elif s.experts and name.endswith((f".{s.router}.weight", "shared_expert_gate.weight")) and "experts" not in name:
            std = 2 * unit  # the choice is decided by more than rounding, and so is the shared expert's weight
        elif name.endswith(f".{s.names[2]}.weight"):
            std = 1.5 * relu / math.sqrt(shape[1])
        else:
            std = unit
        out[name] = rng.normal(size=shape) * std
        if "lm_head" in name:
            # Rows of unequal length: fewer tokens compete, so that 64 choices without a near tie are found.
            out[name] *= np.exp(0.4 * rng.normal(size=(shape[0], 1)))
    return {k: base.storable(torch_of(v)).numpy() for k, v in out.items()}


def torch_of(x):
    import torch

    return torch.tensor(np.asarray(x, np.float32))


# ------------------------------------------------------------------ the numpy forward
def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


class Numpy:
    """A mixture (or dense Qwen3) in numpy, called as a transformers model is. `wrong` names a deliberate mistake;
    `router_gap` of the answer is, for each sequence, the smallest distance of the last router logit that was
    taken from the first that was not."""

    def __init__(self, cfg, weights, wrong=None):
        self.cfg, self.raw, self.wrong = cfg, weights, wrong
        self.double()

    def double(self):
        self.dtype, self.w = np.float64, {k: v.astype(np.float64) for k, v in self.raw.items()}
        return self

    def float(self):
        self.dtype, self.w = np.float32, {k: v.astype(np.float32) for k, v in self.raw.items()}
        return self

    def __call__(self, input_ids, past_key_values=None, use_cache=False):
        import torch

        w, ids = self.w, input_ids.numpy()
        past = past_key_values or {"gap": np.full(len(ids), np.inf), "at": 0}
        self.gap, positions = past["gap"], past["at"] + np.arange(ids.shape[1])
        now = {"at": past["at"] + ids.shape[1]}
        x = w["model.embed_tokens.weight"][ids]
        for n in range(self.cfg["num_hidden_layers"]):
            at = f"model.layers.{n}."
            start, normed = x, self.norm(x, at + "input_layernorm.weight")
            attended, now[n] = self.attention(normed, n, positions, past.get(n))
            x = x + attended
            normed2 = self.norm(x, at + "post_attention_layernorm.weight")
            routed = start if self.cfg["model_type"] == "smallthinker" else normed2
            if self.wrong == "router after attention's norm":
                routed = normed
            if self.wrong == "router after attention":
                routed = normed2
            x = x + self.ffn(normed2, routed, at)
        x = self.norm(x, "model.norm.weight")
        head = w["model.embed_tokens.weight" if self.cfg["tie_word_embeddings"] else "lm_head.weight"]
        now["gap"] = self.gap
        return SimpleNamespace(logits=torch.tensor(x @ head.T), past_key_values=now if use_cache else None,
                               router_gap=torch.tensor(self.gap))

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.dtype(self.cfg["rms_norm_eps"])) * self.w[name]

    def attention(self, x, n, positions, past):
        cfg, at, d = self.cfg, f"model.layers.{n}.self_attn.", head_dim(self.cfg)
        heads, kv = cfg["num_attention_heads"], cfg["num_key_value_heads"]
        bias = lambda name: self.w.get(f"{at}{name}_proj.bias", 0) if self.wrong != "no biases" else 0
        split = lambda name, h: (x @ self.w[f"{at}{name}_proj.weight"].T + bias(name)).reshape(
            *x.shape[:2], h, d).swapaxes(1, 2)
        q, k, v = split("q", heads), split("k", kv), split("v", kv)
        if f"{at}q_norm.weight" in self.w and self.wrong != "no norm of q and k":
            q, k = self.norm(q, f"{at}q_norm.weight"), self.norm(k, f"{at}k_norm.weight")
        if cfg.get("rope_layout", [1] * 99)[n] or self.wrong == "rotation everywhere":
            q, k = self.rotate(q, positions), self.rotate(k, positions)
        if past is not None:
            k, v = np.concatenate([past[0], k], 2), np.concatenate([past[1], v], 2)
        scores = np.einsum("bghqd,bgkd->bghqk", q.reshape(len(q), kv, heads // kv, -1, d), k) / self.dtype(math.sqrt(d))
        keys = np.arange(k.shape[2])
        hidden = keys[None, :] > positions[:, None]
        if cfg.get("sliding_window_layout", [0] * 99)[n] and self.wrong != "no window":
            hidden |= positions[:, None] - keys[None, :] >= cfg["sliding_window_size"]
        scores = np.where(hidden, self.dtype(-np.inf), scores)
        out = np.einsum("bghqk,bgkd->bqghd", softmax(scores), v).reshape(*x.shape[:2], heads * d)
        return out @ self.w[f"{at}o_proj.weight"].T, (k, v)

    def rotate(self, x, positions):
        half = x.shape[-1] // 2
        angle = positions[:, None] * float(self.cfg["rope_theta"]) ** (-np.arange(half) / half)[None, :]
        cos, sin = np.cos(angle).astype(self.dtype), np.sin(angle).astype(self.dtype)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def ffn(self, x, routed, at):
        s = shape_of(self.cfg)
        if not s.experts:
            return self.expert(x, at + s.at, s.names)
        logits = routed @ self.w[f"{at}{s.at}{s.router}.weight"].T
        weights = self.route(logits, s.used)
        out = np.zeros_like(x)
        for e in range(s.experts):
            out += weights[..., e : e + 1] * self.expert(x, f"{at}{s.at}experts.{e}.", s.names)
        if self.cfg["model_type"] == "qwen2_moe" and self.wrong != "no shared expert":
            weight = 1 / (1 + np.exp(-(x @ self.w[f"{at}{s.at}shared_expert_gate.weight"].T)))
            if self.wrong == "shared expert without its gate":
                weight = 1
            out += weight * self.expert(x, f"{at}{s.at}shared_expert.", s.names)
        return out

    def route(self, logits, used):
        """The weight of each expert, zero for those that were not taken."""
        order = np.sort(logits, -1)
        self.gap = np.minimum(self.gap, (order[..., -used] - order[..., -used - 1]).min(-1))
        taken = logits >= order[..., -used, None]
        sigmoid = self.cfg["model_type"] == "smallthinker" and not self.cfg["moe_primary_router_apply_softmax"]
        if self.wrong == "the other router function":
            sigmoid = not sigmoid
        score = 1 / (1 + np.exp(-logits)) if sigmoid else softmax(logits)
        score = np.where(taken, score, self.dtype(0))
        normalised = self.cfg.get("norm_topk_prob", True) or self.wrong == "weights normalised"
        if not normalised or self.wrong == "weights not normalised":
            return score
        return score / score.sum(-1, keepdims=True)

    def expert(self, x, at, names):
        gate, up, down = (self.w[f"{at}{n}.weight"].T for n in names)
        g, u, kind = x @ gate, x @ up, self.cfg["model_type"]
        if kind == "turbosparsemixtral" and self.wrong != "ReGLU instead":
            u = np.maximum(u, 0)
        relu = kind in ("turbosparsemixtral", "smallthinker") or self.cfg.get("hidden_act") == "relu"
        if relu and self.wrong != "silu instead":
            return (np.maximum(g, 0) * u) @ down
        return (g / (1 + np.exp(-g)) * u) @ down


MISTAKES = {
    "qwen3": ["no norm of q and k"],
    "qwen3_moe": ["no norm of q and k", "weights not normalised"],
    "mixtral": ["weights not normalised"],
    "qwen2_moe": ["weights normalised", "no shared expert", "shared expert without its gate", "no biases"],
    "turbosparsemixtral": ["weights not normalised", "ReGLU instead", "silu instead"],
    "smallthinker": ["weights not normalised", "router after attention", "router after attention's norm",
                     "the other router function", "rotation everywhere", "no window", "silu instead"],
}


# ------------------------------------------------------------------ models
def make_model(name, seed):
    import torch
    from safetensors.torch import save_file

    cfg, d = CONFIGS[name], MODELS / name
    shutil.rmtree(d, ignore_errors=True)
    d.mkdir(parents=True)
    print(name, flush=True)
    weights = random_weights(cfg, 100 + seed)
    dtype = getattr(torch, cfg["torch_dtype"])
    save_file({k: torch.tensor(v).to(dtype) for k, v in weights.items()}, d / "model.safetensors",
              metadata={"format": "pt"})
    (d / "config.json").write_text(json.dumps(cfg, indent=2, sort_keys=True) + "\n")
    add_tokenizer_files(cfg, d)
    ours = Numpy(cfg, weights)
    prompt = base.pick_prompt(ours, cfg, 100 + seed, 1e-2, 12 + seed, rounds=10, distinct=12)
    right = base.logits(ours, prompt)
    extra = {"min_router_gap": router_gap(ours, prompt)} if shape_of(cfg).experts else {}
    wrong = {m: float((base.logits(Numpy(cfg, weights, m), prompt) - right).abs().max())
             for m in MISTAKES[cfg["model_type"]]}
    # A mistake which this configuration cannot show (rotation everywhere where all layers rotate) has no line.
    extra["wrong_by"] = {m: by for m, by in wrong.items() if by > 0}
    if cfg["model_type"] in KNOWN:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(d, dtype=torch.float64, attn_implementation="eager",
                                                     experts_implementation="eager")
        apart = float((base.logits(model, prompt) - right).abs().max())
        assert apart < 1e-4, apart
        extra["numpy_differs_by"] = apart
    else:
        model, extra["reference"] = ours, "numpy, float64"
    base.write_expected(d / "expected", model, cfg, prompt, extra)
    for f in d.iterdir():
        f.chmod(0o644)  # safetensors writes 0600


def router_gap(model, prompt):
    import torch

    out, _, _, _ = base.greedy(model, prompt)
    return float(model(input_ids=torch.tensor([prompt + out[:-1]])).router_gap[0])


def add_tokenizer_files(cfg, d):
    if cfg["model_type"] in BYTE_LEVEL:
        shutil.copy(base.VOCABS / "qwen2.json", d / "tokenizer.json")
    else:
        shutil.copy(base.VOCABS / "spm.json", d / "tokenizer.json")
        shutil.copy(base.VOCABS / "tokenizer.model", d / "tokenizer.model")


# ------------------------------------------------------------------ GGUF
# name of the file -> (model directory, architecture, storage type of the matrices, one tensor per expert)
GGUFS = {
    "qwen3": ("qwen3", "qwen3", "F16", False), "qwen3-moe": ("qwen3-moe", "qwen3moe", "F16", False),
    "mixtral": ("mixtral", "llama", "F16", False), "mixtral.split": ("mixtral", "llama", "F16", True),
    "turbosparse-mixtral": ("turbosparse-mixtral", "llama", "F16", False),
    "smallthinker": ("smallthinker", "smallthinker", "F16", False),
    "smallthinker-softmax": ("smallthinker-softmax", "smallthinker", "F16", False),
    "smallthinker-4b": ("smallthinker-4b", "smallthinker", "F16", False),
    "qwen2-moe": ("qwen2-moe", "qwen2moe", "F16", False),
}


def gguf_tensors(cfg, weights, arch, split):
    """Names and values as llama.cpp's converter writes them: the experts of a layer and matrix as one tensor
    [expert, row, column], or, as it did at first, a tensor each."""
    s, out = shape_of(cfg), {}
    kinds = dict(zip(s.names, ("ffn_gate", "ffn_up", "ffn_down")))
    more = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
    if s.experts:
        more[s.at + s.router] = "ffn_gate_inp"
    more |= {f"mlp.shared_expert.{kind}": f"{to}_shexp" for kind, to in kinds.items()}
    more["mlp.shared_expert_gate"] = "ffn_gate_inp_shexp"
    for name, x in weights.items():
        if (h := base.heads_of(name, cfg)) and arch == "llama":
            x = base.permute(x, h)
        stem = name.removesuffix(".weight")
        if ".experts." in stem:
            at, e, kind = stem.rsplit(".", 2)
            layer = at.split(".")[2]
            if split:
                out[f"blk.{layer}.{kinds[kind]}.{e}.weight"] = x
            elif e == "0":
                every = [weights[f"{at}.{i}.{kind}.weight"] for i in range(s.experts)]
                out[f"blk.{layer}.{kinds[kind]}_exps.weight"] = np.stack(every)
        elif ".layers." in stem and stem.split(".", 3)[3] in more:
            _, _, layer, rest = stem.split(".", 3)
            out[f"blk.{layer}.{more[rest]}.weight"] = x.squeeze()  # the shared expert's gate has one row
        else:
            out[base.gguf_name(name)] = x
    return out


def fill_gguf(w, cfg, weights, arch, kind, split):
    import gguf

    s, d = shape_of(cfg), head_dim(cfg)
    w.add_block_count(cfg["num_hidden_layers"])
    w.add_context_length(cfg["max_position_embeddings"])
    w.add_embedding_length(cfg["hidden_size"])
    w.add_feed_forward_length(cfg.get("intermediate_size", s.width))
    w.add_head_count(cfg["num_attention_heads"])
    w.add_head_count_kv(cfg["num_key_value_heads"])
    w.add_layer_norm_rms_eps(cfg["rms_norm_eps"])
    w.add_rope_freq_base(cfg["rope_theta"])
    if "head_dim" in cfg:
        w.add_key_length(d)
        w.add_value_length(d)
    if arch in ("llama", "smallthinker"):
        w.add_rope_dimension_count(d)
    if s.experts:
        w.add_expert_count(s.experts)
        w.add_expert_used_count(s.used)
    if arch in ("qwen2moe", "qwen3moe", "smallthinker"):
        w.add_expert_feed_forward_length(s.width)
    if arch == "qwen2moe":
        w.add_expert_shared_feed_forward_length(cfg["shared_expert_intermediate_size"])
    if arch == "smallthinker":
        softmax_router = cfg["moe_primary_router_apply_softmax"]
        w.add_expert_gating_func(
            gguf.ExpertGatingFuncType.SOFTMAX if softmax_router else gguf.ExpertGatingFuncType.SIGMOID)
        if any(cfg["sliding_window_layout"]):
            w.add_sliding_window(cfg["sliding_window_size"])
    if arch == "llama":
        w.add_vocab_size(cfg["vocab_size"])
    if cfg["model_type"] == "turbosparsemixtral":
        w.add_string("llama.hidden_act", "drelu")  # a key of ours: llama.cpp always takes SiLU
    w.add_file_type(base.FILE_TYPE[kind])
    if cfg["model_type"] in BYTE_LEVEL:
        base.add_bpe_to_gguf(w, json.loads((base.VOCABS / "qwen2.json").read_text()), "qwen2",
                             "<|endoftext|>", "<|im_end|>", False)
    else:
        import sentencepiece as spm
        base.add_spm_to_gguf(w, spm.SentencePieceProcessor(model_file=str(base.VOCABS / "tokenizer.model")))
    for name, x in gguf_tensors(cfg, weights, arch, split).items():
        x = np.ascontiguousarray(x, np.float32)
        if x.ndim == 1 or kind == "F32" or "ffn_gate_inp" in name:  # converters keep the router in F32
            w.add_tensor(name, x)
        elif kind == "F16":
            w.add_tensor(name, x.astype(np.float16))
        else:
            t = gguf.GGMLQuantizationType[kind]
            w.add_tensor(name, gguf.quants.quantize(x, t), raw_dtype=t)


def make_gguf(file):
    name, arch, kind, split = GGUFS[file]
    path, weights = MODELS / f"{file}.gguf", base.load_dir(MODELS / name)
    base.gguf_file(path, arch, lambda w: fill_gguf(w, CONFIGS[name], weights, arch, kind, split))
    print(file, path.stat().st_size, flush=True)


# ------------------------------------------------------------------ llama.cpp
ASK = """
import json, sys, numpy as np, llama_cpp as L
path, prompt, n = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
m = L.Llama(path, n_ctx=256, n_batch=256, n_threads=1, logits_all=True, verbose=False, type_k=0, type_v=0)
m.eval(prompt)
first, ids = np.array(m.scores[:len(prompt)]), []
for _ in range(n):
    ids.append(int(np.argmax(m.scores[len(prompt) + len(ids) - 1])))
    if len(ids) < n:
        m.eval(ids[-1:])
np.savez(sys.argv[4], first=first, last=m.scores[len(prompt) + n - 2], ids=ids)
"""


def ask_llama(path, prompt):
    """llama.cpp's logits at the prompt, its 64 greedy tokens, and the logits that chose the last of them."""
    with tempfile.TemporaryDirectory() as t:
        out = Path(t) / "out.npz"
        subprocess.run([os.environ["LLAMA_PYTHON"], "-c", ASK, path, json.dumps(prompt), str(base.N_GREEDY), out],
                       check=True, capture_output=True)
        with np.load(out) as got:
            return got["first"], got["ids"].tolist(), got["last"]


def check(file):
    """How far llama.cpp is from the expected answer: largest difference of a prompt logit over the largest logit, and
    whether the 64 tokens are the same."""
    from safetensors.numpy import load_file

    name, _, _, split = GGUFS[file]
    if split:
        check_split(file)
        return
    cfg, doc = CONFIGS[name], json.loads((MODELS / name / "expected.json").read_text())
    expected = load_file(MODELS / name / "expected.safetensors")["prompt_logits"]
    note, other = "", None
    if cfg["model_type"] == "turbosparsemixtral":
        other = Numpy(cfg | {"model_type": "mixtral", "hidden_act": "silu"}, base.load_dir(MODELS / name))
        note = "against the numpy forward with SiLU, the only function it has for these files"
    elif any(cfg.get("sliding_window_layout", [])) and cfg["sliding_window_size"] < CTX:
        other = Numpy(cfg, base.load_dir(MODELS / name), "no window")
        doc["prompt"] = base.pick_prompt(other, cfg, 9, 1e-2, 16, rounds=10, distinct=12)  # no near tie here either
        note = "against the numpy forward without a window: llama.cpp takes 4096 whatever the file says"
    if other:
        expected, (doc["greedy"], _, _, _) = base.logits(other, doc["prompt"]).numpy(), base.greedy(other, doc["prompt"])
    first, ids, _ = ask_llama(MODELS / f"{file}.gguf", doc["prompt"])
    apart = float(np.abs(first - expected).max() / np.abs(expected).max())
    same = next((i for i, (a, b) in enumerate(zip(ids, doc["greedy"])) if a != b), base.N_GREEDY)
    print(f"{file}: {apart:.1e} of the largest logit, {same} of {base.N_GREEDY} tokens the same {note}", flush=True)


def check_split(file):
    """llama.cpp no longer reads a tensor per expert. So: the same numbers as in the file with fused tensors."""
    import gguf

    read = lambda f: {t.name: np.array(t.data) for t in gguf.GGUFReader(MODELS / f"{f}.gguf").tensors}
    parts, fused = read(file), read(file.removesuffix(".split"))
    for name, x in fused.items():
        if "_exps" in name:
            x = list(x)
            got = [parts.pop(f"{name.removesuffix('_exps.weight')}.{e}.weight") for e in range(len(x))]
        else:
            x, got = [x], [parts.pop(name)]
        assert all(np.array_equal(a, b) for a, b in zip(x, got, strict=True)), name
    assert not parts, parts.keys()
    print(f"{file}: the same numbers as the fused file", flush=True)


# ------------------------------------------------------------------ k-quants
QUANTISE = """
import sys, llama_cpp as L
p = L.llama_model_quantize_default_params(); p.ftype = 15; p.nthread = 1  # LLAMA_FTYPE_MOSTLY_Q4_K_M
sys.exit(L.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), p))
"""


def make_kquant():
    """Q4_K_M of a Qwen3 mixture by llama.cpp's own quantiser. The expected answer is that of the numpy forward on the
    dequantised weights: what an engine computes that keeps its activations in f32."""
    cfg = CONFIGS["qwen3-moe"] | {
        "hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 256, "intermediate_size": 256, "num_experts": 4,
        "num_experts_per_tok": 2}
    path = MODELS / "k256-moe.q4_k_m.gguf"
    weights = random_weights(cfg, 120)
    with tempfile.TemporaryDirectory() as t:
        full = Path(t) / "k256-moe.gguf"
        base.gguf_file(full, "qwen3moe", lambda w: fill_gguf(w, cfg, weights, "qwen3moe", "F32", False))
        subprocess.run([os.environ["LLAMA_PYTHON"], "-c", QUANTISE, full, path], check=True, capture_output=True)
    print(path.name, path.stat().st_size, flush=True)
    stored = dequantised(path, cfg, weights)
    model = Numpy(cfg, stored)
    prompt = base.pick_prompt(model, cfg, 120, 1e-2, 14, rounds=10, distinct=12)
    first, ids, _ = ask_llama(path, prompt)
    right = base.logits(model, prompt).numpy()
    out, _, _, _ = base.greedy(model, prompt)
    extra = {"reference": "numpy on the dequantised weights, float64", "min_router_gap": router_gap(model, prompt),
             "llama_cpp_differs_by": float(np.abs(first - right).max()), "llama_cpp_same_tokens": sum(
                 a == b for a, b in zip(ids, out))}
    base.write_expected(str(path).removesuffix(".gguf") + ".expected", model, cfg, prompt, extra)


def dequantised(path, cfg, weights):
    """The matrices that a GGUF of this configuration really holds, under the published names."""
    import gguf

    read = gguf.GGUFReader(path)
    held = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1].tolist()) for t in read.tensors}
    print({k: sorted({t.tensor_type.name for t in read.tensors if k in t.name}) for k in ("exps", "attn_v", "gate_inp")})
    # Number the tensors' places: what stands at a place of the GGUF is the published tensor whose number is found there.
    numbered = {k: np.full_like(v, i, dtype=np.float64) for i, (k, v) in enumerate(weights.items())}
    names, out = list(weights), {}
    for name, numbers in gguf_tensors(cfg, numbered, "qwen3moe", False).items():
        parts = zip(numbers, held[name]) if "_exps" in name else [(numbers, held[name])]
        for number, x in parts:
            out[names[int(number.flat[0])]] = np.array(x, np.float32)
    assert out.keys() == weights.keys()
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("part", choices=["models", "gguf", "check", "kquant"])
    p.add_argument("names", nargs="*")
    a = p.parse_args()
    import torch
    torch.set_num_threads(1)
    if a.part == "kquant":
        make_kquant()
        return
    for i, name in enumerate(CONFIGS if a.part == "models" else GGUFS):
        if not a.names or name in a.names:
            {"models": lambda: make_model(name, i), "gguf": lambda: make_gguf(name), "check": lambda: check(name)}[
                a.part]()


if __name__ == "__main__":
    main()
