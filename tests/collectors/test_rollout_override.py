"""A subclass may collect batches in its own way: by an override of ``rollout()``."""

from functools import partial, wraps

import pytest
import torch
from collector_parts import Buffer, by_step
from multi_parts import CLASSES, envs, make
from tensordict import TensorDict

from trawl.collectors import Collector
from trawl.testing import Ledger, NumberedEnv

LENGTHS = [3, 5, 1]
env = partial(NumberedEnv, lengths=LENGTHS)


class Marked(Collector):
    """Adds an entry to each batch, in a method that looks like the usual one."""

    @wraps(Collector.rollout)
    def rollout(self):
        batch = super().rollout()
        return None if batch is None else batch.set("mark", torch.ones(batch.shape))


class Shortened(Collector):
    """Drops the last three rows of each batch."""

    def rollout(self):
        return super().rollout()[..., :-3]


class Doubled(Collector):
    """Collects twice for each batch."""

    def rollout(self):
        return torch.cat([super().rollout(), super().rollout()], -1)


class Invented(Collector):
    """Never calls the method that it overrides."""

    def rollout(self):
        return TensorDict({"x": torch.ones(10)}, [10])


def test_iteration_delivers_what_an_override_returns():
    ledger = Ledger([env()])
    with Marked(env, by_step(), frames_per_batch=10, total_frames=30) as collector:
        for batch in collector:
            assert batch.pop("mark").sum() == 10
            ledger.add(batch)
        assert collector.stats()["frames"] == ledger.frames == 30


@pytest.mark.parametrize(
    ("kind", "rows", "batches", "hooks"),
    [(Shortened, 7, 5, 5), (Doubled, 20, 2, 4), (Invented, 10, 3, 0)],
)
def test_a_batch_of_another_length_is_counted_as_it_is(kind, rows, batches, hooks):
    calls, options = [], {"frames_per_batch": 10, "total_frames": 30}
    collector = kind(env, by_step(), pre_collect_hook=lambda: calls.append(1), **options)
    with collector:
        found = list(collector)
        assert [len(batch) for batch in found] == [rows] * batches
        assert collector.stats()["frames"] == rows * batches
    assert len(calls) == hooks


def test_an_override_that_returns_nothing_is_told_so():
    collector = Collector(env, by_step(), frames_per_batch=10)
    collector.rollout = lambda: None
    with collector, pytest.raises(TypeError, match=r"Collector.rollout\(\) must return the batch"):
        collector.next()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("extend", [True, False])
def test_a_buffer_gets_what_an_override_returns(extend, background):
    """But for steps that are added one by one, within the call."""
    buffer = Buffer()
    with Marked(
        env,
        by_step(),
        frames_per_batch=10,
        total_frames=30,
        replay_buffer=buffer,
        extend_buffer=extend,
    ) as collector:
        if background:
            collector.start()
            buffer.wait_for(30)
        else:
            assert list(collector) == [None] * 3
    Ledger([env()]).add(buffer.content().exclude("mark"))
    assert ("mark" in buffer.content().keys(True)) == extend


def test_frames_that_were_made_elsewhere_are_added_one_by_one_if_asked():
    calls = []

    class Sink:
        def add(self, frame):
            calls.append(("add", frame.batch_size))

        def extend(self, batch):
            calls.append(("extend", batch.batch_size))

    for extend in (True, False):
        with Invented(
            env,
            by_step(),
            frames_per_batch=10,
            total_frames=10,
            replay_buffer=Sink(),
            extend_buffer=extend,
        ) as collector:
            list(collector)
    assert calls == [("extend", (10,)), *[("add", ())] * 10]


def test_an_interruption_is_seen_through_an_override():
    stops = iter([False] * 3 + [True])
    with Marked(env, by_step(), frames_per_batch=10, interruptor=lambda: next(stops)) as collector:
        batch = collector.next()
        assert (len(batch), collector.stats()["frames"]) == (10, 4)
        assert (batch["collector", "traj_ids"] >= 0).sum() == 4


@pytest.mark.parametrize(
    ("cls", "method"),
    [(CLASSES[0], "inline"), (CLASSES[0], "forkserver"), (CLASSES[1], "messages")],
)
def test_workers_call_it(cls, method):
    collector = make(
        cls, collector_class=Marked, start_method=method, total_frames=40, init_random_frames=10
    )
    ledger = Ledger([one() for one in envs(2)])
    with collector:
        found = list(collector)
    for batch in found:
        assert batch.pop("mark").sum() == batch.numel()
        ledger.add(batch)
    assert ledger.frames == 40


def test_workers_deliver_batches_of_any_length():
    with make(collector_class=Shortened, frames_per_batch=20) as collector:
        assert [collector.next().shape for _ in range(2)] == [(2, 7), (2, 7)]
        assert collector.stats()["frames"] == 28
    # Slow workers are interrupted in it.
    with make(collector_class=Marked, frames_per_batch=20, preemptive_threshold=0.5) as collector:
        batch = collector.next()
        mask = batch["collector", "mask"]
        assert batch["mark"][mask].all()
        assert 10 <= int(mask.sum()) == collector.stats()["frames"]


def test_an_object_may_have_a_rollout_of_its_own():
    with Collector(NumberedEnv, frames_per_batch=4, total_frames=12) as collector:

        def hides():
            batch = type(collector).rollout(collector).clone()
            batch["_secret"] = torch.zeros(4)
            batch["collector", "mask"] = torch.tensor([False, True, True, True])
            return batch

        collector.rollout = hides
        batches = list(collector)
    assert len(batches) == 4
    assert all("_secret" not in batch.keys() for batch in batches)  # noqa: SIM118
    assert sum(int(batch["collector", "mask"].sum()) for batch in batches) == 12
