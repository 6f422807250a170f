"""The cases of environments that step each at its own pace."""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hand
import peers
import work
from harness import TRAWL, Source
from multi.collecting import Collecting, SideBySide
from multi.peers import trawl_parallel
from multi.race import Contender, Goal, Race

FRAMES = 2048
TORCHRL, LOOPS = "TorchRL", "hand-written loops"
TOGETHER, ARITHMETIC = "all together", "arithmetic"


class Still(nn.Module):
    """The same action for each environment."""

    def forward(self, observation: Tensor) -> Tensor:
        return torch.zeros(len(observation), 1)


def image_policy() -> Any:
    """Makes the policy of the case with images."""
    return work.acting(Still())


def cartpole_policy() -> Any:
    """Makes the policy of the case with CartPoles."""
    return work.acting(work.Argmax(work.mlp(4, 2)))


def slow_policy(count: int) -> Any:
    """Makes the policy of the case with environments that wait."""
    return work.acting(work.SlowPolicy(count))


def trawl_ready(
    makes: Sequence[Callable[[], Any]], policy: Callable[[], Any], frames: int, **options: Any
) -> Callable[[], Any]:
    """Trawl's collector, whose policy acts for the environments that are ready."""
    from trawl.collectors import AsyncBatchedCollector

    return partial(
        AsyncBatchedCollector, list(makes), policy=policy(), frames_per_batch=frames, **options
    )


def torchrl_ready(
    makes: Sequence[Callable[[], Any]], policy: Callable[[], Any], frames: int, **options: Any
) -> Callable[[], Any]:
    """TorchRL's collector, with the policy in a process that environments reach directly."""
    warnings.simplefilter("ignore")
    from torchrl.collectors import AsyncBatchedCollector

    return partial(
        AsyncBatchedCollector,
        list(makes),
        policy_factory=policy,
        frames_per_batch=frames,
        env_backend="multiprocessing",
        transport="auto",
        **options,
    )


def loops(make: Callable[[], Any], count: int, policy: Callable[[], Any]) -> Source:
    """A hand-written loop over a list of environments."""
    envs = [make() for _ in range(count)]
    return hand.several(envs, hand.only(policy().module), FRAMES // 2 // count)


def async64() -> Race:
    count = 64
    own = partial(peers.trawl_indexed, work.cartpole)
    theirs = partial(peers.torchrl_indexed, work.cartpole)
    limit = partial(loops, work.cartpole, count // 2, cartpole_policy)
    return _against_torchrl(
        "async64", f"{count} CartPoles, MLP 2x64", count, own, theirs, cartpole_policy, limit
    )


def async_images() -> Race:
    count = 32
    theirs = partial(peers.torchrl_single, work.ImageEnv)
    limit = partial(loops, work.ImageEnv, count // 2, image_policy)
    return _against_torchrl(
        "async_images",
        f"{count} environments of 84x84x4 images, constant actions",
        count,
        work.ImageEnv,
        theirs,
        image_policy,
        limit,
    )


def _against_torchrl(
    name: str,
    title: str,
    count: int,
    own: Callable[[], Any],
    theirs: Callable[[], Any],
    policy: Callable[[], Any],
    limit: Callable[[], Source],
) -> Race:
    def collecting(prepare: Callable[..., Any], make: Any, **options: Any) -> partial[Collecting]:
        prepared = partial(prepare, [make] * count, policy, FRAMES, **options)
        return partial(Collecting, prepared, ahead=1)

    each = count // 2
    return Race(
        name,
        f"AsyncBatchedCollector of {title}",
        (
            Contender(
                TRAWL,
                collecting(trawl_ready, own, envs_per_worker=each),
                f"envs_per_worker={each}",
            ),
            Contender(
                f"{TRAWL}, {TORCHRL}'s environments",
                collecting(trawl_ready, theirs, envs_per_worker=each),
                f"envs_per_worker={each}",
            ),
            Contender(
                LOOPS, partial(SideBySide, limit, 2, False), "two loops, each with its own policy"
            ),
            Contender(
                TORCHRL, collecting(torchrl_ready, theirs), "transport='auto', policy_factory"
            ),
        ),
        goals=(Goal("speed", 5.0, TORCHRL),),
        stretch=2.0,
    )


class FirstReady:
    """The speed of `work.WaitingPendulum`s of which the first ones are taken, by arithmetic.

    Only waiting takes time: that of the environments, and that of `work.SlowPolicy`.

    Args:
        count: number of environments.
        least: number of environments for which the policy acts at once.
    """

    def __init__(self, count: int, least: int) -> None:
        self._count, self._least = count, least
        self._random = np.random.default_rng(0)
        self.facts: dict[str, float] = {}
        self.layout: dict[str, str] = {}

    def turn(self, seconds: float) -> dict[str, float]:
        """Frames per second."""
        calls, now = 5_000, 0.0
        ends = work.waiting_seconds(self._random, self._count).tolist()
        heapq.heapify(ends)
        for _ in range(calls):
            for _ in range(self._least):
                now = max(now, heapq.heappop(ends))
            now += work.POLICY_SECONDS * self._least / self._count
            for waits in work.waiting_seconds(self._random, self._least):
                heapq.heappush(ends, now + waits)
        return {"speed": float(calls * self._least / now)}

    def close(self) -> None:
        pass


def ready16() -> Race:
    count, least, frames = 16, 8, 16 * 25
    makes = [partial(work.WaitingPendulum, index) for index in range(count)]
    policy = partial(slow_policy, count)
    options = {"min_batch_size": least, "max_batch_size": least, "server_timeout": 1.0}
    return Race(
        "ready16",
        "16 environments that wait for 2 ms on average, a policy of 3 ms for all of them",
        (
            Contender(
                TRAWL,
                partial(Collecting, partial(trawl_ready, makes, policy, frames, **options)),
                "AsyncBatchedCollector, the first 8 that are ready",
            ),
            Contender(
                TOGETHER,
                partial(
                    Collecting, partial(trawl_parallel, makes, count, policy(), frames), ahead=0
                ),
                "ParallelEnv(groups=1)",
            ),
            Contender(ARITHMETIC, partial(FirstReady, count, least), "if only waiting takes time"),
        ),
        goals=(Goal("speed", 0.9, ARITHMETIC),),
        stretch=3.0,
    )
