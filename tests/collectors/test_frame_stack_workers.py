"""Stacks of frames that workers collect, into shared memory or into messages."""

from __future__ import annotations

import pickle

import pytest
from multi_parts import make
from stack_parts import SIZE, Env, by_stack, check_equal

from trawl import MultiSyncCollector
from trawl.envs import FrameStack

# With short episodes, the first frames do not fit into the memory of a batch.
LENGTHS = {"short": (1, 2), "long": (9, 30)}


def envs(lengths, padding=None, several=True):
    """Environments of two workers; with a padding, Gymnasium's wrapper stacks their frames."""
    flat = [Env(number, lengths, padding) for number in range(4)]
    return [flat[:2], flat[2:]] if several else flat[:2]


def batches(cls, sources, count=3, **options):
    found = []
    options.setdefault("frames_per_batch", 40)
    with make(cls, create_env_fn=sources, policy=by_stack(), **options) as collector:
        collector.set_seed(1)
        for batch in collector:
            found.append(batch)
            if len(found) == count:
                return found
    raise AssertionError


def check(cls, lengths, several=True, **options):
    """Compares the batches of workers that stack frames with those of wrapped environments."""
    found = batches(cls, envs(lengths, None, several), frame_stack=SIZE, **options)
    check_equal(found, batches(cls, envs(lengths, "reset", several), **options))
    return found


@pytest.mark.parametrize(
    ("method", "lengths", "how", "several"),
    [
        ("inline", "short", 0, True),
        ("messages", "short", -1, True),
        ("messages", "long", 0, False),
    ],
)
def test_batches_of_workers_are_combined(method, lengths, how, several):
    options = {"start_method": method, "cat_results": how, "frames_per_batch": 40}
    check(MultiSyncCollector, LENGTHS[lengths], several, **options)


def test_workers_may_have_batches_of_different_lengths():
    check(
        MultiSyncCollector,
        LENGTHS["long"],
        False,
        cat_results=-1,
        frames_per_batch=[12, 30],
    )


def test_worker_processes_write_into_shared_memory():
    options = {"frame_stack": SIZE, "frames_per_batch": 80, "count": 2}
    found, expected = (
        batches(MultiSyncCollector, envs(LENGTHS["long"]), start_method=method, **options)
        for method in ("forkserver", "inline")
    )
    check_equal(found, expected)
    observation, after = found[0]["observation"], found[0]["next", "observation"]
    assert observation.frames is after.frames
    # 20 steps and 4 frames before them of each of 4 environments; room for the first frames.
    assert len(observation.frames) < 4 * 24 + 20


def test_stacks_travel_to_workers():
    stack = FrameStack(SIZE, "zero", keys=["observation"])
    assert pickle.loads(pickle.dumps(stack)) == stack
    options = {"frame_stack": stack, "start_method": "messages"}
    found = batches(MultiSyncCollector, envs((9,)), **options)
    expected = batches(MultiSyncCollector, envs((9,), "zero"), start_method="messages")
    check_equal(found, expected)
