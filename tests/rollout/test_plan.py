"""Calling a policy on tensors gives what calling it with a TensorDict gives, bit for bit."""

import gc
import re
import weakref

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    set_composite_lp_aggregate,
)
from torch import distributions as d
from torch import nn
from torch.nn.utils import parametrizations

from trawl.collectors import Collector
from trawl.rollout.policy.plan import NotPlannable, make_plan

OBS, ACTION = "observation", "action"


class Squashed(d.TransformedDistribution):
    """A normal distribution squashed into the bounds of an action."""

    def __init__(self, loc, scale):
        normal = d.Independent(d.Normal(loc, scale), 1)
        super().__init__(normal, [d.TanhTransform(cache_size=1)])


class Chunk(nn.Module):
    def forward(self, features):
        loc, scale = features.chunk(2, -1)
        return loc, scale.exp()


class Several(nn.Module):
    """Has its function under another name, with further arguments."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def act(self, observation, gain=1.0):
        return gain * self.linear(observation)


def module(inner=None, in_keys=(OBS,), out_keys=(ACTION,), **options):
    inner = nn.Linear(3, 1) if inner is None else inner
    return TensorDictModule(inner, list(in_keys), list(out_keys), **options)


def sampling(cls=d.Normal, **options):
    options = {"return_log_prob": True, **options}
    return ProbabilisticTensorDictModule(
        ["loc", "scale"], [ACTION], distribution_class=cls, **options
    )


def parameters():
    return module(nn.Sequential(nn.Linear(3, 2), Chunk()), out_keys=("loc", "scale"))


def network():
    return nn.Sequential(
        nn.Linear(3, 8),
        nn.Tanh(),
        nn.Sequential(nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.Sigmoid()),
        nn.ReLU(inplace=True),
        nn.ELU(),
        nn.Linear(8, 1),
    )


def scaled(x, by):
    return x * by


# Each makes a policy that can be called on tensors.
PLANNABLE = {
    "one module": lambda: module(),
    "a deep module": lambda: module(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))),
    "layers of all kinds": lambda: module(network()),
    "a parametrised layer": lambda: module(parametrizations.weight_norm(nn.Linear(3, 1))),
    "a script": lambda: module(torch.jit.trace(nn.Linear(3, 1), torch.ones(3))),
    "a function": lambda: module(lambda x: x[..., :1].sin()),
    "a chain": lambda: TensorDictSequential(
        module(nn.Linear(3, 4), out_keys=("hidden",)), module(nn.Linear(4, 1), ("hidden",))
    ),
    "a chain of chains": lambda: TensorDictSequential(
        TensorDictSequential(module(nn.Linear(3, 4), out_keys=(("a", "hidden"),))),
        TensorDictSequential(
            TensorDictSequential(module(nn.Tanh(), (("a", "hidden"),), (("a", "hidden"),))),
            module(nn.Linear(4, 1), (("a", "hidden"),)),
        ),
    ),
    "a chain by names": lambda: TensorDictSequential(
        {
            "first": module(nn.Linear(3, 4), out_keys=("hidden",)),
            "second": module(nn.Linear(4, 1), ("hidden",)),
        }
    ),
    "an observation that is rewritten": lambda: TensorDictSequential(
        module(lambda x: x / 8, out_keys=(OBS,)), module()
    ),
    "keywords": lambda: TensorDictSequential(
        module(nn.Linear(3, 1), out_keys=("gain",)),
        TensorDictModule(scaled, {"by": "gain", "x": "gain"}, [ACTION], out_to_in_map=True),
    ),
    "keywords the other way round": lambda: TensorDictModule(
        lambda obs: obs[..., :1], {OBS: "obs"}, [ACTION], out_to_in_map=False
    ),
    "a method": lambda: module(Several(), method="act"),
    "a method with arguments": lambda: module(
        Several(), method="act", method_kwargs={"gain": 0.25}
    ),
    "a tuple": lambda: module(
        lambda x: (x[..., :1], x * 2, x.mean(-1)), out_keys=(ACTION, "_", "mean")
    ),
    "a tuple of one": lambda: module(lambda x: (x[..., :1],)),
    "a list of keys in another order": lambda: module(
        lambda x: (x.mean(-1), x[..., :1]), out_keys=("mean", ACTION)
    ),
    "a dict": lambda: module(
        lambda x: {"mean": x.mean(-1), ACTION: x[..., :1]}, out_keys=(ACTION, "mean")
    ),
    "a dict of one": lambda: module(lambda x: {ACTION: x[..., :1]}),
    "a TensorDict": lambda: module(
        lambda x: TensorDict({ACTION: x[..., :1], "mean": x.mean(-1)}, x.shape[:-1]),
        out_keys=(ACTION, "mean"),
    ),
    "a sample": lambda: TensorDictSequential(parameters(), sampling()),
    "a sample without its log-probability": lambda: TensorDictSequential(
        parameters(), sampling(return_log_prob=False)
    ),
    "a sample of a transformed distribution": lambda: TensorDictSequential(
        parameters(), sampling(Squashed)
    ),
    "a sample under another log-probability key": lambda: TensorDictSequential(
        parameters(), sampling(log_prob_key="lp", distribution_kwargs={"validate_args": False})
    ),
    "a sample without a gradient": lambda: TensorDictSequential(
        module(nn.Linear(3, 1), out_keys=("logits",)),
        ProbabilisticTensorDictModule(
            ["logits"], [ACTION], distribution_class=d.Bernoulli, return_log_prob=True
        ),
    ),
    "a probabilistic chain": lambda: ProbabilisticTensorDictSequential(parameters(), sampling()),
    "a parameter": lambda: module(Constant()),
}


class Constant(nn.Module):
    """Gives a parameter itself."""

    def __init__(self):
        super().__init__()
        self.action = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, observation):
        return self.action if observation.ndim == 1 else self.action.expand(len(observation), 1)


class Own(TensorDictModule):
    """Does something besides in a forward of its own."""

    def forward(self, tensordict):
        return super().forward(tensordict).update({ACTION: tensordict[ACTION] / 2})


def hooked():
    policy = module()
    policy.register_forward_hook(lambda module, args, out: out.set(ACTION, out[ACTION] * 0))
    return policy


def selected():
    policy = TensorDictSequential(
        module(nn.Linear(3, 4), out_keys=("hidden",)), module(nn.Linear(4, 1), ("hidden",))
    )
    policy.select_out_keys(ACTION)
    return policy


def composite():
    def spread(x):
        params = {"left": {"loc": x, "scale": x.exp()}}
        return TensorDict(params, x.shape[:-1])

    return TensorDictSequential(
        module(nn.Linear(3, 1), out_keys=("x",)),
        module(spread, ("x",), ("params",)),
        ProbabilisticTensorDictModule(
            ["params"],
            [ACTION],
            distribution_class=CompositeDistribution,
            distribution_kwargs={
                "distribution_map": {"left": d.Normal},
                "name_map": {"left": ACTION},
            },
        ),
    )


# Each makes a policy that has to see a TensorDict, and the reason given.
NOT_PLANNABLE = {
    "a forward of its own": (lambda: Own(nn.Linear(3, 1), [OBS], [ACTION]), "its own forward"),
    "a function of a TensorDict": (
        lambda: lambda td: td.set(ACTION, td[OBS][..., :1]),
        "function takes a TensorDict",
    ),
    "a hook": (hooked, "has hooks"),
    "selected keys": (selected, "hooks|selects"),
    "a part with hooks": (lambda: TensorDictSequential(hooked()), "has hooks"),
    "a chain that tolerates missing keys": (
        lambda: TensorDictSequential(module(), partial_tolerant=True),
        "selects or separates",
    ),
    "an output of its own": (lambda: module(inplace="empty"), "inplace"),
    "several samples of one distribution": (composite, "samples in a special way"),
}


def source(batched):
    return ["Pendulum-v1"] * 2 if batched else "Pendulum-v1"


def collect(policy, batched, exploration=InteractionType.RANDOM):
    with Collector(
        source(batched), policy, frames_per_batch=12, exploration_type=exploration
    ) as collector:
        collector.set_seed(3)
        found = torch.stack([collector.next().clone() for _ in range(2)])
        return found, collector.stats()


def assert_same_as_called_with_a_tensordict(make, path="direct", batched=False, **options):
    """Checks that both ways give the same batches, and returns the statistics of the first."""
    found, stats = collect(seeded(make), batched, **options)
    policy = seeded(make)
    expected, reference = collect(lambda td: policy(td), batched, **options)
    assert stats["policy_path"] == path
    assert reference["policy_path"] == "tensordict"
    assert set(found.keys(True, True)) == set(expected.keys(True, True))
    for key in found.keys(True, True):
        assert found[key].dtype == expected[key].dtype
        assert torch.equal(found[key], expected[key]), key
    return stats


def seeded(make):
    torch.manual_seed(0)
    return make()


@pytest.mark.parametrize(
    ("name", "batched"), [(name, i % 2 == 1) for i, name in enumerate(PLANNABLE)]
)
def test_a_policy_called_directly_gives_the_same(name, batched):
    assert_same_as_called_with_a_tensordict(PLANNABLE[name], batched=batched)


@pytest.mark.parametrize("name", NOT_PLANNABLE)
def test_a_policy_that_needs_a_tensordict_gets_one_and_the_reason_is_told(name):
    make, reason = NOT_PLANNABLE[name]
    with set_composite_lp_aggregate(False):
        stats = assert_same_as_called_with_a_tensordict(make, "tensordict")
    assert re.search(reason, stats["policy_path_reason"])


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", ["Actor", "ProbabilisticActor", "ActorValueOperator"])
def test_torchrls_policies_give_the_same(name, batched):
    modules = pytest.importorskip("torchrl.modules")
    makes = {
        "Actor": lambda: modules.Actor(nn.Linear(3, 1), in_keys=[OBS]),
        "ProbabilisticActor": lambda: modules.ProbabilisticActor(
            parameters(),
            in_keys=["loc", "scale"],
            distribution_class=modules.TanhNormal,
            distribution_kwargs={"low": -2.0, "high": 2.0},
            return_log_prob=True,
        ),
        "ActorValueOperator": lambda: modules.ActorValueOperator(
            module(nn.Linear(3, 4), out_keys=("hidden",)),
            module(nn.Linear(4, 1), ("hidden",)),
            modules.ValueOperator(nn.Linear(4, 1), in_keys=["hidden"]),
        ),
    }
    assert_same_as_called_with_a_tensordict(makes[name], batched=batched)


def test_a_module_that_gives_too_few_outputs_is_named():
    policy = module(lambda x: (x[..., :1], x), out_keys=(ACTION, "more", "most"))
    plan = make_plan(policy, InteractionType.RANDOM)
    with pytest.raises(ValueError, match=r"2 outputs.*out_keys.*'most'"):
        plan.call(torch.zeros(3))


def test_a_policy_that_writes_nothing_is_not_planned():
    with pytest.raises(NotPlannable, match="has no out_keys"):
        make_plan(module(out_keys=("_",)), InteractionType.RANDOM)


def test_a_plan_that_is_dropped_frees_the_modules_at_once():
    hidden, last = module(out_keys=("hidden",)), module(nn.Linear(1, 1), ("hidden",))
    inner = weakref.ref(hidden.module)
    plan = make_plan(TensorDictSequential(hidden, last), InteractionType.RANDOM)
    assert plan.call(torch.zeros(3)) is not None
    gc.disable()
    try:
        del hidden, last, plan
        assert inner() is None
    finally:
        gc.enable()
