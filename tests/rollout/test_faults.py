"""What goes wrong in an environment is told with the key, the environment and the step."""

import re

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv

from trawl.collectors import Collector
from trawl.envs import GymEnv, ParallelEnv
from trawl.testing import FaultyEnv, NumberedEnv, RaggedEnv, SelfResettingVectorEnv


class Broken(Exception):
    """An environment's own sort of error."""


class FaultyRaggedEnv(FaultyEnv, RaggedEnv):
    """The same faults on the way without a fixed layout."""

    def _observe(self):
        obs = super()._observe()
        if self.fault == "shape" and len(self.actions) == self.at + 1:
            obs["observation"] = obs["observation"][:-1]
        return obs

    def step(self, action):
        # The shape is dealt with above: these observations are no arrays.
        if self.fault == "shape":
            return RaggedEnv.step(self, action)
        return super().step(action)


def alone(faulty, _):
    return faulty


def in_a_list(faulty, fine):
    return [fine, faulty]


def in_a_vector(faulty, fine):
    return SyncVectorEnv([lambda: fine, lambda: faulty])


KINDS = pytest.mark.parametrize(
    ("kind", "fine"), [(FaultyEnv, NumberedEnv), (FaultyRaggedEnv, RaggedEnv)]
)


def failure(source, frames_per_batch=4, batches=4):
    """The error of collecting, and all that its traceback says."""
    with Collector(source, frames_per_batch=frames_per_batch) as collector:
        try:
            for _ in range(batches):
                collector.next()
        except Exception as error:
            assert collector.closed
            return error, "\n".join([str(error), *getattr(error, "__notes__", [])])
    raise AssertionError("there was no error")


PLACES = pytest.mark.parametrize("place", [alone, in_a_list, in_a_vector])


@KINDS
@PLACES
def test_an_error_keeps_its_type_and_message_and_tells_where_it_was(place, kind, fine):
    env = kind(5, Broken("the motor is off"), number=1, lengths=[3])
    error, text = failure(place(env, fine(lengths=[3])), 8 if place is not alone else 4)
    assert type(error) is Broken
    assert str(error) == "the motor is off"
    assert "at its step 5 (from 0)" in text
    if place is in_a_list and kind is FaultyEnv:
        assert "in environment 1 of the 2 in the batch" in text
    elif place is alone:
        assert f"GymEnv({kind.__name__})" in text


@KINDS
@PLACES
def test_a_reward_that_is_no_number_is_refused(place, kind, fine):
    env = kind(6, "nan", number=1, lengths=[3])
    error, text = failure(place(env, fine(lengths=[3])), 8 if place is not alone else 4)
    assert type(error) is ValueError
    assert "('next', 'reward')" in text
    assert "nan" in text
    # The second batch begins with step 4, and the third row of it is step 6.
    assert "at step 2 of this batch" in text
    assert "began with its step 4" in text
    if place is not alone:
        assert "of environment 1" in text


def test_a_reward_may_be_infinite():
    class Boundless(NumberedEnv):
        def step(self, action):
            obs, _, *rest = super().step(action)
            return (obs, float("inf") if len(self.actions) % 2 else float("-inf"), *rest)

    with Collector(Boundless(lengths=[3]), frames_per_batch=4) as collector:
        assert collector.next()["next", "reward"].isinf().all()


@KINDS
@pytest.mark.parametrize("place", [alone, in_a_list])
def test_an_observation_of_another_shape_is_refused(place, kind, fine):
    env = kind(5, "shape", number=1, lengths=[3])
    error, text = failure(place(env, fine(lengths=[3])), 8 if place is not alone else 4)
    assert type(error) is ValueError
    assert "'observation'" in text
    assert "(4,)" in text
    assert "(5,)" in text
    assert "at its step 5 (from 0)" in text


@pytest.mark.parametrize(
    ("observe", "error", "match"),
    [
        (lambda obs: obs[:3], ValueError, r"'observation' has shape \(3,\).*says \(5,\)"),
        (lambda obs: obs + 0.5, TypeError, r"'observation' is float32.*space says uint8"),
    ],
)
def test_a_first_observation_that_its_space_does_not_have_is_refused(observe, error, match):
    class Other(NumberedEnv):
        def _observe(self):
            return observe(super()._observe())

    env = Other()
    if error is TypeError:
        env.observation_space = gymnasium.spaces.Box(0, 255, (5,), "uint8")
    with pytest.raises(error, match=match):
        Collector(env, frames_per_batch=4)


class Answering(NumberedEnv):
    """Answers a step with what it was given, and the same for each of its environments."""

    def __init__(self, reward=1.0, terminated=False, truncated=False, **kwargs):
        super().__init__(**kwargs)
        self.answer = (reward, terminated, truncated)

    def step(self, action):
        return (super().step(action)[0], *self.answer, {})


class AnsweringVector(SelfResettingVectorEnv):
    """The same, as a vector environment."""

    def __init__(self, *answer, **kwargs):
        super().__init__([NumberedEnv] * 2)
        defaults = dict(zip(("reward", "terminated", "truncated"), answer, strict=False))
        rows = {"reward": 1.0, "terminated": False, "truncated": False} | defaults | kwargs
        self.rows = [np.array([value] * 2) for value in rows.values()]

    def step(self, actions):
        return (super().step(actions)[0], *self.rows, {})


class AnsweringRagged(Answering, RaggedEnv):
    """The same, without a fixed layout."""


WRONG = [
    ({"reward": None}, TypeError, "reward=None, but the reward must be a number"),
    ({"reward": "5"}, TypeError, "reward='5', but the reward must be a number"),
    ({"reward": 1j}, TypeError, "reward=1j, but the reward must be a number"),
    ({"terminated": None}, TypeError, "terminated=None, but it must be True or False"),
    ({"truncated": "False"}, TypeError, "truncated='False', but it must be True or False"),
    ({"truncated": float("nan")}, TypeError, "truncated=nan, but it must be True or False"),
]
SORTS = {
    "single": lambda **answer: Answering(**answer),
    "list": lambda **answer: [NumberedEnv(), Answering(**answer)],
    "vector": lambda **answer: AnsweringVector(**answer),
    "no fixed layout": lambda **answer: AnsweringRagged(**answer),
    "parallel": lambda **answer: ParallelEnv(1, lambda: Answering(**answer), backend="thread"),
    "skipping frames": lambda **answer: GymEnv(Answering(**answer), frame_skip=2),
}


@pytest.mark.parametrize(
    ("sort", "answer", "kind", "text"),
    [
        (sort, *wrong)
        for i, sort in enumerate(SORTS)
        for j, wrong in enumerate(WRONG)
        if (i + j) % 2 == 0
    ],
)
def test_what_is_no_reward_or_no_flag_is_refused(sort, answer, kind, text):
    with (
        Collector(SORTS[sort](**answer), frames_per_batch=4) as collector,
        pytest.raises(kind, match=r"step of .*Answering.* returned") as caught,
    ):
        collector.next()
    # From an array they are numpy's: np.str_('5').
    assert text in re.sub(r"np\.\w+\(([^)]*)\)", r"\1", str(caught.value))


@pytest.mark.parametrize("sort", SORTS)
def test_rewards_and_flags_may_be_of_any_kind_of_number(sort):
    rewards = (2, np.float64(2), np.int8(2), torch.tensor(2.0), np.array(2.0))
    flags = (False, np.False_, 0, torch.tensor(False), np.array(0))
    for reward, no in zip(rewards, flags, strict=True):
        with Collector(SORTS[sort](reward=reward, truncated=no), frames_per_batch=4) as found:
            batch = found.next()
        assert batch["next", "reward"].flatten()[-1] == 2 * (1 + (sort == "skipping frames"))
        assert not batch["next", "done"].any()


@pytest.mark.parametrize("sort", ["single", "list", "no fixed layout", "parallel"])
def test_a_flag_may_be_of_any_kind_of_number(sort):
    for yes in (True, np.True_, 1, np.int64(1), torch.tensor(True), np.array([1.0])):
        with Collector(SORTS[sort](terminated=yes), frames_per_batch=4) as found:
            batch = found.next().reshape(-1)
        assert batch["next", "terminated"][-1]
        assert batch["next", "done"][-1]


def test_a_vector_of_another_length_is_refused():
    class Short(SelfResettingVectorEnv):
        def step(self, actions):
            obs, reward, *rest = super().step(actions)
            return (obs, reward[:1], *rest)

    with (
        Collector(Short([NumberedEnv] * 2), frames_per_batch=4) as collector,
        pytest.raises(ValueError, match=r"returned reward of shape \(1,\), but the shape must be"),
    ):
        collector.next()


@pytest.mark.parametrize("wrong", [0, 1, 2], ids=["reward", "terminated", "truncated"])
def test_a_vector_whose_length_changes_is_refused(wrong):
    env = AnsweringVector(reward=1.0)
    with Collector(env, frames_per_batch=4) as collector:
        collector.next()
        env.rows[wrong] = env.rows[wrong].reshape(2, 1)
        with pytest.raises(
            ValueError, match=r"of shape \(2, 1\), but the shape must be .* with one value"
        ):
            collector.next()


def test_nothing_of_a_batch_with_an_error_is_counted():
    with Collector(FaultyEnv(6, Broken()), frames_per_batch=4) as collector:
        collector.next()
        with pytest.raises(Broken):
            collector.next()
        assert collector.stats()["frames"] == 4
