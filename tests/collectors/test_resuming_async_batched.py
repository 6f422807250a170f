"""An AsyncBatchedCollector continues from the state of another one, bit for bit."""

import copy
import io
import math
import os
import threading
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import gymnasium
import numpy as np
import nursery
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from multi_parts import TRAJ_IDS, same
from test_resuming import alike, noisy, recurrent, through_a_file
from torch import nn

from trawl.collectors import AsyncBatchedCollector, Collector, RandomPolicy
from trawl.envs import GymEnv, ParallelEnv
from trawl.errors import EnvStateError, WorkerDied
from trawl.testing import ImageEnv, Ledger, NumberedEnv

BACKENDS = pytest.mark.parametrize("backend", ["threading", "multiprocessing"])
PLACES = pytest.mark.parametrize("place", ["threading", "multiprocessing"])


class Sums(nn.Module):
    """Policy for NumberedEnv whose result for an environment does not depend on the others."""

    def forward(self, observation):
        return nn.functional.one_hot(observation.flatten(1).long().sum(-1).abs() % 4, 4)


class Balances(nn.Module):
    """Policy for CartPole, also without any dependence on the others."""

    def forward(self, observation):
        return nn.functional.one_hot((observation[:, 2] + observation[:, 3] > 0).long(), 2)


class Swings(nn.Module):
    """Policy for Pendulum."""

    def forward(self, observation):
        return (observation[:, 2:] * 0.3 - observation[:, 1:2]).clamp(-2, 2)


POLICIES = {"CartPole-v1": Balances, "Pendulum-v1": Swings}


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


def check_each(make, count, batches):
    """Compares each environment's frames with those that follow its state."""
    with make() as collector, make() as other:
        collector.set_seed(1)
        for _ in range(batches):
            collector.next()
        state = through_a_file(collector.state_dict())
        other.load_state_dict(state)
        assert other.resumed
        one, two = streams(until(collector, count)), streams(until(other, count))
    check_streams(one, two)


def check_batches(make, batches, later=6, act=lambda collector: None):
    """Compares whole batches with those that follow a state."""
    with make() as collector, make() as other:
        collector.set_seed(1)
        for _ in range(batches):
            collector.next()
            act(collector)
        other.load_state_dict(through_a_file(collector.state_dict()))
        assert other.resumed
        for _ in range(later):
            assert alike(collector.next(), other.next())
            act(collector), act(other)
        first, second = collector.stats(), other.stats()
    for name in ("frames", "batches", "env_restarts", "policy_version"):
        assert first.get(name) == second.get(name)


LENGTHS = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=4)


# --- each environment goes on


@BACKENDS
@given(
    lengths=LENGTHS, frames=st.integers(1, 13), batches=st.integers(0, 4), each=st.integers(1, 2)
)
@settings(max_examples=12)
def test_each_environment_continues_bit_for_bit(backend, lengths, frames, batches, each):
    def make():
        options = {"env_backend": backend, "envs_per_worker": min(each, len(lengths))}
        return made(numbered(lengths), Sums(), frames, **options)

    check_each(make, len(lengths), batches)


@BACKENDS
@given(name=st.sampled_from(sorted(POLICIES)), frames=st.integers(1, 40), batches=st.integers(0, 5))
@settings(max_examples=6)
def test_environments_of_gymnasium_continue_bit_for_bit(backend, name, frames, batches):
    make = partial(made, [name] * 3, POLICIES[name](), frames, env_backend=backend)
    check_each(make, 3, batches)


@given(frames=st.integers(1, 30), batches=st.integers(0, 4))
@settings(max_examples=5)
def test_environments_continue_if_the_policy_has_a_process(frames, batches):
    envs = numbered([[3, 1], [5], [2, 7]])
    check_each(partial(made, envs, Sums(), frames, policy_backend="multiprocessing"), 3, batches)


def test_images_continue():
    envs = numbered([[3, 1], [5]], ImageEnv)
    check_each(partial(made, envs, Sums(), 7, env_backend="threading"), 2, 3)


# --- whole batches, if the policy waits for all environments


SPACES = {"CartPole-v1": (4, 2), "Pendulum-v1": (3, 1)}


@BACKENDS
@pytest.mark.parametrize("policy", [noisy, recurrent])
@given(
    name=st.sampled_from(sorted(SPACES)),
    count=st.integers(1, 3),
    frames=st.integers(1, 50),
    batches=st.integers(0, 5),
    each=st.integers(1, 2),
)
@settings(max_examples=6)
def test_batches_continue_bit_for_bit(backend, policy, name, count, frames, batches, each):
    def make():
        options = {"env_backend": backend, "envs_per_worker": min(each, count)}
        return made([name] * count, policy(*SPACES[name]), frames, True, **options)

    check_batches(make, batches)


@PLACES
@pytest.mark.parametrize("policy", [noisy, recurrent])
def test_batches_continue_in_both_places_of_the_policy(place, policy):
    options = {"policy_backend": place, "total_frames": 300}
    make = partial(made, ["CartPole-v1"] * 3, policy(4, 2), 35, True, **options)
    check_batches(make, 3, later=7)


@pytest.mark.parametrize("frames", [7, 100])
def test_random_actions_continue(frames):
    policy = RandomPolicy(GymEnv("CartPole-v1").full_action_spec.expand(3))
    check_batches(partial(made, ["CartPole-v1"] * 3, policy, frames, True), 3)


@PLACES
@pytest.mark.parametrize("envs", [["CartPole-v1"] * 3, numbered([[3, 1], [5], [2, 9]])])
def test_whole_trajectories_continue(place, envs):
    options = {"yield_completed_trajectories": True, "policy_backend": place}
    policy = Sums() if callable(envs[0]) else Balances()
    check_batches(partial(made, envs, policy, 7, True, **options), 2, later=4)


@PLACES
@pytest.mark.parametrize("most", [0, 1, 2])
@given(frames=st.integers(2, 9), batches=st.integers(1, 5))
@settings(max_examples=4)
def test_the_limit_of_the_lag_continues(place, most, frames, batches):
    def make():
        envs = numbered([[3, 1], [5], [2, 9], [4]])
        options = {"max_policy_lag": most, "policy_backend": place, "env_backend": "threading"}
        return made(envs, Sums(), frames, place == "threading", **options)

    def update(collector):
        collector.update_policy_weights_()

    if place == "threading":
        check_batches(make, batches, act=update)
    else:
        check_each(make, 4, batches)


# --- restarts


class Fragile(gymnasium.Wrapper):
    """Environment that fails in a certain step, counted since it was made."""

    def __init__(self, name, at):
        super().__init__(gymnasium.make(name))
        self.at, self.taken = at, 0

    def step(self, action):
        self.taken += 1
        if self.taken == self.at:
            raise RuntimeError("the gripper is stuck")
        return super().step(action)


def fragile(*steps):
    return [partial(Fragile, "CartPole-v1", at) for at in steps]


WARNED = pytest.mark.filterwarnings("ignore:.*environment . failed")


@WARNED
@PLACES
@given(frames=st.integers(3, 20), batches=st.integers(0, 5))
@settings(max_examples=4)
def test_restarts_continue_with_their_seeds(place, frames, batches):
    options = {"on_env_error": "restart", "policy_backend": place, "env_backend": "threading"}
    make = partial(made, fragile(5, 10**9, 8), noisy(4, 2), frames, True, **options)
    check_batches(make, batches, later=8)


@WARNED
def test_failures_in_a_row_are_counted_on():
    def failures(collector):
        with pytest.raises(RuntimeError, match="environment 1 failed 10 times"):
            collect_forever(collector)
        return collector.stats()["env_restarts"]

    make = partial(made, ["CartPole-v1", *fragile(1)], Balances(), 2, on_env_error="restart")
    with make() as collector, make() as other:
        while not 3 <= collector.stats()["env_restarts"] < 9:
            collector.next()
        other.load_state_dict(collector.state_dict())
        assert failures(other) == failures(collector) == 9


def collect_forever(collector):
    while True:
        collector.next()


# The flags of the last frame before a failure depend on the batch that the frame is in.
FLAGS = [("next", "done"), ("next", "truncated")]


@WARNED
def test_each_environment_that_is_restarted_continues():
    options = {"on_env_error": "restart", "env_backend": "threading"}
    make = partial(made, fragile(5, 10**9, 8), Balances(), 10, **options)
    with make() as collector, make() as other:
        collector.set_seed(1)
        until(collector, 3)
        other.load_state_dict(through_a_file(collector.state_dict()))
        one, two = (until(each, 3, least=30) for each in (collector, other))
    check_streams(*(streams(frames.exclude(*FLAGS) for frames in each) for each in (one, two)))


@WARNED
def test_restarts_of_other_environments_change_no_seed():
    found = []
    for first in (5, 10**9):
        with made(fragile(first, 8), Balances(), 10, True, on_env_error="restart") as collector:
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
        for _ in range(8):
            collector.next()
        with pytest.warns(RuntimeWarning, match="environment 1 failed"):
            state = through_a_file(collector.state_dict())
        assert collector.stats()["env_restarts"] == 1
        other.load_state_dict(state)
        for _ in range(4):
            assert same(collector.next(), other.next())


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
def test_an_error_in_a_step_under_way_is_raised_by_the_state_and_by_the_next_batch(backend):
    with made([NumberedEnv, BreaksOnce], Sums(), 1, True, env_backend=backend) as collector:
        for _ in range(8):
            collector.next()
        for call in (collector.state_dict, collector.state_dict, collector.rollout):
            with pytest.raises(ValueError, match="environment 1: ValueError: broken"):
                call()
        collector.reset()
        collector.rollout()
        assert "resume" in collector.state_dict()


def test_a_process_that_has_died_is_an_error():
    with made([NumberedEnv, Dies], Sums(), 1, True) as collector:
        for _ in range(8):
            collector.next()
        with pytest.raises(WorkerDied, match="environment 1"):
            collector.state_dict()


# --- what a state does not change


@BACKENDS
@given(lengths=LENGTHS, frames=st.integers(1, 9))
@settings(max_examples=6)
def test_states_change_no_batch(backend, lengths, frames):
    make = partial(made, numbered(lengths), Sums(), frames, True, env_backend=backend)
    with make() as collector, make() as other:
        for _ in range(6):
            collector.state_dict()
            assert same(collector.next(), other.next())


@pytest.mark.parametrize("most", [0, 1, 2])
@pytest.mark.parametrize("frames", [3, 5, 7])
def test_states_change_no_batch_with_a_limit(most, frames):
    """What is finished for a state is noticed when it would have been without the state."""
    envs = numbered([[3, 1], [5], [2, 9], [4]])
    options = {"max_policy_lag": most, "env_backend": "threading"}
    make = partial(made, envs, Sums(), frames, True, **options)
    with make() as collector, make() as other:
        for _ in range(6):
            collector.state_dict()
            assert same(collector.next(), other.next())
    check_batches(make, 2)


@BACKENDS
def test_states_between_batches_lose_no_step(backend):
    lengths = [[3, 1, 7]] * 5
    ledger = Ledger([make() for make in numbered(lengths)])
    with made(numbered(lengths), Sums(), 13, env_backend=backend) as collector:
        for _ in range(30):
            collector.state_dict()
            ledger.add(collector.next())
    assert ledger.frames == 390


def test_a_collector_can_go_back_to_an_earlier_state():
    with made(["CartPole-v1"] * 3, noisy(4, 2), 10, True) as collector:
        collector.set_seed(0)
        collector.next()
        state = collector.state_dict()
        first = [collector.next().clone() for _ in range(5)]
        collector.load_state_dict(state)
        for batch in first:
            assert same(collector.next(), batch)


# --- budgets, buffers, processes


@PLACES
def test_the_budget_goes_on(place):
    make = partial(made, numbered([[3], [4]]), Sums(), 9, total_frames=40, policy_backend=place)
    with make() as collector, make() as other:
        collector.next(), collector.next()
        other.load_state_dict(collector.state_dict())
        assert sum(map(len, other)) == 22


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
        state = through_a_file(collector.state_dict())
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


def continue_from(path):
    """Saves the frames that follow a state; called in another process."""
    with in_processes() as collector:
        collector.load_state_dict(torch.load(path, weights_only=True))
        frames = torch.stack([collector.next().clone() for _ in range(6)])
    frames.save(path + ".frames")


def in_processes():
    return made(["CartPole-v1"] * 3, recurrent(4, 2), 20, True, max_policy_lag=1)


def test_another_process_continues(tmp_path):
    path = str(tmp_path / "state")
    with in_processes() as collector:
        collector.set_seed(5)
        collector.next(), collector.next()
        torch.save(collector.state_dict(), path)
        later = torch.stack([collector.next().clone() for _ in range(6)])
    code = f"import test_resuming_async_batched as tests; tests.continue_from({path!r})"
    done = nursery.run(code, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    assert same(type(later).load(path + ".frames"), later)


def test_the_state_is_small():
    options = {"env_backend": "threading"}
    with made(["CartPole-v1"], noisy(4, 2), 50, **options) as collector:
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
    ("options", "match"),
    [
        ({"envs_per_worker": 2}, "processes with .1, 1, 1. environments, .* with .2, 1.: "),
        ({"max_policy_lag": 1}, "the collector is one with max_policy_lag, but the state is not"),
        ({"on_env_error": "restart"}, "the collector is one with on_env_error='restart', but the"),
        ({"policy_version_key": None}, "the state has torch.int64 .* in begun 'policy_version'"),
    ],
)
def test_the_state_of_a_collector_with_other_options_is_refused(options, match):
    envs = numbered([[3], [4], [5]])
    options = {"env_backend": "threading", **options}
    with made(envs, Sums(), 8, env_backend="threading") as collector:
        collector.next()
        state = collector.state_dict()
    refused(state, ValueError, match, envs, Sums(), 8, **options)


def test_the_state_of_a_collector_with_a_limit_is_refused_without_one():
    envs = numbered([[3], [4]])
    with made(envs, Sums(), 8, max_policy_lag=1) as collector:
        state = collector.state_dict()
    match = "the state is one with max_policy_lag, but the collector is not"
    refused(state, ValueError, match, envs, Sums(), 8)


def test_the_state_of_another_environment_is_refused():
    with made(["CartPole-v1"] * 2, Balances(), 8) as collector:
        state = collector.state_dict()
    match = "its id is CartPole-v1"
    refused(state, EnvStateError, match, numbered([[3], [4]]), Sums(), 8)


def test_collectors_whose_environments_step_together_have_other_states():
    envs = numbered([[3], [4]])
    with made(envs, Sums(), 8) as own, Collector(ParallelEnv(2, envs), Sums(), **EIGHT) as other:
        own.next(), other.next()
        with pytest.raises(ValueError, match=r"the state has torch.int64 .* in begun 'action'"):
            other.load_state_dict(own.state_dict())
        with pytest.raises(ValueError, match="the state has no entry in begun 'action'"):
            own.load_state_dict(other.state_dict())


EIGHT = {"frames_per_batch": 8, "track_policy_version": True}


def test_an_error_in_a_step_under_way_outlasts_a_state_that_is_refused():
    with made(numbered([[5], [5]]), Sums(), 8) as collector:
        state = collector.state_dict()
    with made([NumberedEnv, BreaksOnce], Sums(), 1, True) as collector:
        for _ in range(8):
            collector.next()
        with pytest.raises(EnvStateError, match="another environment: its wrapper chain"):
            collector.load_state_dict(state)
        with pytest.raises(ValueError, match="environment 1: ValueError: broken"):
            collector.rollout()


def test_an_error_in_a_step_under_way_is_raised_when_the_ways_are_told():
    with made([NumberedEnv, BreaksOnce], Sums(), 1, True) as collector:
        for _ in range(8):
            collector.next()
        for call in (collector.env_state_methods, collector.rollout):
            with pytest.raises(ValueError, match="environment 1: ValueError: broken"):
                call()


def test_a_state_replaces_a_step_that_failed():
    with made([NumberedEnv, BreaksOnce], Sums(), 1, True) as collector:
        state = collector.state_dict()
        for _ in range(8):
            collector.next()
        collector.load_state_dict(state)
        for _ in range(8):
            collector.next()


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
        state = through_a_file(collector.state_dict())
        assert "resume" not in state
        # The running collector goes on.
        assert collector.next()["observation"][0, 2] > 0
        collector.load_state_dict(state)
        assert not collector.resumed
        assert collector.next()["observation"][0, 2] == 0


def test_the_ways_are_told_while_environments_step():
    lengths = [[3, 1, 7]] * 3
    ledger = Ledger([make() for make in numbered(lengths)])
    with made(numbered(lengths), Sums(), 7) as collector:
        for _ in range(9):
            ledger.add(collector.next())
            assert collector.env_state_methods() == ["attributes"] * 3


# --- every piece counts


def collected(frames, batches, **options):
    """Returns states after each batch, and the batches that follow."""
    envs = numbered([[3, 1], [5], [2, 9], [4]])
    make = partial(made, envs, ByVersion(), frames, True, env_backend="threading", **options)
    with make() as collector:
        collector.set_seed(1)
        states, found = [], []
        for _ in range(batches):
            found.append(collector.next().clone())
            collector.update_policy_weights_()
            states.append(through_a_file(collector.state_dict()))
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
    make, states, batches = collected(6, 16)
    differs = 0
    for moment in range(4, 12):
        state = copy.deepcopy(states[moment])
        place, old = state["resume"], states[moment - 3]["resume"]
        for key in piece[:-1]:
            place, old = place[key], old[key]
        now, before = place[piece[-1]], old[piece[-1]]
        if isinstance(now, torch.Tensor):
            before = torch.zeros_like(now)
        place[piece[-1]] = before
        with make() as other:
            try:
                other.load_state_dict(state)
                for batch in batches[moment + 1 : moment + 5]:
                    if not same(other.next(), batch):
                        differs += 1
                        break
                    other.update_policy_weights_()
            except (EnvStateError, ValueError, RuntimeError, IndexError):
                differs += 1
    assert differs
