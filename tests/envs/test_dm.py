"""Environments of dm_env and dm_control."""

from functools import partial

import numpy as np
import nursery
import pytest
import torch
from tensordict import TensorDict

from trawl import Collector
from trawl.envs import GymEnv
from trawl.envs.dm import DMEnv
from trawl.testing.script import Script
from trawl.testing.scripted_envs import dm_environment

dm_env = pytest.importorskip("dm_env")
from dm_env import specs  # noqa: E402


class Scripted(dm_env.Environment):
    """Counts its steps; episode n has ``lengths[n]`` steps and ends with ``discounts[n]``."""

    def __init__(self, lengths=(3, 1, 4), discounts=(0.0, 0.9, 1.0), first=0):
        self.lengths, self.discounts = lengths, discounts
        self.random_state = np.random.RandomState(0)
        self.episode, self.steps, self.first = -1, 0, first

    def reset(self):
        self.episode, self.steps = self.episode + 1, 0
        self.drawn = self.random_state.rand()
        return dm_env.restart(self._observation())

    def step(self, action):
        assert action.shape == (2,), action
        self.steps += 1
        index = self.episode % len(self.lengths)
        reward = float(self.steps + action.sum())
        if self.steps < self.lengths[index]:
            return dm_env.transition(reward, self._observation(), discount=0.5)
        kind, discount = dm_env.StepType.LAST, self.discounts[index]
        return dm_env.TimeStep(kind, reward, discount, self._observation())

    def _observation(self):
        place = np.array([self.first, self.episode, self.steps], dtype=np.float64)
        return {
            "place": place,
            "drawn": self.drawn,
            "inner": {"odd": np.array([self.steps % 2 == 1])},
        }

    def observation_spec(self):
        return {
            "place": specs.Array((3,), np.float64),
            "drawn": specs.BoundedArray((), np.float64, 0.0, 1.0),
            "inner": {"odd": specs.Array((1,), np.bool_)},
        }

    def action_spec(self):
        return specs.BoundedArray((2,), np.float32, -1.0, [1.0, 2.0])


class Flat(Scripted):
    """Its observation is a flat mapping of arrays."""

    def _observation(self):
        place = np.array([self.first, self.episode, self.steps], dtype=np.float64)
        return {"place": place, "odd": np.array([self.steps % 2 == 1])}

    def observation_spec(self):
        return {"place": specs.Array((3,), np.float64), "odd": specs.Array((1,), np.bool_)}


def test_the_seed_is_that_of_its_generator():
    def drawn(seed):
        with Collector(partial(Scripted, lengths=(1,)), frames_per_batch=5) as collector:
            collector.set_seed(seed)
            return collector.next()["drawn"]

    assert torch.equal(drawn(3), drawn(3))
    assert not torch.equal(drawn(3), drawn(2**40))
    env = DMEnv(Scripted())
    env.reset(seed=5)
    assert env.env.drawn == np.random.RandomState(5).rand()


def test_an_environment_that_can_not_be_seeded_is_a_warning():
    with pytest.warns(RuntimeWarning, match="ScriptedDM can't be seeded, because it has neither"):
        DMEnv(dm_environment(Script(), 0)).reset(seed=1)


# A batch of 600 frames is longer than a chunk.
@pytest.mark.parametrize(("source", "frames"), [(Flat, 600), (Scripted, 20)])
def test_batches_have_the_frames_of_single_steps(source, frames):
    env = GymEnv(source())
    with Collector(source, frames_per_batch=frames, total_frames=600) as collector:
        batch = torch.cat(list(collector))[:600].exclude("collector")
        assert collector.stats()["env_path"] == "array"
    actions = iter(batch["action"])
    expected = env.rollout(
        600, lambda td: td.set("action", next(actions)), break_when_any_done=False
    )
    assert set(batch.keys(True, True)) == set(expected.keys(True, True))
    for key in batch.keys(True, True):
        assert torch.equal(batch[key], expected[key]), key
        assert batch[key].dtype is expected[key].dtype, key
    # The constructor of the collector begins no second episode.
    assert batch["place"][0].tolist() == [0, 0, 0]
    odd = "odd" if source is Flat else ("inner", "odd")
    dtypes = batch["place"].dtype, batch[odd].dtype, batch["action"].dtype
    assert dtypes == (torch.float64, torch.int8, torch.float32)


class Changing(Flat):
    """Returns something else in its second step."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def step(self, action):
        timestep = super().step(action)
        return timestep._replace(**self.change) if self.steps == 2 else timestep


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"observation": {"place": np.zeros(4), "odd": [True]}}, ValueError, r"place.*\(4,\)"),
        (
            {"observation": {"place": np.zeros(3, complex), "odd": [True]}},
            TypeError,
            "place.*complex128",
        ),
        ({"observation": {"odd": np.array([True])}}, KeyError, "place"),
        ({"reward": "much"}, TypeError, "reward='much'"),
        ({"reward": None}, TypeError, "reward=None"),
        ({"discount": None}, RuntimeError, "Changing returned a time step without a discount"),
        (
            {"discount": None, "step_type": dm_env.StepType.FIRST},
            RuntimeError,
            r"began a new episode in step\(\)",
        ),
        ({"discount": "half"}, TypeError, "discount='half'"),
    ],
)
def test_changes_in_mid_run_are_refused(change, error, message):
    with (
        Collector(partial(Changing, change), frames_per_batch=8) as collector,
        pytest.raises(error, match=message),
    ):
        collector.next()


@pytest.mark.parametrize("source", [Flat, Scripted])
def test_a_discount_of_zero_ends_no_episode_and_a_last_step_does(source):
    class Odd(source):
        def step(self, action):
            timestep = super().step(action)
            return timestep._replace(discount=0.0) if self.steps == 2 else timestep

    with Collector(partial(Odd, (3, 4), (1.0, 0.0)), frames_per_batch=9) as collector:
        following = collector.next()["next"]
    assert following["discount"].flatten().tolist() == [0.5, 0, 1, 0.5, 0, 0.5, 0, 0.5, 0]
    assert following["terminated"].flatten().nonzero().flatten().tolist() == [6]
    assert following["truncated"].flatten().nonzero().flatten().tolist() == [2]


class HasDiscount(Scripted):
    def observation_spec(self):
        return {"discount": specs.Array((), np.float64)}


class Texts(Scripted):
    def observation_spec(self):
        return {"a": {"text": specs.StringArray(())}}


@pytest.mark.parametrize(
    ("env", "error", "words"),
    [
        (HasDiscount(), ValueError, "HasDiscount has an observation 'discount'"),
        (Texts(), TypeError, "a/text has the dtype"),
        (3, TypeError, r"interface of dm_env\.Environment, but it is 3"),
    ],
)
def test_bad_environments_are_refused(env, error, words):
    with pytest.raises(error, match=words):
        GymEnv(DMEnv(env))


# --- ids and dm_control


def test_dm_control_is_that_of_a_loop_by_hand():
    suite = pytest.importorskip("dm_control.suite")
    with Collector("dm_control:cartpole/swingup", frames_per_batch=1010) as collector:
        collector.set_seed(3)
        batch = collector.next()
        assert collector.env_state_methods() == ["pickle"]
    # set_seed has seeded the task as the argument "random" does.
    env = suite.load("cartpole", "swingup")
    env.task.random.seed(3)
    timestep = env.reset()
    for index, action in enumerate(batch["action"][:1000]):
        for name, value in timestep.observation.items():
            assert np.array_equal(batch[name][index], value)
        timestep = env.step(action.numpy())
        assert batch["next", "reward"][index].item() == np.float32(timestep.reward)
    assert timestep.last()
    assert batch["next", "truncated"][999]
    assert not batch["next", "terminated"].any()


def test_images():
    pytest.importorskip("dm_control")
    result = nursery.run("import runpy; runpy.run_module('tests.envs.dm_pixels', None, '__main__')")
    assert result.returncode == 0, result.stderr
    said = result.stdout.strip().splitlines()[-1]
    if said != "done":
        pytest.skip(f"dm_control can't render here: {said}")


def test_keys_are_those_of_torchrl():
    pytest.importorskip("dm_control")
    envs = pytest.importorskip("torchrl.envs")
    theirs, ours = envs.DMControlEnv("cheetah", "run"), GymEnv("dm_control:cheetah/run")
    expected, found = theirs.rollout(3), ours.rollout(3)
    assert isinstance(found, TensorDict)
    keys = set(found.keys(True, True)) - {"discount", ("next", "discount")}
    assert keys == set(expected.keys(True, True))
    for key in keys:
        assert found[key].shape == expected[key].shape
        if key != ("next", "reward"):  # float32 in Trawl
            assert found[key].dtype is expected[key].dtype
    theirs.close()


def test_a_vector_of_ids():
    pytest.importorskip("dm_control")
    env = GymEnv("dm_control:cartpole/balance", num_envs=2, autoreset_mode="SameStep")
    assert env.rollout(3)["position"].shape == (2, 3, 3)
    env.close()


def test_an_id_is_for_collectors():
    with pytest.raises(TypeError, match=r"'cartpole/swingup'. .*'dm_control:cartpole/swingup'"):
        DMEnv("cartpole/swingup")


@pytest.mark.parametrize("discount", [np.array(0.5, np.float32), np.array([0.5])])
def test_rewards_and_discounts_may_be_arrays(discount):
    change = {"discount": discount, "reward": np.array(2, np.float32)}
    frames = GymEnv(Changing(change)).rollout(2)
    assert frames["next", "discount"].flatten().tolist() == [0.5] * 2
    assert frames["next", "reward"][1].tolist() == [2]


@pytest.mark.parametrize("discount", ["x", np.zeros(2)])
def test_a_discount_that_is_no_number(discount):
    with pytest.raises(TypeError, match=r"Changing returned a discount that is not a number"):
        GymEnv(Changing({"discount": discount})).rollout(2)
