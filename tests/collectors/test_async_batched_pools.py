"""Collectors of vector environments that return the results of whichever is ready."""

import numpy as np
import pytest
from collector_parts import Chooses
from tensordict.nn import TensorDictModule
from test_async_batched import LENGTHS, Constant, Sized
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


# --- frames


def test_a_pool_may_have_indices_as_actions():
    env = GymEnv(pool_of(), categorical_action_encoding=True)
    with collector_of(pool=env, policy=RandomPolicy(env.full_action_spec)) as collector:
        assert collector.next()["action"].shape == (50,)


# --- the policy


def test_the_policy_acts_for_those_that_are_ready_together():
    policy = Sized()
    with collector_of(pool=pool_of(7, 3), policy=policy) as collector:
        del policy.sizes[:]
        collector.next()
        assert collector.server_stats()["avg_batch_size"] == 3
    assert set(policy.sizes) == {3}


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
def test_a_reset_drops_the_steps_under_way(mode):
    with collector_of(pool=pool_of(mode=mode)) as collector:
        before = collector.next()
        collector.reset()
        after = collector.next()
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


def test_some_pools_reset_only_all_environments():
    with collector_of() as collector:
        collector.next()
        with pytest.raises(ValueError, match="can't reset only some of its sub-environments"):
            collector.reset([1])


def test_steps_that_cant_be_finished_can_prevent_a_reset():
    with collector_of(pool=pool_of(7, 3)) as collector:
        collector.next()
        with pytest.raises(ValueError, match=r"only if batch_size divides num_envs, .* 3 and 7"):
            collector.reset()


def test_a_seed_reaches_the_environments():
    seeds = []

    class Seeded(ScriptedPool):
        def reset(self, *, seed=None, options=None):
            seeds.append(seed)
            return super().reset(seed=seed)

    with collector_of(pool=pool_of(cls=Seeded)) as collector:
        collector.set_seed(5)
    assert seeds == [None, 5]


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


# --- delivery


def test_random_frames_come_first():
    policy = TensorDictModule(Constant(), ["observation"], ["action", "sent"])
    with collector_of(Collector, policy=policy, init_random_frames=50) as collector:
        assert len(collector.next()["action"].argmax(-1).unique()) == 4
        last = collector.next()["action"][-10:]
    assert (last.argmax(-1) == 1).all()


def test_an_interruptor_ends_a_batch_early():
    calls = []

    def stop():
        calls.append(1)
        return len(calls) > 3

    with collector_of(Collector, interruptor=stop) as collector:
        assert 0 < (collector.next()["collector", "traj_ids"] >= 0).sum() < 50


# --- errors


@pytest.mark.parametrize("source", ["CartPole-v1", 3, {}])
def test_neither_a_list_nor_a_pool(source):
    with pytest.raises(TypeError, match=r"must be a list .* or make an EnvPool or ALE environment"):
        collector_of(pool=source)


def test_an_environment_that_steps_all_at_once():
    with pytest.raises(TypeError, match=r"but it made GymEnv\(CartPole-v1\)"):
        collector_of(pool=lambda: GymEnv("CartPole-v1"))


ALONE = "can't be one of several that are stepped together"


def test_a_pool_among_others():
    with pytest.raises(ValueError, match=ALONE):
        Collector([pool_of(), pool_of()], frames_per_batch=24)


@pytest.mark.parametrize(
    "make",
    [
        GymEnv,
        lambda pool: SerialEnv(1, lambda: pool),
        lambda pool: ParallelEnv(1, lambda: pool, backend="thread"),
    ],
)
def test_a_pool_outside_a_collector(make):
    env = make(pool_of())
    with pytest.raises(ValueError, match=ALONE):
        env.reset()
    env.close()


def test_an_observation_of_another_shape():
    class Wrong(ScriptedPool):
        def recv(self):
            obs, *rest = super().recv()
            return obs[:, :3], *rest

    with pytest.raises(ValueError, match=r"has shape \(2, 3\)"):
        collector_of(pool=pool_of(cls=Wrong))


def test_a_reward_that_is_not_a_number():
    class Wrong(ScriptedPool):
        def recv(self):
            obs, reward, *rest = super().recv()
            return obs, reward + np.nan, *rest

    with (
        collector_of(pool=pool_of(cls=Wrong)) as collector,
        pytest.raises(ValueError, match="a reward of nan") as error,
    ):
        collector.next()
    assert "from environment" in "".join(error.value.__notes__)
