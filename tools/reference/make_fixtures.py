#!/usr/bin/env python3
"""Make the reference fixtures under tests/fixtures: tiny random models, their GGUF twins, quantised
blocks and tokenizers, each with the answer of an independent implementation (Hugging Face
transformers, gguf-py, sentencepiece, tokenizers).

    python3 -m venv ref && ref/bin/pip install -r tools/reference/requirements.txt
    ref/bin/python tools/reference/make_fixtures.py models          # all of one part
    ref/bin/python tools/reference/make_fixtures.py models llama    # one model
    ref/bin/python tools/reference/make_fixtures.py quant
    ref/bin/python tools/reference/make_fixtures.py tokenizers --text FILE...   # any English text
    LLAMA_PYTHON=llama/bin/python ref/bin/python tools/reference/make_fixtures.py kquants

What the files mean is written in tests/fixtures/*/README.md.
"""
import argparse
import json
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
FIX = ROOT / "tests" / "fixtures"
MODELS = FIX / "models"
VOCAB, HIDDEN, FFN, HEADS, KV, CTX = 320, 64, 96, 4, 2, 256
N_GREEDY = 64


# ------------------------------------------------------------------ configurations, as on the hub
def llama_config(**more):
    c = {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": HIDDEN,
        "initializer_range": 0.02, "intermediate_size": FFN, "max_position_embeddings": CTX,
        "mlp_bias": False, "model_type": "llama", "num_attention_heads": HEADS,
        "num_hidden_layers": 2, "num_key_value_heads": KV, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "torch_dtype": "float32", "transformers_version": "4.40.0",
        "use_cache": True, "vocab_size": VOCAB,
    }
    c.update(more)
    return {k: v for k, v in c.items() if v != "absent"}


# Llama-2 era files have no attention_bias, mlp_bias or rope_theta at all.
OLD = {"attention_bias": "absent", "attention_dropout": "absent", "mlp_bias": "absent",
       "rope_theta": "absent", "num_key_value_heads": HEADS, "transformers_version": "4.31.0"}

CONFIGS = {
    "llama": llama_config(),
    # Llama 3.2 1B: tied embeddings, "llama3" frequency scaling. With head_dim 16 the eight
    # wavelengths fall on all three branches of the rule (kept, blended, divided).
    "llama-tied": llama_config(
        tie_word_embeddings=True, head_dim=16, torch_dtype="bfloat16", eos_token_id=[2, 3],
        num_hidden_layers=3,
        rope_scaling={"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                      "original_max_position_embeddings": 64, "rope_type": "llama3"}),
    # The old key "type" (newer files say "rope_type").
    "llama-linear-rope": llama_config(rope_scaling={"factor": 2.0, "type": "linear"}),
    "llama-gelu": llama_config(hidden_act="gelu"),
    "llama-gelu-tanh": llama_config(hidden_act="gelu_pytorch_tanh"),
    "llama-relu2": llama_config(hidden_act="relu2"),
    "mistral": {
        "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": HIDDEN, "initializer_range": 0.02,
        "intermediate_size": FFN, "max_position_embeddings": CTX, "model_type": "mistral",
        "num_attention_heads": HEADS, "num_hidden_layers": 2, "num_key_value_heads": KV,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.42.0",
        "use_cache": True, "vocab_size": VOCAB},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 256,
        "eos_token_id": 256, "hidden_act": "silu", "hidden_size": HIDDEN, "initializer_range": 0.02,
        "intermediate_size": FFN, "max_position_embeddings": CTX, "max_window_layers": 2,
        "model_type": "qwen2", "num_attention_heads": HEADS, "num_hidden_layers": 2,
        "num_key_value_heads": KV, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": CTX, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False,
        "use_sliding_window": False, "vocab_size": VOCAB},
    "relullama": llama_config(hidden_act="relu", **OLD),
    "prosparse": llama_config(
        architectures=["SparseLlamaForCausalLM"], model_type="sparsellama", hidden_act="fatrelu",
        hidden_act_param=0.01, torch_dtype="float16",
        auto_map={"AutoConfig": "configuration_sparsellama.SparseLlamaConfig",
                  "AutoModelForCausalLM": "modeling_sparsellama.SparseLlamaForCausalLM"}, **OLD),
    "bamboo": {
        "architectures": ["BambooForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_bamboo.BambooConfig",
                     "AutoModelForCausalLM": "modeling_bamboo.BambooForCausalLM"},
        "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "relu", "hidden_size": HIDDEN,
        "initializer_range": 0.02, "intermediate_size": FFN, "max_position_embeddings": CTX,
        "model_type": "bamboo", "num_attention_heads": HEADS, "num_hidden_layers": 2,
        "num_key_value_heads": KV, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "sliding_window": CTX, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.36.2", "use_cache": True, "vocab_size": VOCAB},
    "opt": {  # as facebook/opt-1.3b; OPT ties its embeddings in every published size
        "activation_dropout": 0.0, "activation_function": "relu", "architectures": ["OPTForCausalLM"],
        "attention_dropout": 0.0, "bos_token_id": 2, "do_layer_norm_before": True, "dropout": 0.1,
        "eos_token_id": 2, "ffn_dim": FFN, "hidden_size": HIDDEN, "init_std": 0.02,
        "layerdrop": 0.0, "max_position_embeddings": CTX, "model_type": "opt",
        "num_attention_heads": HEADS, "num_hidden_layers": 2, "pad_token_id": 1, "prefix": "</s>",
        "torch_dtype": "float32", "transformers_version": "4.21.0.dev0", "use_cache": True,
        "vocab_size": VOCAB, "word_embed_proj_dim": HIDDEN},
}
# These differ from "llama" in the configuration only: a symlink to its weights, as in the hub's cache.
SHARES_WEIGHTS = {"llama-linear-rope", "llama-gelu", "llama-gelu-tanh", "llama-relu2"}
BYTE_LEVEL = {"qwen2", "opt"}  # which get the GPT-2 style tokenizer
SHARDED = {"mistral"}


# ------------------------------------------------------------------ the reference model
def reference(cfg, act=None, rope=True):
    """An f64 transformers model for this configuration (weights not set).

    transformers knows neither sparsellama nor bamboo (both are remote code on the hub): they are
    its Llama / Mistral with the activation of the FFN replaced. `act` and `rope` make deliberately
    wrong variants, to measure how far a wrong implementation would be.
    """
    import torch
    import transformers

    cfg, kind = json.loads(json.dumps(cfg)), cfg["model_type"]
    base = {"sparsellama": "llama", "bamboo": "mistral"}.get(kind, kind)
    cfg.pop("auto_map", None)
    cfg["model_type"] = base
    if not rope:
        cfg["rope_scaling"] = None
    hidden_act = act or cfg.get("hidden_act")
    if hidden_act == "fatrelu":
        cfg["hidden_act"] = "relu"
    elif "hidden_act" in cfg:
        cfg["hidden_act"] = hidden_act
    cls = {"llama": transformers.LlamaForCausalLM, "mistral": transformers.MistralForCausalLM,
           "qwen2": transformers.Qwen2ForCausalLM, "opt": transformers.OPTForCausalLM}[base]
    config = cls.config_class.from_dict(cfg)
    config._attn_implementation = "eager"
    model = cls(config).double().eval()
    for m in model.modules():
        if hidden_act == "fatrelu" and hasattr(m, "act_fn"):
            t = cfg["hidden_act_param"]
            m.act_fn = lambda x: torch.where(x > t, x, torch.zeros_like(x))
        if kind == "bamboo" and act is None and hasattr(m, "gate_proj"):
            # dReLU: both factors pass through the ReLU
            m.forward = lambda x, m=m: m.down_proj(
                torch.relu(m.gate_proj(x)) * torch.relu(m.up_proj(x)))
    return model


def storable(x):
    """Round to values which BF16 and F16 both hold exactly, so that every storage type of the same
    model (F32, F16 or BF16 file) is the same function and shares one expected answer."""
    import torch

    x = x.to(torch.bfloat16).float()
    x = torch.where(x.abs() < 2.0**-14, torch.zeros_like(x), x)
    assert torch.equal(x, x.half().float())
    return x


def random_weights(model, cfg, seed, exact_f32):
    """Scaled so that attention scores, activations and logits are all of order one: a mistake in any
    part then moves the logits by much more than rounding does."""
    import torch

    g = torch.Generator().manual_seed(seed)
    n = lambda p, std: torch.randn(p.shape, generator=g) * std
    hidden = cfg["hidden_size"]
    unit = 1 / math.sqrt(hidden)
    out = {}
    for name, p in model.named_parameters():
        if "norm" in name:
            w = n(p, 0.2) if name.endswith("bias") else 0.5 + torch.rand(p.shape, generator=g)
        elif name.endswith("bias"):
            w = n(p, 0.3)
        elif "embed_positions" in name:
            w = n(p, 0.5)
        elif "embed_tokens" in name:
            # A tied embedding is the output matrix too: keep the logits' spread near 2.
            w = n(p, 2 * unit if cfg.get("tie_word_embeddings", cfg["model_type"] == "opt") else 0.7)
        elif "lm_head" in name:
            w = n(p, 2 * unit)
        elif "q_proj" in name or "k_proj" in name:
            w = n(p, 1.3 * unit)
        elif "gate_proj" in name and cfg.get("hidden_act") == "fatrelu":
            w = n(p, 0.02 * unit)  # pre-activations around the threshold 0.01, so that it matters
        elif "up_proj" in name and cfg.get("hidden_act") == "fatrelu":
            w = n(p, 60 * unit)
        elif "down_proj" in name or "fc2" in name:
            w = n(p, 1.5 / math.sqrt(p.shape[1]))
        else:
            w = n(p, unit)
        out[name] = w.float() if exact_f32 else storable(w)
    return out


def logits(model, ids):
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


def pick_prompt(model, cfg, seed, need, length):
    """Search random prompts until one has 64 greedy tokens without a near tie (the top two logits
    differ by at least `need` times the largest), without an end-of-sequence token, and as many
    different tokens as possible. Returns the prompt."""
    import torch

    g = torch.Generator().manual_seed(1000 + seed)
    model = model.float()
    best, vocab = None, cfg["vocab_size"]
    for _ in range(80):
        prompts = torch.randint(4, min(vocab, 256), (512, length), generator=g)
        prompts[:, 0] = cfg["bos_token_id"] if cfg["bos_token_id"] < 4 else prompts[:, 0]
        ids, past, toks = prompts, None, []
        gap, peak = torch.full((len(prompts),), 9.0), torch.zeros(len(prompts))
        with torch.no_grad():
            for _ in range(N_GREEDY):
                o = model(input_ids=ids, past_key_values=past, use_cache=True)
                last, past = o.logits[:, -1], o.past_key_values
                top = last.topk(2)
                gap = torch.minimum(gap, top.values[:, 0] - top.values[:, 1])
                peak = torch.maximum(peak, last.abs().amax(1))
                ids = top.indices[:, :1]
                toks.append(ids)
        toks = torch.cat(toks, 1)
        eos = cfg["eos_token_id"] if isinstance(cfg["eos_token_id"], list) else [cfg["eos_token_id"]]
        ends = torch.isin(toks, torch.tensor(eos)).any(1)
        gap = gap / peak
        for i in torch.nonzero((gap >= need * 1.02) & ~ends).flatten().tolist():
            score = (toks[i].unique().numel(), float(gap[i]))
            if best is None or score > best[0]:
                best = (score, prompts[i].tolist())
        if best and best[0][0] >= 20:
            break
    if best is None:
        raise SystemExit("no prompt without a near tie; change the seed")
    model.double()
    return best[1]


def greedy(model, prompt):
    """64 greedy tokens, each from a full forward pass without a cache (nothing to get wrong)."""
    ids, gaps, peak = list(prompt), [], 0.0
    for _ in range(N_GREEDY):
        last = logits(model, ids)[-1]
        top = last.topk(2)
        gaps.append(float(top.values[0] - top.values[1]))
        peak = max(peak, float(last.abs().max()))
        ids.append(int(top.indices[0]))
    return ids[len(prompt):], min(gaps), peak, last


def write_expected(path, model, cfg, prompt, extra=None):
    from safetensors.torch import save_file

    out, gap, peak, last = greedy(model, prompt)
    at_prompt = logits(model, prompt)
    save_file({"prompt_logits": at_prompt.float().contiguous(),
               "last_logits": last.float().contiguous()}, str(path) + ".safetensors")
    doc = {"prompt": prompt, "greedy": out, "min_top2_gap": gap, "max_abs_logit": peak,
           "logits_std": float(at_prompt.std()), "vocab_size": cfg["vocab_size"],
           "reference": "transformers, float64"}
    doc.update(extra or {})
    write_json(str(path) + ".json", doc)
    print(f"  gap {gap:.3f} of {peak:.2f} ({gap / peak:.4f}), std {doc['logits_std']:.2f}, "
          f"distinct {len(set(out))}, {extra or ''}", flush=True)


def write_json(path, doc):
    # One key per line, arrays kept on one line: readable and small.
    body = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in doc.items())
    Path(path).write_text("{\n" + body + "\n}\n", encoding="utf-8")


WRONG = {  # name of the mistake -> how to make it
    "silu instead": {"act": "silu"}, "relu instead": {"act": "relu"},
    "gelu_pytorch_tanh instead": {"act": "gelu_pytorch_tanh"}, "no rope scaling": {"rope": False},
}


def mistakes(cfg, weights, prompt, right):
    """How far (largest absolute difference of a prompt logit) typical wrong implementations are.
    A test's tolerance has to be well below these."""
    want = {"fatrelu": ["relu instead"], "gelu": ["gelu_pytorch_tanh instead"],
            "relu2": ["relu instead"], "relu": ["silu instead"]}.get(cfg.get("hidden_act"), [])
    if cfg["model_type"] == "bamboo":
        want = ["relu instead"]  # only the gate: plain ReGLU
    if cfg.get("rope_scaling"):
        want = want + ["no rope scaling"]
    out = {}
    for w in want:
        m = reference(cfg, **WRONG[w])
        m.load_state_dict(weights, strict=False)
        out[w] = float((logits(m.double(), prompt) - right).abs().max())
    return {"wrong_by": out} if out else {}


def make_model(name, seed):
    import torch
    from safetensors.torch import load_file, save_file

    cfg = CONFIGS[name]
    d = MODELS / name
    shutil.rmtree(d, ignore_errors=True)
    d.mkdir(parents=True)
    print(name, flush=True)
    model = reference(cfg)
    dtype = getattr(torch, cfg["torch_dtype"])
    if name in SHARES_WEIGHTS:
        weights = load_file(MODELS / "llama" / "model.safetensors")
        os.symlink("../llama/model.safetensors", d / "model.safetensors")
    else:
        weights = random_weights(model, cfg, seed, exact_f32=name == "llama")
        stored = {k: v.to(dtype).contiguous() for k, v in weights.items()}
        if name in SHARDED:
            keys = sorted(stored)
            halves = {1: keys[: len(keys) // 2], 2: keys[len(keys) // 2:]}
            where = {}
            for i, ks in halves.items():
                f = f"model-{i:05}-of-00002.safetensors"
                save_file({k: stored[k] for k in ks}, d / f, metadata={"format": "pt"})
                where.update({k: f for k in ks})
            size = sum(v.numel() * v.element_size() for v in stored.values())
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
            (d / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        else:
            save_file(stored, d / "model.safetensors", metadata={"format": "pt"})
    (d / "config.json").write_text(json.dumps(cfg, indent=2, sort_keys=True) + "\n")
    missing, unexpected = model.load_state_dict({k: v.double() for k, v in weights.items()}, strict=False)
    assert not unexpected and all("lm_head" in m for m in missing), (missing, unexpected)
    prompt = pick_prompt(model, cfg, seed, 1e-2, 12 + seed % 9)
    right = logits(model, prompt)
    write_expected(d / "expected", model, cfg, prompt,
                   mistakes(cfg, {k: v.double() for k, v in weights.items()}, prompt, right))
    if cfg["model_type"] in ("llama", "mistral", "qwen2", "opt"):
        # The directory as written must be what transformers itself loads, with the same answer.
        from transformers import AutoModelForCausalLM
        m = AutoModelForCausalLM.from_pretrained(d, dtype=torch.float32, attn_implementation="eager")
        assert (logits(m.double(), prompt) - right).abs().max() < 1e-4
    for f in d.iterdir():
        f.chmod(0o644)  # safetensors writes 0600
    return weights


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("part", choices=["models"])
    p.add_argument("names", nargs="*")
    p.add_argument("--text", nargs="*", type=Path)
    a = p.parse_args()
    import torch
    torch.set_num_threads(1)
    if a.part == "models":
        for i, name in enumerate(CONFIGS):
            if not a.names or name in a.names:
                make_model(name, i)


if __name__ == "__main__":
    main()
