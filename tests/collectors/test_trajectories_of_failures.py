"""Trajectories that a failure ends are delivered by environments at their own pace and to sinks."""

from functools import partial
from itertools import cycle, islice

import pytest

from trawl import Collector, RandomPolicy
from trawl.collectors import AsyncBatchedCollector
from trawl.data import MinariSink, load
from trawl.testing import FaultyEnv

pytestmark = pytest.mark.filterwarnings("ignore:.*rebuilt because of on_env_error:RuntimeWarning")

# Each new environment ends an episode, and fails in the second step of the next one.
LENGTHS, AT = [3], 4
EXPECTED = [(3, False), (1, True)]
Faulty = partial(FaultyEnv, AT, ZeroDivisionError("worn out"), lengths=LENGTHS)


def ends(trajectories):
    """Length of each trajectory, and whether it was truncated."""
    flags = [one["next", "truncated"].flatten().tolist() for one in trajectories]
    assert not any(any(one[:-1]) for one in flags)
    assert all(one["next", "done"][-1].all() for one in trajectories)
    return [(len(one), one[-1]) for one in flags]


def options(**more):
    return {"trajs_per_batch": 1, "traj_format": "cat", "on_env_error": "restart", **more}


@pytest.mark.parametrize(
    ("size", "more"),
    [
        *((size, {"backend": "threading"}) for size in (1, 2, 4, 7)),
        (2, {"policy_backend": "multiprocessing"}),
    ],
)
def test_so_are_those_of_environments_at_their_own_pace(size, more):
    with AsyncBatchedCollector(
        [Faulty] * 2,
        policy_factory=RandomPolicy,
        frames_per_batch=size,
        yield_completed_trajectories=True,
        on_env_error="restart",
        **more,
    ) as collector:
        found = [collector.next() for _ in range(12)]
        assert collector.stats()["episodes"] >= 12
    for env in range(2):
        own = [one for one in found if one["env_index"][0] == env]
        assert ends(own) == list(islice(cycle(EXPECTED), len(own)))


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_sink_of_episodes_ends_them(rows, tmp_path):
    pytest.importorskip("minari")
    options = {"frames_per_batch": rows, "total_frames": 16, "on_env_error": "restart"}
    with (
        MinariSink(tmp_path / "d", env=Faulty(), dataset_id="own/faulty-v0") as sink,
        Collector(Faulty, sink=sink, **options) as collector,
    ):
        list(collector)
    frames = load(tmp_path / "d")
    ids = frames["collector", "traj_ids"]
    found = [frames[ids == one] for one in ids.unique()]
    assert ends(found) == EXPECTED * 4


def test_a_reset_still_drops_what_is_unfinished():
    with Collector(Faulty, frames_per_batch=2, **options()) as collector:
        collector.next()
        collector.reset()
        assert ends([collector.next(), collector.next()]) == EXPECTED
