"""Normalised observations and rewards of agents that die early or appear late."""

import io

import numpy as np
import pytest
import torch

from tests.envs.agents import Turns, Walkers
from trawl import Collector
from trawl.collectors import NormalizeReward
from trawl.envs import PettingZooEnv
from trawl.rollout.moments import RunningMoments

GAMMA = 0.9
OPTIONS = {
    "normalize_observations": True,
    "normalize_rewards": NormalizeReward(gamma=GAMMA, keep_raw=True),
}


def walkers():
    return PettingZooEnv(Walkers(), done_on_any=False)


def turns():
    return PettingZooEnv(Turns(), done_on_any=False)


def groups_of(frames):
    return sorted(frames.keys() & {"walker", "walker_0", "walker_1", "flyer"})


def observation_of(frames, group):
    """Returns the key of the observations, which are in a dictionary if it has masks, too."""
    nested = (group, "observation", "observation")
    return nested if nested in frames.keys(True) else (group, "observation")


def collected(source, count=3, **options):
    """Returns frames with time first, then the environment, and the statistics."""
    with Collector(source, frames_per_batch=24, **options) as collector:
        # Random actions don't depend on the observations.
        collector.set_seed(0)
        batches = [collector.next() for _ in range(count)]
        found = collector.normalization
    frames = torch.cat(batches, -1)
    return (frames[None] if frames.ndim == 1 else frames).transpose(0, 1), found


class Returning(Walkers):
    """The first walker dies in step 3, and appears again in step 4."""

    def step(self, actions):
        results = super().step(actions)
        if self.t == 4:
            self.agents.insert(0, "walker_0")
            new = self._observe("walker_0"), 7.0, False, False, self._info("walker_0")
            for values, value in zip(results, new, strict=True):
                values["walker_0"] = value
        return results


def returning():
    return PettingZooEnv(Returning(), done_on_any=False)


SOURCES = {"one": walkers, "several": [walkers] * 3, "turns": turns, "returning": returning}


def returns_of(frames, group):
    """Returns the discounted returns of all agents that are present, in a plain loop."""
    rewards = frames["next", group, "reward"][..., 0].double()
    present, done = (~frames[group, "done"][..., 0]), frames["next", group, "done"][..., 0]
    over = frames["next", "done"]
    found, carry = [], torch.zeros_like(rewards[0])
    for t in range(len(rewards)):
        carry = carry * GAMMA + rewards[t]
        found.append(carry[present[t]])
        carry = carry.masked_fill(done[t] | over[t], 0)
    return torch.cat(found).numpy()


@pytest.mark.parametrize("name", SOURCES)
def test_absent_agents_do_not_count_and_stay_zero(name):
    raw, _ = collected(SOURCES[name])
    _, before = collected(SOURCES[name], 2, **OPTIONS)
    own, after = collected(SOURCES[name], **OPTIONS)
    absences = ends = 0
    last = slice(-24 // own.shape[1], None)
    for group in groups_of(raw):
        key, absent = observation_of(raw, group), raw[group, "done"][..., 0]
        absences += int(absent.sum())
        values, found = raw[key].double().numpy(), own[key]
        # What is absent is in no statistics.
        moments = after.observations[key]
        for agent in range(absent.shape[-1]):
            seen = values[:, :, agent][~absent[:, :, agent].numpy()]
            assert int(moments.counts[agent, 0]) == len(seen) > 0
            np.testing.assert_allclose(moments.mean[agent], seen.mean(0), rtol=1e-9)
            np.testing.assert_allclose(moments.var[agent], seen.var(0), rtol=1e-9, atol=1e-9)
        # The entries of the last batch are normalised by the statistics before it.
        mean, scale = before.observations[key].affine(1e-8)
        expected = torch.from_numpy((values - mean) * scale).clamp(-10, 10)
        there = ~absent
        there[: -24 // own.shape[1] + 1] = False
        torch.testing.assert_close(found[there].double(), expected[there], rtol=1e-4, atol=1e-4)
        # Those of absent agents are zero; a last observation isn't.
        done = own["next", group, "done"][..., 0]
        assert (found[absent] == 0).all()
        assert (own[("next", *key)][absent & done] == 0).all()
        ends += int(own[("next", *key)][done & ~absent].any())
        # Returns are those of agents that are present.
        exact, rewards = RunningMoments.of(returns_of(raw, group)), raw["next", group, "reward"]
        assert torch.equal(own["next", group, "raw_reward"], rewards)
        assert after.rewards[group, "reward"].count == exact.count
        np.testing.assert_allclose(after.rewards[group, "reward"].var, exact.var, rtol=1e-9)
        expected = (rewards[last] * float(1 / np.sqrt(exact.var + 1e-8))).clamp(-10, 10)
        torch.testing.assert_close(own["next", group, "reward"][last], expected)
    assert absences
    assert ends


def test_a_state_has_the_counts_of_all_agents():
    with Collector(walkers, frames_per_batch=24, **OPTIONS) as one:
        one.set_seed(0)
        one.next()
        file = io.BytesIO()
        torch.save(one.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        expected, counts = one.next(), one.normalization.observations["walker", "observation"]
    with Collector(walkers, frames_per_batch=24, **OPTIONS) as other:
        other.load_state_dict(state)
        assert (other.next() == expected).all()
        found = other.normalization.observations["walker", "observation"]
        assert found.counts.shape == (2, 1)
        assert np.array_equal(found.counts, counts.counts)
        # Each agent of a group may also have the same count, as one number.
        for one in state["normalization"]["statistics"]:
            one["count"] = 7
        other.normalization.load_state_dict(state["normalization"])
        found = other.normalization.observations["walker", "observation"]
        assert found.counts.tolist() == [[7], [7]]
        state["normalization"]["statistics"][0]["count"] = torch.zeros(5, 1, dtype=torch.int64)
        with pytest.raises(ValueError, match=r"has 5 counts of .* of the same agents"):
            other.normalization.load_state_dict(state["normalization"])
