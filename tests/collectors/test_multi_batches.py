"""What a batch of several workers is, if their entries differ, and which class makes it."""

import gymnasium
import numpy as np
import pytest
from collector_parts import by_step
from gymnasium import spaces
from multi_parts import envs, make

from trawl.collectors import Collector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from trawl.testing import NumberedEnv


class Wide(gymnasium.Env):
    """Observes a vector of any width, under any name."""

    def __init__(self, width, name="observation"):
        inner = {name: spaces.Box(-1, 1, (width,), np.float32)}
        self.observation_space = spaces.Dict(inner)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        space = self.observation_space
        return {name: np.zeros(one.shape, one.dtype) for name, one in space.items()}, {}

    def step(self, action):
        return self.reset()[0], 1.0, False, False, {}


def two(cls, *kinds, **options):
    sources = [lambda kind=kind: Wide(*kind) for kind in kinds]
    return cls(sources, start_method="inline", **options)


def test_workers_with_other_observations_take_turns():
    options = {"frames_per_batch": 5, "total_frames": 40}
    with two(MultiAsyncCollector, (2,), (3,), **options) as collector:
        shapes = [tuple(batch["observation"].shape) for batch in collector]
    assert set(shapes) == {(5, 2), (5, 3)}
    assert len(shapes) == 8
    # Those of the other name are left out, too.
    kinds = (2, "a"), (2, "b")
    with two(MultiAsyncCollector, *kinds, compact_obs=True, **options) as collector:
        found = {tuple(sorted(batch["next"].keys())) for batch in collector}
    assert found == {("done", "reward", "terminated", "truncated")}


def test_workers_with_other_observations_stack_lazily():
    with two(MultiSyncCollector, (2,), (3,), frames_per_batch=10) as collector:
        batch = collector.next()
        assert batch.shape == (2, 5)
        assert [row["observation"].shape for row in batch] == [(5, 2), (5, 3)]
        assert batch["next", "reward"].shape == (2, 5, 1)
        assert collector.next()[0]["observation"].shape == (5, 2)


# --- which class


def test_sync_says_which_class():
    for sync, cls in ((True, MultiSyncCollector), (False, MultiAsyncCollector)):
        with MultiCollector(
            envs(2), by_step(), sync=sync, frames_per_batch=10, start_method="inline"
        ) as collector:
            assert type(collector) is cls
            assert isinstance(collector, MultiCollector)
            assert not isinstance(collector, Collector)
            assert collector.next().shape == ((2, 5) if sync else (10,))


@pytest.mark.parametrize(
    ("cls", "sync", "error", "match"),
    [
        *(
            (
                MultiCollector,
                sync,
                TypeError,
                rf"sync=True .* or sync=False .* but sync is {sync!r}",
            )
            for sync in (None, 1, "yes")
        ),
        (MultiSyncCollector, False, ValueError, "always has sync=True, but sync=False was passed"),
    ],
)
def test_sync_must_be_said(cls, sync, error, match):
    with pytest.raises(error, match=match):
        cls(envs(2), sync=sync, frames_per_batch=10)


def test_one_thing_serves_several_workers():
    with make(
        create_env_fn=NumberedEnv, num_workers=3, frames_per_batch=12, total_frames=24
    ) as collector:
        assert collector.num_workers == 3
        assert collector.create_env_fn == [NumberedEnv] * 3
        assert collector.next().shape == (3, 4)
        assert repr(collector) == (
            "MultiSyncCollector(num_workers=3, frames_per_batch=12, total_frames=24)"
        )
