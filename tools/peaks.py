#!/usr/bin/env python3
"""Whether anything is killed in a control group with a limit on memory: every verb that runs a model, from the least memory on.

    cargo build --release
    python3 tools/peaks.py MODEL [MODEL ...] --source MODEL.gguf --out runs/...

For each packed model or mixture: the least memory that it says it runs with (it is asked with --ram 1MiB), and then run, bench, eval and serve in a
control group (version 1 or 2, made here, which needs root) whose limit is that least, a tenth more, half-way to the whole file, and the file with
its working memory; once with --ram of the limit and once without it, so that the program finds the limit by itself. Below the least both
have to refuse it and name it, with exit status 6. With --source, pack writes it with limits far below its size. A row of `rows.csv` for
each: what it said, the exit status, whether the group killed something, and the group's peak, which holds the system's cache of the files,
too, so that a run with files larger than the limit comes up to it. Ends with 1 if one was killed, failed, or went above its limit. Python's standard library only.
"""
import argparse
import csv
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from memory_limit import Group

MIB = 1 << 20
# Exit status of what has too little memory.
MEMORY = 6


def killed(group):
    """How many processes of the group were killed for memory so far."""
    file = group.dir / ("memory.oom_control" if group.old else "memory.events")
    found = re.search(r"oom_kill (\d+)", file.read_text())
    return int(found[1]) if found else 0


def served(a, command, group):
    """Starts a daemon, has it answer once, and ends it: (exit status, last line)."""
    path = Path(tempfile.mkdtemp()) / "d.sock"
    daemon = subprocess.Popen([*command, "--socket", str(path)], stderr=subprocess.PIPE, text=True, preexec_fn=group.enter)
    said = ""
    for line in daemon.stderr:
        said = line
        if "is ready" in line:
            break
    else:
        return daemon.wait(), said
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": a.tokens, "ignore_eos": True, "temperature": 0})
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(str(path))
        s.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        answer = s.makefile("rb").read().decode()
    if daemon.poll() is None:
        daemon.send_signal(signal.SIGINT)
    rc = daemon.wait()
    return (rc if " 200 " in answer.partition("\r\n")[0] else rc or 1), answer.partition("\r\n")[0]


def ran(command, group):
    r = subprocess.run(command, capture_output=True, text=True, preexec_fn=group.enter, stdin=subprocess.DEVNULL)
    return r.returncode, (r.stderr.strip().splitlines() or [""])[-1]


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("models", nargs="+", metavar="MODEL")
    p.add_argument("--source", help="a GGUF to pack")
    p.add_argument("--quant", default="q4_0", help="type to pack it as")
    p.add_argument("--tokens", type=int, default=8, help="of an answer")
    p.add_argument("-c", "--context", type=int, default=256)
    p.add_argument("--bin", default="target/release/dynamicinfer")
    p.add_argument("--out", type=Path, required=True)
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    text = Path(tempfile.mkdtemp()) / "text.txt"
    text.write_text("Once upon a time there was a king who had a green boat. " * 4)
    context = ["-c", str(a.context)]
    verbs = {
        "run": lambda model: [a.bin, "run", model, "Once upon a time", "-n", str(a.tokens), "--temp", "0", *context],
        "bench": lambda model: [a.bin, "bench", model, "-p", "512", "-n", str(a.tokens), "-r", "1"],
        "eval": lambda model: [a.bin, "eval", model, "--text", str(text), "-c", "64"],
        "serve": lambda model: [a.bin, "serve", model, "--parallel", "1", *context],
    }
    group, bad = Group("dynamicinfer-peaks"), 0
    with open(a.out / "rows.csv", "w") as file:
        table = csv.writer(file)
        table.writerow(["model", "verb", "limit_mib", "given", "expected", "exit", "killed", "peak_mib", "seconds", "said"])

        def row(name, verb, limit, given, expected, command):
            nonlocal bad
            subprocess.run(["sync"], check=True)
            Path("/proc/sys/vm/drop_caches").write_text("3")
            group.limit(limit)
            before, begin = killed(group), time.monotonic()
            rc, said = served(a, command, group) if verb == "serve" else ran(command, group)
            dead, peak = killed(group) - before, group.peak()
            wrong = dead > 0 or peak > limit or rc != expected or (expected == MEMORY and "MiB or more" not in said)
            bad += wrong
            values = [name, verb, round(limit / MIB), given, expected, rc, dead, round(peak / MIB), round(time.monotonic() - begin, 1), said.strip()[:240]]
            table.writerow(values)
            file.flush()
            print("WRONG" if wrong else "ok   ", *values[:9], values[9][:100], flush=True)

        for model in a.models:
            size = Path(model).stat().st_size
            for verb, command in verbs.items():
                # A verb's own context counts, so each has its own least.
                r = subprocess.run([*command(model), "--ram", "1MiB"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
                least = re.search(r"give --ram (\d+)MiB", r.stderr)
                if r.returncode != MEMORY or not least:
                    sys.exit(f"{verb} {model} --ram 1MiB did not say how much it takes: {r.stderr}")
                least = int(least[1]) * MIB
                name = Path(model).name
                for limit in dict.fromkeys([least, least + least // 10, (least + size) // 2, size + 192 * MIB]):
                    limit = limit // 4096 * 4096
                    row(name, verb, limit, "--ram", 0, [*command(model), "--ram", str(limit)])
                    row(name, verb, limit + limit // 4, "nothing", 0, command(model))
                row(name, verb, least, "--ram", MEMORY, [*command(model), "--ram", str(least - 2 * MIB)])
                row(name, verb, least // 2, "nothing", MEMORY, command(model))
        if a.source:
            for limit in [96 * MIB, 256 * MIB, Path(a.source).stat().st_size // 2]:
                packed = Path(tempfile.mkdtemp(dir=Path(a.source).parent)) / "packed.neurons"
                row(Path(a.source).name, "pack", limit, "nothing", 0, [a.bin, "pack", a.source, "--quant", a.quant, "-o", str(packed)])
                packed.unlink(missing_ok=True)
                packed.parent.rmdir()
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
