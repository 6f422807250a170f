"""The handles in ``RayCollector.remote_collectors``: methods of workers' collectors to call."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from multi_parts import TRAJ_IDS, Chooser, actions, envs, ledger, same
from ray_parts import get, kill

from trawl.collectors import Collector
from trawl.collectors.distributed import RayCollector
from trawl.testing import NumberedEnv

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.usefixtures("cluster", "sent_by_value")
BOTH = pytest.mark.parametrize("sync", [True, False], ids=["sync", "async"])


def make(policy: Any = None, workers: int = 2, **options: Any) -> RayCollector:
    options = {"frames_per_batch": 12, "sync": True, "track_policy_version": True, **options}
    options.setdefault("remote_configs", {"num_cpus": 0, "memory": 0})
    return RayCollector(envs(workers), policy or Chooser(1), **options)


def stamps(batch: Any) -> list[tuple[int, int]]:
    """The action and the version of each worker, in a batch of all."""
    rows = [(actions(row), set(row["policy_version"].tolist())) for row in batch]
    assert all(len(acted) == len(versions) == 1 for acted, versions in rows)
    return [(acted.pop(), versions.pop()) for acted, versions in rows]


class Own(Collector):
    """A collector with methods of its own, one of them named as a method of actors could be."""

    def times(self, number: int) -> int:
        return number * self.worker_idx

    def stop(self) -> str:
        return f"{self.worker_idx} goes on"


def test_they_have_the_methods_of_the_workers_collectors():
    book = ledger(2)
    with make(collector_class=Own) as collector:
        first, second = collector.remote_collectors
        assert isinstance(first, ray.actor.ActorHandle)
        book.add(collector.next())
        # What a handle collects comes between the batches of the collector, which go on after it.
        for handle in (first, second, second):
            batch = get(handle.next.remote())
            assert batch.shape == (6,)
            book.add(batch)
        assert get(first.rollout.remote()).shape == (6,)
        assert collector.stats()["frames"] == 12
        found = get(first.stats.remote(), second.stats.remote())
        assert [one["batches"] for one in found] == [2, 3]
        assert get(first.cascade_execute.remote("worker_idx")) == 0
        assert get(second.get_distant_attr.remote("config.worker_idx")) == 1
        assert get(first.get_policy_version.remote()) == 0
        assert get(second.is_running.remote()) is False
        assert get(first.times.remote(number=3), second.times.remote(number=3)) == [0, 3]
        assert get(first.stop.remote(), second.stop.remote()) == ["0 goes on", "1 goes on"]
        state = get(first.state_dict.remote())
        assert float(state["policy_state_dict"]["choice"]) == 1
        get(first.reset.remote())
        assert NumberedEnv.numbers(collector.next()[0])[0, 2] == 0
        get(second.load_state_dict.remote(state))
        assert get(second.state_dict.remote())["frames"] == state["frames"]


@BOTH
def test_they_collect_while_the_collector_does(sync):
    with make(sync=sync) as collector:
        book: dict[int, list[int]] = {0: [], 1: []}
        ids: list[set[int]] = []

        def note(batch: Any) -> None:
            for row in batch if batch.ndim == 2 else [batch]:
                numbers = NumberedEnv.numbers(row)
                book[int(numbers[0, 0])] += numbers[:, 3].tolist()
                ids.append({int(numbers[0, 0])} | {-1 - int(i) for i in row[TRAJ_IDS]})

        calls = []
        for _ in range(8):
            calls += [handle.next.remote() for handle in collector.remote_collectors]
            note(collector.next())
        for batch in get(*calls):
            note(batch)
        assert collector.stats()["frames"] == 8 * 12
        # Of an asynchronous collector some frames may be under way, of either worker.
        while any(sorted(steps)[: 8 * 6] != list(range(8 * 6)) for steps in book.values()):
            assert not sync
            note(collector.next())
        for steps in book.values():
            assert len(set(steps)) == len(steps), "a frame came twice"
        mine = [{i for i in each if i < 0} for each in ids if 0 in each]
        others = [{i for i in each if i < 0} for each in ids if 1 in each]
        assert not set().union(*mine) & set().union(*others)


# Arrives at any time after the call that was refused.
@pytest.mark.filterwarnings("ignore:in worker 0. update_policy_weights_:RuntimeWarning")
def test_weights_that_come_by_a_handle_are_those_of_the_worker():
    with make() as collector:
        first, second = collector.remote_collectors
        assert stamps(collector.next()) == [(1, 0), (1, 0)]
        get(first.update_policy_weights_.remote(Chooser(2)))
        assert stamps(collector.next()) == [(2, 1), (1, 0)]
        assert collector.policy_version_tracker.version == 1
        assert collector.get_cached_weights("policy")["choice"] == 2
        # The second follows the first, and both go on together.
        get(second.update_policy_weights_.remote(policy_weights={"choice": torch.tensor(2.0)}))
        assert stamps(collector.next()) == [(2, 1), (2, 1)]
        get(*(h.receive_weights.remote(Chooser(3)) for h in (first, second)))
        assert stamps(collector.next()) == [(3, 2), (3, 2)]
        with pytest.raises(ValueError, match="got weights twice"):
            get(first.update_policy_weights_.remote(Chooser(4), policy_weights=Chooser(4)))
        handles = collector.remote_collectors
        kill(first)
        with pytest.warns(RuntimeWarning, match="worker 0 died"):
            assert stamps(collector.next()) == [(3, 2), (3, 2)]
        # The same list has the handle of the actor in its place.
        assert collector.remote_collectors is handles
        assert handles[0] != first
        assert get(handles[0].get_policy_version.remote()) == 2
        collector.add_collectors(envs(3)[2])
        assert [acted for acted, _ in stamps(collector.next())] == [3, 3, 3]
        assert len(handles) == 3
        # What the collector sends after it is newer, also for a worker that is replaced.
        collector.update_policy_weights_(Chooser(0))
        assert stamps(collector.next()) == [(0, 3)] * 3
        kill(handles[1])
        with pytest.warns(RuntimeWarning, match="worker 1 died"):
            assert stamps(collector.next()) == [(0, 3)] * 3
    assert handles == []


def test_a_seed_that_comes_by_a_handle_is_that_of_the_worker():
    """Also of the one that takes its place: as if the collector had been seeded."""
    found = []
    for by_handle in (False, True):
        with RayCollector(
            "Pendulum-v1",
            num_collectors=1,
            frames_per_batch=10,
            sync=True,
            remote_configs={"num_cpus": 0, "memory": 0},
        ) as collector:
            (handle,) = collector.remote_collectors
            given = get(handle.set_seed.remote(7)) if by_handle else collector.set_seed(7)
            first = collector.next()
            kill(handle)
            with pytest.warns(RuntimeWarning, match="worker 0 died"):
                found.append((given, first, collector.next()))
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        assert same(one, other, (TRAJ_IDS,))


class Failing(Chooser):
    """A policy with a method to call, that fails when it is asked to."""

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        if float(self.choice) == 3:
            raise ArithmeticError("no such choice")
        return super().forward(observation)


def test_errors_are_those_of_the_call():
    with make(Failing(1)) as collector:
        first, second = collector.remote_collectors
        for name, told in [
            ("start", r"start\(\) can't be called through a worker's handle: call it on the coll"),
            ("iterator", r"iterator\(\) .*call next\(\) for each batch"),
            ("register_scheme_receiver", "pass weight_sync_schemes or weight_recv_schemes"),
        ]:
            with pytest.raises(RuntimeError, match=told):
                get(getattr(first, name).remote())
        with pytest.raises(AttributeError, match="nothing") as caught:
            get(second.getattr_env.remote("nothing"))
        assert "in getattr_env" in str(caught.value)
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            first.nothing.remote()
        # Updaters that don't look at results: the user is told in any case.
        with pytest.raises(KeyError, match="unknown"):
            get(second.update_policy_weights_.remote({"weight": torch.ones(2)}))
        with pytest.warns(RuntimeWarning, match=r"worker 1: update_policy_weights_.*KeyError.*unk"):
            assert stamps(collector.next()) == [(1, 0), (1, 0)]
        # The policy fails in a batch of the handle's: that closes the collector there.
        get(first.update_policy_weights_.remote(Failing(3)))
        with pytest.raises(ArithmeticError, match="no such choice"):
            get(first.next.remote())
        with pytest.raises(ArithmeticError, match="worker 0"):
            collector.next()


def test_no_frames_are_taken_that_would_be_missing():
    with make(trajs_per_batch=2, traj_format="cat") as collector:
        for name in ("next", "rollout", "load_state_dict"):
            method = getattr(collector.remote_collectors[0], name)
            with pytest.raises(RuntimeError, match="assembles whole trajectories"):
                get(method.remote(*([{}] if name == "load_state_dict" else [])))
        collector.next()
    from torchrl.data import LazyTensorStorage

    from trawl.data import RayReplayBuffer

    options = {"remote_config": {"num_cpus": 0, "memory": 0}, "batch_size": 4}
    buffer = RayReplayBuffer(storage=lambda: LazyTensorStorage(100), **options)
    with make(replay_buffer=buffer, total_frames=24) as collector:
        with pytest.raises(RuntimeError, match="workers write into the replay buffer"):
            get(collector.remote_collectors[0].next.remote())
        list(collector)
        assert len(buffer) == 24
    buffer.close()


def test_workers_that_have_workers():
    with make(workers=2, collector_class="sync", num_workers_per_collector=2) as collector:
        found = [collector.next() for _ in range(2)]
        apart = get(*(handle.next.remote() for handle in collector.remote_collectors))
        assert [batch.shape for batch in apart] == [(2, 3), (2, 3)]
        ids = [set(batch[TRAJ_IDS][i].flatten().tolist()) for batch in found for i in range(2)]
        late = [set(batch[TRAJ_IDS].flatten().tolist()) for batch in apart]
        assert not late[0] & late[1]
        assert not late[0] & (ids[1] | ids[3])
        get(*(h.update_policy_weights_.remote(Chooser(2)) for h in collector.remote_collectors))
        assert actions(collector.next()) == {2}
        kill(collector.remote_collectors[0])
        with pytest.warns(RuntimeWarning, match="worker 0 died"):
            assert actions(collector.next()) == {2}


def test_calls_of_a_process_are_in_order_whatever_the_options_say():
    """And the worker ends by one."""

    @ray.remote(num_cpus=0)
    def late() -> Any:
        # Time enough for later calls to come first, if they could.
        time.sleep(0.5)
        return {"choice": torch.tensor(3.0)}

    policy = Chooser(1)
    options = {"num_cpus": 0, "memory": 0, "max_concurrency": 4}
    with make(policy, workers=1, remote_configs=options) as collector:
        (handle,) = collector.remote_collectors
        get(
            handle.update_policy_weights_.remote(late.remote()),
            handle.update_policy_weights_.remote(Chooser(2)),
        )
        assert actions(collector.next()) == {2}
        # A program that has handles is not warned of weights that it did not send.
        for number in range(10):
            collector.next()
            policy.become(number % 4)
        get(handle.shutdown.remote())
        with pytest.raises(RuntimeError, match=r"this worker has ended: the collector's remote_"):
            get(handle.stats.remote())
        with pytest.warns(
            RuntimeWarning, match="worker 0 exited with status 0; a new worker takes"
        ):
            batch = collector.next()
        assert NumberedEnv.numbers(batch)[..., 3].flatten().tolist() == list(range(12))
        assert get(collector.remote_collectors[0].stats.remote())["batches"] == 1
