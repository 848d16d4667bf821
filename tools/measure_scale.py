#!/usr/bin/env python3
"""What clients of a daemon see as there are more of them, over HTTP, prompts included. Standard library only.

    cargo build --release && python3 tools/measure_scale.py target/release/dynamicinfer MODEL --out scale.json

So many processes at once ask again and again for a while. Medians over rounds; numbers of clients take turns. What contexts and
sequences cost without HTTP and prompts: `dynamicinfer bench --n-depth 0,1024,4096 --sequences 1,4`.
"""
import argparse
import http.client
import json
import multiprocessing
import os
import socket
import statistics
import subprocess
import tempfile
import time
from pathlib import Path


class Daemon:
    def __init__(self, program, model, *options):
        self.path = os.path.join(tempfile.mkdtemp(), "d.sock")
        command = [program, "serve", model, "--socket", self.path, *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if "is ready" in line:
                return
        raise SystemExit(f"{' '.join(command)} ended with {self.process.wait()}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


def ask(path, tokens, generate):
    """Times at which tokens came, s, from the moment of asking."""
    c = http.client.HTTPConnection("localhost", timeout=600)
    c.sock = socket.socket(socket.AF_UNIX)
    c.sock.connect(path)
    start = time.monotonic()
    body = {"prompt": tokens, "max_tokens": generate, "ignore_eos": True, "temperature": 0, "stream": True}
    c.request("POST", "/v1/completions", json.dumps(body))
    response = c.getresponse()
    if response.status != 200:
        raise SystemExit(f"{response.status}: {response.read()[:300]}")
    times = []
    while line := response.readline():
        # The last chunk has no text and says how it ended.
        if line.startswith(b"data: {") and b'"finish_reason":null' in line:
            times.append(time.monotonic() - start)
    c.close()
    return times


def prompt(count, seed, vocab):
    """Another one each time, so that no keys of an earlier one are found."""
    return [(i * 7919 + seed * 104729 + 17) % (vocab - 300) + 290 for i in range(count)]


def client(path, end, seed, a, answers):
    """Asks until the time is over. Says of each answer when its tokens came, counted back from the end."""
    while (asked := time.monotonic()) < end:
        seed += 1000
        answers.put((end - asked, [end - asked - t for t in ask(path, prompt(a.client_prompt, seed, a.vocab), a.client_generate)]))
    answers.put(None)


def clients(daemon, a, seeds):
    rows = {n: {"first": [], "gaps": [], "tokens_per_s": []} for n in a.clients}
    for _ in range(a.rounds):
        for n in a.clients:
            answers, found = multiprocessing.Queue(), []
            begin = time.monotonic()
            each = [multiprocessing.Process(target=client, args=(daemon.path, begin + a.seconds, next(seeds), a, answers)) for _ in range(n)]
            [p.start() for p in each]
            left = n
            while left:
                got = answers.get()
                left -= got is None
                found += [got] if got else []
            [p.join() for p in each]
            rows[n]["first"] += [1e3 * (asked - left[0]) for asked, left in found]
            rows[n]["gaps"] += [1e3 * (one - next) for _, left in found for one, next in zip(left, left[1:]) if next >= 0]
            rows[n]["tokens_per_s"].append(sum(t >= 0 for _, left in found for t in left) / a.seconds)
    of = lambda values, share: sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else None
    return [{"clients": n, "tokens_per_s": statistics.median(r["tokens_per_s"]), "tokens_per_s_rounds": r["tokens_per_s"],
             "answers": len(r["first"]), "first_token_ms_p50": of(r["first"], 0.5), "first_token_ms_p99": of(r["first"], 0.99),
             "token_ms_p50": of(r["gaps"], 0.5), "token_ms_p99": of(r["gaps"], 0.99)} for n, r in rows.items()]


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("program")
    p.add_argument("model")
    p.add_argument("--out", type=Path, help="file for the figures, JSON")
    p.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    p.add_argument("--client-prompt", type=int, default=32)
    p.add_argument("--client-generate", type=int, default=64)
    p.add_argument("--seconds", type=float, default=15, help="of each number of clients")
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--vocab", type=int, default=32000)
    p.add_argument("--options", type=str.split, default=[], metavar="'ARGS'", help="more for serve, in one string")
    a = p.parse_args()
    seeds = iter(range(1, 1 << 30))
    context = a.client_prompt + a.client_generate + 16
    with Daemon(a.program, a.model, "--parallel", str(max(a.clients)), "-c", str(context), *a.options) as daemon:
        ask(daemon.path, prompt(16, 0, a.vocab), 16)
        found = {"model": Path(a.model).name, "options": a.options, "rounds": a.rounds, "clients": clients(daemon, a, seeds)}
    for row in found["clients"]:
        print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if not isinstance(v, list)), flush=True)
    if a.out:
        a.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
