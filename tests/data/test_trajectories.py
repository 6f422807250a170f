"""Whole trajectories out of successive batches, of several sources and workers.

That all are whole and come in order is compared with the oracle, for all kinds of environments.
"""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from trawl.data.trajectories import TrajectoryAssembler, join


def batches(lengths: list[list[int]], steps: int) -> list[TensorDict]:
    """Batches of one row for each list, which holds the lengths of the row's episodes."""
    total = min(sum(row) for row in lengths) // steps * steps
    ids = torch.zeros(len(lengths), total, dtype=torch.int64)
    done = torch.zeros(len(lengths), total, 1, dtype=torch.bool)
    for row, episodes in enumerate(lengths):
        start = 0
        for number, length in enumerate(episodes):
            ids[row, start : start + length] = 1000 * row + number
            if start + length <= total:
                done[row, start + length - 1] = True
            start += length
    step = torch.arange(total).expand(len(lengths), total)
    whole = TensorDict(
        {"collector": {"traj_ids": ids}, "next": {"done": done}, "step": step}, ids.shape
    )
    return [whole[:, start : start + steps] for start in range(0, total, steps)]


def steps_of(assembler: TrajectoryAssembler) -> list[list[int]]:
    return [one["step"].tolist() for one in assembler.take()]


def test_what_a_reset_cut_off_and_steps_without_a_trajectory_are_left_out() -> None:
    (batch,) = batches([[4, 4]], 8)
    batch["next", "done"][0, 3] = False
    batch["collector", "traj_ids"][0, 4] = -1
    assembler = TrajectoryAssembler()
    assembler.add(batch)
    assert steps_of(assembler) == [[5, 6, 7]]


def test_unfinished_pieces_do_not_keep_their_batch() -> None:
    first, second = (one.clone() for one in batches([[5, 3]], 4))
    assembler = TrajectoryAssembler()
    assembler.add(first)
    first["step"].fill_(-1)
    assembler.add(second)
    assert steps_of(assembler)[0] == [0, 1, 2, 3, 4]


def test_trajectories_are_joined() -> None:
    assembler = TrajectoryAssembler()
    assembler.add(batches([[1, 3, 2]], 6)[0])
    first = assembler.take(2)
    assert len(assembler) == 1
    assert join(first, "padded")["collector", "mask"].tolist() == [[True, False, False], [True] * 3]
    assert join(first, "cat")["step"].tolist() == [0, 1, 2, 3]
    assert join(first, "cat").names == ["time"]


def test_parts_of_one_time_come_out_by_the_step_at_which_they_ended() -> None:
    (one,) = batches([[4, 2]], 6)
    (other,) = batches([[1, 5]], 6)
    assembler = TrajectoryAssembler()
    # The ids of both are the same: it is the sources that tell them apart.
    assembler.add_parts([("one", one), ("other", other)])
    found = [(len(t), t["collector", "traj_ids"][0].item()) for t in assembler.take()]
    assert found == [(1, 0), (4, 0), (2, 1), (5, 1)]


def test_workers_of_a_source_are_told_apart_by_their_ids() -> None:
    """As of the second of three workers, which has two of its own, in one row by turns."""
    assembler = TrajectoryAssembler(workers=2, stride=3)
    for inner, first in enumerate([0, 0, 3, 3]):
        (batch,) = batches([[5]], 5)
        piece = batch[..., first : first + (3 if first == 0 else 2)].clone()
        piece["collector", "traj_ids"].fill_(3 * (inner % 2) + 1)
        assembler.add_parts([(1, piece)])
    found = assembler.take()
    assert [t["collector", "traj_ids"][0].item() for t in found] == [1, 4]
    assert [t["step"].tolist() for t in found] == [list(range(5))] * 2


def test_ids_of_a_source_may_go_down() -> None:
    (batch,) = batches([[2]], 2)
    later = batch.clone()
    later["collector", "traj_ids"].fill_(7)
    assembler = TrajectoryAssembler()
    assembler.add_parts([(0, later)])
    assembler.add_parts([(0, batch)])
    assert [t["collector", "traj_ids"][0].item() for t in assembler.take()] == [7, 0]


@pytest.mark.parametrize("missed", [0, 1, 2])
def test_a_trajectory_with_a_hole_is_dropped(missed: int) -> None:
    assembler = TrajectoryAssembler()
    for number, batch in enumerate(batches([[2, 6, 1, 3]], 4)):
        (assembler.miss if number == missed else assembler.add)(batch)
    whole = {0: [(8, 1), (9, 3)], 1: [(0, 2), (8, 1), (9, 3)], 2: [(0, 2), (2, 6)]}
    assert [(int(t["step"][0]), len(t)) for t in assembler.take()] == whole[missed]


def test_what_waits_is_copied_when_it_is_to_be_kept() -> None:
    (batch,) = batches([[1, 2, 3]], 6)
    assembler = TrajectoryAssembler()
    assembler.add(batch)
    assembler.take(1)
    assembler.keep()
    batch["step"].fill_(-1)
    assert steps_of(assembler) == [[1, 2], [3, 4, 5]]


def test_another_goes_on_from_a_state() -> None:
    first, second = batches([[1, 4, 1]], 3)
    assembler, copied, other = (TrajectoryAssembler() for _ in range(3))
    assembler.add(first)
    state = assembler.state()
    # The state is a copy.
    first["step"].fill_(-1)
    copied.load(state, lambda place: place)
    copied.add(second)
    assert steps_of(copied) == [[0], [1, 2, 3, 4], [5]]
    # What another had, and what began before a load, is dropped.
    other.add(second)
    other.load(state, None)
    assembler.load({}, None)
    assembler.add(second)
    assert steps_of(other) == [[0]]
    assert steps_of(assembler) == [[5]]


def test_flags_may_be_nested_and_of_any_shape() -> None:
    (batch,) = batches([[2, 2]], 4)
    done = batch["next"].pop("done")
    batch["next", "agents", "done"] = torch.cat([done, done & False], -1).unsqueeze(-1)
    assembler = TrajectoryAssembler()
    assembler.add(batch)
    assert [len(t) for t in assembler.take()] == [2, 2]
    with pytest.raises(KeyError, match="traj_ids"):
        assembler.add(TensorDict({"x": torch.zeros(3)}, 3))
    with pytest.raises(KeyError, match="where trajectories end"):
        assembler.add(batch.exclude("next").set("next", TensorDict({}, batch.shape)))


def test_what_has_no_fixed_shape_is_not_padded() -> None:
    ragged = [
        TensorDict.lazy_stack(
            [
                TensorDict({"x": torch.zeros(i + 1), "collector": {"traj_ids": torch.tensor(0)}})
                for i in range(steps)
            ]
        )
        for steps in (2, 3)
    ]
    with pytest.raises(TypeError, match="traj_format='cat'"):
        join(ragged, "padded")
