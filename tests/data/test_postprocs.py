"""Functions for ``postproc``: Trawl's, and TorchRL's where it is installed."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase

from trawl import Collector, split_trajectories
from trawl.data import MultiStep, TrajectoryAssembler, bootstrap_time_limits
from trawl.testing import NumberedEnv, RaggedEnv

IDS = ("collector", "traj_ids")
MASK = ("collector", "mask")
SHAPES = st.lists(st.integers(1, 3), max_size=2).flatmap(
    lambda batch: st.integers(1, 9).map(lambda time: (*batch, time))
)


@st.composite
def frames(draw: Any) -> TensorDict:
    """Frames of any batch shape, with ends, ids and a mask of any kind."""
    shape = draw(SHAPES)
    count = torch.Size(shape).numel()

    def flags() -> torch.Tensor:
        found = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        return torch.tensor(found).reshape(shape)

    terminated, truncated = flags().unsqueeze(-1), flags().unsqueeze(-1)
    numbers = torch.arange(count).reshape(shape)
    rewards = draw(st.lists(st.integers(-9, 9), min_size=count, max_size=count))
    batch = TensorDict(
        {
            "observation": numbers.unsqueeze(-1).float(),
            "next": {
                "observation": numbers.unsqueeze(-1).float() + 0.5,
                "deep": {"number": numbers.clone()},
                "reward": torch.tensor(rewards).reshape(*shape, 1).double(),
                "done": terminated | truncated,
                "terminated": terminated,
                "truncated": truncated,
            },
        },
        shape,
    )
    if draw(st.booleans()):
        batch[IDS] = flags().long().cumsum(-1)
    if draw(st.booleans()):
        batch[MASK] = flags()
    return batch


def by_hand(row: TensorDict, start: int, n_steps: int) -> int:
    """The row whose ``next`` is ``n_steps`` after row ``start``, or as many as there are."""
    at = start
    while at + 1 < min(start + n_steps, len(row)):
        other = any(
            key in row.keys(True, True) and row[at][key] != row[at + 1][key] for key in (IDS, MASK)
        )
        if other or row[at]["next", "done"]:
            break
        at += 1
    return at


@given(frames(), st.integers(1, 5), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_each_frame_is_as_computed_one_by_one(
    batch: TensorDict, n_steps: int, gamma: float
) -> None:
    before = batch.clone()
    result = MultiStep(gamma, n_steps)(batch)
    assert (batch == before).all()
    time = batch.shape[-1]
    assert result.shape == batch.shape
    rows = zip(batch.reshape(-1, time), result.reshape(-1, time), strict=True)
    for row, found in rows:
        for t in range(time):
            last = by_hand(row, t, n_steps)
            rewards = row["next", "reward"][t : last + 1, 0]
            expected = sum(gamma**i * float(reward) for i, reward in enumerate(rewards))
            one, end = found[t], row[last]
            assert float(one["next", "reward"]) == pytest.approx(expected)
            assert one["next", "original_reward"] == row[t]["next", "reward"]
            assert one["steps_to_next_obs"] == last - t + 1
            assert float(one["gamma"]) == pytest.approx(gamma ** (last - t + 1))
            real = bool(end[MASK]) if MASK in row.keys(True, True) else True
            assert one["nonterminal"] == (real and not end["next", "terminated"])
            for key in ("observation", ("deep", "number"), "done", "terminated", "truncated"):
                assert (one["next"][key] == end["next"][key]).all()
            assert one["observation"] == row[t]["observation"]


@given(batch=frames())
def test_ids_and_mask_may_have_the_shape_of_flags(batch: TensorDict) -> None:
    flat = batch.clone()
    flat[IDS] = torch.arange(batch.numel()).reshape(batch.shape) // 3
    flat[MASK] = flat["next", "reward"][..., 0] > -7
    deep = flat.clone()
    for key in (IDS, MASK):
        deep[key] = flat[key].unsqueeze(-1)
    assert_equal(MultiStep(0.9, 3)(flat), MultiStep(0.9, 3)(deep))
    bootstrapped = [
        bootstrap_time_limits(one, lambda steps: steps["reward"]) for one in (flat, deep)
    ]
    assert_equal(*bootstrapped)
    assert_equal(split_trajectories(flat), split_trajectories(deep))
    found = []
    for one in (flat, deep):
        assembler = TrajectoryAssembler()
        assembler.add_parts([("", one)])
        found.append(assembler.take())
    for one, other in zip(*found, strict=True):
        assert_equal(one, other)


def assert_equal(one: TensorDictBase, other: TensorDictBase) -> None:
    """Compares all entries of two batches but for dimensions of size 1."""
    assert one.shape == other.shape
    for key in one.keys(True, True):
        assert one[key].flatten().tolist() == other[key].flatten().tolist(), key


def numbered(done: Any, **more: Any) -> TensorDict:
    done = torch.tensor(done, dtype=torch.bool).unsqueeze(-1)
    numbers = torch.arange(done.numel()).reshape(done.shape[:-1])
    following = {
        "observation": numbers.unsqueeze(-1) + 1.0,
        "reward": torch.randn(done.shape),
        "done": done,
        "terminated": done,
    }
    return TensorDict(
        {"observation": numbers.unsqueeze(-1).float(), "next": following, **more}, numbers.shape
    )


@pytest.mark.parametrize("n_steps", [1, 2, 5])
@pytest.mark.parametrize(
    "done", [[0, 0, 1, 0, 0, 0], [[0, 0, 1, 0], [0, 0, 0, 1]], [[[0, 1]], [[0, 0]]]], ids=str
)
def test_it_has_the_entries_of_torchrls(done: Any, n_steps: int) -> None:
    theirs = pytest.importorskip("torchrl.data").MultiStep(0.9, n_steps)
    batch = numbered(done)
    ours, expected = MultiStep(0.9, n_steps)(batch.clone()), theirs(batch.clone())
    assert set(ours.keys(True, True)) == set(expected.keys(True, True))
    for key, value in expected.items(True, True):
        assert (ours[key].shape, ours[key].dtype) == (value.shape, value.dtype), key
    for key in (("next", "observation"), ("next", "original_reward"), "steps_to_next_obs"):
        assert torch.equal(ours[key], expected[key])
    for key in (("next", "reward"), "gamma"):
        torch.testing.assert_close(ours[key], expected[key])


def test_what_is_after_the_end_of_an_episode_is_not_bootstrapped() -> None:
    result = MultiStep(0.9, 3)(numbered([0, 0, 1, 0, 0]))
    assert result["next", "observation"].flatten().tolist() == [3, 3, 3, 5, 5]
    assert result["next", "terminated"].flatten().tolist() == [True, True, True, False, False]
    assert result["nonterminal"].tolist() == [False, False, False, True, True]
    # One that is truncated goes on without us.
    batch = numbered([0, 1, 0])
    batch["next", "terminated"] = torch.zeros_like(batch["next", "done"])
    batch.names = ["time"]
    result = MultiStep(0.9, 3)(batch)
    assert result["next", "done"].flatten().tolist() == [True, True, False]
    assert result["nonterminal"].all()
    assert result.names == result["next"].names == ["time"]


def test_rewards_may_be_nested_and_of_any_shape() -> None:
    batch = numbered([0, 0, 1])
    rewards = torch.arange(6.0).reshape(3, 2, 1)
    batch["next", "agents", "reward"] = rewards
    batch["next", "reward"] = torch.tensor([1.0, 2.0, 4.0])
    result = MultiStep(0.5, 2)(batch)
    assert result["next", "reward"].tolist() == [2.0, 4.0, 4.0]
    assert result["next", "agents", "reward"][0].flatten().tolist() == [1.0, 2.5]
    assert torch.equal(result["next", "agents", "original_reward"], rewards)


def test_a_reward_that_is_not_summed_up_does_no_harm() -> None:
    batch = numbered([0, 1, 0])
    batch["next", "reward"] = torch.tensor([[1.0], [2.0], [torch.inf]])
    result = MultiStep(0.0, 3)(batch)
    assert result["next", "reward"].flatten().tolist() == [1.0, 2.0, torch.inf]


def test_frames_without_a_fixed_layout_have_steps_as_well() -> None:
    with Collector(RaggedEnv(lengths=[3]), frames_per_batch=4, postproc=MultiStep(1, 2)) as it:
        batch = it.next()
    assert batch["next", "text"][:] == ["0.0.2", "0.0.3", "0.0.3", "0.1.1"]
    assert batch["next", "reward"].flatten().tolist() == [3, 5, 3, 4]


@pytest.mark.parametrize(
    ("gamma", "n_steps", "error", "told"),
    [
        (0.9, 0, ValueError, "n_steps must be at least 1, but it is 0"),
        (0.9, -1, ValueError, "n_steps must be at least 1"),
        (0.9, 2.0, TypeError, r"n_steps must be an integer, but it is 2\.0"),
        (0.9, True, TypeError, "n_steps must be an integer"),
        (1.5, 2, ValueError, r"gamma must be from 0 to 1, but it is 1\.5"),
        (-0.1, 2, ValueError, "gamma must be from 0 to 1"),
        (float("nan"), 2, ValueError, "gamma must be from 0 to 1"),
        ("0.9", 2, TypeError, "gamma must be a number"),
    ],
)
def test_arguments_are_checked(gamma: Any, n_steps: Any, error: Any, told: str) -> None:
    with pytest.raises(error, match=told):
        MultiStep(gamma, n_steps)


def test_a_batch_that_lacks_something_is_refused() -> None:
    step = MultiStep(0.9, 2)
    with pytest.raises(KeyError, match=r"no .*reward"):
        step(numbered([0, 1]).exclude(("next", "reward")))
    bare = numbered([0, 1]).exclude(("next", "done"), ("next", "terminated"))
    with pytest.raises(KeyError, match="where trajectories end"):
        step(bare)
    with pytest.raises(ValueError, match="time dimension"):
        step(numbered([0, 1])[0])


# --- as postproc


def rewards_of(batch: TensorDictBase) -> torch.Tensor:
    return batch["next", "reward"].reshape(-1)


def test_it_is_applied_to_whole_trajectories_and_leaves_the_padding_alone() -> None:
    # The reward is the number of the step: 1, 2, 3 in the first episode, 4 in the second.
    step, found = MultiStep(1.0, 3), {}
    assert repr(pickle.loads(pickle.dumps(step))) == "MultiStep(gamma=1.0, n_steps=3)"
    for layout in ("cat", "padded"):
        options = {"frames_per_batch": 2, "trajs_per_batch": 2, "traj_format": layout}
        with Collector(NumberedEnv(lengths=[3, 1]), postproc=step, **options) as collector:
            found[layout] = collector.next()
    assert rewards_of(found["cat"]).tolist() == [6, 5, 3, 4]
    assert found["cat"]["steps_to_next_obs"].tolist() == [3, 2, 1, 1]
    assert found["padded"]["next", "reward"][..., 0].tolist() == [[6, 5, 3], [4, 0, 0]]
    assert not found["padded"]["nonterminal"].any()


def test_torchrls_transforms_and_postprocs_can_be_given() -> None:
    data = pytest.importorskip("torchrl.data")
    transforms = pytest.importorskip("torchrl.envs.transforms")

    def batch(postproc: Any, **options: Any) -> TensorDictBase:
        with Collector(
            NumberedEnv(lengths=[4]), frames_per_batch=8, postproc=postproc, **options
        ) as collector:
            return collector.next()

    theirs = batch(data.MultiStep(0.5, 2))
    assert torch.equal(theirs["steps_to_next_obs"], batch(MultiStep(0.5, 2))["steps_to_next_obs"])
    scaled = batch(
        transforms.Compose(
            transforms.RewardScaling(0.0, 2.0, in_keys=[("next", "reward")]),
            transforms.RenameTransform(["observation"], ["seen"]),
        )
    )
    assert rewards_of(scaled).tolist() == [2.0 * i for i in range(1, 9)]
    assert scaled["seen"].shape == (8, 5)
    dense = batch(data.postprocs.DensifyReward(), trajs_per_batch=2, traj_format="padded")
    assert dense.shape == (2, 4)


def test_any_function_can_be_given() -> None:
    def last_reward_everywhere(batch: TensorDictBase) -> TensorDictBase:
        total = (batch["next", "reward"] * batch[MASK].unsqueeze(-1)).sum(1, keepdim=True)
        return batch.set(("next", "reward"), total.expand_as(batch["next", "reward"]))

    with Collector(
        NumberedEnv(lengths=[3, 1]),
        frames_per_batch=4,
        trajs_per_batch=2,
        traj_format="padded",
        postproc=last_reward_everywhere,
    ) as collector:
        batch = collector.next()
    assert batch["next", "reward"][:, 0, 0].tolist() == [6, 4]
