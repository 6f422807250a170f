"""What the tests of tuning share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from trawl.extras.tuning import Candidate
from trawl.extras.tuning.trial import Measurement

# Options of a search among very few layouts.
SMALL: dict[str, Any] = {"budget": 4, "max_workers": 1, "max_envs": 1, "progress": False}


def candidate(number: int, **numbers: Any) -> Candidate:
    """One of several candidates that differ in the size of a batch."""
    return Candidate(frames_per_batch=number + 1, **numbers)


class Machine:
    """A machine without noise, whose time passes only while something is measured.

    Args:
        rate: frames per second of a candidate, at a time in seconds.
        start: seconds that processes take to start; a measurement takes no less.
    """

    def __init__(self, rate: Callable[[Candidate, float], float], start: float = 0.0) -> None:
        self.now = 0.0
        self.measured: list[Candidate] = []
        self._rate, self._start = rate, start

    def clock(self) -> float:
        return self.now

    def measure(self, candidate: Candidate, seconds: float) -> Measurement:
        self.measured.append(candidate)
        # A batch takes a moment, however short the time is.
        took = max(seconds - self._start, 1e-6)
        rate = self._rate(candidate, self.now)
        self.now += self._start + took
        return Measurement(1, 1 / rate) if took == 1e-6 else _measurement(rate, took)


def _measurement(rate: float, seconds: float) -> Measurement:
    frames = max(1, round(rate * seconds))
    return Measurement(frames, frames / rate)


class Linear(nn.Module):
    """A policy for Pendulum, whose weights and calls a test can look at."""

    def __init__(self, width: int = 3, draws: bool = False) -> None:
        super().__init__()
        self.draws = draws
        self.layer = nn.Linear(width, 1)
        self.calls = 0

    def forward(self, observation: Any) -> Any:
        self.calls += 1
        found = self.layer(observation)
        return found + torch.rand(1) if self.draws else found
