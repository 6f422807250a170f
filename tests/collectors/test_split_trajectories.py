import math
from itertools import groupby

import pytest
import torch
from collector_parts import keys
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from trawl.collectors import split_trajectories as public
from trawl.collectors.utils import split_trajectories

TRAJ_IDS = ("collector", "traj_ids")
MASK = ("collector", "mask")


def frames(ids, **more):
    """Frames that are numbered from 1 on, with the ids given."""
    ids = torch.tensor(ids)
    numbers = torch.arange(1, ids.numel() + 1).reshape(ids.shape)
    return TensorDict({"number": numbers, TRAJ_IDS: ids, **more}, ids.shape)


def test_the_input_is_left_alone():
    batch = frames([0, 0, 1])
    before = batch.clone()
    assert public is split_trajectories
    split_trajectories(batch)["number"].zero_()
    assert keys(batch) == keys(before)
    assert (batch == before).all()


def test_a_mask_that_is_there_stays_in_force():
    mask = TensorDict({"mask": torch.tensor([True, False, True])}, [3])
    batch = frames([0, 0, 1])
    batch["collector"].update(mask)
    assert split_trajectories(batch)[MASK].tolist() == [[True, False], [True, False]]


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("ids", [[-1, -1], [[-1], [-1]], []], ids=str)
def test_a_batch_of_no_trajectory_gives_none(ids, nested):
    batch = frames(ids) if ids else frames([0])[:0]
    split = split_trajectories(batch, as_nested=nested)
    assert split.batch_size == (0, 0)
    assert keys(split) == {"number", TRAJ_IDS, MASK}


def test_a_frame_by_itself_is_no_batch():
    with pytest.raises(ValueError, match="last dimension must be time"):
        split_trajectories(frames([0])[0])


def test_without_ids_or_flags_there_is_nothing_to_go_by():
    with pytest.raises(KeyError, match=r"neither 'traj_ids' nor \('next', 'done'\)"):
        split_trajectories(TensorDict({"number": torch.arange(3)}, [3]))


def test_what_can_not_be_padded(monkeypatch):
    def fail(pieces):
        raise RuntimeError("pad_sequence failed for key text")

    # Since 0.15, tensordict pads texts, too.
    monkeypatch.setattr("trawl.collectors.utils.pad_sequence", fail)
    with pytest.raises(
        TypeError, match=r"failed for key text\. .* use .*'traj_ids'.* or trajs_per"
    ):
        split_trajectories(frames([0, 0, 1]))


# --- any batch

KEYS = [
    (TRAJ_IDS, {}),
    (("mine", "traj_ids"), {"prefix": "mine"}),
    (("mine", "deep", "traj_ids"), {"prefix": ("mine", "deep")}),
    ("episode", {"trajectory_key": "episode"}),
    (("mine", "episode"), {"trajectory_key": ("mine", "episode")}),
]


@st.composite
def any_batch(draw):
    """Frames of up to four dimensions, and the pieces that they are to be cut into."""
    shape = [*draw(st.lists(st.integers(1, 3), max_size=3)), draw(st.integers(1, 6))]
    count = math.prod(shape)
    ids = draw(st.lists(st.integers(-1, 2), min_size=count, max_size=count))
    numbers = list(range(1, count + 1))
    pieces, time = [], shape[-1]
    for row in range(count // time):
        own = zip(
            ids[row * time : (row + 1) * time], numbers[row * time : (row + 1) * time], strict=True
        )
        runs = [(one, [n for _, n in run]) for one, run in groupby(own, key=lambda pair: pair[0])]
        pieces += [found for one, found in runs if one >= 0]
    return torch.tensor(ids).reshape(shape), pieces


@pytest.mark.parametrize(("key", "options"), KEYS, ids=lambda value: str(value))
@pytest.mark.parametrize("nested", [True, False])
@given(any_batch())
def test_any_batch_is_cut_into_its_pieces(key, options, nested, given):
    ids, pieces = given
    numbers = torch.arange(1, ids.numel() + 1).reshape(ids.shape)
    like = torch.ones(*ids.shape, 2, dtype=torch.bool)
    batch = TensorDict({"number": numbers, key: ids, ("nested", "deep"): like}, ids.shape)
    split = split_trajectories(batch, as_nested=nested, **options)
    mask_key = (*key[:-1], "mask") if isinstance(key, tuple) else "mask"
    if nested and mask_key not in keys(split):
        assert [part.tolist() for part in split["number"].unbind()] == pieces
        return
    rows = split.reshape(-1, split.shape[-1]) if split.batch_size.numel() else []
    assert [row["number"][row[mask_key]].tolist() for row in rows] == pieces
    assert all((row["number"][~row[mask_key]] == 0).all() for row in rows)
    assert all((row["nested", "deep"] == row[mask_key][:, None]).all() for row in rows)


@pytest.mark.parametrize("key", ["done", "over", ("agent", "over")], ids=str)
@given(any_batch(), st.booleans())
def test_done_flags_say_the_same_as_ids(key, given, ended):
    """Rows end trajectories, whether their last frames have flags or not."""
    ids, _ = given
    done = torch.full_like(ids, ended, dtype=torch.bool)
    done[..., :-1] = ids[..., 1:] != ids[..., :-1]
    numbers = torch.arange(1, ids.numel() + 1).reshape(ids.shape)
    name = ("next", key) if isinstance(key, str) else ("next", *key)
    flagged = TensorDict({"number": numbers, name: done.unsqueeze(-1)}, ids.shape)
    batch = TensorDict({"number": numbers, TRAJ_IDS: ids + 1}, ids.shape)
    split = split_trajectories(flagged, done_key=None if key == "done" else key)
    expected = split_trajectories(batch)
    assert torch.equal(split["number"], expected["number"])
    assert torch.equal(split["mask"], expected[MASK])
    # The trajectories are numbered from 0 on.
    found = split["traj_ids"][split["mask"]].unique_consecutive()
    assert found.tolist() == list(range(split["mask"].any(-1).sum()))


# --- the same as TorchRL's


@pytest.mark.parametrize(
    "ids",
    [
        [0, 0, 1, 1, 1],
        [0, 0, 0],
        [0, 1, 2],
        [[0, 0, 0], [1, 1, 1]],
        [[0, 0, 2], [1, 3, 3]],
        [[0, 1, 2], [3, 4, 4]],
        [[[0, 0, 2], [1, 3, 3]], [[4, 4, 4], [5, 6, 7]]],
        [[[0, 0], [1, 1]], [[2, 2], [3, 3]]],
        [[[[0, 0, 1]]]],
    ],
    ids=str,
)
@pytest.mark.parametrize("given", ["ids", "done"])
def test_torchrl_gives_the_same(ids, given):
    theirs = pytest.importorskip("torchrl.collectors.utils").split_trajectories
    if given == "done" and torch.tensor(ids).ndim > 2:
        pytest.skip("TorchRL counts wrong there: its pieces are not those of the flags")
    batch = frames(ids)
    if given == "done":
        ids = batch.pop("collector")["traj_ids"]
        done = torch.ones_like(ids, dtype=torch.bool)
        done[..., :-1] = ids[..., 1:] != ids[..., :-1]
        batch["next"] = TensorDict({"done": done.unsqueeze(-1)}, batch.shape)
    nested_ours = split_trajectories(batch.clone(), as_nested=True)
    nested_theirs = theirs(batch.clone(), as_nested=True)
    assert [p.tolist() for p in nested_ours["number"].unbind()] == [
        p.tolist() for p in nested_theirs["number"].unbind()
    ]
    ours = split_trajectories(batch.clone())
    expected = theirs(batch.clone())
    assert ours.batch_size == expected.batch_size
    assert list(ours.names) == list(expected.names)
    assert keys(ours) == keys(expected)
    assert (ours == expected).all()
