"""Draws two timelines, for docs/timeline.md.

    python docs/scripts/draw_timeline.py

The script makes two short runs with three workers and a learner. The environment of one worker is
slow. In the first run, each batch comes from all workers; in the second, from one of them.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import gymnasium
import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.patches import Patch
from PIL import Image
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from trawl import MultiCollector
from trawl.observe import Span, Timeline, read_trace

PICTURE = Path(__file__).resolve().parents[1] / "assets" / "timeline.png"
COLOURS = {
    "env": "#0b7a75",
    "policy": "#e0a030",
    "weights": "#8e5ea2",
    "batch": "#c9c9c9",
    "learn": "#c8553d",
    "update": "#8e5ea2",
    "wait": "#eeeeee",
}
# Spans that enclose others are drawn first.
ORDER = ["wait", "batch", "learn", "update", "weights", "policy", "env"]
LABELS = {"batch": "rest of the batch"}
LEARNING, SHOWN = 0.06, 0.6
STEPS_PER_BATCH, BATCHES = 20, 12
# Seconds of a step of each worker's environment, and of a call of the policy.
STEPS, CALL = (0.002, 0.002, 0.005), 0.002


class Slow(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A Pendulum whose step takes some time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(gymnasium.make("Pendulum-v1"))
        self._seconds = seconds

    def step(self, action: Any) -> Any:
        time.sleep(self._seconds)
        return super().step(action)


class SlowPolicy(nn.Module):
    """A policy whose calls take some time, and whose weights are loaded from time to time."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, observation: Tensor) -> Tensor:
        """Returns the action."""
        time.sleep(CALL)
        action: Tensor = self.net(observation)
        return action


def run(sync: bool) -> Timeline:
    """Makes a run, and returns its timeline."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.json.gz")
        makes = [lambda seconds=seconds: Slow(seconds) for seconds in STEPS]
        each = STEPS_PER_BATCH * (len(STEPS) if sync else 1)
        frames = STEPS_PER_BATCH * len(STEPS) * BATCHES
        policy = TensorDictModule(SlowPolicy(), ["observation"], ["action"])
        with MultiCollector(
            makes, policy, sync=sync, frames_per_batch=each, total_frames=frames, trace=path
        ) as collector:
            for _ in collector:
                time.sleep(LEARNING if sync else LEARNING / len(STEPS))  # stands for a learner
                collector.update_policy_weights_()
        return read_trace(path)


def draw(axes: Any, timeline: Timeline, title: str) -> None:
    """Draws a part from the middle of a timeline."""
    lanes = ["learner", *(lane for lane in timeline.lanes if lane.startswith("worker"))]
    batches = [span for span in timeline.lane("learner") if span.name == "collect"]
    begin = batches[len(batches) // 3].start
    for row, lane in enumerate(lanes):
        spans: list[Span] = [s for s in timeline.lane(lane) if s.name in COLOURS]
        for span in sorted(spans, key=lambda span: ORDER.index(span.name)):
            tall = 0.8 if span.name != "update" else 0.5
            axes.broken_barh(
                [(1e3 * (span.start - begin), 1e3 * span.seconds)],
                (row - tall / 2, tall),
                facecolors=COLOURS[span.name],
                edgecolor="white",
                linewidth=0.5,
            )
    axes.set_xlim(0, 1e3 * SHOWN)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_title(title, loc="left", fontsize=10)
    axes.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def main() -> None:
    """Makes the runs, and draws them."""
    mpl.use("agg")
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 5.2), sharex=True)
    draw(above, run(sync=True), "sync=True: all workers wait for worker 2 and for the learner")
    draw(below, run(sync=False), "sync=False: each worker goes on by itself")
    below.set_xlabel("milliseconds")
    patches = [Patch(color=COLOURS[name], label=LABELS.get(name, name)) for name in COLOURS]
    names = {patch.get_label(): patch for patch in patches if patch.get_label() != "update"}
    names["weights"].set_label("weights, update")
    figure.legend(handles=list(names.values()), loc="lower center", ncols=6, frameon=False)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(PICTURE, dpi=120)
    with Image.open(PICTURE) as image:
        image.convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(PICTURE, optimize=True)
    print(f"{PICTURE}: {PICTURE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
