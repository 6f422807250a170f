"""Policies that return odd things: what is clear works, and the rest is named in the error."""

import bdb
import traceback
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from tensordict.nn import TensorDictModule

from tests.oracle.torchrl_kinds import Words
from trawl.collectors import AsyncBatchedCollector, Collector, MultiSyncCollector
from trawl.envs import GymEnv, ParallelEnv
from trawl.testing import NumberedEnv


def carts():
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


@pytest.mark.parametrize(
    ("env", "value", "action"),
    [
        *((carts, value, 1) for value in (1, np.int64(1), np.array(1), torch.tensor(1))),
        *(("Pendulum-v1", value, [0.5]) for value in ([0.5], np.array([0.5], np.float32))),
    ],
    ids=repr,
)
def test_numbers_lists_and_arrays_are_actions(env, value, action):
    given = [lambda observation: value, lambda observation: (value, 0.25)]
    module = TensorDictModule(given[0], ["observation"], ["action"])
    for policy in given if isinstance(value, list) else [*given, module]:
        with Collector(env, policy, frames_per_batch=4) as collector:
            batch = collector.next()
        assert batch["action"].tolist() == [action] * 4
        assert env != carts or batch["action"].dtype is torch.int64
        assert policy is not given[1] or batch["output1"].tolist() == [0.25] * 4


def torchrl_pendulums():
    torchrl_envs = pytest.importorskip("torchrl.envs")
    return torchrl_envs.SerialEnv(2, lambda: torchrl_envs.GymEnv("Pendulum-v1"))


@pytest.mark.parametrize(
    ("env", "where"),
    [
        ("Pendulum-v1", ""),
        (["Pendulum-v1"] * 2, " of environment 1"),
        (torchrl_pendulums, " of environment 1"),
    ],
    ids=["one", "two", "TorchRL's"],
)
def test_a_nan_action_is_named(env, where):
    def policy(observation):
        calls.append(None)
        action = torch.zeros(*observation.shape[:-1], 1)
        if len(calls) == 3:
            action.view(-1)[-1] = torch.nan
        return action

    calls = []
    expected = rf"policy wrote nan to 'action'{where} at step 2 of this batch, and the reward"
    with pytest.raises(ValueError, match=expected):
        Collector(env, policy, frames_per_batch=16).next()


def test_texts_reach_a_policy_as_strings():
    def one(word):
        seen.append(type(word))
        return torch.tensor([1, 0])

    def both(word):
        seen.extend(map(type, word))
        return torch.tensor([[1, 0], [1, 0]])

    for env, policy in ((Words(), one), ([Words, Words], both)):
        seen = []
        Collector(env, policy, frames_per_batch=4).next()
        assert set(seen) == {str}


def test_a_debugger_in_a_worker_says_where_it_works():
    class Halting(NumberedEnv):
        def step(self, action):
            raise bdb.BdbQuit

    collector = MultiSyncCollector([Halting], frames_per_batch=4)
    with pytest.raises(bdb.BdbQuit, match=r'BdbQuit\. A debugger .* start_method="inline"'):
        collector.next()


LINEAR = torch.nn.Linear(3, 1)
FIRST = "it is a module, Linear: the environment comes first"


@pytest.mark.parametrize(
    ("kind", "args", "text"),
    [
        (Collector, ("Pendulum-v1", lambda observation: None), "must return the action, but it re"),
        (Collector, ("Pendulum-v1", torch.nn.Linear), r"be an object, but it is the class Lin\w+:"),
        (Collector, (LINEAR, "Pendulum-v1"), FIRST),
        (MultiSyncCollector, (LINEAR, ["Pendulum-v1"] * 2), FIRST),
    ],
)
def test_what_is_no_policy(kind, args, text):
    with pytest.raises(TypeError, match=text):
        kind(*args, frames_per_batch=4)


def test_a_function_that_needs_arguments_is_told_about():
    with pytest.raises(TypeError, match="missing 1 required") as caught:
        Collector(lambda g: GymEnv("Pendulum-v1", g=g), frames_per_batch=4)
    note = "create_env_fn was called with no arguments: they come from create_env_kwargs"
    assert note in "".join(traceback.format_exception(caught.value))


def test_an_index_out_of_range_need_not_be_encoded():
    with (
        pytest.raises(ValueError, match="requires an index in the valid range") as raised,
        Collector(carts, lambda observation: torch.tensor(2), frames_per_batch=4) as collector,
    ):
        collector.next()
    assert "one_hot" not in str(raised.value)


# --- a row for each environment


class Rows(torch.nn.Module):
    """Policy that always returns the same number of actions."""

    def __init__(self, count):
        super().__init__()
        self.count = count

    def forward(self, observation):
        return torch.nn.functional.one_hot(torch.zeros(self.count, dtype=torch.int64), 4)


CALLED = r"policy wrote 'action' with shape \(4, 4\), but it was called with inputs of batch size "
OF_READY = (
    r"\([123],\), so the shape must be \([123], 4\)\. The policy acts for the environments "
    r"that are ready, whose number changes .* Take the batch size from the inputs"
)


@pytest.mark.parametrize(
    ("cls", "source", "options", "text"),
    [
        (
            Collector,
            [NumberedEnv] * 3,
            {},
            r"\(3,\), so the shape must begin with \(3, ...\): write a row for each environment",
        ),
        (AsyncBatchedCollector, [NumberedEnv] * 4, {"max_batch_size": 3}, OF_READY),
        (
            Collector,
            partial(ParallelEnv, 4, NumberedEnv, groups=2, backend="thread"),
            {},
            r"\(2,\), so the shape must be \(2, 4\)",
        ),
    ],
    ids=["list", "ready", "groups"],
)
def test_a_number_of_rows_that_is_not_that_of_the_inputs(cls, source, options, text):
    with pytest.raises(ValueError, match=CALLED + text):  # noqa: SIM117
        with cls(source, policy=Rows(4), frames_per_batch=96, **options) as collector:
            collector.next()


def test_always_the_same_number_of_environments_is_an_option():
    with AsyncBatchedCollector(
        [NumberedEnv] * 4,
        policy=Rows(4),
        frames_per_batch=100,
        server_config={"static_batch_size": 4},
    ) as collector:
        assert len(collector.next()) == 100


def test_another_shape_later_on():
    def policy(observation):
        calls.append(None)
        action = hides(NETWORK)(observation)
        return action if len(calls) < 4 else action[:, :3]

    calls = []
    with (
        AsyncBatchedCollector([NumberedEnv] * 2, policy=policy, frames_per_batch=9) as collector,
        pytest.raises(
            ValueError, match=r"with shape \([12], 3\), but at first with shape \([12], "
        ),
    ):
        collector.next()


# --- networks that updates can't reach

NETWORK = torch.nn.Linear(5, 4)


def frozen():
    return torch.nn.Linear(5, 4).requires_grad_(False)


def hides(network):
    """A function that calls a network."""

    def policy(observation):
        return torch.nn.functional.one_hot(network(observation).argmax(-1), 4)

    return policy


class Holder:
    """Object that calls a network, and has a method that does not."""

    def __init__(self):
        self.network = torch.nn.Linear(5, 4)

    def __call__(self, observation):
        return hides(self.network)(observation)

    def first(self, observation):
        return torch.nn.functional.one_hot(torch.zeros_like(observation[..., 0]).long(), 4)


def names_it(observation):
    """Mentions the network, without calling it."""
    return Holder.first(NETWORK, observation)


def started(kind, policy):
    options = {"frames_per_batch": 4}
    if kind is AsyncBatchedCollector:
        options["policy_backend"] = "multiprocessing"
        options["policy"] = policy
        return kind([NumberedEnv], **options)
    if kind is MultiSyncCollector:
        options["start_method"] = "inline"
    return kind([NumberedEnv], policy, **options)


class Owner(torch.nn.Module):
    """A module whose network is part of it."""

    def __init__(self):
        super().__init__()
        self.network = torch.nn.Linear(5, 4)

    def forward(self, observation):
        return hides(self.network)(observation)


WARNED = pytest.warns(
    UserWarning,
    match=r"the policy calls a network that is not part of it \(Linear\): .* don't reach",
)


@pytest.mark.parametrize(
    ("kind", "make", "warned"),
    [
        (MultiSyncCollector, lambda: hides(torch.nn.Linear(5, 4)), True),
        (MultiSyncCollector, lambda: Holder().__call__, True),
        (AsyncBatchedCollector, Holder, True),
        (MultiSyncCollector, lambda: Holder().first, False),
        (MultiSyncCollector, lambda: hides(frozen()), False),
        (AsyncBatchedCollector, lambda: names_it, False),
        (MultiSyncCollector, lambda: TensorDictModule(Owner(), ["observation"], ["action"]), False),
        # In this process, updates reach it.
        (Collector, lambda: hides(NETWORK), False),
    ],
)
def test_a_network_that_updates_cannot_reach_is_warned_of(kind, make, warned):
    with WARNED if warned else nullcontext():
        collector = started(kind, make())
    with collector:
        assert collector.next() is not None
