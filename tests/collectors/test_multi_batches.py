"""What a batch of several workers looks like, and whose memory it is."""

import gc

import gymnasium
import numpy as np
import pytest
import torch
from collector_parts import by_step, layout
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from multi_parts import BOTH, TRAJ_IDS, envs, ledger, make, together, worker_of

from trawl.collectors import Collector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from trawl.testing import NumberedEnv, RaggedEnv


def vector_env(first, lanes=3):
    return SyncVectorEnv(
        [lambda i=i: NumberedEnv(first + i, lengths=[3, 5, 1]) for i in range(lanes)]
    )


# Three environments in each of two workers, in every way to say it.
BATCHED = {
    "lists of lists": lambda: envs(2, 3),
    "vector envs": lambda: [lambda: vector_env(0), lambda: vector_env(3)],
}


# --- shapes


@pytest.mark.parametrize("how", [None, "stack", 0, -1])
def test_batches_of_single_environments(how):
    shape, names = ((2, 10), [None, "time"]) if how in (None, "stack") else ((20,), ["time"])
    with make(frames_per_batch=20, cat_results=how) as collector:
        batch = collector.next()
    assert batch.shape == shape
    assert batch.names == names
    rows = NumberedEnv.numbers(batch)[..., 0].reshape(2, 10)
    assert rows.tolist() == [[0] * 10, [1] * 10]


@pytest.mark.parametrize(
    ("source", "how", "shape"),
    [
        ("lists of lists", None, (2, 3, 10)),
        ("vector envs", "stack", (2, 3, 10)),
        ("lists of lists", 0, (6, 10)),
        ("vector envs", -1, (3, 20)),
    ],
)
def test_batches_of_batched_environments(source, how, shape):
    collector = make(
        create_env_fn=BATCHED[source](), frames_per_batch=60, cat_results=how, total_frames=120
    )
    book = ledger(2, 3)
    with collector:
        for batch in collector:
            book.add(batch)
            assert batch.shape == shape
            assert batch.names == [*[None] * (len(shape) - 1), "time"]
            numbers = NumberedEnv.numbers(batch)[..., 0]
            if how == -1:
                assert numbers[:, [0, -1]].tolist() == [[0, 3], [1, 4], [2, 5]]
            else:
                assert numbers.reshape(6, 10)[:, 0].tolist() == list(range(6))
    assert book.frames == 120


@pytest.mark.parametrize(("lanes", "how"), [(2, "stack"), (2, 0), (None, -1)])
def test_a_fake_batch_has_the_layout_of_a_real_one(how, lanes):
    with make(
        lanes=lanes,
        cat_results=how,
        frames_per_batch=12,
        track_policy_version=True,
        compact_obs=how == 0,
    ) as collector:
        fake, real = collector.fake_tensordict(), collector.next()
    assert layout(fake) == layout(real)
    assert (fake.shape, fake.names) == (real.shape, real.names)


def test_there_is_no_rollout():
    with make() as collector, pytest.raises(NotImplementedError, match=r"use next\(\)"):
        collector.rollout()


@BOTH
def test_trajectory_ids_are_the_workers_own(cls):
    with make(cls, workers=3, frames_per_batch=12, total_frames=120) as collector:
        found = {}
        for batch in collector:
            for row in batch if together(cls) else [batch]:
                found.setdefault(worker_of(row), set()).update(row[TRAJ_IDS].tolist())
    assert batch[TRAJ_IDS].dtype is torch.int64
    everything = [number for ids in found.values() for number in ids]
    assert len(everything) == len(set(everything))
    assert {number % 3 for number in found[1]} == {1}


# --- entries that have no fixed layout, or not the same everywhere


def test_ragged_entries_of_batched_environments():
    book = ledger(2, 2, kind=RaggedEnv)
    with make(
        create_env_fn=envs(2, 2, kind=RaggedEnv),
        policy=None,
        frames_per_batch=20,
        total_frames=40,
        cat_results=-1,
    ) as collector:
        for batch in collector:
            book.add(batch)
    assert book.frames == 40


class Wide(gymnasium.Env):
    """Observes a vector of any width."""

    def __init__(self, width):
        self.observation_space = spaces.Box(-1, 1, (width,), np.float32)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(self.observation_space.shape, np.float32), {}

    def step(self, action):
        return np.ones(self.observation_space.shape, np.float32), 1.0, False, False, {}


def test_workers_with_other_observations_take_turns():
    with MultiAsyncCollector(
        [lambda: Wide(2), lambda: Wide(3)],
        frames_per_batch=5,
        total_frames=40,
        start_method="inline",
    ) as collector:
        shapes = [tuple(batch["observation"].shape) for batch in collector]
    assert set(shapes) == {(5, 2), (5, 3)}
    assert len(shapes) == 8


def test_workers_with_other_observations_stack_lazily():
    with MultiSyncCollector(
        [lambda: Wide(2), lambda: Wide(3)], frames_per_batch=10, start_method="inline"
    ) as collector:
        batch = collector.next()
        assert batch.shape == (2, 5)
        assert [row["observation"].shape for row in batch] == [(5, 2), (5, 3)]
        assert batch["next", "reward"].shape == (2, 5, 1)
        assert collector.next()[0]["observation"].shape == (5, 2)


class Named(NumberedEnv):
    """Observes the numbers under a name of its own."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.observation_space = spaces.Dict({name: self.observation_space})

    def _observe(self):
        return {self.name: super()._observe()}


def test_observations_with_other_names_are_left_out_of_next_too():
    with MultiAsyncCollector(
        [lambda: Named("a"), lambda: Named("b")],
        frames_per_batch=5,
        total_frames=40,
        compact_obs=True,
        start_method="inline",
    ) as collector:
        found = {tuple(sorted(batch["next"].keys())) for batch in collector}
    assert found == {("done", "reward", "terminated", "truncated")}


# --- memory


@BOTH
def test_memory_grows_while_batches_are_kept_and_shrinks_after(cls):
    with make(cls, frames_per_batch=20) as collector:
        collector.next()
        before = collector.stats()["memory_bytes"]
        kept = [collector.next() for _ in range(30)]
        stats = collector.stats()
        assert stats["batches_held"] >= 30
        assert stats["memory_bytes"] >= sum(
            value.nbytes for batch in kept for value in batch.values(True, True)
        )
        # Whatever refers to a batch keeps it.
        part = kept[3]["observation"][..., 1:, 2]
        as_it_was = part.clone()
        del kept
        gc.collect()
        for _ in range(30):
            collector.next()
        assert torch.equal(part, as_it_was)
        assert collector.stats()["memory_bytes"] <= before + 8 * stats["memory_bytes"] / 31
        # Workers are told to forget what is not used again.
        assert all(len(member.known) < 30 for member in collector._pool.slots)


@BOTH
def test_writing_into_a_batch_changes_no_other(cls):
    book = ledger(2)
    with make(cls, total_frames=100) as collector:
        kept = None
        for batch in collector:
            book.add(batch)
            batch["observation"].zero_()
            batch["next", "done"].fill_(True)
            batch.set("advantage", torch.zeros(batch.shape))
            if kept is not None:
                assert not kept["observation"].any()
            kept = batch
    assert book.frames == 100


# --- which class


@pytest.mark.parametrize(
    ("sync", "cls"), [(True, MultiSyncCollector), (False, MultiAsyncCollector)]
)
def test_sync_says_which_class(sync, cls):
    with MultiCollector(
        envs(2), by_step(), sync=sync, frames_per_batch=10, start_method="inline"
    ) as collector:
        assert type(collector) is cls
        assert isinstance(collector, MultiCollector)
        assert not isinstance(collector, Collector)
        assert collector.next().shape == ((2, 5) if sync else (10,))


@pytest.mark.parametrize("sync", [None, 1, "yes"])
def test_sync_must_be_said(sync):
    with pytest.raises(
        TypeError, match=rf"needs sync=True .* or sync=False .* but sync is {sync!r}"
    ):
        MultiCollector(envs(2), sync=sync, frames_per_batch=10)


def test_sync_must_be_that_of_the_class():
    with pytest.raises(
        ValueError, match=r"MultiSyncCollector always has sync=True, but sync=False was passed"
    ):
        MultiSyncCollector(envs(2), sync=False, frames_per_batch=10)


def test_one_thing_serves_several_workers():
    with make(create_env_fn=NumberedEnv, num_workers=3, frames_per_batch=12) as collector:
        assert collector.num_workers == 3
        assert collector.create_env_fn == [NumberedEnv] * 3
        assert collector.next().shape == (3, 4)


def test_a_collector_shows_what_it_is():
    with make(frames_per_batch=10, total_frames=30) as collector:
        assert repr(collector) == (
            "MultiSyncCollector(num_workers=2, frames_per_batch=10, total_frames=30)"
        )
