"""The case of entries of ``info`` in batches: what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch

import hand
import work
from harness import HAND, TRAWL, Case, Contender, Source

WITHOUT = "without info_keys"
HAND_WITHOUT = "hand-written loop, without info"
GOAL = 0.9
FRAMES = 1000
NAMES = ("state", "constant")
CONSTANT = np.zeros(3, np.float32)


class TwoArrays(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Reports two arrays in the info of each step and reset."""

    def reset(self, **kwargs: Any) -> Any:
        obs, _ = self.env.reset(**kwargs)
        return obs, {"state": obs, "constant": CONSTANT}

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, _ = self.env.step(action)
        return obs, reward, terminated, truncated, {"state": obs, "constant": CONSTANT}


def source(info_keys: Sequence[str] | None, acts: bool) -> Source:
    """Batches of a collector whose environment has or lacks ``info_keys``.

    Args:
        info_keys: the names.
        acts: True to act with an MLP, False for random actions.
    """
    from trawl.collectors import Collector
    from trawl.envs import GymEnv

    env = GymEnv(TwoArrays(work.cartpole()), info_keys=info_keys, categorical_action_encoding=True)
    policy = work.acting(network()) if acts else None
    collector = Collector(env, policy, frames_per_batch=FRAMES, total_frames=-1)
    try:
        for batch in collector:
            # Without the names, it delivers less, on purpose.
            yield batch.numel(), batch if info_keys else None
    finally:
        collector.shutdown()


def network() -> work.Argmax:
    return work.Argmax(work.mlp(4, 2, 4))


def by_hand(names: Sequence[str], acts: bool) -> Source:
    """The limit: the loop by hand, which copies these entries of the info, and the same without."""
    env, act = TwoArrays(work.cartpole()), hand.only(network())
    observation, info = env.reset(seed=0)
    memory = hand.allocate((FRAMES,), observation, act, ("action",))
    zeros = {name: np.zeros((FRAMES, *info[name].shape), info[name].dtype) for name in names}
    before, after = zeros, {name: array.copy() for name, array in zeros.items()}
    for name in names:
        memory.batch.set(("info", name), torch.from_numpy(before[name]))
        memory.batch.set(("next", "info", name), torch.from_numpy(after[name]))
    trajectory, (actions,) = 0, memory.outputs
    while True:
        drawn = np.random.randint(0, 2, FRAMES)
        with torch.no_grad():
            for t in range(FRAMES):
                memory.observations[t] = observation
                for name in names:
                    before[name][t] = info[name]
                action = act(memory.observation[t])[0].numpy() if acts else drawn[t]
                actions[t] = action
                observation, reward, terminated, truncated, info = env.step(action)
                memory.next_observations[t] = observation
                for name in names:
                    after[name][t] = info[name]
                memory.reward[t] = reward
                memory.terminated[t] = terminated
                memory.truncated[t] = truncated
                memory.done[t] = terminated or truncated
                memory.trajectory[t] = trajectory
                if terminated or truncated:
                    observation, info = env.reset()
                    trajectory += 1
        yield FRAMES, memory.batch if names else None


def info_cartpole() -> Case:
    return case("info_cartpole", "MLP 2x64, long episodes", True, GOAL)


def info_random() -> Case:
    # The steps are so short that even the hand-written loop takes more than a tenth longer.
    return case("info_random", "random actions", False, None)


def case(name: str, policy: str, acts: bool, goal: float | None) -> Case:
    return Case(
        name,
        f"1 CartPole with two arrays of info, {policy}",
        (
            Contender(TRAWL, lambda: source(NAMES, acts)),
            Contender(WITHOUT, lambda: source(None, acts), goal),
            Contender(HAND, lambda: by_hand(NAMES, acts), goal),
            Contender(HAND_WITHOUT, lambda: by_hand((), acts)),
        ),
    )


CASES = {"info_cartpole": info_cartpole, "info_random": info_random}
