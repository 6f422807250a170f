"""An AsyncBatchedCollector continues from the state of another one, to the bit."""

import copy
import io
import math
import os
import threading
import time
from collections import defaultdict
from functools import cache, partial

import numpy as np
import pytest
import torch
from multi_parts import TRAJ_IDS
from torch import nn

from tests.oracle.continuing import Failing, equal, following, noisy, same, saved
from trawl.collectors import AsyncBatchedCollector, Collector
from trawl.envs import ParallelEnv
from trawl.errors import EnvStateError, WorkerDied
from trawl.testing import Ledger, NumberedEnv

BACKENDS = pytest.mark.parametrize("backend", ["threading", "multiprocessing"])
THREADS = {"env_backend": "threading"}
PLACES = pytest.mark.parametrize("place", ["threading", "multiprocessing"])


class Sums(nn.Module):
    """Policy for NumberedEnv whose result for an environment does not depend on the others."""

    def forward(self, observation):
        return nn.functional.one_hot(observation.flatten(1).long().sum(-1).abs() % 4, 4)


class Balances(nn.Module):
    """Policy for CartPole, also without any dependence on the others."""

    def forward(self, observation):
        return nn.functional.one_hot((observation[:, 2] + observation[:, 3] > 0).long(), 2)


def numbered(lengths, cls=NumberedEnv):
    return [partial(cls, number, lengths=tuple(own)) for number, own in enumerate(lengths)]


def made(envs, policy, frames, together=False, **options):
    """Makes a collector; ``together``: the policy waits for all environments."""
    if together:
        options.update(min_batch_size=len(envs), server_timeout=math.inf)
    return AsyncBatchedCollector(envs, policy=policy, frames_per_batch=frames, **options)


def streams(batches):
    """Returns the frames of each environment, without the ids, which depend on timing."""
    frames = torch.cat(list(batches))
    found = {int(env): frames[frames["env_index"] == env] for env in frames["env_index"].unique()}
    return {env: (own.exclude(TRAJ_IDS), own[TRAJ_IDS]) for env, own in found.items()}


def until(collector, count, least=6):
    """Returns batches in which each environment has at least ``least`` frames."""
    batches, seen = [], defaultdict(int)
    while len(seen) < count or min(seen.values()) < least:
        batches.append(collector.next().clone())
        for env in batches[-1]["env_index"].tolist():
            seen[env] += 1
    return batches


def check_streams(one, two):
    """Compares the frames of each environment, as far as both collectors have delivered them."""
    assert one.keys() == two.keys()
    for env, (frames, ids) in one.items():
        others, other_ids = two[env]
        count = min(len(frames), len(others))
        assert same(frames[:count], others[:count])
        assert ids[0] == other_ids[0]
        changes = [own[:count].diff() != 0 for own in (ids, other_ids)]
        assert torch.equal(*changes)


# --- each environment goes on

WARNED = pytest.mark.filterwarnings("ignore:.*environment . failed")
# The flags of the last frame before a failure depend on the batch that the frame is in.
FLAGS = [("next", "done"), ("next", "truncated")]


@pytest.mark.parametrize("most", [0, 2])
def test_the_limit_of_the_lag_continues(most):
    envs = numbered([[3, 1], [5], [2, 9], [4]])
    for frames, batches in [(2, 4), (9, 3)]:
        make = partial(made, envs, Sums(), frames, True, max_policy_lag=most, **THREADS)
        with make() as collector, make() as other:
            for _ in range(batches):
                collector.next()
                collector.update_policy_weights_()
            other.load_state_dict(saved(collector.state_dict()))
            assert other.resumed
            for _ in range(6):
                assert same(collector.next(), other.next())
                collector.update_policy_weights_(), other.update_policy_weights_()


@WARNED
def test_failures_in_a_row_are_counted_on():
    def failures(collector):
        with pytest.raises(RuntimeError, match="environment 1 failed 10 times"):
            collect_forever(collector)
        return collector.stats()["env_restarts"]

    envs = ["CartPole-v1", partial(Failing, 1)]
    # Each failure is followed by a frame of the other one, however slow its process is.
    make = partial(made, envs, Balances(), 2, True, on_env_error="restart")
    with make() as collector, make() as other:
        while not 3 <= collector.stats()["env_restarts"] < 9:
            collector.next()
        other.load_state_dict(collector.state_dict())
        assert failures(other) == failures(collector) == 9


def collect_forever(collector):
    while True:
        collector.next()


@WARNED
def test_restarts_of_other_environments_change_no_seed():
    found = []
    for first in (5, 10**9):
        envs = [partial(Failing, first), partial(Failing, 8)]
        with made(envs, Balances(), 10, True, on_env_error="restart") as collector:
            collector.set_seed(1)
            batches = until(collector, 2, least=30)
        found.append(streams(batch.exclude(*FLAGS) for batch in batches)[1][0][:30])
    assert same(*found)


class Dies(NumberedEnv):
    """Environment whose process ends in its fifth step."""

    def step(self, action):
        if len(self.actions) == 4:
            os._exit(3)
        return super().step(action)


def test_a_state_is_taken_after_a_process_has_died():
    make = partial(made, [NumberedEnv, Dies], Sums(), 1, True, on_env_error="restart")
    with make() as collector, make() as other:
        # The fifth step of environment 1 is under way.
        following(collector, 8)
        with pytest.warns(RuntimeWarning, match="environment 1 failed"):
            state = saved(collector.state_dict())
        assert collector.stats()["env_restarts"] == 1
        other.load_state_dict(state)
        assert equal(following(other, 4), following(collector, 4))


def test_a_process_that_has_died_is_an_error():
    with made([NumberedEnv, Dies], Sums(), 1, True) as collector:
        following(collector, 8)
        with pytest.raises(WorkerDied, match="environment 1"):
            collector.state_dict()


class BreaksOnce(NumberedEnv):
    """Environment that raises an error in its fifth step, and then works again."""

    def __init__(self):
        super().__init__()
        self.broke = False

    def step(self, action):
        if len(self.actions) == 4 and not self.broke:
            self.broke = True
            raise ValueError("broken")
        return super().step(action)


@BACKENDS
def test_an_error_in_a_step_under_way_is_raised_by_all_that_waits_for_it(backend):
    with made(numbered([[5], [5]]), Sums(), 8, env_backend=backend) as collector:
        state = collector.state_dict()
    with made([NumberedEnv, BreaksOnce], Sums(), 1, True, env_backend=backend) as collector:
        own = collector.state_dict()
        following(collector, 8)
        for call in ("state_dict", "env_state_methods", "state_dict", "rollout"):
            with pytest.raises(ValueError, match="environment 1: ValueError: broken"):
                getattr(collector, call)()
        # The error outlasts a state that is refused.
        with pytest.raises(EnvStateError, match="another environment: its wrapper chain"):
            collector.load_state_dict(state)
        with pytest.raises(ValueError, match="environment 1: ValueError: broken"):
            collector.rollout()
        # A reset, or a state, replaces the step.
        if backend == "threading":
            collector.reset()
        else:
            collector.load_state_dict(own)
        assert "resume" in collector.state_dict()
        following(collector, 8)


# --- what a state does not change


@pytest.mark.parametrize(
    ("backend", "most", "frames"),
    [("threading", 0, 3), ("threading", 2, 7), ("multiprocessing", None, 7)],
)
def test_states_change_no_batch(backend, most, frames):
    """What is finished for a state is noticed when it would have been without the state."""
    envs = numbered([[3, 1], [5], [2, 9], [4]])
    options = {"max_policy_lag": most, "env_backend": backend}
    with (
        made(envs, Sums(), frames, True, **options) as collector,
        made(envs, Sums(), frames, True, **options) as other,
    ):
        for _ in range(6):
            collector.state_dict()
            assert collector.env_state_methods() == ["attributes"] * 4
            assert same(collector.next(), other.next())


# --- budgets, buffers, processes


@PLACES
def test_a_state_is_taken_during_background_collection(place):
    data = pytest.importorskip("torchrl.data")
    lengths, begun = [[3, 1], [5], [2, 7]], threading.Event()
    ledger = Ledger([make() for make in numbered(lengths)])

    def make():
        buffer = data.ReplayBuffer(storage=data.LazyTensorStorage(600))
        options = {"replay_buffer": buffer, "total_frames": 600, "policy_backend": place}
        hook = {"post_collect_hook": lambda _: begun.set()}
        return buffer, made(numbered(lengths), Sums(), 20, **options, **hook)

    (first, collector), (second, other) = make(), make()
    with collector, other:
        collector.start()
        begun.wait()
        state = saved(collector.state_dict())
        while collector.is_running():
            time.sleep(0.001)
        other.load_state_dict(state)
        assert set(other) <= {None}
    before = state["frames"]
    ledger.add(first[:before])
    # The collector may have been faster than this thread.
    if before < 600:
        ledger.add(second[:])
        check_streams(streams([first[before:]]), streams([second[:]]))
    assert ledger.frames == 600


def test_the_state_is_small():
    with made(["CartPole-v1"], noisy(2), 50, **THREADS) as collector:
        collector.next()
        file = io.BytesIO()
        torch.save(collector.state_dict(), file)
    # Of these, the random generators of torch, numpy and Python take 14,000.
    assert len(file.getvalue()) < 22_000


# --- states that don't fit


def refused(state, error, match, *args, **options):
    """Checks that a state is refused, and that the collector goes on with new episodes."""
    with made(*args, **options) as collector:
        collector.next()
        with pytest.raises(error, match=match):
            collector.load_state_dict(state)
        with pytest.warns(RuntimeWarning, match="new episodes begin"):
            collector.load_state_dict(state, on_state_mismatch="new_episodes")
        assert not collector.resumed
        assert collector.next()[TRAJ_IDS].min() >= int(state["traj_pool"]["traj_id"])


@pytest.mark.parametrize(
    ("first", "second", "match"),
    [
        ({}, {"envs_per_worker": 2}, "processes with .1, 1, 1. environments, .* with .2, 1.: "),
        ({}, {"max_policy_lag": 1}, "the collector is one with max_policy_lag, but the state is"),
        ({"max_policy_lag": 1}, {}, "the state is one with max_policy_lag, but the collector is"),
        ({}, {"on_env_error": "restart"}, "the collector is one with on_env_error='restart', but"),
        ({}, {"policy_version_key": None}, "has torch.int64 .* in begun 'policy_version'"),
    ],
)
def test_the_state_of_a_collector_with_other_options_is_refused(first, second, match):
    envs = numbered([[3], [4], [5]])
    with made(envs, Sums(), 8, **THREADS, **first) as collector:
        collector.next()
        state = collector.state_dict()
    refused(state, ValueError, match, envs, Sums(), 8, **THREADS, **second)


def test_the_state_of_other_environments_is_refused():
    with made(["CartPole-v1"] * 2, Balances(), 8, **THREADS) as collector:
        state = collector.state_dict()
    envs = numbered([[3], [4]])
    refused(state, EnvStateError, "its id is CartPole-v1", envs, Sums(), 8, **THREADS)


def test_collectors_whose_environments_step_together_have_other_states():
    envs = numbered([[3], [4]])
    with (
        made(envs, Sums(), 8, **THREADS) as own,
        Collector(ParallelEnv(2, envs, backend="thread"), Sums(), **EIGHT) as other,
    ):
        own.next(), other.next()
        with pytest.raises(ValueError, match=r"the state has torch.int64 .* in begun 'action'"):
            other.load_state_dict(own.state_dict())
        with pytest.raises(ValueError, match="the state has no entry in begun 'action'"):
            own.load_state_dict(other.state_dict())


EIGHT = {"frames_per_batch": 8, "track_policy_version": True}


# --- environments that can't be captured


class Handle(NumberedEnv):
    """Environment with a lock, which no state can hold, and a generator that can't be repeated."""

    def __init__(self, number=0, **kwargs):
        super().__init__(number, **kwargs)
        self.lock = threading.Lock()
        self.drawn = np.random.default_rng(0)
        self.drawn.spawn(1)


def test_new_episodes_begin_in_environments_that_cant_be_captured():
    with made(numbered([[9], [9]], Handle), Sums(), 5, True) as collector:
        assert collector.env_state_methods() == ["none", "none"]
        collector.next()
        state = saved(collector.state_dict())
        assert "resume" not in state
        # The running collector goes on.
        assert collector.next()["observation"][0, 2] > 0
        collector.load_state_dict(state)
        assert not collector.resumed
        assert collector.next()["observation"][0, 2] == 0


# --- every piece counts


@cache
def collected():
    """Returns states after each batch, and the batches that follow."""
    envs = numbered([[3, 1], [5], [2, 9], [4]])
    make = partial(made, envs, ByVersion(), 6, True, env_backend="threading")
    with make() as collector:
        collector.set_seed(1)
        states, found = [], []
        for _ in range(16):
            found.append(collector.next().clone())
            collector.update_policy_weights_()
            states.append(saved(collector.state_dict()))
    return make, states, found


class ByVersion(Sums):
    """Policy with a weight, which also draws random numbers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, observation):
        drawn = torch.randint(4, (len(observation), 1)) * observation.new_ones(1)
        return super().forward(torch.cat([observation, drawn], -1))


WRITER = ("rollout", "writer")
SOURCE = (*WRITER, "source")


@pytest.mark.parametrize(
    "piece",
    [
        ("envs",),
        ("rollout", "random"),
        (*WRITER, "rows", "'observation'"),
        (*WRITER, "rows", "begun 'action'"),
        (*WRITER, "rows", "begun 'policy_version'"),
        (*WRITER, "episodes", "next_id"),
        (*WRITER, "episodes", "ids"),
        (*SOURCE, "due"),
        (*SOURCE, "waiting"),
        (*SOURCE, "envs", "ready"),
        (*SOURCE, "results", "flags"),
        (*SOURCE, "results", "rewards"),
        (*SOURCE, "results", "step 'observation'"),
        (*SOURCE, "results", "reset 'observation'"),
    ],
    ids=lambda piece: "-".join(piece),
)
def test_each_piece_of_the_state_counts(piece):
    """With a piece of another state, some batches are others, or loading fails."""
    assert any(differs(piece, moment) for moment in range(4, 12))


def differs(piece, moment):
    make, states, batches = collected()
    state = copy.deepcopy(states[moment])
    place, old = state["resume"], states[moment - 3]["resume"]
    for key in piece[:-1]:
        place, old = place[key], old[key]
    now, before = place[piece[-1]], old[piece[-1]]
    place[piece[-1]] = torch.zeros_like(now) if isinstance(now, torch.Tensor) else before
    with make() as other:
        try:
            other.load_state_dict(state)
            for batch in batches[moment + 1 : moment + 5]:
                if not same(other.next(), batch):
                    return True
                other.update_policy_weights_()
        except (EnvStateError, ValueError, RuntimeError, IndexError):
            return True
    return False
