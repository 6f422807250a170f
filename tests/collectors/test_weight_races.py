"""Weights where much happens at once, or little is given: no lock, stamp or bound is broken."""

import os
import signal
import warnings
from contextlib import suppress

import pytest
import torch
from collector_parts import Buffer
from multi_parts import BOTH, Chooser, actions, make
from torch import nn

from trawl.collectors import MultiAsyncCollector, MultiSyncCollector, PolicyVersion
from trawl.weight_update import MultiProcessedWeightUpdater, SharedMemWeightSyncScheme

PATIENCE = 300


class Remembering(Chooser):
    """A policy whose choice is extra state."""

    def __init__(self, choice=0, level=1.0):
        super().__init__(choice)
        self.register_buffer("level", torch.tensor(level))
        self.extra = choice

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


@pytest.mark.parametrize("method", ["inline", "messages"])
def test_extra_state_and_buffers_stay_if_they_are_not_given(method):
    policy = Remembering(1, level=0.5)
    with make(MultiSyncCollector, policy=policy, start_method=method) as collector:
        policy.extra = 3
        policy.level.fill_(0.25)
        collector.update_policy_weights_()
        collector.update_policy_weights_({"choice": torch.tensor(2.0)})
        batch = collector.next()
        assert actions(batch) == {2}
        assert collector.get_distant_attr("policy.extra") == [3, 3]
        assert [float(x) for x in collector.get_distant_attr("policy.level")] == [0.25, 0.25]


def test_extra_state_that_outgrew_its_room_changes_nothing():
    policy = Remembering(1)
    with make(MultiSyncCollector, policy=policy, track_policy_version=True) as collector:
        collector.update_policy_weights_()
        policy.extra = bytes(10_000_000)
        with pytest.raises(ValueError, match="extra state has grown to 100"):
            collector.update_policy_weights_(Chooser(2).state_dict() | policy.state_dict())
        assert collector.get_policy_version() == 1
        assert actions(collector.next()) == {1}


@pytest.mark.parametrize("method", ["inline", "messages"])
def test_workers_of_different_weights_keep_their_own_buffers(method):
    policies = [Remembering(1, level=1.0), Remembering(1, level=0.5)]
    with make(MultiSyncCollector, policy=policies, start_method=method) as collector:
        collector.update_policy_weights_()
        collector.update_policy_weights_({"choice": torch.tensor(2.0)})
        collector.next()
        assert [float(x) for x in collector.get_distant_attr("policy.level")] == [1.0, 0.5]


def test_weights_in_another_order_are_refused_or_right():
    scheme = SharedMemWeightSyncScheme()
    scheme.init_on_sender(num_workers=2)
    scheme.connect()
    one, two = torch.ones(2), torch.full((2,), 2.0)
    scheme.send({0: {"a": one, "b": two}, 1: {"b": two, "a": one}})
    for worker in range(2):
        found = {}
        scheme.receivers.reader(worker).receive(
            lambda update, found=found: found.update(
                {name: tensor.clone() for name, tensor in update.slot.named().items()}
            )
        )
        assert found["a"].tolist() == [1, 1]
        assert found["b"].tolist() == [2, 2]


def test_updates_in_inference_mode_are_no_others():
    policy = Chooser(1)
    with make(MultiSyncCollector, policy=policy) as collector:
        with torch.inference_mode():
            collector.update_policy_weights_({"choice": torch.tensor(2.0)})
        for choice in (3, 2, 3):
            collector.update_policy_weights_(Chooser(choice))
        assert actions(collector.next()) == {3}


@BOTH
def test_a_worker_that_is_replaced_has_the_version_of_its_weights(cls):
    scheme = SharedMemWeightSyncScheme(per_worker_weights=True)
    with make(
        cls,
        policy=Chooser(1),
        track_policy_version=True,
        weight_sync_schemes={"policy": scheme},
        start_method="forkserver",
        init_fn=_note_pid,
    ) as collector:
        collector.update_policy_weights_({0: Chooser(2)})
        stats = collector.stats("per_worker")
        assert [stats[f"worker_{i}/policy_version"] for i in range(2)] == [1, 0]
        (pid,) = collector.map_fn("policy.pid", [(), ()])[1:]
        os.kill(pid, signal.SIGKILL)
        batches = []
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            while not told:
                batches.append(collector.next())
        batches += [collector.next() for _ in range(6)]
        for batch in batches:
            for row in batch if cls is MultiSyncCollector else [batch]:
                assert actions(row) == {1 + int(row["policy_version"].max())}


def _note_pid():
    Chooser.pid = staticmethod(os.getpid)


@BOTH
def test_a_tracker_of_the_users_own_may_be_moved_on(cls):
    version = PolicyVersion()
    with make(cls, policy=Chooser(1), track_policy_version=version) as collector:
        version.increment_version()
        assert set(collector.next()["policy_version"].unique().tolist()) == {1}


def test_versions_alone_keep_the_bound_as_well():
    with make(
        MultiAsyncCollector, policy=Chooser(1), max_policy_lag=1, track_policy_version=True
    ) as collector:
        collector.next()
        collector.increment_version()
        with suppress(RuntimeError):
            for _ in range(3):
                collector.increment_version()
        assert collector.stats()["policy_version"] < 4


def test_an_update_by_an_updater_is_one():
    with make(
        MultiAsyncCollector,
        policy=Chooser(1),
        weight_updater=MultiProcessedWeightUpdater(),
        max_policy_lag=1,
    ) as collector:
        for _ in range(6):
            collector.next()
            collector.update_policy_weights_()
        assert collector.stats()["policy_lag_max"] <= 1


def test_an_updater_that_fails_makes_no_version():
    with make(
        MultiSyncCollector,
        policy=Chooser(1),
        weight_updater=MultiProcessedWeightUpdater(),
        track_policy_version=True,
    ) as collector:
        with pytest.raises(KeyError):
            collector.update_policy_weights_(nn.Linear(1, 1))
        assert collector.policy_version == 0
        assert set(collector.next()["policy_version"].unique().tolist()) == {0}


def test_a_state_that_lacks_something_changes_nothing():
    with make(MultiSyncCollector, policy=Chooser(2), track_policy_version=True) as other:
        other.next()
        state = other.state_dict()
    del state["worker1"]["frames"]
    with make(MultiSyncCollector, policy=Chooser(1), track_policy_version=True) as collector:
        with pytest.raises(KeyError, match=r"worker1.*frames"):
            collector.load_state_dict(state)
        assert actions(collector.next()) == {1}


@pytest.mark.parametrize("most", [0, 2, 3])
def test_more_updates_than_are_allowed_for_are_learned_from(most):
    with make(MultiAsyncCollector, policy=Chooser(1), max_policy_lag=most) as collector:
        refused = []
        for batch in range(12):
            collector.next()
            for _ in range(4):
                try:
                    collector.update_policy_weights_()
                except RuntimeError:
                    refused.append(batch)
        assert not refused or max(refused) < 6


def test_in_the_background_an_updater_waits_for_its_turn():
    with make(
        MultiSyncCollector,
        policy=Chooser(1),
        replay_buffer=Buffer(),
        weight_updater=MultiProcessedWeightUpdater(),
    ) as collector:
        collector.start()
        for _ in range(5):
            collector.update_policy_weights_(Chooser(2))
