"""The cases of stacked frames: 4 frames of 84x84 pixels, stored once or in each stack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import FrameStackObservation
from torch import Tensor, nn

import work
from harness import HAND, TRAWL, Case, Contender, Source
from tensor_stacks import STACK, stack_tensors

FRAMES = 512
WRAPPED = "Trawl with Gymnasium's FrameStackObservation"
MakeEnv = Callable[[], gymnasium.Env[Any, Any]]


class FrameEnv(gymnasium.Env[Any, Any]):
    """Single frames, freshly made each step, for the price of one copy."""

    observation_space = Box(0, 255, (84, 84), np.uint8)
    action_space = Discrete(6)
    length = 500

    def __init__(self) -> None:
        self._frames = np.random.default_rng(0).integers(0, 256, (64, 84, 84), np.uint8)
        self._step = 0

    def reset(self, **_: Any) -> Any:
        self._step = 0
        return self._frames[0].copy(), {}

    def step(self, action: Any) -> Any:
        self._step += 1
        frame = self._frames[self._step % 64].copy()
        return frame, 1.0, False, self._step >= self.length, {}


def pong() -> gymnasium.Env[Any, Any]:
    """Pong with the usual preprocessing, without stacks."""
    import ale_py
    from gymnasium.wrappers import AtariPreprocessing

    gymnasium.register_envs(ale_py)
    env = gymnasium.make("ALE/Pong-v5", frameskip=1, disable_env_checker=True)
    return AtariPreprocessing(env, noop_max=0)


class Glance(nn.Module):
    """A cheap policy that looks at some pixels of each frame of a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(STACK * 7 * 7, 6)

    def forward(self, observation: Tensor) -> Tensor:
        seen = observation[..., ::12, ::12].flatten(-3).float()
        logits: Tensor = self.head(seen)
        return logits.argmax(-1)


def policy() -> Glance:
    torch.manual_seed(0)
    return Glance()


def source(make: MakeEnv, envs: int, stored_once: bool) -> Source:
    """Batches of a collector that stacks the frames itself, or whose environments do."""
    from trawl.collectors import Collector
    from trawl.envs import GymEnv

    def one() -> GymEnv:
        env = make() if stored_once else FrameStackObservation(make(), STACK)
        return GymEnv(env, categorical_action_encoding=True)

    collector = Collector(
        one if envs == 1 else [one] * envs,
        work.acting(policy()),
        frames_per_batch=FRAMES * envs,
        total_frames=-1,
        frame_stack=STACK if stored_once else None,
    )
    try:
        for batch in collector:
            yield batch.numel(), batch
    finally:
        collector.shutdown()


def hand(make: MakeEnv, count: int) -> Source:
    """A loop that stores each frame once; a stack is a window, at the offset of its step.

    At a reset, the first frame is stored `STACK` times, so that all windows are contiguous.
    """
    envs, act = [make() for _ in range(count)], policy()
    newest = [env.reset(seed=i)[0] for i, env in enumerate(envs)]
    stacks = [np.repeat(frame[None], STACK, 0) for frame in newest]
    trajectory = list(range(count))
    for batch in cycle([_memory(count) for _ in range(2)]):
        at = {key: value.numpy() for key, value in batch.items() if key != "frames"}
        frames = batch["frames"].numpy()
        ends = [STACK] * count
        for i in range(count):
            frames[i, :STACK] = stacks[i]
        with torch.no_grad():
            for t in range(FRAMES):
                starts = [end - STACK for end in ends]
                at["offset"][:, t] = starts
                actions = act(_windows(batch["frames"], starts)).numpy()
                at["action"][:, t] = actions
                for i, env in enumerate(envs):
                    frame, reward, terminated, truncated, _ = env.step(actions[i])
                    frames[i, ends[i]] = frame
                    ends[i] += 1
                    at["reward"][i, t] = reward
                    at["terminated"][i, t] = terminated
                    at["truncated"][i, t] = truncated
                    at["done"][i, t] = terminated or truncated
                    at["trajectory"][i, t] = trajectory[i]
                    if terminated or truncated:
                        frames[i, ends[i] : ends[i] + STACK] = env.reset()[0]
                        ends[i] += STACK
                        trajectory[i] = max(trajectory) + 1
        stacks = [frames[i, end - STACK : end].copy() for i, end in enumerate(ends)]
        # The layout is not the one of a collector.
        yield FRAMES * count, None


def _windows(frames: Tensor, starts: Sequence[int]) -> Tensor:
    if len(starts) == 1:
        return frames[:, starts[0] : starts[0] + STACK]
    return torch.stack([frames[i, start : start + STACK] for i, start in enumerate(starts)])


def _memory(count: int) -> dict[str, Tensor]:
    sizes = (count, FRAMES)
    flags = {
        name: torch.zeros(sizes, dtype=torch.bool) for name in ("terminated", "truncated", "done")
    }
    numbers = {
        name: torch.zeros(sizes, dtype=torch.int64) for name in ("offset", "action", "trajectory")
    }
    frames = torch.zeros((count, FRAMES + 16 * STACK, 84, 84), dtype=torch.uint8)
    return {"frames": frames, "reward": torch.zeros(sizes), **flags, **numbers}


def _case(name: str, title: str, make: MakeEnv, envs: int, goal: float) -> Case:
    return Case(
        name,
        title,
        (
            Contender(TRAWL, lambda: source(make, envs, True), note="frame_stack=4"),
            Contender(HAND, lambda: hand(make, envs), goal, "each frame stored once"),
            Contender(WRAPPED, lambda: source(make, envs, False)),
        ),
    )


def stack_images() -> Case:
    return _case("stack_images", "1 synthetic 84x84 env, stacks of 4", FrameEnv, 1, 0.75)


def stack_images8() -> Case:
    return _case("stack_images8", "8 synthetic 84x84 envs, stacks of 4", FrameEnv, 8, 0.85)


def stack_pong() -> Case:
    return _case("stack_pong", "1 Pong, stacks of 4", pong, 1, 0.95)


CASES = {
    "stack_images": stack_images,
    "stack_images8": stack_images8,
    "stack_pong": stack_pong,
    "stack_tensors": stack_tensors,
}
