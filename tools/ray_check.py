#!/usr/bin/env python3
"""Tries configs/ray with PyPI's ray on this machine, and says what it found as Markdown.

    python3 -m venv ray-env && ray-env/bin/pip install "ray[serve]"
    ray-env/bin/python tools/ray_check.py target/release/dynamicinfer [--requests 1000] [--out DIR]

The demo model, one thread for each replica, so that two have a core each. Ends with 1 if something does not hold: every one of the
requests is answered whole or breaks off visibly although a replica is killed in their middle; a session stays where it was; replicas come
with the queue and go without it; another model comes without a failed request.
"""

import argparse
import asyncio
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
lines, failed = [], []


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


async def ask(http, i, tokens=24, stream=False, url=URL, headers=None, length_only=False):
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


async def many(http, count, at_once, middle=None, tokens=24):
    """So many requests, every second one a stream, so many at a time; `middle` is called when half of them are begun."""
    room, results = asyncio.Semaphore(at_once), []

    async def one(i):
        async with room:
            if i == count // 2 and middle:
                await middle()
            results.append(await ask(http, i, tokens=tokens, stream=i % 2 == 0))

    await asyncio.gather(*(one(i) for i in range(count)))
    return results


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


async def killed(http, serve, count, program):
    """A replica is killed in the middle."""
    victims = []

    async def kill():
        victims.append(actors()[0])
        os.kill(victims[0], signal.SIGKILL)

    before = len(daemons(program))
    results = await many(http, count, 8, kill)
    ends = {}
    for end, *_ in results:
        ends[end] = ends.get(end, 0) + 1
    async with http.get(f"{URL}/health") as got:
        retried = (await got.json())["retried"]
    told = ", ".join(f"{n:,} {end}" for end, n in sorted(ends.items(), key=lambda e: -e[1]))
    bad = sum(n for end, n in ends.items() if end != "whole" and not end.startswith("broken"))
    hold(len(results) == count and bad == 0, f"{count:,} requests, 8 at a time, half of them streams, a replica killed (-9) in the middle: {told}; "
         f"{retried} times a request went to another replica; none lost silently")
    hold(len(victims) == 1 and victims[0] not in actors(), f"the killed replica's process is gone ({before} daemons before)")
    took = await until(lambda: replicas(serve) >= 2, 60)
    hold(took is not None, f"Ray has started another one: two again {took or 60:.1f} s after the last request")
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
            for into, client, url in ((times[0], direct, "http://d"), (times[1], http, URL)):
                end, took, _ = await ask(client, i, tokens=1, url=url)
                assert end == "whole", end
                into.append(took * 1e3)
        await direct.close()
        own.terminate()
        await own.wait()
    (a, b), (c, d) = [(statistics.median(t), percentile(t, 0.99)) for t in times]
    say(f"- latency of an answer of one token, {rounds} in turns: direct socket {a:.1f} ms in the median and {b:.1f} in the 99th percentile, through Ray "
        f"{c:.1f} and {d:.1f}: Ray adds {c - a:.1f} and {d - b:.1f} ms")


async def run(args):
    """Everything, in order."""
    # On a machine that others keep busy, Ray's own processes start slowly.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    os.environ.setdefault("RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S", "60")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve
    import dynamicinfer_serve

    program = str(Path(args.program).resolve())
    ray.init(num_cpus=8, include_dashboard=False, logging_level="ERROR", log_to_driver=args.verbose,
             runtime_env={"env_vars": {"PYTHONPATH": str(Path(dynamicinfer_serve.__file__).parent)}})
    serve.start(http_options={"host": "127.0.0.1", "port": 8000})

    def deploy(**settings):
        app = dynamicinfer_serve.app({"program": program, "options": "-t 1", "up_after": 2, "down_after": 5, **settings})
        serve.run(app, name="default", route_prefix="/", blocking=False)

    say(f"ray {ray.__version__}, {os.cpu_count()} cores\n")
    deploy(least=2, most=2)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        assert (await ask(http, 0))[0] == "whole"
        hold(replicas(serve) == 2, "two replicas, a daemon each")
        seen = {(await ask(http, i, tokens=1))[2] for i in range(40)}
        hold(len(seen) == 2, f"requests without a session go to {len(seen)} replicas")
        for session in ("one", "two", "three"):
            seen = [(await ask(http, i, tokens=1, headers={"x-session-id": session}))[2] for i in range(20)]
            hold(len(set(seen)) == 1, f"20 requests of session '{session}' go to {len(set(seen))} replica")
        await latency(http, program, args.rounds)
        await killed(http, serve, args.requests, program)
        deploy(least=1, most=2, target=2)
        took = await until(lambda: replicas(serve) == 1, 90)
        hold(took is not None, f"without requests one replica is left after {took or 90:.0f} s")
        load = asyncio.create_task(many(http, 160, 16, tokens=64))
        took = await until(lambda: replicas(serve) == 2, 90)
        hold(took is not None, f"under 16 requests at once there are two after {took or 90:.0f} s")
        ends = [end for end, *_ in await load]
        hold(all(end == "whole" for end in ends), f"of {len(ends)} answers meanwhile {ends.count('whole')} are whole")
        took = await until(lambda: replicas(serve) == 1, 90)
        hold(took is not None, f"{took or 90:.0f} s after the last there is one again")
        # Another model: each replica is replaced by one that has it, and answers under way are waited for.
        asked = asyncio.create_task(many(http, 120, 4))
        await asyncio.sleep(1)
        await asyncio.to_thread(deploy, least=1, most=2, options="-t 1 --name another")
        ends = [end for end, *_ in await asked]
        hold(all(end == "whole" for end in ends), f"a rolling change of model under 4 requests at once: {ends.count('whole')} of {len(ends)} answers are whole")
        async with http.get(f"{URL}/v1/models") as got:
            name = (await got.json())["data"][0]["id"]
        hold(name == "another", f"and then the model is '{name}'")
    serve.shutdown()
    ray.shutdown()
    hold(await until(lambda: not daemons(program), 20) is not None, "after the end no daemon is left")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--verbose", action="store_true", help="what replicas say, too")
    args = parser.parse_args()
    asyncio.run(run(args))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "checks.md").write_text("\n".join(lines) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
