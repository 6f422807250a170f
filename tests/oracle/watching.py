"""Checks what a collector tells about itself: its figures, and the timeline of all that it did."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDictBase, is_leaf_nontensor

from tests.collectors.trace_parts import (
    assert_lanes_nest,
    assert_learner,
    assert_sums,
    assert_whole,
)
from trawl.observe import EpisodeStats, read_trace
from trawl.observe.waits import DRIVER_PARTS, WORKER_PARTS
from trawl.testing.oracle import Options


def check_figures(facts: dict[str, Any]) -> None:
    """Checks what holds for ``stats("both")`` of any collector that has delivered batches."""
    workers = [f"worker_{index}/" for index in range(facts.get("workers", 0))]
    made = [one for one in workers if facts[f"{one}batches"]]  # the other one was faster
    for parts, one in [(DRIVER_PARTS, ""), *((WORKER_PARTS, one) for one in ["", *made])]:
        assert sum(facts[f"{one}{part}_share"] for part in parts) == pytest.approx(1)
        assert all(facts[f"{one}{part}_seconds"] >= 0 for part in parts)
    for one in ["", *made]:
        assert facts[f"{one}frames_per_second"] > 0
        assert facts[f"{one}frames_per_second_overall"] > 0
        assert facts[f"{one}process_bytes"] > 1e6
    # Of few steps, most of the time may have been in the policy.
    assert facts["env_seconds"] + facts["policy_seconds"] > 0
    assert facts["restarts"] == facts["batches_ready"] == facts["queue_depth"] == 0
    if workers:
        # Batches of workers may not be delivered yet.
        assert facts["episodes"] <= sum(facts[f"{one}episodes"] for one in workers)


def check_episodes(
    facts: dict[str, Any], batches: Sequence[TensorDictBase], options: Options
) -> None:
    """Compares the episodes with those in the batches."""
    if not options.track_traj_ids or options.set_truncated:
        return  # a batch that ends is no episode that ends
    found = EpisodeStats()
    for batch in batches:
        found.update(batch)
    if options.restart:
        # A failure ends an episode whose last frame may have been delivered before.
        assert facts["episodes"] >= found.count
        return
    assert facts["episodes"] == found.count
    if 0 < found.count <= 100:
        assert facts["episode_length_mean"] == pytest.approx(found.recent_length)
        if not options.normalize_rewards:
            assert facts["episode_return_mean"] == pytest.approx(found.recent_return)


def check_fake(fake: TensorDictBase, batch: TensorDictBase, delivery: str) -> None:
    """Compares the layout of a batch of zeros with that of a real one."""
    found, wanted = (
        {key: getattr(one.get(key), "dtype", None) for key in keys_of(one)} for one in (fake, batch)
    )
    assert found == wanted, found.items() ^ wanted.items()
    # Trajectories that fill whole rows keep the shape of the batch.
    if delivery != "split":
        assert (fake.ndim, fake.names) == (batch.ndim, batch.names)


def keys_of(batch: TensorDictBase) -> list[Any]:
    return list(batch.keys(True, True, is_leaf=is_leaf_nontensor))


def check_timeline(facts: dict[str, Any], path: Path) -> None:
    """Compares the timeline of a whole run with the figures after its end."""
    timeline = read_trace(path)
    if "workers" in facts:
        assert_whole(timeline, facts, facts["workers"])
        return
    assert_lanes_nest(timeline)
    assert_learner(timeline, facts)
    assert_sums(timeline, "collector", facts)
