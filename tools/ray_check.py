#!/usr/bin/env python3
"""Tries configs/ray with PyPI's ray on this machine, and says what it found as Markdown.

    python3 -m venv ray-env && ray-env/bin/pip install "ray[serve]>=2.60"
    ray-env/bin/python tools/ray_check.py target/release/dynamicinfer [--requests 1000] [--only latency] [--out DIR]

The demo model, one thread for each replica, so that two have a core each. Ends with 1 if something does not hold: every one of the
requests is answered whole, or is a stream and breaks off visibly, although a replica is killed in their middle; a session stays where it was; replicas come
with the queue and go without it; another model comes without a failed request.
"""

import argparse
import asyncio
import csv
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).parent.parent / "configs" / "ray"))
URL = "http://127.0.0.1:8000"
PROXY_SECONDS = 300
SESSIONS = 16
lines, failed, raw = [], [], []


def say(text):
    """A line of the report, seen at once."""
    lines.append(text)
    print(text, flush=True)


def hold(good, text):
    """A line that has to be true."""
    say(f"- {'held' if good else '**NOT HELD**'}: {text}")
    if not good:
        failed.append(text)


def percentile(values, share):
    """The value below which this share lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def ask(http, i, tokens=24, stream=False, url=URL, headers=None):
    """One answer: (how it ended, seconds, replica). `whole`, `broken` (visibly), or what went wrong."""
    body = {"prompt": f"Story {i}: once upon a time", "max_tokens": tokens, "seed": i, "stream": stream, "ignore_eos": True}
    start = time.monotonic()
    try:
        async with http.post(f"{url}/v1/completions", json=body, headers=headers or {}) as got:
            text = (await got.read()).decode()
            replica = got.headers.get("x-replica", "")
            if got.status != 200:
                return f"status {got.status}", time.monotonic() - start, replica
    except (aiohttp.ClientError, asyncio.IncompleteReadError) as error:
        return f"broken: {type(error).__name__}", time.monotonic() - start, ""
    took = time.monotonic() - start
    if not stream:
        answer = json.loads(text)
        return ("whole" if answer["usage"]["completion_tokens"] == tokens else "lost"), took, replica
    if "data: [DONE]" in text:
        return ("whole" if text.count("data: {") >= 2 else "lost"), took, replica
    return ("broken: error event" if '"error"' in text else "lost"), took, replica


async def many(name, http, count, at_once, middle=None, tokens=24):
    """So many requests, every second one a stream, so many at a time; `middle` is called when half of them are begun."""
    room, results = asyncio.Semaphore(at_once), []

    async def one(i):
        async with room:
            if i == count // 2 and middle:
                await middle()
            begun = time.monotonic()
            results.append(await ask(http, i, tokens=tokens, stream=i % 2 == 0))
            end, took, replica = results[-1]
            raw.append((name, i, "stream" if i % 2 == 0 else "whole body", f"{begun:.3f}", f"{took * 1e3:.2f}", end, replica))

    await asyncio.gather(*(one(i) for i in range(count)))
    return results


def load():
    """How busy the machine is, for lines with times."""
    return f"load {os.getloadavg()[0]:.1f}"


def replicas(serve):
    """Running replicas of the daemon, as Ray counts them."""
    states = serve.status().applications["default"].deployments["Replica"].replica_states
    return sum(n for state, n in states.items() if str(state).endswith("RUNNING"))


async def until(what, seconds):
    """Waits for something to become true; the seconds that it took, or None."""
    start = time.monotonic()
    while not what():
        if time.monotonic() - start > seconds:
            return None
        await asyncio.sleep(0.5)
    return time.monotonic() - start


def actors():
    """Process ids of the replicas' actors."""
    found = []
    for proc in Path("/proc").iterdir():
        if proc.name.isdigit():
            try:
                name = (proc / "cmdline").read_bytes().split(b"\0")[0]
            except OSError:
                continue
            if name.startswith(b"ray::ServeReplica:default:Replica"):
                found.append(int(proc.name))
    return found


def daemons(program):
    """Process ids of the daemons under them."""
    found = []
    for proc in Path("/proc").iterdir():
        if proc.name.isdigit():
            try:
                words = (proc / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[0].decode(errors="replace") == program and b"dynamicinfer-ray-" in b" ".join(words):
                found.append(int(proc.name))
    return found


async def killed(http, serve, name, count, program):
    """A replica is killed in the middle."""
    victims = []

    async def kill():
        victims.append(actors()[0])
        at.append(time.monotonic())
        os.kill(victims[0], signal.SIGKILL)

    async def retried():
        async with http.get(f"{URL}/health") as got:
            return (await got.json())["retried"]

    before, at = len(daemons(program)), []
    others = await retried()
    results = await many(name, http, count, 8, kill)
    ends = {}
    for end, *_ in results:
        ends[end] = ends.get(end, 0) + 1
    others = await retried() - others
    told = ", ".join(f"{n:,} {end}" for end, n in sorted(ends.items(), key=lambda e: -e[1]))
    # Row: name, number, kind, begun, took, end, replica. Only a stream that has begun may break off.
    bad = sum(row[5] != "whole" and not (row[2] == "stream" and row[5].startswith("broken")) for row in raw if row[0] == name)
    hold(len(results) == count and bad == 0, f"{count:,} requests, 8 at a time, half of them streams, a replica killed (-9) in the middle: {told}; "
         f"{others} times a request went to another replica; none lost silently, and what broke off were streams")
    hold(len(victims) == 1 and victims[0] not in actors(), f"the killed replica's process is gone ({before} daemons before)")
    hold(await until(lambda: replicas(serve) >= 2, 180) is not None, "Ray has started another one")
    answers = [(float(row[3]), float(row[3]) + float(row[4]) / 1e3, row[6]) for row in raw if row[0] == name and row[5] == "whole"]
    known = {replica for begun, _, replica in answers if begun < at[0]}
    first = min((done for _, done, replica in answers if replica not in known), default=None)
    say(f"- the first answer of the new one came {first - at[0]:.1f} s after the kill ({load()})" if first else "- the new one came after the last request")
    hold(await until(lambda: len(daemons(program)) == 2, 20) is not None, f"and nothing of the killed one's daemon is left: {len(daemons(program))} run")


async def latency(http, program, rounds):
    """In turns: the direct socket of a daemon, and Ray's HTTP before two."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/socket"
        own = await asyncio.create_subprocess_exec(program, "serve", "demo", "--socket", path, "-t", "1", stderr=asyncio.subprocess.DEVNULL)
        direct = aiohttp.ClientSession(connector=aiohttp.UnixConnector(path))
        while True:
            try:
                async with direct.get("http://d/ready") as got:
                    if got.status == 200:
                        break
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
        times = ([], [])
        for i in range(rounds):
            for name, into, client, url in (("direct", times[0], direct, "http://d"), ("through ray", times[1], http, URL)):
                begun = time.monotonic()
                end, took, replica = await ask(client, i, tokens=1, url=url)
                assert end == "whole", end
                into.append(took * 1e3)
                raw.append((f"latency {name}", i, "whole body", f"{begun:.3f}", f"{took * 1e3:.2f}", end, replica))
        await direct.close()
        own.terminate()
        await own.wait()
    (a, b), (c, d) = [(statistics.median(t), percentile(t, 0.99)) for t in times]
    say(f"- latency of an answer of one token, {rounds} in turns: direct socket {a:.1f} ms in the median and {b:.1f} in the 99th percentile, through Ray "
        f"{c:.1f} and {d:.1f}: Ray adds {c - a:.1f} and {d - b:.1f} ms ({load()})")


async def sessions(http, serve):
    """Who answers whom."""
    hold(replicas(serve) == 2, "two replicas, a daemon each")
    seen = {(await ask(http, i, tokens=1))[2] for i in range(40)}
    hold(len(seen) == 2, f"requests without a session go to {len(seen)} replicas")
    homes = await places(http)
    kept = sum(len(seen) == 1 for seen in homes.values())
    used = len(set().union(*homes.values()))
    hold(kept == SESSIONS and used == 2, f"{kept} of {SESSIONS} sessions with ten requests each, all sessions at once, stay with one replica; {used} replicas have some")
    return homes


async def places(http):
    """Which replicas answered each session."""
    async def one(session):
        return {(await ask(http, i, tokens=1, headers={"x-session-id": session}))[2] for i in range(10)}

    names = [f"session {i}" for i in range(SESSIONS)]
    return dict(zip(names, await asyncio.gather(*(one(name) for name in names))))


async def moved(http, homes):
    """A replica that comes takes its share of the sessions, as one that is new among two does."""
    now = await places(http)
    lives = set().union(*now.values())
    left = [name for name, seen in homes.items() if seen <= lives]
    same = sum(now[name] == homes[name] for name in left)
    one = sum(len(seen) == 1 for seen in now.values())
    hold(one == SESSIONS, f"{one} sessions have one replica again; {same} of the {len(left)} of the replica that lived are still there, the new one has the rest")


async def scaled(http, serve, deploy):
    """Replicas come with the load and go without it."""
    deploy(least=1, most=2, target=2)
    took = await until(lambda: replicas(serve) == 1, 180)
    hold(took is not None, "deployed with one to two replicas and without requests, it has one")
    asked = asyncio.create_task(many("autoscaling", http, 160, 16, tokens=64))
    took = await until(lambda: replicas(serve) == 2, 180)
    hold(took is not None, f"under 16 requests at once there are two after {took or 180:.0f} s ({load()})")
    ends = [end for end, *_ in await asked]
    hold(all(end == "whole" for end in ends), f"of {len(ends)} answers meanwhile {ends.count('whole')} are whole")
    took = await until(lambda: replicas(serve) == 1, 180)
    hold(took is not None, f"{took or 180:.0f} s after the last there is one again")


async def changed(http, deploy):
    """Another model: each replica is replaced by one that has it, and answers under way are waited for."""
    asked = asyncio.create_task(many("another model", http, 120, 4))
    await asyncio.sleep(1)
    await asyncio.to_thread(deploy, least=1, most=2, options="-t 1 --name another")
    ends = [end for end, *_ in await asked]
    hold(all(end == "whole" for end in ends), f"a rolling change of model under 4 requests at once: {ends.count('whole')} of {len(ends)} answers are whole")
    async with http.get(f"{URL}/v1/models") as got:
        name = (await got.json())["data"][0]["id"]
    hold(name == "another", f"and then the model is '{name}'")


async def run(args):
    """Everything, in order."""
    # Ray makes its workers, and so a replica's daemon, 15 nicer than what started them: beside busy compilers its HTTP proxy did not get as
    # far as its first line within a minute.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", str(PROXY_SECONDS))
    os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S", "60")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve
    from ray.serve._private import api

    # How long the start waits for the proxy; Ray has no setting for it.
    api.HTTP_PROXY_TIMEOUT = PROXY_SECONDS
    import dynamicinfer_serve

    program = str(Path(args.program).resolve())
    ray.init(num_cpus=8, include_dashboard=False, logging_level="ERROR", log_to_driver=args.verbose,
             runtime_env={"env_vars": {"PYTHONPATH": str(Path(dynamicinfer_serve.__file__).parent)}})
    took = time.monotonic()
    serve.start(http_options={"host": "127.0.0.1", "port": 8000})
    took = time.monotonic() - took

    def deploy(**settings):
        app = dynamicinfer_serve.app({"program": program, "options": "-t 1", "up_after": 2, "down_after": 5, **settings})
        serve.run(app, name="default", route_prefix="/", blocking=False)

    say(f"ray {ray.__version__}, {os.cpu_count()} cores, workers {os.environ['RAY_worker_niceness']} nicer than this, which is {os.nice(0)} nice\n")
    say(f"- Ray's HTTP proxy is there after {took:.0f} s ({load()})")
    took = time.monotonic()
    deploy(least=2, most=2)
    say(f"- and two replicas after another {time.monotonic() - took:.0f} s")
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        assert (await ask(http, 0))[0] == "whole"
        if args.only != "latency":
            homes = await sessions(http, serve)
        await latency(http, program, args.rounds)
        if args.only != "latency":
            await killed(http, serve, "killed", args.requests, program)
            await moved(http, homes)
            # Only a few answers are under way in a replica that dies: more deaths show what becomes of them.
            for i in range(args.deaths):
                await killed(http, serve, f"killed again {i + 1}", 200, program)
            await scaled(http, serve, deploy)
            await changed(http, deploy)
    serve.shutdown()
    ray.shutdown()
    hold(await until(lambda: not daemons(program), 20) is not None, "after the end no daemon is left")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--deaths", type=int, default=5, help="more rounds of 200 requests with a replica that is killed")
    parser.add_argument("--only", choices=["latency"], help="times only, without the rest")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--verbose", action="store_true", help="what replicas say, too")
    args = parser.parse_args()
    asyncio.run(run(args))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "checks.md").write_text("\n".join(lines) + "\n")
        with (args.out / "raw.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("check", "request", "kind", "begun_s", "took_ms", "end", "replica"), *raw])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
