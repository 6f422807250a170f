"""The death of a worker counts no frame twice in the statistics for normalisation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from chaos_parts import Once, kill, replaced
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from trawl.collectors import MultiAsyncCollector, MultiSyncCollector

pytestmark = pytest.mark.usefixtures("nobody_is_left")
KILLED = r"worker \d was killed by SIGKILL"


class Fading(nn.Module):
    """A policy that draws its actions, and may kill its process."""

    def __init__(self, trouble: Once | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 1)
        self.trouble = trouble

    def forward(self, observation: Tensor) -> Tensor:
        if self.trouble is not None:
            self.trouble()
        return self.net(observation) + torch.randn(1)


def run(cls: Any, trouble: Once | None, **options: Any) -> tuple[list[TensorDictBase], Any]:
    policy = TensorDictModule(Fading(trouble), ["observation"], ["action"])
    options |= {"normalize_observations": True, "normalize_rewards": True, "total_frames": 320}
    with cls(["Pendulum-v1"] * 2, policy, frames_per_batch=40, **options) as collector:
        collector.set_seed(3)
        found = [batch.clone() for batch in collector]
        return found, collector.normalization


@pytest.mark.parametrize(
    "cls", [MultiSyncCollector, pytest.param(MultiAsyncCollector, marks=pytest.mark.long)]
)
def test_frames_of_a_dead_worker_are_counted_once(cls: Any, tmp_path: Path) -> None:
    with replaced(KILLED, times=1):
        found, own = run(cls, Once(tmp_path / "once", 70, kill))
    assert own.observations["observation"].count == sum(batch.numel() for batch in found)
    assert own.rewards["reward"].count == 320
