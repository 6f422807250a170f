"""States of environments that are replayed: limits, refusals and what is given up."""

from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from closed_envs import Closed, Forgetful

from tests.oracle.continuing import equal, following, pong, pool, saved, steady
from trawl.collectors import Collector
from trawl.envs import GymEnv
from trawl.envs.capture.pool_log import PoolLog
from trawl.errors import EnvStateError

pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered by casting")
with_pools = pytest.mark.skipif(not find_spec("envpool"), reason="envpool is not installed")


def test_an_episode_that_began_between_the_first_steps():
    """Gymnasium's checker keeps the screen of the first step until the second one.

    One no-op follows each reset, so the checker has seen one step when the saved episode begins.
    The other environment is reset once more, so that its checker has seen two.
    """
    pytest.importorskip("ale_py", reason="ale-py is not installed")
    pytest.importorskip("cv2", reason="OpenCV, which the preprocessing needs, is not installed")
    source = partial(pong, 1)
    with (
        Collector(source, frames_per_batch=50) as collector,
        Collector(source, frames_per_batch=50) as other,
    ):
        collector.set_seed(1)
        collector.next()
        for _ in range(2):
            other.reset()
        other.load_state_dict(saved(collector.state_dict()))
        assert equal(following(other, 2), following(collector, 2))


def test_a_failed_replay_names_environment_way_and_entry():
    with Collector([Closed, Forgetful], frames_per_batch=40) as collector:
        collector.set_seed(1)
        collector.next()
        state = collector.state_dict()
    with Collector([Closed, Forgetful], frames_per_batch=40) as other:
        match = r"environment 1: \d+ steps of .*Forgetful.* were replayed, but the observation"
        with pytest.raises(EnvStateError, match=match):
            other.load_state_dict(state)
        with pytest.warns(RuntimeWarning, match="new episodes begin in all environments"):
            other.load_state_dict(state, on_state_mismatch="new_episodes")
        assert not other.resumed
        other.next()


def test_the_log_holds_only_the_current_episode():
    with Collector(Closed, frames_per_batch=200) as collector:
        collector.set_seed(1)
        for _ in range(3):
            batch = collector.next()
            ended = np.flatnonzero(batch["next", "done"].numpy())
            assert len(ended)
            assert collector.env.log.steps == 200 - 1 - ended[-1]


# --- EnvPool


def pooled(source=pool):
    return Collector(source, steady(), frames_per_batch=180)


@with_pools
def test_a_pool_that_was_used_is_made_anew_if_it_can_be():
    with pooled() as collector, pooled(GymEnv(pool())) as other:
        collector.next(), other.next()
        state = collector.state_dict()
        expected = following(collector, 2)
        collector.load_state_dict(state)
        assert equal(following(collector, 2), expected)
        with pytest.raises(EnvStateError, match="can't be replayed, because it was used before"):
            other.load_state_dict(state)


@with_pools
def test_a_pool_that_was_stepped_before_has_no_way():
    env = GymEnv(pool())
    env.reset()
    with pooled(env) as collector:
        assert collector.env_state_methods() == ["none"] * 9


@with_pools
@pytest.mark.parametrize(
    ("options", "name"), [({"seed": 4}, "seed"), ({"max_episode_steps": 100}, "max_episode_steps")]
)
def test_a_pool_with_other_settings_is_refused(options, name):
    with pooled() as collector:
        collector.next()
        state = collector.state_dict()
    with pooled(partial(pool, **options)) as other:
        with pytest.raises(EnvStateError, match=f"environment 0: .* its {name} is"):
            other.load_state_dict(state)
        assert other.env_state_methods() == ["replay"] * 9


@with_pools
def test_long_histories_are_given_up(monkeypatch):
    monkeypatch.setattr(PoolLog, "most_bytes", 300)
    with pooled() as collector:
        collector.next()
        assert collector.env_state_methods() == ["replay"] * 9
        state = collector.state_dict()["resume"]["envs"][0]["env"]
        # Each action takes a byte.
        assert state["actions"][0]["rows"].dtype is torch.uint8
        assert state["actions"][0]["rows"].shape == (20, 9)
        assert state["ended"].shape == (20, 2)
        collector.next()
        assert collector.env_state_methods() == ["none"] * 9
        assert "resume" not in collector.state_dict()


@with_pools
@pytest.mark.parametrize("piece", ["actions", "ended", "resets", "rewards", "observed", "steps"])
def test_each_piece_of_the_state_of_a_pool_counts(piece):
    with pooled() as collector:
        following(collector, 3)
        collector.reset([1])
        collector.next()
        state = saved(collector.state_dict())
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
    with pooled() as other, pytest.raises(EnvStateError, match="environment 0: "):
        other.load_state_dict(state)
