"""What tools/nvrtc_check.py decides without a compiler: python3 -m unittest discover tools"""
import os
import tempfile
import unittest

import nvrtc_check as check

WHOLE = """//
.version 8.1
.target sm_75
.address_size 64

.extern .shared .align 16 .b8 dynamic_shared[];

.visible .entry add(
"""


class Faults(unittest.TestCase):
    def test_shared_memory_of_the_launch_is_no_fault(self):
        self.assertEqual(check.faults(WHOLE), [])

    def test_a_function_that_is_called_and_not_there_is_named(self):
        # NVRTC 12.1 did not know __dp4a and left it so; nothing that loads PTX takes it.
        call = ".extern .func  (.param .b32 func_retval0) _Z6__dp4aiii\n(\n\t.param .b32 _Z6__dp4aiii_param_0\n)\n;\n"
        nothing = ".extern .func trap_here\n(\n)\n;\n"
        found = check.faults(WHOLE + call + nothing)
        self.assertEqual([fault.split(",")[0] for fault in found], ["calls _Z6__dp4aiii", "calls trap_here"])

    def test_a_version_that_old_drivers_do_not_read_is_refused(self):
        found = check.faults(WHOLE.replace("8.1", "8.3"))
        self.assertEqual(len(found), 1)
        self.assertIn("is of PTX 8.3, not 8.1", found[0])
        self.assertIn("no version", check.faults("")[0])


class Compressed(unittest.TestCase):
    def test_the_same_text_makes_the_same_bytes_and_comes_back(self):
        text = WHOLE.encode() * 100
        self.assertEqual(check.compress(text), check.compress(text))
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "add.ptx.lzma")
            self.assertEqual(check.decompress(path), b"")
            with open(path, "wb") as file:
                file.write(check.compress(text))
            self.assertEqual(check.decompress(path), text)

    def test_a_damaged_file_is_no_text(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "add.ptx.lzma")
            with open(path, "wb") as file:
                file.write(check.compress(WHOLE.encode() * 100)[:-20])
            self.assertEqual(check.decompress(path), b"")

    def test_the_committed_files_are_whole_and_small(self):
        units, _ = check.sources()
        paths = [check.embedded_path(unit) for unit in units]
        self.assertEqual(sorted(os.listdir(check.PTX)), sorted(map(os.path.basename, paths)))
        for path in paths:
            self.assertEqual(check.faults(check.decompress(path).decode()), [])
        self.assertLess(sum(map(os.path.getsize, paths)), check.MAX_COMPRESSED)


class Cards(unittest.TestCase):
    def test_an_assembler_knows_the_cards_that_it_makes_code_for(self):
        said = """--gpu-name <gpu name>
        Allowed values for this option:  'compute_75','compute_100','lto_80','sm_75',
        'sm_90','sm_90a','sm_120'.
        Default value:  'sm_52'."""
        self.assertEqual(check.known(said) & set(check.TARGETS), {75, 90, 120})


class Drift(unittest.TestCase):
    def setUp(self):
        pairs = ", ".join(f"({release.replace('.', ', ')})" for release in check.RELEASES)
        self.program = f"pub const SHOWN: [(u32, u32); {len(check.RELEASES)}] = [{pairs}];"
        self.document = "shown: NVRTC " + ",\n".join(check.RELEASES) + ". No others"

    def test_the_program_and_the_documents_name_the_releases_that_are_tried(self):
        documents = {name: check.text_of(name) for name in check.DOCUMENTS}
        self.assertEqual(check.drift(check.text_of(check.PROGRAM), documents), [])

    def test_one_release_less_or_more_anywhere_is_told(self):
        self.assertEqual(check.drift(self.program, {"a": self.document}), [])
        for program in [self.program.replace("(12, 4), ", ""), self.program.replace("(12, 4)", "(12, 4), (12, 7)"), ""]:
            self.assertIn("says that NVRTC 12.1, " if program else "says that NVRTC ", check.drift(program, {})[0])
        for text in [self.document.replace("12.4,\n", ""), self.document.replace("13.5", "13.5, 13.6"),
                     self.document.replace("NVRTC 12.1", "NVRTC 12.0, 12.1"), ""]:
            self.assertEqual(len(check.drift(self.program, {"a": text})), 1, text)


class Failures(unittest.TestCase):
    def test_cards_that_are_refused_for_one_reason_are_one_line(self):
        class Now:
            def submit(self, call, *arguments):
                words = call(*arguments)
                return type("Done", (), {"result": lambda _: words})()

        def assemble(card):
            if card != 80:
                raise RuntimeError("no such function")

        attempts = check.Attempts(Now())
        for card in [75, 80, 86]:
            attempts.add("ptxas refuses a.ptx", card, assemble, card)
        self.assertEqual(attempts.problems(), ["ptxas refuses a.ptx for sm_75, sm_86: no such function"])


if __name__ == "__main__":
    unittest.main()
