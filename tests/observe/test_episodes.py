import json
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from tensordict import TensorDict

from trawl import Collector
from trawl.collectors import MultiSyncCollector
from trawl.observe import Episodes, EpisodeStats


def numbered_rows(seed, count, steps):
    """Frames of environments side by side, with ids as collectors give them."""
    rng = np.random.default_rng(seed)
    done = rng.random((count, steps)) < 0.2
    reward = rng.normal(size=(count, steps))
    ids = np.zeros((count, steps), np.int64)
    current, free = list(range(count)), count
    for step in range(steps):
        for row in range(count):
            ids[row, step] = current[row]
            if done[row, step]:
                current[row], free = free, free + 1
    return TensorDict(
        {
            ("collector", "traj_ids"): torch.from_numpy(ids),
            ("next", "reward"): torch.from_numpy(reward).float().unsqueeze(-1),
            ("next", "done"): torch.from_numpy(done).unsqueeze(-1),
        },
        [count, steps],
    )


def by_hand(batches):
    """Id, return, length and end of each episode, one frame after the other; and all frames."""
    open_, ended, frames = {}, [], 0
    for batch in batches:
        for frame in (batch[place] for place in np.ndindex(*batch.shape)):
            key = int(frame["collector", "traj_ids"])
            if key < 0 or not frame["collector", "mask"]:
                continue
            frames += 1
            total, length = open_.get(key, (0.0, 0))
            open_[key] = total + float(frame["next", "reward"]), length + 1
            if frame["next", "done"]:
                ended.append((key, *open_.pop(key), frames))
    return ended, frames


@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 4),
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    saved=st.integers(0, 6),
    goes_on=st.booleans(),
)
@example(seed=3, count=4, sizes=[30], saved=0, goes_on=False)  # ids don't end in their order
def test_episodes_are_those_counted_by_hand(seed, count, sizes, saved, goes_on):
    """Padding and rows without a trajectory count for nothing, and the shape means nothing.

    An id may go on after an end, as with ``set_truncated``. A state continues, also as JSON.
    """
    data, rng = numbered_rows(seed, count, sum(sizes)), np.random.default_rng(seed)
    if goes_on:
        data["collector", "traj_ids"] = torch.arange(count).unsqueeze(-1).expand(data.shape).clone()
    data["collector", "mask"] = torch.from_numpy(rng.random(data.shape) < 0.9)
    data["collector", "traj_ids"][torch.from_numpy(rng.random(data.shape) < 0.1)] = -1
    stats, parts, batches = EpisodeStats(3), [], data.split(sizes, 1)
    for number, batch in enumerate(batches):
        if number == saved:
            state = json.loads(json.dumps(stats.state_dict()))
            stats = EpisodeStats(3)
            stats.load_state_dict(state)
        parts.append(
            stats.update(batch.reshape(batch.shape.numel()) if number % 2 else batch.unsqueeze(0))
        )
    expected, frames = by_hand(batches)
    found = Episodes.concatenate(parts)
    columns = zip(found.traj_ids, found.returns, found.lengths, found.ends, strict=True)
    assert [(id_, pytest.approx(total), *rest) for id_, total, *rest in columns] == expected
    assert (stats.frames, stats.count) == (frames, len(expected))
    if not expected:
        assert math.isnan(stats.recent_return)
        empty = dict.fromkeys(("mean", "std", "min", "max"))
        assert stats.summary() == {"count": 0, "return": empty, "length": empty}
        return
    returns, lengths = (np.array([one[place] for one in expected]) for place in (1, 2))
    assert stats.recent_return == pytest.approx(returns[-3:].mean())
    assert stats.recent_length == pytest.approx(lengths[-3:].mean())
    for moments, values in ((stats.returns, returns), (stats.lengths, lengths)):
        assert moments.mean == pytest.approx(values.mean())
        assert moments.std == pytest.approx(values.std(), abs=1e-6)
        assert (moments.low, moments.high) == pytest.approx((values.min(), values.max()))


# --- several agents


def grouped(groups, flags, dtype=torch.float32):
    """Frames of two environments whose agents are in groups; rewards are told apart by agent.

    Args:
        groups: the number of agents of each group, by the key of the group.
        flags: the groups that have flags of their own; without any, the environment has one.
        dtype: of the rewards.
    """
    data = numbered_rows(7, 2, 40)
    reward, done = data.pop(("next", "reward")), data.pop(("next", "done"))
    first = 0
    for group, count in groups.items():
        scale = torch.arange(first, first + count).unsqueeze(-1)
        data[("next", *group, "reward")] = (reward.unsqueeze(-2) * scale).to(dtype)
        first += count
    for group in flags:
        # The agent that ends is another one in each frame.
        ended = torch.arange(40).unsqueeze(-1) % groups[group] == torch.arange(groups[group])
        data[("next", *group, "done")] = (done & ended).unsqueeze(-1)
    if not flags:
        data["next", "done"] = done
    return data


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize(
    ("groups", "flags"),
    [
        ({(): 3}, []),
        ({("agents",): 3}, []),
        ({("agents",): 3}, [("agents",)]),
        ({("walkers",): 2, ("fliers", "young"): 1}, []),
        ({("walkers",): 2, ("fliers", "young"): 1}, [("walkers",), ("fliers", "young")]),
    ],
    ids=["no group", "a group", "flags of agents", "groups", "flags of groups"],
)
def test_agents_have_the_mean_of_their_returns(groups, flags, dtype):
    single = numbered_rows(7, 2, 40)
    stats, expected = EpisodeStats(), EpisodeStats()
    batches = grouped(groups, flags, dtype).split(16, 1)
    for batch, one in zip(batches, single.split(16, 1), strict=True):
        # Agents 0, 1 and 2 get that many times the reward: it is that of agent 1 in the mean.
        reward = one["next", "reward"]
        agents = [(reward * scale).to(dtype).double() for scale in range(3)]
        one["next", "reward"] = torch.stack(agents).mean(0)
        found, wanted = stats.update(batch), expected.update(one)
        assert found.traj_ids.tolist() == wanted.traj_ids.tolist()
        assert found.ends.tolist() == wanted.ends.tolist()
        np.testing.assert_allclose(found.returns, wanted.returns)
    assert stats.count == expected.count > 0


@pytest.mark.parametrize(
    ("batch", "key", "named"),
    [
        (numbered_rows(0, 1, 3), ("collector", "traj_ids"), "traj_ids"),
        *((numbered_rows(0, 1, 3), ("next", key), key) for key in ("reward", "done")),
        *(
            (grouped({("agents",): 2}, [("agents",)]), ("next", "agents", key), key)
            for key in ("reward", "done")
        ),
    ],
)
def test_a_missing_entry_is_named(batch, key, named):
    with pytest.raises(KeyError, match=rf"\('(next|collector)', '{named}'\)"):
        EpisodeStats().update(batch.exclude(key))


# --- states


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("recent"), "must have the entry 'recent'"),
        (lambda state: state.update(frames="x"), "frames must be numbers"),
        (lambda state: state["recent"].update(returns=[1.0]), "1 returns, but 0 lengths"),
        (lambda state: state["open"].update(ends=[1]), "columns of unequal length"),
        (lambda state: state.update(returns=[]), "returns must have the entry 'count'"),
    ],
)
def test_a_state_of_something_else_changes_nothing(change, message):
    stats = EpisodeStats()
    state = stats.state_dict()
    change(state)
    before = repr(stats.state_dict())
    with pytest.raises(ValueError, match=message):
        stats.load_state_dict(state)
    assert repr(stats.state_dict()) == before


OPTIONS = {"frames_per_batch": 40, "start_method": "inline"}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Collector("CartPole-v1", frames_per_batch=40),
        lambda: MultiSyncCollector(["CartPole-v1"] * 2, **OPTIONS),
        lambda: MultiSyncCollector(["CartPole-v1"] * 2, **OPTIONS, prefetch=1),
    ],
    ids=["one", "workers", "ahead"],
)
def test_a_resumed_collector_has_the_same_statistics(make):
    names = ("episodes", "episode_return_mean", "episode_length_mean", "logged/step")

    def collect(collector, steps):
        for step in steps:
            collector.next()
            collector.log(step=torch.tensor([step]))
        stats = collector.stats()
        return [stats[name] for name in names]

    with make() as collector, make() as other:
        collector.set_seed(0)
        collect(collector, range(5))
        state = collector.state_dict()
        expected = collect(collector, range(5, 9))
        other.load_state_dict(state)
        assert collect(other, range(5, 9)) == expected
        assert "logged" in str(collector.report()).lower()


@pytest.mark.parametrize("value", ["x", None, torch.zeros(2), [1], 1j])
def test_only_numbers_are_logged(value):
    with Collector("CartPole-v1", frames_per_batch=10) as collector:
        with pytest.raises(TypeError, match="the logged value loss must be a number"):
            collector.log(fine=1, loss=value)
        assert "logged/fine" not in collector.stats()
