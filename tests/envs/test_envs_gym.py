"""A Gymnasium environment as a TensorDict environment."""

from functools import partial

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from trawl.envs import GymEnv, SerialEnv
from trawl.testing import NestedEnv, NumberedEnv, RaggedEnv
from trawl.testing.envs import read_image
from trawl.testing.script import Script
from trawl.testing.scripted_envs import ScriptedLooseEnv

STEP, TOTAL = 2, 3


@pytest.fixture
def registered():
    """The id of a registered environment."""
    gymnasium.register("Numbered-v0", NumberedEnv, kwargs={"lengths": (7,)})
    yield "Numbered-v0"
    gymnasium.registry.pop("Numbered-v0")


def vector(kind=NumberedEnv, count=2, **options):
    return SyncVectorEnv([lambda i=i: kind(i, lengths=[2 + i], **options) for i in range(count)])


def keys(tensordict):
    return set(tensordict.keys(True, True))


# --- resetting and stepping


def test_a_sequence_is_a_copy_of_the_environments():
    class Reusing(RaggedEnv):
        def _observe(self):
            obs = super()._observe()
            self.memory = getattr(self, "memory", [])
            self.memory[:] = obs["taken"]
            return obs | {"taken": self.memory}

    env = GymEnv(Reusing(lengths=[100]))
    frames = env.rollout(3)
    assert [len(frames[i]["taken"]) for i in range(3)] == [0, 1, 2]


def test_an_action_that_is_missing_is_named():
    env = GymEnv("CartPole-v1")
    root = env.reset()
    with pytest.raises(KeyError, match="no action 'action' in the TensorDict, which has done, obs"):
        env.step(root)


def test_an_observation_of_another_shape_is_refused():
    class Short(RaggedEnv):
        def _observe(self):
            obs = super()._observe()
            return obs | {"observation": obs["observation"][:3]}

    with pytest.raises(ValueError, match=r"'observation' has shape \(3,\).*says \(5,\)"):
        GymEnv(Short()).reset()


def test_a_reset_takes_gymnasiums_arguments():
    options = []

    class Listening(NumberedEnv):
        def reset(self, *, seed=None, options_seen=options, options=None):
            options_seen.append((seed, options))
            return super().reset(seed=seed)

    GymEnv(Listening()).reset(seed=3, options={"easy": True})
    GymEnv(SyncVectorEnv([Listening])).reset(seed=4, options={"easy": False})
    assert options == [(3, {"easy": True}), (4, {"easy": False})]


# --- rollouts


def test_a_rollout_may_begin_where_another_ended():
    env = GymEnv(NumberedEnv(lengths=[100]))
    _, root = env.step_and_maybe_reset(env.rand_action(env.reset()))
    frames = env.rollout(3, tensordict=root)
    assert NumberedEnv.numbers(frames)[:, TOTAL].tolist() == [1, 2, 3]


# --- specs


def test_keys_say_what_is_what():
    env = GymEnv(NestedEnv())
    assert env.action_keys == [("pick", "0"), ("pick", "1"), "push"]
    assert set(env.action_spec.keys(True, True)) == set(env.action_keys)
    assert env.done_keys == ["done", "terminated", "truncated"]
    assert env.done_keys_groups == [env.done_keys]
    assert env.reset_keys == ["_reset"]
    assert env.reward_keys == ["reward"]
    assert list(env.input_spec) == ["full_action_spec", "full_state_spec"]
    assert len(env.full_state_spec) == 0
    assert list(env.output_spec) == ["full_observation_spec", "full_reward_spec", "full_done_spec"]


def test_a_single_action_has_a_spec_and_a_key():
    env = GymEnv(vector())
    assert env.action_key == "action"
    assert env.action_spec.shape == (2, 4)
    assert env.action_spec_unbatched.shape == (4,)
    assert env.reward_spec.shape == env.done_spec.shape == (2, 1)
    assert env.done_spec.dtype == torch.bool


def test_discrete_values_may_be_indices():
    inner = NumberedEnv()
    env = GymEnv(inner, categorical_action_encoding=True)
    assert env.action_spec.shape == ()
    root = env.reset().set("action", torch.tensor(3))
    env.step(root)
    assert inner.actions == [3]


# --- options


def test_an_id_is_made_with_its_arguments(registered):
    env = GymEnv(registered, lengths=(3,), number=9)
    frames = env.rollout(10)
    assert frames.batch_size == (3,)
    assert NumberedEnv.numbers(frames)[0, 0] == 9


def seeded(seed):
    GymEnv(NumberedEnv()).set_seed(seed)


ONLY = "can be used only with the id of an environment"
WRONG = [
    (lambda: GymEnv("Nowhere-v0"), gymnasium.error.Error, "Nowhere"),
    (lambda: GymEnv(3), TypeError, r"env must be an id, a gymnasium.Env.*int: 3"),
    (lambda: GymEnv(NumberedEnv(), lengths=[3]), TypeError, rf"\['lengths'\] {ONLY}.*NumberedEnv"),
    (lambda: GymEnv(NumberedEnv(), num_envs=3), TypeError, rf"\['num_envs'\] {ONLY}"),
    *(
        (partial(GymEnv, "CartPole-v1", num_envs=number), kind, f"num_envs must be {words}")
        for number, kind, words in (
            ("4", TypeError, "an integer, but it is str: '4'"),
            (2.5, TypeError, "an integer, but it is float: 2.5"),
            (0, ValueError, "at least 1, but it is 0"),
        )
    ),
    *(
        (
            partial(GymEnv, "CartPole-v1", **{name: "False"}),
            TypeError,
            f"{name} must be True or False, .* the string 'False'",
        )
        for name in ("categorical_action_encoding", "from_pixels", "pixels_only")
    ),
    *(
        (partial(GymEnv, NumberedEnv(), frame_skip=skip), ValueError, "frame_skip must be a posit")
        for skip in (0, -1, 1.5, "two")
    ),
    (lambda: GymEnv(NumberedEnv(), pixels_only=True), ValueError, "pixels_only=True needs from_p"),
    (lambda: GymEnv(vector(), frame_skip=2), ValueError, "need a single environment"),
    (lambda: GymEnv(vector(), from_pixels=True), ValueError, "need a single environment"),
    *((partial(seeded, seed), TypeError, "must be an integer") for seed in (1.5, "3", None, True)),
    (partial(seeded, -1), ValueError, "seed must not be negative, but it is -1"),
]


@pytest.mark.parametrize(("call", "error", "words"), WRONG)
def test_wrong_arguments_are_named(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_several_environments_are_made_of_an_id(registered):
    env = GymEnv(registered, num_envs=3)
    assert env.batch_size == (3,)
    assert env.rollout(4).batch_size == (3, 4)
    env = GymEnv("CartPole-v1", num_envs=3, vectorization_mode="vector_entry_point")
    assert env.rollout(4).batch_size == (3, 4)


@pytest.mark.parametrize("skip", [1, 3])
def test_actions_are_repeated_and_rewards_summed(skip):
    inner = NumberedEnv(lengths=[6])
    frames = GymEnv(inner, frame_skip=skip).rollout(20)
    assert len(frames) == 6 // skip
    assert frames["next", "reward"].sum() == sum(range(1, 7))
    chosen = NumberedEnv.action_numbers(frames).tolist()
    assert inner.actions == [action for action in chosen for _ in range(skip)]


def test_repeating_an_action_ends_with_the_episode():
    inner = NumberedEnv(lengths=[4], ends=["truncated"])
    frames = GymEnv(inner, frame_skip=3).rollout(20)
    assert len(inner.actions) == 4
    assert frames["next", "reward"].flatten().tolist() == [1 + 2 + 3, 4]
    assert frames["next", "truncated"].flatten().tolist() == [False, True]


def test_the_rendered_image_may_be_an_observation(registered):
    env = GymEnv(NumberedEnv(4, render_mode="rgb_array"), from_pixels=True)
    assert env.observation_spec["pixels"].dtype == torch.uint8
    frames = env.rollout(3)
    assert frames["pixels"].dtype == torch.uint8
    assert torch.equal(read_image(frames["pixels"]), NumberedEnv.numbers(frames))
    assert torch.equal(read_image(frames["next", "pixels"]), NumberedEnv.numbers(frames["next"]))
    env = GymEnv(NumberedEnv(render_mode="rgb_array"), from_pixels=True, pixels_only=True)
    assert list(env.observation_spec) == ["pixels"]
    assert env.rollout(3)["pixels"].shape == (3, 8, 8, 3)
    env = GymEnv(NestedEnv(render_mode="rgb_array"), from_pixels=True)
    assert set(env.observation_spec) == {"env", "when", "last", "pixels"}
    # An id is made to render.
    assert GymEnv(registered, from_pixels=True).reset()["pixels"].shape == (8, 8, 3)


# --- seeds


def test_a_seed_is_gymnasiums_and_used_once():
    env = GymEnv("CartPole-v1")
    env.set_seed(11)
    first, second, third = (env.reset()["observation"] for _ in range(3))
    expected, _ = gymnasium.make("CartPole-v1").reset(seed=11)
    assert np.array_equal(first, expected)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def test_a_seed_is_for_a_reset_of_everything():
    env = GymEnv("CartPole-v1", num_envs=2)
    root = env.reset()
    env.set_seed(3)
    mask = torch.tensor([[True], [False]])
    partly = env.reset(root.copy().set("_reset", mask))
    assert torch.equal(partly["observation"][1], root["observation"][1])
    other = GymEnv("CartPole-v1", num_envs=2)
    other.set_seed(3)
    assert torch.equal(env.reset()["observation"], other.reset()["observation"])


# --- the rest


def test_it_tells_what_it_is(registered):
    assert repr(GymEnv(registered)) == "GymEnv(Numbered-v0)"
    assert repr(GymEnv(NumberedEnv())) == "GymEnv(NumberedEnv)"
    assert repr(GymEnv(vector())) == "GymEnv(SyncVectorEnv, batch_size=[2])"


def test_there_is_no_state_to_save():
    env = GymEnv(NumberedEnv())
    env.load_state_dict(env.state_dict())
    assert env.state_dict() == {}


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_large_unsigned_integers_are_observed(dtype):
    class Deep(NumberedEnv):
        def __init__(self):
            super().__init__(lengths=[100])
            top = int(np.iinfo(dtype).max)
            self.observation_space = spaces.Box(0, top, (5,), dtype)

        def _observe(self):
            return np.iinfo(dtype).max - np.array([*self._now()[:4], 0]).astype(dtype)

    frames = GymEnv(Deep()).rollout(3)
    expected = [np.iinfo(dtype).max - step for step in range(3)]
    assert frames["observation"][:, STEP].tolist() == expected


def test_an_action_may_be_text():
    class Listening(NumberedEnv):
        def __init__(self):
            super().__init__()
            self.action_space = spaces.Text(8)

        def _as_number(self, action):
            assert self.action_space.contains(action)
            return len(action)

    inner = Listening()
    frames = GymEnv(inner).rollout(4)
    assert inner.actions == [len(text) for text in frames["action"]]


@pytest.mark.parametrize("name", ["reward", "done", "truncated", "next", "collector", "action"])
def test_an_observation_under_a_key_that_is_taken_is_refused(name):
    class Clashing(NumberedEnv):
        def __init__(self):
            super().__init__()
            self.observation_space = spaces.Dict({name: self.observation_space})

    with pytest.raises(ValueError, match=f"has an observation '{name}'"):
        GymEnv(Clashing())


def test_an_observation_beside_a_nested_action_is_fine():
    class Nested(NumberedEnv):
        def __init__(self):
            super().__init__()
            box = self.observation_space
            self.observation_space = spaces.Dict({"agent": spaces.Dict({"sees": box})})
            self.action_space = spaces.Dict({"agent": spaces.Dict({"does": spaces.Discrete(2)})})

        def _observe(self):
            return {"agent": {"sees": super()._observe()}}

        def _as_number(self, action):
            return int(action["agent"]["does"])

    frames = GymEnv(Nested()).rollout(3)
    assert keys(frames) >= {("agent", "sees"), ("agent", "does"), ("next", "agent", "sees")}


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("given", [None, "cpu"])
def test_rows_with_text_are_kept_whatever_device_they_name(device, given):
    script = Script(lengths=[9])
    makers = [partial(ScriptedLooseEnv, script, env) for env in range(3)]
    env = SerialEnv(3, makers, device=device)
    root = env.reset()
    root = root.to("cpu") if given else root.copy().clear_device_()
    before = root.get("text").tolist(), root.device, root.get("text").device
    mask = torch.tensor([[True], [False], [True]])
    fresh = env.reset(root.copy().set("_reset", mask)).get("text").tolist()
    assert (root.get("text").tolist(), root.device, root.get("text").device) == before
    assert fresh[1] == before[0][1]
    assert fresh[0] != before[0][0]
    env.close()
