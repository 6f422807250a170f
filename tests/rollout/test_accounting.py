"""Each step of each environment is delivered once, in order, and told right.

The environments number their own steps, so nothing can be lost, doubled or mixed up unseen.
"""

import warnings
from dataclasses import dataclass

import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from trawl.collectors import Collector
from trawl.testing import (
    ImageEnv,
    Ledger,
    NestedEnv,
    NumberedEnv,
    RaggedEnv,
    SelfResettingVectorEnv,
)


def as_single(envs):
    return envs[0]


def as_list(envs):
    return list(envs)


def as_vector(mode):
    def build(envs):
        return SyncVectorEnv([lambda env=env: env for env in envs], autoreset_mode=mode)

    return build


def as_nested(mode):
    """A list of vector environments."""

    def build(envs):
        half = len(envs) // 2
        return [as_vector(mode)(part) for part in (envs[:half], envs[half:])]

    return build


def as_self_resetting(envs):
    return SelfResettingVectorEnv([lambda env=env: env for env in envs])


def as_self_resetting_list(envs):
    half = len(envs) // 2
    return [as_self_resetting(envs[:half]), as_self_resetting(envs[half:])]


NEXT, SAME, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED

# How the environments are put together, and how many of them there may be.
ONE = {"single": (as_single, [1])}
ANY = {
    "list": (as_list, [1, 2, 3]),
    "next-step": (as_vector(NEXT), [1, 2, 3]),
    "same-step": (as_vector(SAME), [1, 2, 3]),
    "disabled": (as_vector(DISABLED), [1, 2, 3]),
    "nested next-step": (as_nested(NEXT), [2, 4]),
    "nested same-step": (as_nested(SAME), [2, 4]),
}
SELF_RESETTING = {
    "self-resetting": (as_self_resetting, [1, 2, 3]),
    "self-resetting list": (as_self_resetting_list, [2, 4]),
}


@dataclass
class Run:
    """What is collected, and what happens between batches."""

    lengths: list
    ends: list
    frames_per_batch: int
    limit: int | None
    marks: bool
    between: list  # for each batch after the first: what is reset before it
    stops: list  # for each batch: after how many steps it is interrupted, or None


def staggered(count, frames_per_batch=20, limit=4, partial=True):
    """Episodes of different lengths, so that environments end at different steps."""
    return Run(
        lengths=[[3 + number, 1, 6 - number] for number in range(count)],
        ends=[["terminated", "truncated"], ["both"], ["truncated"], ["terminated"]][:count],
        frames_per_batch=frames_per_batch,
        limit=limit,
        marks=True,
        between=[None, [0] if partial else None, True],
        stops=[None, 3, None, None],
    )


class Interruptor:
    """Ends a batch after so many steps."""

    def __init__(self):
        self.left = None

    def collection_stopped(self):
        if self.left is None:
            return False
        self.left -= 1
        return self.left <= 0


def check(kind, build, run, path):
    """Collects, and compares what was delivered with what the environments did."""
    envs = [
        kind(number, lengths=lengths, ends=ends)
        for number, (lengths, ends) in enumerate(zip(run.lengths, run.ends, strict=True))
    ]
    ledger = Ledger(envs, run.limit)
    interruptor = Interruptor()
    with warnings.catch_warnings():
        # Batches that don't divide evenly are rounded up, which is not what this is about.
        warnings.filterwarnings("ignore", "frames_per_batch=")
        collector = Collector(
            build(envs),
            frames_per_batch=run.frames_per_batch,
            max_frames_per_traj=run.limit,
            auto_register_policy_transforms=run.marks,
            interruptor=interruptor,
        )
    with collector:
        for what, interruptor.left in zip([None, *run.between], run.stops, strict=True):
            if what is True:
                collector.reset()
                ledger.reset()
            elif what is not None:
                shape = tuple(collector.env.batch_size)
                for number in what:
                    collector.reset(divmod(number, shape[-1]) if len(shape) > 1 else number)
                    ledger.reset(number)
            ledger.add(collector.next())
        stats = collector.stats()
    assert stats["env_path"] == path
    assert stats["frames"] == ledger.frames
    assert [len(env.actions) for env in envs] == list(ledger.steps.values())


KINDS = [NumberedEnv, ImageEnv, NestedEnv]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for i, name in enumerate([*ONE, *ANY, *SELF_RESETTING])
        for kind in (KINDS[i % 3], RaggedEnv)
    ],
)
def test_every_step_is_delivered_once_and_in_order(name, kind):
    """A step that is spent on resetting is no frame."""
    build, counts = (ONE | ANY | SELF_RESETTING)[name]
    options = {"limit": None, "partial": False} if name in SELF_RESETTING else {}
    run = staggered(counts[-1], **options)
    check(kind, build, run, "tensordict" if kind is RaggedEnv else "array")


@pytest.mark.parametrize(
    ("mode", "shared_memory"), [(NEXT, True), (NEXT, False), (SAME, False), (DISABLED, True)]
)
def test_environments_in_processes_are_accounted_for(mode, shared_memory):
    lengths = [[2, 3], [1, 4]]
    envs = [NumberedEnv(number, lengths[number]) for number in range(2)]
    env = AsyncVectorEnv(
        [lambda env=env: env for env in envs],
        shared_memory=shared_memory,
        autoreset_mode=mode,
        context="fork",
    )
    ledger = Ledger(envs)
    with Collector(env, frames_per_batch=10, total_frames=40) as collector:
        for batch in collector:
            ledger.add(batch)
    assert ledger.frames >= 40


def test_a_batch_longer_than_a_stretch_of_the_loop_is_accounted_for():
    run = staggered(2, frames_per_batch=2500)
    check(NumberedEnv, as_list, run, "array")
