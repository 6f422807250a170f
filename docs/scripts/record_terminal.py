"""Makes the pictures of the README: what `make demo` shows, and the plot that it draws.

    python docs/scripts/record_terminal.py

The commands run on a terminal of their own, and the picture shows what they wrote there.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ASSETS = Path(__file__).resolve().parents[1] / "assets"
COMMANDS = (
    "trawl collect Pendulum-v1 --frames 10000 --out runs/demo",
    "trawl show runs/demo --plot runs/demo/returns.png",
)
WIDTH, HEIGHT = 96, 60
# What a live display sends before it draws itself anew over what it drew before.
ERASE_LINE = "\x1b[2K"
CURSOR = re.compile(r"\x1b\[\?25[lh]")


def main() -> None:
    """Runs the demo in an empty folder, and writes the pictures into docs/assets."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
            console.print(Text.from_ansi(last_screen(run(command, folder))))
        ASSETS.mkdir(exist_ok=True)
        shutil.copy(Path(folder, "runs/demo/returns.png"), ASSETS / "returns.png")
    svg = console.export_svg(title="trawl", theme=MONOKAI)
    (ASSETS / "demo.svg").write_text(without_fonts(svg), encoding="utf-8")


def run(command: str, folder: str) -> str:
    """What a trawl command writes to a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", *command.split()],
        cwd=folder,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLORTERM": "", "NO_COLOR": ""},
    )
    os.close(theirs)
    written = bytearray()
    while block := read(ours):
        written += block
    os.close(ours)
    if process.wait():
        raise SystemExit(f"{command} failed:\n{written.decode()}")
    return written.decode()


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # on Linux, how a terminal says that nobody writes to it any more
        return b""


def last_screen(written: str) -> str:
    """What stays on the screen, of a live display and what comes after it."""
    kept = written.rpartition(ERASE_LINE)[2]
    return CURSOR.sub("", kept).replace("\r", "").rstrip("\n")


def without_fonts(svg: str) -> str:
    """The picture without fonts from the network: it uses what the reader has."""
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


if __name__ == "__main__":
    main()
