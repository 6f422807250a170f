"""A collector with environments of TorchRL continues from a state, to the bit."""

from dataclasses import replace
from functools import partial

import pytest

pytest.importorskip("torchrl")

from torchrl.envs import Compose, GymEnv, ParallelEnv, RewardSum, StepCounter, TransformedEnv
from torchrl_parts import Different, halve

from tests.oracle.continuing import (
    assert_continues,
    assert_continues_elsewhere,
    equal,
    following,
    row,
    saved,
)
from tests.oracle.torchrl_kinds import ROWS, Objects, Unpicklable, Walk, gym, noisy
from trawl.collectors import Collector
from trawl.errors import EnvStateError

# Warnings of TorchRL about VecNormV2 in a batch, and about itself.
pytestmark = pytest.mark.filterwarnings("ignore")

# Their entries lie in lazy stacks.
AGENTS = {
    f"agents, {batch}": row(partial(Different, batch), policy=lambda: halve, frames_per_batch=10)
    for batch in [(), (2,)]
}


# More of what others show.
MORE = [
    *("TimeMaxPool", "NoopResetEnv", "random truncation", "scaling", "nested", "GRU"),
    *("native, transforms", "SerialEnv", "SerialEnv, one VecNormV2", "LSTM, SerialEnv"),
    *("words, wrapped", "workers, native"),
]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in MORE else [])
        for name in [*ROWS, *AGENTS]
    ],
)
def test_a_collector_continues_to_the_bit(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where MuJoCo writes its log
    case = {**ROWS, **AGENTS}[name]
    if case.needs:
        pytest.importorskip(case.needs, reason=f"{case.needs} is not installed")
    # What the other one has seen before must not matter.
    assert_continues(case, used=1)


@pytest.mark.parametrize("name", ["VecNorm", "SerialEnv, transformed"])
def test_a_state_before_the_first_batch(name):
    assert_continues(replace(ROWS[name], at=0))


@pytest.mark.long
def test_another_process_continues(tmp_path):
    names = [("SerialEnv, transformed", False), ("words", False)]
    assert_continues_elsewhere("tests.oracle.torchrl_kinds", names, tmp_path / "states")


def test_a_state_in_memory_is_not_changed_by_those_that_loaded_it():
    case = ROWS["VecNormV2"]
    with case.make() as collector:
        collector.set_seed(1)
        collector.next()
        state = collector.state_dict()
        before = saved(state["env_state_dict"])
        assert before
        wanted = following(collector, 3)
        assert repr(state["env_state_dict"]) == repr(before)
    for _ in range(2):
        with case.make() as other:
            other.load_state_dict(state)
            assert equal(following(other, 3), wanted)
    # Without an entry for the episodes, only the transforms continue.
    del state["resume"]
    with case.make() as other:
        other.load_state_dict(state)
        assert not other.resumed
        other.next()
    assert repr(state["env_state_dict"]) == repr(before)


# --- ways


def test_pickles_of_another_process_need_trust():
    with Collector(Objects, frames_per_batch=10) as collector:
        collector.set_seed(1)
        collector.next()
        state = saved(collector.state_dict())
        wanted = following(collector, 3)
    state["resume"]["envs"][0]["objects"]["signature"] = b"of another process"
    with Collector(Objects, frames_per_batch=10) as other:
        with pytest.raises(EnvStateError, match=r"environment 0: .* load it with trust=True"):
            other.load_state_dict(state)
        other.load_state_dict(state, trust=True)
        assert equal(following(other, 3), wanted)


@pytest.mark.parametrize(
    "make",
    [Unpicklable, lambda: ParallelEnv(2, partial(GymEnv, "CartPole-v1"), mp_start_method="fork")],
    ids=["iterator", "processes"],
)
def test_without_any_way_new_episodes_begin(make):
    with Collector(make, frames_per_batch=10) as collector:
        assert set(collector.env_state_methods()) == {"none"}
        collector.next()
        state = collector.state_dict()
        assert "resume" not in state
        collector.load_state_dict(state)
        assert not collector.resumed
        collector.next()


# --- states that don't fit


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (partial(gym, "CartPole-v1", RewardSum), r"its transforms are .*StepCounter.* but those"),
        (partial(GymEnv, "CartPole-v1"), "its environments are TransformedEnv, GymEnv"),
        (lambda: TransformedEnv(Walk(), Compose(RewardSum(), StepCounter())), "environments are"),
        (partial(gym, "MountainCar-v0", RewardSum, StepCounter), "its arguments|its id"),
    ],
)
def test_the_state_of_another_environment_is_refused(make, match):
    first = partial(gym, "CartPole-v1", RewardSum, StepCounter)
    with Collector(first, frames_per_batch=10) as collector:
        collector.next()
        state = collector.state_dict()
    with (
        Collector(make, frames_per_batch=10) as other,
        Collector(make, frames_per_batch=10) as twin,
    ):
        for one in (other, twin):
            one.set_seed(3)
            one.next()
        with pytest.raises(EnvStateError, match=f"environment 0: .*{match}"):
            other.load_state_dict(state)
        # Nothing was changed.
        assert equal(following(other, 1), following(twin, 1))
        state["env_state_dict"] = {}
        with pytest.warns(RuntimeWarning, match="new episodes begin in all environments"):
            other.load_state_dict(state, on_state_mismatch="new_episodes")
        assert not other.resumed


# --- each piece counts


def pieces(data, path=()):
    """Paths of the contents of arrays, tensors and generators in a state."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from pieces(value, (*path, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from pieces(value, (*path, index))
    elif isinstance(data, bytes):
        yield path


@pytest.mark.parametrize("name", ["native", "VecNormV2", "CatFrames"])
def test_each_tensor_of_the_state_counts(name):
    """With the one of an earlier state, later batches are others, or loading fails."""
    case = replace(ROWS[name], policy=None, options={"frames_per_batch": 10})
    with case.make() as collector:
        collector.set_seed(1)
        collector.next()
        before = saved(collector.state_dict())["resume"]["envs"][0]
        collector.next()
        state = saved(collector.state_dict())
        wanted = following(collector, 4)
    found = 0
    for path in pieces(state["resume"]["envs"][0]["objects"]):
        changed = saved(state)
        place, old = changed["resume"]["envs"][0]["objects"], before["objects"]
        for key in path[:-1]:
            place, old = place[key], old[key]
        if place[path[-1]] == old[path[-1]]:
            continue
        place[path[-1]] = old[path[-1]]
        found += 1
        with case.make() as other:
            other.load_state_dict(changed)
            try:
                assert not equal(following(other, 4), wanted), path
            except ValueError:
                continue  # rewards are not numbers
    assert found


@pytest.mark.parametrize("key", ["mean", "step_count", "episode_reward"])
def test_each_entry_that_a_step_begins_with_counts(key):
    case = row(partial(gym, "CartPole-v1", RewardSum, StepCounter), policy=partial(noisy, 2))
    with case.make() as collector:
        collector.next()
        state = saved(collector.state_dict())
    del state["resume"]["rollout"]["writer"]["rows"]["entries"][key]
    with case.make() as other:
        if key == "mean":  # the policy writes it before anything reads it
            other.load_state_dict(state)
        else:
            with pytest.raises(ValueError, match=f"the state has no entry in '{key}'"):
                other.load_state_dict(state)


def test_masks_of_actions_count():
    case = replace(ROWS["native, mask"], options={"frames_per_batch": 3})
    with case.make() as collector, case.make() as other:
        collector.set_seed(1)
        collector.next()
        state = saved(collector.state_dict())
        objects = state["resume"]["envs"][0]["objects"]
        assert any(one["masks"] for one in objects)
        for one in objects:
            one["masks"] = {}
        with pytest.raises(EnvStateError, match="differs from the state"):
            other.load_state_dict(state)
