"""The cases of the figures in ``stats()``: what it costs to measure times and to sum up episodes.

Each case compares a collector with one that measures nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peers
import work
from harness import TRAWL, Case, Contender, Source
from trawl.rollout.episode_sums import EndedEpisodes

UNMEASURED = "without figures"
GOAL = 0.99


class NoSums:
    """Replaces the sums of episodes, and does nothing."""

    def add(self, *args: Any) -> None:
        pass

    def add_rows(self, *args: Any) -> None:
        pass

    def pop(self) -> EndedEpisodes:
        return EndedEpisodes()


def source(make: Callable[[], Any], policy: Any, frames: int, measures: bool) -> Source:
    """Batches of a collector that measures its time, or does not."""
    from trawl.collectors import Collector

    collector = Collector(
        peers.trawl_indexed(make), policy, frames_per_batch=frames, total_frames=-1
    )
    if not measures:
        collector.parts.loop.rollout.writer.sums = NoSums()
        collector._collect_timed = collector._collect
    try:
        for batch in collector:
            yield batch.numel(), batch
    finally:
        collector.shutdown()


def case(name: str, title: str, make: Callable[[], Any], policy: Any, frames: int) -> Case:
    """The case of an environment."""
    return Case(
        name,
        title,
        (
            Contender(TRAWL, lambda: source(make, policy, frames, True)),
            Contender(UNMEASURED, lambda: source(make, policy, frames, False), GOAL),
        ),
    )


def figures_cartpole() -> Case:
    return case("figures_cartpole", "1 CartPole, random actions", work.cartpole, None, 1000)


def figures_pool() -> Case:
    policy = work.acting(work.Argmax(work.mlp(4, 2, 9)))
    title = f"EnvPool, {work.POOL_SIZE} CartPoles, MLP 2x64"
    return case("figures_pool", title, work.cartpole_pool, policy, work.POOL_SIZE * 128)


CASES = {one.__name__: one for one in (figures_cartpole, figures_pool)}
