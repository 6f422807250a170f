"""Collectors over process groups and RPC."""

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
from distributed_parts import CLASSES, EACH, exhaust, kill_one, make, policy
from forked import Forked
from open_files import check_no_named_memory

from trawl.collectors import Collector, MultiSyncCollector, RandomPolicy
from trawl.collectors.distributed import (
    DistributedCollector,
    DistributedSyncCollector,
    RPCCollector,
)
from trawl.collectors.driver.delivery import experience
from trawl.envs import GymEnv, ParallelEnv
from trawl.errors import WorkerDied
from trawl.testing import NumberedEnv
from trawl.weight_update import (
    DistributedWeightSyncScheme,
    DistributedWeightUpdater,
    RPCWeightSyncScheme,
    RPCWeightUpdater,
    WeightSyncScheme,
)


def batches(collector, count=20):
    with collector:
        collector.set_seed(7)
        return [collector.next() for _ in range(count)]


def test_a_lock_that_only_related_processes_share_is_refused():
    lock = multiprocessing.get_context("spawn").Lock()
    words = r"create_env_fn \(of worker 0\) can't be sent .* Pass a function that makes it"
    with pytest.raises(TypeError, match=words):
        DistributedCollector(
            [partial(NumberedEnv, lock=lock)], launcher="mp", frames_per_batch=20, num_workers=1
        )


def learned(collector, count=8):
    """Batches between which the policy's weights change."""
    with collector:
        collector.set_seed(7)
        found = []
        for _ in range(count):
            found.append(collector.next())
            with torch.no_grad():
                for weights in collector.policy.parameters():
                    weights.add_(0.1)
            collector.update_policy_weights_()
        return found


def test_one_batch_ahead_gives_the_batches_of_local_workers():
    options = {"num_workers": 2, "frames_per_batch": 40, "cat_results": 0, "prefetch": 1}
    options["track_policy_version"] = True
    here = learned(MultiSyncCollector("Pendulum-v1", policy(), start_method="inline", **options))
    there = learned(make(DistributedCollector, sync=True, **options))
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one["action"], other["action"])
        assert torch.equal(one["policy_version"], other["policy_version"])


@pytest.mark.parametrize("cls", CLASSES)
def test_the_same_seed_gives_the_batches_of_local_workers(cls):
    options = {"num_workers": 2, "frames_per_batch": 40, "cat_results": 0}
    inline = MultiSyncCollector("Pendulum-v1", policy(), start_method="inline", **options)
    here = batches(inline)
    there = batches(make(cls, sync=True, cat_results=0))
    for one, other in zip(here, there, strict=True):
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        assert all(torch.equal(value, other[key]) for key, value in one.items(True, True))


@pytest.mark.parametrize(("cls", "sync"), EACH)
def test_a_rank_that_dies_is_replaced(cls, sync):
    with make(cls, sync=sync, total_frames=400) as collector:
        frames = collector.next().numel()
        kill_one(collector)
        with pytest.warns(
            RuntimeWarning, match="worker 0 was killed by SIGKILL; a new worker takes"
        ):
            frames += sum(batch.numel() for batch in collector)
        assert frames == 400
        assert collector.stats()["restarts"] == 1


def test_a_rank_that_may_not_be_replaced():
    with make(RPCCollector, sync=True, max_restarts=0) as collector:
        collector.next()
        kill_one(collector, 1)
        with pytest.raises(WorkerDied, match="worker 1 was killed by SIGKILL"):
            exhaust(collector)


@pytest.mark.parametrize("cls", CLASSES)
def test_new_weights_are_used(cls):
    own = policy()
    with make(cls, policy=own, sync=True, track_policy_version=True) as collector:
        collector.next()
        with torch.no_grad():
            own.module.net.bias.fill_(100.0)
        assert collector.next()["action"].abs().max() < 50
        collector.update_policy_weights_()
        batch = collector.next()
        assert (batch["action"] > 50).all()
        assert (batch["policy_version"] == 1).all()


def test_a_policy_may_be_no_module():
    """That is nothing to be warned of."""
    own = RandomPolicy(GymEnv("Pendulum-v1").action_spec)
    with make(DistributedCollector, policy=own, sync=True, launcher="mp") as collector:
        assert collector.launcher == "mp"
        assert len(collector.next()["action"].unique()) > 1


def test_weights_are_sent_after_each_batch():
    own = policy()
    with make(RPCCollector, policy=own, sync=True, update_after_each_batch=True) as collector:
        collector.next()
        with torch.no_grad():
            own.module.net.bias.fill_(100.0)
        assert (collector.next()["action"] > 50).all()


def test_weights_are_sent_after_a_number_of_batches():
    own = policy()
    with make(DistributedCollector, policy=own, sync=True, max_weight_update_interval=2) as c:
        c.next()
        with torch.no_grad():
            own.module.net.bias.fill_(100.0)
        assert (c.next()["action"] < 50).all()
        assert (c.next()["action"] > 50).all()


@pytest.mark.parametrize(
    ("cls", "interval"),
    [
        (DistributedCollector, {"max_weight_update_interval": 100}),
        (DistributedSyncCollector, {"update_interval": 100}),
    ],
)
def test_a_collector_that_will_send_them_does_not_warn(cls, interval):
    own = policy()
    sync = {} if cls is DistributedSyncCollector else {"sync": True}
    with make(cls, policy=own, **sync, **interval) as collector:
        for _ in range(10):
            collector.next()
            with torch.no_grad():
                own.module.net.bias.add_(1.0)


def test_the_synchronous_one_sends_weights_by_itself():
    own = policy()
    with make(DistributedSyncCollector, policy=own) as collector:
        assert collector.next().shape == (2, 20)
        with torch.no_grad():
            own.module.net.bias.fill_(100.0)
        assert (collector.next()["action"] > 50).all()


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
    assert (
        type(
            WeightSyncScheme.from_backend(scheme.__name__[:3].lower().replace("dis", "distributed"))
        )
        is scheme
    )


@pytest.mark.parametrize("cls", CLASSES)
def test_controls(cls):
    with make(cls) as collector:
        collector.next()
        state = collector.state_dict()
        assert collector.map_fn("get_policy_version") == [None, None]
        assert collector.stats()["workers_alive"] == 2
        collector.load_state_dict(state)
        collector.reset()
        assert collector.next().shape == (40,)


@pytest.mark.parametrize(("cls", "nested"), [(CLASSES[0], False), (CLASSES[1], True)])
def test_calls_reach_environments(cls, nested):
    def env():
        return ParallelEnv(2, "Pendulum-v1", backend="thread" if nested else "process")

    options = {"collector_class": "sync", "num_workers_per_collector": 2} if nested else {}
    if nested:
        options["collector_kwargs"] = {"start_method": "inline"}
    with make(cls, create_env_fn=env, num_workers=1, total_frames=80, **options) as collector:
        each = (lambda value: [[value] * 2]) if nested else (lambda value: [value])
        assert collector.map_fn("env.set_attr", [("g", [1.0, 2.0])]) == each(None)
        assert collector.cascade_execute("env.get_attr", "g") == each((1.0, 2.0))
        assert collector.get_distant_attr("env.envs[1].unwrapped.g") == each(2.0)
        assert sum(batch.numel() for batch in collector) == 80


def test_errors_come_with_their_type():
    with pytest.raises(ZeroDivisionError, match=r"in worker \d"):
        make(RPCCollector, create_env_fn=lambda: 1 // 0)


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


def test_several_collectors_of_one_process():
    with make(RPCCollector) as one, make(RPCCollector) as another:
        assert [each.next().numel() for each in (one, another, one)] == [40] * 3


@pytest.mark.parametrize(("backend", "cls"), [("distributed", CLASSES[0]), ("rpc", CLASSES[1])])
def test_one_front_door(backend, cls):
    made = Collector(
        "Pendulum-v1", policy(), backend=backend, num_collectors=2, frames_per_batch=20
    )
    with made as collector:
        assert type(collector) is cls
        assert collector.next().shape == (20,)


PROGRAM = """
import os, sys, time
sys.path.insert(0, {here!r})
from distributed_parts import *
if __name__ == "__main__":
    with make({cls}) as c:
        c.next()
        print(*[m.worker.process._worker.pid for m in c._pool.slots], c._backend.port)
        sys.stdout.flush()
        time.sleep(1000)
"""


@pytest.mark.parametrize("cls", CLASSES)
def test_the_driver_is_killed(cls):
    """No worker stays, and no port."""
    code = PROGRAM.format(here=os.path.dirname(__file__), cls=cls.__name__)
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


@pytest.mark.parametrize(("cls", "sync"), EACH)
def test_they_end_at_the_last_frame(cls, sync):
    source = ["Pendulum-v1"] * 3
    options = {"create_env_fn": [source] * 2, "frames_per_batch": 12, "total_frames": 41}
    with make(cls, sync=sync, exact_frames=True, **options) as collector:
        found = sum(experience(batch).numel() for batch in collector)
        assert found == collector.stats()["frames"] == 41
