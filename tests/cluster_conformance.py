"""Conformance suite for collectors whose workers are elsewhere: behind a network, or in a cluster.

Which frames a collector with workers delivers, and what is done with them, is compared with the
oracle where workers are in this process. Here the same program runs elsewhere, as a whole.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).with_name("collectors")))

from buffer_parts import BUFFERS, check_background
from collector_parts import by_step
from dataset_parts import check_dataset
from multi_parts import Chooser, actions, envs, same
from trace_parts import assert_whole, delivered, drawn
from whole_parts import TRAJ_IDS, Episodes, cycling, rows_of

from trawl.collectors import MultiSyncCollector
from trawl.observe import TraceOptions, read_trace
from trawl.testing import NumberedEnv

PENDULUM = ["Pendulum-v1"] * 2
NORMALIZED = {"normalize_observations": True, "normalize_rewards": True}


class Noisy(nn.Module):
    """A policy for Pendulum that draws its actions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 1)

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        mean = self.net(observation)
        return (mean + torch.randn_like(mean)).clamp(-2, 2)


def learned(collector: Any, count: int = 6) -> tuple[list[Any], Any]:
    """Batches after a seed, each with other weights than the one before; and the statistics."""
    with collector:
        collector.set_seed(7)
        found = []
        for _ in range(count):
            found.append(collector.next().clone())
            with torch.no_grad():
                for weights in collector.policy.parameters():
                    weights.add_(0.1)
            collector.update_policy_weights_()
        return found, collector.normalization


def collected(collector: Any, count: int) -> list[Any]:
    return [collector.next().clone() for _ in range(count)]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    """Checks that batches are equal, bit by bit."""
    assert len(found) == len(expected)
    assert [same(*pair) for pair in zip(found, expected, strict=True)] == [True] * len(found)


def assert_aligned(timeline: Any, offset: float = 0.0) -> None:
    """Checks that the true offset of each clock is within the error of the estimate."""
    # Of a worker that has not finished a batch yet, nothing is known.
    known = [clock for clock in timeline.info["clocks"] if clock["error"] is not None]
    assert known
    for clock in known:
        assert clock["error"] > 0
        assert abs(clock["offset"] - offset) <= clock["error"]


def assert_between_request_and_delivery(timeline: Any, workers: int = 2) -> None:
    """Checks that each batch is drawn after its request and before its delivery."""
    errors = {clock["lane"]: clock["error"] for clock in timeline.info["clocks"]}
    at = {
        kind: {one.args["request"]: one.at for one in timeline.instants if one.name == kind}
        for kind in ("request", "deliver")
    }
    for index in range(workers):
        lane = f"worker {index}"
        for span in timeline.lane(lane):
            number = span.args.get("request")
            if number in at["deliver"]:
                assert at["request"][number] - errors[lane] <= span.start
                assert span.end <= at["deliver"][number] + errors[lane]


def until_one_is_replaced(collector: Any) -> list[Any]:
    """The batches until a worker was replaced."""
    found = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        while not collector.stats()["restarts"]:
            found.append(collector.next().clone())
    assert any("a new worker takes its place" in str(one.message) for one in told), told
    return found


def pid_of(collector: Any) -> int:
    """The process of a worker, which is asked for it."""
    return os.getpid()


class ClusterConformance:
    """What collectors with workers promise, in runs of their workers at another place.

    A subclass makes the collectors; pytest finds the tests in it.
    """

    def make(self, source: Any, policy: Any = None, sync: bool = True, **options: Any) -> Any:
        """Returns a collector with two workers."""
        raise NotImplementedError

    def kill(self, collector: Any, worker: int) -> None:
        """Ends a worker without notice; by default, its process on this machine."""
        (pid,) = collector._pool.call({worker: (pid_of,)}).values()
        os.kill(pid, signal.SIGKILL)

    @pytest.mark.parametrize("prefetch", [0, 1])
    def test_a_seed_gives_the_frames_of_local_workers(self, prefetch: int) -> None:
        """While weights change, with statistics that workers share, and a batch ahead."""
        options: dict[str, Any] = {"frames_per_batch": 40, "prefetch": prefetch, **NORMALIZED}
        options |= {"track_policy_version": True, "cat_results": 0}
        here = MultiSyncCollector(PENDULUM, Noisy(), start_method="inline", **options)
        expected, own = learned(here)
        found, theirs = learned(self.make(PENDULUM, Noisy(), **options))
        assert_same(found, expected)
        versions = [set(batch["policy_version"].flatten().tolist()) for batch in found]
        assert versions == [{max(0, number - prefetch)} for number in range(6)]
        for kind, key in (("observations", "observation"), ("rewards", "reward")):
            one, other = (getattr(each, kind)[key] for each in (own, theirs))
            assert one.count == other.count == 240
            assert np.array_equal(one.mean, other.mean)

    def test_states_and_snapshots_continue_to_the_bit(self, tmp_path: Path) -> None:
        """In a collector that was used before, and after a worker died, whose timeline is whole."""
        options: dict[str, Any] = {"frames_per_batch": 40, **NORMALIZED}
        trace = tmp_path / "run.json.gz"
        with MultiSyncCollector(PENDULUM, Noisy(), start_method="inline", **options) as here:
            here.set_seed(1)
            expected = collected(here, 8)
        state = io.BytesIO()
        with self.make(
            PENDULUM, Noisy(), worker_snapshots=3, trace=TraceOptions(trace, "step"), **options
        ) as first:
            first.set_seed(1)
            found = collected(first, 2)
            torch.save(first.state_dict(), state)
            first.checkpoint(tmp_path, extra={"step": 1})
            found += collected(first, 3)
            self.kill(first, 0)
            found += until_one_is_replaced(first)
            found += collected(first, 8 - len(found))
            assert first.stats()["restarts"] == 1
            assert first.normalization.observations["observation"].count == 320
        assert_same(found, expected)
        timeline = read_trace(trace)
        assert_whole(timeline, first.stats("both"))
        assert_aligned(timeline)
        assert_between_request_and_delivery(timeline)
        assert [span.name for span in timeline.lane("worker 0")].count("restart") == 1
        assert any(lane.endswith(" steps") for lane in timeline.lanes)
        state.seek(0)
        with self.make(PENDULUM, Noisy(), **options) as other:
            other.load_state_dict(torch.load(state, weights_only=True))
            assert_same(collected(other, 3), expected[2:5])
            assert other.load_checkpoint(tmp_path)
            assert other.extra == {"step": 1}
            assert_same(collected(other, 3), expected[2:5])

    def test_who_dies_without_snapshots_loses_only_what_it_had_not_delivered(self, tmp_path):
        """Trajectories are whole, have ids of their own, and all are of the newest weights."""
        lengths, trace = (3, 5, 1), tmp_path / "run.json.gz"
        options: dict[str, Any] = {"trajs_per_batch": 1, "traj_format": "cat", "trace": trace}
        options |= {"frames_per_batch": 14, "total_frames": 420, "track_policy_version": True}
        with self.make(envs(2), Chooser(1), sync=False, **options) as collector:
            collector.update_policy_weights_(Chooser(2))
            collector.next()
            self.kill(collector, 1)
            found = until_one_is_replaced(collector)
            found += [batch.clone() for batch in collector]
            assert collector.stats()["frames"] == 420
        ids = [int(batch[TRAJ_IDS][0]) for batch in found]
        assert len(set(ids)) == len(ids)
        for batch in found:
            # The environment in its place begins with its first episode again.
            numbers = NumberedEnv.numbers(batch)
            assert numbers[:, 2].tolist() == list(range(lengths[numbers[0, 1] % 3]))
            assert batch["next", "done"].flatten().tolist() == [False] * (len(batch) - 1) + [True]
        assert actions(torch.cat(found)) == {2}
        # Of each of three lives the last episode may be missing, and of the first batch all.
        assert 420 - 4 * max(lengths) < sum(map(len, found)) <= 420
        timeline = read_trace(trace)
        assert_whole(timeline, collector.stats("both"))
        assert_aligned(timeline)

    def test_workers_with_workers(self, tmp_path: Path) -> None:
        """Weights, statistics and options of the workers' collectors reach both levels."""
        trace = tmp_path / "run.json.gz"
        inner = {"postproc": marked, "max_frames_per_traj": 2, "device": "cpu"}
        options: dict[str, Any] = {"collector_class": "sync", "num_workers_per_collector": 2}
        options |= {"collector_kwargs": {**inner, "start_method": "inline"}, "trace": trace}
        with self.make(
            envs(2), Chooser(1), frames_per_batch=12, normalize_observations=True, **options
        ) as collector:
            collector.set_seed(1)
            found = collected(collector, 3)
            collector.update_policy_weights_(Chooser(3))
            statistics = collector.normalization.observations["observation"]
            assert statistics.count == 36
            last = collector.next().clone()
        assert [actions(batch) for batch in (*found, last)] == [{1}, {1}, {1}, {3}]
        assert last.numel() == last["mark"].sum() == 12
        assert last.device == torch.device("cpu")
        # All environments are normalised by the statistics of all batches before.
        deviation = torch.as_tensor(statistics.var + 1e-8).sqrt()
        raw = last["observation"] * deviation + torch.as_tensor(statistics.mean)
        assert torch.allclose(raw[..., 1:, :], raw[..., 1:, :].round(), atol=1e-3)
        assert set(raw[..., 1:, 2].round().flatten().tolist()) == {0, 1}
        assert int(last["next", "step_count"].max()) == 2
        rows = [row.reshape(-1) for batch in found for row in batch.reshape(4, 3)]
        ids = [{int(one) for row in rows[i::4] for one in row[TRAJ_IDS]} for i in range(4)]
        assert len(set().union(*ids)) == sum(map(len, ids))
        assert_whole(read_trace(trace), collector.stats("both"), nested=True)
        assert_aligned(read_trace(trace))

    def test_frames_come_into_datasets_and_buffers(self, tmp_path: Path) -> None:
        """Each once: into a dataset, in the background into a buffer, and whole into another."""

        def make(source: Any, **options: Any) -> Any:
            return self.make(
                source, by_step(), **{"frames_per_batch": 20, "sync": False, **options}
            )

        check_dataset(make, tmp_path, "parquet")
        check_background(make, BUFFERS["shared"]())
        episodes = Episodes(cycling((3, 5, 1)))
        with make(envs(2), trajs_per_batch=3, traj_format="padded", total_frames=140) as collector:
            for batch in collector:
                assert episodes.add(batch) == len(rows_of(batch)) == 3
        assert all(found == list(range(len(found))) for found in episodes.by_env.values())

    def test_a_collector_is_asked_and_told(self) -> None:
        """Each call reaches the workers, or those that it is for."""
        with self.make(envs(2), Chooser(1), track_policy_version=True, cat_results="stack") as it:
            it.set_seed(3)
            assert actions(it.next()) == {1}
            assert it.get_distant_attr("worker_idx") == [0, 1]
            assert it.map_fn("get_policy_version") == [0, 0]
            assert it.cascade_execute("num_workers") == 2
            it.update_policy_weights_(Chooser(2), worker_ids=[1])
            batch = it.next()
            assert [actions(row) for row in batch] == [{1}, {2}]
            assert batch["policy_version"].tolist() == [[0] * 20, [1] * 20]
            it.reset()
            assert NumberedEnv.numbers(it.next())[:, 0, 2].tolist() == [0, 0]
            stats = it.stats("both")
            assert (stats["workers"], stats["worker_1/alive"], stats["frames"]) == (2, True, 120)
            with pytest.raises(AttributeError, match=r"in worker 0.*nothing"):
                it.get_distant_attr("nothing")

    def test_an_error_of_a_worker_has_its_type(self) -> None:
        with pytest.raises(ZeroDivisionError, match=r"in worker \d"):
            self.make([lambda: 1 // 0] * 2)

    def test_a_timeline_has_all_batches(self, tmp_path: Path) -> None:
        """Where each batch is of one worker, and weights change between them."""
        trace = tmp_path / "run.json.gz"
        options = {"trace": trace, "total_frames": 240, "frames_per_batch": 20}
        with self.make(envs(2), Chooser(1), sync=False, **options) as collector:
            for _ in collector:
                collector.update_policy_weights_()
        timeline = read_trace(trace)
        assert_whole(timeline, collector.stats("both"))
        assert sorted(delivered(timeline)) == sorted(drawn(timeline, 2))
        assert_aligned(timeline)


def marked(batch: Any) -> Any:
    """A postproc."""
    return batch.set("mark", torch.ones(batch.shape))
