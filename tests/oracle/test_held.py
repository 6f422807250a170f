"""Batches that a user holds never change; the memory of those that nobody holds is used again."""

from __future__ import annotations

import gc
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from tests.oracle.cases import Case, can_pad, collector_of
from tests.oracle.comparing import AGENTS, dense
from trawl.testing.faces import FACES
from trawl.testing.oracle import Options

pytestmark = pytest.mark.filterwarnings("ignore")
DELIVERIES = ["rows", "split", "padded", "cat", "in_turn"]
STAGES: list[dict[str, Any]] = [
    {},
    {"frame_stack": 3},
    {"normalize_observations": True},
    {"normalize_rewards": True},
]
MEMORY: list[dict[str, Any]] = [{}, {"use_buffers": False}, {"use_buffers": True}]


def cases(face: str) -> list[Case]:
    """Returns a case of each place, with deliveries that differ between kinds."""
    index = list(FACES).index(face)
    found = []
    # JAX compiles each collector anew.
    places = ("one",) if face == "jax" else ("one", "sync", "async")
    for number, place in enumerate(places):
        options = Options(
            frame_stack=3 if number == 0 else None,
            restart=face != "jax",
            normalize_rewards=number == 2,
        )
        delivery = DELIVERIES[(index + 2 * number) % len(DELIVERIES)]
        if not can_pad(face, delivery):
            delivery = "cat"
        memory = MEMORY[(index + number) % len(MEMORY)]
        further = memory if delivery == "rows" else {}
        # A reset by the user would fail, too, in the third episode of these.
        failures = face not in (*AGENTS[2:], "loose", "parts")
        found.append(Case(face, options, place, delivery, further=further, failures=failures))
    return found


def parts(case: Case, batch: Any, number: int) -> Any:
    """Returns what is kept of a batch: all of it, a view, an entry, or an array of an entry."""
    entry = dense(batch[case.kind.key(("next", "observation"))])
    return [batch, batch[:1], entry, entry[..., -1:], entry.numpy()][number % 5]


def copied(kept: Any) -> Any:
    return kept.copy() if isinstance(kept, np.ndarray) else kept.clone()


def assert_unchanged(kept: list[Any], copies: list[Any]) -> None:
    for one, copy in zip(kept, copies, strict=True):
        if isinstance(one, np.ndarray):
            np.testing.assert_array_equal(one, copy)
        elif isinstance(one, torch.Tensor):
            assert torch.equal(one, copy)
        else:
            assert set(one.keys(True, True)) == set(copy.keys(True, True))
            for key in copy.keys(True, True):
                assert torch.equal(dense(one[key]), dense(copy[key])), key


@pytest.mark.parametrize("face", FACES)
def test_what_is_held_never_changes(face) -> None:
    if FACES[face].needs:
        pytest.importorskip(FACES[face].needs)
    all_kept, all_copies = [], []
    for offset, case in enumerate(cases(face)):
        kept, copies = [], []
        collector = collector_of(case)
        batches = iter(collector)
        for number, batch in enumerate(islice(batches, 6)):
            kept.append(parts(case, batch, number + offset))
            copies.append(copied(kept[-1]))
            if number == 2:
                state = collector.state_dict()
        assert_unchanged(kept, copies)
        collector.load_state_dict(state)
        del batch, batches
        for _ in islice(collector, 3):
            pass
        collector.reset()
        collector.next()
        assert_unchanged(kept, copies)
        collector.shutdown()
        del collector
        all_kept += kept
        all_copies += copies
    gc.collect()
    torch.full((1 << 14,), 7.0)
    assert_unchanged(all_kept, all_copies)


@pytest.mark.parametrize("face", FACES)
def test_memory_is_used_again(face) -> None:
    if FACES[face].needs:
        pytest.importorskip(FACES[face].needs)
    stage = STAGES[list(FACES).index(face) % len(STAGES)]
    for place in ("one",) if face == "jax" else ("one", "sync"):
        options = Options(**stage if place == "one" else {})
        with collector_of(Case(face, options, place)) as collector:
            memory = []
            for _ in islice(collector, 6):
                memory.append(collector.stats().get("memory_bytes"))
            assert len(set(memory[3:])) == 1
            # Frames without a layout have no memory that is used again.
            if memory[0] is not None and face != "loose":
                del _
                assert collector.stats()["batches_held"] == 0
                kept = [collector.next() for _ in range(3)]
                assert collector.stats()["batches_held"] == 3
                del kept
                assert collector.stats()["batches_held"] == 0
