"""A pool of numbered environments that become ready in any order."""

import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv

from trawl.testing import NumberedEnv


class NumberedPool(VectorEnv):
    """Steps numbered environments, and returns ``batch_size`` of them, drawn by a seed.

    It has the interface of ALE's ``AtariVectorEnv``, and is strict: actions must be for exactly
    the environments that it returned last, and a reset waits for none.
    """

    def __init__(self, lengths, num_envs=6, batch_size=2, mode=AutoresetMode.NEXT_STEP, seed=0):
        self.envs = [NumberedEnv(number, lengths=lengths) for number in range(num_envs)]
        self.num_envs, self.batch_size, self.autoreset_mode = num_envs, batch_size, mode
        self.single_observation_space = Box(-np.inf, np.inf, (5,), np.float32)
        self.single_action_space = Discrete(4)
        self._random = np.random.default_rng(seed)
        self._results, self._returned = {}, None
        self._ended = set()

    def reset(self, *, seed=None, options=None):
        assert not self._results
        self._ended = set()
        self._results = {
            number: (env.reset(seed=seed)[0], 0.0, False, False, None)
            for number, env in enumerate(self.envs)
        }
        obs, _, _, _, info = self.recv()
        return obs, info

    def send(self, actions):
        assert actions.shape == (self.batch_size,)
        for number, action in zip(self._returned, actions, strict=True):
            self._results[number] = self._step(number, action)
        self._returned = None

    def _step(self, number, action):
        env = self.envs[number]
        if number in self._ended:
            self._ended.remove(number)
            return env.reset()[0], 0.0, False, False, None
        obs, reward, terminated, truncated, _ = env.step(action)
        if not (terminated or truncated):
            return obs, reward, terminated, truncated, None
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            return env.reset()[0], reward, terminated, truncated, obs
        self._ended.add(number)
        return obs, reward, terminated, truncated, None

    def recv(self):
        assert len(self._results) >= self.batch_size
        ready = self._random.permutation(sorted(self._results))[: self.batch_size]
        found = [self._results.pop(number) for number in ready]
        self._returned = ready
        obs, reward, terminated, truncated, finals = zip(*found, strict=True)
        info = {"env_id": ready.astype(np.int32)}
        if any(final is not None for final in finals):
            info["final_obs"] = np.stack([np.zeros(5) if x is None else x for x in finals])
        return (
            np.stack(obs),
            np.array(reward, np.float32),
            np.array(terminated),
            np.array(truncated),
            info,
        )
