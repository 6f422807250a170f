"""A collector continues from the state of another one, bit for bit."""

import io
import random
from collections import defaultdict

import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from multi_parts import TRAJ_IDS, same
from tensordict.nn import TensorDictModule
from torch import nn

from trawl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from trawl.errors import EnvStateError
from trawl.testing import NumberedEnv


class Noisy(nn.Module):
    """A policy that draws from all three global generators."""

    def __init__(self, inputs, actions):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(inputs, actions)

    def forward(self, observation):
        scores = self.net(observation) + torch.randn(*observation.shape[:-1], 1)
        scores[..., 0] += np.random.normal() + random.random()
        if self.net.out_features == 1:
            return scores.tanh()
        noise = torch.rand_like(scores)
        return nn.functional.one_hot((scores + noise).argmax(-1), self.net.out_features)


class Memory(nn.Module):
    """A recurrent policy, which acts by a mean of what it has seen in the episode."""

    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, observation, hidden):
        before = torch.zeros_like(observation) if hidden is None else hidden
        hidden = 0.9 * before + 0.1 * observation
        return self.head(hidden), hidden


def noisy(inputs, actions):
    return TensorDictModule(Noisy(inputs, actions), ["observation"], ["action"])


def recurrent(inputs, actions):
    keys = ["action", ("next", "hidden")]
    return TensorDictModule(Memory(Noisy(inputs, actions)), ["observation", "hidden"], keys)


SPACES = {"CartPole-v1": (4, 2), "Pendulum-v1": (3, 1), "MountainCar-v0": (2, 3)}
OPTIONS = [
    {},
    {"max_frames_per_traj": 17},
    {"init_random_frames": 100},
    {"trajs_per_batch": 2, "traj_format": "cat", "max_frames_per_traj": 23},
    {"trajs_per_batch": 1, "traj_format": "cat", "traj_sampling": "per_env"},
    {"track_policy_version": True, "set_truncated": True},
    {"total_frames": 60 * 9 + 7, "exact_frames": True},
    {"split_trajs": True},
]


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def alike(one, other):
    return (one is None) == (other is None) and (one is None or same(one, other))


def check(make, batches, later=8):
    """Compares a collector with one that continues from its state."""
    with make() as collector, make() as other:
        collector.set_seed(1)
        for _ in range(batches):
            collector.next()
        other.load_state_dict(through_a_file(collector.state_dict()))
        assert other.resumed
        for _ in range(later):
            assert alike(collector.next(), other.next())
        first, second = collector.stats(), other.stats()
        assert [first[name] for name in ("frames", "batches")] == [
            second[name] for name in ("frames", "batches")
        ]


warned = pytest.mark.filterwarnings(
    "ignore:split_trajs=True pads", "ignore:init_random_frames=100", "ignore:frames_per_batch=60"
)


@warned
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
@given(batches=st.integers(0, 6), name=st.sampled_from(sorted(SPACES)), envs=st.integers(1, 3))
@settings(max_examples=4)
def test_a_collector_continues_bit_for_bit(options, batches, name, envs):
    source = [name] * envs if envs > 1 else name
    check(lambda: Collector(source, noisy(*SPACES[name]), frames_per_batch=60, **options), batches)


@pytest.mark.parametrize("policy", [recurrent, lambda *_: None], ids=["recurrent", "random"])
def test_states_of_policies_go_on(policy):
    make = policy(4, 2)
    check(lambda: Collector(["CartPole-v1"] * 2, make, frames_per_batch=60), 3)


@warned
@pytest.mark.parametrize("options", OPTIONS[:-1], ids=lambda options: "-".join(options) or "plain")
@pytest.mark.parametrize("method", ["inline", "forkserver"])
def test_synchronous_workers_continue_bit_for_bit(options, method):
    sources = [["CartPole-v1"] * 2] * 2
    options = {"frames_per_batch": 60, "start_method": method, **options}
    check(lambda: MultiSyncCollector(sources, noisy(4, 2), **options), 3)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_parts_of_preempted_batches_are_part_of_the_state(prefetch):
    """Each step of each worker is delivered once, before the state or after it."""
    options = {"frames_per_batch": 40, "prefetch": prefetch, "preemptive_threshold": 0.5}

    def make():
        return MultiSyncCollector([NumberedEnv] * 2, **options)

    with make() as collector:
        found = [collector.next().clone() for _ in range(3)]
        state = through_a_file(collector.state_dict())
    with make() as other:
        other.load_state_dict(state)
        assert other.resumed
        found += [other.next().clone() for _ in range(3)]
    for worker in (0, 1):
        rows = torch.cat([batch[worker] for batch in found])
        mask = rows["collector", "mask"]
        steps = rows["observation"][mask][:, 3].tolist()
        assert steps == list(range(len(steps)))


def test_a_batch_that_was_requested_ahead_is_part_of_the_state():
    options = {"frames_per_batch": 60, "prefetch": 1}
    check(lambda: MultiSyncCollector(["CartPole-v1"] * 2, noisy(4, 2), **options), 3)


@pytest.mark.parametrize("method", ["inline", "forkserver"])
def test_each_asynchronous_worker_continues_bit_for_bit(method):
    def streams(collector):
        found = defaultdict(list)
        for _ in range(16):
            batch = collector.next()
            found[int(batch[TRAJ_IDS][0]) % 2].append(batch)
        return found

    def make():
        options = {"frames_per_batch": 30, "start_method": method}
        return MultiAsyncCollector(["CartPole-v1"] * 2, noisy(4, 2), **options)

    with make() as collector, make() as other:
        collector.set_seed(1)
        for _ in range(5):
            collector.next()
        other.load_state_dict(through_a_file(collector.state_dict()))
        one, two = streams(collector), streams(other)
    for worker in (0, 1):
        pairs = list(zip(one[worker], two[worker], strict=False))
        assert len(pairs) > 2
        assert all(same(*pair) for pair in pairs)


@pytest.mark.parametrize("method", [None, "inline", "forkserver"])
def test_without_a_seed_a_collector_continues_bit_for_bit(method):
    def make():
        if method is None:
            return Collector("CartPole-v1", noisy(4, 2), frames_per_batch=60)
        options = {"frames_per_batch": 60, "start_method": method}
        return MultiSyncCollector(["CartPole-v1"] * 2, noisy(4, 2), **options)

    with make() as collector:
        collector.next()
        state = through_a_file(collector.state_dict())
        later = [collector.next() for _ in range(4)]
    torch.manual_seed(5)
    with make() as other:
        other.load_state_dict(state)
        assert all(same(other.next(), batch) for batch in later)


class Scaled:
    """A ``postproc`` that depends on the batches before."""

    def __init__(self):
        self.total = torch.zeros(())

    def __call__(self, batch):
        self.total += batch["next", "reward"].sum()
        return batch.set("scale", self.total.expand(batch.shape).clone())

    def state_dict(self):
        return {"total": self.total.clone()}

    def load_state_dict(self, state):
        self.total.copy_(state["total"])


@pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
def test_the_state_of_postproc_goes_on(cls):
    source = "CartPole-v1" if cls is Collector else ["CartPole-v1"] * 2
    check(lambda: cls(source, noisy(4, 2), frames_per_batch=60, postproc=Scaled()), 3)


@pytest.mark.parametrize(
    "piece",
    [
        ("rollout", "random", "torch"),
        ("rollout", "random", "numpy"),
        ("rollout", "random", "python"),
        ("rollout", "writer", "rows", "'observation'"),
        ("rollout", "writer", "episodes", "next_id"),
        ("rollout", "writer", "episodes", "ids"),
        ("rollout", "writer", "episodes", "steps"),
        ("envs",),
    ],
    ids=lambda piece: piece[-1],
)
def test_each_piece_of_the_state_counts(piece):
    """With a piece of an earlier state, the batches are others, or loading fails."""
    options = {"frames_per_batch": 30, "max_frames_per_traj": 17}
    with Collector("CartPole-v1", noisy(4, 2), **options) as collector:
        collector.set_seed(1)
        collector.next()
        before = through_a_file(collector.state_dict())
        for _ in range(3):
            collector.next()
        state = through_a_file(collector.state_dict())
        expected = [collector.next() for _ in range(4)]
    place, old = state["resume"], before["resume"]
    for key in piece[:-1]:
        place, old = place[key], old[key]
    place[piece[-1]] = old[piece[-1]]
    with Collector("CartPole-v1", noisy(4, 2), **options) as other:
        other.load_state_dict(state)
        assert not all(same(other.next(), batch) for batch in expected)


# --- states that don't fit


def test_ways_are_told():
    with Collector(["CartPole-v1", "CartPole-v1"], frames_per_batch=10) as collector:
        assert collector.env_state_methods() == ["attributes", "attributes"]
    env = AsyncVectorEnv([NumberedEnv], context="fork")
    with Collector(env, frames_per_batch=10) as collector:
        assert collector.env_state_methods() == ["none"]


def test_the_state_of_another_environment_is_refused_or_begins_new_episodes():
    with Collector("CartPole-v1", frames_per_batch=10) as collector:
        collector.next()
        state = collector.state_dict()
    state["resume"]["envs"][0]["env"]["identity"]["id"] = "CartPole-v0"
    with Collector("CartPole-v1", frames_per_batch=10) as other:
        with pytest.raises(EnvStateError, match=r"environment 0: .* its id is CartPole-v0"):
            other.load_state_dict(state)
        with pytest.warns(RuntimeWarning, match="new episodes begin in all environments"):
            other.load_state_dict(state, on_state_mismatch="new_episodes")
        assert not other.resumed
        assert other.next()[TRAJ_IDS].min() >= 1


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Collector(["CartPole-v1"] * 2, frames_per_batch=10), "1 environments.* has 2"),
        (
            lambda: Collector("Pendulum-v1", frames_per_batch=10),
            "environment 0: .* another environment: its id is CartPole-v1",
        ),
        (
            lambda: Collector("CartPole-v1", recurrent(4, 2), frames_per_batch=10),
            "the state has .* in 'action', but the collector has no entry",
        ),
    ],
)
def test_the_state_of_another_collector_is_refused(make, match):
    with Collector("CartPole-v1", frames_per_batch=10) as collector:
        state = collector.state_dict()
    with make() as other, pytest.raises((ValueError, EnvStateError), match=match):
        other.load_state_dict(state, strict=False)


def test_bad_options_of_loading_are_refused():
    with Collector("CartPole-v1", frames_per_batch=10) as collector:
        state = collector.state_dict()
        with pytest.raises(ValueError, match="on_state_mismatch must be one of"):
            collector.load_state_dict(state, on_state_mismatch="ignore")
        with pytest.raises(TypeError, match="trust"):
            collector.load_state_dict(state, trust="yes")
