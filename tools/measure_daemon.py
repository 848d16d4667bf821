"""Measures what docs/serve.md says of reliability, with the demo model and the standard library alone.

    cargo build --release && python3 tools/measure_daemon.py target/release/dynamicinfer [FIGURE ...]

`soak`, or `soak=SECONDS`, is a figure that has to be asked for: it takes 15 minutes. It ends with 1 where it found a fault.
"""

import collections
import glob
import http.client
import json
import multiprocessing
import os
import random
import shutil
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
    def __init__(self, *args, model="demo", before=None):
        command = [PROGRAM, "serve", model, "--socket", SOCKET, *args]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=before)
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


READER = """
import socket, sys
s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.sendall(sys.argv[2].encode())
while s.recv(65536): pass
"""


def f3(seconds=5, rounds=3):
    """What 8 clients that do not read do to another's tokens, beside 8 that do."""
    body = json.dumps(prompt(0, max_tokens=480, ignore_eos=True, logprobs=20))
    wordy = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}"

    def gaps(reads):
        """Between tokens of one client, while eight others are there all the time."""
        found, others = [], []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            [o.close() for o, there in others if not reads and not there()]
            others = [o for o in others if o[1]()]
            while len(others) < 8:
                if reads:
                    p = subprocess.Popen([sys.executable, "-c", READER, SOCKET, wordy])
                    others.append((p, lambda p=p: p.poll() is None))
                else:
                    s = connect()
                    s.sendall(wordy.encode())
                    # Replaced before its answer is complete, so that there are always eight that are being answered.
                    born = time.monotonic()
                    others.append((s, lambda born=born: time.monotonic() < born + 0.7))
            s = ask("POST", "/v1/completions", prompt(1, max_tokens=200, ignore_eos=True))
            last = None
            while piece := s.recv(65536):
                now = time.monotonic()
                if b"data: {" in piece:
                    if last:
                        found.append(1e3 * (now - last))
                    last = now
            s.close()
        for o, _ in others:
            o.kill() if reads else o.close()
        return sorted(found)

    with Daemon("--parallel", "16"):
        both = {True: [], False: []}
        for _ in range(rounds):
            for reads in (True, False):
                both[reads] += gaps(reads)
        p99 = {reads: sorted(g)[int(0.99 * len(g))] for reads, g in both.items()}
        print(f"F3: another's p99 between tokens: {p99[False]:.2f} ms beside 8 that do not read, {p99[True]:.2f} ms beside 8 that do "
              f"({len(both[False])} and {len(both[True])} tokens)")


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


def packed():
    """The demo model in a file of its own, each time a new one."""
    first, store = DIR + "/demo.neurons", DIR + "/m.neurons"
    if not os.path.exists(first):
        subprocess.run([PROGRAM, "pack", "demo", "-o", first], stderr=subprocess.DEVNULL, check=True)
    shutil.copy(first, store + ".new")
    os.rename(store + ".new", store)
    return store


def f7():
    """A model file that is written to, or cut: how soon it is noticed, and that the daemon lives."""
    for what in ("written to", "cut while it answers", "cut while nobody asks"):
        times = []
        for _ in range(10):
            store = packed()
            with Daemon(model=store) as daemon:
                busy = None
                if what == "cut while it answers":
                    busy = ask("POST", "/v1/completions", prompt(0, max_tokens=490, ignore_eos=True, n=8))
                    wait_for("dynamicinfer_num_requests_running", 8)
                start = time.monotonic()
                with open(store, "r+b") as file:
                    if what == "written to":
                        file.seek(1 << 16)
                        file.write(b"\x3c" * 4096)
                    else:
                        file.truncate(4096)
                while read(ask("GET", "/health"))[0] != 503:
                    pass
                times.append(time.monotonic() - start)
                assert read(ask("POST", "/v1/completions", prompt(0)))[0] == 503 and daemon.process.poll() is None
                assert busy is None or b"error" in read(busy)[1]
        print(f"F7: {what}: 503 after {statistics.median(times):.2f} s in the median of 10, {max(times):.2f} s at worst; the daemon lives")


def f8():
    """Less and less address space: a load works or is refused in words; what ends otherwise is counted."""
    import resource

    ends = {}
    for limit in range(600, 20, -20):
        limits = (limit << 20, limit << 20)
        process = subprocess.Popen(
            [PROGRAM, "serve", "demo", "--socket", SOCKET], stderr=subprocess.PIPE,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limits))
        os.set_blocking(process.stderr.fileno(), False)
        said, end = b"", time.monotonic() + 10
        while b"is ready" not in said and process.poll() is None and time.monotonic() < end:
            said += process.stderr.read() or b""
            time.sleep(0.01)
        code = process.poll()
        if code is not None:
            how = f"exit {code}, in words" if code >= 0 else f"ended by signal {-code}"
        elif b"is ready" not in said:
            how = "neither ready nor ended after 10 s"
        else:
            try:
                s = ask("POST", "/v1/completions", prompt(0))
                s.settimeout(10)
                status = read(s)[0]
            except OSError:
                status = 0
            how = "serves" if status == 200 else "ready, and does not answer"
        process.kill()
        process.wait()
        ends.setdefault(how, []).append(limit)
    for how, limits in ends.items():
        print(f"F8: address space of {', '.join(map(str, limits))} MiB: {how}")


def f9(seconds=60, each=1000 / 60):
    """1,000 random budgets a minute under running answers, whose text does not change."""
    args = ["--device", "virtual", "--ffn-share", "0.5", "--predictor", "exact", "--deterministic", "--no-history"]
    with Daemon(*args) as daemon:
        body = prompt(0, max_tokens=400, ignore_eos=True, temperature=0)
        alone = text(read(ask("POST", "/v1/completions", body))[1])
        whole = json.loads(read(ask("GET", "/v1/x/budget"))[1].split(b"\r\n\r\n")[1])["vram_budget_bytes"]
        rng, times, refused, above, answers, wrong, stop = random.Random(3), [], 0, 0, 0, 0, threading.Event()

        def answer():
            nonlocal answers, wrong
            while not stop.is_set():
                answers += 1
                wrong += text(read(ask("POST", "/v1/completions", body))[1]) != alone

        thread = threading.Thread(target=answer)
        thread.start()
        before = metric("process_open_fds")
        begin = time.monotonic()
        for i in range(int(seconds * each)):
            time.sleep(max(0, begin + i / each - time.monotonic()))
            asked = rng.randrange(whole * 6 // 10, whole + 1)
            start = time.monotonic()
            status, data = read(ask("PUT", "/v1/x/budget", {"vram_budget_bytes": asked}))
            times.append(1e3 * (time.monotonic() - start))
            refused += status == 400
            if status == 200:
                told = json.loads(data.split(b"\r\n\r\n")[1])
                above += told["vram_used_bytes"] > asked or told["vram_budget_bytes"] != asked
        took = time.monotonic() - begin
        stop.set()
        thread.join()
        times.sort()
        print(f"F9: {len(times)} budgets in {took:.0f} s, {refused} too small and refused; {wrong} of {answers} texts changed; used above "
              f"what was acknowledged {above} times; acknowledged after {statistics.median(times):.1f} ms, p99 {times[int(0.99 * len(times))]:.1f}, "
              f"worst {times[-1]:.1f}; descriptors {before:.0f} to {metric('process_open_fds'):.0f}; "
              f"the daemon lives: {daemon.process.poll() is None}")


def b12():
    """A megabyte of what tokenizers stumble over."""
    with Daemon():
        for piece in ("a", " ", "\U0001f469\u200d\U0001f469\u200d\U0001f467", "\0", "<|im_end|>", "\n", "1", "\u0301"):
            content = piece * (2**20 // len(piece.encode()))
            start = time.monotonic()
            body = json.dumps({"content": content}, ensure_ascii=False).encode()
            s = connect()
            s.sendall(f"POST /tokenize HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
            status, data = read(s)
            print(f"B12: 1 MiB of {piece!r}: {status} after {time.monotonic() - start:.2f} s")


def f13(requests=20000, disconnects=1000, budgets=1000):
    """A day in minutes: many short requests with disconnects and budget changes between them."""
    args = ["--device", "virtual", "--ffn-share", "0.5", "--no-history"]
    with Daemon(*args) as daemon:
        whole = json.loads(read(ask("GET", "/v1/x/budget"))[1].split(b"\r\n\r\n")[1])["vram_budget_bytes"]
        rng, times, samples, failed, done = random.Random(5), [], [], 0, 0
        order = ["r"] * requests + ["d"] * disconnects + ["b"] * budgets
        rng.shuffle(order)
        begin = time.monotonic()
        for i, what in enumerate(order):
            if what == "r":
                start = time.monotonic()
                failed += read(ask("POST", "/v1/completions", prompt(rng.randrange(50), max_tokens=4, stream=rng.random() < 0.5)))[0] != 200
                times.append(time.monotonic() - start)
                done += 1
            elif what == "d":
                s = ask("POST", "/v1/completions", prompt(rng.randrange(50), max_tokens=400, ignore_eos=True))
                if rng.random() < 0.5:
                    s.recv(rng.randrange(1, 400))
                s.close()
            else:
                read(ask("PUT", "/v1/x/budget", {"vram_budget_bytes": rng.randrange(whole // 2, whole + 1)}))
            if i % (len(order) // 40) == 0:
                # The virtual device's memory is this process's: always with the same budget.
                read(ask("PUT", "/v1/x/budget", {"vram_budget_bytes": whole}))
                read(ask("POST", "/v1/completions", prompt(0, max_tokens=4)))
                samples.append((done, metric("process_resident_memory_bytes"), metric("process_open_fds"), metric("process_threads")))
        took = time.monotonic() - begin
        # The first quarter fills caches and rooms.
        rest = samples[len(samples) // 4:]
        n, xs, ys = len(rest), [s[0] for s in rest], [s[1] for s in rest]
        mx, my = sum(xs) / n, sum(ys) / n
        slope = sum((x - mx) * (y - my) for x, y in zip(xs, ys)) / sum((x - mx) ** 2 for x in xs)
        tenth = len(times) // 10
        p99 = [1e3 * sorted(part)[int(0.99 * tenth)] for part in (times[:tenth], times[-tenth:])]
        middle = [1e3 * statistics.median(part) for part in (times[:tenth], times[-tenth:])]
        print(f"F13: {requests} requests, {disconnects} disconnects, {budgets} budgets in {took:.0f} s: {failed} failed; memory {slope * 1e4 / 2**20:+.2f} MiB "
              f"per 10,000 requests (line through {n} samples after the first quarter); descriptors {min(s[2] for s in rest):.0f} to {max(s[2] for s in rest):.0f}, "
              f"threads {min(s[3] for s in rest):.0f} to {max(s[3] for s in rest):.0f}; first and last tenth: p99 {p99[0]:.1f} and {p99[1]:.1f} ms, median {middle[0]:.2f} and {middle[1]:.2f}; "
              f"the daemon lives: {daemon.process.poll() is None}")


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
    """Short verbs. What HTTP adds to the first token: cargo bench --bench first_token."""
    with Daemon():
        for verb in (["--help"], ["ps", "--socket", SOCKET], ["budget", "--socket", SOCKET, "get"]):
            times = []
            for _ in range(50):
                start = time.monotonic()
                subprocess.run([PROGRAM, *verb], stdout=subprocess.DEVNULL, check=True)
                times.append(time.monotonic() - start)
            print(f"F17: {verb[0]}: median {1e3 * statistics.median(times):.1f} ms, worst of 50 {1e3 * max(times):.1f} ms")


POLICIES = ["static", "micro", "macro", "full", "lru", "random"]
SCHEMA = {"type": "object", "required": ["name", "age"], "additionalProperties": False, "properties": {
    "name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}}}
LOOKS = ["/health", "/ready", "/metrics", "/openapi.json", "/v1/models", "/v1/models/demo", "/v1/x/ps", "/v1/x/cache", "/v1/x/config"]
BAD = [
    ("POST", "/v1/completions", "{"),
    ("POST", "/v1/completions", {"prompt": "x", "temprature": 1}),
    ("POST", "/v1/completions", {"prompt": "x", "n": 1000}),
    ("POST", "/v1/completions", {"prompt": "x " * 3000}),
    ("POST", "/v1/completions", {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}}),
    ("POST", "/v1/chat/completions", {"messages": []}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "model": "another"}),
    ("POST", "/tokenize", {"content": 5}),
    ("POST", "/detokenize", {"tokens": [2**31]}),
    ("PUT", "/v1/x/policy", {"policy": "clever"}),
    ("PUT", "/v1/x/thresholds", {"threshold": 2}),
    ("DELETE", "/v1/models", ""),
    ("GET", "/nothing", ""),
]


def questions():
    """What clients of the soak ask: greedy and seeded, short and long, texts, talks, several choices, a schema."""
    long = "There was a house by the sea, and in the house there was a king. " * 16
    for i, start in enumerate(("Once upon a time", "The king said", "In the morning", long[:400], long)):
        for temperature in (0, 0.8):
            common = {"seed": i, "temperature": temperature, "max_tokens": 24}
            yield "/v1/completions", {"prompt": start, **common}
            yield "/v1/chat/completions", {"messages": [{"role": "user", "content": start}], **common}
    yield "/v1/completions", {"prompt": "Three ways", "n": 3, "seed": 7, "max_tokens": 16}
    yield "/v1/completions", {"prompt": ["One", "Two"], "seed": 8, "max_tokens": 16}
    for i in range(2):
        format = {"type": "json_schema", "json_schema": {"schema": {"title": f"a person {i}", **SCHEMA}}}
        yield "/v1/completions", {"prompt": "Once", "max_tokens": 40, "temperature": 0, "response_format": format}


QUESTIONS = list(questions())


def whole(s):
    """The status of an answer and its body; an error where it does not end as HTTP says it does."""
    s.settimeout(60)
    with s:
        answer = http.client.HTTPResponse(s)
        answer.begin()
        return answer.status, answer.read()


def choices(body, stream):
    """The text of each choice and why it ended."""
    said = collections.defaultdict(str)
    events = [e[6:] for e in body.decode().split("\n\n") if e.startswith("data: {")] if stream else [body]
    for choice in (choice for event in events for choice in json.loads(event)["choices"]):
        part = choice.get("delta") or choice.get("message") or choice
        said[choice["index"]] += (part.get("content") or part.get("text") or "") + (choice["finish_reason"] or "")
    return dict(said)


def question(i, stream):
    path, body = QUESTIONS[i]
    status, body = whole(ask("POST", path, {**body, "stream": stream}))
    return status, choices(body, stream) if status == 200 else body


def soak_client(seed, seconds, most, alone):
    """One of the six for so long: what came of its requests, counted, and what should not have come."""
    rng, counts, odd, end = random.Random(seed), collections.Counter(), [], time.monotonic() + seconds

    def took(status, allowed, what):
        counts[f"{status // 100}xx"] += 1
        if status not in allowed:
            odd.append(f"{status} to {what}")

    def steer():
        what, body, allowed = rng.choice((
            ("policy", {"policy": rng.choice(POLICIES)}, [200]),
            ("budget", {"vram_budget_bytes": rng.randrange(most // 2, most + 1)}, [200, 400]),  # 400: too small
            ("thresholds", {"threshold": rng.random()}, [200, 400]),  # 400: the true gates have none
        ))
        status = whole(ask("PUT", f"/v1/x/{what}", body))[0]
        took(status, allowed, f"{what} {body}")
        counts[what] += status == 200

    def go():
        """Leaves in the middle: of asking, of waiting or of reading."""
        counts["left"] += 1
        body = json.dumps({"prompt": "Once", "max_tokens": 400, "ignore_eos": True, "n": rng.choice((1, 1, 4)), "stream": rng.random() < 0.7})
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        with connect() as s:
            sent = (head + body).encode()
            s.sendall(sent[: rng.randrange(len(sent))] if rng.random() < 0.2 else sent)
            s.settimeout(0.2 * rng.random())
            try:
                for _ in range(rng.randrange(20)):
                    s.recv(rng.randrange(1, 400))
            except TimeoutError:
                pass

    def be_answered():
        i = rng.randrange(len(QUESTIONS))
        status, said = question(i, rng.random() < 0.5)
        took(status, [200], QUESTIONS[i])
        counts["answers"] += 1
        counts["differ"] += said != alone[i]

    def look():
        path = rng.choice(LOOKS)
        took(whole(ask("GET", path))[0], [200], path)

    def spell():
        path, body = rng.choice((("/tokenize", {"content": "a king " * rng.randrange(200)}), ("/detokenize", {"tokens": [rng.randrange(200)] * 9})))
        took(whole(ask("POST", path, body))[0], [200], path)

    def err():
        request = rng.choice(BAD)
        took(whole(ask(*request))[0], [400, 404, 405], request)

    while time.monotonic() < end:
        doing = rng.choices((be_answered, go, steer, look, spell, err), (45, 15, 10, 10, 10, 10))[0]
        try:
            doing()
        except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
            odd.append(f"{doing.__name__}: {error!r}")
    return counts, odd


def soak(seconds=900, clients=6):
    """Six clients that ask, leave, err and steer: nothing fails, nothing stays, and where neurons stay no answer changes."""
    device, failed = ["--device", "virtual", "--ffn-share", "0.5", "--no-history"], False
    # Before there are threads here: each client is a process, as the daemon's queue tells clients apart.
    with multiprocessing.get_context("fork").Pool(clients) as pool:
        for name, more, agree in (
            ("--deterministic, true gates", ["--deterministic", "--predictor", "exact"], "must"),
            ("true gates, neurons move", ["--predictor", "exact"], "may"),  # sums are rounded by where neurons lie
            ("predicted, neurons move", [], "cannot"),  # somebody else sets the thresholds
        ):
            with Daemon(*device, *more) as daemon:
                failed |= soak_one(name, daemon, pool, seconds / 3, clients, agree)
    return failed


def soak_one(name, daemon, pool, seconds, clients, agree):
    """A daemon's part of the soak, looked at each minute while nobody asks; whether something was wrong."""
    say = lambda what: print(f"soak: {name}: {what}", flush=True)
    answered = lambda: sum(counts[c] for c in ("2xx", "4xx", "5xx"))
    most = json.loads(whole(ask("GET", "/v1/x/budget"))[1])["vram_budget_bytes"]
    set_at_first = json.loads(whole(ask("GET", "/v1/x/thresholds"))[1])["thresholds"]
    layers = {str(l): t for l, t in enumerate(set_at_first) if t is not None}
    counts, odd, samples, begin = collections.Counter(), [], [], time.monotonic()

    def settle():
        """As it was at first, with nobody asking; how many answers are still under way after ten seconds."""
        for what, body in (("policy", {"policy": "static"}), ("budget", {"vram_budget_bytes": most}), ("thresholds", {"layers": layers})):
            if what != "thresholds" or layers:
                assert whole(ask("PUT", f"/v1/x/{what}", body))[0] == 200, what
        end = time.monotonic() + 10
        while (busy := metric("dynamicinfer_num_requests_running") + metric("dynamicinfer_num_requests_waiting")) and time.monotonic() < end:
            pass
        return busy

    def sample():
        children = sum(len(open(path).read().split()) for path in glob.glob(f"/proc/{daemon.process.pid}/task/*/children"))
        memory, *rest = metric("process_resident_memory_bytes") / 2**20, metric("process_open_fds"), metric("process_threads"), children
        samples.append((answered(), memory))
        say(f"after {time.monotonic() - begin:.0f} s, {answered():,} requests: {memory:.1f} MiB, %.0f descriptors, %.0f threads, %d children" % tuple(rest))

    def fill():
        """Has every room as large as it gets: a whole chunk of a prompt, and in each slot a text as long as the context."""
        endless = {"max_tokens": 10**5, "ignore_eos": True, "temperature": 1}
        assert read(ask("POST", "/v1/completions", {"prompt": "Rooms are to be full. " * 40, "max_tokens": 1}))[0] == 200
        for s in [ask("POST", "/v1/completions", {"prompt": f"{i} kings", "seed": i, **endless}) for i in range(16)]:
            assert read(s)[0] == 200

    settle()
    alone = [question(i, False)[1] for i in range(len(QUESTIONS))]
    fill()
    for i, pause in enumerate([min(10, seconds / 10)] + [min(60, seconds)] * max(1, round(seconds / 60))):
        jobs = [(1000 * i + client, pause, most, alone) for client in range(clients)]
        for some, more in pool.starmap(soak_client, jobs):
            counts += some
            odd += more
        if busy := settle():
            odd.append(f"{busy:.0f} answers under way though nobody asks")
        sample()
    again = sum(question(i, True)[1] != said for i, said in enumerate(alone))
    lives = daemon.process.poll() is None
    # The first minute fills caches and rooms.
    first, last = samples[min(1, len(samples) - 2)], samples[-1]
    grown = 1e4 * (last[1] - first[1]) / (last[0] - first[0])
    say(f"{answered():,} requests answered: " + ", ".join(f"{counts[c]:,} {c}" for c in ("2xx", "4xx", "5xx")) + f"; {counts['left']:,} left in the middle; "
        f"{counts['policy']:,} policies, {counts['budget']:,} budgets, {counts['thresholds']:,} thresholds set")
    if agree != "cannot":
        say(f"{counts['differ']:,} of {counts['answers']:,} texts differ from those alone")
    say(f"at the end, with all set back, {again} of {len(alone)} texts differ from the first; memory {grown:+.2f} MiB per 10,000 requests after the first minute; "
        f"{len(odd)} unexpected; the daemon lives: {lives}")
    for line in odd[:20]:
        say(f"UNEXPECTED {line}")
    return bool(odd or counts["5xx"] or not lives or agree == "must" and (counts["differ"] or again))


failed = False
for figure in sys.argv[2:] or ["f1", "f2", "f3", "f4", "f7", "f8", "f9", "f13", "f14", "f17", "b12"]:
    name, _, seconds = figure.partition("=")
    failed |= bool(globals()[name](*([float(seconds)] if seconds else [])))
sys.exit(failed)
