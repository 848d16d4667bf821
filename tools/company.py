"""Measures how prompts of others hold up an answer: the times between its tokens, alone and while clients send long prompts.

    python3 tools/company.py target/release/dynamicinfer MODEL [--threads 2] [--clients 4] [--prompt 512] [--tokens 300]
        [--settings serve.slowdown=2 ...] [--rounds 3] [-o company.csv]

Alternates rounds alone and in company. Prints medians and 99th percentiles of the gaps in milliseconds, their ratio to the median alone,
and how many prompt tokens a second were read meanwhile. Prompts are random ids, so that none is known from before; the standard library is enough.
"""

import argparse
import contextlib
import csv
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time


class Unix(http.client.HTTPConnection):
    def __init__(self, path):
        super().__init__("localhost")
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)


@contextlib.contextmanager
def serving(program, model, options, settings=()):
    """A daemon of its own that is ready, by its socket; what it says later goes to standard error."""
    path = tempfile.mkdtemp() + "/d.sock"
    environment = dict(os.environ)
    for setting in settings:
        name, value = setting.split("=", 1)
        environment["DYNAMICINFER_" + name.upper().replace(".", "_")] = value
    command = [os.path.abspath(program), "serve", model, "--socket", path, *options]
    daemon = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    for line in daemon.stderr:
        if "is ready" in line:
            break
    threading.Thread(target=lambda: [print(line, end="", file=sys.stderr) for line in daemon.stderr], daemon=True).start()
    try:
        yield path
    finally:
        daemon.terminate()
        daemon.wait()


def post(path, body):
    connection = Unix(path)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        sys.exit(f"the daemon answered {answer.status}: {answer.read().decode()}")
    return answer


def prompt_tokens(path):
    connection = Unix(path)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("dynamicinfer_prompt_tokens_total"))


def ids(generator, count, vocab):
    return [generator.randrange(10, vocab) for _ in range(count)]


def gaps(path, tokens, prompt):
    """Milliseconds between the tokens of a streamed answer."""
    body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 1.0, "seed": 1, "ignore_eos": True, "logprobs": 0}
    last, times = None, []
    for line in post(path, body):
        if not line.startswith(b"data: {") or b'"choices":[{' not in line.replace(b" ", b""):
            continue
        now = time.monotonic()
        if last is not None:
            times.append(1000 * (now - last))
        last = now
    return times


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each client's prompts")
    parser.add_argument("--tokens", type=int, default=300, help="tokens of the answer that is watched")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=256, help="ids of the prompts are below this")
    parser.add_argument("--settings", nargs="*", default=[], help="settings of the daemon, as serve.slowdown=3")
    parser.add_argument("-o", "--out")
    arguments = parser.parse_args()
    options = ["--predictor", "dense", *(["--threads", str(arguments.threads)] if arguments.threads else [])]
    generator = random.Random(1)
    rows = []
    with serving(arguments.program, arguments.model, options, arguments.settings) as path:
        gaps(path, 20, ids(generator, 8, arguments.vocab))
        for number in range(arguments.rounds):
            alone = gaps(path, arguments.tokens, ids(generator, 8, arguments.vocab))
            ending = threading.Event()

            def client(seed):
                mine = random.Random(seed)
                while not ending.is_set():
                    post(path, {"prompt": ids(mine, arguments.prompt, arguments.vocab), "max_tokens": 1}).read()

            clients = [threading.Thread(target=client, args=(1000 * number + i,)) for i in range(arguments.clients)]
            before, began = prompt_tokens(path), time.monotonic()
            started = []

            def begin():
                started.extend(c.start() for c in clients)

            threading.Timer(0.3, begin).start()
            company = gaps(path, arguments.tokens, ids(generator, 8, arguments.vocab))
            took = time.monotonic() - began - 0.3
            speed = (prompt_tokens(path) - before) / took
            ending.set()
            [c.join() for c in clients]
            middle = statistics.median(alone)
            rows.append([number, middle, percentile(alone, 0.99), statistics.median(company), percentile(company, 0.99), max(company), speed])
            print(f"round {number + 1}: alone {middle:.1f} ms (p99 {rows[-1][2]:.1f}); in company {rows[-1][3]:.1f} (p99 {rows[-1][4]:.1f}, most {rows[-1][5]:.1f}), "
                  f"p99 {rows[-1][4] / middle:.2f} times the time alone; prompts at {speed:.0f} tokens/s", flush=True)
    if arguments.out:
        with open(arguments.out, "w", newline="") as out:
            writer = csv.writer(out)
            writer.writerow(["round", "alone_ms_p50", "alone_ms_p99", "company_ms_p50", "company_ms_p99", "company_ms_most", "prompt_tokens_per_s"])
            writer.writerows(rows)


if __name__ == "__main__":
    main()
