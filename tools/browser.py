"""A headless Chromium, spoken to by its DevTools protocol over two pipes. Standard library only."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")

# For an element: whether something in it is wider or higher than what is shown of it.
CUT = """
(() => {
  const found = [];
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) found.push(`the page: ${root.scrollWidth} > ${root.clientWidth}`);
  for (const e of document.querySelectorAll('body *')) {
    if (e.closest('svg') || !e.getClientRects().length || ['SCRIPT', 'STYLE'].includes(e.tagName)) continue;
    let scrolls = e;
    while (scrolls && !['auto', 'scroll'].includes(getComputedStyle(scrolls).overflowX)) scrolls = scrolls.parentElement;
    // What can be scrolled to can be seen; a field's text, too.
    if (scrolls || e.matches('input, select, textarea, option')) continue;
    const inline = getComputedStyle(e).display === 'inline';
    const box = e.getBoundingClientRect();
    const cut = !inline && (e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 0);
    if (cut || box.right > root.clientWidth + 1 || box.left < -1)
      found.push(`${e.tagName} ${e.textContent.slice(0, 40)}: ${e.scrollWidth} > ${e.clientWidth}, ${box.left} to ${box.right}`);
  }
  for (const svg of document.querySelectorAll('svg')) {
    const whole = svg.getBoundingClientRect();
    if (!whole.width) continue;
    for (const t of svg.querySelectorAll('text')) {
      const box = t.getBoundingClientRect();
      if (box.left < whole.left - 1 || box.right > whole.right + 1 || box.top < whole.top - 1 || box.bottom > whole.bottom + 1)
        found.push(`svg text ${t.textContent}: ${box.left - whole.left} to ${box.right - whole.left} of ${whole.width}`);
    }
  }
  return found;
})()
"""


def find():
    """The browser's path, or None."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page in one browser."""

    def __init__(self):
        program = find()
        if not program:
            raise SystemExit("there is no Chromium; Debian: apt-get install chromium-headless-shell")
        self.profile = tempfile.TemporaryDirectory()
        ours, theirs = os.pipe(), os.pipe()

        def as_three_and_four():
            # Above 4 first: either of ours may be 3 or 4 itself.
            read, write = os.dup(ours[0]), os.dup(theirs[1])
            read, write = (fd if fd > 4 else os.dup(fd) for fd in (read, write))
            os.dup2(read, 3)
            os.dup2(write, 4)

        self.process = subprocess.Popen(
            [program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
             f"--user-data-dir={self.profile.name}", "about:blank"],
            preexec_fn=as_three_and_four, close_fds=False, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        os.close(ours[0])
        os.close(theirs[1])
        self.to, self.answers = os.fdopen(ours[1], "wb", 0), os.fdopen(theirs[0], "rb")
        self.count, self.session, self.events = 0, None, []
        target = next(t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def message(self):
        """The browser's next message."""
        text = bytearray()
        while (byte := self.answers.read(1)) != b"\0":
            if not byte:
                raise RuntimeError("the browser has ended")
            text += byte
        return json.loads(text)

    def ask(self, method, **params):
        """Calls a method, waits for its answer, and keeps the events that come before it."""
        self.count += 1
        asked = {"id": self.count, "method": method, "params": params}
        if self.session:
            asked["sessionId"] = self.session
        self.to.write(json.dumps(asked).encode() + b"\0")
        while (got := self.message()).get("id") != self.count:
            self.events.append(got)
        if "error" in got:
            raise RuntimeError(f"{method}: {got['error']['message']}")
        return got["result"]

    def size(self, width, dark):
        """A window of this width, in light or dark."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url, headers=None):
        """Loads a page."""
        if headers is not None:
            self.ask("Network.setExtraHTTPHeaders", headers=headers)
        self.events.clear()
        self.ask("Page.navigate", url=url)
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self.message())

    def value(self, expression):
        """What a JavaScript expression comes to; a promise is waited for."""
        got = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in got:
            raise RuntimeError(got["exceptionDetails"].get("exception", {}).get("description", "failed"))
        return got["result"].get("value")

    def cut(self):
        """What is not shown whole on the page; empty if all is."""
        return self.value(CUT)

    def picture(self, path):
        """The whole page as PNG."""
        height = min(6000, self.value("document.documentElement.scrollHeight"))
        width = self.value("document.documentElement.clientWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        got = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        Path(path).write_bytes(base64.b64decode(got["data"]))

    def close(self):
        """Ends the browser."""
        self.process.terminate()
        self.process.wait()
        self.profile.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
