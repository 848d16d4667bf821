#!/usr/bin/env python3
"""Make the fixture of gpt-oss under tests/fixtures/models: a tiny random model as a GGUF of the form in which it is
published (experts in MXFP4, the other matrices in Q8_0), and the answer of transformers on the dequantised weights.

    ref/bin/python tools/reference/make_gpt_oss.py model
    LLAMA_PYTHON=llama/bin/python ref/bin/python tools/reference/make_gpt_oss.py check

`check` runs llama.cpp on it, and on the same in f32. Set-up as for make_fixtures.py, whose helpers are used.
"""
import argparse
import json
import math
import sys
import tempfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
import make_fixtures as base
import make_mixtures as mixtures
from make_fixtures import CTX, HIDDEN, KV, MODELS, VOCAB

FILE = MODELS / "gpt-oss.mxfp4.gguf"
PROMPT, SEED = 40, 9
# What marks messages there; these take the places of qwen2's last words and of the three tokens behind them.
MARKERS = {314: "<|start|>", 315: "<|channel|>", 316: "<|message|>", 317: "<|call|>", 318: "<|end|>", 319: "<|return|>"}
CONFIG = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": [317, 319], "head_dim": 16, "hidden_act": "silu", "hidden_size": HIDDEN, "intermediate_size": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "max_position_embeddings": CTX, "model_type": "gpt_oss",
    "num_attention_heads": 6, "num_experts_per_tok": 3, "num_hidden_layers": 4, "num_key_value_heads": KV,
    "num_local_experts": 6, "rms_norm_eps": 1e-05, "sliding_window": 8, "swiglu_limit": 7.0,
    "tie_word_embeddings": False, "vocab_size": VOCAB,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                        "original_max_position_embeddings": 4096, "truncate": False},
}


def rounded(x, kind):
    """What a GGUF holds of these numbers in this type, as bytes and as numbers."""
    import gguf

    t = gguf.GGMLQuantizationType[kind]
    raw = gguf.quants.quantize(np.ascontiguousarray(x, np.float32), t)
    return raw, gguf.quants.dequantize(raw, t)


def random_tensors(cfg, seed):
    """The tensors of the GGUF: name -> (numbers, type, bytes). Scaled so that every part moves the logits, and that
    gate and up often pass the limit."""
    rng, unit = np.random.default_rng(seed), 1 / math.sqrt(HIDDEN)
    q, kv, vocab = cfg["num_attention_heads"] * cfg["head_dim"], KV * cfg["head_dim"], cfg["vocab_size"]
    experts, ffn, out = cfg["num_local_experts"], cfg["intermediate_size"], {}

    def put(name, x, kind="F32"):
        x = base.storable(mixtures.torch_of(x)).numpy()
        raw, x = (x, x) if kind == "F32" else rounded(x, kind)
        out[name] = (x, kind, raw)

    normal = lambda std, *shape: rng.normal(size=shape) * std
    norm = lambda n: 0.5 + rng.random(n)
    put("token_embd.weight", normal(0.7, vocab, HIDDEN), "Q8_0")
    put("output_norm.weight", norm(HIDDEN))
    put("output.weight", normal(2 * unit, vocab, HIDDEN) * np.exp(0.4 * normal(1, vocab, 1)), "Q8_0")
    for n in range(cfg["num_hidden_layers"]):
        at = f"blk.{n}."
        put(at + "attn_norm.weight", norm(HIDDEN))
        put(at + "post_attention_norm.weight", norm(HIDDEN))
        for part, rows, std in [("q", q, 1.3), ("k", kv, 1.3), ("v", kv, 1)]:
            put(f"{at}attn_{part}.weight", normal(std * unit, rows, HIDDEN), "Q8_0")
            put(f"{at}attn_{part}.bias", normal(0.3, rows))
        put(at + "attn_output.weight", normal(1 / math.sqrt(q), HIDDEN, q), "Q8_0")
        put(at + "attn_output.bias", normal(0.3, HIDDEN))
        put(at + "attn_sinks.weight", normal(1, cfg["num_attention_heads"]))
        put(at + "ffn_gate_inp.weight", normal(2 * unit, experts, HIDDEN))
        put(at + "ffn_gate_inp.bias", normal(0.7, experts))
        for part in ("gate", "up"):
            put(f"{at}ffn_{part}_exps.weight", normal(3 * unit, experts, ffn, HIDDEN), "MXFP4")
            put(f"{at}ffn_{part}_exps.bias", normal(2, experts, ffn))
        put(at + "ffn_down_exps.weight", normal(0.25 / math.sqrt(ffn), experts, HIDDEN, ffn), "MXFP4")
        put(at + "ffn_down_exps.bias", normal(0.5, experts, HIDDEN))
    return out


def published(cfg, tensors):
    """The same under the names and in the shapes of the published directory."""
    x = {name: numbers for name, (numbers, _, _) in tensors.items()}
    out = {"model.embed_tokens.weight": x["token_embd.weight"], "model.norm.weight": x["output_norm.weight"],
           "lm_head.weight": x["output.weight"]}
    for n in range(cfg["num_hidden_layers"]):
        at, to = f"blk.{n}.", f"model.layers.{n}."
        out[to + "input_layernorm.weight"] = x[at + "attn_norm.weight"]
        out[to + "post_attention_layernorm.weight"] = x[at + "post_attention_norm.weight"]
        for part, name in [("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("output", "o_proj")]:
            for kind in ("weight", "bias"):
                out[f"{to}self_attn.{name}.{kind}"] = x[f"{at}attn_{part}.{kind}"]
        out[to + "self_attn.sinks"] = x[at + "attn_sinks.weight"]
        for kind in ("weight", "bias"):
            out[f"{to}mlp.router.{kind}"] = x[f"{at}ffn_gate_inp.{kind}"]
        # Gate and up take turns.
        in_turns = lambda kind: np.stack([x[f"{at}ffn_{part}_exps.{kind}"] for part in ("gate", "up")], 2)
        both = in_turns("weight")
        both = both.reshape(len(both), -1, both.shape[-1])
        out[to + "mlp.experts.gate_up_proj"] = both.swapaxes(1, 2)
        bias = in_turns("bias")
        out[to + "mlp.experts.gate_up_proj_bias"] = bias.reshape(len(bias), -1)
        out[to + "mlp.experts.down_proj"] = x[at + "ffn_down_exps.weight"].swapaxes(1, 2)
        out[to + "mlp.experts.down_proj_bias"] = x[at + "ffn_down_exps.bias"]
    return out


class Reference:
    """transformers' model with `router_gap` in its answers: for each sequence, the smallest distance so far of the last
    router logit that was taken from the first that was not."""

    def __init__(self, cfg, weights):
        import torch
        import transformers

        config = transformers.GptOssConfig.from_dict(json.loads(json.dumps(cfg)))
        config._attn_implementation, config._experts_implementation = "eager", "eager"
        self.model = transformers.GptOssForCausalLM(config).eval()
        state = {k: torch.tensor(np.ascontiguousarray(v)) for k, v in weights.items()}
        self.model.load_state_dict(state)
        self.used, self.gap = cfg["num_experts_per_tok"], None
        for layer in self.model.model.layers:
            layer.mlp.router.register_forward_hook(self.see)
        self.double()

    def see(self, router, args, out):
        import torch

        order = out[0].sort(-1, descending=True).values
        gaps = (order[:, self.used - 1] - order[:, self.used]).reshape(len(self.gap), -1)
        self.gap = torch.minimum(self.gap, gaps.min(1).values)

    def double(self):
        self.model.double()
        return self

    def float(self):
        self.model.float()
        return self

    def __call__(self, input_ids, past_key_values=None, use_cache=False):
        import torch

        if past_key_values is None:
            self.gap = torch.full((len(input_ids),), 9.0, dtype=torch.float64)
        out = self.model(input_ids=input_ids, past_key_values=past_key_values, use_cache=use_cache)
        out.router_gap = self.gap
        return out


def without(weights, *parts, value=0):
    return {k: np.full_like(v, value) if any(p in k for p in parts) else v for k, v in weights.items()}


def mistakes(cfg, weights, prompt, right):
    """How far typical wrong implementations are."""
    rope = cfg["rope_parameters"]
    yarn = lambda **more: cfg | {"rope_parameters": rope | more}
    wrong = {
        "no sinks": (cfg, without(weights, "sinks", value=-1e9)),
        "no window": (cfg | {"layer_types": ["full_attention"] * 4}, weights),
        "window in the other layers": (cfg | {"layer_types": cfg["layer_types"][::-1]}, weights),
        "no YaRN": (yarn(rope_type="default"), weights),
        "YaRN with whole bounds": (yarn(truncate=True), weights),
        "YaRN without its factor on attention": (yarn(attention_factor=1.0), weights),
        "no bias of the router": (cfg, without(weights, "router.bias")),
        "no biases of gate and up": (cfg, without(weights, "gate_up_proj_bias")),
        "no bias of down": (cfg, without(weights, "down_proj_bias")),
        "no bias of attention's output": (cfg, without(weights, "o_proj.bias")),
        "no limit": (cfg | {"swiglu_limit": 1e9}, weights),
        "silu": (cfg | {"swiglu_alpha": 1.0}, weights),
    }
    return {what: float((base.logits(Reference(*how), prompt) - right).abs().max()) for what, how in wrong.items()}


def fill(w, cfg, tensors):
    import gguf

    w.add_block_count(cfg["num_hidden_layers"])
    w.add_context_length(cfg["max_position_embeddings"])
    w.add_embedding_length(cfg["hidden_size"])
    w.add_feed_forward_length(cfg["intermediate_size"])
    w.add_head_count(cfg["num_attention_heads"])
    w.add_head_count_kv(cfg["num_key_value_heads"])
    w.add_layer_norm_rms_eps(cfg["rms_norm_eps"])
    w.add_key_length(cfg["head_dim"])
    w.add_value_length(cfg["head_dim"])
    w.add_expert_count(cfg["num_local_experts"])
    w.add_expert_used_count(cfg["num_experts_per_tok"])
    w.add_expert_feed_forward_length(cfg["intermediate_size"])
    w.add_sliding_window(cfg["sliding_window"])
    rope = cfg["rope_parameters"]
    w.add_rope_freq_base(rope["rope_theta"])
    w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    w.add_rope_scaling_factor(rope["factor"])
    w.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    w.add_file_type(38)  # mostly MXFP4, of a mixture
    vocabulary = json.loads((base.VOCABS / "qwen2.json").read_text())
    model, left = vocabulary["model"], {text for text, i in vocabulary["model"]["vocab"].items() if i in MARKERS}
    model["vocab"] = {text: i for text, i in model["vocab"].items() if text not in left}
    model["merges"] = [m for m in model["merges"] if "".join(m if isinstance(m, list) else m.split(" ")) not in left]
    vocabulary["added_tokens"] = [{"id": i, "content": text} for i, text in MARKERS.items()]
    base.add_bpe_to_gguf(w, vocabulary, "gpt-4o", "!", "<|return|>", False)
    for name, (x, kind, raw) in tensors.items():
        t = None if kind == "F32" else gguf.GGMLQuantizationType[kind]
        w.add_tensor(name, raw, raw_dtype=t)


def make():
    tensors = random_tensors(CONFIG, SEED)
    base.gguf_file(FILE, "gpt-oss", lambda w: fill(w, CONFIG, tensors))
    print(FILE.name, FILE.stat().st_size, flush=True)
    weights = published(CONFIG, tensors)
    model = Reference(CONFIG, weights)
    prompt = base.pick_prompt(model, CONFIG, SEED, 1e-2, PROMPT, rounds=6, distinct=16)
    right = base.logits(model, prompt)
    out, _, _, _ = base.greedy(model, prompt)
    base.logits(model, prompt + out[:-1])
    extra = {"reference": "transformers on the dequantised weights, float64", "min_router_gap": float(model.gap[0]),
             "wrong_by": mistakes(CONFIG, weights, prompt, right)}
    base.write_expected(str(FILE).removesuffix(".gguf") + ".expected", model, CONFIG, prompt, extra)


def exact(path):
    """The same file with all of its matrices in f32."""
    import gguf

    read = gguf.GGUFReader(FILE)
    tensors = {}
    for t in read.tensors:
        x = gguf.quants.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1].tolist()).astype(np.float32)
        tensors[t.name] = (x, "F32", x)
    base.gguf_file(path, "gpt-oss", lambda w: fill(w, CONFIG, tensors))


def check():
    """How far llama.cpp is from the expected answer, with the file as it is and with all matrices in f32; there also from
    transformers with YaRN's bounds rounded, as llama.cpp has them."""
    from safetensors.numpy import load_file

    at = str(FILE).removesuffix(".gguf") + ".expected"
    doc, expected = json.loads(Path(at + ".json").read_text()), load_file(at + ".safetensors")["prompt_logits"]

    def compare(what, path, expected, greedy):
        first, ids, _ = mixtures.ask_llama(path, doc["prompt"])
        apart = float(np.abs(first - expected).max() / np.abs(expected).max())
        same = next((i for i, (a, b) in enumerate(zip(ids, greedy)) if a != b), base.N_GREEDY)
        print(f"{what}: {apart:.1e} of the largest logit, {same} of {base.N_GREEDY} tokens the same", flush=True)

    compare("as it is", FILE, expected, doc["greedy"])
    with tempfile.TemporaryDirectory() as t:
        path = Path(t) / "f32.gguf"
        exact(path)
        compare("in f32", path, expected, doc["greedy"])
        rope = CONFIG["rope_parameters"] | {"truncate": True}
        model = Reference(CONFIG | {"rope_parameters": rope}, published(CONFIG, random_tensors(CONFIG, SEED)))
        rounded_bounds = base.logits(model, doc["prompt"]).numpy(), base.greedy(model, doc["prompt"])[0]
        compare("in f32, beside transformers with rounded bounds", path, *rounded_bounds)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("part", choices=["model", "check"])
    import torch
    torch.set_num_threads(1)
    {"model": make, "check": check}[p.parse_args().part]()


if __name__ == "__main__":
    main()
