"""Modules as plain functions."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrizations

from trawl.rollout.policy.modules import unroll


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(3, 8),
        nn.Tanh(),
        nn.Sequential(nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.Sigmoid()),
        nn.ReLU(inplace=True),
        nn.ELU(),
        nn.Linear(8, 1),
    )


@pytest.mark.parametrize("shape", [(3,), (5, 3)])
def test_results_are_the_same_to_the_bit(shape: tuple[int, ...]) -> None:
    module, value = network(), torch.randn(shape)
    assert torch.equal(unroll(module)(value), module(value))


def test_hooks_are_called() -> None:
    module, seen = network(), []
    module[0].register_forward_hook(lambda *call: seen.append("own"))
    unroll(module)(torch.randn(3))
    assert seen == ["own"]
    handle = register_module_forward_hook(lambda *call: seen.append("global"))
    try:
        unroll(module)(torch.randn(3))
    finally:
        handle.remove()
    assert "global" in seen


def test_a_forward_of_the_instances_own_is_called() -> None:
    module = nn.Linear(3, 1)
    module.forward = lambda value: value + 1  # type: ignore[method-assign]
    assert torch.equal(unroll(module)(torch.ones(3)), torch.full((3,), 2.0))


def test_parametrized_layers_keep_their_parametrization() -> None:
    module = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 2)))
    value = torch.randn(3)
    assert torch.equal(unroll(module)(value), module(value))


def test_dropout_follows_the_mode() -> None:
    module = nn.Sequential(nn.Dropout(1.0))
    function = unroll(module)
    module.eval()
    assert function(torch.ones(2)).tolist() == [1, 1]
    module.train()
    assert function(torch.ones(2)).tolist() == [0, 0]


def test_functions_and_scripts_are_left_alone() -> None:
    script = torch.jit.trace(nn.Linear(3, 1), torch.ones(3))
    assert unroll(torch.tanh) is torch.tanh
    assert unroll(script) is script
