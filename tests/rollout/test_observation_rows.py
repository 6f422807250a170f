"""Observations are written exactly, whatever their layout, and wrong ones are refused."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from trawl.collectors import Collector
from trawl.envs import SerialEnv
from trawl.rollout.steppers.observation_rows import ObservationRows

PARTS = {
    "wide": spaces.Box(-np.inf, np.inf, (3,), np.float32),
    "one": spaces.Box(-np.inf, np.inf, (1,), np.float64),
    "count": spaces.Box(0, 1000, (1,), np.int64),
    "bits": spaces.MultiBinary(2),
}


class Counting(gymnasium.Env):
    """Observes its step in several arrays, made by functions that may change their layout."""

    action_space = spaces.Discrete(2)

    def __init__(self, **change):
        self.observation_space = spaces.Dict(PARTS)
        self.change = change
        self.steps = 0

    def obs(self):
        found = {
            "wide": np.full(3, self.steps, np.float32),
            "one": np.array([self.steps / 2]),
            "count": np.array([self.steps]),
            "bits": np.array([self.steps % 2, 1], np.int8),
        }
        return found | {name: make(found[name]) for name, make in self.change.items()}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.obs(), {}

    def step(self, action):
        self.steps += 1
        return self.obs(), 1.0, self.steps % 5 == 0, False, {}


def check(rows, steps):
    assert (rows["wide"] == steps).all()
    assert (rows["one"] == steps / 2).all()
    assert (rows["count"] == steps).all()
    assert rows["count"].dtype is torch.int64
    assert (rows["bits"][..., :1] == steps % 2).all()
    assert (rows["bits"][..., 1] == 1).all()


CHANGES = {
    "none": {},
    "double": {"wide": lambda array: array.astype(np.float64)},
    "lists": {"wide": list, "bits": list},
    "smaller": {"count": lambda array: array.astype(np.int32)},
    "strided": {"wide": lambda array: np.repeat(array, 2)[::2]},
    "read-only": {"wide": lambda array: np.broadcast_to(array, (3,))},
    "big-endian": {"one": lambda array: array.astype(">f8")},
}


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_each_layout_gives_the_same_rows(change, many):
    def make():
        return Counting(**CHANGES[change])

    env = SerialEnv(2, make) if many else make()
    with Collector(env, None, frames_per_batch=16, total_frames=48) as collector:
        step = 0
        for batch in collector:
            count = batch.shape[-1]
            steps = torch.arange(step, step + count).unsqueeze(-1) % 5
            check(batch, steps)
            check(batch["next"], steps + 1)
            step += count


def test_exact_observations_use_the_fast_writer(monkeypatch):
    monkeypatch.delattr(ObservationRows, "writer")
    for env in (Counting(), SerialEnv(2, Counting)):
        with Collector(env, None, frames_per_batch=16, total_frames=32) as collector:
            assert len(list(collector)) == 2


@pytest.mark.parametrize(
    ("name", "make", "error", "words"),
    [
        ("wide", lambda array: array[:2], ValueError, r"'wide' has shape \(2,\).*\(3,\)"),
        ("wide", lambda array: array[:1], ValueError, r"'wide' has shape \(1,\)"),
        ("wide", lambda array: array[None], ValueError, r"'wide' has shape \(1, 3\)"),
        ("wide", lambda array: None, ValueError, r"'wide' has shape \(\)"),
        ("wide", lambda array: array.astype(complex), TypeError, "'wide' is complex128"),
        ("count", lambda array: array + 0.5, TypeError, "'count' is float64"),
        ("one", lambda array: 1.0, ValueError, r"'one' has shape \(\)"),
        ("count", lambda array: 1, ValueError, r"'count' has shape \(\)"),
    ],
)
def test_a_wrong_observation_is_refused(name, make, error, words):
    env = Counting(**{name: lambda array: array if array.flat[0] < 2 else make(array)})
    with (
        Collector(env, None, frames_per_batch=8) as collector,
        pytest.raises(error, match=words),
    ):
        next(iter(collector))
