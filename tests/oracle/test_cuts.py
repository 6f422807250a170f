"""A cut at any frame is exact: no frame is lost, repeated or moved, and none is beyond it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from torchrl.data import LazyTensorStorage, ReplayBuffer

from tests.oracle.comparing import Case, collector_of, compare, oracles, policy_of
from trawl.collectors import AsyncBatchedCollector
from trawl.testing.faces import FACES
from trawl.testing.oracle import ENV, IDS, Options

pytestmark = pytest.mark.filterwarnings("ignore")
NEXT_STEP = ["vector_next_step", "tensors_next_step"]
# All environments of JAX show the same.
TOLD_APART = [face for face in FACES if face != "jax"]


@pytest.fixture(autouse=True)
def libraries(request: pytest.FixtureRequest) -> None:
    """Skips tests of faces whose libraries are missing."""
    face = getattr(request.node, "callspec", None) and request.node.callspec.params.get("face")
    if face and FACES[face].needs:
        pytest.importorskip(FACES[face].needs)


def shown(case: Case, batches: Iterable[Any]) -> list[Any]:
    """Returns the environment, episode, step and action that each frame shows after its step."""
    found = []
    for batch in batches:
        after = batch[batch[IDS] >= 0][case.kind.key(("next", "observation"))]
        found.append(after[:, 0] if case.kind.kind.agents else after)
    return torch.cat(found).tolist()


def check_first(case: Case, found: list[Any], count: int) -> None:
    """Checks that these are the first frames of each environment."""
    assert len(found) == count
    options = replace(case.options, exact_frames=False, total_frames=math.inf)
    left: dict[float, list[Any]] = {}
    for env, *row in found:
        left.setdefault(env, []).append(row)
    for oracle in oracles(replace(case, options=options)):
        wanted: dict[float, list[Any]] = {actor.env: [] for actor in oracle.actors}
        for rows in islice(oracle.batches(), 1 + count):
            for frame in (frame for mine in rows for frame in mine if frame is not None):
                after = frame["next", "observation"].reshape(-1, 4)[0]
                wanted[frame[ENV]].append(after[1:].tolist())
        for env, frames in wanted.items():
            mine = left.pop(env, [])
            assert mine == frames[: len(mine)]
    assert not left


def exact(face: str, frames_per_batch: int, count: int, **more: Any) -> Case:
    options = Options(frames_per_batch, total_frames=count, exact_frames=True)
    return Case(face, options, **more)


def counts(face: str) -> Iterator[int]:
    """Yields every number of frames for some kinds, and a few for the others."""
    index = list(FACES).index(face)
    step = 1 if face in ("list", *NEXT_STEP) else 40 if face == "jax" else 9
    return iter(range(1 + index % min(step, 9), 41, step))


@pytest.mark.parametrize("face", FACES)
def test_a_collector_ends_at_every_frame(face) -> None:
    for count in counts(face):
        case = exact(face, (12, 5, 27)[count % 3], count)
        with collector_of(case) as collector:
            found = list(collector)
            assert collector.stats()["frames"] == count
        compare(case, found)
        assert sum(int((batch[IDS] >= 0).sum()) for batch in found) == count


@pytest.mark.parametrize("place", ["sync", "async"])
@pytest.mark.parametrize("face", TOLD_APART)
def test_workers_end_at_every_frame(face, place) -> None:
    index = list(FACES).index(face)
    for count in range(1 + index % 13, 41, 5 if face in NEXT_STEP else 13):
        case = exact(face, (12, 3, 8)[count % 3], count, place=place)
        with collector_of(case) as collector:
            found = shown(case, collector)
            assert collector.stats()["frames"] == count
        check_first(case, found, count)


@pytest.mark.parametrize("extend", [True, False])
@pytest.mark.parametrize("face", TOLD_APART)
def test_a_buffer_gets_every_frame_up_to_the_cut(face, extend) -> None:
    index = list(FACES).index(face)
    for count in range(1 + index % 9, 41, 20):
        for place in ("one", "sync") if extend else ("one",):
            buffer = ReplayBuffer(storage=LazyTensorStorage(100), batch_size=1)
            case = exact(face, 12, count, place=place)
            with collector_of(case, replay_buffer=buffer, extend_buffer=extend) as collector:
                assert all(batch is None for batch in collector)
                assert collector.stats()["frames"] == count == len(buffer)
            check_first(case, shown(case, [buffer[:]]), count)


@pytest.mark.parametrize("least", [1, 2, 3])
def test_environments_at_their_own_pace_end_at_every_frame(least) -> None:
    for count in range(least, 41, 6):
        case = exact("list", 8, count)
        collector = AsyncBatchedCollector(
            case.kind.make(case.script, [0, 1, 2]),
            policy=policy_of(case),
            frames_per_batch=8,
            total_frames=count,
            env_backend="threading",
            min_batch_size=least,
        )
        with collector:
            found = shown(case, collector)
            assert collector.stats()["frames"] == count
        check_first(case, found, count)


@pytest.mark.parametrize("face", TOLD_APART)
def test_an_interrupted_batch_ends_at_any_step_and_the_next_one_goes_on(face) -> None:
    case = Case(face, Options(frames_per_batch=12))
    for every in (1, 2, 3, 5):
        asked = iter(range(1, 100))
        with collector_of(case, interruptor=lambda: next(asked) % every == 0) as collector:  # noqa: B023
            found = shown(case, islice(collector, 5))
            assert collector.stats()["frames"] == len(found)
        check_first(case, found, len(found))


def test_workers_that_are_interrupted_lose_no_frame() -> None:
    case = exact("list", 12, 40, place="sync")
    more = {"preemptive_threshold": 0.5, "start_method": "forkserver"}
    with collector_of(case, **more) as collector:
        found = shown(case, collector)
        assert collector.stats()["frames"] == 40
    check_first(case, found, 40)
