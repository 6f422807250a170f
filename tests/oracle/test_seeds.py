"""The same seed gives the same data, wherever environments are stepped."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from tests.oracle.comparing import dense
from trawl.collectors import (
    AsyncBatchedCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
)
from trawl.envs import ParallelEnv, SerialEnv
from trawl.testing.oracle import IDS

ENVS = 3


class Drawing(gymnasium.Env[Any, Any]):
    """Shows draws from its own generator and, if asked for, from all global ones.

    Args:
        everywhere: True to draw from the global generators, too.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float64)
    action_space = spaces.Discrete(4)

    def __init__(self, everywhere: bool = False) -> None:
        self.everywhere = everywhere

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._draw(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        drawn = self._draw()
        return drawn, float(action), bool(drawn[0] < 0.3), False, {}

    def _draw(self) -> Any:
        found = [self.np_random.random(), 0, 0, 0]
        if self.everywhere:
            found[1:] = np.random.random(), random.random(), torch.rand(()).item()
        return np.array(found)


def sampling(observation: torch.Tensor) -> torch.Tensor:
    drawn = torch.rand(observation.shape[:-1]) + observation[..., 0]
    return torch.nn.functional.one_hot((2 * drawn).long() % 4, 4)


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    """Checks that batches are the same, to the bit."""
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        for key in other.keys(True, True):
            a, b = dense(one[key]), dense(other[key])
            assert a.dtype == b.dtype, key
            assert torch.equal(a, b), key


def batches(make: Callable[[], Any], seed: int = 5, also: bool = False) -> list[Any]:
    """Returns batches after a seed; with ``also``, other code draws between them."""
    with make() as collector:
        if also:
            collector.next()
        collector.set_seed(seed)
        found, first = [], 0
        for batch in islice(collector, 3):
            found.append(batch.clone())
            # Numbers of trajectories go on after a seed.
            first = batch[IDS].min() if len(found) == 1 else first
            found[-1][IDS] -= first
            if also:
                torch.rand(3), random.random(), np.random.random()
        return found


def groups() -> ParallelEnv:
    return ParallelEnv(ENVS, Drawing, backend="thread", groups=ENVS)


SOURCES: dict[str, Any] = {
    "list": [Drawing] * ENVS,
    "serial": lambda: SerialEnv(ENVS, Drawing),
    "vector": lambda: SyncVectorEnv([Drawing] * ENVS),
    "threads": lambda: ParallelEnv(ENVS, Drawing, backend="thread"),
    "processes": lambda: ParallelEnv(ENVS, Drawing, envs_per_worker=2),
}


def one(source: Any, policy: Any = None) -> Collector:
    return Collector(source, policy, frames_per_batch=12)


@pytest.mark.parametrize("policy", [None, sampling], ids=["random", "sampling"])
def test_environments_have_the_same_frames_in_every_place(policy) -> None:
    found = {name: batches(partial(one, source, policy)) for name, source in SOURCES.items()}
    for name in SOURCES:
        assert_same(found[name], found["list"])
    assert_same(batches(partial(one, SOURCES["list"], policy), also=True), found["list"])
    with pytest.raises(AssertionError):
        assert_same(batches(partial(one, SOURCES["list"], policy), seed=6), found["list"])
    rows = found["list"][0]["observation"]
    assert len({float(row) for row in rows[..., 0].flatten()}) > 3 * ENVS


def test_groups_have_the_same_episodes() -> None:
    """Their actions are drawn in another order, on which their own draws don't depend."""
    in_turn = batches(partial(one, groups, sampling))
    assert_same(batches(partial(one, groups, sampling)), in_turn)
    together = batches(partial(one, SOURCES["list"], sampling))
    for a, b in zip(in_turn, together, strict=True):
        assert torch.equal(a["observation"], b["observation"])
        assert torch.equal(a["next", "done"], b["next", "done"])


EVERYWHERE = partial(Drawing, everywhere=True)
KINDS: dict[str, Any] = {
    "one": EVERYWHERE,
    "list": [EVERYWHERE] * ENVS,
    "vector": lambda: SyncVectorEnv([EVERYWHERE] * ENVS),
}


@pytest.mark.parametrize("policy", [None, sampling], ids=["random", "sampling"])
@pytest.mark.parametrize("kind", KINDS)
def test_draws_from_global_generators_are_repeated(kind, policy) -> None:
    make = partial(one, KINDS[kind], policy)
    assert_same(batches(make, also=True), batches(make))


def workers(cls: Any, method: str, policy: Any) -> Any:
    size = 12 if cls is MultiAsyncCollector else 24
    sources = [[EVERYWHERE] * ENVS] * 2
    return cls(sources, policy, frames_per_batch=size, start_method=method)


@pytest.mark.parametrize("policy", [None, sampling], ids=["random", "sampling"])
def test_workers_have_the_same_frames_in_this_process(policy) -> None:
    inline, noisy, processes = (
        batches(partial(workers, MultiSyncCollector, method, policy), also=also)
        for method, also in (("inline", False), ("inline", True), ("forkserver", False))
    )
    # In which order the workers' trajectories go on after the seed is open.
    assert_same(*([batch.exclude(IDS) for batch in one] for one in (noisy, inline)))
    assert_same(processes, inline)
    parts = [batch.unbind(0) for batch in inline]
    assert not any(torch.equal(a["observation"], b["observation"]) for a, b in parts)


@pytest.mark.parametrize("policy", [None, sampling], ids=["random", "sampling"])
def test_each_worker_is_a_collector_whose_seed_follows(policy) -> None:
    with workers(MultiSyncCollector, "inline", policy) as collector:
        after = collector.set_seed(11)
        found = [collector.next() for _ in range(3)]
    seed = 11
    for worker in range(2):
        with one([EVERYWHERE] * ENVS, policy) as alone:
            seed = alone.set_seed(seed)
            for batch in found:
                assert_same([batch[worker].exclude(IDS)], [alone.next().exclude(IDS)])
    assert seed == after


def test_a_static_seed_is_the_same_for_all() -> None:
    with workers(MultiSyncCollector, "inline", sampling) as collector:
        assert collector.set_seed(3, static_seed=True) == 3
        batch = collector.next()
    assert len(batch["observation"][:, :, 0, 0].unique()) == 1
    assert torch.equal(batch["action"][0], batch["action"][1])


def test_without_a_seed_workers_and_collectors_differ() -> None:
    first, second = (workers(MultiSyncCollector, "forkserver", sampling) for _ in range(2))
    with first, second:
        batches = first.next(), second.next()
    draws = torch.stack([batch["observation"] for batch in batches])
    assert draws.unique().numel() > 0.9 * draws.numel()


def test_what_asynchronous_workers_collected_before_a_seed_comes_before_it() -> None:
    def after_seeding(begun: int) -> list[list[torch.Tensor]]:
        found: list[list[torch.Tensor]] = [[], []]
        with workers(MultiAsyncCollector, "forkserver", sampling) as collector:
            for _ in range(begun):
                collector.next()
            collector.set_seed(5)
            while min(map(len, found)) < 6:
                batch = collector.next()
                found[int(batch[IDS].min()) % 2].append(batch["observation"].clone())
        return found

    for fresh, again in zip(after_seeding(0), after_seeding(4), strict=True):
        (at,) = [i for i, batch in enumerate(again) if torch.equal(batch, fresh[0])]
        assert torch.equal(torch.stack(again[at : at + 3]), torch.stack(fresh[:3]))


def ready(**options: Any) -> AsyncBatchedCollector:
    makers = [Drawing] * ENVS
    options |= {"env_backend": "threading", "min_batch_size": ENVS, "server_timeout": math.inf}
    return AsyncBatchedCollector(makers, policy=sampling, frames_per_batch=12, **options)


@pytest.mark.parametrize(
    "make",
    [
        partial(Collector, [EVERYWHERE] * ENVS, None, frames_per_batch=12),
        partial(
            MultiSyncCollector, [EVERYWHERE] * 2, None, frames_per_batch=24, start_method="inline"
        ),
        ready,
    ],
)
def test_the_option_seeds_like_the_method(make) -> None:
    with make(seed=4) as given, make() as other:
        other.set_seed(4)
        wanted = [other.next() for _ in range(3)]
        assert_same([given.next() for _ in range(3)], wanted)
        other.set_seed(5)
        assert not torch.equal(other.next()["observation"], given.next()["observation"])
        for seed, error in (
            ("4", TypeError),
            (1.5, TypeError),
            (True, TypeError),
            (-1, ValueError),
        ):
            for refuses in (lambda seed: make(seed=seed), other.set_seed):
                with pytest.raises(error, match=r"^seed must (not be negative|be an integer)"):
                    refuses(seed)
