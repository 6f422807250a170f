"""Draws the layouts of batches and buffers, for docs/replay-and-trajectories.md.

    python docs/scripts/draw_layouts.py

Each picture is of a batch that a collector made just now: a square is a frame, its colour the
environment, its number the trajectory; a bar at its right end says that the episode ended with it.
A dashed square is padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import torch
from tensordict import TensorDictBase
from torchrl.data import LazyTensorStorage, ReplayBuffer

from trawl import Collector, MultiSyncCollector, split_trajectories
from trawl.testing import NumberedEnv

PICTURES = Path(__file__).resolve().parents[1] / "assets" / "layouts"
SIZE, GAP, LEFT, TOP = 34, 4, 14, 46
COLOURS = ["#0b7a75", "#c8553d", "#5b7fa3", "#b48a2c"]
INK, PALE = "#333333", "#9a9a9a"
LENGTHS = [[3, 2], [1, 4], [2, 2, 3], [5]]


def makes(count: int) -> list[Callable[[], Any]]:
    """Environments, each with episodes of other lengths."""
    return [lambda i=i: NumberedEnv(i, lengths=LENGTHS[i]) for i in range(count)]


def first(collector: Any) -> TensorDictBase:
    """The first batch."""
    with collector:
        batch: TensorDictBase = collector.next()
    return batch


def filled(ndim: int, **options: Any) -> TensorDictBase:
    """What a buffer holds after two batches of two environments."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(100, ndim=ndim), batch_size=1)
    with Collector(
        makes(2), frames_per_batch=12, total_frames=24, replay_buffer=buffer, **options
    ) as collector:
        for _ in collector:
            pass
    content: TensorDictBase = buffer[:]
    return content


def layouts() -> Iterator[tuple[str, str, TensorDictBase]]:
    """Name, title, and batch of each picture."""
    one, two = makes(1), makes(2)
    options: dict[str, Any] = {"frames_per_batch": 12}
    yield "single", "one environment", first(Collector(one[0], **options))
    batch = first(Collector(two, **options))
    yield "batched", "two environments", batch
    for how, cat in (("stack", "stack"), ("0", 0), ("-1", -1)):
        workers = MultiSyncCollector(
            [makes(2)[:2], makes(4)[2:]], frames_per_batch=24, cat_results=cat
        )
        yield f"workers_{how}", f"two workers of two, cat_results={cat!r}", first(workers)
    yield "split", "split_trajs=True", split_trajectories(batch)
    for kind in ("padded", "cat"):
        collector = Collector(two, **options, trajs_per_batch=4, traj_format=kind)
        yield f"whole_{kind}", f'trajs_per_batch=4, traj_format="{kind}"', first(collector)
    yield "buffer_2d", "a storage with ndim=2, after two batches", filled(2)
    flat = {"postproc": lambda batch: batch.reshape(-1)}
    yield "buffer_flat", "batches flattened by postproc, after two", filled(1, **flat)
    yield "buffer_whole", "trajs_per_batch=1, after two batches", filled(1, trajs_per_batch=1)


def main() -> None:
    """Writes the pictures."""
    PICTURES.mkdir(exist_ok=True)
    for name, title, batch in layouts():
        (PICTURES / f"{name}.svg").write_text(drawing(title, batch), encoding="utf-8")


def drawing(title: str, batch: TensorDictBase) -> str:
    """The picture of a batch."""
    shape = "(" + ", ".join(map(str, batch.shape)) + ("," if batch.dim() == 1 else "") + ")"
    blocks = [batch[None]] if batch.dim() == 1 else [batch]
    if batch.dim() == 3:
        blocks = list(batch.unbind(0))
    parts, top, columns = [], TOP, 0
    for block in blocks:
        for row in block:
            parts += [square(LEFT + i * (SIZE + GAP), top, frame) for i, frame in enumerate(row)]
            columns = max(columns, len(row))
            top += SIZE + GAP
        top += 3 * GAP
    width = max(2 * LEFT + columns * (SIZE + GAP), 470)
    body = "\n  ".join(parts)
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top}" width="{width}" height="{top}" \
font-family="sans-serif" role="img" aria-label="{escape(title, {'"': "&quot;"})}: {shape}">
  <rect width="100%" height="100%" fill="white"/>
  <text x="{LEFT}" y="20" font-size="15" fill="{INK}">{escape(title)}</text>
  <text x="{LEFT}" y="38" font-size="13" fill="{PALE}">batch_size {shape}</text>
  {body}
</svg>
"""


def square(x: int, y: int, frame: TensorDictBase) -> str:
    """One frame."""
    mask = frame.get(("collector", "mask"), torch.tensor(True))
    if not mask.item():
        return (
            f'<rect x="{x}" y="{y}" width="{SIZE}" height="{SIZE}" fill="none" stroke="{PALE}" '
            'stroke-dasharray="3 3"/>'
        )
    env, number = int(frame["observation"][0]), int(frame["collector", "traj_ids"])
    parts = [
        f'<rect x="{x}" y="{y}" width="{SIZE}" height="{SIZE}" fill="{COLOURS[env]}"/>',
        f'<text x="{x + SIZE / 2}" y="{y + SIZE / 2 + 5}" font-size="14" fill="white" '
        f'text-anchor="middle">{number}</text>',
    ]
    if frame["next", "done"].item():
        bar = f'x="{x + SIZE - 5}" y="{y}" width="5" height="{SIZE}" fill="{INK}"'
        parts.append(f"<rect {bar}/>")
    return "".join(parts)


if __name__ == "__main__":
    main()
