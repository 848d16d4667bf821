#!/usr/bin/env python3
"""Make the reference fixtures under tests/fixtures: tiny random models, their GGUF twins, quantised
blocks and tokenizers, each with the answer of an independent implementation (Hugging Face
transformers, gguf-py, sentencepiece, tokenizers).

    python3 -m venv ref && ref/bin/pip install -r tools/reference/requirements.txt
    ref/bin/python tools/reference/make_fixtures.py tokenizers --text grimm.txt andersen.txt lang-blue.txt
    ref/bin/python tools/reference/make_fixtures.py models          # or: models llama opt
    ref/bin/python tools/reference/make_fixtures.py gguf            # or: gguf mistral; needs the models
    ref/bin/python tools/reference/make_fixtures.py quant
    LLAMA_PYTHON=llama/bin/python ref/bin/python tools/reference/make_fixtures.py kquants

The order matters: the models take their vocabulary from `tokenizers`, the GGUF files their weights from
`models`. The texts are public-domain fairy tales; LLAMA_PYTHON is a Python with llama-cpp-python.

Mixtures of experts have a script of their own, make_mixtures.py. What the files mean is written in tests/fixtures/*/README.md.
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
VOCABS = ROOT / "tools" / "reference" / "vocab"  # of the tiny models, kept so that they stay the same
VOCAB, HIDDEN, FFN, HEADS, KV, CTX = 320, 64, 96, 4, 2, 256
N_GREEDY = 64
ROUTER_GAP = 3e-3  # the last router logit taken and the first left lie apart by this much at least


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


def falcon_config(**more):
    return {
        "alibi": False, "architectures": ["FalconForCausalLM"], "attention_dropout": 0.0, "bias": False,
        "bos_token_id": 2, "eos_token_id": 2, "hidden_dropout": 0.0, "hidden_size": HIDDEN,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "falcon", "multi_query": True,
        "new_decoder_architecture": False, "num_attention_heads": HEADS, "num_hidden_layers": 2,
        "parallel_attn": True, "torch_dtype": "bfloat16", "transformers_version": "4.27.4", "use_cache": True,
        "vocab_size": VOCAB, **more}


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
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 317,
        "eos_token_id": 319, "hidden_act": "silu", "hidden_size": HIDDEN, "initializer_range": 0.02,
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
    # As tiiuae/falcon-7b: one norm for attention and FFN side by side, one key and value head, tied, an FFN of 4 x hidden.
    "falcon": falcon_config(),
    # As tiiuae/falcon-40b: a norm each, query heads in groups with their key and value head behind them.
    "falcon-40b": falcon_config(new_decoder_architecture=True, num_kv_heads=KV, ffn_hidden_size=FFN,
                                tie_word_embeddings=False, num_hidden_layers=3),
    # As SparseLLM/ReluFalcon-40B.
    "relufalcon": falcon_config(new_decoder_architecture=True, num_kv_heads=KV, ffn_hidden_size=FFN,
                                tie_word_embeddings=False, num_hidden_layers=3, activation="relu"),
    # As openbmb/MiniCPM-S-1B-sft, whose class ties its embeddings without a word in the file.
    "minicpm": llama_config(
        architectures=["MiniCPMForCausalLM"], model_type="minicpm", hidden_act="fatrelu", hidden_act_param=0.01,
        auto_map={"AutoConfig": "configuration_minicpm.MiniCPMConfig",
                  "AutoModel": "modeling_minicpm.MiniCPMModel",
                  "AutoModelForCausalLM": "modeling_minicpm.MiniCPMForCausalLM"},
        scale_emb=1.5, scale_depth=1.4, dim_model_base=40, num_hidden_layers=3, torch_dtype="bfloat16",
        transformers_version="4.36.0", tie_word_embeddings="absent", mlp_bias="absent", attention_bias="absent",
        attention_dropout="absent", pretraining_tp="absent", rope_theta="absent"),
}
# These differ from another in the configuration only: a symlink to its weights, as in the hub's cache.
SHARES_WEIGHTS = {"llama-linear-rope": "llama", "llama-gelu": "llama", "llama-gelu-tanh": "llama",
                  "llama-relu2": "llama", "relufalcon": "falcon-40b"}
BYTE_LEVEL = {"qwen2": "qwen2.json", "opt": "gpt2.json", "falcon": "gpt2.json"}  # by model_type
TIED = {"opt", "falcon", "minicpm"}  # unless the configuration says otherwise
SHARDED = {"mistral"}


# ------------------------------------------------------------------ the reference model
def reference(cfg, act=None, rope=True, **changes):
    """An f64 transformers model for this configuration (weights not set).

    transformers knows neither sparsellama nor bamboo nor minicpm (all are remote code on the hub): they
    are its Llama / Mistral with the activation of the FFN replaced, and minicpm's scales put in by hooks.
    `act`, `rope` and `changes` of the configuration make deliberately wrong variants, to measure how far a
    wrong implementation would be.
    """
    import torch
    import transformers

    cfg, kind = json.loads(json.dumps(cfg)) | changes, cfg["model_type"]
    base = {"sparsellama": "llama", "bamboo": "mistral", "minicpm": "llama"}.get(kind, kind)
    cfg.setdefault("tie_word_embeddings", kind in TIED)
    cfg.pop("auto_map", None)
    cfg["model_type"] = base
    if not rope:
        cfg["rope_scaling"] = None
    hidden_act = act or cfg.get("hidden_act")
    if hidden_act == "fatrelu":
        cfg["hidden_act"] = "relu"
    elif "hidden_act" in cfg:
        cfg["hidden_act"] = hidden_act
    elif act and kind == "falcon":
        cfg["activation"] = act
    cls = {"llama": transformers.LlamaForCausalLM, "mistral": transformers.MistralForCausalLM,
           "qwen2": transformers.Qwen2ForCausalLM, "opt": transformers.OPTForCausalLM,
           "falcon": transformers.FalconForCausalLM}[base]
    config = cls.config_class.from_dict(cfg)
    config._attn_implementation = "eager"
    model = cls(config).double().eval()
    for m in model.modules():
        if hidden_act == "fatrelu" and hasattr(m, "act_fn"):
            t = cfg["hidden_act_param"]
            del m.act_fn  # a Module; the replacement is a plain function
            m.act_fn = lambda x: torch.where(x > t, x, torch.zeros_like(x))
        if kind == "bamboo" and act is None and hasattr(m, "gate_proj"):
            # dReLU: both factors pass through the ReLU
            m.forward = lambda x, m=m: m.down_proj(
                torch.relu(m.gate_proj(x)) * torch.relu(m.up_proj(x)))
    if kind == "minicpm":
        scale_outputs(model, cfg)
    return model


def scale_outputs(model, cfg):
    """MiniCPM's own arithmetic (modeling_minicpm.py): embeddings times scale_emb, what attention and FFN add to the
    residual times scale_depth / sqrt(layers), the head's input divided by hidden_size / dim_model_base."""
    by = lambda scale: lambda module, args, out: (
        (out[0] * scale, *out[1:]) if isinstance(out, tuple) else out * scale)
    inner = model.model
    inner.embed_tokens.register_forward_hook(by(cfg["scale_emb"]))
    for layer in inner.layers:
        for branch in (layer.self_attn, layer.mlp):
            branch.register_forward_hook(by(cfg["scale_depth"] / math.sqrt(cfg["num_hidden_layers"])))
    inner.norm.register_forward_hook(by(cfg["dim_model_base"] / cfg["hidden_size"]))


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
        if "norm" in name or ".ln_" in name:
            w = n(p, 0.2) if name.endswith("bias") else 0.5 + torch.rand(p.shape, generator=g)
        elif name.endswith("bias"):
            w = n(p, 0.3)
        elif "embed_positions" in name:
            w = n(p, 0.5)
        elif "embed_tokens" in name or "word_embeddings" in name:
            # A tied embedding is the output matrix too: keep the logits' spread near 2.
            tied = cfg.get("tie_word_embeddings", cfg["model_type"] in TIED)
            w = n(p, (3 if cfg["model_type"] == "minicpm" else 2) * unit if tied else 0.7)
        elif "lm_head" in name:
            w = n(p, 2 * unit)
        elif "q_proj" in name or "k_proj" in name or "query_key_value" in name:
            w = n(p, 1.3 * unit)
        elif "gate_proj" in name and cfg.get("hidden_act") == "fatrelu":
            w = n(p, 0.02 * unit)  # pre-activations around the threshold 0.01, so that it matters
        elif "up_proj" in name and cfg.get("hidden_act") == "fatrelu":
            w = n(p, 60 * unit)
        elif "down_proj" in name or "fc2" in name or "4h_to_h" in name:
            w = n(p, 1.5 / math.sqrt(p.shape[1]))
        else:
            w = n(p, unit)
        out[name] = w.float() if exact_f32 else storable(w)
    return out


def logits(model, ids):
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0]


def pick_prompt(model, cfg, seed, need, length, rounds=80, distinct=20):
    """Search random prompts until one has 64 greedy tokens without a near tie (the top two logits
    differ by at least `need` times the largest), without an end-of-sequence token, and as many
    different tokens as possible. Returns the prompt."""
    import torch

    g = torch.Generator().manual_seed(1000 + seed)
    model = model.float()
    best, vocab = None, cfg["vocab_size"]
    for _ in range(rounds):
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
        if (routed := getattr(o, "router_gap", None)) is not None:
            gap = torch.where(routed >= ROUTER_GAP, gap, 0.0)  # no expert is chosen by rounding either
        for i in torch.nonzero((gap >= need * 1.02) & ~ends).flatten().tolist():
            score = (toks[i].unique().numel(), float(gap[i]))
            if best is None or score > best[0]:
                best = (score, prompts[i].tolist())
        if best and best[0][0] >= distinct:
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
    Path(str(path) + ".safetensors").chmod(0o644)  # safetensors writes 0600
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
    "no embedding scale": {"scale_emb": 1.0}, "no logit scale": {"dim_model_base": HIDDEN},
    "no residual scale": {"scale_depth": math.sqrt(3)},
    "silu instead": {"act": "silu"}, "relu instead": {"act": "relu"},
    "gelu_pytorch_tanh instead": {"act": "gelu_pytorch_tanh"}, "no rope scaling": {"rope": False},
}


def mistakes(cfg, weights, prompt, right):
    """How far (largest absolute difference of a prompt logit) typical wrong implementations are.
    A test's tolerance has to be well below these."""
    want = {"fatrelu": ["relu instead"], "gelu": ["gelu_pytorch_tanh instead"],
            "relu2": ["relu instead"], "relu": ["silu instead"]}.get(cfg.get("hidden_act", cfg.get("activation")), [])
    if cfg["model_type"] == "bamboo":
        want = ["relu instead"]  # only the gate: plain ReGLU
    if cfg["model_type"] == "falcon" and "activation" not in cfg:
        want = ["gelu_pytorch_tanh instead"]
    if cfg["model_type"] == "minicpm":
        want = want + ["no embedding scale", "no residual scale", "no logit scale"]
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
        weights = load_file(MODELS / SHARES_WEIGHTS[name] / "model.safetensors")
        os.symlink(f"../{SHARES_WEIGHTS[name]}/model.safetensors", d / "model.safetensors")
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
    if cfg["model_type"] in ("llama", "mistral", "qwen2", "opt", "falcon"):
        # The directory as written must be what transformers itself loads, with the same answer.
        from transformers import AutoModelForCausalLM
        m = AutoModelForCausalLM.from_pretrained(d, dtype=torch.float32, attn_implementation="eager")
        assert (logits(m.double(), prompt) - right).abs().max() < 1e-4
    for f in d.iterdir():
        f.chmod(0o644)  # safetensors writes 0600
    return weights


# ------------------------------------------------------------------ tokenizers
QWEN2_RE = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+")
LLAMA3_RE = QWEN2_RE.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

TEXTS = [
    "", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", " \n ", "\n \n", "a", " a", "a ", "  a  b  ",
    "Hello, world!", "Once upon a time there lived a king.", "The  quick   brown    fox",
    "   leading spaces", "trailing spaces   ", "tab\tseparated\tvalues", "line one\nline two\n\nline four\n",
    "mixed \t \n \r\n whitespace", "don't can't I'll we've THEY'RE it's I'M you'd", "o'clock 'twas ''quoted''",
    "1234567890", "3.14159", "1,000,000", "in 1897 and 42 men", "x=1;y=22;z=333", "C++ & C#; a->b; foo_bar(baz)[0]",
    "\u00e9t\u00e9 na\u00efve caf\u00e9", "e\u0301te\u0301 (decomposed)", "\u00c6r\u00f8 \u00fcber stra\u00dfe \u0159e\u010d",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440", "\u03b3\u03b5\u03b9\u03ac \u03c3\u03bf\u03c5",
    "\u4f60\u597d\uff0c\u4e16\u754c", "\u3053\u3093\u306b\u3061\u306f\u3002\u30ab\u30bf\u30ab\u30ca", "\ud55c\uad6d\uc5b4",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645", "\u05e9\u05dc\u05d5\u05dd", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "\u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f600", "a\U0001f600b \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea", "\u2603\ufe0f snow",
    "\u00a0no-break\u00a0space\u3000ideographic", "\u200bzero\u200dwidth\ufeff", "\u2581 lower one eighth \u2581block",
    "\x00\x01\x1f\x7f control", "\u0085next\u2028line", "\u00b2\u00bd\u2166 \u0663\u0664 numbers",
    "<s>", "</s>", "<unk>", "a<s>b</s> c", "<0x41><0x0A>", "<|endoftext|>", "x<|endoftext|> y",
    "<|im_start|>user\nhi<|im_end|>\n", "<|begin_of_text|><|eot_id|>", "\u0120Hello \u010a", "[INST] do it [/INST]",
    "http://example.org/a?b=c&d=%20#e", "!!!???...---", "(((())))", "\"quoted,\" said she; \u201ccurly\u201d \u2014 dash\u2026",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "the " * 40, " " * 50, "\n" * 20, "ab" * 60 + "c", "supercalifragilisticexpialidocious", "zyzzyva and a zyzzyva",
    "\uffff\U0010ffff", "A" + "\u0301" * 12,
]


def train_spm(texts, vocab_size, out):
    """SentencePiece BPE with the settings of Llama 2: no normalisation, no trimming, byte fallback."""
    import sentencepiece as spm

    with tempfile.TemporaryDirectory() as t:
        src = Path(t) / "text.txt"
        src.write_text(texts, encoding="utf-8")
        spm.SentencePieceTrainer.train(
            input=str(src), model_prefix=f"{t}/m", model_type="bpe", vocab_size=vocab_size,
            byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
            split_digits=True, allow_whitespace_only_pieces=True, add_dummy_prefix=True,
            character_coverage=0.9995, unk_id=0, bos_id=1, eos_id=2, pad_id=-1, minloglevel=1)
        from sentencepiece import sentencepiece_model_pb2 as pb
        proto = pb.ModelProto.FromString(Path(f"{t}/m.model").read_bytes())
        del proto.trainer_spec.input[:]  # paths of the machine it was trained on
        proto.trainer_spec.model_prefix = ""
        out.write_bytes(proto.SerializeToString(deterministic=True))
    return spm.SentencePieceProcessor(model_file=str(out))


def pieces(sp):
    """(piece, score, GGUF token type) in id order."""
    n = sp.get_piece_size()
    kind = lambda i: 2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1
    return [(sp.id_to_piece(i), sp.get_score(i), kind(i)) for i in range(n)]


def spm_to_hf(sp, path, metaspace=False):
    """tokenizer.json with the content of the Llama-2 file of the hub (`legacy`: a normalizer puts the
    space in front, also after each special token), or of newer files (Metaspace pre-tokenizer, only
    the first piece gets the space)."""
    from transformers.convert_slow_tokenizer import generate_merges

    ps = pieces(sp)
    vocab = {p: i for i, (p, _, _) in enumerate(ps)}
    special = {i for i, (_, _, k) in enumerate(ps) if k in (2, 3)}
    scores = [(p, s) for p, s, k in ps if k == 1]
    merges = generate_merges(vocab, scores)
    doc = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": ps[i][0], "single_word": False, "lstrip": False,
                          "rstrip": False, "normalized": False, "special": True} for i in sorted(special)],
        "normalizer": None if metaspace else {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first",
                          "split": False} if metaspace else None,
        "post_processor": {"type": "TemplateProcessing",
                           "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                                      {"Sequence": {"id": "A", "type_id": 0}}],
                           "pair": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                                    {"Sequence": {"id": "A", "type_id": 0}},
                                    {"SpecialToken": {"id": "<s>", "type_id": 1}},
                                    {"Sequence": {"id": "B", "type_id": 1}}],
                           "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True,
                  "ignore_merges": False, "vocab": vocab, "merges": [f"{a} {b}" for a, b in merges]},
    }
    path.write_text(json.dumps(doc, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


def train_bpe(texts, kind, vocab_size, specials, path, bos=None, first=False):
    """Byte-level BPE with the pre-tokenizer of GPT-2, Qwen2 or Llama 3, as tokenizer.json. Special
    tokens come last, as in the real files (`first`: OPT's come first)."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from tokenizers import AddedToken

    tok = Tokenizer(models.BPE())
    if kind == "gpt2":
        tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        tok.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(QWEN2_RE if kind == "qwen2" else LLAMA3_RE), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - (0 if first else len(specials)), show_progress=False,
                                  special_tokens=specials if first else [],
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tok.train_from_iterator(texts.split("\n"), trainer)
    doc = json.loads(tok.to_str())
    if kind == "llama3":
        # Llama 3 sets ignore_merges: a word that is in the vocabulary is taken whole even where the
        # merges do not lead to it. One such word, unreachable by merges:
        doc["model"]["ignore_merges"] = True
        last = max(doc["model"]["vocab"].values())
        doc["model"]["vocab"] = {k: v for k, v in doc["model"]["vocab"].items() if v != last}
        doc["model"]["merges"] = [m for m in doc["model"]["merges"] if "".join(m) in doc["model"]["vocab"]]
        doc["model"]["vocab"]["\u0120zyzzyva"] = last
    tok = Tokenizer.from_str(json.dumps(doc))
    if kind == "qwen2":
        tok.normalizer = normalizers.NFC()
    tok.add_special_tokens([AddedToken(s, normalized=False, special=True) for s in specials])
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    if bos:
        tok.post_processor = processors.Sequence([
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B",
                                          special_tokens=[(bos, tok.token_to_id(bos))])])
    doc = json.loads(tok.to_str())
    path.write_text(json.dumps(doc, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    return doc


def add_spm_to_gguf(w, sp):
    ps = pieces(sp)
    w.add_tokenizer_model("llama")
    w.add_tokenizer_pre("default")
    w.add_token_list([p.encode() for p, _, _ in ps])
    w.add_token_scores([s for _, s, _ in ps])
    w.add_token_types([k for _, _, k in ps])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)
    w.add_add_bos_token(True)
    w.add_add_eos_token(False)


def add_bpe_to_gguf(w, doc, pre, bos, eos, add_bos):
    special = {t["id"]: t["content"] for t in doc["added_tokens"]}
    by_id = {**{i: t for t, i in doc["model"]["vocab"].items()}, **special}
    ids = sorted(by_id)
    assert ids == list(range(len(ids)))
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    w.add_token_list([by_id[i].encode() for i in ids])
    w.add_token_types([3 if i in special else 1 for i in ids])
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in doc["model"]["merges"]])
    names = {t: i for i, t in by_id.items()}
    w.add_bos_token_id(names[bos])
    w.add_eos_token_id(names[eos])
    w.add_add_bos_token(add_bos)


def gguf_file(path, arch, fill):
    import gguf

    w = gguf.GGUFWriter(str(path), arch)
    w.add_name(Path(path).stem)
    fill(w)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def rows(items):
    """A JSON list with one item per line."""
    dump = lambda x: json.dumps(x, ensure_ascii=True, separators=(",", ":"))
    return "[\n" + ",\n".join(dump(i) for i in items) + "\n]\n"


def hf_expected(path, tok, decode_ids):
    """Ids without BOS, with special tokens recognised in the text (`ids`) and, where that makes a
    difference, with them taken as plain text (`ids_plain`)."""
    out = []
    for t in TEXTS:
        tok.encode_special_tokens = False
        row = {"text": t, "ids": tok.encode(t, add_special_tokens=False).ids}
        tok.encode_special_tokens = True
        plain = tok.encode(t, add_special_tokens=False).ids
        if plain != row["ids"]:
            row["ids_plain"] = plain
        out.append(row)
    tok.encode_special_tokens = False
    lists = [r["ids"] for r in out] + decode_ids
    dec = [{"ids": i, "text": tok.decode(i, skip_special_tokens=True)} for i in lists]
    path.write_text('{"encode": ' + rows(out).rstrip() + ',\n"decode": ' + rows(dec).rstrip() + "}\n")


def make_tokenizers(files):
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    text = "\n".join(f.read_text(encoding="utf-8") for f in files)[:1_500_000]
    # A little of other scripts and digits, so that the vocabularies are not pure English prose.
    text += "\n\u00e9t\u00e9 na\u00efve 1234 5678 90 \u4f60\u597d \u041f\u0440\u0438\u0432\u0435\u0442\n" * 50
    d = FIX / "tokenizers"
    for old in d.glob("*/"):
        shutil.rmtree(old)
    # ids made up for decoding: bytes which are half a character, special tokens, a lone space
    def odd(n):
        rng = np.random.default_rng(5)
        return [rng.integers(0, n, 12).tolist() for _ in range(12)]

    s = d / "spm"
    s.mkdir(parents=True)
    sp = train_spm(text, 600, s / "tokenizer.model")
    byte = {sp.id_to_piece(i): i for i in range(600)}
    cut = [[byte["<0xE4>"]], [byte["<0xE4>"], byte["<0xBD>"], byte["<0xA0>"]], [byte["<0xBD>"], byte["\u2581"]],
           [1], [1, 2], [0], [byte["\u2581"]], [byte["\u2581"], byte["\u2581"]]]
    lists = [sp.encode(t) for t in TEXTS] + cut + odd(600)
    (s / "expected.json").write_text(
        '{"encode": ' + rows({"text": t, "ids": sp.encode(t)} for t in TEXTS).rstrip()
        + ',\n"decode": ' + rows({"ids": i, "text": sp.decode(i)} for i in lists).rstrip() + "}\n")
    gguf_file(d / "spm.gguf", "llama", lambda w: add_spm_to_gguf(w, sp))
    spm_to_hf(sp, s / "tokenizer.json")
    hf_expected(s / "expected_hf.json", Tokenizer.from_file(str(s / "tokenizer.json")), cut + odd(600))
    m = d / "spm-metaspace"
    m.mkdir()
    spm_to_hf(sp, m / "tokenizer.json", metaspace=True)
    hf_expected(m / "expected.json", Tokenizer.from_file(str(m / "tokenizer.json")), cut + odd(600))

    for kind, pre, size, specials, bos, eos, add_bos in [
        ("gpt2", "gpt-2", 600, ["<|endoftext|>"], "<|endoftext|>", "<|endoftext|>", False),
        ("qwen2", "qwen2", 600, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|endoftext|>", "<|im_end|>", False),
        ("llama3", "llama-bpe", 600, ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>",
         "<|end_header_id|>", "<|eot_id|>"], "<|begin_of_text|>", "<|eot_id|>", True),
    ]:
        k = d / kind
        k.mkdir()
        f = k / "tokenizer.json"
        doc = train_bpe(text, kind, size, specials, f, bos if add_bos else None)
        # half of a three-byte character, then the whole of it
        e4, bd, a0 = (doc["model"]["vocab"][c] for c in "\u00e4\u00bd\u0142")
        cut = [[e4], [e4, bd], [e4, bd, a0], [bd, 40], [size - 1]]
        hf_expected(k / "expected.json", Tokenizer.from_file(str(f)), cut + odd(size))
        gguf_file(d / f"{kind}.gguf", "llama", lambda w: add_bpe_to_gguf(w, doc, pre, bos, eos, add_bos))

    # transformers' own class over the same files has to agree
    for f in d.glob("*/tokenizer.json"):
        a, b = Tokenizer.from_file(str(f)), PreTrainedTokenizerFast(tokenizer_file=str(f))
        for t in TEXTS:
            assert a.encode(t, add_special_tokens=False).ids == b.encode(t, add_special_tokens=False), (f, t)

    # the vocabularies of the tiny models (320 tokens)
    v = VOCABS
    v.mkdir(exist_ok=True, parents=True)
    lower = "".join(c for c in text.lower() if c in "abcdefghijklmnopqrstuvwxyz \n.,'")
    train_spm(lower, VOCAB, v / "tokenizer.model")
    import sentencepiece as spm
    spm_to_hf(spm.SentencePieceProcessor(model_file=str(v / "tokenizer.model")), v / "spm.json")
    train_bpe(text, "qwen2", VOCAB, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], v / "qwen2.json")
    train_bpe(text, "gpt2", VOCAB, ["<s>", "<pad>", "</s>", "<unk>"], v / "gpt2.json", first=True)


# ------------------------------------------------------------------ GGUF
# name of the file -> (model directory, architecture, storage type of the matrices)
GGUFS = {
    "llama": ("llama", "llama", "F32"), "llama-tied": ("llama-tied", "llama", "F16"),
    "mistral": ("mistral", "llama", "F16"), "qwen2": ("qwen2", "qwen2", "BF16"),
    "relullama": ("relullama", "llama", "F16"), "relullama.powerinfer": ("relullama", "llama", "F16"),
    "bamboo": ("bamboo", "bamboo", "F16"), "opt": ("opt", "opt", "F16"),
    "falcon": ("falcon", "falcon", "F16"), "falcon-40b": ("falcon-40b", "falcon", "BF16"),
    "relufalcon.powerinfer": ("relufalcon", "falcon", "F16"), "minicpm": ("minicpm", "minicpm", "F16"),
    # Quantised by gguf-py; these have their own expected answer.
    "llama.q4_0": ("llama", "llama", "Q4_0"), "llama-linear-rope.q8_0": ("llama-linear-rope", "llama", "Q8_0"),
}
FILE_TYPE = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}
NAMES = {  # Hugging Face -> GGUF, as llama.cpp and PowerInfer name them
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.out_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "model.decoder.embed_tokens": "token_embd", "model.decoder.embed_positions": "position_embd",
    "model.decoder.final_layer_norm": "output_norm", "self_attn_layer_norm": "attn_norm",
    "final_layer_norm": "ffn_norm", "fc1": "ffn_up", "fc2": "ffn_down",
    "transformer.word_embeddings": "token_embd", "transformer.ln_f": "output_norm",
    "self_attention.query_key_value": "attn_qkv", "self_attention.dense": "attn_output",
    # llama.cpp calls the norm of 40B's FFN attn_norm, and that of its attention attn_norm_2.
    "ln_mlp": "attn_norm", "ln_attn": "attn_norm_2",
    "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down",
}


def gguf_name(name):
    stem, kind = name.rsplit(".", 1)
    for between in (".layers.", ".h."):
        if between in stem:
            n, rest = stem.split(between)[1].split(".", 1)
            return f"blk.{n}.{NAMES[rest]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def permute(w, heads):
    """llama.cpp's arch "llama" rotates neighbouring pairs (2i, 2i+1), Hugging Face pairs (i, i + d/2):
    the converter reorders the rows of q and k within each head. Arch qwen2 keeps HF's order."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def unpermute(w, heads):
    return w.reshape(heads, w.shape[0] // heads // 2, 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)


def ungroup(w, cfg):
    """llama.cpp's tensor_data_layout "jploski": all query heads, then all keys, then all values, where Falcon's own file has
    per group its query heads, its key and its value."""
    heads = cfg["num_attention_heads"]
    kv = cfg["num_kv_heads"] if cfg["new_decoder_architecture"] else 1
    groups = w.reshape(kv, heads // kv + 2, -1, w.shape[1])
    return np.concatenate([part.reshape(-1, w.shape[1]) for part in (groups[:, :-2], groups[:, -2], groups[:, -1])])


def heads_of(name, cfg):
    if name.endswith(("q_proj.weight", "attn_q.weight")):
        return cfg["num_attention_heads"]
    if name.endswith(("k_proj.weight", "attn_k.weight")):
        return cfg.get("num_key_value_heads", cfg["num_attention_heads"])
    return None


def load_dir(d):
    from safetensors.torch import load_file

    out = {}
    for f in sorted(d.glob("*.safetensors")):
        if f.name.startswith("model"):
            out.update({k: v.float().numpy() for k, v in load_file(f).items()})
    return out


def rope_factors(cfg):
    """Divisors of the eight frequencies under "llama3" scaling: tensor rope_freqs.weight."""
    r, dim = cfg["rope_scaling"], cfg["hidden_size"] // cfg["num_attention_heads"]
    out = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * cfg["rope_theta"] ** (i / dim)
        old = r["original_max_position_embeddings"]
        if wavelength < old / r["high_freq_factor"]:
            out.append(1.0)
        elif wavelength > old / r["low_freq_factor"]:
            out.append(r["factor"])
        else:
            smooth = (old / wavelength - r["low_freq_factor"]) / (r["high_freq_factor"] - r["low_freq_factor"])
            out.append(1 / ((1 - smooth) / r["factor"] + smooth))
    return np.array(out, np.float32)


def ffn_width(cfg):
    return cfg.get("intermediate_size") or cfg.get("ffn_dim") or cfg.get("ffn_hidden_size") or 4 * cfg["hidden_size"]


def fill_gguf(w, cfg, weights, arch, kind, powerinfer=False):
    import gguf

    w.add_block_count(cfg["num_hidden_layers"])
    w.add_embedding_length(cfg["hidden_size"])
    w.add_feed_forward_length(ffn_width(cfg))
    w.add_head_count(cfg["num_attention_heads"])
    if arch == "opt":
        w.add_context_length(cfg["max_position_embeddings"] + 2)  # PowerInfer: 2050, the table's rows
        w.add_layer_norm_eps(1e-5)
    elif arch == "falcon":
        w.add_context_length(2048)  # not in config.json
        w.add_tensor_data_layout("jploski")
        w.add_head_count_kv(cfg.get("num_kv_heads", 1))
        w.add_layer_norm_eps(cfg["layer_norm_epsilon"])
    else:
        w.add_context_length(cfg["max_position_embeddings"])
        w.add_head_count_kv(cfg.get("num_key_value_heads", cfg["num_attention_heads"]))
        w.add_layer_norm_rms_eps(cfg["rms_norm_eps"])
        if "rope_theta" in cfg:
            w.add_rope_freq_base(cfg["rope_theta"])
        if arch != "qwen2":
            w.add_rope_dimension_count(cfg["hidden_size"] // cfg["num_attention_heads"])
    if arch == "llama":
        w.add_vocab_size(cfg["vocab_size"])
        if cfg["hidden_act"] != "silu" and not powerinfer:
            # Mainline llama.cpp has no such key and always takes SiLU; ours reads it.
            w.add_string("llama.hidden_act", cfg["hidden_act"])
    if arch == "minicpm":
        w.add_embedding_scale(float(cfg["scale_emb"]))
        w.add_residual_scale(cfg["scale_depth"] / cfg["num_hidden_layers"] ** 0.5)
        w.add_logit_scale(cfg["hidden_size"] / cfg["dim_model_base"])
        # Keys of ours, as llama.hidden_act is.
        w.add_string("minicpm.hidden_act", cfg["hidden_act"])
        w.add_float32("minicpm.hidden_act_param", cfg["hidden_act_param"])
    scaling = cfg.get("rope_scaling") or {}
    if scaling.get("type") == "linear":
        w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        w.add_rope_scaling_factor(scaling["factor"])
    w.add_file_type(FILE_TYPE[kind])
    if kind.startswith("Q"):
        w.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if arch == "qwen2":
        add_bpe_to_gguf(w, json.loads((VOCABS / "qwen2.json").read_text()), "qwen2",
                        "<|endoftext|>", "<|im_end|>", False)
        w.add_chat_template(CHATML)
    elif arch in ("opt", "falcon"):
        add_bpe_to_gguf(w, json.loads((VOCABS / "gpt2.json").read_text()), "gpt-2", "</s>", "</s>", True)
    else:
        import sentencepiece as spm
        add_spm_to_gguf(w, spm.SentencePieceProcessor(model_file=str(VOCABS / "tokenizer.model")))

    if scaling.get("rope_type") == "llama3":
        w.add_tensor("rope_freqs.weight", rope_factors(cfg))
    for name, x in weights.items():
        if (h := heads_of(name, cfg)) and arch in ("llama", "bamboo", "minicpm"):
            x = permute(x, h)
        if "query_key_value" in name:
            x = ungroup(x, cfg)
        new = gguf_name(name)
        if powerinfer and "ffn_down" in new:
            new, x = new.replace("ffn_down", "ffn_down_t"), x.T
        x = np.ascontiguousarray(x, np.float32)
        if x.ndim == 1 or kind == "F32":
            w.add_tensor(new, x)
        elif kind == "F16":
            w.add_tensor(new, x.astype(np.float16))
        else:
            # llama.cpp keeps the output matrix of a Q4_0 file in a finer type; so a mixed file here
            t = gguf.GGMLQuantizationType["Q8_0" if new == "output.weight" and kind == "Q4_0" else kind]
            w.add_tensor(new, gguf.quants.quantize(x, t), raw_dtype=t)
    if powerinfer:
        # A predictor per layer, as every such file has, with a rank that differs between layers. fc2 is
        # not negative, so z = fc2 . relu(fc1 . x) >= 0 and every neuron counts as active at
        # threshold 0: the answer stays that of the dense model.
        w.add_float32("powerinfer.sparse_threshold", 0.0)
        rng = np.random.default_rng(3)
        for n in range(cfg["num_hidden_layers"]):
            r, ffn = (16, 32)[n % 2], ffn_width(cfg)
            w.add_tensor(f"blk.{n}.fc1.weight", rng.normal(size=(r, cfg["hidden_size"])).astype(np.float16))
            w.add_tensor(f"blk.{n}.fc2.weight", np.abs(rng.normal(size=(ffn, r))).astype(np.float16))


CHATML = ("{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
          "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def read_weights(path, cfg):
    """The f32 matrices that a GGUF file really holds (dequantised by gguf-py), under HF's names."""
    import gguf
    import torch

    back = {}
    for n in ["model.embed_tokens", "model.norm", "lm_head"]:
        back[NAMES[n]] = n
    for n in range(cfg["num_hidden_layers"]):
        for hf, g in NAMES.items():
            if hf.startswith(("self_attn.", "mlp.", "input_", "post_")) and "out_proj" not in hf:
                back[f"blk.{n}.{g}"] = f"model.layers.{n}.{hf}"
    out = {}
    for t in gguf.GGUFReader(path).tensors:
        if t.name == "rope_freqs.weight":
            continue
        x = gguf.quants.dequantize(t.data, t.tensor_type).reshape(list(reversed(t.shape.tolist())))
        if h := heads_of(t.name, cfg):
            x = unpermute(x, h)
        stem, kind = t.name.rsplit(".", 1)
        out[f"{back[stem]}.{kind}"] = torch.tensor(x).double()
    return out


def expect_from_gguf(path, cfg, seed):
    """Expected answer of a quantised file: transformers on the dequantised weights, which is what an
    engine computes that keeps its activations in f32."""
    model = reference(cfg)
    missing, unexpected = model.load_state_dict(read_weights(path, cfg), strict=False)
    assert not unexpected and all("lm_head" in m for m in missing), (missing, unexpected)
    prompt = pick_prompt(model, cfg, seed, 1e-2, 14)
    write_expected(path.with_suffix("").as_posix() + ".expected", model, cfg, prompt)


def add_tokenizer_files(name, cfg):
    d, v = MODELS / name, VOCABS
    if cfg["model_type"] in BYTE_LEVEL:
        shutil.copy(v / BYTE_LEVEL[cfg["model_type"]], d / "tokenizer.json")
    else:
        shutil.copy(v / "spm.json", d / "tokenizer.json")
        shutil.copy(v / "tokenizer.model", d / "tokenizer.model")
    if name == "qwen2":
        write_json(d / "tokenizer_config.json", {
            "add_prefix_space": False, "bos_token": None, "chat_template": CHATML,
            "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "errors": "replace",
            "model_max_length": CTX, "pad_token": "<|endoftext|>", "split_special_tokens": False,
            "tokenizer_class": "Qwen2Tokenizer", "unk_token": None})
    if name == "llama":
        tok = lambda c: {"__type": "AddedToken", "content": c, "lstrip": False, "normalized": False,
                         "rstrip": False, "single_word": False}
        write_json(d / "tokenizer_config.json", {
            "add_bos_token": True, "add_eos_token": False, "bos_token": tok("<s>"),
            "clean_up_tokenization_spaces": False, "eos_token": tok("</s>"), "legacy": True,
            "model_max_length": CTX, "pad_token": None, "sp_model_kwargs": {},
            "tokenizer_class": "LlamaTokenizer", "unk_token": tok("<unk>")})
        write_json(d / "generation_config.json", {
            "_from_model_config": True, "bos_token_id": 1, "eos_token_id": 2, "transformers_version": "4.40.0"})


def make_gguf(file):
    name, arch, kind = GGUFS[file]
    cfg, path = CONFIGS[name], MODELS / f"{file}.gguf"
    powerinfer = file.endswith("powerinfer")
    gguf_file(path, arch, lambda w: fill_gguf(w, cfg, load_dir(MODELS / name), arch, kind, powerinfer))
    if powerinfer:
        with open(path, "r+b") as f:
            f.write(b"PWRI")  # PowerInfer's converter patches the magic in the same way
    print(file, path.stat().st_size, flush=True)
    if kind.startswith("Q"):
        expect_from_gguf(path, cfg, 50 + len(file))


def make_kquants():
    """Q4_K_M and Q6_K by llama.cpp's own quantiser. One layer is enough: in Q4_K_M the last eighth of
    the layers keeps attn_v and ffn_down in Q6_K, so both types occur."""
    import torch

    cfg = llama_config(hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    weights = random_weights(reference(cfg), cfg, 77, exact_f32=True)
    quantise = ("import sys, llama_cpp as L\n"
                "p = L.llama_model_quantize_default_params(); p.ftype = int(sys.argv[3]); p.nthread = 1\n"
                "sys.exit(L.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), p))")
    with tempfile.TemporaryDirectory() as t:
        full = Path(t) / "k256.gguf"
        gguf_file(full, "llama", lambda w: fill_gguf(
            w, cfg, {k: v.numpy() for k, v in weights.items()}, "llama", "F32"))
        for i, (ftype, suffix) in enumerate([(15, "q4_k_m"), (18, "q6_k")]):  # LLAMA_FTYPE_MOSTLY_*
            path = MODELS / f"k256.{suffix}.gguf"
            subprocess.run([os.environ["LLAMA_PYTHON"], "-c", quantise, full, path, str(ftype)],
                           check=True, capture_output=True)
            print(path.name, path.stat().st_size, flush=True)
            expect_from_gguf(path, cfg, 70 + i)


# ------------------------------------------------------------------ quantised blocks
def make_quant():
    import gguf
    from safetensors.numpy import save_file

    rng = np.random.default_rng(11)
    out, n = {}, 24
    # block bytes, offsets of the f16 scales
    for name, size, scales in [("Q8_0", 34, [0]), ("Q4_0", 18, [0]), ("Q4_K", 144, [0, 2]),
                               ("Q5_K", 176, [0, 2]), ("Q6_K", 210, [208])]:
        raw = rng.integers(0, 256, (n, size), dtype=np.uint8)
        for at in scales:
            s = (rng.normal(size=n) * 0.01).astype(np.float16)
            s[:4] = [0.0, 6e-8, 3e-5, 60.0]  # zero, the smallest subnormal, a subnormal, large
            raw[:, at:at + 2] = s.view(np.uint8).reshape(n, 2)
        t = gguf.GGMLQuantizationType[name]
        out[f"{name}.raw"] = raw
        out[f"{name}.values"] = gguf.quants.dequantize(raw, t).astype(np.float32)
    for name, edge in [("F16", [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x3C00]),
                       ("BF16", [0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x7F7F, 0xFF7F, 0x3F80])]:
        bits = rng.integers(0, 2**16, 512, dtype=np.uint16)
        top = 0x7C00 if name == "F16" else 0x7F80
        bits = np.where((bits & top) == top, bits & 0xBFFF, bits).astype(np.uint16)  # no inf, no NaN
        bits[: len(edge)] = edge
        t = gguf.GGMLQuantizationType[name]
        raw = bits.view(np.float16) if name == "F16" else bits.view(np.uint8)
        out[f"{name}.raw"] = bits.view(np.uint8)
        out[f"{name}.values"] = gguf.quants.dequantize(raw, t).astype(np.float32)
    # and the other direction, for a quantiser of our own
    x = (rng.normal(size=(16, 64)) * np.exp(rng.normal(size=(16, 1)))).astype(np.float32)
    x[0] = 0
    out["quantize.input"] = x
    for name in ["Q8_0", "Q4_0", "BF16"]:
        out[f"quantize.{name}"] = np.ascontiguousarray(
            gguf.quants.quantize(x, gguf.GGMLQuantizationType[name])).view(np.uint8)
    out |= more_blocks(np.random.default_rng(12))
    assert all(np.isfinite(v).all() for k, v in out.items() if v.dtype == np.float32)
    save_file(out, FIX / "quant_blocks.safetensors")
    (FIX / "quant_blocks.safetensors").chmod(0o644)
    print({k: v.shape for k, v in out.items()})


def more_blocks(rng):
    """The types that came later, with random numbers of their own, so that the others stay as they were."""
    import gguf

    out, n = {}, 8
    for name, scales in [("Q4_1", [0, 2]), ("Q5_0", [0]), ("Q5_1", [0, 2]), ("Q2_K", [80, 82]), ("Q3_K", [108]),
                         ("IQ4_NL", [0]), ("IQ4_XS", [0]), ("MXFP4", None)]:
        t = gguf.GGMLQuantizationType[name]
        raw = rng.integers(0, 256, (n, gguf.GGML_QUANT_SIZES[t][1]), dtype=np.uint8)
        if scales is None:
            # An exponent in place of f16 scales: the two subnormal ones, the smallest normal one, the largest whose numbers are finite.
            raw[:, 0] = rng.integers(110, 130, n)
            raw[:4, 0] = [0, 1, 2, 252]
        for at in scales or []:
            s = (rng.normal(size=n) * 0.01).astype(np.float16)
            s[:4] = [0.0, 6e-8, 3e-5, 60.0]
            raw[:, at:at + 2] = s.view(np.uint8).reshape(n, 2)
        out[f"{name}.raw"] = raw
        out[f"{name}.values"] = gguf.quants.dequantize(raw, t).astype(np.float32)
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("part", choices=["models", "gguf", "quant", "tokenizers", "kquants"])
    p.add_argument("names", nargs="*")
    p.add_argument("--text", nargs="*", type=Path)
    a = p.parse_args()
    import torch
    torch.set_num_threads(1)
    if a.part == "models":
        for i, name in enumerate(CONFIGS):
            if not a.names or name in a.names:
                make_model(name, i)
    elif a.part == "gguf":
        for name, cfg in CONFIGS.items():
            add_tokenizer_files(name, cfg)
        for file in GGUFS:
            if not a.names or file in a.names:
                make_gguf(file)
    elif a.part == "quant":
        make_quant()
    elif a.part == "kquants":
        make_kquants()
    elif a.part == "tokenizers":
        make_tokenizers(a.text or p.error("tokenizers needs --text FILE..."))


if __name__ == "__main__":
    main()
