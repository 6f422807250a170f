"""Whole trajectories out of successive batches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from trawl.data.trajectories import TrajectoryAssembler, join


def batches(lengths: list[list[int]], steps: int) -> list[TensorDict]:
    """Batches of one lane for each list, which holds the lengths of the lane's episodes."""
    total = min(sum(lane) for lane in lengths) // steps * steps
    ids = torch.zeros(len(lengths), total, dtype=torch.int64)
    done = torch.zeros(len(lengths), total, 1, dtype=torch.bool)
    for lane, episodes in enumerate(lengths):
        start = 0
        for number, length in enumerate(episodes):
            ids[lane, start : start + length] = 1000 * lane + number
            if start + length <= total:
                done[lane, start + length - 1] = True
            start += length
    step = torch.arange(total).expand(len(lengths), total)
    whole = TensorDict(
        {"collector": {"traj_ids": ids}, "next": {"done": done}, "step": step}, ids.shape
    )
    return [whole[:, start : start + steps] for start in range(0, total, steps)]


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=3, max_size=9), min_size=1, max_size=3),
    st.integers(1, 7),
)
def test_every_whole_trajectory_comes_out_once_and_in_order(
    lengths: list[list[int]], steps: int
) -> None:
    assembler, ends = TrajectoryAssembler(), []
    for batch in batches(lengths, steps):
        assembler.add(batch)
    total = min(sum(lane) for lane in lengths) // steps * steps
    for lane, episodes in enumerate(lengths):
        start = 0
        for number, length in enumerate(episodes):
            if start + length <= total:
                ends.append((start + length - 1, lane, 1000 * lane + number, start))
            start += length
    # Ends come batch by batch, and within a batch step by step, lane by lane.
    found = [
        (int(t["step"][-1]), int(t["collector", "traj_ids"][0]), int(t["step"][0]))
        for t in assembler.take()
    ]
    assert found == [(end, number, start) for end, _, number, start in sorted(ends)]


def test_a_trajectory_that_a_reset_cut_off_is_dropped() -> None:
    (batch,) = batches([[4, 4]], 8)
    batch["next", "done"][0, 3] = False
    assembler = TrajectoryAssembler()
    assembler.add(batch)
    (only,) = assembler.take()
    assert only["step"].tolist() == [4, 5, 6, 7]


def test_steps_without_a_trajectory_are_left_out() -> None:
    (batch,) = batches([[4]], 4)
    batch["collector", "traj_ids"][0, 0] = -1
    assembler = TrajectoryAssembler()
    assembler.add(batch)
    assert assembler.take()[0]["step"].tolist() == [1, 2, 3]


def test_unfinished_pieces_do_not_keep_their_batch() -> None:
    first, second = batches([[5, 3]], 4)
    kept = first.clone()
    assembler = TrajectoryAssembler()
    assembler.add(kept)
    kept["step"].fill_(-1)
    assembler.add(second)
    assert assembler.take()[0]["step"].tolist() == [0, 1, 2, 3, 4]


def test_take_gives_the_first_ones() -> None:
    assembler = TrajectoryAssembler()
    assembler.add(batches([[1, 2, 3]], 6)[0])
    assert [len(t) for t in assembler.take(2)] == [1, 2]
    assert len(assembler) == 1


def test_without_ids_there_are_no_trajectories() -> None:
    with pytest.raises(KeyError, match="traj_ids"):
        TrajectoryAssembler().add(TensorDict({"x": torch.zeros(3)}, 3))


def test_padded_trajectories_have_a_mask() -> None:
    assembler = TrajectoryAssembler()
    assembler.add(batches([[1, 3]], 4)[0])
    padded = join(assembler.take(), "padded")
    assert padded.shape == (2, 3)
    assert padded["collector", "mask"].tolist() == [[True, False, False], [True, True, True]]


def test_concatenated_trajectories_follow_each_other() -> None:
    assembler = TrajectoryAssembler()
    assembler.add(batches([[1, 3]], 4)[0])
    cat = join(assembler.take(), "cat")
    assert cat["step"].tolist() == [0, 1, 2, 3]
    assert cat.names == ["time"]
