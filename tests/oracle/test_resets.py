"""Resets between batches begin episodes, and a batch that is broken off goes on in the next one."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from torchrl.data import LazyTensorStorage, ReplayBuffer

from tests.oracle.cases import Case, collector_of
from tests.oracle.comparing import TORCHRL, Ids, Rows, check_frames, compare_whole, oracles
from trawl.supported import Trait
from trawl.testing.faces import FACES
from trawl.testing.oracle import IDS, Options

pytestmark = pytest.mark.filterwarnings("ignore")
# What is reset before each batch, and after how many steps it is broken off.
PLAN: list[tuple[str | None, int | None]] = [
    (None, None),
    ("some", 2),
    (None, 1),
    ("all", 3),
    ("some", None),
    ("one", None),
    (None, 3),
    ("all", None),
]


def cases(face: str) -> list[Case]:
    """Returns cases of all options that remember something from one step to the next."""
    kind = FACES[face]
    limit = {} if Trait.ALL_AT_ONCE in kind.traits else {"max_frames_per_traj": 2}
    found: list[dict[str, Any]] = [
        {"recurrent": face not in TORCHRL, "is_init": True, "compact_obs": True},
        {"frame_stack": 3, "normalize_rewards": True, **limit},
        {"frame_stack": 3, "padding": "zero"},
        {"normalize_observations": True, "normalize_rewards": True, "keep_raw": True},
    ]
    told = face not in ("dm_env", *TORCHRL)
    many = [
        Case(
            face,
            Options(frames_per_batch=(12, 15)[number % 2], **one),
            policy="recurrent" if one.get("recurrent") else "module",
            delivery="buffer_whole" if one.get("padding") else "rows",
            levels=told and number % 2 == 0,
            masks=told and face != "jax" and number % 2 == 1,
        )
        for number, one in enumerate(found)
    ]
    # JAX compiles each collector anew.
    return many[1:2] if face == "jax" else many


@pytest.mark.parametrize("face", FACES)
def test_resets_and_interruptions_between_batches(face) -> None:
    kind = FACES[face]
    if kind.needs:
        pytest.importorskip(kind.needs)
    partly = not kind.single and Trait.ALL_AT_ONCE not in kind.traits and face != "groups"
    for number, case in enumerate(cases(face)):
        (oracle,) = oracles(case)
        rounds, ids, left = oracle.batches(), Ids(), count(1)
        whole: list[Rows] = []
        more: dict[str, Any] = {"interruptor": lambda: next(left) == oracle.most}  # noqa: B023
        if case.delivery == "buffer_whole":
            more["replay_buffer"] = buffer = ReplayBuffer(storage=LazyTensorStorage(1000))
        with collector_of(case, **more) as collector:
            for turn, (what, steps) in enumerate(PLAN):
                if what is not None and partly and what != "all":
                    rows = [(number + turn) % 2, 2][: 1 + (what == "some")]
                    chosen = np.isin(case.envs[0], rows)
                    collector.reset(chosen.reshape(collector.env.batch_size))
                    oracle.reset(rows)
                elif what is not None:
                    collector.reset()
                    oracle.reset(range(len(case.envs[0])))
                oracle.most, left = steps or float("inf"), count(1)
                rows, batch = next(rounds), collector.next()
                if case.delivery == "rows":
                    check_batch(case, rows, batch, ids)
                else:
                    whole.append(rows)
        if whole:
            compare_whole(case, [buffer[:]], whole, ids, len(whole))


def check_batch(case: Case, rows: Any, batch: Any, ids: Ids) -> None:
    """Checks a batch, whose rows without a frame are known by their ids."""
    known = torch.tensor([[frame is not None for frame in mine] for mine in rows])
    batch = batch[None] if case.kind.single else batch.reshape(len(rows), -1)
    np.testing.assert_array_equal(batch[IDS] >= 0, known)
    frames = [frame for mine in rows for frame in mine if frame is not None]
    check_frames(case, frames, batch[known], ids)
