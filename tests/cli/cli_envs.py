"""Environments that the tests of the command line name."""

import os

import gymnasium
import numpy as np
from gymnasium import spaces

from trawl.testing import FaultyEnv


class Saying(gymnasium.Env):
    """Says in words how many steps it took; an episode has as many as it is asked for."""

    def __init__(self, steps=5, kind="text"):
        text = spaces.Text(20, charset="step 0123456789é")
        self.observation_space = spaces.Dict({"said": text, "x": spaces.Box(-1, 99, (2,))})
        if kind == "sequence":
            self.observation_space = spaces.Sequence(spaces.Discrete(3))
        self.action_space = spaces.Discrete(2)
        self.steps = steps

    def _observation(self):
        return {"said": f"é step {self.step_count}", "x": np.full(2, self.step_count, np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.step_count = 0
        return self._observation(), {}

    def step(self, action):
        self.step_count += 1
        return self._observation(), 1.0, self.step_count == self.steps, False, {}


def pendulum(gravity=10.0):
    return gymnasium.make("Pendulum-v1", g=gravity)


def name():
    return "CartPole-v1"


def vector(num_envs=3):
    return gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="sync")


def async_vector(num_envs=3):
    options = {"vectorization_mode": "async", "vector_kwargs": {"context": "fork"}}
    return gymnasium.make_vec("CartPole-v1", num_envs, **options)


def torchrl(**kwargs):
    from torchrl.envs import GymEnv

    return GymEnv("CartPole-v1", **kwargs)


class Broken(gymnasium.Env):
    """Can be made, but not be reset."""

    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Discrete(2)

    def __init__(self, text=False):
        if text:
            self.observation_space = spaces.Text(9)

    def reset(self, *, seed=None, options=None):
        raise RuntimeError("no licence")


class Placed(Broken):
    """Its observations tell the process that it is in."""

    observation_space = spaces.Box(0, 2**31, (1,), np.float64)

    def reset(self, *, seed=None, options=None):
        return np.array([os.getpid()], np.float64), {}

    def step(self, action):
        return *self.reset()[:1], 0.0, False, False, {}


def broken_vector():
    return gymnasium.vector.SyncVectorEnv([Broken])


def spends_steps():
    """Can't restart its environments one by one."""
    return gymnasium.wrappers.vector.RecordEpisodeStatistics(vector())


def broken_parallel():
    from trawl import ParallelEnv

    return ParallelEnv(1, Broken)


def broken_torchrl():
    from torchrl.envs import GymWrapper, TransformedEnv

    return TransformedEnv(GymWrapper(Broken()))


class Unseeded(Saying):
    """Can't be reset with a seed."""

    def reset(self):
        return super().reset()


def untrained():
    """A policy for two numbers."""
    import torch

    return lambda observation: torch.zeros(2, dtype=torch.int64)


def fails():
    raise ZeroDivisionError("no environment today")


NUMBER = 3


def gaussian(env):
    """A policy that draws its actions, the mean of which is 0.25."""
    import torch
    from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule
    from tensordict.nn import ProbabilisticTensorDictSequential as Sequential

    class Fixed(torch.nn.Module):
        def forward(self, observation):
            return torch.full_like(observation[..., :1], 0.25), torch.ones_like(
                observation[..., :1]
            )

    return Sequential(
        TensorDictModule(Fixed(), in_keys=["observation"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=torch.distributions.Normal,
        ),
    )


class Gated(gymnasium.Env):
    """At step 150, it waits until the pipe ``gate`` in the current folder is opened for writing."""

    observation_space = spaces.Box(-1, 99, (2,))
    action_space = spaces.Discrete(2)
    taken = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.taken += 1
        if self.taken == 150:
            with open("gate"):
                pass
        return np.zeros(2, np.float32), 1.0, self.taken % 10 == 0, False, {}


class Informing(gymnasium.Env):
    """Its info has an action mask, text, statistics of episodes and nested values."""

    observation_space = spaces.Box(-1, 99, (1,))
    action_space = spaces.Discrete(3)

    def _shown(self):
        mask = np.array([1, self.step_count % 2, 0], np.int8)
        info = {"action_mask": mask, "said": f"é step {self.step_count}", "object": object()}
        info["nested"] = {"half": self.step_count / 2}
        return np.full(1, self.step_count, np.float32), info

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.step_count = 0
        return self._shown()

    def step(self, action):
        assert [1, self.step_count % 2, 0][action], f"action {action} is not allowed"
        self.step_count += 1
        obs, info = self._shown()
        done = self.step_count == 5
        if done:
            info["episode"] = {"r": 5.0, "l": 5}
        return obs, 1.0, done, False, info


def with_infos():
    from trawl.envs import GymEnv

    return GymEnv(Informing(), info_keys=["action_mask"])


def allowed():
    """A policy that takes the last action that is allowed, from ("info", "action_mask")."""
    import torch
    from tensordict.nn import TensorDictModule

    def act(mask):
        return torch.nn.functional.one_hot(mask.long().sum(-1) - 1, 3)

    return TensorDictModule(act, [("info", "action_mask")], ["action"])


def breaks():
    """Fails at its seventh step."""
    return FaultyEnv(7, RuntimeError("it broke"))


class Tracing(Broken):
    """Its reset fails with a message that begins like an option of the command."""

    def reset(self, *, seed=None, options=None):
        raise ValueError("trace of a matrix")


def traces():
    return Tracing()
