"""Environments of TorchRL that users write, with fewer flags, other dtypes or further entries."""

from functools import partial

import pytest
import torch

pytest.importorskip("torchrl")
from tensordict import TensorDict
from torchrl.data import Binary, Bounded, Categorical, Composite, OneHot, Unbounded
from torchrl.envs import EnvBase

from trawl.collectors import AsyncBatchedCollector, Collector, Evaluator, MultiSyncCollector
from trawl.envs import ParallelEnv
from trawl.rollout.policy.random_policy import RandomPolicy

LENGTH = 4
REWARDS = {"float64": torch.float64, "float16": torch.float16, "int64": torch.int64}
FLAGS = {"no truncated": ("done", "terminated"), "done": ("done",)}


class Own(EnvBase):
    """Counts its steps, in all entries, and ends after some.

    Args:
        kind: what differs from a plain environment.
        batch: its batch size.
        fails: number of the step of its life that fails.
    """

    def __init__(self, kind, batch=(), fails=None):
        super().__init__(batch_size=torch.Size(batch))
        self.kind, self.fails, self.taken = kind, fails, 0
        self.shown = {"observation": Unbounded((*batch, 3))}
        if kind == "nested":
            inner = {"observation": Unbounded((*batch, 2), dtype=torch.int64)}
            self.shown["deep"] = Composite(inner, shape=batch)
        self.observation_spec = Composite(self.shown, shape=batch)
        if kind == "state":
            self.state_spec = Composite(hidden=Unbounded((*batch, 2)), shape=batch)
        self.action_spec = {
            "one-hot": OneHot(3, shape=(*batch, 3)),
            "bounded": Bounded(-1, 1, (*batch, 2)),
            "binary": Binary(2, (*batch, 2), dtype=torch.bool),
        }.get(kind, Categorical(3, shape=batch))
        self.reward_spec = Unbounded((*batch, 1), dtype=REWARDS.get(kind, torch.float32))
        self.flags = FLAGS.get(kind, ("done", "terminated", "truncated"))
        flag = Categorical(2, (*batch, 1), dtype=torch.bool)
        self.full_done_spec = Composite({name: flag.clone() for name in self.flags}, shape=batch)

    def _shown(self):
        frame = TensorDict({}, self.batch_size)
        for key, spec in self.observation_spec.items(True, True):
            frame[key] = torch.full(spec.shape, self.t, dtype=spec.dtype)
        return frame

    def _reset(self, tensordict=None):
        self.t = 0
        frame = self._shown()
        if self.kind == "state":
            frame["hidden"] = torch.zeros(*self.batch_size, 2)
        return frame

    def _step(self, tensordict):
        self.taken += 1
        if self.taken == self.fails:
            raise ZeroDivisionError("worn out")
        self.t += 1
        frame, over = self._shown(), torch.full((*self.batch_size, 1), self.t == LENGTH)
        reward = self.t if self.kind == "int64" else 0.1 * self.t
        frame["reward"] = torch.full(over.shape, reward, dtype=self.reward_spec.dtype)
        for name in self.flags:
            truncated = name == "truncated"
            frame[name] = torch.zeros_like(over) if truncated else over.clone()
        if self.kind == "state":
            frame["hidden"] = tensordict["hidden"] + 1
        return frame

    def _set_seed(self, seed):
        pass


KINDS = [*REWARDS, *FLAGS, "plain", "nested", "one-hot", "bounded", "binary"]
OTHER = {("env_index",), ("policy_version",), ("collector", "traj_ids"), ("action",)}


def entries(batch):
    keys = [(key,) if isinstance(key, str) else key for key in batch.keys(True, True)]
    return {key: batch[key] for key in keys if key not in OTHER}


def assert_same(found, expected):
    found, expected = entries(found), entries(expected)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype is value.dtype, key
        assert torch.equal(found[key], value), key


def batch_of(source, frames=12, **options):
    with Collector(source, None, frames_per_batch=frames, **options) as collector:
        return collector.next()


@pytest.mark.parametrize(
    ("kind", "batch"), [(kind, [(), (2,)][i % 2]) for i, kind in enumerate(KINDS)]
)
def test_all_collectors_deliver_the_frames_of_one_environment(kind, batch):
    make, count = partial(Own, kind, batch), 2 if batch else 1
    expected = batch_of(make, 12 * count)
    with MultiSyncCollector([make] * 2, frames_per_batch=24 * count, start_method="inline") as one:
        assert_same(one.next().reshape(2, *expected.shape)[1], expected)
    found = batch_of(lambda: ParallelEnv(2, make, backend="thread"), 24 * count)
    assert_same(found[1], expected)
    with AsyncBatchedCollector(
        [make] * 2, policy_factory=RandomPolicy, backend="threading", frames_per_batch=24 * count
    ) as collector:
        found = collector.next()
    own = found[found["env_index"] == 0]
    rows = expected.reshape(-1, 12)[0]
    ids = own["collector", "traj_ids"]
    for trajectory in ids.unique().tolist():
        piece = own[ids == trajectory]
        assert_same(piece, rows[: len(piece)])


@pytest.mark.parametrize("kind", FLAGS)
@pytest.mark.parametrize(
    ("options", "truncated"),
    [({"max_frames_per_traj": 3}, [2, 5, 8, 11]), ({"on_env_error": "restart"}, [5])],
)
@pytest.mark.filterwarnings("ignore:.*rebuilt because of on_env_error:RuntimeWarning")
def test_episodes_without_all_flags_can_be_cut_off(kind, options, truncated):
    fails = 7 if "on_env_error" in options else None
    make = partial(ParallelEnv, 2, partial(Own, kind, fails=fails), backend="thread")
    flags = batch_of(make, 24, **options)[0]["next"]
    assert flags["truncated"].flatten().nonzero().flatten().tolist() == truncated
    ends = flags["done"].flatten().nonzero().flatten().tolist()
    assert ends == ([3, 5, 10] if fails else truncated)


@pytest.mark.parametrize("kind", FLAGS)
def test_an_evaluator_takes_them(kind):
    with Evaluator(partial(Own, kind), RandomPolicy(), num_trajectories=1) as evaluator:
        assert evaluator.evaluate()


def test_inputs_besides_actions_are_named():
    options = {"policy_factory": RandomPolicy, "backend": "threading", "frames_per_batch": 8}
    with pytest.raises(ValueError, match="no inputs besides observations and actions"):
        AsyncBatchedCollector([partial(Own, "state")] * 2, **options)


def test_members_with_other_rewards_or_flags_are_refused():
    with pytest.raises(ValueError, match="environment 1 has reward 'reward'"):
        ParallelEnv(2, [partial(Own, "plain"), partial(Own, "float64")], backend="thread")
    with pytest.raises(ValueError, match="environment 1 has done 'truncated': none"):
        ParallelEnv(2, [partial(Own, "plain"), partial(Own, "no truncated")], backend="thread")
