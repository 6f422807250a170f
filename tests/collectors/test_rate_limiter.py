"""Collection in the background that waits for who samples."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multi_parts import CLASSES, envs, make
from trace_parts import reasons

from trawl.collectors import Collector, MultiSyncCollector
from trawl.collectors.driver.background import RateLimiter
from trawl.testing import FaultyEnv, NumberedEnv

PATIENCE = 300
SAMPLE = 8


def buffer() -> Any:
    from torchrl.data import LazyTensorStorage, ReplayBuffer

    return ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=SAMPLE)


def collector(cls: Any, **options: Any) -> Any:
    """A collector of batches of 10 frames; with workers, of each, or of all together."""
    options = {"frames_per_batch": 10, "replay_buffer": buffer(), **options}
    if cls is Collector:
        return Collector(options.pop("create_env_fn", envs(1)[0]), **options)
    return make(cls, **options)


def settled(made: Any, frames: int) -> int:
    """Frames in the buffer, once there are so many and no more are under way."""
    deadline = time.monotonic() + PATIENCE
    while made.config.replay_buffer.write_count < frames:
        assert time.monotonic() < deadline, "nothing more comes"
        time.sleep(0.001)
    with made.pause():
        return made.config.replay_buffer.write_count


@pytest.mark.parametrize("cls", [Collector, *CLASSES])
def test_collection_waits_for_who_samples(cls):
    made = collector(cls, samples_per_insert=2, inserts_ahead=25)
    made.start()
    try:
        assert settled(made, 30) == 30
        for number in range(1, 30):
            assert made.sample().numel() == SAMPLE
            allowed = 25 + number * SAMPLE / 2
            expected = 10 * math.ceil(allowed / 10)
            assert settled(made, expected) == expected
        assert made.is_running()
    finally:
        made.async_shutdown()


@pytest.mark.parametrize(
    ("cls", "options"),
    [(CLASSES[0], {"prefetch": 0}), (CLASSES[0], {"prefetch": 1}), (CLASSES[1], {})],
)
def test_the_timeline_says_that_collection_waits_for_who_samples(tmp_path, cls, options):
    path = tmp_path / "run.json.gz"
    made = collector(cls, samples_per_insert=1, inserts_ahead=10, trace=path, **options)
    made.start()
    try:
        before = settled(made, 10)
        for _ in range(2):
            made.sample()
        settled(made, before + 10)
    finally:
        made.async_shutdown()
    assert "samples_per_insert" in reasons(path, 2)


def test_frames_ahead_are_those_of_two_batches_if_nothing_is_said():
    made = collector(MultiSyncCollector, samples_per_insert=1, init_random_frames=40)
    made.start()
    assert settled(made, 60) == 60
    # A collector that waits can be ended.
    made.async_shutdown(timeout=PATIENCE)
    assert not made.is_running()


def test_iteration_waits_for_nobody_and_counts_for_nothing():
    made = collector(Collector, samples_per_insert=1, inserts_ahead=20, total_frames=1000)
    for _ in range(7):
        made.next()
    made.start()
    try:
        assert settled(made, 90) == 90
    finally:
        made.async_shutdown()


def test_without_a_ratio_samples_are_just_drawn():
    with collector(Collector, total_frames=20) as made:
        list(made)
        assert made.sample().shape == (SAMPLE,)


def test_sampling_needs_a_buffer():
    with (
        Collector(envs(1)[0], frames_per_batch=10) as made,
        pytest.raises(RuntimeError, match=r"sample\(\) needs a replay buffer"),
    ):
        made.sample()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples_per_insert": 0}, "samples_per_insert must be a number above 0, but it is 0"),
        ({"samples_per_insert": True}, "samples_per_insert must be a number above 0"),
        ({"samples_per_insert": "2"}, "samples_per_insert must be a number above 0"),
        ({"samples_per_insert": 1, "inserts_ahead": 0}, "inserts_ahead must be at least 1"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        collector(Collector, **options)


@given(
    ratio=st.floats(0.01, 100),
    ahead=st.integers(1, 1000),
    batch=st.integers(1, 100),
    draws=st.lists(st.integers(1, 300), max_size=30),
)
def test_frames_are_never_further_ahead_than_a_batch(ratio, ahead, batch, draws):
    flow = RateLimiter(ratio, ahead)
    for drawn in [0, *draws]:
        flow.sampled += drawn
        while flow.room():
            flow.inserted += batch
        assert 0 <= flow.inserted - flow.sampled / ratio - ahead < batch + 1e-6


@pytest.mark.parametrize("cls", [Collector, *CLASSES])
def test_frames_that_wait_for_the_end_of_an_episode_are_not_counted(cls):
    # Episodes that are longer than what may be ahead: nobody could sample before one ends.
    options = {"create_env_fn": [lambda: NumberedEnv(0, lengths=[70])], "trajs_per_batch": 1}
    made = collector(cls, samples_per_insert=1, inserts_ahead=20, traj_format="cat", **options)
    made.start()
    try:
        for number in range(1, 4):
            while made.config.replay_buffer.write_count < 70 * number:
                assert made.is_running()
                time.sleep(0.001)
            for _ in range(math.ceil(70 / SAMPLE)):
                assert made.sample().numel() == SAMPLE
    finally:
        made.async_shutdown()


def test_who_samples_hears_what_ended_collection():
    env = FaultyEnv(25, ValueError("no fuel"), number=0, lengths=[100])
    made = collector(Collector, create_env_fn=env)
    made.start()
    while made.is_running():
        time.sleep(0.001)
    with pytest.raises(ValueError, match="no fuel"):
        made.sample()
