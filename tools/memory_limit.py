#!/usr/bin/env python3
"""Decode speed of a model that is larger than the memory it may use: ours with --ram, our mapped store, and llama.cpp.

    cargo build --release
    python3 tools/memory_limit.py MODEL.neurons --gguf MODEL.gguf --python LLAMA_PYTHON --out runs/...

Each measurement is a process of its own in a control group (version 1 or 2, made here, which needs root) whose limit is what the model
takes beside its FFNs and a share of the FFNs. The system's cache is dropped before each; the sides take turns. Written down are tokens/s,
the bytes that the disk has read by /proc/diskstats (loading included, so also per token by what the program counts itself), and the
group's peak. Token ids come from fixed seeds and none is fed back: speed does not hang on what is said. Read the ratios.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORKING = 64 << 20


class Group:
    """A control group with a limit on memory."""

    def __init__(self, name):
        v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
        self.old = (v1 / "memory.limit_in_bytes").exists()
        self.dir = (v1 if self.old else v2) / name
        self.dir.mkdir(exist_ok=True)

    def limit(self, size):
        names = ["memory.limit_in_bytes"] if self.old else ["memory.max"]
        for name in names:
            (self.dir / name).write_text(str(size))
        reset = self.dir / ("memory.max_usage_in_bytes" if self.old else "memory.peak")
        try:
            reset.write_text("0")
        except OSError:
            pass

    def enter(self):
        (self.dir / "cgroup.procs").write_text(str(os.getpid()))

    def peak(self):
        file = self.dir / ("memory.max_usage_in_bytes" if self.old else "memory.peak")
        return int(file.read_text()) if file.exists() else 0


def read_from_disk():
    """Bytes that all disks have read so far; partitions and loops are not counted."""
    total = 0
    for line in Path("/proc/diskstats").read_text().splitlines():
        fields = line.split()
        if Path("/sys/block", fields[2]).exists() and not fields[2].startswith(("loop", "ram", "zram", "dm-")):
            total += int(fields[5]) * 512
    return total


def run(group, limit, command, given=""):
    subprocess.run(["sync"], check=True)
    Path("/proc/sys/vm/drop_caches").write_text("3")
    group.limit(limit)
    before, begin = read_from_disk(), time.monotonic()
    r = subprocess.run(command, input=given, capture_output=True, text=True, preexec_fn=group.enter)
    row = {"seconds": time.monotonic() - begin, "disk_bytes": read_from_disk() - before, "peak": group.peak(), "rc": r.returncode}
    if r.returncode != 0:
        row["error"] = r.stderr.strip()[-300:]
        return row, None
    return row, r.stdout


def ours(a, group, limit, tokens, more):
    command = [a.bin, "bench", a.store, "-p", "0", "-n", str(tokens), "-r", "1", "-t", str(a.threads), "-o", "json", *more]
    row, out = run(group, limit, command)
    if out:
        got = json.loads(out[out.index("["):])[0]
        row |= {"tokens_s": got["avg_ts"], "p50_ms": got["token_ms_p50"], "p99_ms": got["token_ms_p99"], "recall": got["recall"],
                "computed": got["computed_share"], "parts_ms": got["parts_ms"], **{"disk": got.get("disk")}}
    return row


def llama(a, group, limit, tokens):
    what = {"model": a.gguf, "threads": a.threads, "n_prompt": 0, "n_gen": tokens, "ngl": 0, "cpu_ffn": 0, "probe": False, "repack": False}
    row, out = run(group, limit, [a.python, str(HERE / "compare/llama.py")], json.dumps(what))
    if out:
        got = json.loads(out.strip().splitlines()[-1])
        row |= {"tokens_s": got["tg"], "bytes_per_token": row["disk_bytes"] / tokens}
    return row


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("store")
    p.add_argument("--gguf")
    p.add_argument("--python", default=sys.executable)
    p.add_argument("--bin", default="target/release/dynamicinfer")
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--shares", default="100,75,50,25,5", help="percent of the FFNs that the limit has room for")
    p.add_argument("--ffn-bytes", type=int, required=True, help="bytes of all neuron blocks")
    p.add_argument("--keys", type=int, default=64 << 20, help="bytes of keys, values and predictors")
    p.add_argument("--sides", default="ours,mapped,llama")
    p.add_argument("--ours", action="append", default=[], help="NAME=ARGS: further ways to run ours")
    p.add_argument("--tokens", type=int, default=128)
    p.add_argument("--slow-tokens", type=int, default=6, help="tokens of llama.cpp and of the mapped store")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--out", required=True)
    a = p.parse_args()
    group = Group("dynamicinfer-limit")
    resident = os.path.getsize(a.store) - a.ffn_bytes + a.keys + WORKING
    ways = {name: args.split() for name, args in (way.split("=", 1) for way in a.ours)}
    rows = []
    for share in map(float, a.shares.split(",")):
        limit = int(resident + share / 100 * a.ffn_bytes) // 4096 * 4096
        # A fifth is not left to others: the group's limit is what --ram says, and the program stays below it.
        ram = ["--ram", str(limit)]
        sides = {
            "ours": lambda: ours(a, group, limit, a.tokens, ram),
            "mapped": lambda: ours(a, group, limit, a.slow_tokens, ["--ram", "1TiB"]),
            "llama": lambda: llama(a, group, limit, a.slow_tokens),
            **{name: (lambda more=more: ours(a, group, limit, a.tokens, [*ram, *more])) for name, more in ways.items()},
        }
        for round_ in range(a.rounds):
            for side in [*filter(None, a.sides.split(",")), *ways]:
                row = {"share": share, "limit": limit, "side": side, "round": round_, **sides[side]()}
                rows.append(row)
                print(json.dumps(row), flush=True)
                Path(a.out).mkdir(parents=True, exist_ok=True)
                Path(a.out, "rows.json").write_text(json.dumps(rows, indent=1))
    for share in sorted({row["share"] for row in rows}, reverse=True):
        for side in dict.fromkeys(row["side"] for row in rows):
            speeds = [row["tokens_s"] for row in rows if row["share"] == share and row["side"] == side and "tokens_s" in row]
            if speeds:
                print(f"{share:5.0f} % {side:12} {statistics.median(speeds):8.2f} tokens/s of {len(speeds)}")


if __name__ == "__main__":
    main()
