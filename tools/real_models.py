#!/usr/bin/env python3
"""Tries the program on published models, as a stranger would, and holds it against llama.cpp.

    cargo build --release
    python3 tools/real_models.py --text wiki.test.txt --llama PYTHON --out runs/DATE-real-models

The models are those of `artefacts.py`. Each goes through: `show` (does it load), `run` (an answer by its chat template), 64 greedy tokens
of three texts through the daemon with their log probabilities, held against llama.cpp's, `/v1/chat/completions` as a stream, `eval` (the
perplexity of the text's beginning), `plan`, `profile` and `bench`. Written are answers to read (`answers.md`) and a table (`README.md`
gets it by hand, `table.md` and `rows.json` by this script). The exit status is 1 if a step fails that the model's row does not expect.

PYTHON is one that has PyPI's `xllamacpp`, a prebuilt llama.cpp; without --llama there is no comparison. Speeds are of this machine and
minute; llama.cpp's greedy tokens are computed with as many threads, but its speed is measured by `tools/compare`.
"""
import argparse
import http.client
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import artefacts

TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "In 1905 a clerk in the patent office at Bern published four papers. The first of them",
]
QUESTION = "What is the capital of France, and what river flows through it? Answer in one sentence."
GREEDY = 64

LLAMA = r"""
import json, sys
import xllamacpp
task = json.load(sys.stdin)
params = xllamacpp.CommonParams()
params.model.path = task["model"]
params.n_ctx, params.n_parallel, params.warmup = 1024, 1, False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = task["threads"]
server = xllamacpp.Server(params)
answers = []
for text in task["texts"]:
    answer = server.handle_completions({"prompt": text, "max_tokens": task["tokens"], "temperature": 0, "logprobs": 5})
    answers.append([[t["bytes"], t["logprob"], [[o["bytes"], o["logprob"]] for o in t["top_logprobs"]]]
                    for t in answer["choices"][0]["logprobs"]["content"]])
json.dump(answers, sys.stdout)
"""


class Daemon:
    """A daemon of its own with one model, and requests to it."""

    def __init__(self, program, model, threads, home, env):
        self.path = str(home / "d.sock")
        command = [program, "serve", model, "--socket", self.path, "-t", str(threads), "--name", "m"]
        self.process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 120
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(self.process.stderr.read().strip())
            try:
                if self.ask("GET", "/ready")[0] == 200:
                    return
            except OSError:
                if time.monotonic() > deadline:
                    raise RuntimeError("the daemon does not answer") from None
            time.sleep(0.1)

    def connection(self):
        connection = http.client.HTTPConnection("localhost", timeout=600)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(self.path)
        return connection

    def ask(self, method, path, body=None):
        connection = self.connection()
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        response = connection.getresponse()
        return response.status, response.read()

    def end(self):
        self.process.terminate()
        self.process.wait(60)


def called(program, env, *words, timeout=1800):
    """Runs a verb; its stdout. Raises with what it said on stderr when it fails."""
    result = subprocess.run([program, *map(str, words)], env=env, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
    if result.returncode:
        lines = result.stderr.strip().splitlines() or ["nothing on stderr"]
        raise RuntimeError(f"exit {result.returncode}: {lines[-1]}")
    return result.stdout


def greedy(daemon):
    """Of each text [token's text, log probability] of its greedy continuation, from `/v1/completions`."""
    answers = []
    for text in TEXTS:
        body = {"model": "m", "prompt": text, "max_tokens": GREEDY, "temperature": 0, "logprobs": 5}
        status, answer = daemon.ask("POST", "/v1/completions", body)
        if status != 200:
            raise RuntimeError(f"/v1/completions: {status} {answer.decode()[:200]}")
        probabilities = json.loads(answer)["choices"][0]["logprobs"]
        answers.append(list(zip(probabilities["tokens"], probabilities["token_logprobs"])))
    return answers


def beside_llama(ours, theirs):
    """How many greedy texts are equal, and of the common beginnings the largest distance of log probabilities. Where texts part, llama.cpp's
    distance of its two likeliest tokens tells whether rounding can be the reason."""
    equal, far, partings = 0, 0.0, []
    for mine, yours in zip(ours, theirs):
        for at, ((text, logprob), (theirs_bytes, their_logprob, top)) in enumerate(zip(mine, yours)):
            if text.encode("utf-8", "replace") != bytes(theirs_bytes) and "\ufffd" not in text:
                gap = top[0][1] - top[1][1] if len(top) > 1 else math.inf
                partings.append({"token": at, "gap": round(gap, 3)})
                break
            far = max(far, abs(logprob - their_logprob))
        else:
            equal += 1
    return {"texts": len(ours), "equal": equal, "logprob_distance": round(far, 3), "partings": partings}


def streamed(daemon):
    """The text of a streamed chat answer; raises unless the stream is well-formed and ends with [DONE]."""
    body = {"model": "m", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 48, "temperature": 0, "stream": True}
    status, answer = daemon.ask("POST", "/v1/chat/completions", body)
    events = [e.removeprefix("data: ") for e in answer.decode().split("\n\n") if e.startswith("data: ")]
    if status != 200 or not events or events[-1] != "[DONE]":
        raise RuntimeError(f"/v1/chat/completions: {status} {answer.decode()[:200]}")
    chunks = [json.loads(e) for e in events[:-1]]
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])


def llama_greedy(python, model, threads):
    task = {"model": str(model), "texts": TEXTS, "tokens": GREEDY, "threads": threads}
    result = subprocess.run([python, "-c", LLAMA], input=json.dumps(task), capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"llama.cpp: {result.stderr.strip().splitlines()[-1:]}")
    return json.loads(result.stdout)


def bench(program, env, model, threads):
    return json.loads(called(program, env, "bench", model, "-p", 512, "-n", 64, "-r", 3, "-t", threads, "-o", "json"))


def tried(options, model, env, home):
    """A row: of each step its result, or why it failed."""
    row, program, threads = {"file": model.name, "bytes": model.stat().st_size}, options.program, options.threads

    def step(name, work):
        start = time.monotonic()
        try:
            row[name] = {"ok": True, "result": work()}
        except (RuntimeError, OSError, KeyError, IndexError, ValueError, subprocess.TimeoutExpired) as error:
            row[name] = {"ok": False, "why": str(error)}
        row[name]["seconds"] = round(time.monotonic() - start, 1)
        print(f"{model.name}: {name} {'ok' if row[name]['ok'] else 'FAILED: ' + row[name]['why']}", file=sys.stderr)
        return row[name]["ok"]

    if not step("show", lambda: called(program, env, "show", model)):
        return row
    step("run", lambda: called(program, env, "run", model, QUESTION, "--temp", 0, "-n", 48, "-t", threads).strip())
    daemon = None
    try:
        daemon = Daemon(program, str(model), threads, home, env)
        if step("greedy", lambda: greedy(daemon)) and options.llama:
            ours = row["greedy"]["result"]
            step("beside llama.cpp", lambda: beside_llama(ours, llama_greedy(options.llama, model, threads)))
        step("stream", lambda: streamed(daemon))
    except RuntimeError as error:
        row["serve"] = {"ok": False, "why": str(error)}
    finally:
        if daemon:
            daemon.end()
    if options.text:
        beginning = home / "text"
        beginning.write_bytes(options.text.read_bytes()[: options.bytes].decode("utf-8", "ignore").encode())
        context = ["-c", 2048]
        step("eval", lambda: json.loads(called(program, env, "eval", model, "--text", beginning, "--json", *context)))
        step("profile", lambda: called(program, env, "profile", model, "--text", beginning, "--max-tokens", 512, "-t", threads))
    # Of a small model the head alone may be more than half.
    budget = model.stat().st_size
    step("plan", lambda: called(program, env, "plan", model, "--vram", budget))
    if not options.no_bench:
        step("bench", lambda: bench(program, env, model, threads))
    return row


def cell(row, name, say):
    found = row.get(name)
    if found is None:
        return "-"
    return say(found["result"]) if found["ok"] else "**fails**"


def speeds(result):
    return ", ".join(f"{r['test']} {r['avg_ts']:.0f}" for r in result)


def table(rows):
    out = ["| model | loads | chat by template | greedy beside llama.cpp | stream | perplexity | plan | profile | bench, tokens/s |", "|" + "---|" * 9]
    for row in rows:
        greedy_cell = cell(row, "beside llama.cpp", lambda r: f"{r['equal']} of {r['texts']} texts equal, log probabilities within {r['logprob_distance']}"
                           + "".join(f"; parts at {p['token']}, gap {p['gap']}" for p in r["partings"]))
        done = [cell(row, name, lambda _: "yes") for name in ("show", "run", "stream", "plan", "profile")]
        out.append(f"| {row['file']} | {done[0]} | {done[1]} | {greedy_cell} | {done[2]} | {cell(row, 'eval', lambda r: format(r['perplexity'], '.3f'))} "
                   f"| {done[3]} | {done[4]} | {cell(row, 'bench', speeds)} |")
    return "\n".join(out) + "\n"


def answers(rows):
    out = ["# Answers to read", ""]
    for row in rows:
        out += [f"## {row['file']}", ""]
        for name in ("run", "stream"):
            out += [f"`{name}`: {QUESTION}", "", "```text", cell(row, name, str), "```", ""]
        for text, tokens in zip(TEXTS, row.get("greedy", {}).get("result", [])):
            out += ["```text", text + "".join(t for t, _ in tokens), "```", ""]
        out += [f"{name}: {found['why']}" for name, found in row.items() if isinstance(found, dict) and not found["ok"]] + [""]
    return "\n".join(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", default="target/release/dynamicinfer")
    parser.add_argument("--models", default=",".join(artefacts.MODELS), help="keys of artefacts.py, or paths of GGUFs (default: %(default)s)")
    parser.add_argument("--text", type=Path, help="text for perplexity and profile, such as WikiText-2's test text")
    parser.add_argument("--bytes", type=int, default=30_000, help="how much of the text (default: %(default)s)")
    parser.add_argument("--llama", help="a Python that has xllamacpp")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-bench", action="store_true")
    parser.add_argument("--expect-refused", default="", help="models that are not supported yet (default: none)")
    parser.add_argument("--out", type=Path, help="folder for table.md, answers.md and rows.json")
    options = parser.parse_args()
    options.program = shutil.which(options.program) or str(Path(options.program).resolve())
    rows, failed = [], []
    for key in options.models.split(","):
        model = artefacts.model(key) if key in artefacts.MODELS else Path(key)
        with tempfile.TemporaryDirectory() as home:
            home = Path(home)
            env = {**os.environ, "XDG_CACHE_HOME": str(home / "cache"), "XDG_CONFIG_HOME": str(home / "config"), "XDG_DATA_HOME": str(home / "data"),
                   "XDG_STATE_HOME": str(home / "state")}
            row = tried(options, model, env, home)
        row["model"] = key
        rows.append(row)
        wrong = [name for name, found in row.items() if isinstance(found, dict) and not found["ok"]]
        refused = key in options.expect_refused.split(",")
        if bool(wrong) != refused:
            failed.append(f"{key}: {', '.join(wrong) or 'is taken, though it was expected to be refused'}")
    print(table(rows))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "table.md").write_text(table(rows))
        # Records name files, not the folders of a machine.
        folders = {f"{artefacts.model(key).parent if key in artefacts.MODELS else Path(key).parent}/" for key in options.models.split(",")}
        for name, text in [("answers.md", answers(rows)), ("rows.json", json.dumps(rows, indent=1) + "\n")]:
            for folder in folders:
                text = text.replace(folder, "")
            (options.out / name).write_text(text)
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
