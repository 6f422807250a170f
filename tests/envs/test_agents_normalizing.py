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


@pytest.fixture(params=SOURCES, name="source")
def _source(request):
    return SOURCES[request.param]


def test_absent_agents_do_not_count(source):
    raw, _ = collected(source)
    own, found = collected(source, **OPTIONS)
    absences = 0
    for group in groups_of(raw):
        present = ~raw[group, "done"][..., 0]
        absences += int((~present).sum())
        values = raw[observation_of(raw, group)].double().numpy()
        moments = found.observations[observation_of(own, group)]
        for agent in range(present.shape[-1]):
            seen = values[:, :, agent][present[:, :, agent].numpy()]
            assert int(moments.counts[agent, 0]) == len(seen) > 0
            np.testing.assert_allclose(moments.mean[agent], seen.mean(0), rtol=1e-9)
            np.testing.assert_allclose(moments.var[agent], seen.var(0), rtol=1e-9, atol=1e-9)
        assert torch.equal(own["next", group, "raw_reward"], raw["next", group, "reward"])
    assert absences


def test_entries_of_absent_agents_stay_zero(source):
    own, _ = collected(source, **OPTIONS)
    ends = 0
    for group in groups_of(own):
        before = own[group, "done"][..., 0]
        gone = before & own["next", group, "done"][..., 0]
        assert (own[observation_of(own, group)][before] == 0).all()
        assert (own[("next", *observation_of(own, group))][gone] == 0).all()
        # A last observation is not zero.
        died = own["next", group, "done"][..., 0] & ~before
        ends += int(own[("next", *observation_of(own, group))][died].any())
    assert ends


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


def test_returns_are_those_of_agents_that_are_present(source):
    raw, _ = collected(source)
    own, found = collected(source, **OPTIONS)
    for group in groups_of(raw):
        exact = RunningMoments.of(returns_of(raw, group))
        moments = found.rewards[group, "reward"]
        assert moments.count == exact.count
        np.testing.assert_allclose(moments.var, exact.var, rtol=1e-9)
        last = slice(-24 // own.shape[1], None)
        scale = 1 / np.sqrt(exact.var + 1e-8)
        expected = (raw["next", group, "reward"][last] * float(scale)).clamp(-10, 10)
        torch.testing.assert_close(own["next", group, "reward"][last], expected)


def test_values_of_present_agents_have_their_own_statistics(source):
    raw, _ = collected(source, 4)
    own, _ = collected(source, 4, **OPTIONS)
    _, before = collected(source, 3, **OPTIONS)
    rows = slice(-24 // own.shape[1] + 1, None)
    for group in groups_of(raw):
        mean, scale = before.observations[observation_of(own, group)].affine(1e-8)
        values, present = raw[observation_of(raw, group)][rows], ~raw[group, "done"][rows][..., 0]
        expected = torch.from_numpy((values.double().numpy() - mean) * scale).clamp(-10, 10)
        found = own[observation_of(own, group)][rows].double()
        torch.testing.assert_close(found[present], expected[present], rtol=1e-4, atol=1e-4)


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
