"""AsyncBatchedCollector whose policy has a process of its own, and workers that run one."""

import os
import select
import threading
from functools import partial

import psutil
import pytest
import torch
from collector_parts import Chooses
from tensordict.nn import TensorDictModule
from test_async_batched import Constant, ledger_of, makers

from trawl.collectors import (
    AsyncBatchedCollector,
    Collector,
    MultiSyncCollector,
)

LOCK = threading.Lock()


def numbered(count=4, frames=50, **options):
    options.setdefault("policy", Chooses())
    options.setdefault("env_backend", "threading")
    options.setdefault("policy_backend", "multiprocessing")
    return AsyncBatchedCollector(makers(count), frames_per_batch=frames, **options)


# --- frames


@pytest.mark.parametrize(
    "place",
    [{"policy_backend": "multiprocessing"}, {"server_config": {"service_backend": "process"}}],
)
def test_the_policy_acts_in_another_process(place):
    factory = partial(TensorDictModule, WritesItsProcess(), ["observation"], ["action", "process"])
    options = {"policy": None, "policy_factory": factory, "policy_backend": None, **place}
    with numbered(total_frames=50, **options) as collector:
        (batch,) = collector
        (process,) = batch["process"].unique().tolist()
        assert process in {child.pid for child in psutil.Process().children(recursive=True)}
        assert collector.server_backend == "process"


class WritesItsProcess(torch.nn.Module):
    """Policy that also writes the number of the process in which it acts."""

    def forward(self, observation):
        return Chooses()(observation), torch.full((len(observation), 1), os.getpid())


# --- weights


def test_frames_have_the_version_that_chose_their_action():
    policy = TensorDictModule(Constant(), ["observation"], ["action", "sent"])
    with numbered(frames=40, policy=policy, policy_version=7) as collector:
        newest = []
        for _ in range(8):
            batch = collector.next()
            assert (batch["sent"] == batch["policy_version"].unsqueeze(-1) - 7).all()
            newest.append(int(batch["policy_version"].max()))
            with torch.no_grad():
                policy.module.value += 1
            collector.update_policy_weights_()
        assert newest == sorted(newest)
        assert newest[-1] > 7
        assert collector.policy_version_tracker.version == 15


def test_no_frame_is_older_than_the_maximum_lag():
    ledger = ledger_of(6)
    with numbered(6, 8, max_policy_lag=1, total_frames=200, server_timeout=0) as collector:
        for batch in collector:
            ledger.add(batch)
            assert collector.policy_version_tracker.version - batch["policy_version"].min() <= 1
            collector.update_policy_weights_()
    assert ledger.frames == 200


# --- failures


def pids(policy_writes):
    return policy_writes["process"].unique().tolist()


def writes_its_process(**options):
    policy = TensorDictModule(WritesItsProcess(), ["observation"], ["action", "process"])
    return numbered(policy=policy, **options)


@pytest.mark.filterwarnings("ignore:worker 0 was killed")
def test_the_inference_process_is_replaced_if_it_dies():
    before, after = set(), set()
    with writes_its_process(total_frames=500) as collector:
        (first,) = pids(collector.next())
        psutil.Process(first).kill()
        for batch in collector:
            mine = before if pids(batch) == [first] else after
            mine |= set(batch["collector", "traj_ids"].tolist())
        assert collector.stats()["frames"] == 500
        assert collector.stats()["restarts"] == 1
    assert after
    assert not before & after


def test_its_environments_end_if_it_dies():
    with writes_its_process(max_policy_lag=0, env_backend="multiprocessing") as collector:
        (pid,) = pids(collector.next())
        process = psutil.Process(pid)
        # These also tell the end of a process that nobody reaps.
        below = [os.pidfd_open(child.pid) for child in process.children(recursive=True)]
        process.kill()
        assert len(below) >= 4
        for handle in below:
            assert select.select([handle], [], [], 300)[0], "an environment has not ended"
            os.close(handle)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"frames": 0}, ValueError, "frames_per_batch"),
        ({"nothing": 1}, TypeError, "AsyncBatchedCollector got unknown arguments: nothing"),
        ({"device": "cuda:77"}, ValueError, "^device is 'cuda:77'"),
        ({"max_policy_lag": -1}, ValueError, "max_policy_lag"),
        ({"policy": lambda observation, lock=LOCK: lock}, TypeError, "policy.*can't be sent"),
    ],
)
def test_wrong_options_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        numbered(**options)


def test_subclasses_act_in_this_process():
    class Own(AsyncBatchedCollector):
        pass

    with pytest.raises(TypeError, match="only AsyncBatchedCollector itself"):
        Own(makers(2), policy=Chooses(), frames_per_batch=8, policy_backend="multiprocessing")


# --- workers that run one


def test_the_budget_of_such_workers_is_rounded_up_to_full_batches():
    every = makers(4)
    with pytest.warns(UserWarning, match="total_frames=130 is not a multiple of .*"):
        collector = MultiSyncCollector(
            [every[:2], every[2:]],
            Chooses(),
            collector_class=AsyncBatchedCollector,
            frames_per_batch=40,
            total_frames=130,
        )
    with collector:
        assert sum(batch.numel() for batch in collector) == 160
        assert collector.stats()["frames"] == 160


def test_workers_that_a_backend_chooses():
    every = makers(4)
    with Collector(
        [every[:2], every[2:]],
        Chooses(),
        backend="process",
        num_collectors=2,
        backend_options={"collector_class": AsyncBatchedCollector},
        frames_per_batch=40,
        total_frames=80,
    ) as collector:
        assert sum(len(batch) for batch in collector) == 80
