"""The whole command, with a llama.cpp and a dynamicinfer that are made up: python3 -m unittest discover tools/compare

The made-up llama.cpp has a card: what it says it puts there follows from the layers that it is asked for, as the real one's does.
"""
import csv
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

HERE = Path(__file__).resolve().parent
LAYERS, HIDDEN, FFN = 8, 256, 1024

FAKE = '''
import ctypes, json, os, sys
sys.path.insert(0, {here!r})
import offload
__version__ = "0.0"
GPU = {gpu}
llama_token = ctypes.c_int32

class Params(ctypes.Structure):
    _fields_ = [("n_gpu_layers", ctypes.c_int), ("use_mmap", ctypes.c_bool), ("use_mlock", ctypes.c_bool), ("tensor_buft_overrides", ctypes.c_void_p)]

class Override(ctypes.Structure):
    _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]

class Context: pass

say = None
def llama_log_callback(f): return f
def llama_log_set(f, _):
    global say
    say = f
def llama_backend_init(): pass
def llama_supports_gpu_offload(): return GPU
def llama_model_default_params(): return Params()
def llama_model_load_from_file(path, p):
    kept = 0
    if p.tensor_buft_overrides:
        first = ctypes.cast(p.tensor_buft_overrides, ctypes.POINTER(Override))
        assert first[1].pattern is None and first[0].buft == 4711
        kept = first[0].pattern.decode().count("|") - 2 + 1
    tensors, shape = offload.read_gguf(path.decode())
    s = offload.sizes(tensors, shape).with_context(256)
    used = offload.bytes_of_ngl(s, p.n_gpu_layers) - sum(s.ffn[:kept])
    say(2, f"load_tensors: CUDA0 model buffer size = {{used / 2**20:.2f}} MiB\\n".encode(), None)
    return (p.n_gpu_layers, kept)
def llama_context_default_params(): return Context()
def llama_init_from_model(m, c):
    if m[0]:
        say(2, b"llama_context: CUDA0 compute buffer size = 3.00 MiB\\n", None)
    return m
def llama_model_size(m): return 1
def llama_model_get_vocab(m): return m
def llama_vocab_n_tokens(v): return 100
def llama_get_memory(c): return c
def llama_memory_clear(memory, yes): pass
def llama_batch_get_one(tokens, n): return n
def llama_decode(c, batch): return 0
def llama_synchronize(c): pass
'''

OURS = '''#!{python}
import json, sys
prompt, gen = int(sys.argv[sys.argv.index("-p") + 1]), int(sys.argv[sys.argv.index("-n") + 1])
card = sys.argv[sys.argv.index("--vram") + 1] if "--vram" in sys.argv else None
assert card is None or sys.argv[sys.argv.index("--device") + 1] == "cuda"
print(json.dumps([{{"n_prompt": prompt, "n_gen": 0, "avg_ts": 10.0}}, {{"n_prompt": 0, "n_gen": gen, "avg_ts": 5.0, "predictor": "dense"}}]))
'''


def gguf(path):
    """A model of zeros."""
    text = lambda t: struct.pack("<Q", len(t)) + t.encode()
    number = lambda name, n: text("llama." + name) + struct.pack("<II", 4, n)
    pairs = [text("general.architecture") + struct.pack("<I", 8) + text("llama"), number("block_count", LAYERS), number("embedding_length", HIDDEN),
             number("attention.head_count", 4), number("attention.head_count_kv", 4)]
    names = {"token_embd.weight": HIDDEN * 100, "output.weight": HIDDEN * 100}
    for l in range(LAYERS):
        names |= {f"blk.{l}.attn_{p}.weight": HIDDEN * HIDDEN for p in ("q", "k", "v", "output")}
        names |= {f"blk.{l}.ffn_{p}.weight": HIDDEN * FFN for p in ("gate", "up", "down")}
    head, at = b"", 0
    for name, numbers in names.items():
        head += text(name) + struct.pack("<IQIQ", 1, numbers, 1, at)
        at += 2 * numbers
    head = b"GGUF" + struct.pack("<IQQ", 3, len(names), len(pairs)) + b"".join(pairs) + head
    path.write_bytes(head + b"\0" * (-len(head) % 32) + b"\0" * at)


class Compare(unittest.TestCase):
    def setUp(self):
        self.place = tempfile.TemporaryDirectory()
        self.dir = Path(self.place.name)
        gguf(self.dir / "m.gguf")
        ours = self.dir / "ours"
        ours.write_text(OURS.format(python=sys.executable))
        ours.chmod(0o755)

    def tearDown(self):
        self.place.cleanup()

    def environment(self, gpu):
        env = self.dir / f"env-{gpu}"
        module = env / "modules/llama_cpp"
        (module / "lib").mkdir(parents=True)
        (module / "__init__.py").write_text(FAKE.format(here=str(HERE), gpu=gpu))
        if shutil.which("gcc"):
            source = env / "base.c"
            source.write_text("void *ggml_backend_cpu_buffer_type(void) { return (void *)4711; }\n")
            subprocess.run(["gcc", "-shared", "-fPIC", source, "-o", module / "lib/libggml-base.so"], check=True)
        (env / "bin").mkdir()
        python = env / "bin/python"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={env}/modules exec {sys.executable} "$@"\n')
        python.chmod(0o755)
        return env

    def run_it(self, env, *more):
        command = [sys.executable, str(HERE), str(self.dir / "m.gguf"), "--out", str(self.dir / "out"), "--env", str(env), "--bin", str(self.dir / "ours"),
                   "--rounds", "2", "--pause", "0", "-p", "8", "-n", "4", "-t", "1", *more]
        return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})

    def rows(self):
        with open(self.dir / "out/raw.csv", newline="") as file:
            return list(csv.reader(file))[1:]

    def test_sides_take_turns_and_every_measurement_is_written_down(self):
        done = self.run_it(self.environment(False))
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = self.rows()
        self.assertEqual([(r[2], r[3], r[4]) for r in rows], [(str(n), side, test) for n in (1, 2) for side in ("dynamicinfer", "llama.cpp") for test in ("pp", "tg")])
        self.assertIn("| decode, 4 tokens one by one | 5.00 (5.00 to 5.00) | llama.cpp |", (self.dir / "out/summary.md").read_text())

    @unittest.skipUnless(shutil.which("gcc"), "the made-up llama.cpp has a library of its own")
    def test_with_a_budget_llama_cpp_uses_as_much_of_it_as_fits(self):
        done = self.run_it(self.environment(True), "--vram", "12MiB", "1MiB")
        self.assertEqual(done.returncode, 0, done.stderr)
        page = (self.dir / "out/summary.md").read_text()
        # A layer: 2 MiB and 256 KiB of keys and values; head 50 KiB, buffers 3 MiB. Of 12 MiB head and 3 layers fit; all without FFNs are
        # 6.1 MiB and 3 of buffers, so one FFN of 1.5 MiB goes there.
        self.assertIn("-ngl 4 of 9 takes", page)
        self.assertIn("7 of 8 FFNs on the CPU take", page)
        self.assertIn("not even -ngl 1 fits; without any FFN the rest does not fit", page)
        sides = {row[3] for row in self.rows()}
        self.assertEqual(sides, {"dynamicinfer --vram 12582912", "llama.cpp -ngl 4", "llama.cpp, 7 FFNs on the CPU", "dynamicinfer --vram 1048576"})

    def test_a_llama_cpp_that_knows_no_card_is_told_in_a_sentence(self):
        done = self.run_it(self.environment(False), "--vram", "12MiB")
        self.assertEqual(done.returncode, 1)
        self.assertIn("built without GPU support", done.stderr)
        self.assertFalse((self.dir / "out").exists())


if __name__ == "__main__":
    unittest.main()
