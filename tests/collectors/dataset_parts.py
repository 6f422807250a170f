"""What a collector with a sink must have written, wherever its workers live."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from multi_parts import envs

from trawl.data import MemmapSink, MinariSink, ParquetSink, load

FRAMES = 240
SYNC = pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])


def sink_in(directory: Path, kind: str) -> Any:
    """A sink of some kind; Minari wants to know the environment."""
    if kind == "minari":
        return MinariSink(directory / "numbered-v0", envs(1)[0]())
    return {"memmap": MemmapSink, "parquet": ParquetSink}[kind](directory / "frames")


def check_dataset(make: Callable[..., Any], directory: Path, kind: str) -> None:
    """Each frame of two workers is in it once, and those of an episode are in their order."""
    sink = sink_in(directory, kind)
    with make(envs(2), total_frames=FRAMES, sink=sink) as collector:
        assert sum(batch.numel() for batch in collector) == FRAMES
    rows = load(sink.directory)
    assert len(rows) == FRAMES
    # Of what is observed, [0] is the environment, [1] the episode and [2] the step in it.
    episodes: dict[tuple[int, int], list[int]] = {}
    for env, episode, step in rows["observation"][:, :3].int().tolist():
        episodes.setdefault((env, episode), []).append(step)
    assert {env for env, _ in episodes} == {0, 1}
    assert all(steps == list(range(len(steps))) for steps in episodes.values())
    assert (rows["next", "observation"][:, 2] == rows["observation"][:, 2] + 1).all()
