"""Collectors whose workers a launcher starts, and which are reached over the network."""

import multiprocessing
import os
import select
import signal
import subprocess
from functools import partial
from typing import Any

import psutil
import pytest
import torch
from cluster_conformance import ClusterConformance
from distributed_parts import CLASSES, exhaust, kill_one, make, policy
from forked import Forked
from open_files import check_no_named_memory

from trawl.collectors import Collector, RandomPolicy
from trawl.collectors.distributed import DistributedCollector, RPCCollector
from trawl.envs import GymEnv, ParallelEnv
from trawl.errors import WorkerDied
from trawl.testing import NumberedEnv
from trawl.weight_update import (
    DistributedWeightSyncScheme,
    DistributedWeightUpdater,
    RPCWeightSyncScheme,
    RPCWeightUpdater,
)


class TestNetwork(ClusterConformance):
    """One class where batches are of all workers, and the other where they are of one."""

    def make(self, source, policy=None, sync=True, **options):
        given = {"policy": policy, "create_env_fn": source, "sync": sync, **options}
        return make(DistributedCollector if sync else RPCCollector, **given)


def test_a_lock_that_only_related_processes_share_is_refused():
    lock = multiprocessing.get_context("spawn").Lock()
    words = r"create_env_fn \(of worker 0\) can't be sent .* Pass a function that makes it"
    with pytest.raises(TypeError, match=words):
        DistributedCollector(
            [partial(NumberedEnv, lock=lock)], launcher="mp", frames_per_batch=20, num_workers=1
        )


def test_a_worker_that_may_not_be_replaced():
    with make(RPCCollector, sync=True, max_restarts=0) as collector:
        # TorchRL's shape.
        assert collector.next().shape == (40,)
        kill_one(collector, 1)
        with pytest.raises(WorkerDied, match="worker 1 was killed by SIGKILL"):
            exhaust(collector)


def test_a_policy_may_be_no_module():
    """That is nothing to be warned of."""
    own = RandomPolicy(GymEnv("Pendulum-v1").action_spec)
    with make(DistributedCollector, policy=own, sync=True, launcher="mp") as collector:
        assert collector.launcher == "mp"
        assert len(collector.next()["action"].unique()) > 1


@pytest.mark.parametrize(
    ("cls", "scheme", "updater"),
    [
        (DistributedCollector, DistributedWeightSyncScheme, DistributedWeightUpdater),
        (RPCCollector, RPCWeightSyncScheme, RPCWeightUpdater),
    ],
)
def test_schemes_and_updaters(cls, scheme, updater):
    own, other = policy(), policy()
    with torch.no_grad():
        other.module.net.bias.fill_(100.0)
    for options in ({"weight_sync_schemes": {"policy": scheme()}}, {"weight_updater": updater()}):
        with make(cls, policy=own, sync=True, **options) as collector:
            collector.update_policy_weights_(other)
            assert (collector.next()["action"] > 50).all()


def test_calls_reach_environments_in_processes_of_workers():
    def env():
        return ParallelEnv(2, "Pendulum-v1")

    with make(DistributedCollector, create_env_fn=env, num_workers=1, total_frames=80) as collector:
        assert collector.map_fn("env.set_attr", [("g", [1.0, 2.0])]) == [None]
        assert collector.cascade_execute("env.get_attr", "g") == [(1.0, 2.0)]
        assert collector.get_distant_attr("env.envs[1].unwrapped.g") == [2.0]
        assert sum(batch.numel() for batch in collector) == 80


WRONG: list[tuple[dict[str, Any], Any, str]] = [
    ({"launcher": "ssh"}, ValueError, "launcher must be one of 'mp'"),
    ({"backend": "nccl"}, ValueError, "'gloo'"),
    ({"timeout": 0}, ValueError, "timeout"),
    ({"link_timeout": 1}, ValueError, "link_timeout must be at least 2 seconds, or None"),
    ({"link_timeout": float("inf")}, ValueError, "or None for no limit, but it is inf"),
    ({"link_timeout": "30"}, TypeError, "link_timeout must be a number of seconds"),
    ({"tcp_port": 70_000}, ValueError, "tcp_port"),
    ({"tcp_port": "ssh"}, TypeError, "tcp_port must be an integer, but it is str: 'ssh'"),
    ({"timeout": float("inf")}, ValueError, "timeout must be a finite number of seconds above 0"),
    ({"address": "127.0.0.1:80"}, ValueError, "address must be .*, without a port, but it is '127"),
    ({"address": 127}, TypeError, "address must be .*, but it is 127"),
    ({"slurm_kwargs": {"folder": "x"}}, ValueError, "slurm_kwargs is for launcher='submitit'"),
    ({"slurm_kwargs": "gpu"}, TypeError, "slurm_kwargs must be a mapping, but it is 'gpu'"),
    ({"collector_class": "many"}, ValueError, "collector_class"),
    ({"num_workers_per_collector": 0}, ValueError, "num_workers_per_collector must be at"),
    ({"collector_kwargs": [{}]}, ValueError, "1 entries"),
    ({"launcher": None}, RuntimeError, "MASTER_ADDR"),
    ({"frames": 3}, TypeError, "total_frames"),
]


def test_options_are_checked():
    for options, error, text in WRONG:
        with pytest.raises(error, match=text):
            make(DistributedCollector, **options)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"visible_devices": "cuda:0"}, TypeError, "visible_devices must be a list of devices"),
        ({"backend": "gloo"}, TypeError, "backend. Only Collector, .* DistributedCollector have"),
        ({"update_interval": 2}, TypeError, "; elsewhere, update_policy_weights_.. sends weights"),
        ({"tensorpipe_options": {"threads": 3}}, ValueError, "'threads': .*num_worker_threads"),
    ],
)
def test_options_of_rpc_are_checked(options, error, text):
    with pytest.raises(error, match=text):
        make(RPCCollector, **options)


def test_a_port_that_is_taken():
    with make(DistributedCollector) as collector:
        port = collector._backend.port
        with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
            make(DistributedCollector, tcp_port=port)


@pytest.mark.parametrize(("backend", "cls"), [("distributed", CLASSES[0]), ("rpc", CLASSES[1])])
def test_one_front_door(backend, cls):
    """Also beside another collector of the same kind."""
    options = {"backend": backend, "num_collectors": 2, "frames_per_batch": 20}
    with make(cls) as one, Collector("Pendulum-v1", policy(), **options) as another:
        assert type(another) is cls
        assert [each.next().numel() for each in (one, another, one)] == [40, 20, 40]


PROGRAM = """
import os, sys, time
sys.path.insert(0, {here!r})
from distributed_parts import *
if __name__ == "__main__":
    with make(DistributedCollector) as c:
        c.next()
        print(*[m.worker.process._worker.pid for m in c._pool.slots], c._backend.port)
        sys.stdout.flush()
        time.sleep(1000)
"""


def test_the_driver_is_killed():
    """No worker stays, and no port."""
    code = PROGRAM.format(here=os.path.dirname(__file__))
    with Forked(code, stdout=subprocess.PIPE) as program:
        *pids, port = map(int, program.stdout.readline().split())
        handles = [os.pidfd_open(pid) for pid in pids]
        listens = [
            c.laddr
            for pid in (program.pid, *pids)
            for c in psutil.Process(pid).net_connections("tcp")
            if c.status == psutil.CONN_LISTEN
        ]
        assert port in {place.port for place in listens}
        assert {place.ip for place in listens} == {"127.0.0.1"}
        check_no_named_memory([program.pid, *pids])
        program.send_signal(signal.SIGKILL)
        for handle in handles:
            assert select.select([handle], [], [], 300)[0]
            os.close(handle)
    bound = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert port not in bound
