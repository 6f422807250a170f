"""The case of entries of ``info`` in batches: what they cost."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

import work
from harness import TRAWL, Case, Contender, Source

WITHOUT = "without info_keys"
GOAL = 0.9
CONSTANT = np.zeros(3, np.float32)


class TwoArrays(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Reports two arrays in the info of each step and reset."""

    def reset(self, **kwargs: Any) -> Any:
        obs, _ = self.env.reset(**kwargs)
        return obs, {"state": obs, "constant": CONSTANT}

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, _ = self.env.step(action)
        return obs, reward, terminated, truncated, {"state": obs, "constant": CONSTANT}


def source(info_keys: list[str] | None) -> Source:
    """Batches of a collector whose environment has or lacks ``info_keys``."""
    from trawl.collectors import Collector
    from trawl.envs import GymEnv

    env = GymEnv(TwoArrays(work.cartpole()), info_keys=info_keys, categorical_action_encoding=True)
    policy = work.acting(work.Argmax(work.mlp(4, 2, 4)))
    collector = Collector(env, policy, frames_per_batch=1000, total_frames=-1)
    try:
        for batch in collector:
            yield batch.numel(), batch
    finally:
        collector.shutdown()


def info_cartpole() -> Case:
    return Case(
        "info_cartpole",
        "1 CartPole with two arrays of info, MLP 2x64, long episodes",
        (
            Contender(TRAWL, lambda: source(["state", "constant"])),
            Contender(WITHOUT, lambda: source(None), GOAL),
        ),
    )


CASES = {"info_cartpole": info_cartpole}
