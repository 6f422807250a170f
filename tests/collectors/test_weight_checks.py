"""Updates that are less or more than they seem: each does what it says, or is an error."""

import os
import signal
import warnings
from contextlib import suppress

import numpy as np
import pytest
import torch
from collector_parts import Buffer
from multi_parts import BOTH, LARGE_COUNT, Chooser, Counter, actions, make
from torch import nn

from trawl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from trawl.testing.envs import NumberedEnv
from trawl.weight_update import (
    MultiProcessedWeightUpdater,
    SharedMemWeightSyncScheme,
)


def stamps(batch):
    """The versions in a batch, by action."""
    acted = batch["action"].argmax(-1).reshape(-1).tolist()
    return set(zip(acted, batch["policy_version"].reshape(-1).tolist(), strict=True))


class Stateful(Chooser):
    """A policy with extra state, of which some is refused."""

    def __init__(self, choice=0):
        super().__init__(choice)
        self.said = None

    def get_extra_state(self):
        return self.said

    def set_extra_state(self, state):
        if state == "bad":
            raise ValueError("not that")
        self.said = state


@pytest.mark.parametrize(
    ("policy", "name"),
    [(Chooser(1), "_extra_state"), (Stateful(1), "part._extra_state")],
    ids=["takes none", "has no such part"],
)
@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_extra_state_that_nobody_takes_changes_nothing(cls, policy, name):
    many = cls is MultiSyncCollector
    made = make(cls, policy=policy) if many else cls(NumberedEnv, policy, frames_per_batch=4)
    with made as collector:
        weights = {"choice": torch.tensor(2.0), name: "said"}
        with pytest.raises(KeyError, match="extra state"):
            collector.update_policy_weights_(weights)
        assert actions(collector.next()) == {1}


def test_extra_state_that_a_policy_refuses_changes_nothing():
    with Collector(NumberedEnv, Stateful(1), frames_per_batch=4) as collector:
        with pytest.raises(ValueError, match="not that"):
            collector.update_policy_weights_({"choice": torch.tensor(2.0), "_extra_state": "bad"})
        assert actions(collector.next()) == {1}


class Larger(Chooser):
    """A policy with more weights."""

    def __init__(self, choice=0):
        super().__init__(choice)
        self.more = nn.Parameter(torch.zeros(3))


class Remembering(Chooser):
    """A policy that counts its calls in a buffer, and whose choice is extra state."""

    def __init__(self, choice=0, level=1.0):
        super().__init__(choice)
        self.register_buffer("level", torch.tensor(level))
        self.register_buffer("calls", torch.zeros(()))
        self.extra = choice

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state

    def forward(self, observation):
        self.calls += 1
        return super().forward(observation)


@pytest.mark.parametrize("method", ["inline", "forkserver", "messages"])
def test_what_is_not_given_stays_as_the_worker_has_it(method):
    """Extra state, and buffers, in which workers may differ."""
    policies = [Remembering(1, level=0.25), Remembering(1, level=0.5)]
    with make(MultiSyncCollector, policy=policies, start_method=method) as collector:
        for policy in policies:
            policy.extra = 3
        collector.update_policy_weights_()
        collector.next()
        before = [float(calls) for calls in collector.get_distant_attr("policy.calls")]
        assert all(before)
        collector.update_policy_weights_({"choice": torch.tensor(2.0)})
        assert actions(collector.next()) == {2}
        assert collector.get_distant_attr("policy.extra") == [3, 3]
        assert [float(x) for x in collector.get_distant_attr("policy.level")] == [0.25, 0.5]
        after = [float(calls) for calls in collector.get_distant_attr("policy.calls")]
        assert after == [2 * calls for calls in before]


@pytest.mark.parametrize("method", [None, "inline", "messages", "forkserver"])
def test_counts_and_masks_arrive_as_they_are_or_are_refused(method):
    policy = Counter(1, 3)
    if method is None:
        made = Collector(NumberedEnv, policy, frames_per_batch=10)
    else:
        made = make(MultiSyncCollector, policy=policy, start_method=method)

    def found(name):
        """A buffer of the policy, or of each worker's."""
        if method is None:
            return [getattr(made.policy, name)]
        return made.get_distant_attr(f"policy.{name}")

    with made:
        wrong = {**Counter(2, 4).state_dict(), "count": torch.tensor(2.0)}
        match = r"weight 'count' is torch.float32, which is not cast to the policy's torch.int64"
        with pytest.raises(ValueError, match=match):
            made.update_policy_weights_(wrong)
        assert actions(made.next()) == {1}
        assert {int(count) for count in found("count")} == {3}
        made.update_policy_weights_(Counter(2, LARGE_COUNT, (False, True)))
        assert actions(made.next()) == {2}
        assert {(count.dtype, int(count)) for count in found("count")} == {
            (torch.int64, LARGE_COUNT)
        }
        assert all(torch.equal(mask, torch.tensor([False, True])) for mask in found("mask"))


def counted() -> Counter:
    learner = Counter(1)
    learner.count = torch.tensor(3.0)
    return learner


@pytest.mark.parametrize(
    ("learner", "made", "told"),
    [
        (Larger(1), Chooser, r"Larger .* workers' policy: only here \['more'\]"),
        (counted(), Counter, r"with another shape or dtype \['count'\]"),
    ],
)
def test_a_policy_that_is_not_like_those_of_the_factory_gives_no_weights(learner, made, told):
    with make(
        MultiSyncCollector,
        policy=learner,
        policy_factory=lambda: made(2),
        weight_sync_schemes={"policy": SharedMemWeightSyncScheme()},
    ) as collector:
        with pytest.raises(ValueError, match=told):
            collector.update_policy_weights_()
        assert actions(collector.next()) == {2}
        collector.update_policy_weights_(made(3))
        assert actions(collector.next()) == {3}


def test_workers_are_named_by_integers_of_any_kind():
    with make(MultiSyncCollector, policy=Chooser(1)) as collector:
        for other in (1.0, "1", torch.tensor(1), [True], [1.0]):
            with pytest.raises(TypeError, match="worker_ids must be the number of a worker"):
                collector.update_policy_weights_(Chooser(2), worker_ids=other)
        for choice, one in enumerate((np.int64(1), [np.int32(1)], (1,)), 1):
            collector.update_policy_weights_(Chooser(choice), worker_ids=one)
            assert [actions(row) for row in collector.next()] == [{1}, {choice}]


def test_extra_state_that_outgrew_its_room_changes_nothing():
    policy = Remembering(1)
    with make(MultiSyncCollector, policy=policy, track_policy_version=True) as collector:
        collector.update_policy_weights_()
        policy.extra = bytes(10_000_000)
        with pytest.raises(ValueError, match="extra state has grown to 100"):
            collector.update_policy_weights_(Chooser(2).state_dict() | policy.state_dict())
        assert collector.get_policy_version() == 1
        assert actions(collector.next()) == {1}


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
