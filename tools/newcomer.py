#!/usr/bin/env python3
"""A newcomer's first hour, as one script: the demo, a talk, the daemon and its clients, a model that is not ours, the end.

    cargo build && python3 tools/newcomer.py target/debug/dynamicinfer

Everything happens in a home directory of its own, which is removed afterwards. Standard library only; where the openai and gguf packages
can be imported, what needs them is tried too, and otherwise said to be skipped. One line for each step; exit status 1 if one failed.
"""
import argparse
import http.client
import json
import os
import pty
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
# Seconds that any one thing may take on a machine that does much else.
PATIENCE = 120
TURNS = 10


class Failed(Exception):
    """What a step wanted and did not see."""


def want(good, what):
    if not good:
        raise Failed(what)


class Uds(http.client.HTTPConnection):
    """HTTP over the daemon's socket."""

    def __init__(self, path):
        super().__init__("localhost", timeout=PATIENCE)
        self.path = str(path)

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(self.path)


class Newcomer:
    def __init__(self, program, home):
        self.program, self.home, self.daemon = str(program), home, None
        self.socket = home / "run" / "dynamicinfer.sock"
        (home / "run").mkdir(mode=0o700)
        # Nothing of this machine's user is seen, and the demo is found as it would be after an installation in a checkout.
        self.environment = {
            "HOME": str(home),
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "TERM": "xterm",
            "XDG_RUNTIME_DIR": str(home / "run"),
            "DYNAMICINFER_ASSETS": str(REPOSITORY / "assets"),
        }

    def start(self, *arguments, **streams):
        return subprocess.Popen([self.program, *arguments], cwd=self.home, env=self.environment, **streams)

    def run(self, *arguments):
        """What a command prints to stdout; it has to end well."""
        done = subprocess.run([self.program, *arguments], cwd=self.home, env=self.environment, capture_output=True, text=True,
                              stdin=subprocess.DEVNULL, timeout=PATIENCE)
        want(done.returncode == 0, f"{' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
        return done.stdout

    def ask(self, method, path, body=None):
        connection = Uds(self.socket)
        connection.request(method, path, json.dumps(body) if body is not None else None, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        page = answer.read()
        connection.close()
        want(answer.status == 200, f"{method} {path}: {answer.status} {page[:300]}")
        return json.loads(page)

    # The steps, in their order. What a step returns is shown behind its name.

    def demo(self):
        text = self.run("run", "demo", "Once upon a time", "-n", "32", "--temp", "0")
        want(len(text) > 60, f"no story: {text!r}")
        return text.strip().replace("\n", " ")[:60] + " ..."

    def talk(self):
        """Ten turns on a terminal."""
        ours, theirs = pty.openpty()
        process = self.start("chat", "demo", stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
        os.close(theirs)
        shown = b""

        def until_prompt():
            nonlocal shown
            end = time.monotonic() + PATIENCE
            while b">>> " not in shown:
                want(select.select([ours], [], [], max(0, end - time.monotonic()))[0], f"no prompt: {shown[-300:]!r}")
                shown += os.read(ours, 65536)
            before, _, shown = shown.partition(b">>> ")
            return before.decode(errors="replace")

        def say(line):
            os.write(ours, line.encode() + b"\r")
            return until_prompt()

        try:
            until_prompt()
            say("/set temperature 0")
            for turn in range(TURNS):
                answer = say(f"Turn {turn + 1}: and what then?")
                want("error" not in answer.lower() and "the context of" not in answer, f"turn {turn + 1}: {answer!r}")
            os.write(ours, b"\x04")
            want(process.wait(PATIENCE) == 0, "the talk did not end well")
        finally:
            process.kill()
            process.wait()
            os.close(ours)
        return f"{TURNS} turns"

    def serve(self):
        # A virtual device, so that there is a budget to change.
        device = ["--device", "virtual", "--ffn-share", "0.5", "--predictor", "exact"]
        self.daemon = self.start("serve", "demo", *device, stderr=subprocess.PIPE, text=True)
        for line in self.daemon.stderr:
            if "is ready" in line:
                # What it says later must not fill the pipe.
                threading.Thread(target=self.daemon.stderr.read, daemon=True).start()
                return line.strip()
        raise Failed(f"it ended with {self.daemon.wait()}")

    def curl(self):
        body = {"messages": [{"role": "user", "content": "Once upon a time"}], "temperature": 0, "max_tokens": 8}
        if curl := shutil.which("curl"):
            url = "http://localhost/v1/chat/completions"
            done = subprocess.run([curl, "-s", "--unix-socket", self.socket, url, "-d", json.dumps(body)], capture_output=True,
                                  text=True, timeout=PATIENCE)
            answer = json.loads(done.stdout)
        else:
            answer = self.ask("POST", "/v1/chat/completions", body)
        want(answer["usage"]["completion_tokens"] == 8, str(answer))
        return answer["choices"][0]["message"]["content"].strip() + ("" if curl else " (without curl, which is not installed)")

    def openai(self):
        try:
            import openai
        except ImportError:
            return None
        try:
            import httpx2 as httpx  # what openai is built on since 3.51
        except ImportError:
            import httpx
        transport = httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket)))
        client = openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=transport, max_retries=0)
        ask = dict(model="demo", messages=[{"role": "user", "content": "Once upon a time"}], temperature=0, max_tokens=24)
        whole = client.chat.completions.create(**ask).choices[0].message.content
        pieces = client.chat.completions.create(**ask, stream=True)
        streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        want(streamed == whole, f"streamed {streamed!r}, whole {whole!r}")
        parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"],
                      "additionalProperties": False}
        tool = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": parameters}}
        choice = {"type": "function", "function": {"name": "weather"}}
        call = client.chat.completions.create(**{**ask, "max_tokens": 200}, tools=[tool], tool_choice=choice)
        called = call.choices[0].message.tool_calls[0].function
        want(called.name == "weather" and "city" in json.loads(called.arguments), str(called))
        return f"openai {openai.__version__}: whole, streamed, a tool called"

    def strangers_model(self):
        try:
            path = make_gguf(self.home / "stranger.gguf")
            what = "made by the gguf package"
        except ImportError:
            # Written by llama.cpp's converter when the fixture was made.
            path = REPOSITORY / "tests/fixtures/models/llama.q4_0.gguf"
            what = "from the fixtures: the gguf package is not installed"
        self.run("run", str(path), "abc", "-n", "4", "--temp", "0")
        shown = json.loads(self.run("show", str(path), "--json"))
        return f"{what}; family {shown['config']['family']}"

    def budget(self):
        """The budget is halved while an answer streams; the stream ends whole."""
        lines, begun = [], threading.Event()

        def stream():
            connection = Uds(self.socket)
            body = {"prompt": "Once upon a time", "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True}
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            for line in connection.getresponse():
                lines.append(line)
                begun.set()
            connection.close()

        reader = threading.Thread(target=stream)
        reader.start()
        want(begun.wait(PATIENCE), "no stream")
        before = self.ask("GET", "/v1/x/budget")
        used = before["vram_budget_bytes"]
        self.run("budget", "set", str(used - 65536))
        reader.join(PATIENCE)
        want(not reader.is_alive(), "the stream does not end")
        want(lines[-2].strip() == b"data: [DONE]" or lines[-1].strip() == b"data: [DONE]", f"it ends with {lines[-2:]}")
        after = self.ask("GET", "/v1/x/budget")["vram_budget_bytes"]
        want(after == used - 65536, f"{after} bytes")
        return f"{used} to {after} bytes during {len(lines) // 2 - 1} pieces"

    def stop(self):
        self.run("stop", "--daemon")
        want(self.daemon.wait(PATIENCE) == 0, f"the daemon ended with {self.daemon.returncode}")
        want(not self.socket.exists(), "its socket is still there")
        return "ended, and its socket is gone"


def make_gguf(path):
    """A tiny Llama as anybody's converter would write it, with the gguf package."""
    import gguf
    import numpy

    hidden, layers, heads, ffn, context = 64, 2, 2, 128, 128
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(context)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + ["\u2581a", "bc"]
    kinds = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * 2
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = numpy.random.default_rng(1)
    add = lambda name, *shape: writer.add_tensor(name, (random.standard_normal(shape) * 0.1).astype(numpy.float32))
    ones = lambda name: writer.add_tensor(name, numpy.ones(hidden, dtype=numpy.float32))
    add("token_embd.weight", len(tokens), hidden)
    add("output.weight", len(tokens), hidden)
    ones("output_norm.weight")
    for layer in range(layers):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{layer}.{part}.weight", hidden, hidden)
        add(f"blk.{layer}.ffn_gate.weight", ffn, hidden)
        add(f"blk.{layer}.ffn_up.weight", ffn, hidden)
        add(f"blk.{layer}.ffn_down.weight", hidden, ffn)
        ones(f"blk.{layer}.attn_norm.weight")
        ones(f"blk.{layer}.ffn_norm.weight")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program", type=Path, help="the dynamicinfer binary to try")
    program = parser.parse_args().program.resolve()
    failed = skipped = passed = 0
    with tempfile.TemporaryDirectory(prefix="newcomer-") as home:
        one = Newcomer(program, Path(home))
        steps = [("the demo", one.demo), ("a talk", one.talk), ("serve", one.serve), ("curl", one.curl), ("the openai client", one.openai),
                 ("a model that is not ours", one.strangers_model), ("the budget changes while an answer streams", one.budget),
                 ("stop", one.stop)]
        try:
            for name, step in steps:
                start = time.monotonic()
                try:
                    said = step()
                except Exception as why:  # whatever it is, the steps after it are tried
                    failed += 1
                    print(f"FAILED   {name}: {type(why).__name__}: {why}", flush=True)
                    continue
                if said is None:
                    skipped += 1
                    print(f"skipped  {name}: the package is not installed")
                    continue
                passed += 1
                print(f"ok       {name}: {said} ({time.monotonic() - start:.1f} s)", flush=True)
        finally:
            if one.daemon and one.daemon.poll() is None:
                one.daemon.kill()
                one.daemon.wait()
    print(f"newcomer: {passed} passed, {failed} failed, {skipped} skipped")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
