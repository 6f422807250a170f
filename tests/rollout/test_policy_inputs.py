"""A policy may do with its input what it likes: the frames are as the environment gave them.

For every kind of environment, the property compares what careless policies leave with the oracle.
"""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule, TensorDictModuleBase
from torch import nn

from trawl.collectors import Collector
from trawl.envs import GymEnv
from trawl.rollout.policy.modules import leaves_inputs_alone
from trawl.testing import Ledger, NumberedEnv, RaggedEnv

LENGTHS = [3, 1, 4]


def in_inference_mode(value):
    with torch.inference_mode():
        value.fill_(1)


WAYS = {
    "tensor": lambda value: value.fill_(1),
    "numpy": lambda value: value.numpy().fill(1),
    "data": lambda value: value.data.fill_(1),
    "inference mode": in_inference_mode,
}


class Spoiling(TensorDictModuleBase):
    """Acts at random, and after some calls writes into all tensors that it is given."""

    def __init__(self, spec, way="tensor", after=0):
        super().__init__()
        self.in_keys, self.out_keys = [], list(spec.keys(True, True))
        self.spec, self.way, self.after, self.calls = spec, WAYS[way], after, 0

    def forward(self, tensordict):
        self.calls += 1
        if self.calls > self.after:
            for value in tensordict.values(True, True):
                if isinstance(value, torch.Tensor):
                    self.way(value)
            if "graph" in tensordict and not tensordict.batch_size:
                tensordict.get("graph").data.nodes[:] = -1
        return tensordict.update(self.spec.rand())


@pytest.mark.parametrize("after", [0, 2, 10])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [NumberedEnv, RaggedEnv])
def test_what_is_written_into_an_input_is_not_delivered(kind, way, after):
    env = kind(lengths=LENGTHS)
    ledger, spec = Ledger([env]), GymEnv(kind()).full_action_spec
    with Collector(env, Spoiling(spec, way, after), frames_per_batch=7) as collector:
        for _ in range(3):
            batch = collector.next()
            ledger.add(batch)
            if kind is RaggedEnv:
                for frame in batch:
                    steps = int(frame["observation"][2]) + 1
                    nodes = frame.get("graph").data.nodes[:, 0].tolist()
                    assert nodes == list(map(float, range(steps)))


class Shrink(nn.Module):
    """What a policy for images does: it divides its input, in place if that is of floats."""

    def forward(self, x):
        x = x.float()
        x /= 255
        return torch.eye(4, dtype=torch.int64)[0].expand(*x.shape[:-1], 4)


def shrink(observation):
    return Shrink()(observation)


def in_module(function):
    return TensorDictModule(function, ["observation"], ["action"])


class Large(gymnasium.Env):
    """Observes more than is copied by numpy."""

    observation_space = spaces.Box(-np.inf, np.inf, (50, 50), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)
    step_count = 0

    def reset(self, *, seed=None, options=None):
        return self.observe(), {}

    def step(self, action):
        return self.observe(), 0.0, False, False, {}

    def observe(self):
        self.step_count += 1
        return np.full((50, 50), self.step_count, np.float32)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [1, 2])
def test_large_observations(count, way):
    source = Large() if count == 1 else [Large, Large]
    spec = GymEnv(Large()).full_action_spec
    with Collector(
        source, Spoiling(spec if count == 1 else spec.expand(2), way, 0), frames_per_batch=4 * count
    ) as collector:
        for first in (1, 5):
            batch = collector.next()
            seen = batch["observation"][..., 0, 0].reshape(count, 4)
            assert seen.tolist() == [list(range(first, first + 4))] * count
            assert (batch["next", "observation"][..., 0, 0].reshape(count, 4) == seen + 1).all()


@pytest.mark.parametrize(
    ("module", "known"),
    [
        (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), True),
        (nn.Sequential(nn.ReLU(inplace=True), nn.Linear(3, 1)), False),
        (nn.Sequential(nn.Linear(3, 4), Shrink()), False),
        (shrink, False),
    ],
)
def test_modules_that_are_known_get_the_memory_of_the_batch_itself(module, known):
    assert leaves_inputs_alone(in_module(module)) is known


class Returning(gymnasium.Env):
    """Returns observations as ``give`` makes them from the number of the step.

    Attributes:
        places: the addresses of the observations.
    """

    observation_space = spaces.Box(-1000, 1000, (3,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, give):
        self.give, self.number, self.places = give, 0, []

    def observe(self):
        self.number += 1
        obs = self.give(np.float32(self.number))
        self.places.append(obs.ctypes.data)
        return obs

    def reset(self, *, seed=None, options=None):
        return self.observe(), {}

    def step(self, action):
        return self.observe(), 0.0, False, False, {}


def new(number):
    return np.full(3, number, np.float32)


class KeepingArrays:
    """Keeps all observations that it made."""

    def __init__(self):
        self.made = []

    def __call__(self, number):
        self.made.append(new(number))
        return self.made[-1]


class KeepingViews(KeepingArrays):
    def __call__(self, number):
        return super().__call__(number)[:]


class Overwriting:
    """Returns the same memory each time, as a view of something that is no array."""

    def __init__(self):
        self.memory = bytearray(12)

    def __call__(self, number):
        obs = np.frombuffer(self.memory, np.float32)
        obs[:] = number
        return obs


def spoiling(seen):
    def policy(observation):
        seen.append((observation.data_ptr(), observation.clone()))
        observation.fill_(-1)
        return torch.zeros(*observation.shape[:-1], 1)

    return policy


GIVEN = {
    "new": new,
    "kept": KeepingArrays(),
    "views of what is kept": KeepingViews(),
    "one memory": Overwriting(),
    "view": lambda number: np.full((3, 1), number, np.float32)[:, 0],
    "backwards": lambda number: np.asfortranarray(new(number))[::-1],
    "big endian": lambda number: new(number).astype(">f4"),
}


@pytest.mark.parametrize("give", GIVEN.values(), ids=GIVEN)
def test_what_a_policy_writes_reaches_neither_the_batch_nor_the_environment(give):
    seen = []
    with Collector(Returning(give), spoiling(seen), frames_per_batch=6) as collector:
        batches = [collector.next() for _ in range(2)]
    numbers = torch.cat([batch["observation"] for batch in batches])[:, 0]
    assert numbers.tolist() == list(range(1, 13))
    after = torch.cat([batch["next", "observation"] for batch in batches])
    assert (after == torch.arange(2, 14)[:, None]).all()
    assert [int(first[0]) for _, first in seen[-12:]] == list(range(1, 13))
    for made in getattr(give, "made", ()):
        assert (made > 0).all()


def test_a_policy_reads_a_new_observation_where_the_environment_made_it():
    env, seen = Returning(new), []
    with Collector(env, spoiling(seen), frames_per_batch=6) as collector:
        collector.next()
    # The first observation of a batch comes from the batch before.
    assert [place for place, _ in seen[-5:]] == env.places[-6:-1]


KEPT = {
    "all": lambda observation: observation,
    "views": lambda observation: observation[1:],
    "arrays": lambda observation: torch.from_numpy(observation.numpy()[:2]),
}


@pytest.mark.parametrize(
    ("keep", "give", "count"),
    [
        ("all", new, 1),
        ("views", new, 2),
        ("arrays", new, 1),
        ("all", KeepingArrays(), 2),
        ("views", KeepingArrays(), 1),
        ("arrays", KeepingArrays(), 2),
    ],
)
def test_inputs_that_a_policy_keeps_stay_as_they_were(count, give, keep):
    kept = []

    def policy(observation):
        part = KEPT[keep](observation)
        kept.append((part, part.clone()))
        return torch.zeros(*observation.shape[:-1], 1)

    envs = [Returning(give) for _ in range(count)]
    source = envs[0] if count == 1 else envs
    with Collector(source, policy, frames_per_batch=6 * count) as collector:
        for _ in range(3):
            collector.next()
    assert all(torch.equal(part, before) for part, before in kept)


def test_copies_for_a_policy_that_keeps_none_share_one_memory():
    seen = []
    with Collector([Returning(new)] * 2, spoiling(seen), frames_per_batch=24) as collector:
        for _ in range(3):
            collector.next()
    assert len({place for place, _ in seen[-36:]}) == 1
