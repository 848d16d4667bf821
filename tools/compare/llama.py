"""One measurement of llama.cpp, in a process of its own: reads a JSON object from stdin, prints one. Runs in the environment.

{model, threads, n_prompt, n_gen, ngl, cpu_ffn, probe}: ngl layers on the card, with the FFNs of the first cpu_ffn layers on the CPU all
the same; probe only makes the context, to see what it takes.
"""
import ctypes
import json
import os
import sys
import time
from pathlib import Path

import offload


def measure(a):
    import llama_cpp as L

    said, errors = [], []

    def hear(level, text, _):
        said.append(text)
        if level >= 4:
            errors.append(text)

    log = L.llama_log_callback(hear)
    L.llama_log_set(log, ctypes.c_void_p(0))  # `log` must stay referenced while llama.cpp lives
    L.llama_backend_init()
    mp = L.llama_model_default_params()
    mp.n_gpu_layers = a["ngl"]
    mp.use_extra_bufts = a["repack"]
    if hasattr(mp, "load_mode"):
        mp.load_mode, mp.lazy_mode = L.LLAMA_LOAD_MODE_MMAP, L.LLAMA_LAZY_MODE_OFF
    else:
        mp.use_mmap, mp.use_mlock = True, False
    kept = override(L, mp, a["cpu_ffn"])
    start = time.perf_counter()
    m = L.llama_model_load_from_file(os.fsencode(a["model"]), mp)
    if not m:
        sys.exit("llama.cpp cannot load the model: " + b"".join(errors).decode(errors="replace").strip())
    loaded = time.perf_counter() - start
    cp = L.llama_context_default_params()
    cp.n_ctx = max(256, a["n_prompt"] + a["n_gen"])
    cp.n_batch, cp.n_ubatch = max(2048, a["n_prompt"]), 512
    cp.n_threads = cp.n_threads_batch = a["threads"]
    if not a["ngl"]:
        cp.offload_kqv = cp.op_offload = False
    c = L.llama_init_from_model(m, cp)
    if not c:
        sys.exit("llama.cpp cannot make a context: " + b"".join(errors).decode(errors="replace").strip())
    out = {"load_s": loaded, "model_size": L.llama_model_size(m), "n_threads": a["threads"], "version": L.__version__,
           "commit": ggml_commit(L), "gpu": bool(L.llama_supports_gpu_offload()),
           "card_bytes": offload.card_bytes(b"".join(said).decode(errors="replace")), "overrides": len(kept)}
    if not a["probe"]:
        speeds(L, m, c, a, out)
    print(json.dumps(out))


def override(L, mp, layers):
    """Keeps FFN tensors in main memory. What is returned must live as long as the parameters."""
    if not layers:
        return []
    base = library(L, "ggml-base", "ggml-cpu", "ggml")
    base.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p

    class Override(ctypes.Structure):
        _fields_ = [("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p)]

    kept = (Override * 2)(Override(offload.override(layers).encode(), base.ggml_backend_cpu_buffer_type()), Override(None, None))
    field = dict(mp._fields_)["tensor_buft_overrides"]
    mp.tensor_buft_overrides = ctypes.cast(kept, field)
    return kept


def library(L, *names):
    for name in names:
        try:
            lib = ctypes.CDLL(str(Path(L.__file__).parent / "lib" / f"lib{name}.so"))
            lib.ggml_backend_cpu_buffer_type
            return lib
        except (OSError, AttributeError):
            continue
    sys.exit("this llama.cpp has no ggml_backend_cpu_buffer_type; its FFNs cannot be kept on the CPU")


def speeds(L, m, c, a, out):
    n_vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(m))
    memory = L.llama_get_memory(c)
    n_prompt, n_gen = a["n_prompt"], a["n_gen"]

    def decode(tokens):
        buf = (L.llama_token * len(tokens))(*tokens)
        if L.llama_decode(c, L.llama_batch_get_one(buf, len(tokens))) != 0:
            sys.exit("llama_decode failed")
        L.llama_synchronize(c)

    # Fixed pseudo-random tokens: speed does not depend on them in a dense engine.
    tokens = [(i * 7919 + 17) % n_vocab for i in range(max(n_prompt, n_gen, 2))]

    def timed(work, count):
        L.llama_memory_clear(memory, True)
        begin = time.perf_counter()
        work()
        return count / (time.perf_counter() - begin)

    def prefill():
        decode(tokens[:n_prompt])

    def generate():
        for t in tokens[:n_gen]:
            decode([t])

    if n_prompt:
        timed(prefill, n_prompt)  # warm-up: faults every page in, starts the threads
        out["pp"] = timed(prefill, n_prompt)
    if n_gen:
        timed(lambda: (decode(tokens[:1]), decode(tokens[1:2])), 2)
        out["tg"] = timed(generate, n_gen)


def ggml_commit(L):
    try:
        lib = ctypes.CDLL(str(Path(L.__file__).parent / "lib" / "libggml-base.so"))
        lib.ggml_commit.restype = ctypes.c_char_p
        return lib.ggml_commit().decode()
    except (OSError, AttributeError):
        return "unknown"


if __name__ == "__main__":
    measure(json.load(sys.stdin))
