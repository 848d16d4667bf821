#!/usr/bin/env python3
"""What serving does for half an hour with a limit on memory: time between tokens and memory, minute by minute.

    cargo build --release
    python3 tools/steady.py MODEL.neurons --limit 1500MiB --out runs/... -- --ram 1300MiB -c 512 --parallel 1

Starts `serve` in a control group of its own (version 1 or 2, which needs root) whose limit it is, with the arguments behind `--`. One client asks for
one answer after the other, each with another prompt of random words and no end before its length. Each minute is a row of `minutes.csv`: tokens,
time between tokens of an answer (p50, p90, p99, in ms), memory of its own that the daemon has (RssAnon), and the group's peak, both in MiB; they
are printed, too. Ends with 1 if the daemon dies, an answer is none, the group's peak is above the limit, or memory of its own has grown by more than
1 % after the first sixth of the time, by when the longest prompt has come. Python's standard library only.
"""
import argparse
import csv
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from memory_limit import Group

WORDS = "the king of small houses went under a long river and said that nobody had seen her green boat since winter came to town".split()


def size(text):
    number, unit = re.fullmatch(r"(\d+)(MiB|GiB)", text).groups()
    return int(number) << (20 if unit == "MiB" else 30)


def answer(path, seed, tokens):
    """Times at which the tokens of one answer came, in seconds."""
    prng = random.Random(seed)
    prompt = " ".join(prng.choices(WORDS, k=prng.randint(4, 120)))
    body = json.dumps({"prompt": prompt, "seed": seed, "temperature": 1, "max_tokens": tokens, "ignore_eos": True, "stream": True})
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(str(path))
        s.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        with s.makefile("rb") as lines:
            return [time.monotonic() for line in lines if line.startswith(b"data: {")]


def own_memory(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) / 1024


def of(values, share):
    return 1e3 * sorted(values)[min(int(share * len(values)), len(values) - 1)]


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("model")
    p.add_argument("--limit", type=size, required=True, help="of the control group, like 1500MiB")
    p.add_argument("--seconds", type=float, default=1800)
    p.add_argument("--tokens", type=int, default=200, help="of an answer")
    p.add_argument("--bin", default="target/release/dynamicinfer")
    p.add_argument("--out", type=Path, required=True)
    p.epilog = "What stands behind -- are arguments of serve."
    here, _, for_serve = "\0".join(sys.argv[1:]).partition("\0--\0")
    a = p.parse_args(here.split("\0"))
    a.out.mkdir(parents=True, exist_ok=True)
    group = Group("dynamicinfer-steady")
    group.limit(a.limit)
    path = Path(tempfile.mkdtemp()) / "d.sock"
    command = [a.bin, "serve", a.model, "--socket", str(path), *filter(None, for_serve.split("\0"))]
    daemon = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=group.enter)
    said = []
    for line in daemon.stderr:
        said.append(line)
        if "is ready" in line:
            break
    else:
        sys.exit("the daemon did not start:\n" + "".join(said))
    threading.Thread(target=daemon.stderr.read, daemon=True).start()
    begin, seed, rows, all_gaps, empty = time.monotonic(), 0, [], [], 0
    try:
        with open(a.out / "minutes.csv", "w") as file:
            table = csv.writer(file)
            table.writerow(["minute", "tokens", "p50_ms", "p90_ms", "p99_ms", "own_mib", "peak_mib"])
            while time.monotonic() < begin + a.seconds and daemon.poll() is None:
                gaps, end = [], begin + 60 * (len(rows) + 1)
                while time.monotonic() < min(end, begin + a.seconds) and daemon.poll() is None:
                    times = answer(path, seed, a.tokens)
                    seed += 1
                    empty += not times
                    gaps += [later - earlier for earlier, later in zip(times, times[1:])]
                if not gaps or daemon.poll() is not None:
                    break
                times = [round(of(gaps, share), 2) for share in (0.5, 0.9, 0.99)]
                rows.append([len(rows) + 1, len(gaps), *times, round(own_memory(daemon.pid), 1), round(group.peak() / 2**20, 1)])
                all_gaps += gaps
                table.writerow(rows[-1])
                file.flush()
                print(*rows[-1], flush=True)
        lives = daemon.poll() is None
    finally:
        daemon.kill()
        daemon.wait()
    if len(rows) < 3:
        sys.exit("it takes three minutes at least, and the daemon has to live so long")
    grown, peak = rows[-1][5] / rows[len(rows) // 6][5] - 1, group.peak()
    print(f"{len(all_gaps)} tokens of {seed} answers, {empty} of them without any; between tokens p50 {of(all_gaps, 0.5):.2f}, p90 {of(all_gaps, 0.9):.2f}, "
          f"p99 {of(all_gaps, 0.99):.2f} ms; memory of its own {100 * grown:+.2f} % after the first sixth; peak {peak / 2**20:.0f} of {a.limit / 2**20:.0f} MiB; "
          f"lives: {lives}")
    sys.exit(not lives or empty > 0 or peak > a.limit or grown > 0.01)


if __name__ == "__main__":
    main()
