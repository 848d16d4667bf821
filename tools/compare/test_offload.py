"""python3 -m unittest discover tools/compare"""
import re
import struct
import tempfile
import unittest

import offload as o

SHAPE = {"block_count": 4, "embedding_length": 64, "head_count": 4, "head_count_kv": 2, "key_length": 0}


def model():
    tensors = {"token_embd.weight": 500, "output.weight": 700, "output_norm.weight": 10}
    for l in range(4):
        tensors |= {f"blk.{l}.attn_q.weight": 100, f"blk.{l}.attn_norm.weight": 1, f"blk.{l}.ffn_norm.weight": 1}
        tensors |= {f"blk.{l}.ffn_{part}.weight": 100 + l for part in ("gate", "up", "down")}
    return o.sizes(tensors, SHAPE)


class Offload(unittest.TestCase):
    def test_parts_add_up(self):
        s = model()
        self.assertEqual(s.layers, [402, 405, 408, 411])
        self.assertEqual(s.ffn, [300, 303, 306, 309])
        self.assertEqual(s.head, 710)
        # Keys and values, f16, 256 positions at least, 2 heads of 16.
        self.assertEqual(s.with_context(100).kv, 2 * 2 * 256 * 2 * 16)
        tied = o.sizes({"token_embd.weight": 500, "output_norm.weight": 10}, SHAPE)
        self.assertEqual(tied.head, 510)

    def test_experts_are_ffns(self):
        tensors = {"blk.0.ffn_gate_inp.weight": 7, "output.weight": 1}
        tensors |= {f"blk.0.ffn_{part}_exps.weight": 100 for part in ("gate", "up", "down")}
        s = o.sizes(tensors, SHAPE)
        self.assertEqual((s.layers[0], s.ffn[0]), (307, 300))
        kept = re.compile(o.override(1))
        self.assertTrue(all(kept.fullmatch(f"blk.0.ffn_{part}_exps.weight") for part in ("gate", "up", "down")))
        # The router stays on the card.
        self.assertFalse(kept.fullmatch("blk.0.ffn_gate_inp.weight"))

    def test_the_largest_number_that_fits_is_chosen(self):
        s = model()
        for budget in range(0, 3500, 7):
            n = o.choose_ngl(s, budget)
            self.assertTrue(n == 0 or o.bytes_of_ngl(s, n) <= budget)
            self.assertTrue(n == 5 or o.bytes_of_ngl(s, n + 1) > budget)
            n = o.choose_cpu_ffn(s, budget)
            if n is None:
                self.assertGreater(o.bytes_of_cpu_ffn(s, 4), budget)
            else:
                self.assertLessEqual(o.bytes_of_cpu_ffn(s, n), budget)
                self.assertTrue(n == 0 or o.bytes_of_cpu_ffn(s, n - 1) > budget)
        # Head first, then layers from the last one.
        self.assertEqual([o.bytes_of_ngl(s, n) for n in (0, 1, 2)], [0, 710, 710 + 411])
        self.assertEqual(o.bytes_of_ngl(s, 5), o.bytes_of_cpu_ffn(s, 0))

    def test_buffers_that_only_the_measurement_shows_are_made_room_for(self):
        s = model()
        for hidden in (0, 50, 400, 1000, 5000):
            for budget in range(500, 3500, 101):
                probes = []

                def used(n):
                    probes.append(n)
                    return o.bytes_of_ngl(s, n) + hidden * (n > 0)

                found = o.settle(lambda b: o.choose_ngl(s, budget, b), lambda n: o.bytes_of_ngl(s, n), used, budget)
                best = max([n for n in range(6) if o.bytes_of_ngl(s, n) + hidden * (n > 0) <= budget])
                self.assertEqual(found[0], best, (hidden, budget, probes))
                self.assertLessEqual(len(probes), 3)
        self.assertIsNone(o.settle(lambda b: o.choose_cpu_ffn(s, 100, b), lambda n: 0, lambda n: 0, 100))

    def test_the_override_names_the_first_layers_ffns_and_nothing_else(self):
        pattern = re.compile(o.override(11))
        self.assertTrue(all(pattern.fullmatch(f"blk.{l}.ffn_{p}.weight") for l in range(11) for p in ("gate", "up", "down")))
        self.assertFalse(any(pattern.search(n) for n in ("blk.11.ffn_up.weight", "blk.1.ffn_norm.weight", "blk.1.attn_q.weight")))

    def test_bytes_on_the_card_are_read_from_what_llama_cpp_says(self):
        log = """load_tensors: offloaded 12/17 layers to GPU
load_tensors:   CPU_Mapped model buffer size =  1000.50 MiB
load_tensors:        CUDA0 model buffer size =   512.25 MiB
llama_kv_cache:      CUDA0 KV buffer size =    16.00 MiB
llama_kv_cache:        CPU KV buffer size =    99.00 MiB
llama_context:      CUDA0 compute buffer size =    70.75 MiB
llama_context:  CUDA_Host compute buffer size =     9.01 MiB
"""
        self.assertEqual(o.card_bytes(log), 599 * 2**20)
        self.assertEqual(o.card_bytes("CPU model buffer size = 5.00 MiB"), 0)

    def test_a_gguf_is_read_as_it_is_written(self):
        text = lambda t: struct.pack("<Q", len(t)) + t.encode()
        pairs = [text("general.architecture") + struct.pack("<I", 8) + text("llama"),
                 text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc"),
                 text("tokenizer.ggml.scores") + struct.pack("<IIQff", 9, 6, 2, 0.5, 1.5),
                 text("llama.block_count") + struct.pack("<II", 4, 1),
                 text("llama.attention.head_count") + struct.pack("<II", 4, 4)]
        tensors = [text("blk.0.ffn_up.weight") + struct.pack("<IQQIQ", 2, 4, 4, 0, 64), text("output.weight") + struct.pack("<IQIQ", 1, 16, 0, 0)]
        head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs + tensors)
        with tempfile.NamedTemporaryFile() as f:
            f.write(head + b"\0" * (-len(head) % 32) + b"\0" * 128)
            f.flush()
            found, shape = o.read_gguf(f.name)
        self.assertEqual(found, {"output.weight": 64, "blk.0.ffn_up.weight": 64})
        self.assertEqual((shape["block_count"], shape["head_count"], shape["head_count_kv"]), (1, 4, 0))


if __name__ == "__main__":
    unittest.main()
