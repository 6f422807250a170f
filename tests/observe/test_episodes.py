import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from trawl import Collector
from trawl.collectors import MultiSyncCollector
from trawl.observe import Episodes, EpisodeStats
from trawl.observe.episodes import Moments


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
    """Returns and lengths by id, one frame after the other."""
    open_, ended = {}, {}
    for batch in batches:
        for frame in (batch[row, step] for row, step in np.ndindex(*batch.shape)):
            key = int(frame["collector", "traj_ids"])
            total, length = open_.get(key, (0.0, 0))
            open_[key] = total + float(frame["next", "reward"]), length + 1
            if frame["next", "done"]:
                ended[key] = open_.pop(key)
    return ended


@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 4),
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
)
def test_episodes_are_those_counted_by_hand(seed, count, sizes):
    data = numbered_rows(seed, count, sum(sizes))
    batches = data.split(sizes, 1)
    stats = EpisodeStats()
    parts = [stats.update(batch) for batch in batches]
    expected = by_hand(batches)
    found = Episodes.concatenate(parts)
    assert sorted(found.traj_ids) == sorted(expected)
    for key, total, length in zip(found.traj_ids, found.returns, found.lengths, strict=True):
        assert (pytest.approx(total), length) == expected[int(key)]
    assert stats.frames == count * sum(sizes)


def test_any_shape_gives_the_same():
    data = numbered_rows(0, 6, 20)
    whole, flat = EpisodeStats(), EpisodeStats()
    whole.update(data.reshape(2, 3, 20))
    flat.update(data.reshape(-1))
    assert whole.summary() == flat.summary()
    assert whole.count > 0


def test_ends_are_counted_in_frames():
    data = numbered_rows(3, 1, 30)[0]
    stats = EpisodeStats()
    found = Episodes.concatenate([stats.update(batch) for batch in data.split(7)])
    assert found.ends.tolist() == (data["next", "done"].flatten().nonzero() + 1).flatten().tolist()


def test_episodes_come_in_the_order_of_their_ends():
    found = EpisodeStats().update(numbered_rows(3, 4, 30).transpose(0, 1))
    assert (np.diff(found.ends) > 0).all()
    assert (np.diff(found.traj_ids) < 0).any()


def test_a_trajectory_may_end_more_than_once_in_a_batch():
    """As with ``set_truncated``, where the id goes on after the end."""
    data = numbered_rows(0, 1, 6)[0]
    data["collector", "traj_ids"].zero_()
    data["next", "reward"].fill_(1)
    data["next", "done"][:, 0] = torch.tensor([0, 1, 0, 0, 1, 0]).bool()
    stats = EpisodeStats()
    assert stats.update(data).lengths.tolist() == [2, 3]
    assert stats.update(data).lengths.tolist() == [3, 3]


def test_padding_counts_for_nothing():
    data = numbered_rows(5, 3, 10)
    padded = data.clone()
    padded["collector", "mask"] = torch.ones(3, 10, dtype=torch.bool)
    padded["collector", "mask"][:, 8:] = False
    padded["next", "done"][:, 8:] = True
    stats, reference = EpisodeStats(), EpisodeStats()
    stats.update(padded)
    reference.update(data[:, :8])
    assert stats.summary() == reference.summary()
    assert stats.frames == 24


def test_rows_without_trajectory_count_for_nothing():
    data = numbered_rows(5, 1, 10)[0]
    data["collector", "traj_ids"][6:] = -1
    stats = EpisodeStats()
    stats.update(data)
    assert stats.frames == 6


@pytest.mark.parametrize(
    "key", [("collector", "traj_ids"), ("next", "reward"), ("next", "done")], ids=str
)
def test_a_missing_entry_is_named(key):
    with pytest.raises(KeyError, match=key[1]):
        EpisodeStats().update(numbered_rows(0, 1, 3).exclude(key))


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


@pytest.mark.parametrize("key", ["reward", "done"])
def test_a_missing_entry_of_agents_is_named(key):
    batch = grouped({("agents",): 2}, [("agents",)]).exclude(("next", "agents", key))
    with pytest.raises(KeyError, match=rf"\('next', '{key}'\)"):
        EpisodeStats().update(batch)


def test_recent_means_are_of_the_last_episodes():
    data = numbered_rows(2, 1, 60)[0]
    stats = EpisodeStats(recent=3)
    found = stats.update(data)
    assert len(found) > 3
    assert stats.recent_return == pytest.approx(found.returns[-3:].mean())
    assert stats.recent_length == pytest.approx(found.lengths[-3:].mean())


def test_before_the_first_end_there_is_no_mean():
    stats = EpisodeStats()
    assert math.isnan(stats.recent_return)
    assert stats.summary()["return"] == {"mean": None, "std": None, "min": None, "max": None}


@given(
    st.lists(
        st.lists(st.floats(-1e6, 1e6), max_size=5),
        max_size=5,
    )
)
def test_moments_are_those_of_all_numbers(parts):
    moments = Moments()
    for part in parts:
        moments.add(np.array(part))
    everything = np.array([value for part in parts for value in part])
    assert moments.count == len(everything)
    if len(everything):
        assert moments.mean == pytest.approx(everything.mean(), rel=1e-9, abs=1e-6)
        assert moments.std == pytest.approx(everything.std(), rel=1e-6, abs=1e-4)
        assert (moments.low, moments.high) == (everything.min(), everything.max())


# --- states


def test_statistics_that_load_a_state_go_on_as_those_that_saved_it():
    with Collector("CartPole-v1", frames_per_batch=37, total_frames=37 * 12) as collector:
        collector.set_seed(0)
        batches = list(collector)
    whole, first, resumed = EpisodeStats(5), EpisodeStats(5), EpisodeStats(5)
    for batch in batches:
        whole.update(batch)
    for batch in batches[:5]:
        first.update(batch)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for batch in batches[5:]:
        resumed.update(batch)
    assert resumed.count > first.count > 0
    assert repr(resumed.state_dict()) == repr(whole.state_dict())
    assert (resumed.summary(), resumed.recent_return) == (whole.summary(), whole.recent_return)


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
