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


PLACES = {
    "alone": lambda faulty, _: faulty,
    "list": lambda faulty, fine: [fine, faulty],
    "vector": lambda faulty, fine: SyncVectorEnv([lambda: fine, lambda: faulty]),
}
#: The fault of a step, the type of the error, and what its text says.
FAULTS = {
    "error": (Broken("the motor is off"), Broken, ["the motor is off", "at its step 5 (from 0)"]),
    # The second batch begins with step 4.
    "nan": (
        "nan",
        ValueError,
        ["('next', 'reward')", "nan", "at step 1 of this batch", "began with its step 4"],
    ),
    "shape": ("shape", ValueError, ["'observation'", "(4,)", "(5,)", "at its step 5 (from 0)"]),
}


@pytest.mark.parametrize("kind", [FaultyEnv, FaultyRaggedEnv])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_keeps_its_type_and_message_and_tells_where_it_was(fault, place, kind):
    if (fault, place) == ("shape", "vector"):
        pytest.skip("Gymnasium's vector environments fail themselves")
    what, error, words = FAULTS[fault]
    fine = NumberedEnv if kind is FaultyEnv else RaggedEnv
    source = PLACES[place](kind(5, what, number=1, lengths=[3]), fine(lengths=[3]))
    with Collector(source, frames_per_batch=4 if place == "alone" else 8) as collector:
        collector.next()
        with pytest.raises(error) as caught:
            collector.next()
        assert collector.closed
        # Nothing of a batch with an error is counted.
        assert collector.stats()["frames"] == (4 if place == "alone" else 8)
    assert type(caught.value) is error
    assert fault != "error" or str(caught.value) == words[0]
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    if place == "alone":
        words = [*words, f"GymEnv({kind.__name__})"] if fault == "error" else words
    elif fault == "nan":
        words = [*words, "of environment 1"]
    elif place == "list" and kind is FaultyEnv:
        words = [*words, "in environment 1 of the 2 in the batch"]
    assert [word for word in words if word not in text] == []


def test_a_reward_may_be_infinite():
    class Boundless(NumberedEnv):
        def step(self, action):
            obs, _, *rest = super().step(action)
            return (obs, float("inf") if len(self.actions) % 2 else float("-inf"), *rest)

    with Collector(Boundless(lengths=[3]), frames_per_batch=4) as collector:
        assert collector.next()["next", "reward"].isinf().all()


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


def test_a_later_observation_of_another_kind_is_refused():
    class Fading(NumberedEnv):
        def _observe(self):
            obs = super()._observe().astype(np.uint8)
            return obs + 0.5 if len(self.actions) == 3 else obs

    env = Fading(lengths=[9])
    env.observation_space = gymnasium.spaces.Box(0, 255, (5,), np.uint8)
    words = r"'observation' is float.*, but its space says uint8"
    with Collector(env, frames_per_batch=8) as collector, pytest.raises(TypeError, match=words):
        collector.next()


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
