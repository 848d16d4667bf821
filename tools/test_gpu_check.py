"""Tests of gpu_check with a program that only says what it was asked: the phases, their clock and what they leave."""
import contextlib
import importlib.machinery
import importlib.util
import io
import json
import subprocess
import tarfile
import tempfile
import unittest
from pathlib import Path
from unittest import mock

loader = importlib.machinery.SourceFileLoader("gpu_check", str(Path(__file__).with_name("gpu_check")))
spec = importlib.util.spec_from_loader("gpu_check", loader)
gpu_check = importlib.util.module_from_spec(spec)
# Nothing compiled is left beside the script.
exec(compile(loader.get_data(loader.path), loader.path, "exec"), gpu_check.__dict__)

# Whether the model has a profile is what tells the rows of one policy apart.
PROGRAM = '''#!/usr/bin/env python3
import json, os, sys
from pathlib import Path
verb, *rest = sys.argv[1:]
said = dict(zip(rest, rest[1:]))
if verb == "synth":
    Path(said["-o"]).write_text("a model")
    if "--active" in rest:
        Path(said["-o"]).with_suffix(".mlp.predictor").write_text("its predictor")
elif verb == "profile":
    Path(said["-o"]).write_text("a profile")
    print(json.dumps({"tokens": 256}))
elif verb == "measure":
    Path(said["--save"]).write_text("device_gb_s = 2000.0\\n")
    print("{}")
elif verb == "plan":
    print(json.dumps({"details": {"expected": {"tokens_per_s": 100.0}}}))
elif verb == "run":
    print("a text" + (" that differs" if os.environ.get("WRONG") and "--device" in rest else ""))
elif verb == "bench":
    profiled = Path(rest[0]).with_name(Path(rest[0]).stem + ".activation.profile").exists()
    print(json.dumps([{"test": f"{kind}{n}", "n_gen": n if kind == "tg" else 0, "avg_ts": 80.0 if profiled else 40.0, "stddev_ts": 1.5,
        "bytes_per_token": 10**10, "gpu_share": 0.5, "migrations": 7, "scheduling_share": 0.01, "measured": True,
        "scheduler": {"stale": 123 if said.get("--policy") == "full" else 0, "late": 4}}
        for kind, n in [("pp", int(said["-p"])), ("tg", int(said["-n"]))] if n > 0]))
    if "--trace" in rest:
        Path(said["--trace"]).write_text("{}")
        print("both 50 %", file=sys.stderr)
else:
    print("{}")
'''


class Phases(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = Path(self.folder.name)
        program = self.path / "program"
        for file in (program, self.path / "program-lab"):
            file.write_text(PROGRAM)
            file.chmod(0o755)
        self.fixed = ["--binary", str(program), "--out", str(self.path / "out"), "--scratch", str(self.path / "scratch"), "--size", "tiny"]

    def check(self, *arguments, device="virtual"):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return gpu_check.main([*arguments, *self.fixed, "--device", device])

    def left(self, phase, name="summary.md"):
        with tarfile.open(self.path / "out" / f"{phase}.tar.gz") as tar:
            return tar.extractfile(f"{phase}/{name}").read().decode()

    def row(self, phase, name):
        line = next(line for line in self.left(phase).splitlines() if line.startswith(f"| {name} | tg"))
        return [cell.strip() for cell in line.strip("|").split("|")]

    def test_each_phase_leaves_one_archive_with_a_summary(self):
        self.assertEqual(self.check("all"), 0)
        left = sorted(path.name for path in (self.path / "out").iterdir())
        self.assertEqual(left, sorted(f"{phase}.tar.gz" for phase in gpu_check.PHASES))
        for phase in gpu_check.PHASES:
            self.assertTrue(self.left(phase).startswith(f"# {phase}\n"))

    def test_a_placement_without_a_profile_stands_beside_those_with_one(self):
        self.check("models", "budget")
        self.assertEqual(self.row("budget", "7b-static-unprofiled")[2], "40.0")
        for policy in ["static", "macro", "full", "static-again", "macro-again", "full-again"]:
            self.assertEqual(self.row("budget", f"7b-{policy}")[2], "80.0", policy)
        # The plan's estimate is the bound beyond the budget; stale moves are told.
        self.assertEqual(self.row("budget", "7b-full")[3:10], ["1.5", "100.0", "80%", "50.0%", "7", "123", "4"])
        self.assertEqual(self.row("budget", "7b-static")[8], "0")
        self.assertFalse((self.path / "scratch/7b.activation.profile").exists(), "the next phase begins without it")

    def test_looking_ahead_on_the_device_stands_beside_the_schedulers(self):
        self.check("models", "ahead")
        for name in ["static", "no-lookahead", "scheduler-2", "device-2", "scheduler-2-again", "device-2-again"]:
            self.assertEqual(self.row("ahead", name)[2], "80.0", name)

    def test_all_on_the_card_is_compared_with_its_bytes(self):
        self.check("models", "decode")
        # 2000 GB/s and 10 GB a token.
        self.assertEqual(self.row("decode", "7b-dense")[4], "200.0")

    def test_what_does_not_fit_into_the_time_is_left_out_and_named(self):
        self.check("models")
        self.check("budget", "--limit", "20")
        self.assertIn("7b-full: left out, it takes some 25 s", self.left("budget"))
        self.assertNotIn("| 7b-full |", self.left("budget"))

    def test_a_command_that_the_end_of_the_phase_stops_costs_its_row(self):
        self.check("models")
        run = subprocess.run

        def slow(command, **how):
            if "macro" in command:
                raise subprocess.TimeoutExpired(command, how["timeout"])
            return run(command, **how)

        with mock.patch.object(subprocess, "run", slow):
            self.check("budget")
        self.assertIn("7b-macro: stopped after", self.left("budget"))
        self.assertEqual(self.row("budget", "7b-full")[2], "80.0")

    def test_a_wrong_text_is_told_by_the_status(self):
        with mock.patch.dict("os.environ", {"WRONG": "1"}):
            self.assertEqual(self.check("models", "quick"), 1)
        self.assertIn("WRONG: the text of demo differs", self.left("quick"))

    def test_without_the_models_a_phase_says_which_phase_makes_them(self):
        self.assertEqual(self.check("decode"), 0)
        self.assertIn("first: tools/gpu_check models", self.left("decode"))


if __name__ == "__main__":
    unittest.main()
