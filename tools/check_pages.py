#!/usr/bin/env python3
"""Shows HTML pages in a headless Chromium at 400, 800 and 1600 pixels, light and dark, and fails where something is cut.

    python3 tools/check_pages.py experiment-vram_sweep/summary.html [--pictures DIR] [--ui target/release/dynamicinfer]

With --ui, of a daemon's page, too: with a model whose name is markup, that names and messages stay text, that a script from elsewhere does not run, and
that the budget changes by the form. Every cell, paragraph and figure has to be as wide as what is in it, and every text of a plot has to lie inside the plot. No page may load
anything from elsewhere or have a script that fails. Needs Chromium (Debian: chromium-headless-shell), and nothing else.
"""

import argparse
import base64
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from browser import Browser

WIDTHS = (400, 800, 1600)


# A name that a careless page would take for markup.
HOSTILE = "<img src=x onerror=window.hit=1><script>window.hit=1</script>"
INJECT = """
(() => {
  const script = document.createElement('script');
  script.textContent = 'window.hit = 1';
  document.body.append(script);
  const frame = document.createElement('div');
  frame.setAttribute('onclick', 'window.hit = 1');
  document.body.append(frame);
  frame.click();
  script.remove();
  frame.remove();
  return window.hit === undefined;
})()
"""


def check(browser, url, name, pictures, own=()):
    """What is wrong with the page, as lines; pictures of it into the folder, if there is one. `own` is what its files' addresses begin with."""
    wrong = []
    for width in WIDTHS:
        for dark in (False, True):
            browser.size(width, dark)
            browser.open(url)
            if own:
                # Two samples at least.
                browser.value("new Promise(done => setTimeout(done, 2500))")
            scheme = "dark" if dark else "light"
            wrong += [f"{name}, {width}, {scheme}: {what}" for what in browser.cut()]
            wanted = [e["params"]["request"]["url"] for e in browser.events if e.get("method") == "Network.requestWillBeSent"]
            wrong += [f"{name}: asks for {other}" for other in wanted if other != url and not other.startswith(own or ("none",))]
            thrown = [e for e in browser.events if e.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")]
            wrong += [f"{name}: {e['params']}" for e in thrown]
            if pictures:
                browser.picture(pictures / f"{name}-{width}-{scheme}.png")
    return wrong


def check_ui(browser, program, pictures):
    """The same of the page of a daemon of its own, and what is only true of that."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    url, password = f"http://127.0.0.1:{port}", "0123456789abcdef0123456789abcdef"
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder) / "token"
        token.write_text(password)
        token.chmod(0o600)
        environment = {**os.environ, "DYNAMICINFER_SERVE_TOKEN_FILE": str(token), "DYNAMICINFER_SERVE_STEERING": "all"}
        command = [program, "serve", "demo", "--ui", "--listen", str(port), "--socket", f"{folder}/s", "--name", HOSTILE,
                   "--device", "virtual", "--machine", "demo-pc", "--ffn-share", "0.5", "--no-history"]
        daemon = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        try:
            return on_daemon(browser, url, password, pictures)
        finally:
            browser.ask("Page.navigate", url="about:blank")
            daemon.terminate()
            daemon.wait()


def on_daemon(browser, url, password, pictures):
    """What is wrong with the page at `url`."""
    bearer = {"Authorization": f"Bearer {password}", "Content-Type": "application/json"}

    def completion(tokens):
        body = json.dumps({"prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True}).encode()
        urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, bearer), timeout=120).read()

    for _ in range(200):
        try:
            completion(100)
            break
        except OSError:
            time.sleep(0.3)
    wrong = []
    browser.size(800, False)
    browser.open(f"{url}/ui", headers={})
    if browser.value("document.querySelector('h1') !== null"):
        wrong.append("ui: the page is there without the password")
    browser.ask("Network.setExtraHTTPHeaders", headers={"Authorization": "Basic " + base64.b64encode(f"x:{password}".encode()).decode()})
    wrong += check(browser, f"{url}/ui", "ui", pictures, own=(f"{url}/ui/",))
    if browser.value("document.getElementById('model').textContent") != HOSTILE:
        wrong.append("ui: the model's name is not what it is")
    if browser.value("document.querySelectorAll('img, h1 *').length + (window.hit || 0)"):
        wrong.append("ui: a name became markup")
    if browser.value("document.getElementById('live').textContent") != "live":
        wrong.append("ui: it does not say that it is live")
    before = browser.value("Number(document.getElementById('budget').value)")
    browser.value(f"document.getElementById('budget').value = {before - 0.5}; document.getElementById('budget').dispatchEvent(new Event('input'));"
                  "document.querySelector('#change button').click(); new Promise(done => setTimeout(done, 2500))")
    asked = urllib.request.urlopen(urllib.request.Request(f"{url}/v1/x/budget", headers=bearer), timeout=60)
    now = json.load(asked)["vram_budget_bytes"] / 2**20
    if abs(now - (before - 0.5)) > 0.02:
        wrong.append(f"ui: the budget is {now} MiB and not {before - 0.5}: {browser.value('document.getElementById(`said`).textContent')}")
    browser.value("document.getElementById('budget').value = 0.001; document.getElementById('budget').dispatchEvent(new Event('input'));"
                  "document.querySelector('#change').requestSubmit(); new Promise(done => setTimeout(done, 2500))")
    if not browser.value(INJECT):
        wrong.append("ui: a script that is not the daemon's own runs")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="*", type=Path)
    parser.add_argument("--ui", metavar="PROGRAM", help="look at the page of a daemon, too")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="PNG files of what was seen")
    args = parser.parse_args()
    if args.pictures:
        args.pictures.mkdir(parents=True, exist_ok=True)
    wrong = []
    with Browser() as browser:
        for page in args.page:
            name = page.parent.resolve().name if page.stem == "summary" else page.stem
            found = check(browser, page.resolve().as_uri(), name, args.pictures)
            print(f"{page}: {'nothing is cut' if not found else f'{len(found)} things are wrong'}")
            wrong += found
        if args.ui:
            found = check_ui(browser, args.ui, args.pictures)
            print(f"/ui: {'nothing is wrong' if not found else f'{len(found)} things are wrong'}")
            wrong += found
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
