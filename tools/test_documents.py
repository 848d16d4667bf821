"""Documents hold together: every link leads to a file and a heading, and texts stay short. Standard library only.

    python3 -m unittest discover tools
"""
import re
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").glob("*.md"))
# The papers' equations and the made figures may be as long as they need to be.
UNBOUNDED = {"papers.md", "figures.md"}
MAX_WORDS = 20_000
MAX_MAP_BYTES = 10_000
# Lines with a word for a person where a thing is usually meant: the rule in CONTRIBUTING, and a text that the demo model wrote.
MAX_PERSONS = 2


def prose(text):
    """The text without fenced blocks and without code."""
    text = re.sub(r"^(`{3,})[^\n]*\n.*?^\1\s*$", "", text, flags=re.S | re.M)
    return re.sub(r"`[^`\n]*`", "`", text)


def anchors(text):
    """Headings of a document as GitHub makes anchors of them."""
    found = {}
    text = re.sub(r"^(`{3,})[^\n]*\n.*?^\1\s*$", "", text, flags=re.S | re.M)
    names = set()
    for heading in re.findall(r"^#+ (.*)$", text, flags=re.M):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        count = found.get(name, 0)
        found[name] = count + 1
        names.add(name if count == 0 else f"{name}-{count}")
    return names


def broken(path, text):
    """Links of a document that lead nowhere."""
    bad = []
    for target in re.findall(r"\]\(([^()\s]+)\)", prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        if not there.exists():
            bad.append(target)
        elif anchor and anchor not in anchors(there.read_text()):
            bad.append(target)
    return bad


def documents_named(text):
    """Files of docs/ that a text names."""
    return set(re.findall(r"\bdocs/[a-z_]+\.md\b", text))


class Documents(unittest.TestCase):
    def test_every_link_leads_to_a_file_and_a_heading(self):
        beside = [ROOT / "kernels/README.md", ROOT / "tools/README.md", ROOT / "runs/README.md", ROOT / "profiles/models/README.md"]
        for path in DOCUMENTS + beside:
            with self.subTest(path=path.relative_to(ROOT)):
                self.assertEqual(broken(path, path.read_text()), [])

    def test_every_document_that_a_source_names_is_there(self):
        suffixes = {".rs", ".py", ".toml", ".conf", ".cu", ".cuh", ".md"}
        for folder in ("src", "tests", "tools", "benches", "configs", "kernels", "profiles"):
            for path in (ROOT / folder).rglob("*"):
                if path.suffix not in suffixes or path.resolve() == Path(__file__).resolve() or "target" in path.parts:
                    continue
                for name in documents_named(path.read_text(errors="replace")):
                    self.assertTrue((ROOT / name).is_file() or name == "docs/gguf.md", f"{path.relative_to(ROOT)} names {name}")

    def test_documents_stay_short(self):
        words = sum(len(p.read_text().split()) for p in (ROOT / "docs").glob("*.md") if p.name not in UNBOUNDED)
        self.assertLessEqual(words, MAX_WORDS)
        self.assertLessEqual(len((ROOT / "ARCHITECTURE.md").read_bytes()), MAX_MAP_BYTES)

    def test_things_are_not_called_who(self):
        found = [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
            for path in DOCUMENTS
            for number, line in enumerate(path.read_text().splitlines(), 1)
            if re.search(r"\b(who|whoever|nobody|somebody)\b", line, flags=re.I)
        ]
        self.assertLessEqual(len(found), MAX_PERSONS, "\n".join(found))

    def test_no_sentence_begins_with_of_or_what(self):
        for path in DOCUMENTS:
            with self.subTest(path=path.relative_to(ROOT)):
                self.assertEqual(re.findall(r"(?:^|[.:;?] |\| |- )((?:Of|What) (?!\|)[^.?\n]*[.])", prose(path.read_text()), flags=re.M), [])

    def test_planted_faults_are_caught(self):
        text = "# A title, with `code`\n\n## Same\n\n## Same\n\n```sh\n# no heading\n[x](nowhere.md)\n```\n[a](#same-1) [b](#no-heading) [c](missing.md)\n"
        self.assertEqual(anchors(text), {"a-title-with-code", "same", "same-1"})
        path = ROOT / "planted.md"
        self.assertEqual(broken(path, text.replace("(#same-1)", "(README.md#speed)").replace("(#no-heading)", "(README.md#no-heading)")), ["README.md#no-heading", "missing.md"])


if __name__ == "__main__":
    unittest.main()
