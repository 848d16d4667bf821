"""Tests of figures.py: which run is shown, what is refused, and that a check tells a stale document."""
import contextlib
import io
import unittest
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import figures

HEADER = ",".join(figures.COLUMNS)


def table(run, *rows, question="decode", machine="A", header=HEADER):
    head = f"# question: {question}\n# machine: {machine}\n# model: a model\n# commit: 1234567\n"
    return figures.parse(run, "\n".join([head + header, *rows]) + "\n")


def row(case, ours, other, threads=2):
    return f"{case},{threads},3,{ours},{ours - 1},{ours + 1},{other},,,0.9,1.1"


class Newest(unittest.TestCase):
    def test_a_case_is_of_the_newest_run_that_has_it(self):
        old = table("2026-01-01-old", row("Q8_0", 10, 5), row("F16", 4, 2))
        new = table("2026-01-02-new", row("Q8_0", 30, 10))
        found = {r[0]: (t.run, r[3]) for t, r in figures.newest([old, new])}
        self.assertEqual(found, {"Q8_0": ("2026-01-02-new", "30"), "F16": ("2026-01-01-old", "4")})

    def test_threads_are_part_of_a_case(self):
        self.assertEqual(len(figures.newest([table("2026-01-01-a", row("F16", 4, 2, 1), row("F16", 6, 3, 2))])), 2)

    def test_two_runs_of_one_day_may_not_have_the_same_case(self):
        with self.assertRaisesRegex(figures.Invalid, "2026-01-01-a and 2026-01-01-b|2026-01-01-b and 2026-01-01-a"):
            figures.newest([table("2026-01-01-a", row("F16", 4, 2)), table("2026-01-01-b", row("F16", 5, 2))])


class Pages(unittest.TestCase):
    def test_a_comparison_shows_spread_and_ratio(self):
        page = figures.figures([table("2026-01-01-a", row("F16", 12.34, 5))])
        self.assertIn("## Fits in memory: decode\n\n### A\n", page)
        self.assertIn("- [2026-01-01](../runs/2026-01-01-a/README.md), recorded in `1234567`: a model.", page)
        self.assertIn("| F16 | 2 | 12.3 (11.3 to 13.3) | 5.00 | 2.47 | 0.90 to 1.10 | 3 | 2026-01-01 |", page)

    def test_a_run_of_which_nothing_is_left_is_not_named(self):
        page = figures.figures([table("2026-01-01-old", row("F16", 4, 2)), table("2026-01-02-new", row("F16", 5, 2))])
        self.assertNotIn("2026-01-01-old", page)

    def test_another_table_is_printed_as_it_is(self):
        page = figures.figures([table("2026-01-01-a", "m.gguf,2,20.901", question="published", header="file,threads,perplexity")])
        self.assertIn("| file | threads | perplexity | run |", page)
        self.assertIn("| m.gguf | 2 | 20.901 | 2026-01-01 |", page)

    def test_readme_has_the_rows_of_the_figures(self):
        tables = [table("2026-01-01-a", row("F16", 23, 1), machine="Zen 9"), table("2026-01-01-b", row("F16", 5, 2), machine="Zen 9, kept to AVX2")]
        page = figures.readme(tables, [("fits", "decode", "Zen 9", "F16", 2)])
        self.assertIn("| fits | 23.0 | 1.00 | 23.0 (0.90 to 1.10) | Zen 9 | [2026-01-01](runs/2026-01-01-a/README.md) |", page)

    def test_readme_says_which_row_no_run_has(self):
        with self.assertRaisesRegex(figures.Invalid, "no run has 'F32' with 2 threads"):
            figures.readme([table("2026-01-01-a", row("F16", 23, 1))], [("fits", "decode", "A", "F32", 2)])


class Refused(unittest.TestCase):
    def test_heads_and_rows_that_are_wrong(self):
        for message, run, text in [
            ("no '# machine", "2026-01-01-a", "# question: decode\n# model: m\n# commit: 1\ncase\n"),
            ("unknown question 'speed'", "2026-01-01-a", "# question: speed\n# machine: a\n# model: m\n# commit: 1\ncase\n"),
            ("not '# key: value'", "2026-01-01-a", "# no colon\ncase\n"),
            ("does not begin with a date", "a", "# question: decode\n# machine: a\n# model: m\n# commit: 1\ncase\n"),
            ("has the columns", "2026-01-01-a", "# question: decode\n# machine: a\n# model: m\n# commit: 1\ncase,ours\nF16,3\n"),
            ("as many fields", "2026-01-01-a", "# question: decode\n# machine: a\n# model: m\n# commit: 1\ncase,threads\nF16\n"),
        ]:
            with self.subTest(message), self.assertRaisesRegex(figures.Invalid, message):
                figures.parse(run, text)

    def test_a_document_without_markers(self):
        with self.assertRaisesRegex(figures.Invalid, "to here"):
            figures.replaced(f"{figures.BEGIN}\nno end\n", "part")


class Rows(unittest.TestCase):
    def test_medians_and_ratios_come_from_the_rounds(self):
        lines = ["model,vram_bytes,round,side,test,tokens_per_s,threads,busy,others_cpu"]
        for n, (ours, other) in enumerate([(10, 5), (12, 4), (11, 10)]):
            lines += [f"m.gguf,0,{n},dynamicinfer,tg,{ours},2,0,0", f"m.gguf,0,{n},llama.cpp,tg,{other},2,0,0", f"m.gguf,0,{n},llama.cpp,pp,99,2,0,0"]
        self.assertEqual(
            figures.compare_rows("\n".join(lines), "tg"),
            [["m.gguf", "2", "3", "11", "10", "12", "5", "4", "10", "1.10", "3.00"]],
        )


class Check(unittest.TestCase):
    def test_a_stale_document_fails_until_it_is_written(self):
        with TemporaryDirectory() as folder:
            root = Path(folder)
            (root / "docs").mkdir()
            run = root / "runs" / "2026-01-01-a"
            run.mkdir(parents=True)
            (run / "figures-x.csv").write_text(f"# question: decode\n# machine: A\n# model: m\n# commit: 1\n{HEADER}\n{row('F16', 4, 2)}\n")
            for name in ("README.md", "docs/figures.md"):
                (root / name).write_text(f"kept\n{figures.BEGIN}\n{figures.END}\nkept, too\n")

            def call(*args):
                with mock.patch.object(figures, "ROOT", root), mock.patch("sys.argv", ["figures.py", *args]), \
                        mock.patch.object(figures, "README_ROWS", [("fits", "decode", "A", "F16", 2)]), \
                        contextlib.redirect_stderr(io.StringIO()) as told:
                    return figures.main(), told.getvalue()

            self.assertEqual(call("--check"), (1, "out of date: docs/figures.md, README.md; run: python3 tools/figures.py\n"))
            self.assertEqual(call(), (0, ""))
            self.assertEqual(call("--check"), (0, ""))
            page = (root / "docs/figures.md").read_text()
            self.assertTrue(page.startswith("kept\n") and page.endswith("\nkept, too\n"))
            (root / "README.md").write_text((root / "README.md").read_text().replace("2.00", "2.50"))
            self.assertEqual(call("--check"), (1, "out of date: README.md; run: python3 tools/figures.py\n"))


if __name__ == "__main__":
    unittest.main()
