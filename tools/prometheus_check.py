#!/usr/bin/env python3
"""Has a real Prometheus scrape a daemon by configs/monitoring/prometheus.yml, and asks it everything that the dashboard beside it asks.

    apt-get install prometheus
    python3 tools/prometheus_check.py target/release/dynamicinfer [--program prometheus]

Ends with 1 if Prometheus does not take the configuration, cannot scrape, or knows no answer to a question of a panel. Standard library only.
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent.parent / "configs" / "monitoring"


def free_port():
    """A port that nothing listens at."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def get(url, headers=None, body=None):
    """A JSON answer."""
    request = urllib.request.Request(url, data=body, headers=headers or {})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def until(what, seconds, why):
    """Waits until something is true, or ends the program."""
    for _ in range(int(seconds * 4)):
        try:
            if what():
                return
        except OSError:
            pass
        time.sleep(0.25)
    sys.exit(why)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("daemon")
    parser.add_argument("--program", default="prometheus", help="Prometheus' own")
    args = parser.parse_args()
    port, own = free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder) / "token"
        token.write_text("0123456789abcdef0123456789abcdef\n")
        token.chmod(0o600)
        config = (HERE / "prometheus.yml").read_text()
        config = config.replace("/etc/prometheus/dynamicinfer.token", str(token)).replace("127.0.0.1:8093", f"127.0.0.1:{port}")
        (Path(folder) / "prometheus.yml").write_text(config.replace("scrape_interval: 5s", "scrape_interval: 1s"))
        environment = {**os.environ, "DYNAMICINFER_SERVE_TOKEN_FILE": str(token)}
        serve = [args.daemon, "serve", "demo", "--socket", f"{folder}/socket", "--listen", str(port), "--device", "virtual", "--ffn-share", "0.5",
                 "--machine", "demo-pc", "--no-history"]
        daemon = subprocess.Popen(serve, env=environment, stderr=subprocess.DEVNULL)
        prometheus = subprocess.Popen([args.program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
                                       f"--web.listen-address=127.0.0.1:{own}"], stderr=subprocess.DEVNULL)
        try:
            return check(f"http://127.0.0.1:{own}", f"http://127.0.0.1:{port}", token.read_text().strip())
        finally:
            for process in (prometheus, daemon):
                process.terminate()
                process.wait()


def check(prometheus, daemon, token):
    """Asks the daemon for answers for a while, and Prometheus for what it has seen."""
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    until(lambda: get(f"{daemon}/v1/models", headers)["data"], 120, "the daemon does not answer")

    def query(expression):
        found = get(f"{prometheus}/api/v1/query?" + urllib.parse.urlencode({"query": expression}))
        return found["data"]["result"]

    until(lambda: query("up") and query("up")[0]["value"][1] == "1", 60, "Prometheus cannot scrape the daemon")
    for i in range(12):
        body = json.dumps({"prompt": f"Story {i}", "max_tokens": 48, "seed": i}).encode()
        get(f"{daemon}/v1/completions", headers, body)
        time.sleep(0.5)
    failed = 0
    for panel in json.loads((HERE / "dashboard.json").read_text())["panels"]:
        for target in panel["targets"]:
            expression = target["expr"].replace("$__rate_interval", "30s").replace("$instance", ".*")
            found = [r["value"][1] for r in query(expression)]
            # Nothing was audited: that is no number, and no fault.
            names = re.findall(r"(?:dynamicinfer|process)_\w+", expression)
            known = all(query(name) for name in names)
            good = bool(found) and known
            failed += not good
            print(f"{'held' if good else 'NOT HELD'}: {panel['title']}: {', '.join(found[:4])}")
    print(f"{failed} questions without an answer")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
