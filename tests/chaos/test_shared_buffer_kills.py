"""Workers that are killed while they write to a shared replay buffer themselves."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chaos_parts import PATIENCE, Lives, Maker, kill, replaced

from trawl.collectors import MultiAsyncCollector, MultiSyncCollector
from trawl.testing import NumberedEnv

data = pytest.importorskip("torchrl.data")
FRAMES = 200


def shared_buffer() -> Any:
    return data.ReplayBuffer(storage=data.LazyTensorStorage(10_000), shared=True)


def collector_into(buffer: Any, cls: Any, folder: Path, **options: Any) -> Any:
    makers = [Maker(folder, worker) for worker in range(2)]
    options.setdefault("total_frames", FRAMES)
    frames = 20 if cls is MultiSyncCollector else 10
    return cls(makers, frames_per_batch=frames, replay_buffer=buffer, **options)


def kill_once(lives: Lives, _: Any) -> None:
    """Kills the first worker that gets here, after it wrote its batch and before it reports it."""
    if not lives.begin():
        kill()


def each_once(buffer: Any) -> None:
    """Checks that each step of each life of an environment was written once."""
    numbers = NumberedEnv.numbers(buffer[:])[:, [0, 3]]
    assert len(numbers.unique(dim=0)) == len(numbers) == buffer.write_count


@pytest.mark.parametrize(
    ("cls", "background"), [(MultiSyncCollector, False), (MultiAsyncCollector, True)]
)
def test_what_a_dead_worker_has_written_counts(tmp_path: Path, cls: Any, background: bool) -> None:
    buffer = shared_buffer()
    hook = partial(kill_once, Lives(tmp_path / "kills"))
    collector = collector_into(buffer, cls, tmp_path, post_collect_hook=hook)
    with collector, replaced(r"worker \d was killed by SIGKILL", 1):
        if background:
            collector.start()
            while collector.is_running():
                with collector.pause():
                    assert buffer.write_count == collector.stats()["frames"]
        else:
            assert set(collector) == {None}
        assert collector.stats()["frames"] == buffer.write_count == FRAMES
    each_once(buffer)


@pytest.mark.parametrize(
    ("cls", "how"), [(MultiSyncCollector, "shutdown"), (MultiAsyncCollector, "async_shutdown")]
)
def test_all_that_was_written_is_counted_at_the_end(tmp_path: Path, cls: Any, how: str) -> None:
    buffer = shared_buffer()
    collector = collector_into(buffer, cls, tmp_path, total_frames=-1)
    collector.start()
    while len(buffer) < FRAMES:
        collector.stats()
    getattr(collector, how)(PATIENCE)
    assert collector.stats()["frames"] == buffer.write_count
    assert sum(collector.stats("per_worker")[f"worker_{i}/frames"] for i in range(2)) == len(buffer)
    each_once(buffer)


def test_a_batch_is_not_broken_off_while_it_is_written(tmp_path: Path) -> None:
    """A shutdown does not abort a write, which could make the buffer unusable."""
    for number in range(6):
        buffer = shared_buffer()
        folder = tmp_path / str(number)
        folder.mkdir()
        with collector_into(buffer, MultiAsyncCollector, folder, total_frames=-1) as collector:
            for _ in range(5):
                collector.next()
        assert collector.stats()["frames"] == buffer.write_count
        each_once(buffer)
        buffer.extend(buffer[:1].clone())
