#!/usr/bin/env python3
"""Hold the greedy tokens of a Gemma 3 GGUF, as tools/real_models.py has recorded them, against transformers on the dequantised weights.

    ref/bin/python tools/reference/check_gemma3.py FILE.gguf rows.json tokenizer.json

Prints for each text how far the log probabilities of its tokens are from the reference's at most, and where the reference would first have chosen
another token, with the distance of both in its log probabilities. Set-up as for make_fixtures.py.
"""
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from gguf import GGUFReader, dequantize
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import real_models
import make_families

INSIDE = {to: of for of, to in make_families.INSIDE.items() if "experts" not in of and not of.startswith(("feed_forward", "conv", "operator"))}
INSIDE |= {"attn_output": "self_attn.o_proj", "attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm",
           "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj",
           "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "post_attention_norm": "post_attention_layernorm"}


def reference(reader):
    """The model in f32, with the weights of the file."""
    key = lambda name: reader.fields[f"gemma3.{name}"].contents()
    layers, theta = key("block_count"), key("rope.freq_base")
    rope = lambda theta: {"rope_type": "default", "rope_theta": theta}
    config = transformers.Gemma3TextConfig(
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].contents()), hidden_size=key("embedding_length"),
        intermediate_size=key("feed_forward_length"), num_hidden_layers=layers, num_attention_heads=key("attention.head_count"),
        num_key_value_heads=key("attention.head_count_kv"), head_dim=key("attention.key_length"),
        sliding_window=key("attention.sliding_window"), query_pre_attn_scalar=key("attention.key_length"),
        rms_norm_eps=key("attention.layer_norm_rms_epsilon"), tie_word_embeddings=True,
        rope_parameters={"full_attention": rope(theta), "sliding_attention": rope(10000.0)},
        layer_types=["full_attention" if (n + 1) % 6 == 0 else "sliding_attention" for n in range(layers)])
    config._attn_implementation = "eager"
    model = transformers.Gemma3ForCausalLM(config).float().eval()
    weights = {}
    for tensor in reader.tensors:
        x = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = tensor.name.removesuffix(".weight")
        if "norm" in name:
            x = x - 1
        if name in ("token_embd", "output_norm"):
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[name]
        else:
            _, layer, rest = name.split(".", 2)
            name = f"model.layers.{layer}.{INSIDE[rest]}"
        weights[f"{name}.weight"] = torch.tensor(x)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and all("lm_head" in name for name in missing), (missing, unexpected)
    return model


def main(file, rows, tokenizer):
    reader = GGUFReader(file)
    model, tokenizer = reference(reader), Tokenizer.from_file(tokenizer)
    pieces = reader.fields["tokenizer.ggml.tokens"].contents()
    index = {piece: i for i, piece in enumerate(pieces)}
    greedy = next(row for row in json.loads(Path(rows).read_text()) if row["file"] == Path(file).name)["greedy"]["result"]
    for text, tokens in zip(real_models.TEXTS, greedy):
        ids, past, far, parting = [2, *tokenizer.encode(text, add_special_tokens=False).ids], None, 0.0, "nowhere"
        for at, (piece, log_probability) in enumerate(tokens):
            with torch.no_grad():
                out = model(input_ids=torch.tensor([ids]), past_key_values=past, use_cache=True)
            past, known = out.past_key_values, torch.log_softmax(out.logits[0, -1], -1)
            ours, best = index.get(piece.replace(" ", "\u2581"), index.get(piece)), int(known.argmax())
            far = max(far, abs(float(known[ours]) - log_probability))
            if ours != best and parting == "nowhere":
                parting = f"at {at}: {piece!r} and {pieces[best]!r}, {float(known[best] - known[ours]):.3f} apart"
            ids = [ours]
        print(f"{text[:30]!r}: log probabilities within {far:.3f}; parts {parting}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
