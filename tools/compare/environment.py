"""The Python that has llama.cpp: this one, or a scratch environment that is made once, from PyPI's source package."""
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

PACKAGE = "llama-cpp-python"
# A C++ compiler takes up to this much.
BYTES_OF_A_COMPILER = 1.5e9


def has_llama(python):
    return subprocess.run([python, "-c", "import llama_cpp"], capture_output=True).returncode == 0


def default_dir(cuda):
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "dynamicinfer" / ("llama-cpp-cuda" if cuda else "llama-cpp")


def find(wanted, cuda):
    """The path of a Python with llama.cpp; makes an environment at `wanted`, or its usual place, if there is none."""
    if not wanted and not cuda and has_llama(sys.executable):
        return sys.executable
    place = wanted or default_dir(cuda)
    python = place / "bin/python"
    if python.exists() and has_llama(python):
        return str(python)
    make(place, python, cuda)
    return str(python)


def make(place, python, cuda):
    missing = [tool for tool in ["gcc", "g++", *(["nvcc"] if cuda else [])] if not shutil.which(tool)]
    if missing:
        raise SystemExit(f"llama.cpp is compiled from source, and there is no {' and no '.join(missing)}; install it, or name an "
                         "environment that has llama-cpp-python: --env DIR")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    jobs = max(1, min(len(os.sched_getaffinity(0)), int(free / BYTES_OF_A_COMPILER)))
    print(f"llama.cpp is compiled once, for this machine{' and its card' if cuda else ''}, in {place}: about half an hour of one core "
          f"{'(several with CUDA) ' if cuda else ''}on {jobs}", file=sys.stderr)
    place.mkdir(parents=True, exist_ok=True)
    if subprocess.run([sys.executable, "-m", "venv", place]).returncode:
        raise SystemExit("no environment can be made; your system calls what is missing python3-venv")
    environment = {**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs)}
    command = [python, "-m", "pip", "install", "--verbose", "--no-binary", PACKAGE, PACKAGE]
    if cuda:
        environment["CMAKE_ARGS"] = "-DGGML_CUDA=on"
        # What pip has built without CUDA has the same name.
        command.insert(4, "--no-cache-dir")
    log, begin = place / "build.log", time.monotonic()
    with open(log, "w") as out, subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as build:
        progress(build.stdout, out, begin)
    if build.returncode or not has_llama(python):
        tail = "".join(log.read_text().splitlines(keepends=True)[-15:])
        raise SystemExit(f"{tail}\nllama.cpp could not be built; the whole of it is in {log}")
    print(f"\nbuilt in {(time.monotonic() - begin) / 60:.0f} minutes", file=sys.stderr)


def progress(lines, out, begin):
    """Writes down what comes, and says how far it is: on a terminal all the time, elsewhere once a minute."""
    said = begin
    for line in lines:
        out.write(line)
        step = re.search(r"\[(\d+)/(\d+)\]", line)
        now = time.monotonic()
        if step and (sys.stderr.isatty() or now - said > 60):
            said = now
            text = f"{step[1]} of {step[2]} files, {(now - begin) / 60:.0f} min"
            print(f"\r{text}" if sys.stderr.isatty() else text, end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
