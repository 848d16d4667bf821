#!/usr/bin/env python3
"""Compare the speed of dynamicinfer and llama.cpp on the same GGUF file, side by side.

    cargo build --release
    python3 tools/compare MODEL.gguf --out runs/compare                    the CPU alone
    python3 tools/compare MODEL.gguf --out runs/compare --vram 4GiB        with a card, at equal room on it

llama.cpp comes from PyPI, compiled for this very machine, in a scratch environment that is made when it is missing: fifteen to thirty
minutes, once. It is driven through its C interface: no sampling, no tokenising, default flash attention, f16 KV cache, weights mapped
(not locked) and touched before the clock starts: what llama-bench does. Each measurement is a process of its own, never two at once;
the sides take turns, round by round, so that a slow change of the machine hits all. Read the ratio, not the absolute numbers.

With --vram ours runs on the card within that budget, and llama.cpp in its two ways of using one that is too small: the largest -ngl
that fits, and every layer there but for the FFNs of the first N (as --n-cpu-moe does for experts), with the least N that fits. What
fits is what llama.cpp itself says that it asks the card for; the driver's own memory counts on neither side.
"""
import argparse
import csv
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

import environment
import offload

HERE = Path(__file__).resolve().parent


# ------------------------------------------------------------------ one measurement of either side
def run(cmd, **more):
    r = subprocess.run(cmd, capture_output=True, text=True, **more)
    if r.returncode != 0:
        sys.exit(f"{' '.join(map(str, cmd))}\nended with {r.returncode}: {r.stderr.strip()[-800:]}")
    return r.stdout


def measure_llama(a, model, ngl=0, cpu_ffn=0, probe=False):
    what = {"model": str(a.llama_model or model), "threads": a.threads, "n_prompt": a.n_prompt, "n_gen": a.n_gen, "ngl": ngl,
            "cpu_ffn": cpu_ffn, "probe": probe, "repack": not a.no_repack}
    out = run([a.python, str(HERE / "llama.py")], input=json.dumps(what))
    return json.loads(out.strip().splitlines()[-1])


def measure_ours(a, model, *more):
    """`bench -o json` prints a list of rows as llama-bench does: one for the prompt, one for generation."""
    # llama.cpp leaves no neurons out; without a word `bench` measures what `run` would compute.
    dense = [] if any(arg.startswith("--predictor") for arg in [*a.ours_args, *more]) else ["--predictor", "dense"]
    out = run([str(a.bin), "bench", str(model), "-p", str(a.n_prompt), "-n", str(a.n_gen),
               "-t", str(a.threads), "-r", "1", "-o", "json", *dense, *a.ours_args, *more])
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


def size(text):
    """4GiB, 4GB, 512MiB or bytes."""
    m = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMG]i?B)?", text)
    if not m:
        raise argparse.ArgumentTypeError(f"'{text}' is no size; take 4GiB, 512MiB or bytes")
    unit = m[2] or "B"
    return int(float(m[1]) * (1024 if "i" in unit else 1000) ** " KMG".index(unit[0] if unit != "B" else " "))


def cpu_name():
    try:
        return re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text()).group(1).strip()
    except (OSError, AttributeError):
        return platform.machine()


def table(samples, a):
    """samples: {side: {test: [tokens/s per round]}}, ours first -> Markdown lines."""
    lines = ["| test | dynamicinfer, tok/s | beside | tok/s | ratio of medians | ratio per round |", "|---|---|---|---|---|---|"]
    show = lambda v: f"{statistics.median(v):.2f} ({min(v):.2f} to {max(v):.2f})" if v else "-"
    mine, others = next(iter(samples.values())), list(samples.items())[1:]
    for test, text in TESTS.items():
        ours = mine.get(test, [])
        for side, theirs in others:
            theirs = theirs.get(test, [])
            if not ours and not theirs:
                continue
            ratio = spread = "-"
            if ours and theirs:
                ratio = f"**{statistics.median(ours) / statistics.median(theirs):.3f}**"
                per = sorted(o / t for o, t in zip(ours, theirs))
                spread = f"{per[0]:.3f} to {per[-1]:.3f}"
            lines.append(f"| {text.format(n_prompt=a.n_prompt, n_gen=a.n_gen)} | {show(ours)} | {side} | {show(theirs)} | {ratio} | {spread} |")
    return lines


def on_the_card(a, model, budget):
    """llama.cpp's two ways within a budget: {side: what measures it}, and what was chosen, in words."""
    tensors, shape = offload.read_gguf(a.llama_model or model)
    s = offload.sizes(tensors, shape).with_context(max(256, a.n_prompt + a.n_gen))
    layers, mib = len(s.layers), lambda n: f"{n / 2**20:.0f} MiB"
    used = lambda **how: measure_llama(a, model, probe=True, **how)["card_bytes"]
    sides, words = {}, []
    found = offload.settle(lambda b: offload.choose_ngl(s, budget, b), lambda n: offload.bytes_of_ngl(s, n), lambda n: used(ngl=n), budget)
    if found and found[0]:
        n = found[0]
        sides[f"llama.cpp -ngl {n}"] = lambda a, model: measure_llama(a, model, ngl=n)
        words.append(f"-ngl {n} of {layers + 1} takes {mib(found[1])}")
    else:
        words.append("not even -ngl 1 fits")
    found = offload.settle(lambda b: offload.choose_cpu_ffn(s, budget, b), lambda n: offload.bytes_of_cpu_ffn(s, n),
                           lambda n: used(ngl=layers + 1, cpu_ffn=n), budget)
    if found:
        n = found[0]
        sides[f"llama.cpp, {n} FFNs on the CPU"] = lambda a, model: measure_llama(a, model, ngl=layers + 1, cpu_ffn=n)
        words.append(f"{n} of {layers} FFNs on the CPU take {mib(found[1])}")
    else:
        words.append("without any FFN the rest does not fit")
    return sides, f"Room on the card: {mib(budget)}. llama.cpp: {'; '.join(words)}."


def sides_of(a, model, budget):
    """Ours first."""
    if not budget:
        sides = {"dynamicinfer": measure_ours, "llama.cpp": measure_llama}
        return {name: m for name, m in sides.items() if not a.only or name.startswith({"ours": "dyn"}.get(a.only, "llama"))}, ""
    ours = lambda a, model: measure_ours(a, model, "--device", "cuda", "--vram", str(budget))
    sides, words = on_the_card(a, model, budget)
    return {f"dynamicinfer --vram {budget}": ours, **sides}, words


def compare(a, model, budget, sides, writer):
    samples, facts, strangers = {side: {} for side in sides}, {}, []
    for f in {model, a.llama_model or model}:
        if Path(f).is_file():
            with open(f, "rb") as h:  # into the page cache, so that the first round pays for no disk
                while h.read(1 << 24):
                    pass
    for r in range(1, a.rounds + 1):
        for side, measure in sides.items():
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
                    writer.writerow([model.name, budget, r, side, test, f"{got[test]:.4f}", a.threads, int(a.busy), f"{others:.3f}"])
            line = ", ".join(f"{t} {got[t]:.2f}" for t in TESTS if t in got)
            print(f"{model.name} round {r}/{a.rounds} {side}: {line} tok/s (other processes {others:.0%} of the CPU)", flush=True)
            time.sleep(a.pause)
    return samples, facts, strangers


def main():
    p = argparse.ArgumentParser(prog="python3 tools/compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                epilog="example: %(prog)s model.gguf --out runs/compare -t 2 --rounds 7\n"
                                       "         %(prog)s model.gguf --out runs/busy --busy\n"
                                       "         %(prog)s sparse.gguf --llama-model dense.gguf --out runs/x\n"
                                       "         %(prog)s model.gguf --vram 4GiB 8GiB --out runs/card")
    p.add_argument("models", nargs="+", type=Path, metavar="MODEL", help="GGUF file(s), each compared in turn")
    p.add_argument("--out", type=Path, required=True, help="folder for raw.csv (every measurement) and summary.md")
    p.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)),
                   help="threads for both sides (default: all cores this process may use)")
    p.add_argument("-p", "--n-prompt", type=int, default=128, help="prefill tokens, 0 = skip (default 128)")
    p.add_argument("-n", "--n-gen", type=int, default=32, help="tokens to decode, 0 = skip (default 32)")
    p.add_argument("--rounds", type=int, default=5, help="how often each side is measured, alternating (default 5)")
    p.add_argument("--no-repack", action="store_true",
                   help="llama.cpp keeps the weights as they are in the file, without a second copy in the order of its faster kernels")
    p.add_argument("--busy", action="store_true",
                   help="keep every core busy with an arithmetic loop at the same priority during each "
                        "measurement: how well does an engine share the machine?")
    p.add_argument("--llama-model", type=Path, help="give llama.cpp this file instead, for formats which it cannot read")
    p.add_argument("--bin", type=Path, default=HERE.parent.parent / "target/release/dynamicinfer",
                   help="our program (default: target/release/dynamicinfer)")
    p.add_argument("--ours-args", type=str.split, default=[], metavar="'ARGS'", help="more arguments for our bench, in one string")
    p.add_argument("--only", choices=["ours", "llama.cpp"], help="measure one side only")
    p.add_argument("--pause", type=float, default=1.0, help="seconds between measurements (default 1)")
    p.add_argument("--wait-quiet", type=float, default=0, metavar="S",
                   help="before each measurement wait, at most S seconds, until other processes are quiet (default 0)")
    p.add_argument("--vram", type=size, nargs="+", default=[], metavar="SIZE",
                   help="room on the card for both sides, 4GiB or bytes; one table each")
    p.add_argument("--env", type=Path, metavar="DIR",
                   help="environment with llama-cpp-python, made if it is missing (default: this Python if it has it, else "
                        f"{environment.default_dir(False)}, and with --vram {environment.default_dir(True).name} beside it)")
    a = p.parse_args()
    if a.vram and a.only:
        p.error("--vram compares; leave --only out")
    for f in [*a.models, *([a.llama_model] if a.llama_model else [])]:
        if not f.exists():
            p.error(f"no such model: {f}")
    if a.only != "llama.cpp" and not a.bin.exists():
        p.error(f"{a.bin} is missing: run `cargo build --release`, or measure with --only llama.cpp")

    a.python = environment.find(a.env, bool(a.vram)) if a.only != "ours" else None
    if a.vram:
        if not run([a.python, "-c", "import llama_cpp; print(llama_cpp.llama_supports_gpu_offload())"]).strip() == "True":
            sys.exit("this llama.cpp was built without GPU support, so there is no -ngl to compare with; leave --env out, and one with "
                     "CUDA is built where there is nvcc (the CUDA toolkit)")
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
        w.writerow(["model", "vram_bytes", "round", "side", "test", "tokens_per_s", "threads", "busy", "others_cpu"])
        for model, budget in [(m, b) for m in a.models for b in a.vram or [0]]:
            sides, words = sides_of(a, model, budget)
            samples, facts, strangers = compare(a, model, budget, sides, w)
            h.flush()
            sparse = next(iter(facts.values()))["sparse"]
            file_bytes = model.stat().st_size if model.is_file() else 0
            doc += [f"## {model.name}" + (f", {file_bytes / 2**20:.1f} MiB" if file_bytes else ""), ""]
            if a.llama_model:
                doc += [f"llama.cpp read {a.llama_model.name} instead.", ""]
            doc += [words, ""] if words else []
            doc += table(samples, a) + [""]
            if sparse:
                of = lambda key: statistics.median([s[key] for s in sparse if s.get(key) is not None] or [float("nan")])
                doc += [f"Ours with predictor {sparse[0]['predictor']}: computed share {of('computed_share'):.1%}, truly active "
                        f"{of('active_share'):.1%}, recall {of('recall'):.1%}, precision {of('precision'):.1%}; "
                        f"{of('bytes_per_token') / 1e6:.0f} MB read per token at {of('share_of_machine'):.0%} of the machine's "
                        f"read bandwidth; the predictor takes {of('predictor_time_share'):.1%} of a token's time.", ""]
            doc += [f"Meanwhile other processes took {statistics.median(strangers):.0%} of the CPU (median), at most "
                    f"{max(strangers):.0%}." + (" **Repeat this on a quieter machine.**" if statistics.median(strangers) > 0.1 else ""), ""]
    theirs = next((f for side, f in facts.items() if side.startswith("llama")), {})
    ours = next((f for side, f in facts.items() if side.startswith("dyn")), {})
    doc += [f"Median (lowest to highest) of {a.rounds} rounds, alternating, each in a process of its own; ratio above 1: "
            f"dynamicinfer is faster. {a.threads} threads, {cpu_name()}, {len(os.sched_getaffinity(0))} cores"
            + (", every core also busy with an arithmetic loop" if a.busy else "")
            + f". llama-cpp-python {theirs.get('version', '-')} (llama.cpp {theirs.get('commit', '-')}), "
            f"dynamicinfer {ours.get('version') or '-'}. {time.strftime('%Y-%m-%d')}."]
    (a.out / "summary.md").write_text("\n".join(doc) + "\n")
    print("\n".join(doc))


if __name__ == "__main__":
    main()
