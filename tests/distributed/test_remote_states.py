"""Collectors over networks continue from a state, and from snapshots of workers, bit for bit."""

import io

import pytest
import torch
from distributed_parts import CLASSES, kill_one, make

from trawl.collectors.distributed import DistributedSyncCollector

ALL = [CLASSES[1], DistributedSyncCollector]


def made(cls, **options):
    sync = {} if cls is DistributedSyncCollector else {"sync": True}
    return make(cls, **sync, **options)


def same(one, other):
    return one.shape == other.shape and bool((one == other).all())


def batches(collector, count):
    return [collector.next().clone() for _ in range(count)]


@pytest.mark.parametrize("cls", ALL)
def test_a_collector_continues(cls):
    with made(cls) as collector:
        collector.set_seed(1)
        collector.next()
        file = io.BytesIO()
        torch.save(collector.state_dict(), file)
        expected = batches(collector, 3)
    file.seek(0)
    with made(cls) as other:
        other.load_state_dict(torch.load(file, weights_only=True))
        found = batches(other, 3)
    assert all(same(*pair) for pair in zip(found, expected, strict=True))


def test_a_collector_resumes_from_its_checkpoint(tmp_path):
    with made(CLASSES[0]) as collector:
        collector.set_seed(1)
        collector.next()
        collector.checkpoint(tmp_path, extra={"step": 1})
        expected = collector.next().clone()
    with made(CLASSES[0]) as other:
        assert other.load_checkpoint(tmp_path)
        assert other.extra == {"step": 1}
        assert same(other.next(), expected)


@pytest.mark.parametrize(("cls", "every"), [(CLASSES[0], 1), (CLASSES[1], 3)])
@pytest.mark.filterwarnings("ignore:worker 0 .* a new worker takes its place:RuntimeWarning")
def test_a_kill_changes_no_frame(cls, every):
    with made(cls) as collector:
        collector.set_seed(1)
        expected = batches(collector, 8)
    with made(cls, worker_snapshots=every) as collector:
        collector.set_seed(1)
        found = batches(collector, 5)
        kill_one(collector)
        found += batches(collector, 3)
        assert collector.stats()["restarts"] == 1
    assert all(same(*pair) for pair in zip(found, expected, strict=True))
