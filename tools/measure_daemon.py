"""Measures what docs/reliability.md reports, with the demo model and the standard library alone.

    cargo build --release && python3 tools/measure_daemon.py target/release/dynamicinfer [FIGURE ...]
"""

import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

PROGRAM = os.path.abspath(sys.argv[1])
DIR = tempfile.mkdtemp()
SOCKET = DIR + "/d.sock"


class Daemon:
    def __init__(self, *args):
        command = [PROGRAM, "serve", "demo", "--socket", SOCKET, *args]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if "is ready" in line:
                break
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()


def connect():
    s = socket.socket(socket.AF_UNIX)
    s.connect(SOCKET)
    return s


def ask(method, path, body=""):
    body = body if isinstance(body, str) else json.dumps(body)
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    s = connect()
    s.sendall((head + body).encode())
    return s


def read(s):
    data = b""
    while piece := s.recv(65536):
        data += piece
    s.close()
    return (int(data.split(b" ", 2)[1]) if data.startswith(b"HTTP") else 0), data


def metric(name):
    page = read(ask("GET", "/metrics"))[1].decode()
    return next(float(line.split(" ")[-1]) for line in page.splitlines() if line.startswith(name + " "))


def wait_for(name, value):
    while metric(name) != value:
        pass


def prompt(i, **more):
    return {"prompt": f"Once upon a time there were {i}", "seed": i, "max_tokens": 24, "stream": True, **more}


def text(data):
    events = [e for e in data.decode().split("data: ") if e.startswith("{")]
    return "".join(json.loads(e[: e.rindex("}") + 1])["choices"][0]["text"] for e in events)


def f1():
    """64 streams and 1,000 idle connections: answers as alone; a full queue is answered at once."""
    with Daemon("--deterministic", "--queue", "64"):
        alone = [text(read(ask("POST", "/v1/completions", prompt(i)))[1]) for i in range(64)]
        idle = [connect() for _ in range(1000)]
        streams = [ask("POST", "/v1/completions", prompt(i)) for i in range(64)]
        together = [text(read(s)[1]) for s in streams]
        print(f"F1: 64 streams beside {len(idle)} idle connections: {sum(a == b for a, b in zip(alone, together))} of 64 as alone")
        # Answers end while others arrive, so one more is sent until the queue is seen full.
        long = []
        while True:
            long += [ask("POST", "/v1/completions", prompt(i, max_tokens=400, ignore_eos=True)) for i in range(72)]
            start = time.monotonic()
            status, data = read(ask("POST", "/v1/completions", prompt(0)))
            if status == 429:
                break
        print(f"F1: with a full queue {status} after {1e3 * (time.monotonic() - start):.1f} ms, Retry-After: {b'retry-after' in data}")
        for s in long:
            s.close()


def f2():
    """1,000 disconnects leave no slot, descriptor or memory."""
    with Daemon():
        read(ask("POST", "/v1/completions", prompt(0)))
        rng = random.Random(1)

        def gone(n):
            for _ in range(n):
                s = ask("POST", "/v1/completions", prompt(rng.randrange(9), max_tokens=400, ignore_eos=True))
                for _ in range(rng.randrange(4)):
                    s.recv(rng.randrange(1, 400))
                s.close()
            wait_for("dynamicinfer_num_requests_running", 0)
            wait_for("dynamicinfer_num_requests_waiting", 0)

        gone(100)
        before = metric("process_resident_memory_bytes"), metric("process_open_fds")
        gone(1000)
        after = metric("process_resident_memory_bytes"), metric("process_open_fds")
        grown = (after[0] - before[0]) / 2**20
        print(f"F2: 1,000 disconnects: descriptors {before[1]:.0f} to {after[1]:.0f}, memory {grown:+.1f} MiB, no slot busy")


def f4():
    """kill -9 at random, 100 times: the next one takes the socket over."""
    times = []
    rng = random.Random(2)
    for _ in range(100):
        start = time.monotonic()
        with Daemon() as daemon:
            assert read(ask("GET", "/health"))[0] == 200
            times.append(time.monotonic() - start)
            s = ask("POST", "/v1/completions", prompt(1, max_tokens=400, ignore_eos=True))
            s.recv(rng.randrange(1, 2000))
            daemon.process.send_signal(signal.SIGKILL)
            daemon.process.wait()
    print(f"F4: 100 kill -9: start to /health with the model loaded: median {statistics.median(times):.3f} s, worst {max(times):.3f} s")


def f14():
    """SIGTERM while answers run, then a second one."""
    with Daemon() as daemon:
        busy = [ask("POST", "/v1/completions", prompt(i, max_tokens=490, ignore_eos=True, logprobs=20)) for i in range(8)]
        wait_for("dynamicinfer_num_requests_running", 8)
        daemon.process.send_signal(signal.SIGTERM)
        try:
            while True:  # until the first signal was heard: nobody listens any more
                connect().close()
        except OSError:
            pass
        start = time.monotonic()
        daemon.process.send_signal(signal.SIGTERM)
        code = daemon.process.wait()
        print(f"F14: second SIGTERM: ended after {1e3 * (time.monotonic() - start):.0f} ms, exit {code}, socket there: {os.path.exists(SOCKET)}")


def f17():
    """Short verbs, and what HTTP adds to the first token."""
    with Daemon():
        for verb in (["--help"], ["ps", "--socket", SOCKET], ["budget", "--socket", SOCKET, "get"]):
            times = []
            for _ in range(50):
                start = time.monotonic()
                subprocess.run([PROGRAM, *verb], stdout=subprocess.DEVNULL, check=True)
                times.append(time.monotonic() - start)
            print(f"F17: {verb[0]}: median {1e3 * statistics.median(times):.1f} ms, worst of 50 {1e3 * max(times):.1f} ms")
        added = []
        name = "dynamicinfer_time_to_first_token_seconds_sum"
        for i in range(300):
            before = metric(name)
            start = time.monotonic()
            s = ask("POST", "/v1/completions", prompt(i % 7))
            data = b""
            while b"data: " not in data:
                data += s.recv(4096)
            seen = time.monotonic() - start
            read(s)
            added.append(1e3 * (seen - (metric(name) - before)))
        added.sort()
        print(f"F17: HTTP adds to the first token: median {added[150]:.2f} ms, p99 {added[297]:.2f} ms")


for figure in sys.argv[2:] or ["f1", "f2", "f4", "f14", "f17"]:
    globals()[figure]()
