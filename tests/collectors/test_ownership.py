"""What a caller passes to a collector stays the caller's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from multi_parts import CLASSES, make
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from trawl.collectors import Collector
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


@pytest.mark.parametrize("cls", [Collector, *CLASSES])
@pytest.mark.parametrize("form", FORMS)
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
