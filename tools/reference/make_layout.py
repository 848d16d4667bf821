#!/usr/bin/env python3
"""Write a GGUF with the real layout of a published family and random blocks, to measure speed without a download.

    ref/bin/python tools/reference/make_layout.py qwen3.5-2b q4_k -o /tmp/qwen3.5-2b.gguf
    ref/bin/python tools/reference/make_layout.py qwen3.5-35b-a3b q8_0 --layers 4 -o /tmp/qwen3.5-moe.gguf
    ref/bin/python tools/reference/make_layout.py glm-4.7-flash q4_k --layers 4 -o /tmp/glm-4.7-flash.gguf
    ref/bin/python tools/reference/make_layout.py nemotron-3-nano-30b-a3b q5_0 --layers 7 -o /tmp/nemotron-3-nano.gguf

Of Nemotron a layer is a block: a mixer or an FFN.

The text is noise. Names, shapes and keys are those of llama.cpp's converter, so that llama.cpp reads the file, too.
"""
import argparse
import sys

import gguf
import numpy as np

# Bytes of a block of 256 or 32 weights, and where its scales of f16 stand.
BLOCKS = {"q4_k": (gguf.GGMLQuantizationType.Q4_K, 256, 144, (0, 2)), "q6_k": (gguf.GGMLQuantizationType.Q6_K, 256, 210, (208,)),
          "q8_0": (gguf.GGMLQuantizationType.Q8_0, 32, 34, (0,)), "q4_0": (gguf.GGMLQuantizationType.Q4_0, 32, 18, (0,)),
          "q5_0": (gguf.GGMLQuantizationType.Q5_0, 32, 22, (0,))}
# Mean square of a random block's numbers for a scale of 1.
SIZES = {"q4_k": 250.0, "q6_k": 1300.0, "q8_0": 74.0, "q4_0": 4.6, "q5_0": 85.5}


def qwen35(hidden, layers, ffn, heads, kv_heads, key_heads, value_heads, experts=None, tied=True):
    return {"arch": "qwen35moe" if experts else "qwen35", "hidden": hidden, "layers": layers, "ffn": ffn, "heads": heads,
            "kv_heads": kv_heads, "key_heads": key_heads, "value_heads": value_heads, "experts": experts, "tied": tied}


def nemotron(hidden, blocks, ffn, heads, kv_heads, head, value_heads, value_dim, groups, experts=None, shared=0):
    return {"arch": "nemotron_h_moe" if experts else "nemotron_h", "hidden": hidden, "blocks": blocks, "layers": len(blocks), "ffn": ffn,
            "heads": heads, "kv_heads": kv_heads, "head": head, "value_heads": value_heads, "value_dim": value_dim, "groups": groups,
            "experts": experts, "shared": shared}


def glm_lite(hidden, layers, dense, ffn, heads, queries, rank, plain, rope, values, experts):
    return {"arch": "deepseek2", "hidden": hidden, "layers": layers, "dense": dense, "ffn": ffn, "heads": heads, "queries": queries,
            "rank": rank, "plain": plain, "rope": rope, "values": values, "experts": experts}


MODELS = {
    "glm-4.7-flash": glm_lite(2048, 47, 10240, 1536, 20, 768, 512, 192, 64, 256, experts=(64, 4)),
    "nemotron-3-nano-30b-a3b": nemotron(2688, "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", 1856, 32, 2, 128, 64, 64, 8,
                                        experts=(128, 6), shared=3712),
    "nemotron-nano-9b-v2": nemotron(4480, "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", 15680, 40, 8, 128, 128, 80, 8),
    "qwen3.5-0.8b": qwen35(1024, 24, 3584, 8, 2, 16, 16),
    "qwen3.5-2b": qwen35(2048, 24, 6144, 8, 2, 16, 16),
    "qwen3.5-4b": qwen35(2560, 32, 9216, 16, 4, 16, 32),
    "qwen3.5-35b-a3b": qwen35(2048, 40, 512, 16, 2, 16, 32, experts=(256, 8), tied=False),
}
HEAD, STATE, TAPS, VOCAB, EVERY = 256, 128, 4, 248320, 4
NEMOTRON_VOCAB = 131072
GLM_VOCAB = 154880


class File:
    def __init__(self, path, arch, quant, seed):
        self.writer, self.quant = gguf.GGUFWriter(path, arch), quant
        self.random = np.random.default_rng(seed)

    def matrix(self, name, *shape, quant=None):
        """Rows that read as many numbers as the last size says, so large that a product is about 1."""
        quant = quant or self.quant
        kind, block, size, scales = BLOCKS[quant]
        rows, cols = int(np.prod(shape[:-1])), shape[-1]
        blocks = self.random.integers(0, 256, (rows * cols // block, size), dtype=np.uint8)
        scale = np.float16(0.7 / np.sqrt(cols * SIZES[quant]))
        for at in scales:
            blocks[:, at:at + 2] = np.frombuffer(scale.tobytes(), np.uint8)
        self.writer.add_tensor(name, blocks.reshape(*shape[:-1], -1), raw_dtype=kind)

    def vector(self, name, *shape, mean=0.0, spread=0.1):
        self.writer.add_tensor(name, (mean + spread * self.random.standard_normal(shape)).astype(np.float32))

    def close(self):
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file(progress=False)
        self.writer.close()


def keys(w, m, arch):
    w.add_name("layout")
    w.add_block_count(m["layers"])
    w.add_context_length(32768)
    w.add_embedding_length(m["hidden"])
    w.add_head_count(m["heads"])
    w.add_head_count_kv(m["kv_heads"])
    w.add_key_length(HEAD)
    w.add_value_length(HEAD)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_rope_freq_base(1e7)
    w.add_rope_dimension_count(HEAD // 4)
    w.add_rope_dimension_sections([11, 11, 10, 0])
    w.add_uint32(f"{arch}.ssm.conv_kernel", TAPS)
    w.add_uint32(f"{arch}.ssm.state_size", STATE)
    w.add_uint32(f"{arch}.ssm.group_count", m["key_heads"])
    w.add_uint32(f"{arch}.ssm.time_step_rank", m["value_heads"])
    w.add_uint32(f"{arch}.ssm.inner_size", m["value_heads"] * STATE)
    w.add_uint32(f"{arch}.full_attention_interval", EVERY)
    if m["experts"]:
        count, used = m["experts"]
        w.add_expert_count(count)
        w.add_expert_used_count(used)
        w.add_expert_feed_forward_length(m["ffn"])
        w.add_expert_shared_feed_forward_length(m["ffn"])
    else:
        w.add_feed_forward_length(m["ffn"])
    vocabulary(w, VOCAB)


def vocabulary(w, size):
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] + [f"▁filler{i}" for i in range(259, size)]
    w.add_tokenizer_model("llama")
    w.add_token_list(tokens)
    w.add_token_scores([0.0] * 259 + [-float(i) for i in range(259, size)])
    w.add_token_types([2, 3, 3] + [6] * 256 + [1] * (size - 259))
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)


def nemotron_keys(w, m, arch):
    blocks = m["blocks"][:m["layers"]]
    w.add_name("layout")
    w.add_block_count(len(blocks))
    w.add_context_length(32768)
    w.add_embedding_length(m["hidden"])
    w.add_vocab_size(NEMOTRON_VOCAB)
    w.add_feed_forward_length([m["ffn"] if block in "E-" else 0 for block in blocks])
    w.add_head_count(m["heads"])
    w.add_head_count_kv([m["kv_heads"] if block == "*" else 0 for block in blocks])
    w.add_key_length(m["head"])
    w.add_value_length(m["head"])
    w.add_layer_norm_eps(1e-5)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_dimension_count(m["head"])
    w.add_uint32(f"{arch}.ssm.conv_kernel", TAPS)
    w.add_uint32(f"{arch}.ssm.state_size", STATE)
    w.add_uint32(f"{arch}.ssm.group_count", m["groups"])
    w.add_uint32(f"{arch}.ssm.time_step_rank", m["value_heads"])
    w.add_uint32(f"{arch}.ssm.inner_size", m["value_heads"] * m["value_dim"])
    if m["experts"]:
        count, used = m["experts"]
        w.add_expert_count(count)
        w.add_expert_used_count(used)
        w.add_expert_shared_count(1)
        w.add_expert_feed_forward_length(m["ffn"])
        w.add_expert_shared_feed_forward_length(m["shared"])
        w.add_expert_weights_norm(True)
        w.add_expert_weights_scale(2.5)
        w.add_expert_group_count(1)
    vocabulary(w, NEMOTRON_VOCAB)


def write_nemotron(f, m):
    hidden, heads, values = m["hidden"], m["value_heads"], m["value_heads"] * m["value_dim"]
    channels = values + 2 * m["groups"] * STATE
    f.matrix("token_embd.weight", NEMOTRON_VOCAB, hidden, quant="q8_0")
    f.matrix("output.weight", NEMOTRON_VOCAB, hidden, quant="q8_0")
    f.vector("output_norm.weight", hidden, mean=1.0)
    for number, block in enumerate(m["blocks"][:m["layers"]]):
        name = lambda part: f"blk.{number}.{part}"
        f.vector(name("attn_norm.weight"), hidden, mean=1.0)
        if block == "M":
            f.matrix(name("ssm_in.weight"), values + channels + heads, hidden)
            f.vector(name("ssm_conv1d.weight"), channels, TAPS, spread=0.5)
            f.vector(name("ssm_conv1d.bias"), channels)
            f.vector(name("ssm_dt.bias"), heads)
            f.vector(name("ssm_a"), heads, 1, mean=-0.3, spread=0.05)
            f.vector(name("ssm_d"), heads, 1, mean=1.0)
            f.vector(name("ssm_norm.weight"), m["groups"], values // m["groups"], mean=1.0)
            f.matrix(name("ssm_out.weight"), hidden, values)
        elif block == "*":
            f.matrix(name("attn_q.weight"), m["heads"] * m["head"], hidden)
            f.matrix(name("attn_k.weight"), m["kv_heads"] * m["head"], hidden)
            f.matrix(name("attn_v.weight"), m["kv_heads"] * m["head"], hidden)
            f.matrix(name("attn_output.weight"), hidden, m["heads"] * m["head"])
        elif block == "E":
            count = m["experts"][0]
            f.vector(name("ffn_gate_inp.weight"), count, hidden, spread=hidden**-0.5)
            f.vector(name("exp_probs_b.bias"), count)
            f.matrix(name("ffn_up_exps.weight"), count, m["ffn"], hidden)
            f.matrix(name("ffn_down_exps.weight"), count, hidden, m["ffn"])
            f.matrix(name("ffn_up_shexp.weight"), m["shared"], hidden)
            f.matrix(name("ffn_down_shexp.weight"), hidden, m["shared"])
        else:
            f.matrix(name("ffn_up.weight"), m["ffn"], hidden)
            f.matrix(name("ffn_down.weight"), hidden, m["ffn"])


def glm_lite_keys(w, m):
    count, used = m["experts"]
    w.add_name("layout")
    w.add_block_count(m["layers"])
    w.add_context_length(32768)
    w.add_embedding_length(m["hidden"])
    w.add_vocab_size(GLM_VOCAB)
    w.add_feed_forward_length(m["dense"])
    w.add_head_count(m["heads"])
    w.add_head_count_kv(1)
    w.add_q_lora_rank(m["queries"])
    w.add_kv_lora_rank(m["rank"])
    w.add_key_length(m["rank"] + m["rope"])
    w.add_value_length(m["rank"])
    w.add_key_length_mla(m["plain"] + m["rope"])
    w.add_value_length_mla(m["values"])
    w.add_rope_dimension_count(m["rope"])
    w.add_rope_freq_base(1e6)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_leading_dense_block_count(1)
    w.add_expert_count(count)
    w.add_expert_used_count(used)
    w.add_expert_shared_count(1)
    w.add_expert_feed_forward_length(m["ffn"])
    w.add_expert_weights_scale(1.8)
    w.add_expert_weights_norm(True)
    w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    vocabulary(w, GLM_VOCAB)


def write_glm_lite(f, m):
    hidden, heads, rank, edge = m["hidden"], m["heads"], m["rank"], "q6_k" if f.quant == "q4_k" else "q8_0"
    f.matrix("token_embd.weight", GLM_VOCAB, hidden, quant=edge)
    f.matrix("output.weight", GLM_VOCAB, hidden, quant=edge)
    f.vector("output_norm.weight", hidden, mean=1.0)
    for layer in range(m["layers"]):
        name = lambda part: f"blk.{layer}.{part}"
        f.vector(name("attn_norm.weight"), hidden, mean=1.0)
        f.vector(name("ffn_norm.weight"), hidden, mean=1.0)
        f.matrix(name("attn_q_a.weight"), m["queries"], hidden)
        f.vector(name("attn_q_a_norm.weight"), m["queries"], mean=1.0)
        f.matrix(name("attn_q_b.weight"), heads * (m["plain"] + m["rope"]), m["queries"])
        f.matrix(name("attn_kv_a_mqa.weight"), rank + m["rope"], hidden)
        f.vector(name("attn_kv_a_norm.weight"), rank, mean=1.0)
        f.matrix(name("attn_k_b.weight"), heads, rank, m["plain"], quant="q8_0")  # no whole blocks of 256
        f.matrix(name("attn_v_b.weight"), heads, m["values"], rank)
        f.matrix(name("attn_output.weight"), hidden, heads * m["values"])
        if layer == 0:
            parts = [("", (), m["dense"])]
        else:
            f.vector(name("ffn_gate_inp.weight"), m["experts"][0], hidden, spread=hidden**-0.5)
            f.vector(name("exp_probs_b.bias"), m["experts"][0])
            parts = [("_exps", m["experts"][:1], m["ffn"]), ("_shexp", (), m["ffn"])]
        for tail, lead, ffn in parts:
            f.matrix(name(f"ffn_gate{tail}.weight"), *lead, ffn, hidden)
            f.matrix(name(f"ffn_up{tail}.weight"), *lead, ffn, hidden)
            f.matrix(name(f"ffn_down{tail}.weight"), *lead, hidden, ffn)


def write(f, m):
    hidden, ffn, values = m["hidden"], m["ffn"], m["value_heads"] * STATE
    channels = 2 * m["key_heads"] * STATE + values
    edge = "q6_k" if f.quant == "q4_k" else "q8_0"
    f.matrix("token_embd.weight", VOCAB, hidden, quant=edge)
    if not m["tied"]:
        f.matrix("output.weight", VOCAB, hidden, quant=edge)
    f.vector("output_norm.weight", hidden, mean=1.0)
    for layer in range(m["layers"]):
        name = lambda part: f"blk.{layer}.{part}"
        f.vector(name("attn_norm.weight"), hidden, mean=1.0)
        f.vector(name("post_attention_norm.weight"), hidden, mean=1.0)
        if (layer + 1) % EVERY == 0:
            f.matrix(name("attn_q.weight"), 2 * m["heads"] * HEAD, hidden)
            f.matrix(name("attn_k.weight"), m["kv_heads"] * HEAD, hidden)
            f.matrix(name("attn_v.weight"), m["kv_heads"] * HEAD, hidden)
            f.matrix(name("attn_output.weight"), hidden, m["heads"] * HEAD)
            f.vector(name("attn_q_norm.weight"), HEAD, mean=1.0)
            f.vector(name("attn_k_norm.weight"), HEAD, mean=1.0)
        else:
            f.matrix(name("attn_qkv.weight"), channels, hidden)
            f.matrix(name("attn_gate.weight"), values, hidden)
            f.matrix(name("ssm_alpha.weight"), m["value_heads"], hidden, quant="q8_0")
            f.matrix(name("ssm_beta.weight"), m["value_heads"], hidden, quant="q8_0")
            f.vector(name("ssm_conv1d.weight"), channels, TAPS, spread=0.5)
            f.vector(name("ssm_dt.bias"), m["value_heads"])
            f.vector(name("ssm_a"), m["value_heads"], mean=-0.3, spread=0.05)
            f.vector(name("ssm_norm.weight"), STATE, mean=1.0)
            f.matrix(name("ssm_out.weight"), hidden, values)
        if m["experts"]:
            count = m["experts"][0]
            f.vector(name("ffn_gate_inp.weight"), count, hidden, spread=hidden**-0.5)
            f.vector(name("ffn_gate_inp_shexp.weight"), hidden, spread=hidden**-0.5)
            for tail, lead in (("_exps", (count,)), ("_shexp", ())):
                f.matrix(name(f"ffn_gate{tail}.weight"), *lead, ffn, hidden)
                f.matrix(name(f"ffn_up{tail}.weight"), *lead, ffn, hidden)
                f.matrix(name(f"ffn_down{tail}.weight"), *lead, hidden, ffn)
        else:
            f.matrix(name("ffn_gate.weight"), ffn, hidden)
            f.matrix(name("ffn_up.weight"), ffn, hidden)
            f.matrix(name("ffn_down.weight"), hidden, ffn)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("quant", choices=BLOCKS)
    parser.add_argument("-o", "--output", required=True)
    parser.add_argument("--layers", type=int, help="take so many layers only")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    m = MODELS[args.model] | ({"layers": args.layers} if args.layers else {})
    f = File(args.output, m["arch"], args.quant, args.seed)
    if "blocks" in m:
        nemotron_keys(f.writer, m, m["arch"])
        write_nemotron(f, m)
    elif "rank" in m:
        glm_lite_keys(f.writer, m)
        write_glm_lite(f, m)
    else:
        keys(f.writer, m, m["arch"])
        write(f, m)
    f.close()
    sys.stdout.write(f"{args.output}\n")


if __name__ == "__main__":
    main()
