"""What a caller passes to a collector stays the caller's."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from multi_parts import CLASSES, make
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from trawl.collectors import Collector, MultiSyncCollector
from trawl.testing import NumberedEnv
from trawl.weight_update import VanillaWeightUpdater, WeightStrategy


class Stated(nn.Module):
    """A policy for ``NumberedEnv`` with a parameter, a buffer, and a tensor as extra state."""

    def __init__(self, number: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), float(number)))
        self.register_buffer("scale", torch.full((4,), float(number)))
        self.mean = torch.full((4,), float(number))

    def get_extra_state(self) -> Any:
        return {"mean": self.mean}

    def set_extra_state(self, state: Any) -> None:
        self.mean = state["mean"]

    def forward(self, observation: Tensor) -> Tensor:
        action = nn.functional.one_hot(torch.tensor(0), 4)
        return action.expand(*observation.shape[:-1], 4)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.weight, self.scale, self.mean]


def storages(thing: Any) -> Iterator[int]:
    """Yields the addresses of all tensors in weights, states and modules."""
    if isinstance(thing, Tensor):
        yield thing.untyped_storage().data_ptr()
    elif isinstance(thing, Stated):
        yield from map(Tensor.data_ptr, thing.tensors)
    elif isinstance(thing, (dict, TensorDictBase)):
        for value in thing.values():
            yield from storages(value)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            yield from storages(value)


def disjoint(*things: Any) -> bool:
    """Whether no two of these share a tensor's memory."""
    each = [set(storages(thing)) - {0} for thing in things]
    return sum(map(len, each)) == len(set().union(*each))


def collector(cls: Any, policy: Any, **options: Any) -> Any:
    if cls is Collector:
        return Collector(NumberedEnv, policy, frames_per_batch=5, **options)
    return make(cls, policy=policy, **options)


def acting(collector: Any) -> list[Any]:
    """The policies that act, of a collector without workers or with workers in this process."""
    if isinstance(collector, Collector):
        return [collector.policy]
    return collector.get_distant_attr("policy")


# --- weights that go in and out

FORMS = {
    "module": lambda module: module,
    "state dict": lambda module: module.state_dict(),
    "TensorDict": WeightStrategy().extract_weights,
    "dict": WeightStrategy("state_dict").extract_weights,
    "of parameters": TensorDict.from_module,
}


@pytest.mark.parametrize(
    ("cls", "form"),
    [(Collector, form) for form in FORMS]
    + [(CLASSES[i % 2], form) for i, form in enumerate(FORMS)],
)
def test_weights_that_are_passed_share_no_memory_with_the_policies_that_act(cls, form):
    own, given = Stated(1), FORMS[form](Stated(2))
    with collector(cls, own) as one:
        one.update_policy_weights_(given)
        one.next(), one.next(), one.next()
        policies = acting(one)
        assert all(policy.weight.tolist() == [2] * 4 for policy in policies)
        assert disjoint(given, *policies)
        if cls is not Collector:
            assert disjoint(own, given, one.get_cached_weights("policy"), *policies)


@pytest.mark.parametrize("cls", [Collector, *CLASSES])
def test_states_share_no_memory_with_the_policies_that_act(cls):
    with collector(cls, Stated(1)) as one, collector(cls, Stated(2)) as other:
        state = one.state_dict()
        other.load_state_dict(state)
        other.next()
        assert disjoint(state, *acting(one), *acting(other))


def test_an_updater_copies_extra_state():
    own, given = Stated(1), Stated(2)
    own_weights = WeightStrategy().extract_weights(own)
    updater = VanillaWeightUpdater(policy_weights=own_weights)
    with collector(Collector, own, weight_updater=updater) as one:
        one.update_policy_weights_(given)
    assert own_weights["__extra_state__", "mean"].tolist() == [2] * 4
    assert disjoint(own_weights, given)


# --- policies


class Counting(nn.Module):
    """A policy whose calls change everything that a call can change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.calls, self.seen, self.last = 0, [], None
        self.nested = {"inner": [np.zeros(2), {1}, deque([1], maxlen=2)]}
        self.kept = TensorDict(mean=torch.zeros(3))
        self.generators = torch.Generator(), np.random.default_rng(0), random.Random(0)

    def forward(self, observation: Tensor) -> Tensor:
        self.count += 1
        self.replaced = self.replaced + 1
        self.calls += 1
        self.seen.append(observation)
        self.last = self.fresh = observation
        array, items, queue = self.nested["inner"]
        array += 1
        items.add(self.calls)
        queue.append(self.calls)
        self.kept["mean"] += 1
        self.train(not self.training)
        mine, numpys, pythons = self.generators
        noise = torch.rand(1, generator=mine) + torch.rand(1)
        drawn = numpys.random() + pythons.random() + random.random() + np.random.rand()
        return self.linear(observation) + noise * drawn


class Normed(nn.Module):
    """A policy with running statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(), nn.Linear(3, 1))

    def forward(self, observation: Tensor) -> Tensor:
        # Statistics need two rows.
        rows = observation.reshape(-1, 3)
        return self.net(torch.cat([rows, rows]))[: len(rows)].view(*observation.shape[:-1], 1)


class Called:
    """A policy that is no module."""

    def __init__(self) -> None:
        self.calls, self.net = 0, Counting()

    def __call__(self, observation: Tensor) -> Tensor:
        self.calls += 1
        return self.net(observation)

    def method(self, observation: Tensor) -> Tensor:
        return self(observation)


def hooked() -> nn.Module:
    found: list[Any] = []
    module = nn.Linear(3, 1)
    module.register_forward_hook(lambda *_: found.append(1))
    module.register_forward_pre_hook(lambda *_: found.append(2))
    module.found = found
    return named(module)


def function() -> Any:
    calls, net = 0, Counting()

    def policy(observation: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return net(observation)

    return policy


def nested(policy: Any) -> Any:
    return lambda observation: policy(observation)


_state: dict[str, Any] = {}


def of_globals() -> Any:
    _state.clear()
    return global_policy


def global_policy(observation: Tensor) -> Tensor:
    _state["calls"] = _state.get("calls", 0) + 1
    return torch.zeros(*observation.shape[:-1], 1)


def named(module: Any) -> TensorDictModule:
    return TensorDictModule(module, ["observation"], ["action"])


def torchrl(kind: str) -> Any:
    modules = pytest.importorskip("torchrl.modules")
    spec = pytest.importorskip("torchrl.data").Bounded(-2, 2, (1,))
    return TensorDictSequential(named(Counting()), getattr(modules, kind)(spec=spec))


POLICIES = {
    "module": Counting,
    "TensorDictModule": lambda: named(Counting()),
    "BatchNorm": Normed,
    "hooks": hooked,
    "weight_norm": lambda: named(nn.utils.parametrizations.weight_norm(nn.Linear(3, 1))),
    "spectral_norm": lambda: named(nn.utils.spectral_norm(nn.Linear(3, 1))),
    "object": Called,
    "object in a module": lambda: named(Called()),
    "bound method": lambda: Called().method,
    "function": function,
    "function in a function": lambda: nested(function()),
    "function in a module": lambda: named(function()),
    "partial": lambda: partial(function()),
    "globals": of_globals,
    "EGreedy": lambda: torchrl("EGreedyModule"),
    "OrnsteinUhlenbeck": lambda: torchrl("OrnsteinUhlenbeckProcessModule"),
    "AdditiveGaussian": lambda: torchrl("AdditiveGaussianModule"),
}


SOURCES: dict[str, Any] = {
    "one": "Pendulum-v1",
    "batch": ["Pendulum-v1"] * 2,
    "TorchRL": lambda: pytest.importorskip("torchrl.envs").GymEnv("Pendulum-v1"),
}


def fingerprint(value: Any, seen: set[int] | None = None) -> Any:
    """All that an object consists of: identities, values, flags and memory of its tensors."""
    seen = set() if seen is None else seen
    if isinstance(value, (bool, int, float, str, bytes, type(None), type)):
        return value
    if isinstance(value, Tensor):
        flags = value.is_shared(), value.requires_grad, str(value.device), value.data_ptr()
        return id(value), flags, value.tolist()
    if isinstance(value, np.ndarray):
        return id(value), value.tolist()
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, random.Random):
        return value.getstate()
    if id(value) in seen:
        return id(value)
    seen.add(id(value))
    if isinstance(value, dict):
        return id(value), {name: fingerprint(one, seen) for name, one in value.items()}
    if isinstance(value, (list, tuple, set, deque)):
        return [fingerprint(one, seen) for one in value]
    if isinstance(value, partial):
        return fingerprint(value.func, seen)
    if closure := getattr(value, "__closure__", None):
        return [fingerprint(cell.cell_contents, seen) for cell in closure]
    own = value.__self__ if hasattr(value, "__self__") else value
    inner = dict(own.items()) if isinstance(own, TensorDictBase) else getattr(own, "__dict__", {})
    return id(own), type(own).__name__, fingerprint(dict(inner), seen)[1]


def generators() -> Any:
    return torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()


def state_of(policy: Any) -> Any:
    return fingerprint(policy), fingerprint(_state), generators()


@pytest.mark.filterwarnings("ignore:policy has no parameters to move")
@pytest.mark.parametrize(
    ("name", "kind"), [(name, list(SOURCES)[i % 3]) for i, name in enumerate(POLICIES)]
)
def test_a_collector_that_is_made_leaves_the_policy_and_the_generators_as_they_were(name, kind):
    policy, source = POLICIES[name](), SOURCES[kind]
    if kind == "TorchRL":
        pytest.importorskip("torchrl.envs")
    # The resets of TorchRL's environments draw from them.
    state = fingerprint if kind == "TorchRL" else state_of
    before = state(policy)
    for options in ({}, {"policy_device": "cpu"}, {"track_policy_version": True}):
        Collector(source, policy, frames_per_batch=4, **options).shutdown()
    with pytest.raises((TypeError, RuntimeError)):
        Collector(source, policy, frames_per_batch=4, replay_buffer=3)
    assert state(policy) == before


@pytest.mark.filterwarnings("ignore:the policy calls a network that is not part of it")
@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, "inline") for name in POLICIES if name != "weight_norm"),
        ("TensorDictModule", "forkserver"),
    ],
)
def test_workers_leave_the_policy_as_it_was(name, method):
    policy = POLICIES[name]()
    before = fingerprint(policy)
    with MultiSyncCollector(
        "Pendulum-v1", policy, num_workers=2, frames_per_batch=8, start_method=method
    ) as collector:
        collector.next()
        if isinstance(policy, nn.Module):
            collector.update_policy_weights_()
        collector.next()
    assert fingerprint(policy) == before


@pytest.mark.parametrize("name", ["weight_norm", "module", "EGreedy"])
def test_acting_changes_only_what_the_policys_own_calls_change(name):
    policy = POLICIES[name]()
    module = policy[0].module if name == "EGreedy" else policy
    known = {key: id(value) for key, value in module.named_parameters()}
    flags = [p.requires_grad for p in module.parameters()]
    with Collector("Pendulum-v1", policy, frames_per_batch=4, policy_device="cpu") as collector:
        collector.next()
    assert {key: id(value) for key, value in module.named_parameters()} == known
    assert [p.requires_grad for p in module.parameters()] == flags
    assert not any(p.is_shared() for p in module.parameters())
    if name != "weight_norm":
        assert module.calls == 4


class Lazy(nn.Module):
    """A policy that makes its network in its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.net = None

    def forward(self, observation: Tensor) -> Tensor:
        if self.net is None:
            self.net = nn.Sequential(nn.LazyLinear(2), nn.LazyLinear(1))
        return self.net(observation)


def test_networks_of_the_first_call_stay():
    for policy in (Lazy(), nn.Sequential(nn.LazyLinear(2), nn.LazyLinear(1))):
        with Collector("Pendulum-v1", named(policy), frames_per_batch=4) as collector:
            known = [id(parameter) for parameter in policy.parameters()]
            assert len(known) == 4
            collector.next()
            assert [id(parameter) for parameter in policy.parameters()] == known


# --- replay buffers


def shared_buffer(**options: Any) -> Any:
    data = pytest.importorskip("torchrl.data")
    return data.ReplayBuffer(storage=data.LazyTensorStorage(100), shared=True, **options)


def test_the_layout_of_a_shared_buffer_leaves_environments_and_transforms_as_they_were():
    transforms = pytest.importorskip("torchrl.envs.transforms")
    envs = [gymnasium.make("Pendulum-v1") for _ in range(2)]
    envs[0].reset(seed=0)
    before = envs[0].unwrapped.state.copy()
    sums = transforms.MultiStepTransform(n_steps=3, gamma=0.9)
    buffer = shared_buffer(transform=sums)
    with MultiSyncCollector(envs, frames_per_batch=16, replay_buffer=buffer) as collector:
        assert envs[0].unwrapped.state.tolist() == before.tolist()
        assert len(buffer) == buffer.write_count == 0
        collector.next()
    assert (buffer[:]["observation"].abs().sum(-1) > 0).all()
