"""The dashboard of configs/monitoring asks for nothing that the daemon's /metrics page does not have: python3 -m unittest discover tools

The page's names are read where it is written, in src/serve/metrics.rs, so that a metric that is renamed there fails here. What Prometheus
makes of the questions is tried by tools/prometheus_check.py.
"""
import json
import re
import unittest
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "src/serve/metrics.rs").read_text()


def metrics(source):
    """Names on the page, each with its labels."""
    found = {}
    for kind, name in re.findall(r'page\.(gauge|counter|histogram|family|plain|head)\(\s*"(\w+)"', source):
        full = name if kind in ("plain", "head") else f"dynamicinfer_{name}"
        names = [f"{full}_{part}" for part in ("bucket", "sum", "count")] if kind == "histogram" else [full]
        found.update({each: {"le"} if each.endswith("_bucket") else set() for each in names})
    # Of a sample the labels stand in the call, or in the text that is named `label` before it.
    shared = set(re.findall(r'let label = [^;]*?\{\{(\w+)=', source))
    for name, rest in re.findall(r'page\.sample\(\s*"(\w+)",(.*?)\)(?:;|\n)', source, re.S):
        labels = set(re.findall(r'\{+(\w+)=', rest)) | (shared if "label(" in rest else set())
        found[f"dynamicinfer_{name}"] |= labels
    return found


def questions(dashboard):
    """Each panel's title, question and legend."""
    return [(panel["title"], target["expr"], target.get("legendFormat", "")) for panel in dashboard["panels"] for target in panel["targets"]]


def unknown(title, question, legend, known):
    """What a question wants and the page does not have."""
    names = re.findall(r"\b(?:dynamicinfer|process)_\w+", question)
    missing = [f"{title}: {name}" for name in names if name not in known]
    labels = {"instance", "job"}.union(*(known.get(name, set()) for name in names))
    asked = set(re.findall(r"\{\{(\w+)\}\}", legend)) | set(re.findall(r"[{,](\w+)=", question)) | set(re.findall(r"by \((\w+)\)", question))
    return missing + [f"{title}: label {label}" for label in sorted(asked - labels)]


class Dashboard(unittest.TestCase):
    def test_every_metric_and_label_is_on_the_page(self):
        known = metrics(PAGE)
        dashboard = json.loads((ROOT / "configs/monitoring/dashboard.json").read_text())
        asked = questions(dashboard)
        self.assertGreaterEqual(len(asked), 20)
        self.assertEqual([fault for each in asked for fault in unknown(*each, known)], [])

    def test_a_renamed_metric_and_a_lost_label_are_named(self):
        question = ("Parts", 'rate(dynamicinfer_engine_seconds_total{instance=~"$instance"}[30s])', "{{part}}, {{instance}}")
        self.assertEqual(unknown(*question, metrics(PAGE)), [])
        self.assertEqual(unknown(*question, metrics(PAGE.replace('"engine_seconds_total"', '"engine_s_total"'))),
                         ["Parts: dynamicinfer_engine_seconds_total", "Parts: label part"])
        self.assertEqual(unknown(*question, metrics(PAGE.replace("{{part=", "{{stage="))), ["Parts: label part"])

    def test_names_are_read_with_their_labels(self):
        known = metrics(PAGE)
        self.assertEqual(known["dynamicinfer_path_bytes_total"], {"path"})
        self.assertEqual(known["dynamicinfer_requests_rejected_total"], {"reason"})
        self.assertEqual(known["dynamicinfer_time_to_first_token_seconds_bucket"], {"le"})
        self.assertEqual(known["process_open_fds"], set())
        self.assertNotIn("dynamicinfer_time_to_first_token_seconds", known)


if __name__ == "__main__":
    unittest.main()
