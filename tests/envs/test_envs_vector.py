"""Each way in which vector environments reset, under one rule."""

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from trawl.collectors import Collector
from trawl.envs.entries.spaces import SpaceCodec
from trawl.envs.vector import StepResetVector, adapt
from trawl.testing import NumberedEnv, RaggedEnv, SelfResettingVectorEnv

STEP = 2
MODES = pytest.mark.parametrize("mode", AutoresetMode)


def functions(kind=NumberedEnv, count=2):
    """Environment ``i`` has episodes of ``1 + i`` steps."""
    return [lambda i=i: kind(i, lengths=[1 + i]) for i in range(count)]


def sync(mode, kind=NumberedEnv, count=2, **options):
    return SyncVectorEnv(functions(kind, count), autoreset_mode=mode, **options)


def adapted(env):
    return adapt(env, SpaceCodec(env.single_observation_space, "observation"))


def step(adapter):
    leaves, _, terminated, truncated = adapter.step(np.zeros(adapter.num_envs, dtype=np.int64))
    return leaves[0], terminated | truncated


def mask(*flags):
    return np.array(flags)


@MODES
def test_a_second_restart_is_one(mode):
    adapter = adapted(sync(mode))
    adapter.reset()
    _, done = step(adapter)
    (first,) = adapter.restart(done)
    (second,) = adapter.restart(done)
    assert second[0, 1:3].tolist() == [first[0, 1] + 1, 0]


@MODES
def test_seeds_and_options_reach_the_environments(mode):
    seen = []

    class Listening(NumberedEnv):
        def reset(self, *, seed=None, options=None):
            seen.append((seed, options))
            return super().reset(seed=seed)

    adapter = adapted(SyncVectorEnv([Listening] * 2, autoreset_mode=mode))
    adapter.reset([3, 4], options={"easy": True})
    adapter.restart(mask(False, True), options={"easy": False})
    assert seen == [(3, {"easy": True}), (4, {"easy": True}), (None, {"easy": False})]


def test_processes_without_shared_memory_spend_steps_on_resetting():
    # Gymnasium's workers reset once more after a partial reset when memory isn't shared.
    env = AsyncVectorEnv(functions(count=1), shared_memory=False, context="fork")
    assert isinstance(adapted(env), StepResetVector)
    env.close()


# --- vectors that reset by themselves


def self_resetting(kind=NumberedEnv):
    return SelfResettingVectorEnv(functions(kind))


def test_all_of_them_can_be_restarted():
    adapter = adapted(self_resetting())
    adapter.reset()
    step(adapter)
    (fresh,) = adapter.restart(mask(True, True))
    assert fresh[:, STEP].tolist() == [0, 0]
    obs, _ = step(adapter)
    assert obs[:, STEP].tolist() == [1, 1]


@pytest.mark.parametrize("kind", [NumberedEnv, RaggedEnv])
@pytest.mark.parametrize("nested", [False, True])
def test_limits_and_resets_of_some_need_a_vector_that_can_be_restarted(kind, nested):
    def source():
        return [self_resetting(kind) for _ in range(2)] if nested else self_resetting(kind)

    with pytest.raises(ValueError, match=r"max_frames_per_traj=3 .*SelfResettingVectorEnv"):
        Collector(source(), frames_per_batch=8, max_frames_per_traj=3)
    if not nested:
        with Collector(source(), frames_per_batch=6) as collector:
            collector.next()
            with pytest.raises(ValueError, match="can't restart only some"):
                collector.reset(1)


# --- vectors of one kernel that reset in the step that ends an episode


class Kernel(VectorEnv):
    """Counts steps; shows the last observations in one of two ways."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 - as Gymnasium

    def __init__(self, final="batched", space=None):
        self.num_envs = 2
        self.final = final
        self.single_observation_space = space or spaces.Dict(
            {"_hidden": spaces.Box(0, 9, (1,)), "shown": spaces.Box(0, 9, (1,))}
        )
        self.single_action_space = spaces.Discrete(2)
        self.count = np.zeros(2)

    def _observe(self):
        row = self.count[:, None].astype(np.float32)
        return {"_hidden": row.copy(), "shown": row.copy()}

    def reset(self, *, seed=None, options=None):
        self.count[:] = 0
        return self._observe(), {}

    def step(self, actions):
        self.count += 1
        ends = self.count == [2, 3]
        final = self._observe()
        if self.final == "batched":
            final |= {f"_{key}": ends for key in list(final)}
        else:
            rows = [{key: value[i] for key, value in final.items()} for i in range(2)]
            final = np.array(rows, dtype=object)
        self.count[ends] = 0
        info = {"final_obs": final} if ends.any() else {}
        return self._observe(), np.ones(2), ends, np.zeros(2, dtype=bool), info


@pytest.mark.parametrize("final", ["batched", "rows"])
def test_a_kernel_shows_its_last_observations(final):
    with Collector(Kernel(final), frames_per_batch=12) as collector:
        batch = collector.rollout()
    for name in ("_hidden", "shown"):
        assert batch[name][..., 0].tolist() == [[0, 1, 0, 1, 0, 1], [0, 1, 2, 0, 1, 2]]
        assert batch["next", name][..., 0].tolist() == [[1, 2, 1, 2, 1, 2], [1, 2, 3, 1, 2, 3]]


def test_a_kernel_cannot_be_restarted_partly():
    adapter = adapted(Kernel())
    adapter.reset()
    adapter.step(None)
    assert not adapter.can_restart
    with pytest.raises(ValueError, match=r"Kernel resets its sub-environments by itself"):
        adapter.restart(mask(True, False))
