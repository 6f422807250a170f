"""Seeds, turns and mistakes of scripted agents."""

import numpy as np
import pytest
import torch

from tests.envs.agents import AGENTS, Turns, Walkers, number
from trawl import Collector
from trawl.envs import PettingZooEnv


class Drawing(Walkers):
    """Draws the length of each episode, which is part of the observations."""

    def reset(self, seed=None, options=None):
        if seed is not None or not hasattr(self, "generator"):
            self.generator = np.random.default_rng(seed)
        self.length = int(self.generator.integers(1, 7))
        self.episode = getattr(self, "episode", -1) + 1
        return super().reset(seed, options)

    def _observe(self, agent):
        value = super()._observe(agent)
        value[:2] = number(self.t, agent), self.length
        return value

    def step(self, actions):
        self.taken.append(actions)
        results = super().step(actions)
        if self.t == self.length:
            self.agents = []
        return *results[:3], dict.fromkeys(results[0], self.t == self.length), results[4]


def drawing():
    return PettingZooEnv(Drawing(late=False), done_on_any=False)


def test_equal_seeds_give_equal_data_and_others_do_not():
    def collect(seed):
        with Collector([drawing] * 2, None, frames_per_batch=40) as collector:
            collector.set_seed(seed)
            return collector.next()

    first, again, other = collect(3), collect(3), collect(4)
    for key in first.keys(True, True):
        assert torch.equal(first.get(key), again.get(key)), key
    assert not torch.equal(first["flyer", "observation"], other["flyer", "observation"])


class ChangingTurns(Turns):
    """In its third step, something changes that must not change."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def step(self, action):
        super().step(action)
        if self.n == 3 and self.change == "reward":
            self.rewards["flyer"] = None
        elif self.n == 3 and self.change == "agent":
            self.agents.append("stranger")
            for found in (self.rewards, self.terminations, self.truncations, self.infos):
                found["stranger"] = 0

    def observe(self, agent):
        value = super().observe("flyer" if agent == "stranger" else agent)
        if self.n == 3 and self.change == "shape":
            value["observation"] = np.zeros(5, np.float32)
        elif self.n == 3 and self.change == "mask":
            value["action_mask"] = np.ones(7, np.int8)
        elif self.n == 3 and self.change == "missing":
            return {"action_mask": value["action_mask"]}
        return value


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("reward", TypeError, "agent 'flyer' returned reward=None"),
        ("agent", RuntimeError, r"\['stranger'\], which are not among its possible_agents"),
        ("shape", ValueError, r"agent 'walker_0' has shape \(5,\), but.*\(2,\)"),
        ("mask", ValueError, r"mask of agent 'walker_0' has shape \(7,\), but.*4 choices"),
        ("missing", ValueError, "observation of agent 'walker_0' does not fit its space"),
    ],
)
def test_changes_in_mid_run_are_refused_in_turn(change, error, message):
    with (
        Collector(ChangingTurns(change), None, frames_per_batch=6) as collector,
        pytest.raises(error, match=message),
    ):
        collector.next()


@pytest.mark.parametrize("frames", [8, 5])
def test_agents_in_turn_in_a_vector(frames):
    with Collector([Turns] * 2, None, frames_per_batch=2 * frames, total_frames=80) as collector:
        batch = torch.cat(list(collector), 1)
    order = [0, 1, 2, 0, 1, 2, 1, 2]
    for env in range(2):
        for t in range(40):
            acting = [batch[agent, "mask"][env, t].item() for agent in AGENTS]
            assert acting == [i == order[t % 8] for i in range(3)]
            seen = batch["flyer", "observation", "observation"][env, t, 0, 0]
            assert seen == number(t % 8, "flyer")
            assert batch["next", "done"][env, t].item() is (t % 8 == 7)


def test_no_agents_after_a_reset_is_an_error():
    class Empty(Walkers):
        def reset(self, seed=None, options=None):
            results = super().reset(seed, options)
            if len(self.seeds) == 3:
                self.agents = []
            return results

    with (
        Collector(Empty(late=False), None, frames_per_batch=12) as collector,
        pytest.raises(RuntimeError, match="no agents after a reset"),
    ):
        collector.next()
