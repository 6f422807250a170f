"""What is special about collectors whose workers are Ray actors."""

import asyncio
import sys
import threading
import time

import pytest
import torch
from multi_parts import TRAJ_IDS, Chooser, actions, envs, ledger

from trawl.collectors import Collector
from trawl.collectors.distributed import RayCollector
from trawl.data import load
from trawl.extras.cli import main
from trawl.weight_update import RayWeightSyncScheme, RayWeightUpdater, WeightSyncScheme

pytestmark = pytest.mark.usefixtures("cluster")
FREE = {"num_cpus": 0, "memory": 0}


def collector(workers=2, policy=None, **options):
    options.setdefault("remote_configs", FREE)
    options.setdefault("frames_per_batch", 12)
    options.setdefault("sync", True)
    return RayCollector(envs(workers), policy, **options)


def test_it_is_asked_and_told(cluster):
    """All that any collector with workers can do."""
    policy = Chooser(1)
    with collector(policy=policy, track_policy_version=True) as there:
        assert len(there.remote_collectors) == 2
        assert there.local_policy() is policy
        there.set_seed(3)
        assert actions(there.next()) == {1}
        state = there.state_dict()
        assert there.get_distant_attr("worker_idx") == [0, 1]
        assert there.map_fn("get_policy_version") == [0, 0]
        assert there.cascade_execute("num_workers") == 2
        policy.become(2)
        there.update_policy_weights_(worker_ids=[1])
        batch = there.next()
        assert (actions(batch[0]), actions(batch[1])) == ({1}, {2})
        assert batch["policy_version"].tolist() == [[0] * 6, [1] * 6]
        there.load_state_dict(state)
        assert there.stats()["frames"] == 12
        stats = there.stats("both")
        assert (stats["workers"], stats["worker_1/alive"]) == (2, True)
        asyncio.run(there.async_shutdown())
    assert there.closed
    assert cluster.is_initialized()


def test_workers_are_added_while_others_collect():
    book = ledger(3)
    policy = Chooser(1)
    with collector(1, policy, sync=False, frames_per_batch=6) as there:
        book.add(there.next())
        policy.become(2)
        there.update_policy_weights_()
        there.add_collectors(envs(3)[1:])
        found, heard = [], set()
        while heard != {0, 1, 2}:
            found.append(there.next())
            book.add(found[-1])
            heard.update(int(i) >> 40 for i in found[-1][TRAJ_IDS])
        assert there.stats()["workers_alive"] == there.num_workers == 3
        late = [batch for batch in found if int(batch[TRAJ_IDS].max()) >= 1 << 40]
    assert set().union(*map(actions, late)) == {2}


def test_statistics_can_be_read_while_a_worker_is_added(tmp_path):
    gate, (make_env,) = tmp_path / "gate", envs(3)[2:]

    def wait():
        while not gate.exists():
            time.sleep(0.01)
        return make_env()

    with collector() as there:
        there.next()
        adding = threading.Thread(target=there.add_collectors, args=([wait],))
        adding.start()
        try:
            while "worker_2/frames" not in (stats := there.stats("both")):
                time.sleep(0.01)
        finally:
            gate.touch()
            adding.join()
        assert stats["worker_2/frames"] == 0
        there.next()
        assert there.stats("both")["worker_2/requested_frames_per_batch"] == 6


@pytest.mark.parametrize(
    ("kind", "count"), [("sync", 2), pytest.param("async", 1, marks=pytest.mark.long)]
)
def test_workers_with_workers(kind, count):
    """An actor may run a collector that has processes of its own."""
    policy = Chooser(1)
    with collector(count, policy, collector_class=kind, num_workers_per_collector=2) as there:
        there.set_seed(1)
        found = [there.next() for _ in range(3)]
        policy.become(3)
        there.update_policy_weights_()
        # What was ordered before is of the weights before, at both levels.
        while actions(there.next()) != {3}:
            pass
    shape = (2, 2, 3) if kind == "sync" else (1, 12)
    assert [tuple(batch.shape) for batch in found] == [shape] * 3
    assert actions(found[0]) == {1}
    rows = [torch.cat([batch[TRAJ_IDS][i] for batch in found]).flatten() for i in range(count)]
    ids = [set(row.tolist()) for row in rows]
    assert len(set().union(*ids)) == sum(map(len, ids))


def test_weights_by_themselves_and_by_an_updater():
    policy = Chooser(0)
    with collector(1, policy, sync=False, max_weight_update_interval=3) as there:
        policy.become(1)
        found = [actions(there.next()) for _ in range(10)]
        assert found[:3] == [{0}] * 3
        assert found[-1] == {1}
    policy = Chooser(0)
    updater = RayWeightUpdater(max_interval=2)
    with collector(1, policy, weight_updater=updater) as there:
        seen = []
        for number in range(6):
            policy.become(number % 4)
            there.update_policy_weights_()
            seen.append(actions(there.next()))
    # Each set is skipped until two batches were delivered after the last.
    assert seen == [{0}, {0}, {2}, {2}, {0}, {0}]
    assert isinstance(WeightSyncScheme.from_backend("ray"), RayWeightSyncScheme)


def test_the_front_door():
    there = Collector(
        envs(1)[0], backend="ray", num_collectors=1, sync=True, frames_per_batch=6,
        total_frames=12, backend_options={"remote_configs": FREE},
    )  # fmt: skip
    assert type(there) is RayCollector
    with there:
        assert [batch.shape for batch in there] == [(1, 6)] * 2


def test_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("trawl.extras.clusters.ray.cluster.DEFAULT_REMOTE_CLASS_CONFIG", FREE)
    code = main(
        ["collect", "CartPole-v1", "--frames", "40", "--backend", "ray", "--workers", "1",
         "--seed", "1", "--out", "d"]
    )  # fmt: skip
    assert code == 0, capsys.readouterr()
    assert load("d").numel() == 40
    assert main(["collect", "CartPole-v1", "--backend", "ray"]) == 2
    assert "needs workers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"num_cpus": 100}, r"worker 0 .* within 0.5 s: it asks for CPU=100, but no node has more"),
        ({**FREE, "resources": {"tpu": 1}}, r"asks for tpu=1, but no node has more than 0"),
    ],
)
def test_resources_that_the_cluster_lacks(asked, told):
    with pytest.raises(RuntimeError, match=told):
        collector(remote_configs=asked, placement_timeout=0.5)


@pytest.mark.parametrize(
    ("options", "kind", "told"),
    [
        ({"num_collectors": 3}, ValueError, "num_workers=3 does not match"),
        ({"remote_configs": [FREE]}, ValueError, "remote_configs has 1 entries, .* 2 collectors"),
        ({"remote_configs": 5}, TypeError, "remote_configs must be a mapping"),
        ({"collector_kwargs": [{}] * 3}, ValueError, "collector_kwargs has 3 entries"),
        ({"collector_class": "triple"}, ValueError, "collector_class must be a class, or one of"),
        ({"sync": 1}, TypeError, "sync must be a bool"),
        ({"update_after_each_batch": "False"}, TypeError, "update_after_each_batch .* the string"),
        ({"num_collectors": 0}, ValueError, "num_collectors must be at least 1, but it is 0"),
        ({"num_collectors": "2"}, TypeError, "num_collectors must be an integer, but it is str"),
        ({"ray_init_config": "auto"}, TypeError, "ray_init_config must be a mapping"),
        (
            {"ray_init_config": {"address": "10.9.9.9:6379"}},
            ValueError,
            "'10.9.9.9:6379', but this process is already connected",
        ),
        ({"placement_timeout": "30"}, TypeError, "placement_timeout must be a number of seconds"),
        (
            {"placement_timeout": 0},
            ValueError,
            "placement_timeout must be a number of seconds above 0",
        ),
        ({"num_actors": 2}, TypeError, "unknown arguments: num_actors"),
    ],
)
def test_options_are_checked(options, kind, told, cluster):
    with pytest.raises(kind, match=told):
        collector(**options)


def test_a_text_ends_neither_the_collector_nor_ray(cluster):
    with collector() as there:
        for name in ("shutdown_ray", "close_env"):
            with pytest.raises(TypeError, match=f"{name} must be True or False, but"):
                there.shutdown(**{name: "False"})
        with pytest.raises(TypeError, match="shutdown_ray must be True or False"):
            asyncio.run(there.async_shutdown("False"))
        assert cluster.is_initialized()
        assert not there.closed


def test_ray_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"trawl-rl\[ray\]"):
        collector()


def test_options_of_workers_collectors_have_their_effect():
    def marked(batch):
        return batch.set("mark", torch.ones(batch.shape))

    given = {"postproc": marked, "max_frames_per_traj": 2, "device": "cpu"}
    with collector(policy=Chooser(1), collector_kwargs=given) as there:
        batch = there.next()
        with pytest.raises(ValueError, match="'postproc', which is fixed for all workers"):
            there.add_collectors(envs(3)[2:], collector_kwargs={"postproc": marked})
        assert not there.closed
    assert batch["mark"].sum() == batch.numel()
    assert int(batch["next", "step_count"].max()) == 2
    assert batch.device == torch.device("cpu")
