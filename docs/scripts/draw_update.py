"""Draws the life of an update of weights, for docs/weights.md.

    python docs/scripts/draw_update.py

Time goes from left to right; each row is somebody, or something, that has weights.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

PICTURE = Path(__file__).resolve().parents[1] / "assets" / "update.svg"
WIDTH, HEIGHT = 960, 420
LEFT, RIGHT, BAR = 150, 940, 40
OLD, NEW, BUSY, WRITE, INK = "#9db4c8", "#0b7a75", "#e3e3e3", "#c8553d", "#333333"
# Where each row is.
LEARNER, SLOT_0, SLOT_1, WORKER_0, WORKER_1 = 60, 150, 205, 295, 350
CHECK, COPY, TELL, DONE = 330, 370, 460, 500
TAKE_0, TAKEN_0, TAKE_1, TAKEN_1 = 540, 600, 700, 760


def main() -> None:
    """Writes the picture."""
    PICTURE.write_text(drawing(), encoding="utf-8")


def drawing() -> str:
    """The whole picture."""
    parts = [
        *row("learner", LEARNER),
        *row("slot 0", SLOT_0, "shared memory"),
        *row("slot 1", SLOT_1),
        *row("worker 0", WORKER_0),
        *row("worker 1", WORKER_1),
        bar(LEARNER, LEFT, CHECK, BUSY, "learns"),
        bar(LEARNER, CHECK, COPY, WRITE, "1", bright=True),
        bar(LEARNER, COPY, TELL, WRITE, "2 copies", bright=True),
        bar(LEARNER, TELL, DONE, WRITE, "3", bright=True),
        bar(LEARNER, DONE, RIGHT, BUSY, "learns on"),
        bar(SLOT_0, LEFT, DONE, OLD, "version 3, whole", at=260),
        bar(SLOT_0, DONE, RIGHT, "none", "free for version 5", at=840),
        bar(SLOT_1, LEFT, COPY, "none", "free"),
        bar(SLOT_1, COPY, TELL, WRITE, "written", bright=True),
        bar(SLOT_1, TELL, RIGHT, NEW, "version 4, whole", bright=True),
        bar(WORKER_0, LEFT, TAKE_0, OLD, "a batch, all of it version 3"),
        bar(WORKER_0, TAKE_0, TAKEN_0, NEW, "4 takes", bright=True),
        bar(WORKER_0, TAKEN_0, RIGHT, NEW, "5 a batch, version 4", bright=True, at=840),
        bar(WORKER_1, LEFT, TAKE_1, OLD, "a longer batch, all of it version 3"),
        bar(WORKER_1, TAKE_1, TAKEN_1, NEW, "4 takes", bright=True),
        bar(WORKER_1, TAKEN_1, RIGHT, NEW, "5 a batch, version 4", bright=True),
        arrow((COPY + TELL) / 2, LEARNER + BAR, SLOT_1),
        arrow((TAKE_0 + TAKEN_0) / 2, SLOT_1 + BAR, WORKER_0),
        arrow((TAKE_1 + TAKEN_1) / 2, SLOT_1 + BAR, WORKER_1),
        line(LEFT, HEIGHT - 15, RIGHT, HEIGHT - 15, marker=True),
        text(LEFT - 12, HEIGHT - 11, "time", anchor="end"),
        text(CHECK, LEARNER - 12, "update_policy_weights_()", anchor="start", mono=True),
    ]
    body = "\n  ".join(parts)
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"
     font-family="sans-serif" font-size="14" fill="{INK}">
  <title>The life of an update</title>
  <defs>
    <marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">
      <path d="M0,0 L9,4 L0,8 z"/>
    </marker>
  </defs>
  <rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>
  {body}
</svg>
"""


def row(name: str, y: int, above: str = "") -> list[str]:
    """What a row is called."""
    found = [text(LEFT - 12, y + BAR / 2 + 5, name, anchor="end")]
    if above:
        found.append(text(LEFT - 12, y - 8, above, anchor="end", size=12))
    return found


def bar(
    y: int,
    start: int,
    end: int,
    colour: str,
    label: str,
    bright: bool = False,
    at: float | None = None,
) -> str:
    """Something that lasts; its label is in the middle, or ``at`` a place no arrow goes through."""
    edge = ' stroke="#9a9a9a" stroke-dasharray="4 3"' if colour == "none" else ' stroke="#ffffff"'
    shape = (
        f'<rect x="{start}" y="{y}" width="{end - start}" height="{BAR}" rx="4" '
        f'fill="{colour}"{edge}/>'
    )
    x = (start + end) / 2 if at is None else at
    return shape + text(x, y + BAR / 2 + 5, label, fill="#ffffff" if bright else INK)


def arrow(x: float, start: int, end: int) -> str:
    """Weights that go from one row to another."""
    return line(x, start, x, end, marker=True)


def line(x1: float, y1: float, x2: float, y2: float, marker: bool = False) -> str:
    style = f'stroke="{INK}" stroke-width="1.5"' + ' marker-end="url(#head)"' * marker
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" {style}/>'


def text(
    x: float,
    y: float,
    content: str,
    anchor: str = "middle",
    fill: str = INK,
    size: int = 14,
    mono: bool = False,
) -> str:
    family = ' font-family="monospace"' if mono else ""
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{fill}" font-size="{size}"{family}>'
        f"{escape(content)}</text>"
    )


if __name__ == "__main__":
    main()
