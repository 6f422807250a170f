"""Functions and classes for the programs that tests run on simulated hosts."""

import hashlib
import sys
from functools import partial

import cloudpickle
from distributed_parts import policy

from trawl.collectors import MultiSyncCollector
from trawl.collectors.distributed import DistributedCollector
from trawl.extras.clusters.launching.launch import Launcher, LaunchPlan, Process
from trawl.extras.clusters.network.rank import run_rank_at


def say(*words):
    """Sends a line to the test."""
    print(*words, file=sys.__stdout__, flush=True)


def hear():
    """Waits for a line from the test, and returns it."""
    return sys.stdin.readline().strip()


def digest(collector, count):
    """Returns a hash of ``count`` batches that are collected with a fixed seed."""
    found = hashlib.sha256()
    collector.set_seed(7)
    for _ in range(count):
        batch = collector.next()
        for key in sorted(batch.keys(True, True), key=str):
            found.update(f"{key} {tuple(batch[key].shape)}".encode())
            found.update(batch[key].contiguous().numpy().tobytes())
    return found.hexdigest()


def of_local_workers(count):
    """Returns the :func:`digest` of 10 batches from ``count`` workers in this process."""
    options = {"num_workers": count, "frames_per_batch": 40 * count, "cat_results": 0}
    with MultiSyncCollector("Pendulum-v1", policy(), start_method="inline", **options) as here:
        return digest(here, 10)


class AskingLauncher(Launcher):
    """Launcher that asks the test to start workers, on any host.

    Like some job queues, it does not report the end of a worker.
    """

    def start(self, index, address, ended):
        say(cloudpickle.dumps(partial(run_rank_at, address)).hex())
        return _OutOfHand()


class _OutOfHand(Process):
    def kill(self):
        pass


class AskingCollector(DistributedCollector):
    """Collector whose workers are started by :class:`AskingLauncher`."""

    def _new_backend(self):
        return self._backend_at(LaunchPlan(AskingLauncher(), self.remote.address))
