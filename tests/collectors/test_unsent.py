"""Learners that never send their weights."""

from contextlib import nullcontext

import pytest
import torch
from collector_parts import named
from multi_parts import CLASSES, Chooser, actions, make, together

BOTH = pytest.mark.parametrize("cls", CLASSES, ids=named)
NEVER = r"update_policy_weights_\(\) was never called"
# Each worker's batches before the warning.
PATIENCE = 8


def learn(policy):
    with torch.no_grad():
        policy.choice.add_(1).remainder_(4)


def calls(cls):
    """Number of calls of ``next()`` by which two workers have made these batches."""
    return PATIENCE if together(cls) else 2 * PATIENCE


@BOTH
@pytest.mark.parametrize("method", ["inline", "forkserver"])
def test_they_are_warned_once(cls, method):
    policy = Chooser(0)
    with make(cls, policy=policy, start_method=method) as collector:
        for number in range(2 * calls(cls) + 1):
            warned = number == calls(cls)
            with pytest.warns(UserWarning, match=NEVER) if warned else nullcontext():
                assert actions(collector.next()) == {0}
            learn(policy)


@BOTH
def test_one_change_is_enough(cls):
    policy = Chooser(0)
    with make(cls, policy=policy) as collector:
        learn(policy)
        for _ in range(calls(cls)):
            assert actions(collector.next()) == {0}
        with pytest.warns(UserWarning, match=NEVER):
            collector.next()


@BOTH
def test_a_new_version_is_no_update(cls):
    policy = Chooser(0)
    with make(cls, policy=policy, track_policy_version=True) as collector:
        for _ in range(calls(cls)):
            collector.next()
            learn(policy)
            collector.increment_version()
        with pytest.warns(UserWarning, match=NEVER):
            collector.next()


@BOTH
def test_a_learner_that_sends_now_and_then_is_not_warned(cls):
    policy = Chooser(0)
    with make(cls, policy=policy) as collector:
        for number in range(2 * calls(cls) + 1):
            collector.next()
            learn(policy)
            if number == calls(cls) - 2:
                collector.update_policy_weights_()


@BOTH
def test_a_learner_that_sends_weights_of_another_module_is_not_warned(cls):
    policy, learner = Chooser(0), Chooser(0)
    with make(cls, policy=policy) as collector:
        collector.update_policy_weights_(learner)
        for _ in range(calls(cls) + 1):
            collector.next()
            learn(policy)


@BOTH
def test_a_collector_that_sends_by_itself_does_not_warn(cls):
    policy = Chooser(0)
    with make(cls, policy=policy, update_at_each_batch=True) as collector:
        for _ in range(calls(cls) + 1):
            collector.next()
            learn(policy)


@BOTH
def test_a_learner_of_another_module_is_not_warned(cls):
    with make(cls, policy=Chooser(0)) as collector:
        for _ in range(calls(cls) + 1):
            collector.next()
            learn(Chooser(1))
