#!/usr/bin/env python3
"""Whether the simulator foretells what the CPU alone does: calibrates, measures, compares. Standard library only.

    dynamicinfer-lab synth --hidden 1024 --layers 24 --ffn 2816 --heads 8 --kv-heads 8 --active 0.05 -o DIR/small.neurons     and so on
    python3 tools/validate_simulator.py PROGRAM DIR --out runs/DATE-simulator calibrate     two sizes
    python3 tools/validate_simulator.py PROGRAM DIR --out runs/DATE-simulator measure       everything else, in turns, beside what is foretold

The rule, in terms of what `simulate` is given. All matrices of these models have rows of `hidden` numbers, and how fast rows are read
depends on their length; so does what a gap between two neuron blocks costs. Both are taken linearly in log2(hidden) between the two
calibrated sizes.

- of the rounds of a point the fastest counts: whatever else runs on the machine can only slow one down
- rate, for one thread and for two: a dense token's bytes over its time, less `call_us` for each region. What `bench` says that the machine
  reads is left out: it is measured for a few passes, and went up by a seventh between two files while the model's own speed did not change
- gap_ns: what the FFN of a sparse token takes above its bytes at that rate and its region, over the blocks that do not lie behind another;
  with one thread. Sparse tokens of two threads are not used.
- predictor: ns a neuron
- gaps and predictor are divided by the number of threads
"""
import argparse
import json
import math
import subprocess
import tempfile
from pathlib import Path

# layers, hidden, neurons, share that is active
MODELS = {"small": (24, 1024, 2816, 0.05), "wide": (8, 3072, 8192, 0.20), "same": (16, 2048, 5504, 0.10), "mid": (16, 1536, 4096, 0.15),
          "small25": (24, 1024, 2816, 0.25)}
# model, threads, predictor
CALIBRATE = [("small", 1, "dense"), ("wide", 1, "dense"), ("small", 1, "mlp"), ("wide", 1, "mlp"), ("small", 2, "dense"), ("wide", 2, "dense")]
FORETELL = [("same", 1, "dense"), ("same", 1, "mlp"), ("same", 2, "dense"), ("same", 2, "mlp"), ("mid", 1, "dense"), ("mid", 1, "mlp"),
            ("mid", 2, "dense"), ("mid", 2, "mlp"), ("small25", 1, "mlp"), ("small25", 2, "mlp"), ("small", 2, "mlp"), ("wide", 2, "mlp")]
VOCABULARY = 32000
WITHIN = 0.15


def name(point):
    model, threads, predictor = point
    return f"{model}-t{threads}-{predictor}"


def bench(a, point):
    model, threads, predictor = point
    command = [*a.before, a.program, "bench", str(a.models / f"{model}.neurons"), "-p", "0", "-n", str(a.tokens), "-r", "1", "-t", str(threads),
               "--predictor", predictor, "-o", "json"]
    out = subprocess.run(command, capture_output=True, text=True)
    if out.returncode:
        raise SystemExit(f"{' '.join(command)}: {out.stderr[-400:]}")
    row = json.loads(out.stdout[out.stdout.index("["):])[-1]
    print(f"{name(point)}: {row['token_ms_p50']:.2f} ms, p99 {row['token_ms_p99']:.2f}, the machine reads {row['machine_gb_s']:.1f} GB/s", flush=True)
    return row


def rounds(a, points, file):
    """Every point once a round, each round from another point on."""
    path = a.out / file
    rows = json.loads(path.read_text()) if path.exists() else {}
    for r in range(a.rounds):
        for point in points[r % len(points):] + points[:r % len(points)]:
            found = rows.setdefault(name(point), [])
            if len(found) <= r:
                found.append(bench(a, point))
                path.write_text(json.dumps(rows, indent=1) + "\n")
    return rows


def best(runs):
    return min(runs, key=lambda r: r["token_ms_p50"])


def calls(layers, sparse):
    """Regions of a token: three of attention and one of the FFN a layer, one of the predictor if there is one, and the head."""
    return layers * (5 if sparse else 4) + 1


def constants(rows, call_us):
    """From the calibrated runs to the numbers of the rule."""
    def rate(model, threads):
        r = best(rows[name((model, threads, "dense"))])
        return r["bytes_per_token"] / (r["token_ms_p50"] * 1e6 - calls(MODELS[model][0], False) * call_us * 1e3)

    def gap_and_neuron(model):
        layers, hidden, ffn, _ = MODELS[model]
        r = best(rows[name((model, 1, "mlp"))])
        c = r["computed_share"]
        above = r["parts_ms"]["ffn"] * 1e6 - layers * call_us * 1e3 - layers * ffn * c * 6 * hidden / rate(model, 1)
        return above / (layers * ffn * c * (1 - c)), (r["parts_ms"]["predictor"] * 1e6 - layers * call_us * 1e3) / (layers * ffn)

    at = {m: gap_and_neuron(m) for m in ("small", "wide")}
    return {"call_us": call_us, "hidden": [MODELS[m][1] for m in at], "gb_s_1": [rate(m, 1) for m in at], "gb_s_2": [rate(m, 2) for m in at],
            "gap_ns": [g for g, _ in at.values()], "neuron_ns": [n for _, n in at.values()]}


def between(c, key, hidden):
    """Linear in log2(hidden)."""
    (h0, h1), (y0, y1) = c["hidden"], c[key]
    return y0 + (y1 - y0) * math.log2(hidden / h0) / math.log2(h1 / h0)


def foretell(a, c, point):
    """What the simulator says of a point."""
    model, threads, predictor = point
    layers, hidden, ffn, active = MODELS[model]
    sparse = predictor != "dense"
    rate = between(c, f"gb_s_{threads}", hidden)
    sizes = layers * (4 * hidden * hidden + 3 * hidden * ffn) * 2 + VOCABULARY * hidden * 2
    # The predictor is given to the simulator as bytes that are read at that rate.
    predictor_bytes = between(c, "neuron_ns", hidden) / threads * layers * ffn * rate
    profile = (f'name = "rule"\nnote = ""\nmeasured = []\nassumed = ["dram_gb_s", "device_gb_s", "link_gb_s", "call_us", "copy_us", "sync_us"]\ndram_gb_s = {rate}\ndevice_gb_s = 100.0\nlink_gb_s = 10.0\n'
               f"call_us = {c['call_us']}\ncopy_us = 10.0\nsync_us = 10.0\n")
    with tempfile.TemporaryDirectory() as d:
        file = Path(d) / "rule.toml"
        file.write_text(profile)
        command = [f"{a.program}-lab", "simulate", str(a.models / f"{model}.neurons"), "--active", str(active), "--machine", str(file), "--policy", "static",
                   "--position", str(a.tokens // 2), "--json", "--gap-ns", str(max(0, between(c, "gap_ns", hidden) / threads))]
        command += ["--threshold", "0.5", "--predictor-share", str(predictor_bytes / sizes)] if sparse else ["--threshold", "0"]
        out = subprocess.run(command, capture_output=True, text=True)
    if out.returncode:
        raise SystemExit(f"{' '.join(command)}: {out.stderr[-400:]}")
    return json.loads(out.stdout)


def token_ms(found):
    report = found[0] if isinstance(found, list) else found
    outcome = next(r["outcome"] for r in report["rows"] if r.get("outcome"))
    return outcome["token_ms_p50"], outcome["computed_share"]


def table(a, c, rows):
    lines = ["| model, threads, predictor | foretold, ms | measured, ms (rounds) | foretold is | computed: trace, model |", "|---|---|---|---|---|"]
    within = 0
    for point in FORETELL:
        runs = rows[name(point)]
        ms, computed = token_ms(foretell(a, c, point))
        measured = best(runs)
        off = ms / measured["token_ms_p50"] - 1
        within += abs(off) <= WITHIN
        mark = "**" if abs(off) > WITHIN else ""
        each = ", ".join(f"{r['token_ms_p50']:.2f}" for r in runs)
        lines.append(f"| {point[0]}, {point[1]}, {point[2]} | {ms:.2f} | {measured['token_ms_p50']:.2f} ({each}) | {mark}{100 * off:+.1f} %{mark} | "
                     f"{100 * computed:.1f}, {100 * (measured.get('computed_share') or 1):.1f} % |")
    lines += ["", f"{within} of {len(FORETELL)} within {100 * WITHIN:.0f} %."]
    return "\n".join(lines)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("program")
    p.add_argument("models", type=Path)
    p.add_argument("what", choices=["calibrate", "measure", "table"])
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--tokens", type=int, default=64)
    p.add_argument("--call-us", type=float, default=5.0, help="of `measure`: what a region costs")
    p.add_argument("--before", type=str.split, default=[], help="what each measurement is run by, as `nice -n -5`")
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    if a.what == "calibrate":
        c = constants(rounds(a, CALIBRATE, "calibration.json"), a.call_us)
        (a.out / "rule.json").write_text(json.dumps(c, indent=1) + "\n")
        return print(json.dumps(c, indent=1))
    c = json.loads((a.out / "rule.json").read_text())
    rows = rounds(a, FORETELL, "measured.json") if a.what == "measure" else json.loads((a.out / "measured.json").read_text())
    text = table(a, c, rows)
    (a.out / "summary.md").write_text("# Foretold by the rule, and measured\n\n" + text + "\n")
    print(text)


if __name__ == "__main__":
    main()
