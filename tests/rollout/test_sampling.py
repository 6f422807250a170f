"""Probabilistic policies give the same with and without distribution objects, and say which."""

import time
from functools import partial
from itertools import product

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
from test_plan import Squashed, assert_same_as_called_with_a_tensordict, collect
from torch import distributions as d
from torch import nn

from trawl.collectors import Collector
from trawl.rollout.policy.plan import make_plan

NORMAL, LOGITS = ("loc", "scale"), ("logits",)
EXPLORATIONS = [
    InteractionType.RANDOM,
    InteractionType.MODE,
    InteractionType.MEAN,
    InteractionType.DETERMINISTIC,
]


def policy(cls=d.Normal, names=NORMAL, extractor=NormalParamExtractor, scored=True, **fixed):
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


def assert_same(make, path="recorded", exploration=InteractionType.RANDOM, batched=False):
    options = {"batched": batched, "exploration": exploration}
    stats = assert_same_as_called_with_a_tensordict(make, **options)
    assert stats["distribution_path"] == path
    return stats


@pytest.mark.parametrize(
    ("exploration", "extractor", "batched"),
    [
        (kind, extractor, (i + j) % 2 == 1)
        for i, kind in enumerate(EXPLORATIONS)
        for j, extractor in enumerate([NormalParamExtractor, AddStateIndependentNormalScale])
    ],
)
def test_a_gaussian_gives_the_same(exploration, extractor, batched):
    assert_same(lambda: policy(extractor=extractor), "recorded", exploration, batched)


@pytest.mark.parametrize("options", [{"scored": False}, {"validate_args": True}], ids=str)
def test_without_log_probabilities_or_with_checks_it_gives_the_same(options):
    assert_same(lambda: policy(**options))


@pytest.mark.parametrize(
    ("cls", "names", "reason"),
    [
        (Squashed, NORMAL, "Squashed is not one of the known distributions"),
        (d.VonMises, ("loc", "concentration"), "uses a tensor's values"),
    ],
)
def test_other_distributions_are_used_as_they_are(cls, names, reason):
    stats = assert_same(lambda: policy(cls, names), "objects")
    assert reason in stats["distribution_path_reason"]


@pytest.mark.parametrize(
    ("cls", "fixed", "path"),
    [
        ("TanhNormal", {}, "recorded"),
        ("TanhNormal", {"low": -2.0, "high": 2.0}, "recorded"),
        ("IndependentNormal", {}, "recorded"),
        ("TruncatedNormal", {"low": -2.0, "high": 2.0}, "objects"),
    ],
)
def test_torchrls_distributions_give_the_same(cls, fixed, path):
    modules = pytest.importorskip("torchrl.modules")

    def make(scored):
        inner = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
        return modules.ProbabilisticActor(
            TensorDictModule(inner, ["observation"], ["loc", "scale"]),
            in_keys=["loc", "scale"],
            distribution_class=getattr(modules, cls),
            distribution_kwargs=fixed,
            return_log_prob=scored,
        )

    kinds = [InteractionType.RANDOM, InteractionType.DETERMINISTIC]
    if cls != "TanhNormal":
        kinds = kinds[:1]
    for exploration, scored in product(kinds, (True, False)):
        for batched in (False, True):
            stats = assert_same(partial(make, scored), path, exploration, batched)
    assert path == "recorded" or "uses a tensor's values" in stats["distribution_path_reason"]


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


def test_calls_on_the_cpu_are_recorded_whatever_the_default_device_is():
    plan = make_plan(policy()[-1], InteractionType.RANDOM, alone=True)
    (drawn,) = plan.samplings
    with torch.no_grad(), torch.device("meta"):
        results = plan.outputs(torch.zeros(1, device="cpu"), torch.ones(1, device="cpu"))
    assert all(one.isfinite() for one in results)
    assert drawn.why_objects is None


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
