"""PettingZoo environments that fail are made again, and their episodes are resumed from states."""

from functools import partial

import numpy as np
import pytest
import torch

from tests.envs.agents import Turns, Walkers, number
from tests.oracle.comparing import dense
from trawl import Collector, RandomPolicy
from trawl.collectors import AsyncBatchedCollector
from trawl.envs import PettingZooEnv
from trawl.errors import EnvStateError


class Failing(Walkers):
    """Fails in a step."""

    def __init__(self, step):
        super().__init__(late=False)
        self.fails_in = step

    def step(self, actions):
        if self.t + 1 == self.fails_in:
            raise OSError("no answer")
        return super().step(actions)


def collected(made, frames=12, **options):
    """Collects frames from environments of which the first one fails."""
    envs = iter(made)

    def make():
        return PettingZooEnv(next(envs), done_on_any=False)

    options = {"frames_per_batch": frames, "on_env_error": "restart", **options}
    with Collector(make, None, **options) as collector:
        collector.set_seed(5)
        with pytest.warns(RuntimeWarning, match="OSError: no .*rebuilt because"):
            batch = collector.next()
        assert collector.stats()["env_restarts"] == 1
    return batch


def test_a_step_that_fails_truncates_the_episode():
    second = Walkers(late=False)
    batch = collected([Failing(5), second])
    mask, following = batch["collector", "mask"], batch["next"]
    assert mask.tolist() == [i != 4 for i in range(12)]
    assert following["done"].flatten().nonzero().flatten().tolist() == [3, 10]
    assert following["truncated"][3].item()
    # The first walker had died in step 3.
    assert following["walker", "done"][3].flatten().tolist() == [True, True]
    assert following["walker", "truncated"][3].flatten().tolist() == [True, True]
    assert following["walker", "terminated"][3].flatten().tolist() == [True, False]
    assert following["flyer", "truncated"][3].item()
    assert not following["flyer", "observation"][4].any()
    seen = batch["flyer", "observation"][mask][:, 0, 0].tolist()
    assert seen == [number(step, "flyer") for step in (0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0)]
    assert batch["collector", "traj_ids"][mask].unique_consecutive().numel() == 3
    assert second.seeds[-2] is not None


def test_an_environment_that_was_passed_as_an_object_is_refused():
    with pytest.raises(ValueError, match="create_env_fn is an existing"):
        Collector(Walkers(), None, frames_per_batch=6, on_env_error="restart")


OPTIONS = {"max_frames_per_traj": 4, "frame_stack": 2, "set_truncated": True}


def at_their_own_pace(sources, **options):
    """Returns a collector whose environments become ready in the same order each time."""
    in_step = {"min_batch_size": len(sources), "server_timeout": float("inf")}
    options = {"policy": RandomPolicy(), "env_backend": "threading", **in_step, **options}
    return AsyncBatchedCollector(sources, **options)


@pytest.mark.parametrize("make", [Walkers, partial(Walkers, "info"), Turns])
def test_environments_at_their_own_pace_show_the_same(make):
    def source():
        return PettingZooEnv(make(), done_on_any=False, return_state=make is not Turns)

    options = {"frames_per_batch": 14, **OPTIONS}
    with (
        at_their_own_pace([source] * 2, envs_per_worker=2, **options) as ready,
        Collector([source] * 2, None, **options) as collector,
    ):
        for _ in range(3):
            found, wanted = ready.next(), collector.next()
            envs = [found["env_index"] == env for env in range(2)]
            assert {*found.keys(True)} - {*wanted.keys(True)} == {"env_index", "policy_version"}
            for key in wanted.keys(True, True):
                if key[-1] in ("action", "traj_ids"):
                    continue
                rows = dense(found[key])
                own = torch.stack([rows[chosen] for chosen in envs])
                assert torch.equal(own, dense(wanted[key])), key
        stats = [one.stats()["episode_return_mean"] for one in (ready, collector)]
        assert stats[0] == pytest.approx(stats[1])


def test_an_environment_at_its_own_pace_is_made_again():
    made = iter([Failing(3), Walkers(late=False)])
    source = partial(next, made)
    with (
        at_their_own_pace([source], frames_per_batch=8, on_env_error="restart") as collector,
        pytest.warns(RuntimeWarning, match="environment 0 failed after .*no answer"),
    ):
        following = collector.next()["next"]
    assert following["done"].flatten().tolist() == [i in (1, 4, 7) for i in range(8)]
    assert following["truncated"][1].item()
    for group in ("walker", "flyer"):
        assert (following[group, "done"] & following[group, "truncated"])[1].all()
        assert not following[group, "done"][2].any()


def test_another_environment_as_the_replacement_is_refused():
    made = iter([Failing(2), Turns()])
    with (
        Collector(
            lambda: next(made), None, frames_per_batch=6, on_env_error="restart"
        ) as collector,
        pytest.raises(OSError, match="no answer") as caught,
    ):
        collector.next()
    assert "was made again with full_observation_spec" in "".join(caught.value.__notes__)


def walkers(masks="observation"):
    return PettingZooEnv(Walkers(masks), done_on_any=False)


class Closed(Walkers):
    """Neither its attributes nor a pickle can be its state."""

    def __init__(self):
        super().__init__(late=False)
        self.draw = (one for one in torch.rand(1000).tolist())

    def _observe(self, agent):
        return super()._observe(agent) + next(self.draw)


def test_a_state_that_can_not_be_captured():
    with Collector(Closed, None, frames_per_batch=4) as collector:
        collector.next()
        assert collector.env_state_methods() == ["none"]
        state = collector.state_dict()
        collector.load_state_dict(state, on_state_mismatch="new_episodes")
        assert collector.next()["next", "done"].flatten().tolist() == [False, False, True, False]


class Seeded(Closed):
    """Its episodes depend on a generator, and on something that no state has."""

    steps = 0

    def __init__(self):
        super().__init__()
        self.np_random = np.random.default_rng(0)

    def _observe(self, agent):
        type(self).steps += 1
        return Walkers._observe(self, agent) + type(self).steps


def test_a_replay_with_other_results_is_an_error():
    with Collector(Seeded, None, frames_per_batch=4) as collector:
        collector.next()
        assert collector.env_state_methods() == ["replay"]
        state = collector.state_dict()
        with pytest.raises(EnvStateError, match=r"replayed.*'observation'\) after them differ"):
            collector.load_state_dict(state)


def test_a_state_of_another_environment_is_refused():
    with (
        Collector(walkers, None, frames_per_batch=4) as one,
        Collector(Turns, None, frames_per_batch=4) as other,
        pytest.raises(EnvStateError, match=r"wrapper chain is .*Walkers.*Turns"),
    ):
        other.load_state_dict(one.state_dict())
