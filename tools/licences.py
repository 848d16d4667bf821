#!/usr/bin/env python3
"""Prints the licences of the crates that are linked into the program, with their texts: what a binary package has to carry.

Cargo says which crates they are and where their sources are; each text is printed once, with the crates that have it. Standard
library only.
"""
import collections
import glob
import json
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TARGET = "x86_64-unknown-linux-gnu"
NAMES = ["LICEN[SC]E*", "COPYING*", "COPYRIGHT*", "NOTICE*", "UNLICENSE*", "license*"]


def linked(metadata):
    """Packages that the program reaches by normal dependencies; what runs only while it is built has no part in it."""
    packages = {package["id"]: package for package in metadata["packages"]}
    nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
    start = next(id for id, package in packages.items() if package["name"] == "dynamicinfer")
    seen, rest = set(), [start]
    while rest:
        id = rest.pop()
        if id in seen or any("proc-macro" in target["kind"] for target in packages[id]["targets"]):
            continue
        seen.add(id)
        rest += [dep["pkg"] for dep in nodes[id]["deps"] if any(kind["kind"] is None for kind in dep["dep_kinds"])]
    return sorted((packages[id] for id in seen - {start}), key=lambda package: (package["name"], package["version"]))


def texts(folder):
    paths = sorted({path for name in NAMES for path in glob.glob(os.path.join(folder, name)) if os.path.isfile(path)})
    out = []
    for path in paths:
        with open(path, encoding="utf-8", errors="replace") as file:
            out.append("\n".join(line.rstrip() for line in file.read().strip().splitlines()))
    return out


def report(packages):
    """Lines of the whole text, and the crates that have no text of a licence beside their sources."""
    lines, without, having = [], [], collections.OrderedDict()
    for package in packages:
        title = f"{package['name']} {package['version']}"
        lines.append(f"{title}: {package['license'] or 'see its text'}")
        found = texts(os.path.dirname(package["manifest_path"]))
        without += [] if found else [title]
        for text in found:
            having.setdefault(text, []).append(title)
    for text, crates in having.items():
        lines += ["", "=" * 80, ", ".join(crates), "=" * 80, "", text]
    return lines, without


def main():
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--filter-platform", TARGET]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit("licences: cargo does not say which crates there are")
    packages = linked(json.loads(done.stdout))
    lines, without = report(packages)
    print("dynamicinfer contains these crates, each under the licence that it names:\n")
    print("\n".join(lines))
    if without:
        print(f"\nNo text is beside the sources of: {', '.join(without)}. The licence that each names above applies.")


if __name__ == "__main__":
    main()
