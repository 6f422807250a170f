"""Scripted PettingZoo environments: agents that die early or appear late, masks and infos."""

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv, ParallelEnv

AGENTS = ["walker_0", "walker_1", "flyer"]


def number(t, agent):
    """Returns a number that is different for each step and agent."""
    return t + 10 * AGENTS.index(agent)


def allowed(t):
    mask = np.ones(4, np.int8)
    mask[t % 4] = 0
    return mask


class Walkers(ParallelEnv):
    """The flyer appears in step 2, the first walker dies in step 3, all others end in step 6."""

    metadata = {"name": "walkers"}  # noqa: RUF012
    render_mode = None

    def __init__(self, masks="", late=True):
        self.possible_agents = AGENTS[:]
        self.masks, self.late, self.closed, self.seeds = masks, late, False, []
        self.taken = []

    def size(self, agent):
        return 3 if agent == "flyer" else 2

    def observation_space(self, agent):
        inner = spaces.Box(-100, 100, (self.size(agent),), np.float32)
        if self.masks != "observation":
            return inner
        return spaces.Dict(observation=inner, action_mask=spaces.MultiBinary(4))

    def action_space(self, agent):
        return spaces.Discrete(4)

    def state(self):
        return np.array([self.t, -self.t], np.float32)

    def _observe(self, agent):
        value = np.full(self.size(agent), number(self.t, agent), np.float32)
        if self.masks != "observation":
            return value
        return {"observation": value, "action_mask": allowed(self.t)}

    def _info(self, agent):
        info = {"cost": 0.5 * self.t, "text": f"{agent}:{self.t}"}
        return {**info, "action_mask": allowed(self.t)} if self.masks == "info" else info

    def reset(self, seed=None, options=None):
        self.t = 0
        self.seeds.append(seed)
        self.agents = AGENTS[:2] if self.late else AGENTS[:]
        return {a: self._observe(a) for a in self.agents}, {a: self._info(a) for a in self.agents}

    def step(self, actions):
        assert actions.keys() == set(self.agents), (actions, self.agents)
        assert all(self.action_space(a).contains(action) for a, action in actions.items())
        self.taken.append(dict(actions))
        self.t += 1
        here = [*self.agents, "flyer"] if self.late and self.t == 2 else list(self.agents)
        terminated = {a: a == "walker_0" and self.t == 3 for a in here}
        truncated = dict.fromkeys(here, self.t == 6)
        rewards = {a: float(number(self.t, a)) for a in here}
        results = {a: self._observe(a) for a in here}, rewards, terminated, truncated
        infos = {a: self._info(a) for a in here}
        self.agents = [a for a in here if not (terminated[a] or truncated[a])]
        return *results, infos

    def close(self):
        self.closed = True


class Turns(AECEnv):
    """The agents act in turn; the first one dies in step 4, and all others end in step 8."""

    metadata = {"name": "turns"}  # noqa: RUF012
    render_mode = None

    def __init__(self):
        super().__init__()
        self.possible_agents = AGENTS[:]
        self.taken = []

    def observation_space(self, agent):
        inner = spaces.Box(-100, 100, (2,), np.float32)
        return spaces.Dict(observation=inner, action_mask=spaces.MultiBinary(4))

    def action_space(self, agent):
        return spaces.Discrete(4)

    def observe(self, agent):
        value = np.full(2, number(self.n, agent), np.float32)
        return {"observation": value, "action_mask": allowed(self.n)}

    def reset(self, seed=None, options=None):
        self.n = 0
        self.agents = AGENTS[:]
        self.agent_selection = AGENTS[0]
        self.rewards = dict.fromkeys(AGENTS, 0.0)
        self._cumulative_rewards = dict.fromkeys(AGENTS, 0.0)
        self.terminations = dict.fromkeys(AGENTS, False)
        self.truncations = dict.fromkeys(AGENTS, False)
        self.infos = {agent: {} for agent in AGENTS}

    def step(self, action):
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        assert allowed(self.n)[action], (action, self.n)
        self.taken.append((agent, int(action)))
        self.n += 1
        self.rewards = {a: float(self.n) if a == agent else -1.0 for a in self.agents}
        if self.n == 4:
            self.terminations[AGENTS[0]] = True
        if self.n == 8:
            self.truncations = dict.fromkeys(self.agents, True)
        index = self.agents.index(agent)
        self.agent_selection = self.agents[(index + 1) % len(self.agents)]
        self._deads_step_first()
