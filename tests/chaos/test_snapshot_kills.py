"""With snapshots, the death of a worker changes no frame."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chaos_parts import Once, kill, replaced
from gymnasium.envs.classic_control import CartPoleEnv
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from trawl.collectors import Collector, MultiSyncCollector

pytestmark = pytest.mark.usefixtures("nobody_is_left")
KILLED = r"worker \d was killed by SIGKILL"
BATCHES = 8


class Fading(nn.Module):
    """A policy that draws from all generators, counts its calls, and may kill its process."""

    def __init__(self, trouble: Once | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.trouble = trouble

    def forward(self, observation: Tensor) -> Tensor:
        if self.trouble is not None:
            self.trouble()
        self.calls += 1
        scores = self.net(observation) + torch.rand(2) + self.calls / 1000
        scores[0] += 0.1 * np.random.normal() + random.random()
        return nn.functional.one_hot(scores.argmax(-1), 2)


def run(trouble: Once | None = None, **options) -> list[TensorDictBase]:
    """Collects batches with a learner that changes the weights after each of them."""
    model = Fading(trouble)
    policy = TensorDictModule(model, ["observation"], ["action"])
    options = {"frames_per_batch": 40, "track_policy_version": True, **options}
    found = []
    with MultiSyncCollector(["CartPole-v1"] * 2, policy, **options) as collector:
        collector.set_seed(3)
        for number in range(BATCHES):
            found.append(collector.next().clone())
            if number % 3 != 1:
                with torch.no_grad():
                    model.net.weight.mul_(0.9).add_(0.1 * number)
                collector.update_policy_weights_()
    return found


def same(one: TensorDictBase, other: TensorDictBase) -> bool:
    return bool((one == other).all()) and one.shape == other.shape


class Shortened(Collector):
    """A collector that drops some frames of each batch."""

    def rollout(self) -> TensorDictBase:
        return super().rollout()[..., :-3]


@pytest.mark.parametrize(
    ("options", "every", "count"),
    [
        ({"prefetch": 1}, 3, 90),
        ({"init_random_frames": 80}, 4, 75),
        ({"collector_class": Shortened}, 3, 70),
    ],
    ids=["prefetch", "random", "overridden rollout"],
)
def test_a_kill_changes_no_frame(tmp_path: Path, options: dict[str, Any], every: int, count: int):
    with replaced(KILLED, times=1):
        found = run(Once(tmp_path / "once", count, kill), worker_snapshots=every, **options)
    assert all(same(*pair) for pair in zip(found, run(**options), strict=True))


def test_a_kill_changes_nothing_in_the_buffer(tmp_path: Path):
    """Workers that write into a buffer themselves repeat batches without writing them again."""
    data = pytest.importorskip("torchrl.data")

    def content(trouble: Once | None = None, **options):
        policy = TensorDictModule(Fading(trouble), ["observation"], ["action"])
        buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(1000), shared=True)
        options |= {"frames_per_batch": 20, "total_frames": 120, "replay_buffer": buffer}
        with MultiSyncCollector(["CartPole-v1"], policy, **options) as collector:
            collector.set_seed(3)
            for _ in collector:
                pass
        return buffer[:]

    expected = content()
    with replaced(KILLED, times=1):
        found = content(Once(tmp_path / "once", 90, kill), worker_snapshots=3)
    assert len(found) == 120
    assert same(found, expected)


def sent_copies(updates: int, source: Any) -> int:
    """The number of copies of weights that are kept after some updates."""
    policy = TensorDictModule(Fading(), ["observation"], ["action"])
    options = {"frames_per_batch": 20, "worker_snapshots": 5}
    with MultiSyncCollector([source], policy, **options) as collector:
        collector.next()
        for _ in range(updates):
            collector.update_policy_weights_()
        collector.next()
        return len(collector._pool.slots[0].sent)


def test_only_weights_that_a_batch_has_used_are_kept():
    assert sent_copies(7, "CartPole-v1") == 1


class ClosedCartPole(CartPoleEnv):
    """A CartPole that neither shows its state nor can be replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = (number for number in range(3))
        self.drawn = np.random.default_rng(0)
        self.drawn.spawn(1)


def test_without_snapshots_no_weights_are_kept():
    with pytest.warns(RuntimeWarning, match="worker_snapshots=5 has no effect"):
        assert sent_copies(7, ClosedCartPole) == 0


def _reset_and_fail(collector: Any) -> None:
    collector.reset()
    raise KeyError("after the reset")


def test_a_call_that_failed_has_changed_something(tmp_path: Path):
    def frames(trouble: Once | None = None) -> list[TensorDictBase]:
        policy = TensorDictModule(Fading(trouble), ["observation"], ["action"])
        options = {"frames_per_batch": 20, "worker_snapshots": 10}
        with MultiSyncCollector(["CartPole-v1"], policy, **options) as collector:
            collector.set_seed(1)
            found = [collector.next().clone()]
            with pytest.raises(KeyError, match="after the reset"):
                collector.parts.calls.all(_reset_and_fail)
            return found + [collector.next().clone() for _ in range(3)]

    expected = frames()
    with replaced(KILLED, times=1):
        found = frames(Once(tmp_path / "once", 30, kill))
    assert all(same(*pair) for pair in zip(found, expected, strict=True))


def test_a_number_below_zero_is_refused():
    with pytest.raises(ValueError, match="worker_snapshots must be at least 0"):
        MultiSyncCollector(["CartPole-v1"], None, frames_per_batch=10, worker_snapshots=-1)
