"""Several environments stepped as one batch."""

import pytest
import torch
from gymnasium.vector import SyncVectorEnv

from trawl.envs import GymEnv, SerialEnv
from trawl.testing import (
    FaultyEnv,
    ImageEnv,
    NestedEnv,
    NumberedEnv,
    RaggedEnv,
    SelfResettingVectorEnv,
)

STEP = 2

KINDS = pytest.mark.parametrize("kind", [ImageEnv, NestedEnv, RaggedEnv])


def serial(kind=NumberedEnv, count=3, **options):
    """Environment ``i`` has episodes of ``2 + i`` steps."""
    return SerialEnv(count, [lambda i=i: kind(i, lengths=[2 + i]) for i in range(count)], **options)


def keys(tensordict):
    return set(tensordict.keys(True, True))


@KINDS
def test_environments_are_rows_of_a_batch(kind):
    env = serial(kind)
    root = env.reset()
    assert env.batch_size == root.batch_size == (3,)
    assert kind.numbers(root)[:, 0].tolist() == [0, 1, 2]
    assert env.full_observation_spec.is_in(root)


@KINDS
def test_each_environment_gets_its_own_action(kind):
    env = serial(kind)
    frame = env.step(env.rand_action(env.reset()))
    assert [[kind.action_numbers(frame)[i].item()] for i in range(3)] == [
        child.env.actions for child in env.envs
    ]
    assert env.full_observation_spec.is_in(frame["next"])


@KINDS
def test_each_environment_is_reset_when_its_episode_ends(kind):
    frames = serial(kind).rollout(6, break_when_any_done=False)
    assert frames.batch_size == (3, 6)
    assert frames.names == [None, "time"]
    assert kind.numbers(frames)[..., STEP].tolist() == [
        [0, 1, 0, 1, 0, 1],
        [0, 1, 2, 0, 1, 2],
        [0, 1, 2, 3, 0, 1],
    ]


@KINDS
def test_a_rollout_stops_when_the_first_episode_ends(kind):
    assert serial(kind).rollout(6).batch_size == (3, 2)


@KINDS
def test_a_partial_reset_leaves_the_other_rows(kind):
    env = serial(kind)
    _, root = env.step_and_maybe_reset(env.rand_action(env.reset()))
    mask = torch.tensor([[False], [True], [False]])
    fresh = env.reset(root.copy().set("_reset", mask))
    assert kind.numbers(fresh)[:, STEP].tolist() == [1, 0, 1]
    if kind is RaggedEnv:
        assert list(fresh["text"]) == ["0.0.1", "1.1.0", "2.0.1"]


@KINDS
def test_a_fake_frame_is_laid_out_as_a_real_one(kind):
    env = serial(kind)
    fake, real = env.fake_tensordict(), env.step(env.rand_action(env.reset()))
    assert keys(fake) == keys(real)
    assert all(fake.get(key).shape == real.get(key).shape for key in keys(real))


def test_vector_environments_may_be_nested():
    def vector(first):
        return SyncVectorEnv([lambda i=i: NumberedEnv(first + i) for i in range(2)])

    env = SerialEnv(3, [lambda i=i: vector(2 * i) for i in range(3)])
    frames = env.rollout(4)
    assert frames.batch_size == (3, 2, 4)
    assert NumberedEnv.numbers(frames)[..., 0, 0].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert env.action_spec.shape == (3, 2, 4)
    assert env.action_spec_unbatched.shape == (4,)


def test_a_step_that_was_spent_on_resetting_is_known():
    def vector(length):
        return SelfResettingVectorEnv([lambda: NumberedEnv(lengths=[length])])

    env = SerialEnv(2, [lambda: vector(1), lambda: vector(3)])
    root = env.reset()
    masks = []
    for _ in range(3):
        _, root = env.step_and_maybe_reset(env.rand_action(root))
        masks.append(env.autoreset_mask().flatten().tolist())
    assert masks == [[False, False], [True, False], [False, False]]


def test_environments_that_spend_no_step_on_resetting_say_so():
    assert serial().autoreset_mask() is None


def test_one_function_makes_all():
    made = []

    def make(length=3):
        made.append(length)
        return NumberedEnv(lengths=[length])

    assert SerialEnv(3, make).batch_size == (3,)
    assert made == [3, 3, 3]
    SerialEnv(2, make, create_env_kwargs={"length": 4})
    SerialEnv(2, make, create_env_kwargs=[{"length": 5}, {"length": 6}])
    assert made[3:] == [4, 4, 5, 6]


@pytest.mark.parametrize("source", ["CartPole-v1", lambda: GymEnv("CartPole-v1")])
def test_an_environment_may_come_in_several_ways(source):
    assert SerialEnv(2, source).rollout(3).batch_size == (2, 3)


@pytest.mark.parametrize(
    ("count", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_there_is_a_positive_number_of_environments(count, error):
    with pytest.raises(error, match="num_workers must be"):
        SerialEnv(count, NumberedEnv)


def test_there_are_as_many_functions_as_environments():
    with pytest.raises(ValueError, match="create_env_fn has 2 entries, but num_workers is 3"):
        SerialEnv(3, [NumberedEnv] * 2)
    with pytest.raises(ValueError, match="create_env_kwargs has 2 entries, but num_workers is 3"):
        SerialEnv(3, NumberedEnv, create_env_kwargs=[{}] * 2)


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (ImageEnv, "observation 'observation'"),
        (lambda: GymEnv(NumberedEnv(), categorical_action_encoding=True), "action 'action'"),
        (lambda: SyncVectorEnv([NumberedEnv]), "batch_size"),
    ],
)
def test_environments_of_a_batch_must_be_alike(other, what):
    with pytest.raises(ValueError, match=f"environment 1 has {what}"):
        SerialEnv(2, [NumberedEnv, other])


def test_what_was_made_is_closed_when_something_fails():
    closed = []

    class Closing(NumberedEnv):
        def close(self):
            closed.append(True)

    def fail():
        raise OSError("no display")

    with pytest.raises(OSError, match="no display"):
        SerialEnv(3, [Closing, Closing, fail])
    assert closed == [True, True]


def test_closing_closes_every_environment():
    env = serial()
    env.close()
    assert all(child.is_closed for child in env.envs)
    env.close(raise_if_closed=False)
    with pytest.raises(RuntimeError, match="already closed"):
        env.close()


def test_environments_have_seeds_of_their_own():
    env = SerialEnv(3, "CartPole-v1")
    following = env.set_seed(3)
    first = env.reset()["observation"]
    assert len(first.unique(dim=0)) == 3
    assert env.set_seed(3) == following != 3
    assert torch.equal(env.reset()["observation"], first)
    assert env.set_seed(3, static_seed=True) == 3
    assert len(env.reset()["observation"].unique(dim=0)) == 1


def test_seeds_of_a_batch_are_those_of_its_environments_in_turn():
    env = SerialEnv(2, "CartPole-v1")
    env.set_seed(3)
    first, second = GymEnv("CartPole-v1"), GymEnv("CartPole-v1")
    second.set_seed(first.set_seed(3))
    expected = torch.stack([first.reset()["observation"], second.reset()["observation"]])
    assert torch.equal(env.reset()["observation"], expected)


def test_arguments_of_a_reset_reach_each_environment():
    seen = []

    class Listening(NumberedEnv):
        def reset(self, *, seed=None, options=None):
            seen.append(options)
            return super().reset(seed=seed)

    SerialEnv(2, Listening).reset(options={"easy": True})
    assert seen == [{"easy": True}] * 2


def test_an_error_passes_through():
    env = SerialEnv(2, [NumberedEnv, lambda: FaultyEnv(1, OSError("no display"))])
    with pytest.raises(OSError, match="no display"):
        env.rollout(3)


def test_tensordicts_may_be_put_on_a_device():
    frames = serial(device="cpu").rollout(5, break_when_any_done=False)
    assert frames.device == torch.device("cpu")
    assert serial().reset().device is None


def test_it_tells_what_it_is():
    assert repr(serial()) == "SerialEnv(3 x GymEnv(NumberedEnv))"
    assert serial().name == "NumberedEnv"
    assert serial().fixed_layout
    assert not serial(RaggedEnv).fixed_layout
