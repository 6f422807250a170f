"""Seeds, turns and mistakes of scripted agents."""

import numpy as np
import pytest

from tests.envs.agents import Turns, Walkers
from trawl import Collector


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
