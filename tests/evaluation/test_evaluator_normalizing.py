"""Evaluations normalise with the learner's statistics, and leave them as they are."""

import pytest
import torch
from tensordict.nn import TensorDictModule
from torch import nn

from trawl.collectors import Collector, Evaluator


class Seen(nn.Module):
    """A policy that keeps the largest value that it has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, observation):
        self.largest.copy_(torch.maximum(self.largest, observation.abs().max()))
        return observation[..., :1].clamp(-1, 1)


def policy():
    return TensorDictModule(Seen(), ["observation"], ["action"])


def learner(**options):
    return Collector("Pendulum-v1", policy(), frames_per_batch=200, **options)


def evaluator(collector, **options):
    options = {"num_trajectories": 2, "max_steps": 20, **options}
    return Evaluator("Pendulum-v1", policy(), normalization=collector.normalization, **options)


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_an_evaluation_uses_the_statistics_of_the_moment(backend):
    with (
        learner(normalize_observations=True, normalize_rewards=True) as collector,
        evaluator(collector, backend=backend) as judge,
    ):
        collector.set_seed(0)
        before = judge.evaluate()
        collector.next()
        found = collector.normalization.observations["observation"]
        after = judge.evaluate()
        again = judge.evaluate()
        assert collector.normalization.observations["observation"] is found
        collector.next()
        later = judge.evaluate()
    assert after["eval/reward"] == again["eval/reward"]
    assert len({one["eval/reward"] for one in (before, after, later)}) == 3


@pytest.mark.parametrize("env_id", ["gymnax:Pendulum-v1", "vmas:balance"])
def test_several_environments_of_a_library_that_steps_batches(env_id):
    pytest.importorskip(env_id.partition(":")[0])
    with Collector(env_id, frames_per_batch=20, normalize_observations=True) as collector:
        collector.next()
        common = {"num_trajectories": 3, "max_steps": 5, "num_envs": 2}
        with Evaluator(
            env_id, policy_factory=lambda: None, normalization=collector.normalization, **common
        ) as judge:
            assert judge.evaluate().episodes.lengths.tolist() == [5, 5, 5]


def test_returns_are_those_of_the_environment():
    with learner(normalize_observations=True, normalize_rewards=True) as collector:
        collector.set_seed(0)
        collector.next()
        found = collector.normalization

        def act(observation):
            return found.normalize_observation(observation)[..., :1].clamp(-1, 1)

        # The same episodes, normalised by hand.
        with Evaluator("Pendulum-v1", act, num_trajectories=2, max_steps=20) as other:
            expected = other.evaluate()["eval/reward"]
        with evaluator(collector) as judge:
            result = judge.evaluate()["eval/reward"]
            # Statistics are copied when an evaluation is triggered.
            assert judge.trigger_eval()
            collector.next()
            assert judge.wait()["eval/reward"] == result
    assert result == pytest.approx(expected, rel=1e-4)
    assert result < -20


def test_rewards_alone_leave_an_evaluation_as_it_is():
    with learner(normalize_rewards=True) as collector, evaluator(collector) as judge:
        collector.next()
        one = judge.evaluate()
    with Evaluator("Pendulum-v1", policy(), num_trajectories=2, max_steps=20) as other:
        assert other.evaluate()["eval/reward"] == one["eval/reward"]


@pytest.mark.parametrize("backend", ["thread", "process"])
def test_statistics_of_another_environment(backend):
    def evaluate(env):
        options = {"normalization": collector.normalization, "backend": backend}
        with Evaluator(env, policy_factory=lambda: None, **options) as evaluator:
            evaluator.evaluate()

    with learner(normalize_observations=True) as collector:
        words = "it has statistics of 'observation' of shape \\(3,\\), not \\(4,\\)"
        with pytest.raises(ValueError, match=f"normalization doesn't fit .*: {words}"):
            evaluate("CartPole-v1")
        words = "it has statistics only of \\['observation'\\], but not of 'position'"
        with pytest.raises(ValueError, match=words):
            evaluate("dm_control:cartpole/balance")


def test_mistakes_are_named():
    with pytest.raises(TypeError, match="normalization must be the attribute `normalization`"):
        Evaluator("Pendulum-v1", policy(), normalization=True)
    with pytest.raises(TypeError, match="can't contain normalize_observations"):
        Evaluator("Pendulum-v1", policy(), collector_kwargs={"normalize_observations": True})
