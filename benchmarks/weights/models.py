"""Policies of many parameters, made where they are needed: in each contender's process."""

from __future__ import annotations

import torch
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

import work

WIDTH = 1580
LARGE = 10  # million parameters


class Scattered(nn.Module):
    """Many small parameters, of which acting needs one."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(size)) for _ in range(count))

    def forward(self, observation: Tensor) -> Tensor:
        return observation[..., :1] * self.parts[0][0]


def large() -> TensorDictModule:
    """An MLP of 10 million parameters."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(3, WIDTH), nn.Tanh()]
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return work.acting(nn.Sequential(*layers, nn.Linear(WIDTH, 1)))


def scattered(count: int, size: int) -> TensorDictModule:
    """A policy of so many tensors, each of so many floats."""
    return work.acting(Scattered(count, size))


def small() -> TensorDictModule:
    """An MLP of two hidden layers, as in the other cases."""
    return work.acting(work.mlp(3, 1))


def numel(module: nn.Module) -> int:
    """How many numbers its parameters are."""
    return sum(parameter.numel() for parameter in module.parameters())
