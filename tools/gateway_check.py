#!/usr/bin/env python3
"""Two daemons behind the gateway of configs/gateway/nginx.conf: starts all three on this machine and says what holds.

    cargo build --release && python3 tools/gateway_check.py target/release/dynamicinfer [--out runs/DATE-gateway]

Needs nginx (apt-get install nginx-light); the rest is the standard library. The gateway's file is taken as it is, but for the
daemons' sockets, the port and the tokens. Exit status 1 if something does not hold.
"""
import argparse
import http.client
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
CONFIG = HERE / "configs/gateway/nginx.conf"
TOKEN = "of-the-check"
PATIENCE = 30


class Uds(http.client.HTTPConnection):
    """HTTP over a daemon's own socket."""

    def __init__(self, path):
        super().__init__("localhost", timeout=PATIENCE)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE)
        self.sock.connect(self.path)


class Daemon:
    def __init__(self, program, path, *options, model="demo"):
        self.path = str(path)
        command = [program, "serve", *([model] if model else []), "--socket", self.path, "--threads", "1", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if "is ready" in line or not model and "listening" in line:
                return
        raise SystemExit(f"{' '.join(command)} ended with {self.process.wait()}")

    def connection(self):
        return Uds(self.path)

    def metric(self, name):
        c = Uds(self.path)
        c.request("GET", "/metrics")
        page = c.getresponse().read().decode()
        c.close()
        return next(float(line.split()[-1]) for line in page.splitlines() if line.startswith(f"dynamicinfer_{name} "))

    def end(self, how=signal.SIGKILL):
        self.process.send_signal(how)
        self.process.wait()
        self.process.stderr.close()


class Gateway:
    def __init__(self, nginx, directory, sockets):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        text = CONFIG.read_text()
        for number, path in enumerate(sockets, 1):
            theirs = f"unix:/run/user/1000/dynamicinfer/{number}.sock"
            assert text.count(theirs) == 2, f"{CONFIG} does not name {theirs} twice"
            text = text.replace(theirs, f"unix:{path}")
        assert "listen 127.0.0.1:8080;" in text, f"{CONFIG} listens elsewhere"
        text = text.replace("listen 127.0.0.1:8080;", f"listen 127.0.0.1:{self.port};")
        config = directory / "nginx.conf"
        config.write_text(text)
        (directory / "tokens.conf").write_text(f'"Bearer {TOKEN}" 1;\n')
        # Started by root nginx would become somebody else, who may not open the sockets.
        globally = "daemon off;" + " user root;" * (os.geteuid() == 0)
        self.process = subprocess.Popen([nginx, "-p", str(directory), "-c", str(config), "-g", globally])
        end = time.monotonic() + PATIENCE
        while True:
            try:
                return socket.create_connection(("127.0.0.1", self.port)).close()
            except OSError:
                if self.process.poll() is not None or time.monotonic() > end:
                    raise SystemExit("nginx does not start; its reason stands above, or in gateway.log")

    def connection(self, of=None):
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE, source_address=of and (of, 0))

    def end(self):
        self.process.terminate()
        self.process.wait()


def send(to, path="/v1/completions", body=None, method="POST", token=TOKEN, **headers):
    """A request under way: its connection, to read from or to close."""
    c = to.connection()
    headers = {"Authorization": f"Bearer {token}", **headers}
    c.request(method, path, json.dumps(body) if body is not None else None, headers)
    return c


def ask(to, *args, **kwargs):
    """Status, headers and what came."""
    c = send(to, *args, **kwargs)
    response = c.getresponse()
    data = response.read()
    c.close()
    kind = response.headers.get("Content-Type", "")
    return response.status, response.headers, json.loads(data) if "json" in kind else data


def prompt(i, **more):
    return {"prompt": f"Once upon a time there were {i}", "temperature": 0, "max_tokens": 24, "ignore_eos": True, **more}


def words(answer):
    return answer[2]["choices"][0]["text"]


def is_error(answer, status):
    return answer[0] == status and set(answer[2].get("error", {})) == {"message", "type", "param", "code"}


def until(condition, what):
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"waited {PATIENCE} s in vain until {what}")
        time.sleep(0.001)


def running(daemon):
    return daemon.metric("num_requests_running")


def stream(to, i, tokens):
    """Seconds to the first token, tokens that came in a read of their own, and the text."""
    start, first, alone, data = time.monotonic(), None, 0, b""
    c = send(to, body=prompt(i, max_tokens=tokens, stream=True))
    response = c.getresponse()
    while piece := response.read1(65536):
        count = piece.count(b'data: {')
        alone += count == 1
        if first is None and count:
            first = time.monotonic() - start
        data += piece
    c.close()
    events = [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]
    return first, alone, "".join(e["choices"][0]["text"] for e in events if e["choices"]), data.rstrip().endswith(b"data: [DONE]")


class Check:
    def __init__(self):
        self.rows = []

    def __call__(self, holds, what):
        self.rows.append((bool(holds), what))
        print("holds     " if holds else "DOES NOT  ", what, flush=True)


def same_answers(check, start, gateway):
    one, two = start("--deterministic"), None
    alone = [words(ask(one, body=prompt(i, seed=i, temperature=1))) for i in range(16)]
    two = start("--deterministic")
    through = [send(gateway, body=prompt(i, seed=i, temperature=1)) for i in range(16)]
    texts = []
    for c in through:
        texts.append(json.loads(c.getresponse().read())["choices"][0]["text"])
        c.close()
    shares = [d.metric("generation_tokens_total") for d in (one, two)]
    check(texts == alone, f"16 sampled answers, all at once through the gateway, are those of one daemon alone: {sum(map(str.__eq__, texts, alone))} of 16")
    check(min(shares[0] - 16 * 24, shares[1]) >= 4 * 24, f"they were shared out: {(shares[0] - 16 * 24) / 24:.0f} to the first daemon, {shares[1] / 24:.0f} to the second")
    one.end(), two.end()


def streams(check, start, gateway, tokens=100, rounds=15):
    one, two = start(), start()
    seen = {"alone": [], "gateway": []}
    single_reads, complete, texts = dict.fromkeys(seen, 0), True, set()
    for i in range(rounds):
        for name, to in (("alone", one), ("gateway", gateway)):
            first, single, text, done = stream(to, 7, tokens)
            seen[name].append(1e3 * first)
            complete = complete and done
            texts.add(text)
            single_reads[name] += single
    share = {name: reads / (rounds * tokens) for name, reads in single_reads.items()}
    check(complete and len(texts) == 1, f"streams of {tokens} tokens end with [DONE] and have the text of the daemon's own")
    # Where the client's own thread waits for a core, two tokens lie ready for it: so beside the daemon's.
    check(share["gateway"] > 0.5 * share["alone"], f"tokens come one by one: {100 * share['gateway']:.1f} % in a read of their own, {100 * share['alone']:.1f} % from a daemon")
    first = {name: statistics.median(times) for name, times in seen.items()}
    check(first["gateway"] < first["alone"] + 20, f"first token after {first['alone']:.1f} ms from a daemon and {first['gateway']:.1f} ms through the gateway (medians of {rounds}, in turns)")
    one.end(), two.end()


def conversation(check, start, gateway):
    one, two = start(), start()

    def turns(**headers):
        text, cached = "Once upon a time there was a king", []
        for _ in range(6):
            answer = ask(gateway, body=prompt(0, prompt=text), **headers)
            cached.append(answer[2]["usage"]["prompt_tokens_details"]["cached_tokens"])
            text += words(answer) + " and then"
        return cached

    sessions = [turns(**{"X-Session-Id": f"s{i}"}) for i in range(8)]
    shares = [d.metric("generation_tokens_total") for d in (one, two)]
    check(all(min(cached[1:]) > 0 for cached in sessions), f"with X-Session-Id each turn finds the keys of the one before: {sessions[0]} tokens cached")
    check(min(shares) > 0, f"8 sessions were shared out: {shares[0] / 144:.0f} and {shares[1] / 144:.0f}")
    one.end(), two.end()


def one_dies(check, start, gateway):
    one, two = start("--parallel", "4"), start("--parallel", "4")
    clients = [send(gateway, body=prompt(i, max_tokens=490, stream=True)) for i in range(8)]
    until(lambda: running(one) == running(two) == 4, "both daemons have 4 answers under way")
    check(True, "8 streams are 4 and 4")
    responses = [c.getresponse() for c in clients]
    began = [r.read1(65536) for r in responses]
    one.end()
    begin = time.monotonic()
    status = [ask(gateway, body=prompt(i, max_tokens=1))[0] for i in range(20)]
    took = (time.monotonic() - begin) / 20
    check(set(status) == {200}, f"one daemon killed with -9: the next 20 requests are answered by the other ({1e3 * took:.0f} ms each, beside 4 streams)")
    whole = broken = 0
    for response, data in zip(responses, began):
        try:
            data += response.read()
            whole += data.rstrip().endswith(b"data: [DONE]")
        except (http.client.IncompleteRead, ConnectionError):
            broken += 1
    check((whole, broken) == (4, 4), f"of the 8 streams {whole} are complete and {broken} break off as an error, not as an end")
    # Not streams: their answers have not begun, so they are made again.
    one = start("--parallel", "4")
    clients = [send(gateway, body=prompt(i, max_tokens=300)) for i in range(8)]
    until(lambda: running(one) == running(two) == 4, "the daemon that came back has 4 answers under way")
    check(True, "a daemon that is back is used at once")
    one.end()
    status = [c.getresponse().status for c in clients]
    check(status == [200] * 8, "killed once more under 8 answers that are no streams: all 8 are answered")
    one = start()
    clients = [send(gateway, body=prompt(i, max_tokens=490, stream=True)) for i in range(4)]
    until(lambda: running(one) > 0 and running(two) > 0, "both answer")
    responses = [c.getresponse() for c in clients]
    two.process.send_signal(signal.SIGTERM)
    status = [ask(gateway, body=prompt(i, max_tokens=1))[0] for i in range(20)]
    ends = [r.read().rstrip().endswith(b"data: [DONE]") for r in responses]
    code = two.process.wait()
    check(set(status) == {200} and all(ends) and code == 0, f"SIGTERM under answers: {sum(ends)} of 4 end in order, 20 new ones go to the other, exit {code}")
    one.end()
    answer = ask(gateway, body=prompt(0))
    check(is_error(answer, 503) and answer[1]["Retry-After"], f"no daemon at all: {answer[0]} {answer[2]['error']['message']!r}")
    check(ask(gateway, "/health", method="GET")[0] == 503, "/health is 503 then")


def refusals(check, start, gateway):
    full = ("--parallel", "1", "--queue", "1")
    one, two = start(*full), start(*full)
    clients, busy = [], lambda: sum(running(d) + d.metric("num_requests_waiting") for d in (one, two))
    for i in range(4):
        clients.append(send(gateway, body=prompt(i, max_tokens=490, stream=True)))
        # One by one: a daemon's queue has room again when its first answer has begun.
        until(lambda: busy() == i + 1 and running(one) + running(two) == min(i + 1, 2), f"{i + 1} answers run or wait")
    direct, answer = ask(one, body=prompt(9)), ask(gateway, body=prompt(9))
    check(is_error(answer, 429) and answer[1]["Retry-After"] == direct[1]["Retry-After"] and answer[2] == direct[2],
          f"both full: 429, Retry-After {answer[1]['Retry-After']} and the daemon's own words come through")
    check([ask(gateway, body=prompt(9))[0] for _ in range(20)] == [429] * 20, "and again for 20 more requests: a full daemon is not taken for a dead one")
    begin = time.monotonic()
    for c in clients:
        c.close()
    until(lambda: not any(d.metric("num_requests_waiting") or running(d) for d in (one, two)), "nothing runs")
    check(True, f"four clients go away: no answer is left running or waiting after {1e3 * (time.monotonic() - begin):.0f} ms")
    two.end()
    # One address has many answers under way, then another asks, and has its answer before the first one's last begin.
    one.end()
    one = start("--parallel", "1")
    clients = []
    for i in range(6):
        clients.append(send(gateway, body=prompt(i, max_tokens=200)))
        until(lambda: running(one) + one.metric("num_requests_waiting") == i + 1, f"{i + 1} of one client run or wait")
    other = gateway.connection(of="127.0.0.2")
    other.request("POST", "/v1/completions", json.dumps(prompt(9, max_tokens=1)), {"Authorization": f"Bearer {TOKEN}"})
    answered = other.getresponse().status == 200
    until(lambda: one.metric("num_requests_waiting") <= 5, "the daemon has counted again")
    behind = one.metric("num_requests_waiting")
    check(answered and behind >= 3, f"a daemon takes turns between addresses: a second one's answer came while {behind:.0f} of 6 of the first one waited")
    [c.close() for c in clients + [other]]
    two = start(model=None)
    check([ask(gateway, body=prompt(i, max_tokens=1))[0] for i in range(10)] == [200] * 10, "one daemon without a model: the other answers all")
    one.end()
    one = start(model=None)
    direct, answer = ask(two, body=prompt(0)), ask(gateway, body=prompt(0))
    check(is_error(answer, 503) and answer[2] == direct[2] and answer[1]["Retry-After"] == direct[1]["Retry-After"],
          f"no daemon with a model: the daemon's 503 comes through ({answer[2]['error']['message']!r})")
    one.end(), two.end()
    one, two = start(), start()
    check(is_error(ask(gateway, body=prompt(0), token="wrong"), 401), "a wrong token is 401")
    check(is_error(ask(gateway, body={"prompt": "x", "temprature": 1}), 400), "400 comes through")
    check(ask(gateway, "/v1/models", method="GET")[2]["data"][0]["id"] == "demo", "/v1/models is answered")
    hidden = ["/v1/x/ps", "/v1/x/config", "/metrics", "/openapi.json", "/v1/../metrics", "/v1/%78/ps", "//v1/x/ps"]
    check(all(is_error(ask(gateway, path, method="GET"), 404) for path in hidden), f"what steers a daemon is not handed on: {', '.join(hidden)}")
    try:
        large = ask(gateway, body={"prompt": "x" * (33 << 20)})
    except ConnectionError:  # it need not read what it refuses
        large = None
    check(large is None or is_error(large, 413), "a body of 33 MiB is refused")
    check(ask(gateway, "/health", method="GET")[0] == 200, "/health is 200")
    one.end(), two.end()


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("program", help="the dynamicinfer binary")
    arguments.add_argument("--out", type=Path, help="folder to write checks.md to")
    options = arguments.parse_args()
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if not nginx:
        raise SystemExit("there is no nginx: apt-get install nginx-light")
    program = shutil.which(options.program) or options.program
    check = Check()
    with tempfile.TemporaryDirectory() as directory:
        directory = Path(directory)
        sockets = [directory / "1.sock", directory / "2.sock"]
        daemons = []

        def start(*args, **more):
            """A daemon at the first socket that has none."""
            path = next(s for s in sockets if not any(d.path == str(s) and d.process.poll() is None for d in daemons))
            daemons.append(Daemon(os.path.abspath(program), path, *args, **more))
            return daemons[-1]

        gateway = Gateway(nginx, directory, sockets)
        try:
            for story in (same_answers, streams, conversation, one_dies, refusals):
                story(check, start, gateway)
        finally:
            gateway.end()
            for daemon in daemons:
                if daemon.process.poll() is None:
                    daemon.end()
    held = sum(holds for holds, _ in check.rows)
    print(f"{held} of {len(check.rows)} hold")
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        lines = [f"| {'yes' if holds else '**no**'} | {what} |" for holds, what in check.rows]
        version = subprocess.run([nginx, "-v"], capture_output=True, text=True).stderr.strip()
        ours = subprocess.run([program, "--version"], capture_output=True, text=True).stdout.strip()
        head = f"{ours}; {version}; {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())}\n\n| holds | what |\n|---|---|\n"
        (options.out / "checks.md").write_text(head + "\n".join(lines) + "\n")
    sys.exit(held != len(check.rows))


if __name__ == "__main__":
    main()
