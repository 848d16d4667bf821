"""What tools/licences.py decides, without cargo: python3 -m unittest discover tools"""
import os
import tempfile
import unittest

import licences


def package(name, folder="", kind="lib"):
    manifest = os.path.join(folder, name, "Cargo.toml")
    return {"id": name, "name": name, "version": "1.0.0", "license": "MIT", "manifest_path": manifest, "targets": [{"kind": [kind]}]}


def node(name, **needs):
    deps = [{"pkg": dep, "dep_kinds": [{"kind": kind}]} for dep, kind in needs.items()]
    return {"id": name, "deps": deps}


class Linked(unittest.TestCase):
    def test_what_runs_only_while_the_program_is_built_is_left_out(self):
        metadata = {
            "packages": [*map(package, ["dynamicinfer", "near", "far", "build", "tests"]), package("macro", kind="proc-macro")],
            "resolve": {"nodes": [
                node("dynamicinfer", near=None, build="build", tests="dev", macro=None), node("near", far=None),
                node("far"), node("build"), node("tests"), node("macro", tests=None),
            ]},
        }
        self.assertEqual([found["name"] for found in licences.linked(metadata)], ["far", "near"])


class Report(unittest.TestCase):
    def test_a_text_is_printed_once_and_a_crate_without_one_is_named(self):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in [("a", "free \n"), ("b", "free"), ("c", None)]:
                os.mkdir(os.path.join(folder, name))
                if text:
                    with open(os.path.join(folder, name, "LICENSE-MIT"), "w") as file:
                        file.write(text)
            lines, without = licences.report([package(name, folder) for name in "abc"])
        self.assertEqual(lines.count("free"), 1)
        self.assertIn("a 1.0.0, b 1.0.0", lines)
        self.assertEqual(without, ["c 1.0.0"])


if __name__ == "__main__":
    unittest.main()
