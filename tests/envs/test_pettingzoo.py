"""PettingZoo environments: keys, values, flags and masks, against plain loops and TorchRL."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from tests.envs.agents import AGENTS, Turns, Walkers, allowed, number
from trawl import Collector
from trawl.envs import PettingZooEnv

WALKERS = {"walker": AGENTS[:2], "flyer": AGENTS[2:]}


def by_hand(steps, env, mask):
    """Steps `Walkers` without a library, and returns the entries of each agent as lists."""
    rows = []
    obs, _ = env.reset()
    flags = {a: (False, False) if a in obs else (True, True) for a in AGENTS}

    def agent_rows(obs, flags, acting, rewards=None):
        found = {}
        for agent in AGENTS:
            value = obs.get(agent)
            inner = value["observation"] if isinstance(value, dict) else value
            there = agent in obs
            terminated, truncated = flags[agent]
            found[agent] = {
                "observation": inner if there else np.zeros(env.size(agent), np.float32),
                "mask": agent in acting,
                "done": terminated or truncated,
                "terminated": terminated,
                "truncated": truncated,
                "reward": (rewards or {}).get(agent, 0.0),
            }
            if mask:
                free = np.ones(4)
                found[agent]["action_mask"] = allowed(env.t) if agent in acting else free
        return found

    for _ in range(steps):
        before = agent_rows(obs, flags, env.agents)
        obs, rewards, terminated, truncated, _ = env.step(dict.fromkeys(env.agents, 3))
        flags = {a: (terminated[a], truncated[a]) if a in obs else (True, True) for a in AGENTS}
        after = agent_rows(obs, flags, env.agents, rewards)
        over = not env.agents
        rows.append((before, after, over))
        if over:
            obs, _ = env.reset()
            flags = {a: (False, False) if a in obs else (True, True) for a in AGENTS}
    return rows


def check_agents(frame, expected, rewards):
    for group, agents in WALKERS.items():
        for index, agent in enumerate(agents):
            for name, value in expected[agent].items():
                if name == "reward" and not rewards:
                    continue
                key = (group, name)
                if name == "observation" and (group, name, "observation") in frame.keys(True):
                    key = (group, name, "observation")
                got = frame.get(key)[index].numpy().reshape(np.shape(value))
                np.testing.assert_array_equal(got, value, err_msg=f"{agent} {name}")


@pytest.mark.parametrize(("masks", "frames"), [("", 3), ("observation", 18), ("info", 3)])
def test_agents_that_die_and_appear_are_as_in_a_plain_loop(masks, frames):
    def act(td):
        for group, agents in WALKERS.items():
            td.set((group, "action"), torch.full((len(agents),), 3))
        return td

    env = PettingZooEnv(Walkers(masks), done_on_any=False)
    with Collector(env, act, frames_per_batch=frames, total_frames=18) as collector:
        batch = torch.cat(list(collector))[:18]
        assert collector.stats()["env_path"] == "array"
    expected = by_hand(18, Walkers(masks), masks == "observation")
    for t, (before, after, over) in enumerate(expected):
        check_agents(batch[t], before, False)
        check_agents(batch[t]["next"], after, True)
        assert batch[t]["next", "done"].item() is over
        assert batch[t]["done"].item() is False
        assert batch[t]["next", "truncated"].item() is over
    assert (
        batch["collector", "traj_ids"].unique_consecutive(return_counts=True)[1].tolist() == [6] * 3
    )


def test_steps_of_the_environment_itself_are_those_of_the_array_path():
    env = PettingZooEnv(Walkers("observation"), done_on_any=False)

    def act(td):
        return td.set(("walker", "action"), torch.tensor([1, 2])).set(
            ("flyer", "action"), torch.tensor([3])
        )

    expected = env.rollout(14, act, break_when_any_done=False)
    with Collector(env, act, frames_per_batch=14, total_frames=14) as collector:
        batch = collector.next().exclude("collector")
    assert set(batch.keys(True, True)) == set(expected.keys(True, True))
    for key in batch.keys(True, True):
        assert torch.equal(batch.get(key), expected.get(key)), key
        assert batch.get(key).dtype == expected.get(key).dtype, key


def test_agents_in_turn_and_their_dead_steps():
    source = Turns()
    with Collector(PettingZooEnv(source), None, frames_per_batch=32, total_frames=32) as collector:
        source.taken.clear()
        batch = collector.next()
    masks = torch.cat([batch[agent, "mask"] for agent in AGENTS], -1)
    assert masks.sum(-1).tolist() == [1] * 32
    one = [0, 1, 2, 0, 1, 2, 1, 2]
    assert masks.int().argmax(-1).tolist() == one * 4
    actions = torch.cat([batch[agent, "action"] for agent in AGENTS], -1)
    assert source.taken == [(AGENTS[i], actions[t, i].item()) for t, i in enumerate(one * 4)]
    assert batch["next", "done"].flatten().nonzero().flatten().tolist() == [7, 15, 23, 31]
    own = batch["next", "walker_0", "reward"].flatten()[:8].tolist()
    assert own == [1, -1, -1, 4, 0, 0, 0, 0]
    assert batch["next", "walker_0", "done"].flatten()[:8].tolist() == [False] * 3 + [True] * 5


def test_the_return_of_a_team_is_the_mean_of_its_agents():
    env = PettingZooEnv(Walkers(late=False), done_on_any=False)
    with Collector(env, None, frames_per_batch=12) as collector:
        collector.next()
        mean = collector.stats()["episode_return_mean"]
    sums = [sum(number(t, a) for t in range(1, 4 if a == "walker_0" else 7)) for a in AGENTS]
    assert mean == pytest.approx(np.mean(sums))


@pytest.mark.parametrize(
    "map_", [None, {"pilot": AGENTS[2:], "team": AGENTS[:2]}, {agent: [agent] for agent in AGENTS}]
)
def test_groups_are_named_by_prefix_or_by_the_map(map_):
    env = PettingZooEnv(Walkers(late=False), group_map=map_)
    assert env.group_map == (map_ or WALKERS)
    frame = env.rollout(2)[1]
    for group, agents in env.group_map.items():
        assert frame[group, "action"].shape == (len(agents),)
        seen = frame["next", group, "observation"][:, 0].tolist()
        assert seen == [number(2, agent) for agent in agents]


def test_the_state_and_one_hot_actions():
    env = PettingZooEnv(Walkers(late=False), return_state=True, categorical_actions=False)
    batch = env.rollout(3)
    assert batch["next", "state"].tolist() == [[1, -1], [2, -2], [3, -3]]
    assert batch["walker", "action"].shape == (3, 2, 4)
    assert set(env.reward_keys) == {("walker", "reward"), ("flyer", "reward")}


def test_unknown_and_repeated_agents_in_a_group_map_are_refused():
    with pytest.raises(ValueError, match=r"does not have: \['swimmer'\]"):
        PettingZooEnv(Walkers(), group_map={"all": [*AGENTS[:2], "swimmer"]})
    with pytest.raises(ValueError, match="exactly once, but it names 'flyer' 0 times"):
        PettingZooEnv(Walkers(), group_map={"all": AGENTS[:2]})
    with pytest.raises(ValueError, match=r"'team' need equal spaces.*'flyer'"):
        PettingZooEnv(Walkers(), group_map={"team": AGENTS})
    with pytest.raises(TypeError, match=r"group_map must be a mapping.*3"):
        PettingZooEnv(Walkers(), group_map=3)
    with pytest.raises(ValueError, match="reserved name: 'next'"):
        PettingZooEnv(Walkers(), group_map={"next": AGENTS[:2], "b": AGENTS[2:]})
    with pytest.raises(TypeError, match="env must be a pettingzoo"):
        PettingZooEnv(3)


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


class Changing(Walkers):
    """In step 2, something changes that must not change."""

    def __init__(self, change):
        super().__init__(late=False)
        self.change = change

    def reset(self, seed=None, options=None):
        results = super().reset(seed, options)
        if self.change == "none" and len(self.seeds) == 3:
            self.agents = []
        return results

    def step(self, actions):
        obs, rewards, *rest = super().step(actions)
        if self.t == 2:
            if self.change == "agents":
                obs["stranger"] = obs["flyer"]
            elif self.change == "shape":
                obs["walker_1"] = np.zeros(5, np.float32)
            elif self.change == "dtype":
                obs["walker_1"] = obs["walker_1"].astype(complex)
            elif self.change == "reward":
                rewards["walker_1"] = "much"
        return obs, rewards, *rest


@pytest.mark.parametrize(
    ("make", "change", "error", "message"),
    [
        (Changing, "agents", RuntimeError, r"\['stranger'\], .* not among its possible_agents"),
        (Changing, "shape", ValueError, r"walker_1' has shape \(5,\).*says \(2,\)"),
        (Changing, "dtype", TypeError, "walker_1' is complex128.*float32"),
        (Changing, "reward", TypeError, "agent 'walker_1' returned reward='much', but .* number"),
        (ChangingTurns, "reward", TypeError, "agent 'flyer' returned reward=None"),
        (ChangingTurns, "agent", RuntimeError, r"\['stranger'\], which are not among its possible"),
        (ChangingTurns, "shape", ValueError, r"agent 'walker_0' has shape \(5,\), but.*\(2,\)"),
        (ChangingTurns, "mask", ValueError, r"mask of agent 'walker_0' has shape \(7,\), but.*4"),
        (ChangingTurns, "missing", ValueError, "observation of agent 'walker_0' does not fit"),
        (Changing, "none", RuntimeError, "no agents after a reset"),
    ],
)
def test_changes_in_mid_run_are_refused(make, change, error, message):
    with (
        Collector(make(change), None, frames_per_batch=12) as collector,
        pytest.raises(error, match=message),
    ):
        collector.next()


def test_spaces_without_a_layout_are_refused():
    class Text(Walkers):
        def observation_space(self, agent):
            return spaces.Text(5)

    with pytest.raises(ValueError, match=r"\('walker', 'observation'\) has no fixed layout"):
        PettingZooEnv(Text())


def test_a_closed_collector_closes_the_environment():
    source = Walkers()
    Collector(source, None, frames_per_batch=2).shutdown()
    assert source.closed
