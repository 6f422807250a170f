"""What goes wrong in an environment is told with the key, the environment and the step."""

import pytest
from gymnasium.vector import SyncVectorEnv

from trawl.collectors import Collector
from trawl.testing import FaultyEnv, NumberedEnv, RaggedEnv


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


@KINDS
@pytest.mark.parametrize("place", [alone, in_a_list, in_a_vector])
def test_an_error_keeps_its_type_and_message_and_tells_the_step(place, kind, fine):
    env = kind(5, Broken("the motor is off"), number=1, lengths=[3])
    error, text = failure(place(env, fine(lengths=[3])), 8 if place is not alone else 4)
    assert type(error) is Broken
    assert str(error) == "the motor is off"
    assert "at its step 5 (from 0)" in text


def test_an_error_in_a_list_tells_the_environment():
    env = FaultyEnv(5, Broken("the motor is off"))
    _, text = failure(in_a_list(env, NumberedEnv()), 8)
    assert "in environment 1 of the 2 in the batch" in text


def test_an_error_tells_what_the_environment_is():
    _, text = failure(FaultyEnv(0, Broken("the motor is off")))
    assert "GymEnv(FaultyEnv)" in text


@KINDS
@pytest.mark.parametrize("place", [alone, in_a_list, in_a_vector])
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


def test_a_first_observation_of_another_shape_is_refused():
    class Short(NumberedEnv):
        def _observe(self):
            return super()._observe()[:3]

    with pytest.raises(ValueError, match=r"'observation' has shape \(3,\).*says \(5,\)"):
        Collector(Short(), frames_per_batch=4)


def test_an_observation_that_its_space_cannot_hold_is_refused():
    class Fractions(NumberedEnv):
        def __init__(self):
            super().__init__()
            self.observation_space.dtype = "uint8"

        def _observe(self):
            return super()._observe() + 0.5

    env = Fractions()
    env.observation_space = type(env.observation_space)(0, 255, (5,), "uint8")
    with pytest.raises(TypeError, match=r"'observation' is float32.*space says uint8"):
        Collector(env, frames_per_batch=4)


def test_a_reward_that_is_none_is_refused():
    class Silent(NumberedEnv):
        def step(self, action):
            obs, _, *rest = super().step(action)
            return (obs, None, *rest)

    error, text = failure(Silent())
    assert type(error) is ValueError
    assert "('next', 'reward')" in text


def test_nothing_of_a_batch_with_an_error_is_counted():
    with Collector(FaultyEnv(6, Broken()), frames_per_batch=4) as collector:
        collector.next()
        with pytest.raises(Broken):
            collector.next()
        assert collector.stats()["frames"] == 4
