"""The cases of environments that step each at its own pace."""

from __future__ import annotations

import heapq
import mmap
import multiprocessing
import os
import selectors
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import hand
import peers
import work
from harness import HAND, TRAWL, Source
from multi.collecting import Collecting, Looping, SideBySide
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


class ReadyPendulums:
    """Pendulums in processes of their own, with the interface of EnvPool.

    Everything is in shared memory. A byte through a pipe each way says that it is there.

    Args:
        makes: Make the environments.
        least: How many results are returned at once: those that are ready first.
    """

    def __init__(self, makes: Sequence[Callable[[], Any]], least: int) -> None:
        self.num_envs, self._least = len(makes), least
        self._rows = np.frombuffer(mmap.mmap(-1, 64 * len(makes)), np.float32).reshape(-1, 16)
        self._ready: list[int] = []
        self._selector = selectors.DefaultSelector()
        self._asks, self._processes = [], []
        context = multiprocessing.get_context("fork")
        for index, (make, row) in enumerate(zip(makes, self._rows, strict=True)):
            (asked, ask), (answer, answered) = os.pipe(), os.pipe()
            process = context.Process(
                target=_serve_pendulum, args=(make, row, asked, answered), daemon=True
            )
            process.start()
            self._asks.append(ask)
            self._selector.register(answer, selectors.EVENT_READ, index)
            self._processes.append(process)

    def async_reset(self) -> None:
        """Lets all environments reset themselves."""
        self._wake(range(self.num_envs))

    def send(self, actions: NDArray[Any], ids: NDArray[Any]) -> None:
        """Lets environments step; those whose episode has ended reset themselves instead."""
        self._rows[ids, 0] = actions[:, 0]
        self._wake(ids)

    def _wake(self, ids: Iterable[int]) -> None:
        for index in ids:
            os.write(self._asks[index], b"+")

    def recv(self) -> tuple[Any, ...]:
        """Waits for the first results."""
        ready = self._ready
        while len(ready) < self._least:
            for key, _ in self._selector.select():
                os.read(key.fd, 1)
                ready.append(key.data)
        ids = np.array(ready[: self._least])
        del ready[: self._least]
        rows = self._rows[ids]
        ends = rows[:, 2:4].astype(bool)
        return rows[:, 4:7], rows[:, 1], ends[:, 0], ends[:, 1], {"env_id": ids}

    def close(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.terminate()
            process.join()


def _serve_pendulum(
    make: Callable[[], Any], row: NDArray[np.float32], asked: int, answered: int
) -> None:
    """A row: the action, the reward, two flags and the observation."""
    env = make()
    row[2] = True
    while os.read(asked, 1):
        if row[2] or row[3]:
            observation, row[1:4] = env.reset()[0], 0.0
        else:
            observation, row[1], row[2], row[3], _ = env.step(row[:1])
        row[4:7] = observation
        os.write(answered, b"+")


def ready_loop(
    makes: Sequence[Callable[[], Any]], policy: Callable[[], Any], least: int, frames: int
) -> Source:
    """The hand-written loop of the environments that are ready first."""
    envs = ReadyPendulums(makes, least)
    try:
        for count, _ in hand.ready_pool(envs, hand.only(policy().module), frames):
            yield count, None  # not the shape of the batches of environments that step together
    finally:
        envs.close()


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
            Contender(
                HAND,
                partial(Looping, partial(ready_loop, makes, policy, least, frames)),
                "the first 8 that are ready: shared arrays, a pipe each way and a selector",
            ),
            Contender(ARITHMETIC, partial(FirstReady, count, least), "if only waiting takes time"),
        ),
        goals=(Goal("speed", 0.9, ARITHMETIC),),
        stretch=3.0,
    )
