#!/usr/bin/env python3
"""Compiles the CUDA kernels with NVRTC and assembles them, without a GPU or a toolkit.

For every source of kernels/ and every architecture: PTX by NVRTC, machine code by ptxas, with registers and spills of each
kernel. A spill is an error, but for those that are known (KNOWN_SPILLS), and so is a kernel that uses more registers than a
block's threads can have.

The PTX that the program embeds (kernels/ptx/, for compute_75, by the oldest NVRTC that is supported, so that old drivers take
it) is compressed, one file for each source. Decompressed it has to be what that NVRTC makes of the sources, byte for byte; --write
makes it anew, and --show NAME prints it. The ptxas of several releases has to assemble it, each for every card that it knows: a
driver does what the ptxas of its release does.

--all-versions shows what the program's list of NVRTC versions (SHOWN in src/device/cuda/nvrtc.rs) says: each makes machine code
of every kernel, as the program asks for it, and the ptxas beside it assembles the embedded PTX; for a few cards.

Compilers come from PyPI into a virtual environment, --venv, made at the first run. Standard library only.
"""

import argparse
import concurrent.futures
import ctypes
import glob
import hashlib
import itertools
import json
import lzma
import os
import re
import subprocess
import sys
import tempfile
import venv

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
KERNELS = os.path.join(ROOT, "kernels")
PTX = os.path.join(KERNELS, "ptx")

# Releases of CUDA, with the newest NVRTC and ptxas that the package index has of each (of 12.7 it has none). The program's list
# and the documents name the same ones: drift().
RELEASES = {
    "12.1": ("12.1.105", "12.1.105"),
    "12.2": ("12.2.140", "12.2.140"),
    "12.3": ("12.3.107", "12.3.107"),
    "12.4": ("12.4.127", "12.4.131"),
    "12.5": ("12.5.82", "12.5.82"),
    "12.6": ("12.6.85", "12.6.85"),
    "12.8": ("12.8.93", "12.8.93"),
    "12.9": ("12.9.86", "12.9.86"),
    "13.0": ("13.0.88", "13.0.88"),
    "13.1": ("13.1.115", "13.1.115"),
    "13.2": ("13.2.86", "13.2.86"),
    "13.3": ("13.3.33", "13.3.73"),
    "13.4": ("13.4.92", "13.4.92"),
    "13.5": ("13.5.37", "13.5.37"),
}
PROGRAM = "src/device/cuda/nvrtc.rs"
DOCUMENTS = ["docs/gpu.md", "kernels/README.md"]
# Makes the embedded PTX: of a version that every driver from 530 on reads.
OLDEST, PTX_VERSION = "12.1", "8.1"
# Registers and spills are those of this one.
MEASURED = "12.9"
# Whose ptxas assembles the embedded PTX each time.
ASSEMBLERS = ["12.1", "12.9", "13.5"]
# Form of a compressed file: what xz calls .lzma, which has no name and no time in it, so that the same text makes the same bytes.
# src/device/cuda/kernels.rs has the decoder.
COMPRESSION = {
    "format": lzma.FORMAT_ALONE,
    "filters": [{"id": lzma.FILTER_LZMA1, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 4 << 20, "lc": 3, "pb": 0, "nice_len": 273}],
}
# All compressed files together may have this many bytes.
MAX_COMPRESSED = 1_000_000
# As src/device/cuda/kernels.rs has them.
OPTIONS = ["--std=c++17", "--fmad=false"]
EMBEDDED = "compute_75"
# RTX 20; A100; RTX 30; RTX 40; H100; RTX 50.
ARCHITECTURES = [75, 80, 86, 89, 90, 120]
# Those, Jetson Orin and B200: what the embedded PTX is assembled for.
TARGETS = [75, 80, 86, 87, 89, 90, 100, 120]
# Bytes that are known to be spilled, at most: with four and eight columns of int8 the compiler loads codes so far ahead that
# it runs out of registers. One column, what a single user decodes with, spills a few bytes. Nobody has measured what these cost.
KNOWN_SPILLS = {
    "ffn_neurons_q8_0_1": 8,
    "ffn_neurons_q8_0_4": 96,
    "ffn_neurons_q8_0_8": 268,
    "ffn_neurons_q4_0_4": 84,
    "ffn_neurons_q4_0_8": 268,
    # Since rows may be a part of what a call computes, and neurons have rows of several types.
    "dense_down_f16": 24,
    "ffn_down_any_8": 8,
    "linear_q8_0_1": 16,
    "linear_q8_0_2": 8,
    "linear_q8_0_4": 16,
}
# Registers of a multiprocessor, the same for all of these.
REGISTERS = 65536


def fail(text):
    sys.exit(f"nvrtc_check: {text}")


def environment(folder, release):
    """site-packages of a virtual environment with exactly the compilers of this release."""
    home = os.path.join(folder, release)
    suffix = "-cu12" if release.startswith("12.") else ""
    packages = dict(zip([f"nvidia-cuda-nvrtc{suffix}", f"nvidia-cuda-nvcc{suffix}"], RELEASES[release]))
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
    def __init__(self, site, release):
        library = os.path.join(site, "nvidia", "*", "lib", "libnvrtc{}.so.*")
        # 13.0 does not look beside itself for its other half, but takes one that is loaded.
        ctypes.CDLL(only(library.format("-builtins")))
        self.lib = ctypes.CDLL(only(library.format("")))
        self.lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.check(self.lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "version")
        # A process may have loaded another one before, with the same file name.
        if f"{major.value}.{minor.value}" != release:
            raise RuntimeError(f"the NVRTC of {release} in {site} says that it is {major.value}.{minor.value}")

    def check(self, code, what):
        if code:
            raise RuntimeError(f"{what}: {self.lib.nvrtcGetErrorString(code).decode()}")

    def text(self, program, name):
        size = ctypes.c_size_t()
        self.check(getattr(self.lib, f"nvrtcGet{name}Size")(program, ctypes.byref(size)), name)
        out = ctypes.create_string_buffer(size.value)
        self.check(getattr(self.lib, f"nvrtcGet{name}")(program, out), name)
        return out.raw.rstrip(b"\0")

    def make(self, source, headers, architecture, what):
        """PTX or CUBIN of the text of a source."""
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
        made = self.text(program, what)
        self.lib.nvrtcDestroyProgram(ctypes.byref(program))
        return made

    def targets(self):
        count = ctypes.c_int()
        self.check(self.lib.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "targets")
        targets = (ctypes.c_int * count.value)()
        self.check(self.lib.nvrtcGetSupportedArchs(targets), "targets")
        return set(targets)


def read(path):
    with open(path, "rb") as file:
        return file.read()


def text_of(name):
    return read(os.path.join(ROOT, name)).decode()


def sources():
    # Those that take longest are mostly the longest ones: begun first, none is left at the end for one core.
    units = sorted(glob.glob(os.path.join(KERNELS, "*.cu")), key=lambda path: (-os.path.getsize(path), path))
    return units, sorted(glob.glob(os.path.join(KERNELS, "*.cuh")))


def embedded_path(source):
    return os.path.join(PTX, os.path.splitext(os.path.basename(source))[0] + ".ptx.lzma")


def compress(text):
    return lzma.compress(text, **COMPRESSION)


def decompress(path):
    """Text of a compressed file; nothing of one that is not there or damaged."""
    try:
        return lzma.decompress(read(path), format=lzma.FORMAT_ALONE)
    except (FileNotFoundError, lzma.LZMAError):
        return b""


def embedded_text(site, source, headers):
    """What kernels/ptx/ has to hold for a source."""
    digest = hashlib.sha256()
    for part in [*OPTIONS, EMBEDDED, RELEASES[OLDEST][0]]:
        digest.update(part.encode() + b"\0")
    for path in [source, *headers]:
        digest.update(read(path) + b"\0")
    head = f"// Made by tools/nvrtc_check.py --write from sources of sha256 {digest.hexdigest()}.\n"
    ptx = Nvrtc(site, OLDEST).make(source, headers, EMBEDDED, "PTX")
    # Calls are numbered, in comments, through all that a process compiles: which that was depends on who was faster.
    return head.encode() + re.sub(rb"// callseq \d+", b"// callseq", ptx) + b"\n"


def faults(ptx):
    """What no driver, or no old one, would take of PTX that is embedded."""
    found = []
    for name in re.findall(r"^\s*\.extern\s+\.func\s+(?:\([^)]*\)\s*)?([\w$]+)", ptx, re.M):
        found.append(f"calls {name}, which is nowhere: the compiler knows no such function")
    version = re.search(r"^\s*\.version\s+(\S+)", ptx, re.M)
    if not version or version[1] != PTX_VERSION:
        found.append(f"is of PTX {version[1] if version else 'no version'}, not {PTX_VERSION}, which the oldest drivers read")
    return found


def listed(program):
    """The releases that the program's source says are shown."""
    found = re.search(r"\bSHOWN: \[\(u32, u32\); \d+\] = \[(.*?)\];", program, re.S)
    return [f"{major}.{minor}" for major, minor in re.findall(r"\((\d+), (\d+)\)", found[1])] if found else []


def drift(program, documents):
    """Where the program's source and the documents, texts by name, name other releases than RELEASES."""
    names = ", ".join(RELEASES)
    found = []
    if listed(program) != list(RELEASES):
        found.append(f"{PROGRAM} says that NVRTC {', '.join(listed(program))} were shown to compile the kernels, not {names}")
    for name, text in documents.items():
        if not re.search(rf"(?<![\d.,] ){re.escape(names)}(?!, \d)", " ".join(text.split())):
            found.append(f"{name} does not say that NVRTC {names} were shown to compile the kernels")
    return found


def known(help_text):
    """Cards that a ptxas assembles for, of what it says of itself."""
    return {int(number) for number in re.findall(r"'sm_(\d+)'", help_text)}


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


def ptxas(site, *arguments):
    program = only(os.path.join(site, "nvidia", "*", "bin", "ptxas"))
    return subprocess.run([program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def assemble(site, ptx, architecture):
    """What ptxas says of PTX that it takes."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.ptx")
        with open(path, "wb") as file:
            file.write(ptx)
        done = ptxas(site, "-v", f"-arch=sm_{architecture}", path, "-o", os.path.join(folder, "kernel.cubin"))
    if done.returncode:
        raise RuntimeError(done.stdout.strip())
    return done.stdout


def refusal(call, *arguments):
    """The words of one that fails, else None. In a process of the pool, like all that follows."""
    try:
        call(*arguments)
    except RuntimeError as error:
        return str(error)


def compile_one(site, source, headers, architecture):
    """Sizes of the kernels of a source on an architecture."""
    ptx = Nvrtc(site, MEASURED).make(source, headers, f"compute_{architecture}", "PTX")
    try:
        log = assemble(site, ptx, architecture)
    except RuntimeError as error:
        raise RuntimeError(f"{os.path.basename(source)} for sm_{architecture}: {error}") from None
    # Block sizes are the launch bounds, which PTX keeps.
    bounds = dict(re.findall(r"\.entry (\w+)\(.*?\.maxntid (\d+)", ptx.decode(), re.S))
    return architecture, [(*row, int(bounds[row[0]])) for row in sizes(log)]


def assemble_compressed(site, path, architecture):
    assemble(site, decompress(path), architecture)


def as_the_program(site, release, source, headers, architecture):
    Nvrtc(site, release).make(source, headers, f"sm_{architecture}", "CUBIN")


def targets(site, release):
    """Cards that both compilers of a release know."""
    both = Nvrtc(site, release).targets() & known(ptxas(site, "--help").stdout)
    return [target for target in TARGETS if target in both]


def check_embedded(pool, site, units, headers, write):
    """Problems of kernels/ptx/; it is as it has to be if `write`."""
    problems = []
    os.makedirs(PTX, exist_ok=True)
    made = [(embedded_path(unit), pool.submit(embedded_text, site, unit, headers)) for unit in units]
    for path, future in made:
        name, text = os.path.relpath(path, ROOT), future.result()
        there = decompress(path)
        if write and there != text:
            with open(path, "wb") as file:
                file.write(compress(text))
            there = text
            print(f"{name}: written, {os.path.getsize(path)} bytes of {len(text)}")
        elif there != text:
            same = there.split(b"\n", 1)[0] == text.split(b"\n", 1)[0] and there
            why = "was changed by hand" if same else "is not made from these sources"
            problems.append(f"{name} {why}; run tools/nvrtc_check.py --write")
        problems += [f"{name} {fault}" for fault in faults(there.decode())] if there else []
    for name in sorted(set(os.listdir(PTX)) - {os.path.basename(path) for path, _ in made}):
        problems.append(f"kernels/ptx/{name} has no source; remove it")
    total = sum(os.path.getsize(path) for path, _ in made if os.path.exists(path))
    if total > MAX_COMPRESSED:
        problems.append(f"kernels/ptx/ has {total} bytes, more than {MAX_COMPRESSED}")
    return problems


class Attempts:
    """Jobs that have to work, a line for each kind of failure."""

    def __init__(self, pool):
        self.pool, self.futures = pool, []

    def add(self, what, architecture, call, *arguments):
        self.futures.append((what, architecture, self.pool.submit(refusal, call, *arguments)))

    def problems(self):
        failed = {}
        for what, architecture, future in self.futures:
            if why := future.result():
                failed.setdefault((what, why), []).append(f"sm_{architecture}")
        return [f"{what} for {', '.join(cards)}: {why}" for (what, why), cards in failed.items()]


def assemble_embedded(attempts, site, release, units, architectures):
    for unit, architecture in itertools.product(units, architectures):
        path = embedded_path(unit)
        attempts.add(f"ptxas {release} refuses {os.path.relpath(path, ROOT)}", architecture, assemble_compressed, site, path, architecture)


def show(pool, site, release, units, headers, wanted):
    """Problems of the compilers of a release, with the oldest and the newest card that they know and the most frequent one."""
    there = [target for target in pool.submit(targets, site, release).result() if target in wanted]
    few = sorted({*there[:1], *there[-1:], *({86} & set(there))})
    attempts = Attempts(pool)
    for unit, architecture in itertools.product(units, few):
        what = f"NVRTC {release} makes nothing of {os.path.basename(unit)}"
        attempts.add(what, architecture, as_the_program, site, release, unit, headers, architecture)
    assemble_embedded(attempts, site, release, units, few)
    problems = attempts.problems()
    cards = ", ".join(f"sm_{target}" for target in few)
    verdict = f"{len(problems)} problems" if problems else "all sources compiled, all embedded PTX assembled"
    print(f"CUDA {release} ({', '.join(RELEASES[release])}), {cards}: {verdict}", flush=True)
    return problems


def check_sizes(futures):
    """Registers, spills and stack by kernel and architecture, and what is wrong with them."""
    table, problems = {}, []
    for future in futures:
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
    return table, problems


def print_sizes(table, architectures):
    width = max(map(len, table))
    print(f"{'registers':{width}} " + " ".join(f"{'sm_' + str(arch):>8}" for arch in architectures))
    for kernel in sorted(table):
        cells = []
        for arch in architectures:
            registers, spilled, stack = table[kernel][arch]
            cells.append(f"{registers}{f'+{spilled}B' if spilled else ''}{f'/{stack}' if stack and not spilled else ''}")
        print(f"{kernel:{width}} " + " ".join(f"{cell:>8}" for cell in cells))
    print(f"{len(table)} kernels on {len(architectures)} architectures; +nB is spilled, /n a stack frame of n bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="make kernels/ptx/ anew instead of checking it")
    parser.add_argument("--show", metavar="NAME", help="print the embedded PTX of kernels/NAME.cu, and check nothing")
    parser.add_argument("--all-versions", action="store_true", help="try the compilers of every release, and print no sizes")
    parser.add_argument("--venv", default=os.path.join(ROOT, "target", "nvrtc"), help="where compilers are kept")
    parser.add_argument("--arch", type=int, action="append", help="only this one (75, 80, ...); may be given again")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at once")
    options = parser.parse_args()

    units, headers = sources()
    if not units:
        fail(f"{KERNELS} has no sources")
    if options.show:
        text = decompress(embedded_path(f"{options.show}.cu"))
        if not text:
            fail(f"kernels/ptx/ has no {options.show}")
        sys.stdout.buffer.write(text)
        return
    os.makedirs(options.venv, exist_ok=True)
    wanted = list(RELEASES) if options.all_versions else sorted({OLDEST, MEASURED, *ASSEMBLERS})
    sites = {release: environment(options.venv, release) for release in wanted}
    problems = drift(text_of(PROGRAM), {name: text_of(name) for name in DOCUMENTS})
    with concurrent.futures.ProcessPoolExecutor(options.jobs) as pool:
        problems += check_embedded(pool, sites[OLDEST], units, headers, options.write)
        if options.all_versions:
            for release in wanted:
                problems += show(pool, sites[release], release, units, headers, options.arch or TARGETS)
        else:
            architectures = options.arch or ARCHITECTURES
            compiled = [pool.submit(compile_one, sites[MEASURED], unit, headers, arch) for unit in units for arch in architectures]
            attempts = Attempts(pool)
            for release in ASSEMBLERS:
                there = known(ptxas(sites[release], "--help").stdout) & set(options.arch or TARGETS)
                assemble_embedded(attempts, sites[release], release, units, sorted(there))
            table, wrong = check_sizes(compiled)
            problems += wrong + attempts.problems()
            print_sizes(table, architectures)
            print(f"{len(attempts.futures)} times PTX of kernels/ptx/ for a card, by ptxas of CUDA {', '.join(ASSEMBLERS)}")
    if problems:
        fail("\n" + "\n".join(problems))


if __name__ == "__main__":
    main()
