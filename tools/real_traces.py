#!/usr/bin/env python3
"""Records what published models' neurons do on prose and code, and replays every policy on it.

    cargo build --release
    python3 tools/real_traces.py --prose wiki.test.txt --other wiki.valid.txt tale.txt --work FOLDER --out runs/DATE-real-traces

The models are those of `artefacts.py`. Prose is the beginning of --prose, code that of this repository's Rust files at --revision. Of --other a
profile is made: what a static placement knows of other texts. Written are `rows.csv` (a line for each replayed row), `recall.csv` (which
share of the active neurons is found k layers ahead), `quality.csv` (perplexity by sparsity), `distances.csv` (how far apart tokens and texts are),
`causes.csv` (what keeps full from the bound), `sweep.csv` (the constants of full, by time), `cap.csv` (how many neurons a pair of thresholds may add)
and `steps.csv` (seconds and peak memory of each command). The policy `paper` is full with
the paper's constants, `costly` full where moves cost. A row that is there is not made
again, so that an interrupted run goes on with the same command; --work keeps packed models and traces. --tables prints what the page shows, and
runs nothing. Standard library only.
"""
import argparse
import csv
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import artefacts

AHEAD = 2
SPARSITY = 0.5
RESIDENCY = [0.2, 0.4, 0.6, 0.8]
LINKS = [2, 5, 15]
MOVING = ["lfu", "lru", "micro", "macro", "paper", "full", "costly"]
# In a replay full decides as macro does: at the other link rates one of them is enough.
ELSEWHERE = ["paper", "full", "costly"]
# The policies that are full with options: the paper's constants; and full where a move costs what it does by the desktop's costs.
PAPER = {"lambda": 2, "dearer": 0, "scarce": 1, "decay": 0.96, "margin": 0.1, "phi": 0.7, "window": 1}
COST = {"h200": 0, "pc": 0.667}
VARIANTS = {"paper": [word for name, value in PAPER.items() for word in (f"--{name}", value)], "costly": ["--cost", COST["pc"]]}
CENTRE = (0.4, 5)
SHORT, SPARSE, LONG, RECALL, PROFILE = 5_000, 2_000, 50_000, 512, 8_192
LOOKAHEADS = [0, 1, 2, 3, 4]
BYTES = {"prose": 400_000, "code": 300_000, "quality": 3_000, "other": 60_000}
COSTS = ["h200", "pc"]
TURN = 240
# Made-up traces that are replayed with many settings: recipe and seed.
MADE_UP = [("paper-8", 1), ("paper-8", 2)]
# Neurons that a pair of thresholds may add, as a share of a layer's; the pair of the paper's figure 14; models that networks are trained for.
CAPS, PAIR, TRAINED = [0.004, 0.02, 0.1, "inf"], (-1, 0.83), ["smollm2"]
STAGES = ["known", "centre", "causes", "grid", "sweep", "cap", "sparsity", "quality", "long"]
# What keeps full from the bound: options of replay.
CAUSES = {
    "as it is": [],
    "look-ahead is never wrong": ["--foreseen"],
    "link without limit": ["--link", 100],
    "both": ["--foreseen", "--link", 100],
    "both, lambda 2": ["--foreseen", "--link", 100, "--lambda", 2],
}
# The constants of full that are swept, one at a time about its own, and at which costs and links; `cost` is what it takes a move to cost.
SWEEP = {"lambda": [1, 4], "dearer": [1, 6], "scarce": [1, 4], "decay": [0.9, 0.98], "margin": [0.3, 1], "phi": [0.7, 2], "window": [1], "cost": [1, 1.5]}
SWEPT_AT = [("h200", 5), ("h200", 15), ("pc", 5)]
ROW = ["model", "text", "tokens", "sparsity", "ahead", "placement", "residency", "link", "policy", "on_device", "active", "hits", "moves", "layers",
       "whole", "host"] + [f"{costs}_{part}_us" for costs in COSTS for part in ("ffn", "layer", "layer_7b")]
SWEPT = ["trace", "part", "costs", "link", "constant", "value", "on_device", "moves", "layers", "host", "whole", "layer_us", "layer_7b_us"]
CAPPED = ["trace", "part", "residency", "link", "policy", "max_more", "theta_gpu", "theta_cpu", "on_device", "active", "lost", "device", "host", "whole", "moves", "layers",
          "balanced_us"]
PLANTED = ["recipe", "seed"] + ROW[ROW.index("placement"):]


class Table:
    """Lines of a CSV file, written as they come."""

    def __init__(self, path, columns):
        self.path, self.columns, self.rows = path, columns, []
        if path.exists():
            with open(path, newline="") as file:
                self.rows = list(csv.DictReader(file))

    def has(self, **key):
        return any(all(row[name] == str(value) for name, value in key.items()) for row in self.rows)

    def add(self, **row):
        new = not self.path.exists()
        self.rows.append({name: str(row[name]) for name in self.columns})
        with open(self.path, "a", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            if new:
                writer.writeheader()
            writer.writerow(self.rows[-1])


class Runner:
    """Runs the program, one command at a time, and notes what it took."""

    def __init__(self, options):
        self.options, self.end = options, time.monotonic() + 60 * options.minutes
        self.lock, self.since = None, 0
        home = options.work / "home"
        self.env = {**os.environ, **{f"XDG_{name}_HOME": str(home / name.lower()) for name in ("CACHE", "CONFIG", "DATA", "STATE")}}
        self.steps = Table(options.out / "steps.csv", ["step", "seconds", "peak_mib"])

    def take_turn(self):
        """Holds the lock for some minutes, then lets others have it."""
        if not self.options.lock or (self.lock and time.monotonic() - self.since < TURN):
            return
        if self.lock:
            self.lock.close()
            time.sleep(2)
        self.lock = open(self.options.lock, "r+")
        fcntl.flock(self.lock, fcntl.LOCK_EX)
        self.since = time.monotonic()

    def run(self, step, *words):
        """The stdout of a verb. Raises with what it said on stderr when it fails."""
        if time.monotonic() > self.end:
            raise TimeoutError
        self.take_turn()
        start = time.monotonic()
        # The laboratory's program lies beside the other.
        program = self.options.program + ("-lab" if words[0] in ("record", "replay") else "")
        command = [program, *map(str, words)]
        said = self.options.work / "stdout"
        with open(said, "w") as out, open(self.options.work / "stderr", "w") as err:
            process = subprocess.Popen(command, env=self.env, stdout=out, stderr=err, stdin=subprocess.DEVNULL)
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"{step}: exit {process.returncode}: {(self.options.work / 'stderr').read_text().strip()[-400:]}")
        seconds = time.monotonic() - start
        if not self.steps.has(step=step):
            self.steps.add(step=step, seconds=round(seconds, 1), peak_mib=usage.ru_maxrss // 1024)
        print(f"{step}: {seconds:.1f} s, {usage.ru_maxrss >> 10} MiB", file=sys.stderr)
        return said.read_text()


def texts(options):
    """Cuts the texts, once; their paths by name."""
    folder = options.work / "text"
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}.txt" for name in ("prose", "code", "prose-quality", "code-quality")}
    others = [folder / f"other{i}.txt" for i in range(len(options.other))]

    def cut(path, data, most):
        if not path.exists():
            path.write_bytes(data[:most].decode("utf-8", "ignore").encode())

    prose = options.prose.read_bytes()
    listed = subprocess.run(["git", "ls-tree", "-r", "--name-only", options.revision, "src"], capture_output=True, text=True, check=True).stdout.split()
    code, files = b"", iter(sorted(name for name in listed if name.endswith(".rs")))
    while len(code) < BYTES["code"] + BYTES["quality"]:
        code += subprocess.run(["git", "show", f"{options.revision}:{next(files)}"], capture_output=True, check=True).stdout
    for name, data in (("prose", prose), ("code", code)):
        cut(paths[name], data, BYTES[name])
        cut(paths[f"{name}-quality"], data, BYTES["quality"])
    for path, other in zip(others, options.other):
        cut(path, other.read_bytes(), BYTES["other"])
    return paths, others


def prepared(runner, key, others):
    """Packs a model and profiles it on other texts; the store and its profile."""
    store = runner.options.work / f"{key}.neurons"
    if not store.exists():
        runner.run(f"pack {key}", "pack", artefacts.model(key), "-o", store)
    return store, profiled(runner, key, store, others, SPARSITY)


def profiled(runner, key, store, others, sparsity):
    path = store.with_suffix(".activation.profile") if sparsity == SPARSITY else runner.options.work / f"{key}.{sparsity}.profile"
    if not path.exists():
        most = PROFILE if sparsity == SPARSITY else PROFILE // 4
        runner.run(f"profile {key} {sparsity}", "profile", store, "--text", *others, "--max-tokens", most, "--sparsity", sparsity, "-t", runner.options.threads, "-o", path)
    return path


def recorded(runner, key, store, name, path, tokens, sparsity):
    trace = runner.options.work / f"{key}-{name}-{tokens}-{sparsity}.trace"
    if not trace.exists():
        runner.run(f"record {key} {name} {tokens} {sparsity}", "record", store, "--text", path, "--max-tokens", tokens, "--predictor", "exact",
                   "--sparsity", sparsity, "--ahead", AHEAD, "-t", runner.options.threads, "-o", trace)
    return trace


def replayed(runner, rows, trace, profile, fixed, placement, residency, links, policies, bound):
    """Replays what is not there yet: a command for each link rate."""
    for link in links:
        at = {**fixed, "placement": placement, "residency": residency, "link": link}
        missing = [policy for policy in policies if not rows.has(**at, policy=policy)]
        for policy in [policy for policy in missing if policy in VARIANTS]:
            missing.remove(policy)
            words = ["replay", trace, "--profile", profile, "--placement", placement, "--ffn-share", residency, "--link", link, "--json", "--policy", "full", "--no-bound"]
            row = json.loads(runner.run(f"replay {' '.join(map(str, at.values()))} {policy}", *words, *VARIANTS[policy]))["rows"][0]
            rows.add(**at, policy=policy, ahead=AHEAD, on_device=round(row["gpu_share"], 5), **counted(row))
        if not missing and (not bound or rows.has(**at, policy="bound")):
            continue
        words = ["replay", trace, "--profile", profile, "--placement", placement, "--ffn-share", residency, "--link", link, "--json"]
        step = f"replay {fixed['model']} {fixed['text']} {fixed['tokens']} {fixed['sparsity']} {placement} {residency} {link} {' '.join(missing)}"
        said = runner.run(step, *words, "--policy", *(missing or ["static"]), *([] if bound else ["--no-bound"]))
        for row in json.loads(said)["rows"]:
            policy = row["policy"] or "bound"
            if not rows.has(**at, policy=policy) and (missing or policy == "bound"):
                rows.add(**at, policy=policy, ahead=AHEAD, on_device=round(row["gpu_share"], 5), **counted(row))


def grid(runner, rows, trace, profile, fixed, residencies, links):
    for residency in residencies:
        for placement in ("first", "static", "own"):
            replayed(runner, rows, trace, profile, fixed, placement, residency, CENTRE[1:], ["static"], False)
        for link in links:
            moving = MOVING if (residency, link) == CENTRE else MOVING[:3] + ELSEWHERE if link == CENTRE[1] else ELSEWHERE
            replayed(runner, rows, trace, profile, fixed, "static", residency, [link], moving, True)


def causes(runner, table, trace, profile, fixed):
    for variant, words in CAUSES.items():
        if not table.has(**fixed, variant=variant):
            link = [] if "--link" in words else ["--link", 5]
            said = runner.run(f"replay {fixed['model']} {fixed['text']} {variant}", "replay", trace, "--profile", profile, "--ffn-share", 0.4, *link, *words,
                              "--policy", "full", "--no-bound", "--json")
            row = json.loads(said)["rows"][0]
            table.add(**fixed, variant=variant, on_device=round(row["gpu_share"], 5), moves=row["moves"], layers=row["layers"], h200_layer_us=counted(row)["h200_layer_us"])


def quality(runner, table, key, store, name, path, sparsity):
    if table.has(model=key, text=name, sparsity=sparsity):
        return
    words = ["eval", store, "--text", path, "--json", "-c", 1024, "-t", runner.options.threads]
    if sparsity:
        words += ["--predictor", "exact", "--sparsity", sparsity]
    said = json.loads(runner.run(f"eval {key} {name} {sparsity}", *words))
    table.add(model=key, text=name, sparsity=sparsity, tokens=said.get("tokens", ""), perplexity=round(said["perplexity"], 3))


def distances(runner, table, key, store, profile):
    if not table.has(model=key):
        said = json.loads(runner.run(f"distances {key}", "profile", store, "-o", profile, "--json"))
        for layer in said["statistics"]["layers"] if "statistics" in said else said["layers"]:
            table.add(model=key, layer=layer["layer"], neighbours=layer["neighbours"], to_hot=layer.get("to_hot"), texts=(layer["texts"] or {}).get("mean"),
                      neurons_for_80=layer["neurons_for_80"], by_top_40=layer["by_top_40"])


def recall(runner, table, key, store, name, path, sparsity):
    if table.has(model=key, text=name, sparsity=sparsity):
        return
    trace = runner.options.work / "recall.trace"
    said = runner.run(f"recall {key} {name} {sparsity}", "record", store, "--text", path, "--max-tokens", RECALL, "--predictor", "exact", "--sparsity", sparsity,
                      "--ahead", 1, "--lookaheads", ",".join(map(str, LOOKAHEADS)), "-o", trace)
    trace.unlink()
    for row in json.loads(said)["recall"]:
        share = {"recall": row["found"] / row["active"], "precision": row["found"] / row["predicted"], "by_rank": row["found_by_rank"] / row["active"]}
        table.add(model=key, text=name, sparsity=sparsity, ahead=row["ahead"], **{name: round(value, 4) for name, value in share.items()})


def planted(options):
    """Made-up traces of the recipes, two seeds each: how far apart tokens and texts are, and then policies on them."""
    runner, out = Runner(options), options.out
    rows = Table(out / "planted.csv", PLANTED)
    apart = Table(out / "planted-distances.csv", ["recipe", "seed", "active", "token_distance", "text_distance", "token_to_hot", "skew"])
    for recipe in options.planted:
        for seed in (1, 2):
            trace = made_up(runner, recipe, seed)
            if not apart.has(recipe=recipe.stem, seed=seed):
                said = json.loads(runner.run(f"distances {recipe.stem} {seed}", "replay", trace, "--policy", "static", "--ffn-share", 0.3, "--link", 5, "--no-bound",
                                             "--statistics", "--json"))["statistics"]
                apart.add(recipe=recipe.stem, seed=seed, **{name: round(said[name], 3) for name in apart.columns[2:]})
            for residency in (0.3, 0.5):
                for placement, policies in (("first", ["static"]), ("own", ["static"]), ("static", ["static", "full"]), ("static", ["paper"]), ("static", ["costly"])):
                    for link in LINKS if policies != ["static"] else CENTRE[1:]:
                        fixed = {"recipe": recipe.stem, "seed": seed, "placement": placement, "residency": residency, "link": link}
                        if all(rows.has(**fixed, policy=policy) for policy in policies):
                            continue
                        variant = VARIANTS.get(policies[0])
                        words = ["--policy", "full", "--no-bound", *variant] if variant else ["--policy", *policies, *([] if "full" in policies else ["--no-bound"])]
                        said = runner.run(f"replay {' '.join(map(str, fixed.values()))} {' '.join(policies)}", "replay", trace, "--json", "--placement", placement,
                                          "--ffn-share", residency, "--link", link, *words)
                        for row in json.loads(said)["rows"]:
                            policy = policies[0] if variant else row["policy"] or "bound"
                            rows.add(**fixed, policy=policy, on_device=round(row["gpu_share"], 5), **counted(row))
            trace.unlink()


def counted(row):
    """What a row of replay says beside its share."""
    times = {f"{t['costs']}_{part}_us": round(t[f"{part}_us"], 3) for t in row["times"] for part in ("ffn", "layer", "layer_7b")}
    return {**{name: row[name] for name in ("active", "hits", "moves", "layers", "whole", "host")}, **times}


def sweep(runner, table, name, part, words):
    """The constants of full on one trace, beside the static placement; `words` are the trace and what is known beforehand."""
    settings = [("static", ""), ("none", "")] + [(constant, value) for constant, values in SWEEP.items() for value in values]
    for costs, link in SWEPT_AT:
        for constant, value in settings:
            key = {"trace": name, "part": part, "costs": costs, "link": link, "constant": constant, "value": value}
            if table.has(**key):
                continue
            said = {"cost": COST[costs], **({constant: value} if constant in SWEEP else {})}
            said = [word for name, value in said.items() for word in (f"--{name}", value)]
            policy = "static" if constant == "static" else "full"
            run = ["replay", *words, "--ffn-share", CENTRE[0], "--link", link, "--policy", policy, *said, "--no-bound", "--json"]
            row = json.loads(runner.run(f"sweep {' '.join(map(str, key.values()))}", *run))["rows"][0]
            times = next(times for times in row["times"] if times["costs"] == costs)
            counts = {column: row[column] for column in ("moves", "layers", "host", "whole")}
            table.add(**key, on_device=round(row["gpu_share"], 5), **counts, **{part: round(times[part], 3) for part in ("layer_us", "layer_7b_us")})


def swept(options, runner, table, each, paths):
    for key, store, profile, name in each:
        trace = recorded(runner, key, store, name, paths[name], SPARSE, SPARSITY)
        sweep(runner, table, key, name, [trace, "--profile", profile])
    for recipe, seed in MADE_UP:
        sweep(runner, table, recipe, seed, [made_up(runner, Path("configs/traces") / f"{recipe}.toml", seed)])


def made_up(runner, recipe, seed):
    trace = runner.options.work / f"{recipe.stem}-{seed}.trace"
    if not trace.exists():
        runner.run(f"make {recipe.stem} {seed}", "record", "--synth", "--recipe", recipe, "--seed", seed, "-o", trace)
    return trace


def caps(runner, table, name, part, words, residencies):
    """How many neurons a pair of thresholds may add, by the time of a layer on an H200; one threshold for both, and the paper's pair, beside them."""
    kinds = [("macro", "", "", "")] + [("full", most, "", "") for most in CAPS] + [("full", "", *PAIR)]
    for residency in residencies:
        for kind in kinds:
            key = {"trace": name, "part": part, "residency": residency, "link": CENTRE[1], **dict(zip(("policy", "max_more", "theta_gpu", "theta_cpu"), kind))}
            if table.has(**key):
                continue
            said = [word for option, value in zip(("max-more", "theta-gpu", "theta-cpu"), kind[1:]) if value != "" for word in (f"--{option}", value)]
            run = ["replay", *words, "--balance", "--ffn-share", residency, "--link", CENTRE[1], "--policy", kind[0], *said, "--no-bound", "--json"]
            row = json.loads(runner.run(f"cap {' '.join(map(str, key.values()))}", *run))["rows"][0]
            counts = {column: row[column] for column in CAPPED if column in row and column not in key}
            table.add(**key, on_device=round(row["gpu_share"], 5), **{**counts, "balanced_us": round(row["balanced_us"], 3)})


def capped(runner, table, each, others, paths):
    """Thresholds need probabilities: those of made-up traces, and of networks trained for the smaller model on the other texts."""
    for recipe, seed in MADE_UP:
        caps(runner, table, recipe, seed, [made_up(runner, Path("configs/traces") / f"{recipe}.toml", seed)], [0.3, 0.5])
    for key, store, profile, name in each:
        if key not in TRAINED:
            continue
        networks, trace = runner.options.work / f"{key}.predictor", runner.options.work / f"{key}-{name}-mlp.trace"
        if not networks.exists():
            runner.run(f"train {key}", "train-predictor", store, "--text", *others, "--ahead", AHEAD, "--tokens", 2 * PROFILE, "--sparsity", SPARSITY,
                       "-t", runner.options.threads, "-o", networks)
        if not trace.exists():
            runner.run(f"record {key} {name} mlp", "record", store, "--text", paths[name], "--max-tokens", SPARSE, "--predictor", "mlp", "--predictor-file", networks,
                       "--ahead", AHEAD, "-t", runner.options.threads, "-o", trace)
        caps(runner, table, key, name, [trace, "--profile", profile], [CENTRE[0]])


def made(options):
    runner, out = Runner(options), options.out
    rows = Table(out / "rows.csv", ROW)
    paths, others = texts(options)
    each = []
    for key in options.models.split(","):
        store, profile = prepared(runner, key, others)
        each += [(key, store, profile, name) for name in ("prose", "code")]

    def at(key, name, tokens, sparsity):
        return {"model": key, "text": name, "tokens": tokens, "sparsity": sparsity}

    def known():
        apart = Table(out / "distances.csv", ["model", "layer", "neighbours", "to_hot", "texts", "neurons_for_80", "by_top_40"])
        found = Table(out / "recall.csv", ["model", "text", "sparsity", "ahead", "recall", "precision", "by_rank"])
        for key, store, profile, name in each:
            distances(runner, apart, key, store, profile)
            recall(runner, found, key, store, name, paths[name], SPARSITY)

    def rows_of(residencies, links):
        for key, store, profile, name in each:
            trace = recorded(runner, key, store, name, paths[name], SHORT, SPARSITY)
            grid(runner, rows, trace, profile, at(key, name, SHORT, SPARSITY), residencies, links)

    def why():
        table = Table(out / "causes.csv", ["model", "text", "variant", "on_device", "moves", "layers", "h200_layer_us"])
        for key, store, profile, name in each:
            causes(runner, table, recorded(runner, key, store, name, paths[name], SHORT, SPARSITY), profile, {"model": key, "text": name})

    def sparser():
        for sparsity in (0.3, 0.7):
            for key, store, _, name in each:
                profile = profiled(runner, key, store, others, sparsity)
                trace = recorded(runner, key, store, name, paths[name], SPARSE, sparsity)
                grid(runner, rows, trace, profile, at(key, name, SPARSE, sparsity), [CENTRE[0]], [CENTRE[1]])

    def worth():
        perplexity = Table(out / "quality.csv", ["model", "text", "sparsity", "tokens", "perplexity"])
        for sparsity in (0, 0.3, SPARSITY, 0.7):
            for key, store, _, name in each:
                quality(runner, perplexity, key, store, name, paths[f"{name}-quality"], sparsity)

    def longer():
        for key, store, profile, name in each:
            trace = recorded(runner, key, store, name, paths[name], LONG, SPARSITY)
            for residency in (0.4, 0.6):
                for placement in ("first", "static", "own"):
                    replayed(runner, rows, trace, profile, at(key, name, LONG, SPARSITY), placement, residency, CENTRE[1:], ["static"], False)
                replayed(runner, rows, trace, profile, at(key, name, LONG, SPARSITY), "static", residency, CENTRE[1:], ["macro", *ELSEWHERE], True)

    # What matters most comes first: a run that is cut short is a smaller grid.
    stages = {
        "known": known,
        "centre": lambda: rows_of([CENTRE[0]], [CENTRE[1]]),
        "causes": why,
        "grid": lambda: rows_of(RESIDENCY, LINKS),
        "sweep": lambda: swept(options, runner, Table(out / "sweep.csv", SWEPT), each, paths),
        "cap": lambda: capped(runner, Table(out / "cap.csv", CAPPED), each, others, paths),
        "sparsity": sparser,
        "quality": worth,
        "long": longer,
    }
    for stage in options.stages or stages:
        stages[stage]()


def tables(out):
    """The page's tables as Markdown."""
    rows = Table(out / "rows.csv", ROW).rows
    named = [("static", "first", "no profile"), ("static", "static", "profile of other text"), ("static", "own", "this text's own")]
    named += [(policy, "static", policy) for policy in MOVING + ["bound"]]
    said = []

    def cells(fixed, link, column):
        """Of each policy its value; static rows are of every link rate."""
        for policy, placement, _ in named:
            wanted = {**fixed, "policy": policy, "placement": placement, **({} if policy == "static" else {"link": link})}
            yield next((float(row[column]) for row in rows if all(row[name] == value for name, value in wanted.items())), None)

    kinds = sorted({(row["sparsity"], int(row["tokens"])) for row in rows}, key=lambda kind: (kind[0] != str(SPARSITY), kind))
    for title, column, scale in (("Active neurons on the device, %", "on_device", 100), ("Time of a layer by the H200's costs, us", "h200_layer_us", 1),
                                 ("The same for a layer of 11008 neurons, us", "h200_layer_7b_us", 1), ("Time of a layer by a desktop's costs, us", "pc_layer_us", 1),
                                 ("The same for a layer of 11008 neurons, us", "pc_layer_7b_us", 1)):
        for sparsity, tokens in kinds:
            said += ["", f"### {title}: sparsity {float(sparsity):.0%}, {tokens} tokens", ""]
            said += ["| model | text | in VRAM | link | " + " | ".join(name for *_, name in named) + " | full closes |", "|" + "---|" * (len(named) + 5)]
            here = [row for row in rows if (row["sparsity"], int(row["tokens"])) == (sparsity, tokens)]
            for model, text, residency, link in sorted({(r["model"], r["text"], r["residency"], r["link"]) for r in here if r["policy"] == "full"},
                                                       key=lambda key: (key[0], key[1], float(key[2]), float(key[3]))):
                fixed = {"model": model, "text": text, "tokens": str(tokens), "sparsity": sparsity, "residency": residency}
                values = list(cells(fixed, link, column))
                # By the desktop's costs full knows what a move costs.
                by_name = dict(zip((name for *_, name in named), values))
                profiled, full, best = values[1], by_name["costly" if column.startswith("pc") else "full"], values[-1]
                closes = f"{(full - profiled) / (best - profiled):.0%}" if None not in (profiled, full, best) and best != profiled else "-"
                shown = ["-" if value is None else f"{scale * value:.1f}" for value in values]
                said.append(f"| {model} | {text} | {float(residency):.0%} | {link} % | " + " | ".join(shown) + f" | {closes} |")
    return "\n".join(summary(rows) + said) + "\n"


def summary(rows):
    """Time that full and others gain on the profiled static placement: the worst row and the best, and which part of the gap to the bound full closes."""
    def of(row, policy, placement):
        same = ["model", "text", "tokens", "sparsity", "residency"] + (["link"] if policy != "static" else [])
        return next((other for other in rows if (other["policy"], other["placement"]) == (policy, placement) and all(other[name] == row[name] for name in same)), None)

    said = ["### Time beside the profiled static placement, %: worst and best row; part of the gap closed where it is 15 % or more", "",
            "| costs | link | rows | paper's constants | full | this text's own static | bound | rows with such a gap | full closes |", "|" + "---|" * 9]
    full = [row for row in rows if row["policy"] == "full"]
    for costs in COSTS:
        for part in ("layer", "layer_7b"):
            column = f"{costs}_{part}_us"
            for link in sorted({row["link"] for row in full}, key=int):
                gains, closed = {"paper": [], "full": [], "own": [], "bound": []}, []
                here = [row for row in full if row["link"] == link]
                for row in here:
                    time = {"static": of(row, "static", "static"), "own": of(row, "static", "own"), "paper": of(row, "paper", "static"), "bound": of(row, "bound", "static"),
                            "full": of(row, "costly", "static") if costs == "pc" else row}
                    time = {name: float(found[column]) for name, found in time.items() if found}
                    for name in gains:
                        if name in time:
                            gains[name].append(100 * (time["static"] / time[name] - 1))
                    if "bound" in time and "full" in time and time["static"] / time["bound"] >= 1.15:
                        closed.append((time["static"] - time["full"]) / (time["static"] - time["bound"]))
                span = lambda values: f"{min(values):+.1f} to {max(values):+.1f}" if values else "-"
                shut = f"{min(closed):.0%} to {max(closed):.0%}" if closed else "-"
                said.append(f"| {column[:-3]} | {link} % | {len(here)} | {span(gains['paper'])} | {span(gains['full'])} | {span(gains['own'])} | {span(gains['bound'])} | {len(closed)} | {shut} |")
    return said


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", default="target/release/dynamicinfer")
    parser.add_argument("--models", default="smollm2,qwen2.5-coder", help="keys of artefacts.py (default: %(default)s)")
    parser.add_argument("--prose", type=Path, help="a text, such as WikiText-2's test text")
    parser.add_argument("--other", type=Path, nargs="+", help="texts that the profile is made of")
    parser.add_argument("--revision", default="4822de3", help="commit whose Rust files are the code (default: %(default)s)")
    parser.add_argument("--work", type=Path, default=Path("target/real-traces"), help="folder for models and traces, some GB (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no command after so many minutes")
    parser.add_argument("--lock", type=Path, help="file to lock while a command runs, where others measure as well")
    parser.add_argument("--stages", nargs="+", choices=STAGES, help="only these (default: all)")
    parser.add_argument("--planted", type=Path, nargs="+", metavar="RECIPE", help="instead: replay made-up traces of these recipes (configs/traces)")
    parser.add_argument("--tables", action="store_true", help="print the page's tables from what is in --out")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if options.tables:
        print(tables(options.out), end="")
        return
    if not options.planted and not (options.prose and options.other):
        parser.error("--prose and --other are needed")
    options.program = shutil.which(options.program) or str(Path(options.program).resolve())
    for folder in (options.work, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        planted(options) if options.planted else made(options)
    except TimeoutError:
        print("the time is up; the same command goes on", file=sys.stderr)


if __name__ == "__main__":
    main()
