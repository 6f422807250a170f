"""Each step of each environment is delivered once and in order, whatever the environments are in.

The environments number their own steps, so nothing can be lost, doubled or mixed up unseen.
"""

from functools import partial
from itertools import cycle

import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from trawl.collectors import Collector
from trawl.testing import (
    ImageEnv,
    Ledger,
    NestedEnv,
    NumberedEnv,
    RaggedEnv,
    SelfResettingVectorEnv,
)

NEXT, SAME, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED


def vector(mode, makers):
    return SyncVectorEnv(makers, autoreset_mode=mode)


# Lists of vector environments with two environments each.
LISTS = {
    "next step": partial(vector, NEXT),
    "same step": partial(vector, SAME),
    "disabled": partial(vector, DISABLED),
    # A step that is spent on resetting is no frame.
    "self-resetting": SelfResettingVectorEnv,
}


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("kind", [NestedEnv, ImageEnv, RaggedEnv])
def test_every_step_of_a_list_of_vectors_is_delivered_once(kind, name):
    lengths, ends = (
        [[3 + i, 1, 6 - i] for i in range(4)],
        cycle(["terminated", "both", "truncated"]),
    )
    envs = [kind(i, lengths=lengths[i], ends=[next(ends), next(ends)]) for i in range(4)]
    makers = [lambda env=env: env for env in envs]
    source = [LISTS[name](makers[:2]), LISTS[name](makers[2:])]
    limit = None if name == "self-resetting" else 4
    ledger, asked = Ledger(envs, limit), []
    options = {"frames_per_batch": 20, "max_frames_per_traj": limit}
    interruptor = lambda: bool(asked.append(1)) or len(asked) == 8  # noqa: E731
    with Collector(source, interruptor=interruptor, **options) as collector:
        for reset in (None, None, (0, 1), None, True):
            if reset is True:
                collector.reset()
                ledger.reset()
            elif reset is not None and limit:
                collector.reset(reset)
                ledger.reset(1)
            ledger.add(collector.next())
        stats = collector.stats()
    assert stats["env_path"] == ("tensordict" if kind is RaggedEnv else "array")
    assert stats["frames"] == ledger.frames
    assert [len(env.actions) for env in envs] == list(ledger.steps.values())


def test_a_batch_longer_than_a_stretch_of_the_loop_is_accounted_for():
    envs = [NumberedEnv(i, lengths=[3 + i, 1, 6 - i]) for i in range(2)]
    ledger = Ledger(envs, 4)
    with Collector(envs, frames_per_batch=2500, max_frames_per_traj=4) as collector:
        for _ in range(3):
            ledger.add(collector.next())
    assert ledger.frames == 7500
