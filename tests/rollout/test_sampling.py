"""Probabilistic policies give the same with and without distribution objects, and say which."""

import time

import pytest
import torch
from tensordict.nn import (
    AddStateIndependentNormalScale,
    InteractionType,
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from test_plan import Squashed, collect
from torch import distributions as d
from torch import nn

from trawl.collectors import Collector

NORMAL, LOGITS = ("loc", "scale"), ("logits",)
EXPLORATIONS = [
    InteractionType.RANDOM,
    InteractionType.MODE,
    InteractionType.MEAN,
    InteractionType.DETERMINISTIC,
]


def policy(cls=d.Normal, names=NORMAL, extractor=NormalParamExtractor, scored=True, **fixed):
    torch.manual_seed(0)
    if len(names) == 2:
        size = 1 if extractor is AddStateIndependentNormalScale else 2
        head = extractor(1) if size == 1 else extractor()
        inner = nn.Sequential(nn.Linear(3, size), head)
    else:
        inner = nn.Linear(3, 1)
    return ProbabilisticTensorDictSequential(
        TensorDictModule(inner, ["observation"], list(names)),
        ProbabilisticTensorDictModule(
            list(names),
            ["action"],
            distribution_class=cls,
            distribution_kwargs=fixed,
            return_log_prob=scored,
        ),
    )


def assert_same(make, path, exploration=InteractionType.RANDOM, batched=False):
    """The same batches as if the policy was called with a TensorDict."""
    found, stats = collect(make(), batched, exploration=exploration)
    plain = make()
    expected, reference = collect(lambda td: plain(td), batched, exploration=exploration)
    assert reference["policy_path"] == "tensordict"
    assert (stats["policy_path"], stats["distribution_path"]) == ("direct", path)
    assert set(found.keys(True, True)) == set(expected.keys(True, True))
    for key in found.keys(True, True):
        assert found[key].dtype == expected[key].dtype
        assert torch.equal(found[key], expected[key]), key
    return stats


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("exploration", EXPLORATIONS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("extractor", [NormalParamExtractor, AddStateIndependentNormalScale])
def test_a_gaussian_gives_the_same(exploration, extractor, batched):
    assert_same(lambda: policy(extractor=extractor), "recorded", exploration, batched)


def test_log_probabilities_may_be_left_out():
    assert_same(lambda: policy(scored=False), "recorded")


def test_a_distribution_that_is_told_to_check_its_arguments_gives_the_same():
    assert_same(lambda: policy(validate_args=True), "recorded")


def test_a_distribution_of_the_users_own_is_used_as_it_is():
    stats = assert_same(lambda: policy(Squashed), "objects")
    assert stats["distribution_path_reason"] == "Squashed is not one of the known distributions"


def test_a_distribution_that_reads_its_parameters_is_used_as_it_is():
    stats = assert_same(lambda: policy(d.VonMises, ("loc", "concentration")), "objects")
    assert "uses a tensor's values" in stats["distribution_path_reason"]


@pytest.mark.parametrize("scored", [False, True])
def test_parameters_are_checked(scored, monkeypatch):
    monkeypatch.setattr(d.Distribution, "_validate_args", True)
    sampler = policy(scored=scored)
    with Collector("Pendulum-v1", sampler, frames_per_batch=20, total_frames=-1) as collector:
        collector.next()
        with torch.no_grad():
            for weights in sampler.parameters():
                weights.fill_(torch.nan)
        with pytest.raises(ValueError, match="Expected parameter loc"):
            collector.next()


def test_arguments_that_change_between_batches_take_effect():
    low = torch.zeros(1)
    sampler = policy(d.Uniform, ("high",), low=low, validate_args=False, scored=False)
    with torch.no_grad():
        for weights in sampler.parameters():
            weights.zero_()
    with Collector("Pendulum-v1", sampler, frames_per_batch=20, total_frames=-1) as collector:
        assert (collector.next()["action"] == 0).all()
        low.fill_(-1)
        assert (collector.next()["action"] < 0).any()


def test_a_policy_without_a_distribution_says_nothing_of_it():
    _, stats = collect(TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"]), False)
    assert "distribution_path" not in stats


class Fails(nn.Module):
    """Returns a scale that is not allowed, once the pendulum has swung."""

    def __init__(self, scale):
        super().__init__()
        self.scale, self.calls = scale, 0

    def forward(self, observation):
        self.calls += 1
        loc = torch.zeros_like(observation[..., :1])
        return loc, torch.full_like(loc, self.scale if self.calls > 7 else 1.0)


@pytest.mark.parametrize("scale", [-1.0, torch.nan])
def test_parameters_of_later_steps_are_checked_with_the_batch(scale, monkeypatch):
    monkeypatch.setattr(d.Distribution, "_validate_args", True)
    sampler = policy()
    sampler[0].module = Fails(scale)
    collector = Collector("Pendulum-v1", sampler, frames_per_batch=20)
    with collector, pytest.raises(ValueError, match="Expected parameter scale") as raised:
        collector.next()
    assert "in its step 7" in "".join(raised.value.__notes__)
    assert "Tensor of shape (1,)" in str(raised.value)


def test_a_tensor_of_the_users_may_change_after_it_was_replaced():
    old = torch.zeros(1)
    sampler = policy(d.Uniform, ("high",), low=old, validate_args=False, scored=False)
    with torch.no_grad():
        for weights in sampler.parameters():
            weights.zero_()
    with Collector("Pendulum-v1", sampler, frames_per_batch=20) as collector:
        collector.next()
        sampler[1].distribution_kwargs["low"] = old.clone()
        old.fill_(-1)
        assert (collector.next()["action"] == 0).all()


def test_nothing_is_recorded_while_another_thread_may_draw():
    class Buffer(list):
        extend = list.append

    buffer, sampler = Buffer(), policy()
    with Collector("Pendulum-v1", sampler, frames_per_batch=20, replay_buffer=buffer) as collector:
        collector.start()
        while not buffer:
            time.sleep(0.001)
        stats = collector.stats()
    assert stats["distribution_path_reason"] == "another thread may draw random numbers"
