"""Stacked frames of environments whose data are torch tensors."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode
from torch import Tensor, nn

import work
from harness import HAND, TRAWL, Case, Contender, Source

STACK = 4
COUNT, STEPS, LENGTH, SIDE, ACTIONS = 64, 32, 500, 64, 2
OWN_CODE = "Trawl with a policy of own code"


class Frames:
    """64 environments of 64x64 depths, for the price of one copy, in mode SAME_STEP."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 - as Gymnasium
    num_envs = COUNT
    device = torch.device("cpu")
    single_observation_space = Box(0, 1, (SIDE, SIDE))
    single_action_space = Box(-1, 1, (ACTIONS,))

    def __init__(self) -> None:
        self.unwrapped = self
        generator = torch.Generator().manual_seed(0)
        self._frames = torch.rand((2 * COUNT, SIDE, SIDE), generator=generator)
        self._never = torch.zeros(COUNT, dtype=torch.bool)
        self._reward = torch.ones(COUNT)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Tensor, dict[str, Any]]:
        """Begins all episodes, each with another number of steps to go."""
        self._step = 0
        self._age = torch.arange(COUNT) * LENGTH // COUNT
        return self._frames[:COUNT].clone(), {}

    def step(self, action: Tensor) -> tuple[Any, ...]:
        """Shows the next frames, and begins anew where episodes are long."""
        self._step += 1
        first = self._step % COUNT
        final = obs = self._frames[first : first + COUNT].clone()
        self._age += 1
        ended = self._age >= LENGTH
        if ended.any():
            self._age[ended] = 0
            obs = final.clone()
            obs[ended] = self._frames[0]
        return obs, self._reward, ended, self._never, {"final_obs": final}

    def close(self) -> None:
        """Nothing is open."""


class Plain(nn.Module):
    """A network in a class of the user's own, which may do anything with its inputs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, observation: Tensor) -> Tensor:
        result: Tensor = self.network(observation)
        return result


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(STACK, 8, 8, stride=8),
        nn.ReLU(),
        nn.Flatten(-3),
        nn.Linear(8 * (SIDE // 8) ** 2, ACTIONS),
        nn.Tanh(),
    )


def trawl(net: nn.Module) -> Source:
    from trawl.collectors import Collector

    total = COUNT * STEPS
    collector = Collector(
        Frames(), work.acting(net), frames_per_batch=total, total_frames=-1, frame_stack=STACK
    )
    try:
        for batch in collector:
            yield batch.numel(), batch
    finally:
        collector.shutdown()


def hand() -> Source:
    """A loop that stores each frame once, time first.

    The policy reads a window of the last frames, in memory of its own. Where an episode begins, the
    frames before its first one are overwritten there, and the first frame is stored separately.
    """
    env, act = Frames(), network()
    frame = (COUNT, SIDE, SIDE)
    recent = torch.zeros(STACK - 1 + STEPS, *frame)
    windows = recent.unfold(0, STACK, 1).movedim(-1, 2).unbind(0)
    rows, memories, turn = recent.unbind(0), [_memory(frame) for _ in range(2)], 0
    newest = env.reset()[0]
    recent[:STACK] = newest
    age, ids, total = torch.zeros(COUNT, dtype=torch.int64), torch.arange(COUNT), COUNT
    while True:
        memory, turn = memories[turn], 1 - turn
        frames, firsts = memory["frames"].unbind(0), []
        memory["frames"][:STACK] = recent[:STACK]
        at = {key: value.unbind(0) for key, value in memory.items() if key not in _SEPARATE}
        with torch.no_grad():
            for t in range(STEPS):
                action = act(windows[t])
                at["action"][t].copy_(action)
                at["age"][t].copy_(age)
                at["trajectory"][t].copy_(ids)
                newest, reward, terminated, truncated, info = env.step(action)
                frames[STACK + t].copy_(info["final_obs"])
                at["reward"][t].copy_(reward)
                at["terminated"][t].copy_(terminated)
                at["truncated"][t].copy_(truncated)
                done = torch.logical_or(terminated, truncated, out=at["done"][t])
                age += 1
                if t + 1 < STEPS:
                    rows[STACK + t].copy_(newest)
                ended = done.numpy().nonzero()[0]
                if len(ended):
                    first = newest[ended]
                    firsts.append(first)
                    recent[t + 1 : t + STACK, ended] = first
                    age[ended] = 0
                    ids[ended] = torch.arange(total, total + len(ended))
                    total += len(ended)
        recent[: STACK - 1] = recent[STEPS:].clone()
        recent[STACK - 1] = newest
        if firsts:
            memory["firsts"] = torch.cat(firsts)
        # The layout is not the one of a collector.
        yield COUNT * STEPS, None


# Entries without a row for each step.
_SEPARATE = ("frames", "firsts")


def _memory(frame: tuple[int, ...]) -> dict[str, Tensor]:
    sizes = (STEPS, COUNT)
    flags = {
        name: torch.zeros(sizes, dtype=torch.bool) for name in ("terminated", "truncated", "done")
    }
    numbers = {name: torch.zeros(sizes, dtype=torch.int64) for name in ("age", "trajectory")}
    floats = {"action": torch.zeros(*sizes, ACTIONS), "reward": torch.zeros(sizes)}
    return {"frames": torch.zeros(STACK + STEPS, *frame), **floats, **flags, **numbers}


def stack_tensors() -> Case:
    return Case(
        "stack_tensors",
        f"{COUNT} synthetic {SIDE}x{SIDE} envs as torch tensors, stacks of 4, convolution",
        (
            Contender(TRAWL, lambda: trawl(network()), note="frame_stack=4"),
            Contender(HAND, hand, 0.9, "each frame stored once"),
            Contender(OWN_CODE, lambda: trawl(Plain(network())), note="reads copies of the stacks"),
        ),
    )
