#!/usr/bin/env python3
"""Shows HTML pages in a headless Chromium at 400, 800 and 1600 pixels, light and dark, and fails where something is cut.

    python3 tools/check_pages.py experiment-vram_sweep/summary.html [--pictures DIR]

Every cell, paragraph and figure has to be as wide as what is in it, and every text of a plot has to lie inside the plot. No page may load
anything from elsewhere or have a script that fails. Needs Chromium (Debian: chromium-headless-shell), and nothing else.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from browser import Browser

WIDTHS = (400, 800, 1600)


def check(browser, url, name, pictures):
    """What is wrong with the page, as lines; pictures of it into the folder, if there is one."""
    wrong = []
    for width in WIDTHS:
        for dark in (False, True):
            browser.size(width, dark)
            browser.open(url)
            scheme = "dark" if dark else "light"
            wrong += [f"{name}, {width}, {scheme}: {what}" for what in browser.cut()]
            wanted = [e["params"]["request"]["url"] for e in browser.events if e.get("method") == "Network.requestWillBeSent"]
            wrong += [f"{name}: asks for {other}" for other in wanted if other != url]
            thrown = [e for e in browser.events if e.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded")]
            wrong += [f"{name}: {e['params']}" for e in thrown]
            if pictures:
                browser.picture(pictures / f"{name}-{width}-{scheme}.png")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", nargs="+", type=Path)
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
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
