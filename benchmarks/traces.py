"""The cases of timelines: what it costs to write one.

Each case compares a collector that writes a timeline, of batches or of single steps as well, with
one that doesn't.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import work
from harness import TRAWL, Case, Contender, Source

WITHOUT = "without a timeline"
# A timeline shall cost less than 2 %.
GOAL = 0.98


def source(make: Callable[..., Any], detail: str | None) -> Source:
    """Batches of a collector that writes a timeline of a given detail, or none."""
    from trawl.observe import TraceOptions

    with tempfile.TemporaryDirectory() as folder:
        trace = None if detail is None else TraceOptions(Path(folder, "run.json.gz"), detail)
        collector = make(trace=trace, total_frames=-1)
        try:
            for batch in collector:
                yield batch.numel(), batch
        finally:
            collector.shutdown()


def case(name: str, title: str, make: Callable[..., Any]) -> Case:
    """The case of a collector."""
    return Case(
        name,
        title,
        (
            Contender(TRAWL, lambda: source(make, "batch"), note="detail='batch'"),
            Contender("Trawl, steps", lambda: source(make, "step"), note="detail='step'"),
            Contender(WITHOUT, lambda: source(make, None), GOAL),
        ),
    )


def _one(frames: int) -> Callable[..., Any]:
    """A collector of the cheapest environment."""

    def make(**options: Any) -> Any:
        from trawl.collectors import Collector

        policy = work.acting(work.Argmax(work.mlp(4, 2, 4)))
        env = _indexed(work.cartpole)
        return Collector(env, policy, frames_per_batch=frames, **options)

    return make


def _indexed(make: Callable[[], Any]) -> Any:
    from trawl.envs import GymEnv

    return GymEnv(make(), categorical_action_encoding=True)


def _workers(**options: Any) -> Any:
    from trawl.collectors import MultiSyncCollector

    policy = work.acting(work.mlp(3, 1))
    return MultiSyncCollector(
        work.pendulum, policy, num_workers=2, frames_per_batch=400, num_threads=1, **options
    )


def trace_cartpole() -> Case:
    return case("trace_cartpole", "1 CartPole, MLP 2x64, batches of 1000", _one(1000))


def trace_cartpole_short() -> Case:
    return case("trace_cartpole_short", "1 CartPole, MLP 2x64, batches of 100", _one(100))


def trace_workers() -> Case:
    return case("trace_workers", "2 workers of 1 Pendulum, batches of 400", _workers)


CASES = {one.__name__: one for one in (trace_cartpole, trace_cartpole_short, trace_workers)}
