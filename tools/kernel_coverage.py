#!/usr/bin/env python3
"""Which functions of src/cpu the laws with emulated instructions run: for every instruction set, whatever the machine at hand has.

    rustup component add llvm-tools
    python3 tools/kernel_coverage.py [--out runs/...]

Builds the tests of tools/emulated/laws with LLVM's counters in a folder of its own, runs them, and reads for each function, and for each
instance of a generic one, how often it was called. Functions that only the compiler calls (`const fn`) are left out. Prints the calls by file,
then each function that no law has called. The exit status is 1 where a function of an instruction set is among them. Takes some 30 minutes on
two cores: counters make the emulated instructions slower.
"""
import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Kernels; the others of src/cpu drive them, or are what they are compared with.
OF_A_SET = re.compile(r"src/cpu/(avx2|avx512|portable)")


def llvm(name):
    """A program of rustup's llvm-tools."""
    sysroot = subprocess.run(["rustc", "--print", "sysroot"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    found = list(Path(sysroot).glob(f"lib/rustlib/*/bin/{name}"))
    if not found:
        sys.exit(f"{name} is missing: rustup component add llvm-tools")
    return found[0]


def run_laws(target, counters):
    """Builds and runs the laws with counters. Returns the program that has run."""
    with tempfile.TemporaryDirectory() as folder:
        wrapper = Path(folder) / "counted"
        # Members of the workspace alone: what they depend on stays as cargo has it.
        wrapper.write_text('#!/bin/sh\nexec "$@" -C instrument-coverage\n')
        wrapper.chmod(0o755)
        environment = dict(os.environ, RUSTC_WORKSPACE_WRAPPER=str(wrapper), CARGO_TARGET_DIR=str(target),
                           LLVM_PROFILE_FILE=str(counters / "%p-%m.profraw"))
        command = ["cargo", "test", "-p", "emulated-laws", "--test", "laws"]
        built = subprocess.run([*command, "--no-run", "--message-format=json"], cwd=ROOT, env=environment, check=True,
                               stdout=subprocess.PIPE, text=True).stdout
        programs = [json.loads(line) for line in built.splitlines() if line.startswith("{")]
        program = [m["executable"] for m in programs if m.get("executable") and m["target"]["name"] == "laws"][-1]
        subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return program


def functions(program, counters):
    """[(file, line, name, calls)] of each instance of each function in src/cpu."""
    data = counters / "laws.profdata"
    subprocess.run([llvm("llvm-profdata"), "merge", "-sparse", "-o", data, *sorted(counters.glob("*.profraw"))], check=True)
    told = subprocess.run([llvm("llvm-cov"), "export", "--skip-expansions", "-instr-profile", data, program],
                          check=True, capture_output=True, text=True).stdout
    found = []
    for function in json.loads(told)["data"][0]["functions"]:
        path = function["filenames"][0]
        if "/src/cpu/" in path and "/src/cpu/emulated/" not in path:
            found.append((path[path.index("src/cpu/"):], function["regions"][0][0], function["name"], function["count"]))
    return found


def at_compile_time(path, line):
    """Whether the function at a line of a file is a `const fn`."""
    lines = (ROOT / path).read_text().splitlines()
    return re.search(r"\bconst (unsafe )?fn\b", lines[line - 1]) is not None


def readable(name):
    """A mangled name of Rust's second scheme, as far as it can be read without a demangler: its parts that are words."""
    return "::".join(part for part in re.findall(r"\d+_?([a-z_][a-z_0-9]{2,}?)(?=\d|[A-Z]|$)", name)[-3:]) or name


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, help="a folder for kernel-coverage.csv and kernel-coverage.txt")
    arguments.add_argument("--target", type=Path, default=ROOT / "target" / "kernel-coverage", help="where cargo builds")
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counters = Path(folder)
        instances = functions(run_laws(given.target, counters), counters)
    by_place = defaultdict(list)
    for path, line, name, calls in instances:
        by_place[path, line].append((name, calls))
    lines = [f"{'file':34}{'functions':>10}{'called':>8}{'instances':>11}{'called':>8}"]
    rows, missing = ["file,line,instances,called"], []
    by_file = defaultdict(lambda: [0, 0, 0, 0])
    for (path, line), found in sorted(by_place.items()):
        called = sum(calls > 0 for _, calls in found)
        if called == 0 and at_compile_time(path, line):
            continue
        rows.append(f"{path},{line},{len(found)},{called}")
        for index, number in enumerate([1, called > 0, len(found), called]):
            by_file[path][index] += number
        if called == 0:
            missing.append((path, line, readable(found[0][0])))
    lines += [f"{path:34}{f:>10}{c:>8}{i:>11}{d:>8}" for path, (f, c, i, d) in sorted(by_file.items())]
    lines += ["", f"{len(missing)} functions that no law has called:"]
    lines += [f"  {path}:{line} {name}" for path, line, name in missing]
    print("\n".join(lines))
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "kernel-coverage.csv").write_text("\n".join(rows) + "\n")
        (given.out / "kernel-coverage.txt").write_text("\n".join(lines) + "\n")
    sys.exit(any(OF_A_SET.match(path) for path, _, _ in missing))


if __name__ == "__main__":
    main()
