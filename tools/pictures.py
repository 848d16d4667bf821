#!/usr/bin/env python3
"""Pictures of the terminal as SVG: `chat` with a model, and `top` while a daemon answers with a part of the model on disk.

    pip install pyte
    python3 tools/pictures.py target/release/dynamicinfer MODEL.gguf -o docs/pictures

The program runs in a terminal of its own with an empty home directory; pyte reads what it shows. Nothing in a picture is typed in by hand.
"""
import argparse
import contextlib
import fcntl
import html
import http.client
import json
import os
import pty
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path

import pyte

# Seconds that any one thing may take.
PATIENCE = 180
# How long `top` watches.
SECONDS = 25
# Width and height of a character and the font's size, in pixels.
CELL, LINE, FONT = 8.4, 18, 14
BACK, FRONT = "#14181d", "#d5dae0"
PALETTE = {"black": "#3b4252", "red": "#e06c75", "green": "#6fb35a", "brown": "#a8842c", "blue": "#5aa2e6", "magenta": "#c678dd", "cyan": "#56b6c2",
           "white": FRONT}
COLORS = {**PALETTE, **{f"bright{name}": value for name, value in PALETTE.items()}}
# pyte names the first colours of 256 by their usual values.
COLORS |= dict(zip(["000000", "cd0000", "00cd00", "cdcd00", "0000ee", "cd00cd", "00cdcd", "e5e5e5"], PALETTE.values()))
COLORS["brightblack"] = COLORS["7f7f7f"] = "#8a929c"


class Terminal:
    """A program in a terminal of `columns` by `lines`."""

    def __init__(self, arguments, environment, columns, lines):
        self.screen = pyte.Screen(columns, lines)
        self.stream = pyte.ByteStream(self.screen)
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process = subprocess.Popen(arguments, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True)
        os.close(theirs)

    def read(self, seconds):
        """Shows what comes within this time; false where nothing came."""
        if not select.select([self.ours], [], [], seconds)[0]:
            return False
        self.stream.feed(os.read(self.ours, 65536))
        return True

    def until(self, shown):
        """Reads until `shown(screen's lines)` holds."""
        end = time.monotonic() + PATIENCE
        while not shown([line.rstrip() for line in self.screen.display]):
            if time.monotonic() > end:
                sys.exit("pictures.py: waited in vain; the screen is:\n" + "\n".join(self.screen.display))
            self.read(0.2)

    def watch(self, seconds):
        """Reads for this time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.read(0.1)

    def type(self, text):
        os.write(self.ours, text.encode())

    def end(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        os.close(self.ours)


def color(name, default):
    if name == "default":
        return default
    return COLORS.get(name) or f"#{name}"


def style(cell):
    """A character's colours and weight: what is in front, what is behind, whether it is bold."""
    front, back = color(cell.fg, FRONT), color(cell.bg, None)
    if cell.reverse:
        front, back = back or BACK, front
    return front, back, cell.bold


def pieces(row, columns):
    """Neighbours of one style: (first column, text, style)."""
    found = []
    for x in range(columns):
        cell = row[x]
        if found and found[-1][2] == style(cell):
            found[-1][1].append(cell.data)
        else:
            found.append((x, [cell.data], style(cell)))
    return [(x, "".join(text), how) for x, text, how in found]


def svg(screen, title):
    """The screen as an SVG, without the empty lines at its end."""
    used = max((y + 1 for y, line in enumerate(screen.display) if line.strip()), default=1)
    width, height = screen.columns * CELL + 2 * LINE, used * LINE + 2 * LINE
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" aria-label="{html.escape(title)}">',
        f'<rect width="{width:.0f}" height="{height}" rx="8" fill="{BACK}"/>',
        f'<g font-family="DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="{FONT}" fill="{FRONT}" xml:space="preserve">',
    ]
    for y in range(used):
        for x, text, (front, back, bold) in pieces(screen.buffer[y], screen.columns):
            left, top, length = LINE + x * CELL, LINE + y * LINE, len(text) * CELL
            if back:
                out.append(f'<rect x="{left:.1f}" y="{top}" width="{length:.1f}" height="{LINE}" fill="{back}"/>')
            if text.strip():
                start = len(text) - len(text.lstrip(" "))
                text = text.strip(" ")
                fill = f' fill="{front}"' if front != FRONT else ""
                weight = ' font-weight="bold"' if bold else ""
                out.append(f'<text x="{left + start * CELL:.1f}" y="{top + FONT}" textLength="{len(text) * CELL:.1f}" lengthAdjust="spacingAndGlyphs"'
                           f'{fill}{weight}>{html.escape(text, quote=False)}</text>')
    return "\n".join([*out, "</g>", "</svg>", ""])


def chat(program, model, ram, environment):
    """Three questions and what the last answer took."""
    terminal = Terminal([program, "chat", model, "--here", "--temp", "0", "-n", "160", "-t", "2"], environment, 92, 34)

    def ready(lines):
        return lines[terminal.screen.cursor.y] == ">>>"

    terminal.until(ready)
    for line in ["Rust function that sums a slice of i32. Only code.", "The same for f64.", "SQL: the ten customers with the most orders. Only the query.", "/stats"]:
        terminal.type(line + "\r")
        terminal.watch(0.5)
        terminal.until(ready)
    picture = svg(terminal.screen, "dynamicinfer chat with a real model")
    terminal.end()
    return picture


class Daemon(http.client.HTTPConnection):
    """HTTP over the daemon's socket."""

    def __init__(self, path):
        super().__init__("localhost", timeout=PATIENCE)
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)


def top(program, model, ram, environment):
    """The daemon's dashboard while it answers two clients from `ram` and the disk."""
    path = environment["XDG_RUNTIME_DIR"] + "/dynamicinfer.sock"
    daemon = subprocess.Popen([program, "serve", model, "-t", "2", "-c", "512", "--parallel", "2", "--ram", ram], env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        for line in daemon.stderr:
            if "is ready" in line:
                break
        threading.Thread(target=daemon.stderr.read, daemon=True).start()

        def client(n):
            body = {"prompt": f"Chapter {n}. Once upon a time", "max_tokens": 400, "ignore_eos": True}
            with contextlib.suppress(OSError, http.client.HTTPException):  # the daemon has ended
                while True:
                    connection = Daemon(path)
                    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
                    connection.getresponse().read()

        for n in range(2):
            threading.Thread(target=client, args=(n,), daemon=True).start()
        terminal = Terminal([program, "top"], environment, 92, 30)
        terminal.watch(SECONDS)
        picture = svg(terminal.screen, "dynamicinfer top while two clients are answered")
        terminal.end()
        return picture
    finally:
        daemon.kill()
        daemon.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--ram", default="440MiB", help="memory for the daemon, less than the model takes [default: 440MiB]")
    parser.add_argument("-o", "--out", type=Path, default=Path("docs/pictures"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for make in (chat, top):
        with tempfile.TemporaryDirectory() as home:
            environment = {"HOME": home, "PATH": os.environ["PATH"], "TERM": "xterm-256color", "XDG_RUNTIME_DIR": home, "LANG": "C.UTF-8"}
            (args.out / f"{make.__name__}.svg").write_text(make(str(args.program.resolve()), str(args.model), args.ram, environment))


if __name__ == "__main__":
    main()
