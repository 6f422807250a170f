"""Learners that never send their weights."""

from contextlib import nullcontext

import pytest
import torch
from collector_parts import named
from multi_parts import CLASSES, Chooser, actions, make

both = pytest.mark.parametrize("cls", CLASSES, ids=named)
NEVER = r"update_policy_weights_\(\) was never called"


def learn(policy):
    with torch.no_grad():
        policy.choice.add_(1).remainder_(4)


@both
@pytest.mark.parametrize("method", ["inline", "forkserver"])
def test_they_are_told_once(cls, method):
    policy = Chooser(0)
    with make(cls, policy=policy, start_method=method) as collector:
        for number in range(9):
            told = pytest.warns(UserWarning, match=NEVER)
            with told if number == 7 else nullcontext():
                assert actions(collector.next()) == {0}
            learn(policy)


@both
def test_they_are_told_if_it_changed_once(cls):
    policy = Chooser(0)
    with make(cls, policy=policy) as collector:
        learn(policy)
        for number in range(5):
            told = pytest.warns(UserWarning, match=NEVER)
            with told if number == 3 else nullcontext():
                assert actions(collector.next()) == {0}


@both
def test_who_sends_them_now_and_then_is_told_nothing(cls):
    policy = Chooser(0)
    with make(cls, policy=policy) as collector:
        for number in range(8):
            collector.next()
            learn(policy)
            if number == 6:
                collector.update_policy_weights_()


@both
def test_who_sends_them_is_told_nothing(cls):
    policy = Chooser(0)
    with make(cls, policy=policy) as collector:
        for _ in range(4):
            collector.next()
            learn(policy)
            collector.update_policy_weights_()


def test_who_sends_those_of_another_is_told_nothing():
    policy, learner = Chooser(0), Chooser(0)
    with make(policy=policy) as collector:
        for _ in range(4):
            collector.next()
            learn(policy)
            collector.update_policy_weights_(learner)


def test_who_has_them_sent_is_told_nothing():
    policy = Chooser(0)
    with make(policy=policy, update_at_each_batch=True) as collector:
        for number in range(3):
            assert actions(collector.next()) == {number}
            learn(policy)


def test_who_learns_something_else_is_told_nothing():
    with make(policy=Chooser(0)) as collector:
        for _ in range(4):
            collector.next()
            learn(Chooser(1))
