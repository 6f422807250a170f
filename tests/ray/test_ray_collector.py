"""Collectors whose workers are Ray actors."""

import asyncio
import sys
import threading
import time
from functools import partial

import pytest
from cluster_conformance import PENDULUM, ClusterConformance, assert_aligned, collected
from multi_parts import LENGTHS, TRAJ_IDS, Chooser, actions, envs, ledger
from ray_parts import kill
from trace_parts import assert_whole
from whole_parts import Episodes, cycling

from trawl.collectors import Collector, Evaluator
from trawl.collectors.distributed import RayCollector
from trawl.data import RayReplayBuffer, load
from trawl.extras.cli import main
from trawl.observe import read_trace
from trawl.weight_update import RayWeightSyncScheme, WeightSyncScheme

data = pytest.importorskip("torchrl.data")
pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.usefixtures("sent_by_value")]
FREE = {"num_cpus": 0, "memory": 0}


def limited(observation):
    """A policy for Pendulum."""
    return observation[..., :1].clamp(-1, 1)


def make(source=None, policy=None, sync=True, workers=2, **options):
    options = {"remote_configs": FREE, "frames_per_batch": 12, **options}
    return RayCollector(source or envs(workers), policy, sync=sync, **options)


class TestRay(ClusterConformance):
    def make(self, source, policy=None, sync=True, **options):
        return make(source, policy, sync, **{"frames_per_batch": 40, **options})

    def kill(self, collector, worker):
        """By Ray, or by the system."""
        if collector.sync:
            kill(collector.remote_collectors[worker])
        else:
            super().kill(collector, worker)


# --- actors that are added


def test_an_actor_that_is_added_takes_part_in_the_batch_ahead(tmp_path):
    """And it has a lane in the timeline."""
    path, policy = tmp_path / "run.json.gz", Chooser()
    with make(policy=policy, workers=1, prefetch=1, trace=path) as there:
        there.next()
        policy.become(2)
        there.update_policy_weights_()
        there.add_collectors(envs(2)[1:])
        assert [actions(row) for row in there.next()] == [{0}, {2}]
        assert [actions(row) for row in there.next()] == [{2}, {2}]
        given = {"postproc": lambda batch: batch}
        with pytest.raises(ValueError, match="'postproc', which is fixed for all workers"):
            there.add_collectors(envs(3)[2:], collector_kwargs=given)
        assert not there.closed
    assert_whole(read_trace(path), there.stats("both"))
    assert_aligned(read_trace(path))


def test_an_actor_that_is_added_has_the_options_of_the_first_or_its_own():
    with make(workers=1, collector_kwargs={"max_frames_per_traj": 2}) as there:
        there.add_collectors(envs(2)[1:])
        there.add_collectors(envs(3)[2:], collector_kwargs={"max_frames_per_traj": 1})
        counts = there.next()["next", "step_count"]
        assert [int(count.max()) for count in counts] == [2, 2, 1]


def test_actors_are_added_while_others_collect():
    book = ledger(3)
    policy = Chooser(1)
    with make(workers=1, policy=policy, sync=False, frames_per_batch=6) as there:
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


def test_statistics_can_be_read_while_an_actor_is_added(tmp_path):
    """Also where whole trajectories are delivered, of which it adds its own."""
    gate, (make_env,) = tmp_path / "gate", envs(3)[2:]
    episodes = Episodes(cycling(LENGTHS))

    def wait():
        while not gate.exists():
            time.sleep(0.01)
        return make_env()

    with make(trajs_per_batch=3, traj_format="cat") as there:
        episodes.add(there.next())
        adding = threading.Thread(target=there.add_collectors, args=([wait],))
        adding.start()
        try:
            while "worker_2/frames" not in (stats := there.stats("both")):
                time.sleep(0.01)
        finally:
            gate.touch()
            adding.join()
        assert stats["worker_2/frames"] == 0
        for _ in range(20):
            episodes.add(there.next())
        assert there.stats("both")["worker_2/requested_frames_per_batch"] == 6
    assert set(episodes.by_env) == {0, 1, 2}
    assert all(found == list(range(len(found))) for found in episodes.by_env.values())


# --- batches in the object store


def test_batches_can_be_kept_and_written_to():
    with make("Pendulum-v1", sync=False, workers=1, frames_per_batch=5000) as there:
        kept = [there.next() for _ in range(3)]
        copies = [batch.clone() for batch in kept]
        kept[1].zero_()
        assert not kept[1]["observation"].any()
    assert (kept[0] == copies[0]).all()
    assert (kept[2] == copies[2]).all()


def test_trajectories_go_into_a_buffer_on_the_cluster():
    buffer = RayReplayBuffer(storage=partial(data.LazyTensorStorage, 1000), remote_config=FREE)
    episodes = Episodes(cycling(LENGTHS))
    how = {"replay_write_mode": "trajectory", "trajs_per_write": 2, "track_policy_version": True}
    with make(replay_buffer=buffer, frames_per_batch=14, total_frames=140, **how) as there:
        assert set(there) == {None}
        progress = there.progress
        assert there.worker_policy_versions() == {0: 0, 1: 0}
    episodes.add(buffer[:])
    buffer.close()
    assert progress.stepped_frames == 140
    assert progress.trajectory_pending_frames == 140 - progress.trajectory_completed_frames
    assert progress.completed_trajectories == len(episodes.found)
    assert progress.replay_written_frames == episodes.frames
    assert all(found == list(range(len(found))) for found in episodes.by_env.values())
    assert 140 - 2 * 5 < episodes.frames <= 140


def test_an_evaluation_in_an_actor_has_the_statistics():
    options = {"frames_per_batch": 40, "normalize_observations": True}
    with make(PENDULUM, **options) as there:
        collected(there, 2)
        options = {"num_trajectories": 2, "max_steps": 10, "normalization": there.normalization}
    found = []
    for backend in ("ray", "thread"):
        with Evaluator("Pendulum-v1", limited, backend=backend, **options) as judge:
            found.append(judge.evaluate()["eval/reward"])
    assert found[0] == found[1]


# --- ways to it, and its end


def test_the_front_door_and_the_end(cluster):
    policy = Chooser(1)
    there = Collector(
        envs(1)[0], policy, backend="ray", num_collectors=1, sync=True, frames_per_batch=6,
        total_frames=12, backend_options={"remote_configs": FREE},
    )  # fmt: skip
    assert type(there) is RayCollector
    assert there.local_policy() is policy
    assert there.collector_class is Collector
    assert there.remote_configs is FREE
    with there.pause(timeout=300):
        assert there.stats("both", timeout=1.0)["worker_0/frames"] == 0
    assert [batch.shape for batch in there] == [(1, 6)] * 2
    # A text ends neither the collector nor Ray.
    for name in ("shutdown_ray", "close_env"):
        with pytest.raises(TypeError, match=f"{name} must be True or False, but"):
            there.shutdown(**{name: "False"})
    with pytest.raises(TypeError, match="shutdown_ray must be True or False"):
        asyncio.run(there.async_shutdown("False"))
    assert not there.closed
    asyncio.run(there.async_shutdown(False))
    assert there.closed
    # The second argument of TorchRL's shutdown: the cluster of these tests goes on.
    there.shutdown(None, False)
    assert cluster.is_initialized()
    assert isinstance(WeightSyncScheme.from_backend("ray"), RayWeightSyncScheme)


def test_states_may_be_lists():
    with make(num_workers_per_collector=2, frames_per_batch=20) as there:
        # Two environments each, stepped as a batch.
        assert there.next().shape == (2, 2, 5)
        assert there.num_collectors == there.num_workers == 2
        state = there.state_dict()
        one = [state["worker0"], state["worker1"]]
        there.load_state_dict(one)
        assert there.stats()["frames"] == sum(each["frames"] for each in one)
        there.load_state_dict(one[0])
        with pytest.raises(ValueError, match="1 states, but there are 2 actors"):
            there.load_state_dict(one[:1])


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


# --- mistakes


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"num_cpus": 100}, r"worker 0 .* within 0.1 s: it asks for CPU=100, but no node has more"),
        ({**FREE, "resources": {"tpu": 1}}, r"asks for tpu=1, but no node has more than 0"),
    ],
)
def test_resources_that_the_cluster_lacks(asked, told):
    with pytest.raises(RuntimeError, match=told):
        make(remote_configs=asked, placement_timeout=0.1)


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
        ({"trajs_per_batch": 2, "collector_kwargs": {"trajs_per_batch": 2}}, ValueError, "kwargs"),
    ],
)
def test_options_are_checked(options, kind, told):
    with pytest.raises(kind, match=told):
        make(**options)


def test_ray_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"trawl-rl\[ray\]"):
        make()
