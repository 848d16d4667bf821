"""Writes the tables of docs/figures.md and README.md from the recorded runs.

    python3 tools/figures.py            # writes both
    python3 tools/figures.py --check    # says what is out of date; exit status 1
    python3 tools/figures.py --rows runs/2026-11-27-x/raw.csv --test tg    # rows for a figures csv from tools/compare's raw.csv

A run gives its figures in `figures-NAME.csv`: lines `# key: value` (question, machine, model, beside, commit), then a header and rows.
A comparison has the columns COLUMNS; any other table is printed as it is. Of rows with the same question, machine, case and threads the
newest run's is shown. A document keeps its own words around the part between the markers. Standard library only.
"""
import argparse
import csv
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = "case threads rounds ours ours_low ours_high other other_low other_high ratio_low ratio_high".split()
BEGIN, END = "<!-- tools/figures.py writes from here -->", "<!-- to here -->"

# Sections of docs/figures.md, in order: title and what is beside ours in the tables' head.
QUESTIONS = {
    "decode": ("Fits in memory: decode", "llama.cpp"),
    "prompts": ("Fits in memory: prompts", "llama.cpp"),
    "sparse": ("Fits in memory, sparse: decode with a predictor", "llama.cpp"),
    "predictor": ("What a predictor gains over computing every neuron: decode", "without"),
    "mixture": ("Fits in memory: mixtures of experts", "llama.cpp"),
    "disk": ("Larger than memory: decode", "llama.cpp"),
    "vram": ("Larger than VRAM", "llama.cpp"),
    "vram-all": ("Fits in VRAM", "llama.cpp"),
    "published": ("Published models", ""),
}

# The table of README.md: label, question, machine (a part of its name), case, threads.
README_ROWS = [
    ("Fits in memory, Q4_K_M", "decode", "Zen 4", "Q4_K_M", 2),
    ("Fits in memory, Q4_K_M, AVX2 alone", "decode", "Zen 3", "Q4_K_M", 2),
    ("Fits in memory, Q4_K_M, prompt of 512", "prompts", "Intel Xeon (AVX-512)", "Q4_K_M, 512 tokens", 2),
    ("Larger than RAM, Q4_K_M, half of the FFNs on disk", "disk", "Zen 3", "Q4_K_M, 50 % of the FFNs in memory, limit 504 MiB", 2),
    ("Sparse with predictor, f16", "sparse", "Zen 4", "f16", 2),
    ("Half in VRAM, sparse 7B f16", "vram", "H200", "decode, 7B, budget 8 GiB, dynamic policy", 16),
    ("Half in VRAM, mixture q4_0", "vram", "H200", "decode, mixture, budget 2 GiB, dynamic policy", 16),
    ("All in VRAM, 7B f16", "vram-all", "H200", "decode, 7B, dense", 16),
]


class Invalid(Exception):
    """A run's figures cannot be read, or two of them contradict each other."""


@dataclass
class Table:
    """One figures csv: its head, its columns and its rows."""

    run: str  # the run's folder
    head: dict
    columns: list
    rows: list

    @property
    def date(self):
        return self.run[:10]

    @property
    def compares(self):
        return self.columns == COLUMNS


def parse(run, text):
    """The table of a figures csv; `run` is the name of its folder."""
    lines = text.splitlines()
    head = {}
    while lines and lines[0].startswith("#"):
        key, colon, value = lines.pop(0)[1:].partition(":")
        if not colon:
            raise Invalid(f"{run}: a line of the head is not '# key: value'")
        head[key.strip()] = value.strip()
    for key in ("question", "machine", "model", "commit"):
        if not head.get(key):
            raise Invalid(f"{run}: the head has no '# {key}: ...'")
    if head["question"] not in QUESTIONS:
        raise Invalid(f"{run}: unknown question '{head['question']}'; questions: {', '.join(QUESTIONS)}")
    if not re.match(r"\d{4}-\d\d-\d\d-", run):
        raise Invalid(f"{run}: the folder's name does not begin with a date")
    columns, *rows = csv.reader(lines)
    if "ours" in columns and columns != COLUMNS:
        raise Invalid(f"{run}: a comparison has the columns {','.join(COLUMNS)}")
    if any(len(row) != len(columns) for row in rows):
        raise Invalid(f"{run}: a row has not as many fields as the header")
    return Table(run, head, columns, rows)


def read(root):
    """All tables under runs/."""
    return [parse(path.parent.name, path.read_text()) for path in sorted(root.glob("runs/*/figures-*.csv"))]


def newest(tables):
    """(table, row) of each case and number of threads, from the newest run that has it, the newest run first."""
    found = {}
    for table in sorted(tables, key=lambda t: (t.date, t.run), reverse=True):
        for row in table.rows:
            key = tuple(row[:2])
            if key not in found:
                found[key] = (table, row)
            elif found[key][0].date == table.date:
                raise Invalid(f"{table.run} and {found[key][0].run} measured '{row[0]}' on the same day; name the cases apart")
    return list(found.values())


def grouped(tables):
    """Tables by question, then by machine, in the order of QUESTIONS and of machines' names."""
    result = {question: {} for question in QUESTIONS}
    for table in tables:
        result[table.head["question"]].setdefault(table.head["machine"], []).append(table)
    return {q: dict(sorted(machines.items())) for q, machines in result.items() if machines}


def number(text):
    """Three digits: 120, 43.3, 2.61."""
    value = float(text)
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread(middle, low, high):
    return f"{number(middle)} ({number(low)} to {number(high)})" if low else number(middle)


def ratio(value):
    """Two decimals below 10, else one: 1.32, 23.1."""
    value = float(value)
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def ratios(row):
    """Ratio of the medians, and the lowest and highest of a round where they were recorded."""
    return ratio(float(row[3]) / float(row[6])), f"{ratio(row[9])} to {ratio(row[10])}" if row[9] else ""


def cells(row):
    """A comparison's row as cells: case, threads, ours, other, ratio, ratio by round, rounds."""
    return [row[0], row[1], spread(*row[3:6]), spread(*row[6:9]), *ratios(row), row[2]]


def link(table, folder):
    return f"[{table.date}]({folder}/{table.run}/README.md)"


def lines_of(rows):
    return ["| " + " | ".join(row) + " |" for row in rows]


def section(machine, tables, other, folder="../runs"):
    """One machine's part: its runs, then the table."""
    chosen = newest(tables)
    out = [f"### {machine}", ""]
    for table in (t for t in reversed(tables) if any(t is used for used, _ in chosen)):
        beside = f"; beside {table.head['beside']}" if table.head.get("beside") else ""
        out.append(f"- {link(table, folder)}, recorded in `{table.head['commit']}`: {table.head['model']}{beside}.")
    compares = {table.compares for table, _ in chosen}
    if compares == {True}:
        head = ["case", "threads", "ours, tokens/s", other, "ratio", "ratio by round", "rounds", "run"]
        rows = [cells(row) + [table.date] for table, row in chosen]
    else:
        head = [*chosen[0][0].columns, "run"]
        rows = [[*row, table.date] for table, row in chosen]
        if any(len(row) != len(head) for row in rows) or len(compares) != 1:
            raise Invalid(f"{machine}: tables of one question have different columns")
    return [*out, "", *lines_of([head, ["---"] * len(head), *rows]), ""]


def figures(tables):
    """The made part of docs/figures.md."""
    out = []
    for question, machines in grouped(tables).items():
        title, other = QUESTIONS[question]
        out += [f"## {title}", ""]
        for machine, of_machine in machines.items():
            out += section(machine, of_machine, other)
    return "\n".join(out).rstrip() + "\n"


def readme(tables, wanted=None):
    """The table of README.md: the rows of README_ROWS as docs/figures.md has them."""
    rows = []
    groups = grouped(tables)
    for label, question, machine, case, threads in README_ROWS if wanted is None else wanted:
        machines = [name for name in groups.get(question, {}) if machine in name and "kept to" not in name]
        if len(machines) != 1:
            raise Invalid(f"README's row '{label}': {len(machines)} machines are called '{machine}'")
        found = [(t, row) for t, row in newest(groups[question][machines[0]]) if row[:2] == [case, str(threads)]]
        if not found:
            raise Invalid(f"README's row '{label}': no run has '{case}' with {threads} threads")
        table, row = found[0]
        of_medians, by_round = ratios(row)
        both = f"{of_medians} ({by_round})" if by_round else of_medians
        rows.append([label, number(row[3]), number(row[6]), both, machines[0], link(table, "runs")])
    head = ["tokens/s", "ours", "llama.cpp", "ratio (by round)", "machine", "run"]
    return "\n".join(lines_of([head, ["---"] * len(head), *rows])) + "\n"


def replaced(document, part):
    """The document with `part` between its markers."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise Invalid(f"the document has no '{BEGIN}' with '{END}' behind it")
    return f"{before}{BEGIN}\n{part}{END}{after}"


def compare_rows(text, test):
    """Rows of a figures csv from the raw.csv of tools/compare, one for each model and number of threads."""
    sides = {}
    for row in csv.DictReader(text.splitlines()):
        if row["test"] == test:
            key = (row["model"], row["threads"])
            sides.setdefault(key, {}).setdefault(row["side"], {})[row["round"]] = float(row["tokens_per_s"])
    out = []
    for (model, threads), by_side in sides.items():
        ours, other = by_side.pop("dynamicinfer"), by_side.pop("llama.cpp")
        if ours.keys() != other.keys():
            raise Invalid(f"{model}: the sides have different rounds")
        by_round = [ours[r] / other[r] for r in ours]
        speeds = [f"{f(side.values()):.6g}" for side in (ours, other) for f in (median, min, max)]
        out.append([model, threads, str(len(ours)), *speeds, f"{min(by_round):.2f}", f"{max(by_round):.2f}"])
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--rows", type=Path, metavar="RAW.csv", help="print rows from tools/compare's raw.csv and end")
    parser.add_argument("--test", default="tg", help="for --rows: tg (decode) or pp (prompt) [default: tg]")
    args = parser.parse_args()
    if args.rows:
        csv.writer(sys.stdout, lineterminator="\n").writerows([COLUMNS, *compare_rows(args.rows.read_text(), args.test)])
        return 0
    tables = read(ROOT)
    stale = []
    for name, part in (("docs/figures.md", figures(tables)), ("README.md", readme(tables))):
        path = ROOT / name
        old = path.read_text()
        new = replaced(old, part)
        if new != old:
            stale.append(name)
            if not args.check:
                path.write_text(new)
    if args.check and stale:
        print(f"out of date: {', '.join(stale)}; run: python3 tools/figures.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Invalid as error:
        sys.exit(f"figures.py: {error}")
