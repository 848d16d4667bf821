#!/usr/bin/env python3
"""Compare the speed of dynamicinfer and llama.cpp on the same GGUF file, on the CPU, side by side.

llama.cpp comes from PyPI, compiled for this very machine (takes about 15 minutes on two cores):

    python3 -m venv llama
    CMAKE_BUILD_PARALLEL_LEVEL=1 llama/bin/pip install --no-binary llama-cpp-python llama-cpp-python
    cargo build --release
    llama/bin/python tools/compare_llama_cpp.py MODEL.gguf --out runs/compare

It is driven through its C interface: no sampling, no tokenising, default flash attention, f16 KV cache,
weights mapped (not locked) and touched before the clock starts: what llama-bench does. Each
measurement is a process of its own, never two at once; ours and theirs alternate, round by round, so
that a slow change of the machine hits both. Read the ratio, not the absolute numbers.

Needs: Python 3.9+, llama-cpp-python, numpy (comes with it).
"""
import argparse
import csv
import ctypes
import fcntl
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


# ------------------------------------------------------------------ the llama.cpp side, one process
def child(model, threads, n_prompt, n_gen):
    """Measure in this process and print one JSON object."""
    import llama_cpp as L

    errors = []
    log = L.llama_log_callback(lambda level, text, _: errors.append(text) if level >= 4 else None)
    L.llama_log_set(log, ctypes.c_void_p(0))  # `log` must stay referenced while llama.cpp lives
    L.llama_backend_init()
    mp = L.llama_model_default_params()
    mp.n_gpu_layers = 0
    if hasattr(mp, "load_mode"):
        mp.load_mode, mp.lazy_mode = L.LLAMA_LOAD_MODE_MMAP, L.LLAMA_LAZY_MODE_OFF
    else:
        mp.use_mmap, mp.use_mlock = True, False
    start = time.perf_counter()
    m = L.llama_model_load_from_file(os.fsencode(model), mp)
    if not m:
        sys.exit("llama.cpp cannot load the model: " + b"".join(errors).decode(errors="replace").strip())
    loaded = time.perf_counter() - start
    cp = L.llama_context_default_params()
    cp.n_ctx = max(256, n_prompt + n_gen)
    cp.n_batch, cp.n_ubatch = max(2048, n_prompt), 512
    cp.n_threads = cp.n_threads_batch = threads
    cp.offload_kqv = cp.op_offload = False
    c = L.llama_init_from_model(m, cp)
    if not c:
        sys.exit("llama.cpp cannot make a context")
    n_vocab = L.llama_vocab_n_tokens(L.llama_model_get_vocab(m))
    memory = L.llama_get_memory(c)

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

    out = {"load_s": loaded, "model_size": L.llama_model_size(m), "n_threads": threads,
           "version": L.__version__, "commit": ggml_commit(L)}
    if n_prompt:
        timed(prefill, n_prompt)  # warm-up: faults every page in, starts the threads
        out["pp"] = timed(prefill, n_prompt)
    if n_gen:
        timed(lambda: (decode(tokens[:1]), decode(tokens[1:2])), 2)
        out["tg"] = timed(generate, n_gen)
    print(json.dumps(out))


def ggml_commit(L):
    try:
        lib = ctypes.CDLL(str(Path(L.__file__).parent / "lib" / "libggml-base.so"))
        lib.ggml_commit.restype = ctypes.c_char_p
        return lib.ggml_commit().decode()
    except (OSError, AttributeError):
        return "unknown"


# ------------------------------------------------------------------ one measurement of either side
def run(cmd):
    r = subprocess.run(cmd, capture_output=True, text=True)
    if r.returncode != 0:
        sys.exit(f"{' '.join(map(str, cmd))}\nended with {r.returncode}: {r.stderr.strip()[-800:]}")
    return r.stdout


def measure_llama(a, model):
    out = run([sys.executable, __file__, "--child", str(a.llama_model or model), "-t", str(a.threads),
               "-p", str(a.n_prompt), "-n", str(a.n_gen)])
    return json.loads(out.strip().splitlines()[-1])


def measure_ours(a, model):
    """`bench -o json` prints a list of rows as llama-bench does: one for the prompt, one for generation."""
    out = run([str(a.bin), "bench", str(model), "-p", str(a.n_prompt), "-n", str(a.n_gen),
               "-t", str(a.threads), "-r", "1", "-o", "json", *a.ours_args])
    rows = json.loads(out[out.index("["):])
    got = {}
    for row in rows:
        prompt, gen = int(row.get("n_prompt", 0)), int(row.get("n_gen", 0))
        speed = float(row["avg_ts"] if "avg_ts" in row else statistics.mean(row["samples_ts"]))
        if prompt and not gen:
            got["pp"] = speed
        elif gen and not prompt:
            got["tg"] = speed
            parts = row.get("parts_ms") or {}
            got["sparse"] = {k: row.get(k) for k in ("predictor", "computed_share", "active_share", "recall",
                                                     "precision", "share_of_machine", "bytes_per_token")}
            got["sparse"]["predictor_time_share"] = parts.get("predictor", 0) / max(sum(parts.values()), 1e-9)
        got["version"] = row.get("build_commit", got.get("version", ""))
        if int(row.get("n_threads", a.threads)) != a.threads:
            sys.exit(f"our bench ran with {row['n_threads']} threads, not {a.threads}")
    return got


def machine_cpu():
    """CPU seconds which the whole machine has spent so far, and those of our finished children and us."""
    f = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    t = [int(x) / os.sysconf("SC_CLK_TCK") for x in f]  # user nice system idle iowait irq softirq steal
    own = sum(os.times()[:4])
    return sum(t) - t[3] - t[4], own


def wait_quiet(limit):
    """Until other processes take less than a tenth of the machine for two seconds, at most `limit` seconds."""
    end = time.time() + limit
    while time.time() < end:
        before = machine_cpu()[0]
        time.sleep(2)
        if (machine_cpu()[0] - before) / (2 * os.cpu_count()) < 0.1:
            return


class Busy:
    """One endless arithmetic loop per core, at our own priority: the machine of somebody who also uses it."""

    def __init__(self, count):
        self.count, self.procs = count, []

    def __enter__(self):
        loop = "x = 1.0\nwhile True:\n    x = x * 1.0000001 + 1e-9"
        self.procs = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(self.count)]
        if self.procs:
            time.sleep(0.5)  # let them start before the measured process does

    def __exit__(self, *_):
        for p in self.procs:
            p.kill()
        for p in self.procs:
            p.wait()


# ------------------------------------------------------------------ report
TESTS = {"pp": "prefill, {n_prompt} tokens in one batch", "tg": "decode, {n_gen} tokens one by one"}


def cpu_name():
    try:
        return re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text()).group(1).strip()
    except (OSError, AttributeError):
        return platform.machine()


def table(samples, a):
    """samples: {side: {test: [tokens/s per round]}} -> Markdown lines."""
    lines = ["| test | dynamicinfer, tok/s | llama.cpp, tok/s | ratio of medians | ratio per round |", "|---|---|---|---|---|"]
    show = lambda v: f"{statistics.median(v):.2f} ({min(v):.2f} to {max(v):.2f})" if v else "-"
    for test, text in TESTS.items():
        ours, theirs = samples["ours"].get(test, []), samples["llama.cpp"].get(test, [])
        if not ours and not theirs:
            continue
        ratio = spread = "-"
        if ours and theirs:
            ratio = f"**{statistics.median(ours) / statistics.median(theirs):.3f}**"
            per = sorted(o / t for o, t in zip(ours, theirs))
            spread = f"{per[0]:.3f} to {per[-1]:.3f}"
        lines.append(f"| {text.format(n_prompt=a.n_prompt, n_gen=a.n_gen)} | {show(ours)} | {show(theirs)} | {ratio} | {spread} |")
    return lines


def compare(a, model, writer):
    sides = [("ours", measure_ours), ("llama.cpp", measure_llama)]
    if a.only:
        sides = [s for s in sides if s[0] == a.only]
    samples, facts, strangers = {"ours": {}, "llama.cpp": {}}, {}, []
    for f in {model, a.llama_model or model}:
        if Path(f).is_file():
            with open(f, "rb") as h:  # into the page cache, so that the first round pays for no disk
                while h.read(1 << 24):
                    pass
    for r in range(1, a.rounds + 1):
        for side, measure in sides:
            wait_quiet(a.wait_quiet)
            before, begin = machine_cpu(), time.perf_counter()
            with Busy(len(os.sched_getaffinity(0)) if a.busy else 0):
                got = measure(a, model)
            after, span = machine_cpu(), time.perf_counter() - begin
            # What neither we nor our children spent, as a share of all cores: strangers on the machine.
            # llama.cpp's threads spin while they wait for each other, so it suffers most from them.
            others = max(0.0, (after[0] - before[0]) - (after[1] - before[1])) / (span * os.cpu_count())
            strangers.append(others)
            fact = facts.setdefault(side, {"sparse": []})
            fact.update({k: v for k, v in got.items() if k not in TESTS and k != "sparse"})
            fact["sparse"] += [got["sparse"]] if "sparse" in got else []
            for test in TESTS:
                if test in got:
                    samples[side].setdefault(test, []).append(got[test])
                    writer.writerow([model.name, r, side, test, f"{got[test]:.4f}", a.threads, int(a.busy), f"{others:.3f}"])
            line = ", ".join(f"{t} {got[t]:.2f}" for t in TESTS if t in got)
            print(f"{model.name} round {r}/{a.rounds} {side}: {line} tok/s (other processes {others:.0%} of the CPU)", flush=True)
            time.sleep(a.pause)
    return samples, facts, strangers


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                epilog="example: %(prog)s model.gguf --out runs/compare -t 2 --rounds 7\n"
                                       "         %(prog)s model.gguf --out runs/busy --busy\n"
                                       "         %(prog)s sparse.gguf --llama-model dense.gguf --out runs/x")
    p.add_argument("models", nargs="+", type=Path, metavar="MODEL", help="GGUF file(s), each compared in turn")
    p.add_argument("--out", type=Path, help="folder for raw.csv (every measurement) and summary.md")
    p.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)),
                   help="threads for both sides (default: all cores this process may use)")
    p.add_argument("-p", "--n-prompt", type=int, default=128, help="prefill tokens, 0 = skip (default 128)")
    p.add_argument("-n", "--n-gen", type=int, default=32, help="tokens to decode, 0 = skip (default 32)")
    p.add_argument("--rounds", type=int, default=5, help="how often each side is measured, alternating (default 5)")
    p.add_argument("--busy", action="store_true",
                   help="keep every core busy with an arithmetic loop at the same priority during each "
                        "measurement: how well does an engine share the machine?")
    p.add_argument("--llama-model", type=Path, help="give llama.cpp this file instead, for formats which it cannot read")
    p.add_argument("--bin", type=Path, default=Path(__file__).resolve().parents[1] / "target/release/dynamicinfer",
                   help="our program (default: target/release/dynamicinfer)")
    p.add_argument("--ours-args", type=str.split, default=[], metavar="'ARGS'", help="more arguments for our bench, in one string")
    p.add_argument("--only", choices=["ours", "llama.cpp"], help="measure one side only")
    p.add_argument("--pause", type=float, default=1.0, help="seconds between measurements (default 1)")
    p.add_argument("--wait-quiet", type=float, default=0, metavar="S",
                   help="before each measurement wait, at most S seconds, until other processes are quiet (default 0)")
    p.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.child:
        return child(a.models[0], a.threads, a.n_prompt, a.n_gen)
    if not a.out:
        p.error("--out FOLDER is needed")
    for f in [*a.models, *([a.llama_model] if a.llama_model else [])]:
        if not f.exists():
            p.error(f"no such model: {f}")
    if a.only != "llama.cpp" and not a.bin.exists():
        p.error(f"{a.bin} is missing: run `cargo build --release`, or measure with --only llama.cpp")

    # Two comparisons at once would measure each other.
    lock = open(Path(tempfile.gettempdir()) / "dynamicinfer-compare.lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit("another comparison is running on this machine")

    a.out.mkdir(parents=True, exist_ok=True)
    doc = ["# dynamicinfer and llama.cpp side by side", ""]
    with open(a.out / "raw.csv", "w", newline="") as h:
        w = csv.writer(h)
        w.writerow(["model", "round", "side", "test", "tokens_per_s", "threads", "busy", "others_cpu"])
        for model in a.models:
            samples, facts, strangers = compare(a, model, w)
            h.flush()
            sparse = facts.get("ours", {}).get("sparse", [])
            size = model.stat().st_size if model.is_file() else 0
            doc += [f"## {model.name}" + (f", {size / 2**20:.1f} MiB" if size else ""), ""]
            if a.llama_model:
                doc += [f"llama.cpp read {a.llama_model.name} instead.", ""]
            doc += table(samples, a) + [""]
            if sparse:
                of = lambda key: statistics.median([s[key] for s in sparse if s.get(key) is not None] or [float("nan")])
                doc += [f"Ours with predictor {sparse[0]['predictor']}: computed share {of('computed_share'):.1%}, truly active "
                        f"{of('active_share'):.1%}, recall {of('recall'):.1%}, precision {of('precision'):.1%}; "
                        f"{of('bytes_per_token') / 1e6:.0f} MB read per token at {of('share_of_machine'):.0%} of the machine's "
                        f"read bandwidth; the predictor takes {of('predictor_time_share'):.1%} of a token's time.", ""]
            doc += [f"Meanwhile other processes took {statistics.median(strangers):.0%} of the CPU (median), at most "
                    f"{max(strangers):.0%}." + (" **Repeat this on a quieter machine.**" if statistics.median(strangers) > 0.1 else ""), ""]
    theirs = facts.get("llama.cpp", {})
    doc += [f"Median (lowest to highest) of {a.rounds} rounds, alternating, each in a process of its own; ratio above 1: "
            f"dynamicinfer is faster. {a.threads} threads, {cpu_name()}, {len(os.sched_getaffinity(0))} cores"
            + (", every core also busy with an arithmetic loop" if a.busy else "")
            + f". llama-cpp-python {theirs.get('version', '-')} (llama.cpp {theirs.get('commit', '-')}), "
            f"dynamicinfer {facts.get('ours', {}).get('version') or '-'}. {time.strftime('%Y-%m-%d')}."]
    (a.out / "summary.md").write_text("\n".join(doc) + "\n")
    print("\n".join(doc))


if __name__ == "__main__":
    main()
