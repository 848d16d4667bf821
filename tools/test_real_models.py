"""Tests of real_models.py: what it calls equal, and where texts part."""
import unittest

import real_models


def theirs(*tokens):
    return [[list(text.encode()), logprob, [[list(text.encode()), logprob], [[0], logprob - 1.5]]] for text, logprob in tokens]


class BesideLlama(unittest.TestCase):
    def test_equal_texts_tell_the_largest_distance(self):
        found = real_models.beside_llama([[("a", -0.5), ("b", -1.0)]], [theirs(("a", -0.4), ("b", -1.25))])
        self.assertEqual((found["equal"], found["logprob_distance"], found["partings"]), (1, 0.25, []))

    def test_a_text_that_parts_names_the_token_and_the_gap(self):
        found = real_models.beside_llama([[("a", -0.5), ("x", -1.0)]], [theirs(("a", -0.5), ("b", -1.25))])
        self.assertEqual((found["equal"], found["partings"]), (0, [{"token": 1, "gap": 1.5}]))

    def test_a_step_that_failed_is_seen_in_the_table(self):
        row = {"file": "m.gguf", "show": {"ok": True, "result": ""}, "run": {"ok": False, "why": "exit 5"}}
        self.assertIn("| m.gguf | yes | **fails** | - |", real_models.table([row]))


if __name__ == "__main__":
    unittest.main()
