"""Learners that never send their weights."""

from collections import deque
from contextlib import nullcontext
from itertools import islice

import pytest
import torch
from collector_parts import named
from multi_parts import CLASSES, Chooser, actions, make, together
from torch.nn.utils import vector_to_parameters

from trawl.weight_update import SharedMemWeightSyncScheme

BOTH = pytest.mark.parametrize("cls", CLASSES, ids=named)
NEVER = r"update_policy_weights_\(\) was never called"
# Each worker's batches before the warning, if the first of them is learned from.
PATIENCE = 8
# Each worker's batches after the check that sees a change for the first time.
LATER = 7


def learn(policy):
    with torch.no_grad():
        policy.choice.add_(1).remainder_(4)


def calls(cls):
    """Number of calls of ``next()`` by which two workers have made these batches."""
    return PATIENCE if together(cls) else 2 * PATIENCE


@pytest.mark.parametrize(
    ("cls", "method"), [(CLASSES[0], "inline"), (CLASSES[1], "inline"), (CLASSES[1], "forkserver")]
)
def test_they_are_warned_once(cls, method):
    """A new version alone is no update."""
    policy = Chooser(0)
    with make(cls, policy=policy, start_method=method, track_policy_version=True) as collector:
        for number in range(2 * calls(cls) + 1):
            warned = number == calls(cls)
            with pytest.warns(UserWarning, match=NEVER) if warned else nullcontext():
                assert actions(collector.next()) == {0}
            learn(policy)
            if method == "inline":
                collector.increment_version()


def set_by_a_vector(policy):
    vector_to_parameters(torch.ones(1), policy.parameters())


def set_by_assignment(policy):
    policy.load_state_dict({"choice": torch.ones(())}, assign=True)


@BOTH
@pytest.mark.parametrize(
    ("change", "scheme"),
    [(learn, False), (learn, True), (set_by_a_vector, False), (set_by_assignment, False)],
)
def test_one_change_is_enough(cls, change, scheme):
    """Also of parameters that are replaced; a scheme that is never used is no update."""
    policy = Chooser(0)
    schemes = {"weight_sync_schemes": {"policy": SharedMemWeightSyncScheme()}} if scheme else {}
    with make(cls, policy=policy, **schemes) as collector:
        change(policy)
        for _ in range(calls(cls)):
            assert actions(collector.next()) == {0}
        with pytest.warns(UserWarning, match=NEVER):
            collector.next()


@BOTH
@pytest.mark.parametrize(
    "how", ["the scheme", "now and then", "another module's", "by itself", "learns elsewhere"]
)
def test_a_learner_that_sends_or_learns_something_else_is_not_warned(cls, how):
    policy, scheme, options = Chooser(0), SharedMemWeightSyncScheme(), {}
    if how == "the scheme":
        options["weight_sync_schemes"] = {"policy": scheme}
    if how == "by itself":
        options["update_at_each_batch"] = True
    with make(cls, policy=policy, **options) as collector:
        if how == "the scheme":
            scheme.send()
        if how == "another module's":
            collector.update_policy_weights_(Chooser(0))
        for number in range(2 * calls(cls) + 1):
            collector.next()
            learn(Chooser(1) if how == "learns elsewhere" else policy)
            if how == "now and then" and number == calls(cls) - 2:
                collector.update_policy_weights_()


@BOTH
def test_a_learner_that_begins_late_is_warned_soon(cls):
    policy, warm_up = Chooser(0), 200
    with make(cls, policy=policy, workers=1) as collector:
        for _ in range(warm_up):
            collector.next()
        learn(policy)
        with pytest.warns(UserWarning, match=NEVER):
            deque(islice(collector, 64 + LATER), 0)
