"""Makes the picture of a report of `trawl show --html`, for the docs. It needs Chromium.

    python docs/scripts/draw_report.py

A short run is collected and reported on, and a headless browser draws a part of the page.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ASSETS = Path(__file__).resolve().parents[1] / "assets"
COMMANDS = (
    "trawl collect LunarLander-v3 --frames 20000 --workers 3 --async --seed 1 --out run "
    "--trace run.json.gz",
    "trawl show run --html report.html",
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--hide-scrollbars",
)
# Sections in the picture, and its size.
SHOWN = ("#bottleneck", "#timeline")
WIDTH, HEIGHT = 1000, 1470


def main() -> None:
    """Writes docs/assets/report.png."""
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            run(command, folder)
        draw(Path(folder, "report.html"), ASSETS / "report.png")


def run(command: str, folder: str) -> None:
    """Runs a command of Trawl in a folder."""
    subprocess.run([sys.executable, "-m", *command.split()], cwd=folder, check=True)


def draw(page: Path, picture: Path) -> None:
    """Draws some sections of a page."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit(f"none of {', '.join(BROWSERS)} is installed")
    hidden = f"header, footer, section:not({', '.join(SHOWN)}) {{ display: none; }}</style>"
    with tempfile.TemporaryDirectory() as home:
        part = Path(home, "part.html")
        text = page.read_text(encoding="utf-8").replace("</style>", hidden, 1)
        part.write_text(text, encoding="utf-8")
        flags = (f"--user-data-dir={home}", f"--window-size={WIDTH},{HEIGHT}")
        # Chromium complains about services that it lacks, and draws the page all the same.
        subprocess.run(
            [browser, *FLAGS, *flags, f"--screenshot={picture}", part.as_uri()],
            check=True,
            stderr=subprocess.DEVNULL,
        )
    # Few colors keep the file small.
    with Image.open(picture) as drawn:
        small = drawn.convert("RGB").quantize(64, dither=Image.Dither.NONE)
    small.save(picture, optimize=True)


if __name__ == "__main__":
    main()
