#!/usr/bin/env python3
"""Shows HTML pages in a headless Chromium at 380, 900 and 1500 pixels, light and dark, and fails where something is cut.

    python3 tools/check_pages.py experiment-vram_sweep/summary.html [--pictures DIR] [--ui target/release/dynamicinfer]

With --ui, of a daemon's page, too: with a model whose name is markup, that names and answers stay text, that markdown is what it should be, that an answer
comes and can be stopped, that a script from elsewhere does not run, and that the budget changes by the form. Every cell, paragraph and figure has to be as
wide as what is in it, and every text of a plot has to lie inside the plot. No page may load anything from elsewhere or have a script that fails. Needs
Chromium (Debian: chromium-headless-shell), and nothing else.
"""

import argparse
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

WIDTHS = (380, 900, 1500)


# A name that a careless page would take for markup.
HOSTILE = "<img src=x onerror=window.hit=1><script>window.hit=1</script>"
INJECT = """
(() => {
  const script = document.createElement('script');
  try {
    script.textContent = 'window.hit = 1';
  } catch {
    // Where no script may be made from text.
  }
  document.body.append(script);
  const frame = document.createElement('div');
  try {
    frame.setAttribute('onclick', 'window.hit = 1');
  } catch {
    // As above.
  }
  document.body.append(frame);
  frame.click();
  script.remove();
  frame.remove();
  return window.hit === undefined;
})()
"""

# Markdown and what becomes of it.
MARKDOWN = [
    ["**a** *b* _c_ `d<e` ~~f~~", "<p><strong>a</strong> <em>b</em> <em>c</em> <code>d&lt;e</code> <del>f</del></p>"],
    ["snake_case_name 2 * 3 * 4", "<p>snake_case_name 2 * 3 * 4</p>"],
    ["# One\n\ntwo\nthree", "<h3>One</h3><p>two<br>three</p>"],
    ["- a\n- b\n  1. c\n  2. d\n\n- e", "<ul><li>a</li><li>b<ol><li>c</li><li>d</li></ol></li><li>e</li></ul>"],
    ["3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'],
    ["> a\n> - b", "<blockquote><div class=\"parts\"><p>a</p><ul><li>b</li></ul></div></blockquote>"],
    ["| a | b |\n|---|--:|\n| 1 | x\\|y |", '<div class="scroll"><table><thead><tr><th>a</th><th class="right">b</th></tr></thead><tbody><tr><td>1</td>'
     '<td class="right">x|y</td></tr></tbody></table></div>'],
    ["a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"],
    ["[a](https://b.example/c_(d))", '<p><a href="https://b.example/c_(d)" target="_blank" rel="noopener noreferrer">a</a></p>'],
    ["see https://b.example/c.", '<p>see <a href="https://b.example/c" target="_blank" rel="noopener noreferrer">https://b.example/c</a>.</p>'],
    ["[a](javascript:alert(1)) [b](data:text/html,x) ![c](file:///d)", "<p>[a](javascript:alert(1)) [b](data:text/html,x) ![c](file:///d)</p>"],
    ["<img src=x onerror=alert(1)> &lt; <script>", "<p>&lt;img src=x onerror=alert(1)&gt; &amp;lt; &lt;script&gt;</p>"],
    ["```\n<b>\n\n# no\n```\nafter", '<div class="code"><div><span>code</span><button type="button" class="quiet">Copy</button></div><pre><code>&lt;b&gt;\n\n# no'
     "</code></pre></div><p>after</p>"],
    ["```py\nopen", '<div class="code"><div><span>py</span><button type="button" class="quiet">Copy</button></div><pre><code>open</code></pre></div>'],
    ["*a **b", "<p>*a **b</p>"],
    ["\\*a\\* `` b`c ``", "<p>*a* <code>b`c</code></p>"],
]
# That each is what it should be, however it comes: whole, and in pieces of one letter.
RENDERED = """
(async () => {
  const {show} = await import('/ui/markdown.js');
  const wrong = [];
  for (const [text, wanted] of %s) {
    const [whole, pieces] = [document.createElement('div'), document.createElement('div')];
    show(whole, text);
    for (let i = 1; i <= text.length; i++) show(pieces, text.slice(0, i));
    for (const made of [whole, pieces]) if (made.innerHTML !== wanted) wrong.push(`${text}: ${made.innerHTML}`);
  }
  const deep = document.createElement('div');
  show(deep, '> '.repeat(5000) + '*'.repeat(5000) + '['.repeat(5000) + '- '.repeat(2000));
  return wrong;
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
        command = [program, "serve", "demo", "--listen", str(port), "--socket", f"{folder}/s", "--name", HOSTILE,
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

    def must(right, what):
        if not right:
            wrong.append(f"page: {what}")

    def wait(ms):
        browser.value(f"new Promise(done => setTimeout(done, {ms}))")

    def until(expression):
        for _ in range(120):
            if browser.value(expression):
                return True
            wait(250)
        return False

    def send(text):
        browser.value(f"document.getElementById('text').value = {json.dumps(text)}; document.getElementById('composer').requestSubmit()")

    by = "document.getElementById('%s')"
    browser.size(900, False)
    browser.open(f"{url}/ui")
    must(browser.value("location.pathname") == "/", "/ui leads elsewhere")
    must(until("document.getElementById('door').open"), "it does not ask for the token")
    for typed in ("not the token", password):
        browser.value(f"{by % 'token'}.value = {json.dumps(typed)}; {by % 'enter'}.requestSubmit()")
        wait(1500)
        must(browser.value("document.getElementById('door').open") == (typed != password), f"the door is not right after '{typed}'")
    browser.open(f"{url}/?again#token={password}")
    must(until(f"{by % 'live'}.className === 'ready'"), "it does not say that it is ready")
    must(browser.value("location.hash") == "", "the token stays in the address")
    wrong += [f"markdown: {what}" for what in browser.value(RENDERED % json.dumps(MARKDOWN))]
    send("Once upon a time <b>there</b> was")
    must(until("document.querySelector('article.assistant footer span')?.textContent.includes('tokens/s')"), "no answer comes")
    said = browser.value("document.querySelector('article.assistant .text').textContent")
    must(len(said) > 20, f"the answer is '{said}'")
    must(browser.value("document.querySelector('article.user .body').textContent") == "Once upon a time <b>there</b> was", "the question is not as it was typed")
    browser.value(f"{by % 'seed'}.value = 7")
    send("More")
    until("document.querySelectorAll('article.assistant .text').length === 2")
    send("")
    must(until("document.querySelector('article.assistant:last-child [role=alert]')?.textContent === '(stopped)' || !document.querySelector('.stop')"), "it is not stopped")
    until("!document.querySelector('.stop')")
    for _ in range(3):
        send("And then? " * 20)
        must(until("!document.querySelector('.stop')"), "an answer does not end")
    must(browser.value("document.querySelectorAll('.note').length > 0 && !document.querySelector('article p.bad')"), "a full context ends the talk: "
         + browser.value("document.getElementById('log').innerText.slice(-300)"))
    wrong += check(browser, f"{url}/", "page", pictures, own=(f"{url}/",))
    shown = browser.value("[...document.querySelectorAll('#model option')].map(option => option.textContent)")
    must(HOSTILE in shown, f"the model's name is not what it is: {shown}")
    must(not browser.value("document.querySelectorAll('img, #model *:not(option)').length + (window.hit || 0)"), "a name became markup")
    browser.value("if (!document.body.classList.contains('side')) document.getElementById('toggle').click()")
    must(until("document.querySelectorAll('#resident g').length > 0"), "no layer is shown")
    before = browser.value(f"Number({by % 'budget'}.value)")
    browser.value(f"{by % 'slide'}.focus(); {by % 'budget'}.value = {before - 0.5}; {by % 'budget'}.dispatchEvent(new Event('input'));"
                  f"{by % 'change'}.requestSubmit(); new Promise(done => setTimeout(done, 2500))")
    asked = urllib.request.urlopen(urllib.request.Request(f"{url}/v1/x/budget", headers=bearer), timeout=60)
    now = json.load(asked)["vram_budget_bytes"] / 2**20
    must(abs(now - (before - 0.5)) < 0.02, f"the budget is {now} MiB and not {before - 0.5}: {browser.value(by % 'said' + '.textContent')}")
    must(browser.value(INJECT), "a script that is not the daemon's own runs")
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
            print(f"the daemon's page: {'nothing is wrong' if not found else f'{len(found)} things are wrong'}")
            wrong += found
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
