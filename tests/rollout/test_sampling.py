"""Probabilistic policies give the same with and without distribution objects, and say which."""

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
    assert "reads a tensor's values" in stats["distribution_path_reason"]


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
