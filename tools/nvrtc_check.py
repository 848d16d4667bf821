#!/usr/bin/env python3
"""Compiles the CUDA kernels with NVRTC, without a GPU or a toolkit.

For every source of kernels/ and every architecture: PTX by NVRTC, machine code by ptxas, with registers and spills of each
kernel. A spill is an error, but for those that are known (KNOWN_SPILLS), and so is a kernel that uses more registers than a
block's threads can have.

The PTX that the program embeds (kernels/ptx/, for compute_75, by the oldest NVRTC that is supported, so that old drivers take
it) has to be what that NVRTC makes of the sources, byte for byte; --write makes it anew.

Compilers come from PyPI into a virtual environment, --venv, made at the first run. Standard library only.
"""

import argparse
import concurrent.futures
import ctypes
import glob
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import venv

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
KERNELS = os.path.join(ROOT, "kernels")
PTX = os.path.join(KERNELS, "ptx")

# The oldest NVRTC for CUDA 12.1 makes PTX 8.1, which every driver from 530 on reads. The newest of CUDA 12 knows all cards.
OLDEST = {"nvidia-cuda-nvrtc-cu12": "12.1.105"}
NEWEST = {"nvidia-cuda-nvrtc-cu12": "12.9.86", "nvidia-cuda-nvcc-cu12": "12.9.86"}
# As src/device/cuda/kernels.rs has them.
OPTIONS = ["--std=c++17", "--fmad=false"]
EMBEDDED = "compute_75"
# RTX 20; A100; RTX 30; RTX 40; H100; RTX 50.
ARCHITECTURES = [75, 80, 86, 89, 90, 120]
# Bytes that are known to be spilled, at most: with four and eight columns of int8 the compiler loads codes so far ahead that
# it runs out of registers. One column, what a single user decodes with, never spills. Nobody has measured what these cost.
KNOWN_SPILLS = {
    "ffn_neurons_q8_0_4": 96,
    "ffn_neurons_q8_0_8": 260,
    "ffn_neurons_q4_0_4": 64,
    "ffn_neurons_q4_0_8": 244,
}
# Registers of a multiprocessor, the same for all of these.
REGISTERS = 65536


def fail(text):
    sys.exit(f"nvrtc_check: {text}")


def environment(folder, name, packages):
    """site-packages of a virtual environment with exactly these packages."""
    home = os.path.join(folder, name)
    wanted = json.dumps(packages, sort_keys=True)
    stamp = os.path.join(home, "packages.json")
    python = os.path.join(home, "bin", "python")
    if not (os.path.exists(stamp) and open(stamp).read() == wanted):
        venv.create(home, with_pip=True, clear=True)
        pins = [f"{package}=={version}" for package, version in packages.items()]
        done = subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", *pins],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        if done.returncode:
            fail(f"{' '.join(pins)} could not be installed; this check needs the Python package index once (later runs take "
                 f"what is in {home}). pip said:\n{done.stdout.strip()}")
        with open(stamp, "w") as file:
            file.write(wanted)
    found = glob.glob(os.path.join(home, "lib", "python*", "site-packages"))
    return found[0] if found else fail(f"{home} has no site-packages")


def only(pattern):
    found = [path for path in glob.glob(pattern) if ".alt." not in path]
    return found[0] if len(found) == 1 else fail(f"{pattern}: {len(found)} files, not one")


class Nvrtc:
    def __init__(self, site):
        self.lib = ctypes.CDLL(only(os.path.join(site, "nvidia", "cuda_nvrtc", "lib", "libnvrtc.so.*")))
        self.lib.nvrtcGetErrorString.restype = ctypes.c_char_p

    def check(self, code, what):
        if code:
            raise RuntimeError(f"{what}: {self.lib.nvrtcGetErrorString(code).decode()}")

    def text(self, program, name):
        size = ctypes.c_size_t()
        self.check(getattr(self.lib, f"nvrtcGet{name}Size")(program, ctypes.byref(size)), name)
        out = ctypes.create_string_buffer(size.value)
        self.check(getattr(self.lib, f"nvrtcGet{name}")(program, out), name)
        return out.raw.rstrip(b"\0")

    def ptx(self, source, headers, architecture):
        """PTX of the text of a source."""
        names = [os.path.basename(path).encode() for path in headers]
        texts = [read(path) for path in headers]
        array = ctypes.c_char_p * len(names)
        program = ctypes.c_void_p()
        name = os.path.basename(source)
        made = self.lib.nvrtcCreateProgram(
            ctypes.byref(program), read(source), name.encode(), len(names), array(*texts), array(*names))
        self.check(made, name)
        options = [option.encode() for option in [*OPTIONS, f"--gpu-architecture={architecture}"]]
        code = self.lib.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        log = self.text(program, "ProgramLog").decode().strip()
        if code or log:
            raise RuntimeError(f"{name} for {architecture}: {log or 'no message'}")
        ptx = self.text(program, "PTX")
        self.lib.nvrtcDestroyProgram(ctypes.byref(program))
        return ptx


def read(path):
    with open(path, "rb") as file:
        return file.read()


def sources():
    return sorted(glob.glob(os.path.join(KERNELS, "*.cu"))), sorted(glob.glob(os.path.join(KERNELS, "*.cuh")))


def embedded_text(site, source, headers):
    """What kernels/ptx/ has to hold for a source."""
    digest = hashlib.sha256()
    for part in [*OPTIONS, EMBEDDED, *OLDEST.values()]:
        digest.update(part.encode() + b"\0")
    for path in [source, *headers]:
        digest.update(read(path) + b"\0")
    head = f"// Made by tools/nvrtc_check.py --write from sources of sha256 {digest.hexdigest()}.\n"
    # Calls are numbered, in comments, through all that a process compiles: which that was depends on who was faster.
    return head.encode() + re.sub(rb"// callseq \d+", b"// callseq", Nvrtc(site).ptx(source, headers, EMBEDDED)) + b"\n"


def sizes(log):
    """(kernel, registers, spilled bytes, stack bytes) from what ptxas -v says."""
    kernel, rows, stack, spilled = None, [], 0, 0
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)'", line):
            kernel = match[1]
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, spilled = int(match[1]), int(match[2]) + int(match[3])
        elif (match := re.search(r"Used (\d+) registers", line)) and kernel:
            rows.append((kernel, int(match[1]), spilled, stack))
            kernel = None
    return rows


def compile_one(job):
    """Sizes of the kernels of a source on an architecture; runs in a process of its own."""
    site, source, headers, architecture = job
    ptx = Nvrtc(site).ptx(source, headers, f"compute_{architecture}")
    ptxas = os.path.join(site, "nvidia", "cuda_nvcc", "bin", "ptxas")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.ptx")
        with open(path, "wb") as file:
            file.write(ptx)
        done = subprocess.run([ptxas, "-v", f"-arch=sm_{architecture}", path, "-o", path + ".cubin"],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise RuntimeError(f"{os.path.basename(source)} for sm_{architecture}: {done.stdout}")
    # Block sizes are the launch bounds, which PTX keeps.
    bounds = dict(re.findall(r"\.entry (\w+)\(.*?\.maxntid (\d+)", ptx.decode(), re.S))
    return architecture, [(*row, int(bounds[row[0]])) for row in sizes(done.stdout)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="make kernels/ptx/ anew instead of checking it")
    parser.add_argument("--venv", default=os.path.join(ROOT, "target", "nvrtc"), help="where compilers are kept")
    parser.add_argument("--arch", type=int, action="append", help="only this one (75, 80, ...); may be given again")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at once")
    options = parser.parse_args()

    units, headers = sources()
    if not units:
        fail(f"{KERNELS} has no sources")
    os.makedirs(options.venv, exist_ok=True)
    oldest = environment(options.venv, "oldest", OLDEST)
    newest = environment(options.venv, "newest", NEWEST)
    architectures = options.arch or ARCHITECTURES
    problems = []
    # Each compiler in a process of its own: two NVRTC in one would be one, by their names.
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        jobs = [(newest, unit, headers, arch) for unit in units for arch in architectures]
        compiled = [pool.submit(compile_one, job) for job in jobs]
        embedded = [(unit, pool.submit(embedded_text, oldest, unit, headers)) for unit in units]
        table = {}
        for future in compiled:
            try:
                architecture, rows = future.result()
            except RuntimeError as error:
                fail(str(error))
            for kernel, registers, spilled, stack, block in rows:
                table.setdefault(kernel, {})[architecture] = (registers, spilled, stack)
                if spilled > KNOWN_SPILLS.get(kernel, 0):
                    problems.append(f"{kernel} spills {spilled} bytes on sm_{architecture}")
                if registers * block > REGISTERS:
                    problems.append(f"{kernel} needs {registers} registers for each of {block} threads on sm_{architecture}")
        os.makedirs(PTX, exist_ok=True)
        names = set()
        for unit, future in embedded:
            name = os.path.splitext(os.path.basename(unit))[0] + ".ptx"
            names.add(name)
            path, text = os.path.join(PTX, name), future.result()
            there = read(path) if os.path.exists(path) else b""
            if options.write:
                if there != text:
                    with open(path, "wb") as file:
                        file.write(text)
                    print(f"{os.path.relpath(path, ROOT)}: written, {len(text)} bytes")
            elif there != text:
                same = there.split(b"\n", 1)[0] == text.split(b"\n", 1)[0] and there
                why = "was changed by hand" if same else "is not made from these sources"
                problems.append(f"{os.path.relpath(path, ROOT)} {why}; run tools/nvrtc_check.py --write")
        for name in sorted(set(os.listdir(PTX)) - names):
            problems.append(f"kernels/ptx/{name} has no source; remove it")

    width = max(map(len, table))
    print(f"{'registers':{width}} " + " ".join(f"{'sm_' + str(arch):>8}" for arch in architectures))
    for kernel in sorted(table):
        cells = []
        for arch in architectures:
            registers, spilled, stack = table[kernel][arch]
            cells.append(f"{registers}{f'+{spilled}B' if spilled else ''}{f'/{stack}' if stack and not spilled else ''}")
        print(f"{kernel:{width}} " + " ".join(f"{cell:>8}" for cell in cells))
    print(f"{len(table)} kernels on {len(architectures)} architectures; +nB is spilled, /n a stack frame of n bytes")
    if problems:
        fail("\n" + "\n".join(problems))


if __name__ == "__main__":
    main()
