"""Collectors over EnvPool continue bit for bit: a new pool repeats everything."""

import io
from pathlib import Path

import numpy as np
import nursery
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import require
from multi_parts import same
from tensordict.nn import TensorDictModule
from torch import nn

from trawl.collectors import Collector, MultiSyncCollector
from trawl.envs import GymEnv
from trawl.envs.capture import history
from trawl.errors import EnvStateError

require("envpool")
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting")
FOLDER = Path(__file__).parent


def pool(name="CartPole-v1", **options):
    import envpool

    options = {"num_envs": 9, "seed": 3, **options}
    return envpool.make_gymnasium(name, **options)


class Steady(nn.Module):
    """A policy without noise, whose poles fall sooner or later."""

    def forward(self, observation):
        right = observation[..., 2] + observation[..., 0].sin() > 0
        return nn.functional.one_hot(right.long(), 2)


def steady():
    return TensorDictModule(Steady(), ["observation"], ["action"])


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def go_on(collector, other, later=4):
    other.load_state_dict(through_a_file(collector.state_dict()))
    assert other.resumed
    for _ in range(later):
        assert same(collector.next(), other.next())


def make(**options):
    return Collector(pool, steady(), **{"frames_per_batch": 9 * 20, **options})


@given(
    batches=st.integers(0, 5),
    options=st.sampled_from(
        [{}, {"max_frames_per_traj": 7}, {"reset_at_each_iter": True}, {"compact_obs": True}]
    ),
)
@settings(max_examples=10)
def test_a_collector_continues_bit_for_bit(batches, options):
    with make(**options) as collector, make(**options) as other:
        for _ in range(batches):
            collector.next()
        assert collector.env_state_methods() == ["replay"] * 9
        go_on(collector, other)


@given(
    calls=st.lists(st.sampled_from(["next", "next", "reset", "reset some"]), max_size=7),
)
@settings(max_examples=10)
def test_resets_between_batches(calls):
    """A state is taken after any calls, and continues a state that was loaded itself."""
    with make() as collector, make() as other, make() as third:
        for call in calls:
            if call == "next":
                collector.next()
            else:
                collector.reset(*[[2, 5]] * (call == "reset some"))
        go_on(collector, other, later=2)
        go_on(other, third, later=2)


@pytest.mark.parametrize(
    ("name", "options"),
    [("Pendulum-v1", {}), ("FrozenLake-v1", {}), ("Pong-v5", {"num_envs": 2})],
)
def test_other_environments(name, options):
    def make():
        return Collector(lambda: pool(name, **options), frames_per_batch=360)

    with make() as collector, make() as other:
        for _ in range(3):
            collector.next()
        other.load_state_dict(through_a_file(collector.state_dict()))
        torch.manual_seed(1)
        expected = collector.next()
        torch.manual_seed(1)
        assert same(expected, other.next())


def test_pools_in_a_list():
    def make():
        pools = [lambda: pool(num_envs=3), lambda: pool(num_envs=3, seed=8)]
        return Collector(pools, steady(), frames_per_batch=120)

    with make() as collector, make() as other:
        for _ in range(3):
            collector.next()
        assert collector.env_state_methods() == ["replay"] * 6
        go_on(collector, other)


def test_frames_without_a_fixed_layout():
    def speak(tensordict):
        tensordict.set_non_tensor("word", "yes")
        return steady()(tensordict)

    def make():
        return Collector(pool, speak, frames_per_batch=180, max_frames_per_traj=11)

    with make() as collector, make() as other:
        for _ in range(3):
            collector.next()
        assert collector.stats()["env_path"] == "tensordict"
        other.load_state_dict(through_a_file(collector.state_dict()))
        assert other.resumed
        for _ in range(4):
            assert same(collector.next().exclude("word"), other.next().exclude("word"))


def test_workers_continue_bit_for_bit():
    def make():
        pools = [lambda: pool(num_envs=4), lambda: pool(num_envs=4, seed=8)]
        return MultiSyncCollector(pools, steady(), frames_per_batch=160)

    with make() as collector, make() as other:
        for _ in range(3):
            collector.next()
        go_on(collector, other)


def test_another_process_continues(tmp_path):
    program = (
        "import sys, torch\n"
        f"sys.path[:0] = [{str(FOLDER)!r}, {str(FOLDER.parent)!r}]\n"
        "from test_resuming_envpool import *\n"
        "with make() as other:\n"
        "    other.load_state_dict(torch.load('state', weights_only=True))\n"
        "    batches = [other.next()['next', 'observation'].clone() for _ in range(4)]\n"
        "torch.save(batches, 'batches')\n"
    )
    with make() as collector:
        for _ in range(3):
            collector.next()
        torch.save(collector.state_dict(), tmp_path / "state")
        expected = [collector.next()["next", "observation"].clone() for _ in range(4)]
    done = nursery.run(program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "batches", weights_only=True)
    assert all(map(torch.equal, expected, found))


def test_a_pool_that_was_used_is_made_anew():
    with make() as collector:
        collector.next()
        state = collector.state_dict()
        expected = [collector.next() for _ in range(2)]
        collector.load_state_dict(state)
        for batch in expected:
            assert same(batch, collector.next())


def test_a_pool_that_was_used_and_cannot_be_made_anew_is_refused():
    with make() as collector:
        collector.next()
        state = collector.state_dict()
    with Collector(GymEnv(pool()), steady(), frames_per_batch=180) as other:
        other.next()
        with pytest.raises(EnvStateError, match="can't be replayed, because it was used before"):
            other.load_state_dict(state)


def test_a_pool_that_was_stepped_before_has_no_way():
    env = GymEnv(pool())
    env.reset()
    with Collector(env, steady(), frames_per_batch=180) as collector:
        assert collector.env_state_methods() == ["none"] * 9


@pytest.mark.parametrize(
    ("options", "name"),
    [({"seed": 4}, "seed"), ({"max_episode_steps": 100}, "max_episode_steps")],
)
def test_a_pool_with_other_settings_is_refused(options, name):
    with make() as collector:
        collector.next()
        state = collector.state_dict()
    with Collector(lambda: pool(**options), steady(), frames_per_batch=180) as other:
        with pytest.raises(EnvStateError, match=f"environment 0: .* its {name} is"):
            other.load_state_dict(state)
        assert other.env_state_methods() == ["replay"] * 9


def test_long_histories_are_given_up(monkeypatch):
    monkeypatch.setattr(history, "MOST_BYTES", 300)
    with make() as collector:
        collector.next()
        assert collector.env_state_methods() == ["replay"] * 9
        collector.next()
        assert collector.env_state_methods() == ["none"] * 9
        assert "resume" not in collector.state_dict()


def test_the_log_takes_a_byte_for_each_action():
    with make() as collector:
        collector.next()
        state = collector.state_dict()["resume"]["envs"][0]["env"]
    assert state["actions"][0]["rows"].dtype is torch.uint8
    assert state["actions"][0]["rows"].shape == (20, 9)
    assert state["ended"].shape == (20, 2)


# --- every piece counts


@pytest.mark.parametrize("piece", ["actions", "ended", "resets", "rewards", "observed", "steps"])
def test_each_piece_of_the_state_counts(piece):
    with make() as collector:
        for _ in range(3):
            collector.next()
        collector.reset([1])
        collector.next()
        state = through_a_file(collector.state_dict())
    place = state["resume"]["envs"][0]["env"]
    if piece == "actions":
        rows = place["actions"][0]["rows"]
        rows[0] = 1 - rows[0]
    elif piece == "ended":
        row = int(np.flatnonzero(place["ended"].numpy().any(-1))[0])
        place["ended"][row] = 0
    elif piece == "resets":
        place["resets"].pop()
    elif piece == "observed":
        place["observed"][0][0, 0] += 1
    else:
        place[piece] -= 1
    with make() as other, pytest.raises(EnvStateError, match="environment 0: "):
        other.load_state_dict(state)
