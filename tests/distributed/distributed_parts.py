"""What tests of collectors over networks have in common."""

import os
import signal

import torch
from tensordict.nn import TensorDictModule
from torch import nn

from trawl.collectors.distributed import DistributedCollector, RPCCollector

CLASSES = [DistributedCollector, RPCCollector]


class Sampler(nn.Module):
    """A policy for Pendulum that draws its actions."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, observation):
        mean = self.net(observation)
        return mean + torch.randn_like(mean)


def policy():
    torch.manual_seed(0)
    return TensorDictModule(Sampler(), ["observation"], ["action"])


def make(cls, **options):
    # A death is an event: no test waits until a link has been silent for so long.
    quick = {"launcher": "mp", "num_workers": 2, "frames_per_batch": 40, "link_timeout": 3_600}
    options = {**quick, **options}
    given = options.pop("policy", None) if "policy" in options else policy()
    return cls(options.pop("create_env_fn", "Pendulum-v1"), given, **options)


def kill_one(collector, index=0):
    """Ends a worker's process."""
    worker = collector._pool.slots[index].worker
    os.kill(worker.process._worker.pid, signal.SIGKILL)


def exhaust(collector):
    """Collects for long enough to notice a death."""
    for _ in range(1000):
        collector.next()
