"""A cut at any frame is exact: no frame is lost, repeated or moved, and none is beyond it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, ReplayBuffer

from tests.oracle.cases import Case, collector_of
from tests.oracle.comparing import Ids, compare, compare_environments
from trawl.collectors import Collector
from trawl.collectors.driver.exact import first_frames, shares
from trawl.data import StackedFrames
from trawl.keys import MASK
from trawl.testing import NumberedEnv
from trawl.testing.faces import FACES
from trawl.testing.oracle import IDS, Options

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


def check_frames(case: Case, batches: Iterable[Any]) -> int:
    """Checks that these are the first frames of each environment, and returns their number."""
    # Rows of text can't be chosen from, if none of an environment is among them.
    found = [flat[flat[IDS] >= 0] for flat in (batch.reshape(-1) for batch in batches)]
    compare_environments(case, found, Ids())
    return sum(map(len, found))


def exact(face: str, frames_per_batch: int, count: int, **more: Any) -> Case:
    normalize = count % 2 == 0 and more.get("place") is None
    options = Options(
        frames_per_batch,
        total_frames=count,
        exact_frames=True,
        frame_stack=None if normalize else 3,
        normalize_observations=normalize,
        normalize_rewards=normalize,
    )
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
            compare(case, found, collector.normalization)
        assert sum(int((batch[IDS] >= 0).sum()) for batch in found) == count


def test_no_step_is_taken_beyond_the_end() -> None:
    env = NumberedEnv()
    with Collector(env, frames_per_batch=10, total_frames=13, exact_frames=True) as collector:
        assert [len(batch) for batch in collector] == [10, 3]
    assert len(env.actions) == 13


@pytest.mark.parametrize("place", ["sync", "async"])
@pytest.mark.parametrize("face", TOLD_APART)
def test_workers_end_at_every_frame(face, place) -> None:
    index = list(FACES).index(face)
    for count in range(1 + index % 13, 41, 5 if face in NEXT_STEP else 13):
        case = exact(face, (12, 3, 8)[count % 3], count, place=place)
        with collector_of(case) as collector:
            found = list(collector)
            assert collector.stats()["frames"] == count
        assert check_frames(case, found) == count
        if face in NEXT_STEP:
            # Parts that are missing don't expand the stacks.
            assert all(isinstance(batch["observation"], StackedFrames) for batch in found)


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
            assert check_frames(case, [buffer[:].exclude("index")]) == count


@pytest.mark.parametrize("least", [1, 2, 3])
def test_environments_at_their_own_pace_end_at_every_frame(least) -> None:
    for count in range(least, 41, 6):
        case = exact("list", 8, count, place="ready")
        with collector_of(case, min_batch_size=least) as collector:
            found = list(collector)
            assert collector.stats()["frames"] == count
        assert check_frames(case, found) == count


@pytest.mark.parametrize("face", TOLD_APART)
def test_an_interrupted_batch_ends_at_any_step_and_the_next_one_goes_on(face) -> None:
    case = Case(face, Options(frames_per_batch=12))
    for every in (1, 2, 3, 5):
        asked = iter(range(1, 100))
        with collector_of(case, interruptor=lambda: next(asked) % every == 0) as collector:  # noqa: B023
            found = list(islice(collector, 5))
            assert check_frames(case, found) == collector.stats()["frames"]


@pytest.mark.parametrize(
    ("delivery", "how", "shape"),
    [
        ("rows", "stack", (2, 3)),
        ("rows", 0, (6,)),
        ("rows", -1, (3,)),
        ("padded", "stack", None),
        ("cat", "stack", None),
    ],
)
def test_workers_that_are_interrupted_lose_no_frame(delivery, how, shape) -> None:
    further = {"cat_results": how}
    case = exact("list", 12, 90, place="sync_processes", delivery=delivery, further=further)
    with collector_of(case, preemptive_threshold=0.5) as collector:
        batches = list(collector)
        assert collector.stats()["frames"] == 90
        count = check_frames(case, batches)
        # Whole trajectories that were not enough for a batch, and what was left of each.
        waiting = collector.stats()["trajectories_waiting"] if delivery != "rows" else 0
        assert 90 - count <= (4 * (waiting + 6) if delivery != "rows" else 0)
    assert shape is None or {batch.shape[:-1] for batch in batches} == {shape}


# --- parts of a batch


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_the_first_frames_are_kept_step_by_step(envs, steps, data) -> None:
    flags = st.lists(st.booleans(), min_size=envs * steps, max_size=envs * steps)
    mask = torch.tensor(data.draw(flags)).view(envs, steps)
    count = data.draw(st.integers(0, int(mask.sum())))
    order = [env * steps + step for step in range(steps) for env in range(envs) if mask[env, step]]
    none = torch.zeros(envs, steps, 1, dtype=torch.bool)
    ids = torch.arange(envs * steps).view(envs, steps)
    batch = TensorDict({"next": {"truncated": none, "done": none.clone()}}, (envs, steps))
    batch.set(IDS, ids).set(MASK, mask)
    found = first_frames(batch, count, truncate=True)
    assert found[IDS][found[IDS] >= 0].tolist() == sorted(order[:count])
    assert found[MASK].sum() == count
    assert not count or found[MASK][:, -1].any()
    # Environments that lose frames are truncated before.
    ends = [[one for one in order[:count] if one // steps == env][-1:] for env in range(envs)]
    lost = {one // steps for one in order[count:]}
    expected = [one for env, end in enumerate(ends) if env in lost for one in end]
    for key in ("truncated", "done"):
        assert found[IDS][found["next", key][..., 0]].tolist() == expected


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4)), min_size=1, max_size=6),
    st.integers(0, 400),
)
def test_shares_of_workers_add_up_and_fit(workers, total) -> None:
    units = [unit for _, unit in workers]
    sizes = [rows * unit for rows, unit in workers]
    found = shares(total, sizes, units)
    assert 0 <= min(total, sum(sizes)) - sum(found) < max(units)
    assert all(0 <= share <= size for share, size in zip(found, sizes, strict=True))
    assert all(share % unit == 0 for share, unit in zip(found, units, strict=True))
