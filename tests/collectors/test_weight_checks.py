"""Updates that don't do what they seem to: each is an error of the call, or does it."""

import warnings

import numpy as np
import pytest
import torch
from multi_parts import BOTH, LARGE_COUNT, Chooser, Counter, actions, make
from torch import nn

from trawl.collectors import Collector, MultiSyncCollector
from trawl.testing.envs import NumberedEnv
from trawl.weight_update import (
    MultiProcessedWeightUpdater,
    SharedMemWeightSyncScheme,
    VanillaWeightUpdater,
)


def stamps(batch):
    """The versions in a batch, by action."""
    acted = batch["action"].argmax(-1).reshape(-1).tolist()
    return set(zip(acted, batch["policy_version"].reshape(-1).tolist(), strict=True))


def test_a_collectors_scheme_sends_by_the_collector():
    scheme = SharedMemWeightSyncScheme()
    with make(
        MultiSyncCollector,
        policy=Chooser(1),
        track_policy_version=True,
        weight_sync_schemes={"policy": scheme},
    ) as collector:
        scheme.send(Chooser(2))
        assert stamps(collector.next()) == {(2, 1)}
        scheme.send({0: Chooser(3), 1: Chooser(3)})
        assert collector.policy_version == 2
        collector.update_policy_weights_(Chooser(1))
        assert stamps(collector.next()) == {(1, 3)}


def test_a_scheme_of_a_collector_without_workers_sends_to_it():
    scheme = SharedMemWeightSyncScheme()
    with Collector(
        NumberedEnv, Chooser(1), frames_per_batch=4, weight_sync_schemes={"policy": scheme}
    ) as collector:
        scheme.send(Chooser(2))
        assert actions(collector.next()) == {2}


@BOTH
def test_an_updater_for_one_process_is_refused_by_a_collector_with_workers(cls):
    policy = Chooser(1)
    updater = VanillaWeightUpdater.from_policy(policy)
    with pytest.raises(ValueError, match=r"weight_updater: VanillaWeightUpdater .* its workers"):
        make(cls, policy=policy, weight_updater=updater)


def skipping():
    """An updater that leaves a worker out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)

        class Skipping(MultiProcessedWeightUpdater):
            def _skip_update(self, worker_id):
                return worker_id == 1

        return Skipping()


def test_a_worker_that_an_updater_skips_keeps_its_version():
    with make(
        MultiSyncCollector, policy=Chooser(1), track_policy_version=True, weight_updater=skipping()
    ) as collector:
        collector.update_policy_weights_(Chooser(2))
        assert stamps(collector.next()) == {(2, 1), (1, 0)}


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


class Counting(Chooser):
    """A policy that counts its calls in a buffer."""

    def __init__(self, choice=0):
        super().__init__(choice)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, observation):
        self.calls += 1
        return super().forward(observation)


@pytest.mark.parametrize("method", ["inline", "forkserver", "messages"])
def test_buffers_that_are_left_out_stay_as_the_worker_has_them(method):
    with make(MultiSyncCollector, policy=Counting(1), start_method=method) as collector:
        collector.update_policy_weights_()
        collector.next()
        before = [float(calls) for calls in collector.get_distant_attr("policy.calls")]
        assert all(before)
        collector.update_policy_weights_({"choice": torch.tensor(2.0)})
        assert actions(collector.next()) == {2}
        after = [float(calls) for calls in collector.get_distant_attr("policy.calls")]
        assert after == [2 * calls for calls in before]


WRONG_KINDS = {
    "a count for a weight": ("choice", torch.tensor(2), "torch.int64", "torch.float32"),
    "a mask for a weight": ("choice", torch.tensor(True), "torch.bool", "torch.float32"),
    "a number for a count": ("count", torch.tensor(2.0), "torch.float32", "torch.int64"),
    "a number for a mask": ("mask", torch.ones(2), "torch.float32", "torch.bool"),
    "a count for a mask": ("mask", torch.tensor([1, 2]), "torch.int64", "torch.bool"),
}


def counting(method, policy):
    """A collector with such a policy, in one process or with workers."""
    if method is None:
        return Collector(NumberedEnv, policy, frames_per_batch=10)
    return make(MultiSyncCollector, policy=policy, start_method=method)


def buffers_of(collector, name):
    """A buffer of the policy, or of each worker's."""
    if isinstance(collector, Collector):
        return [getattr(collector.policy, name)]
    return collector.get_distant_attr(f"policy.{name}")


@pytest.mark.parametrize("method", [None, "inline", "messages", "forkserver"])
def test_weights_of_another_kind_are_refused_and_change_nothing(method):
    with counting(method, Counter(1, 3)) as collector:
        for name, value, given, own in WRONG_KINDS.values():
            weights = {**Counter(2, 4).state_dict(), name: value}
            match = rf"weight '{name}' is {given}, which is not cast to the policy's {own}"
            with pytest.raises(ValueError, match=match):
                collector.update_policy_weights_(weights)
        assert actions(collector.next()) == {1}
        assert {int(count) for count in buffers_of(collector, "count")} == {3}


@pytest.mark.parametrize("method", [None, "inline", "messages", "forkserver"])
def test_counts_and_masks_arrive_as_they_are(method):
    with counting(method, Counter(1)) as collector:
        collector.update_policy_weights_(Counter(2, LARGE_COUNT, (False, True)))
        assert actions(collector.next()) == {2}
        for count in buffers_of(collector, "count"):
            assert count.dtype == torch.int64
            assert int(count) == LARGE_COUNT
        for mask in buffers_of(collector, "mask"):
            assert mask.dtype == torch.bool
            assert mask.tolist() == [False, True]


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


class Wrapped(nn.Module):
    """A module within another, as DataParallel has it."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, observation):
        return self.module(observation)


@pytest.mark.parametrize(
    ("inside", "given", "hint"),
    [
        (Chooser(1), Wrapped(Chooser(2)), "pass the module inside the wrapper"),
        (Wrapped(Chooser(1)), Chooser(2), "pass the module that contains this one"),
    ],
)
def test_weights_of_a_module_within_another_are_recognised(inside, given, hint):
    with (
        Collector(NumberedEnv, inside, frames_per_batch=4) as collector,
        pytest.raises(KeyError, match=hint),
    ):
        collector.update_policy_weights_(given)


def test_sparse_weights_are_refused():
    with (
        Collector(NumberedEnv, Larger(1), frames_per_batch=4) as collector,
        pytest.raises(ValueError, match=r"'more' is torch\.sparse_coo"),
    ):
        collector.update_policy_weights_(
            {"choice": torch.tensor(1.0), "more": torch.ones(3).to_sparse()}
        )


@pytest.mark.parametrize("count", [0, -2])
def test_a_scheme_has_receivers(count):
    with pytest.raises(
        ValueError, match=f"num_workers is {count}, but there must be at least one receiver"
    ):
        SharedMemWeightSyncScheme().init_on_sender(model=Chooser(1), num_workers=count)


def test_what_was_given_to_a_sender_can_be_looked_at():
    scheme = SharedMemWeightSyncScheme()
    scheme.init_on_sender(weights={"a": torch.ones(2)})
    assert scheme.weights["a"].tolist() == [1, 1]
