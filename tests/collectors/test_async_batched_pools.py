"""Collectors of vector environments that return the results of whichever is ready."""

from functools import partial

import numpy as np
import pytest
from collector_parts import Chooses
from test_async_batched import LENGTHS, Sized
from torch import nn

from trawl.collectors import AsyncBatchedCollector, Collector, RandomPolicy
from trawl.envs import GymEnv, ParallelEnv, SerialEnv
from trawl.testing import Script
from trawl.testing.scripted_envs import ScriptedPool

MODES = pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
KINDS = pytest.mark.parametrize("kind", [Collector, AsyncBatchedCollector])


def pool_of(count=6, size=2, mode="NextStep", cls=ScriptedPool):
    return cls(Script(lengths=LENGTHS), range(count), mode, size)


def collector_of(kind=AsyncBatchedCollector, pool=None, **options):
    options = {"policy": Chooses(), "frames_per_batch": 50, **options}
    return kind(pool_of() if pool is None else pool, **options)


def each(batch):
    """The frames of each environment, by its number."""
    return {int(env): batch[batch["env_index"] == env] for env in batch["env_index"].unique()}


# --- the policy


def test_the_policy_acts_for_those_that_are_ready_together():
    policy = Sized()
    with collector_of(pool=pool_of(7, 3), policy=policy) as collector:
        del policy.sizes[:]
        collector.next()
        assert collector.server_stats()["avg_batch_size"] == 3
        assert set(policy.sizes) == {3}
        with pytest.raises(ValueError, match=r"only if batch_size divides num_envs, .* 3 and 7"):
            collector.reset()


def test_a_pool_may_have_indices_as_actions():
    env = GymEnv(pool_of(), categorical_action_encoding=True)
    with collector_of(pool=env, policy=RandomPolicy(env.full_action_spec)) as collector:
        assert collector.next()["action"].shape == (50,)


def test_no_environment_is_lost_if_the_policy_is_interrupted():
    fails = []

    class Fails(nn.Module):
        def forward(self, observation):
            if fails:
                raise fails.pop()
            return Chooses()(observation)

    with collector_of(policy=Fails()) as collector:
        fails.append(KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            collector.rollout()
        batch = collector.rollout()
    # The frames of the batch that was interrupted are lost.
    assert sorted(each(batch)) == list(range(6))
    for frames in each(batch).values():
        goes_on = ~frames["next", "done"][:-1, 0]
        assert (frames["next", "observation"][:-1] == frames["observation"][1:])[goes_on].all()


# --- resets, seeds and state


@MODES
def test_a_reset_of_all_drops_the_steps_under_way(mode):
    seeds = []

    class Seeded(ScriptedPool):
        def reset(self, *, seed=None, options=None):
            seeds.append(seed)
            return super().reset(seed=seed)

    with collector_of(pool=pool_of(mode=mode, cls=Seeded)) as collector:
        before = collector.next()
        with pytest.raises(ValueError, match="can't reset only some of its sub-environments"):
            collector.reset([1])
        collector.reset()
        after = collector.next()
        collector.set_seed(5)
    assert [seeds[0], seeds[-1]] == [None, 5]
    for frames in each(after).values():
        assert frames["observation"][0, 2] == 0
    ids = [set(batch["collector", "traj_ids"].tolist()) for batch in (before, after)]
    assert ids[0].isdisjoint(ids[1])


@KINDS
def test_environments_can_be_reset_before_each_batch(kind):
    with collector_of(kind, reset_at_each_iter=True, total_frames=150) as collector:
        for batch in collector:
            for frames in each(batch).values():
                assert frames["observation"][0, 2] == 0


@KINDS
def test_a_state_continues_the_counts_with_new_episodes(kind):
    """Sub-environments of pools can't be captured; the running collector goes on."""
    with collector_of(kind, total_frames=150) as collector, collector_of(kind) as other:
        assert set(collector.env_state_methods()) == {"none"}
        before = collector.next()
        state = collector.state_dict()
        assert "resume" not in state
        after = collector.next()
        other.load_state_dict(state)
        assert not other.resumed
        began = other.next()
    begun = each(began)
    for env, frames in each(after).items():
        last = each(before)[env]["next"]
        if not last["done"][-1]:
            assert (frames["observation"][0] == last["observation"][-1]).all()
        if env in begun:
            assert begun[env]["observation"][0, 2] == 0
            assert begun[env]["collector", "traj_ids"].min() > before["collector", "traj_ids"].max()


# --- errors


class Flat(ScriptedPool):
    def recv(self):
        obs, *rest = super().recv()
        return obs[:, :3], *rest


class Worthless(ScriptedPool):
    def recv(self):
        obs, reward, *rest = super().recv()
        return obs, reward + np.nan, *rest


ALONE = "can't be one of several that are stepped together"
NO_LIST = r"must be a list .* or make an EnvPool or ALE environment"
#: What is no source, the error and what it says.
REFUSED = [
    *(
        (partial(collector_of, pool=source), TypeError, NO_LIST)
        for source in ("CartPole-v1", 3, {})
    ),
    (
        partial(collector_of, pool=partial(GymEnv, "CartPole-v1")),
        TypeError,
        r"but it made GymEnv\(CartPole-v1\)",
    ),
    (lambda: Collector([pool_of(), pool_of()], frames_per_batch=24), ValueError, ALONE),
    *(
        (lambda make=make: make(pool_of()).reset(), ValueError, ALONE)
        for make in (
            GymEnv,
            lambda pool: SerialEnv(1, lambda: pool),
            lambda pool: ParallelEnv(1, lambda: pool, backend="thread"),
        )
    ),
    (lambda: collector_of(pool=pool_of(cls=Flat)), ValueError, r"has shape \(2, 3\)"),
]


@pytest.mark.parametrize(("call", "kind", "match"), REFUSED)
def test_what_is_no_pool_for_a_collector_is_refused(call, kind, match):
    with pytest.raises(kind, match=match):
        call()


def test_a_reward_that_is_not_a_number():
    with (
        collector_of(pool=pool_of(cls=Worthless)) as collector,
        pytest.raises(ValueError, match="a reward of nan") as error,
    ):
        collector.next()
    assert "from environment" in "".join(error.value.__notes__)
