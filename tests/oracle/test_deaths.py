"""The death of a worker at any step changes nothing that is promised."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle.cases import DELIVERIES, Case, arguments, policy_of
from tests.oracle.comparing import BATCHES, Ids, compare, compare_environments
from trawl.collectors import MultiAsyncCollector, MultiSyncCollector
from trawl.testing.oracle import IDS, Options
from trawl.testing.script import Script
from trawl.testing.scripted_envs import ScriptedEnv

pytestmark = pytest.mark.filterwarnings("ignore:worker \\d was killed:RuntimeWarning")
# Steps of this process, with all its environments.
taken = 0


class Deadly(ScriptedEnv):
    """Kills its process: the first one at its first step, each next one some steps later.

    Args:
        script: the script.
        env: number of the environment.
        folder: where each death leaves a file.
        deaths: number of deaths.
        pace: how many steps later.
    """

    def __init__(self, script: Script, env: int, folder: Path, deaths: int, pace: int) -> None:
        super().__init__(script, env)
        self.folder, self.deaths, self.pace = folder, deaths, pace

    def step(self, action: Any) -> Any:
        global taken
        taken += 1
        before = len(list(self.folder.iterdir()))
        if before < self.deaths and taken > self.pace * before:
            (self.folder / str(before)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


def collector_of(case: Case, folder: Path, deaths: int, pace: int = 1, **more: Any) -> Any:
    """Returns a collector whose second worker dies."""
    first, second = case.envs
    sources = [
        [partial(ScriptedEnv, case.script, env) for env in first],
        [partial(Deadly, case.script, env, folder, deaths, pace) for env in second],
    ]
    cls, workers = (MultiSyncCollector, 2) if case.place == "sync" else (MultiAsyncCollector, 1)
    size = case.options.frames_per_batch * workers
    given = {**arguments(case.options), **DELIVERIES[case.delivery], **case.further}
    given |= {"frames_per_batch": size, "max_restarts": deaths + 1, **more}
    return cls(sources, policy_of(case), **given)


NORMALIZED = Options(6, normalize_observations=True, normalize_rewards=True)
#: What is collected, and after how many batches snapshots are taken.
SNAPSHOTS = {
    "sync": (Case("list", Options(6), "sync"), 1),
    "async": (Case("list", Options(6), "async"), 3),
    "normalized": (Case("list", NORMALIZED, "sync"), 3),
    "prefetch": (Case("list", NORMALIZED, "sync", further={"prefetch": 1}), 1),
    "limit": (Case("list", Options(6, max_frames_per_traj=2), "sync", "cat"), 3),
    "stacks": (Case("list", Options(6, frame_stack=3), "async", "padded"), 1),
}


@pytest.mark.parametrize(("case", "every"), SNAPSHOTS.values(), ids=SNAPSHOTS)
def test_with_snapshots_no_frame_changes(case, every, tmp_path) -> None:
    deaths = 8
    with collector_of(case, tmp_path, deaths, worker_snapshots=every) as collector:
        batches = iter(collector)
        found = list(islice(batches, 3 * BATCHES))
        while not collector.stats()["restarts"]:
            # The other worker may be done before this one has begun.
            assert case.place == "async"
            found.append(next(batches))
            time.sleep(0.01)
        if case.place == "sync":
            assert collector.stats()["restarts"] == deaths
        compare(case, found, collector.normalization)


@pytest.mark.parametrize("delivery", ["rows", "cat"])
@pytest.mark.parametrize("place", ["sync", "async"])
def test_without_snapshots_each_frame_is_real_and_none_is_missing(
    place, delivery, tmp_path
) -> None:
    case, deaths = Case("list", Options(6), place, delivery), 8
    # The last lives deliver more trajectories than the ids that a replacement skips.
    frames = 420 if place == "sync" else 180
    with collector_of(case, tmp_path, deaths, pace=6, total_frames=frames) as collector:
        batches = list(collector)
        stats = collector.stats()
    assert stats["frames"] == frames
    if place == "sync":
        assert stats["restarts"] == deaths
    found = torch.cat([batch.reshape(-1) for batch in batches])
    if delivery == "rows":
        assert len(found) == frames
    else:
        assert stats["trajectories"] == 3 * len(batches)
        # Each death loses the open trajectories of its worker, and the end those of both.
        open_ones = len(case.envs[0]) * (stats["restarts"] + 2) + 2
        assert 0 <= frames - len(found) <= max(case.script.lengths) * open_ones
    for number in found[IDS].unique():
        one = found[found[IDS] == number]
        numbers = one["next", "observation"].long()
        (env, episode), steps = numbers[0, :2].tolist(), numbers[:, 2].tolist()
        assert (numbers[:, :2] == numbers[0, :2]).all()
        assert steps == list(range(1, len(steps) + 1))
        assert delivery == "rows" or len(steps) == case.script.length(env, episode)
        ended = [any(case.script.flags(env, episode, step)) for step in steps]
        assert one["next", "done"][:, 0].tolist() == ended
    # The first worker, which lives on, has all of its frames.
    first = found[found["observation"][:, 0] < len(case.envs[0])]
    compare_environments(Case("list", case.options, delivery=delivery), [first], Ids())


def test_without_snapshots_no_frame_is_counted_twice(tmp_path) -> None:
    case = Case("list", NORMALIZED, "sync")
    with collector_of(case, tmp_path, 8, total_frames=120) as collector:
        frames = sum(batch.numel() for batch in collector)
        (observations,) = collector.normalization.observations.values()
        (rewards,) = collector.normalization.rewards.values()
        assert (observations.count, rewards.count, collector.stats()["restarts"]) == (
            frames,
            120,
            8,
        )
