"""The limit: the loops that a good engineer would write by hand for the same work.

Each writes into memory that is allocated once, through numpy views of torch tensors, and delivers
the same `TensorDict` object again and again, overwritten (which is cheaper than what a collector
may do, as a collector's batches must stay valid). With large observations it matters how much
memory is written in turn, so `single` can rotate through several batches, as a collector does. The
policy is called as a plain function of a tensor that returns a tuple, the action first. Every frame
keeps its true next observation, also at the end of an episode. Root flags are never written: an
environment that is reset at once starts every frame with False.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, repeat
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict
from torch import Tensor

from harness import Source

Act = Callable[[Tensor], tuple[Tensor, ...]]
FLAGS = ("done", "terminated", "truncated")


def only(module: Callable[[Tensor], Tensor]) -> Act:
    """A policy whose one output is the action."""
    return lambda observation: (module(observation),)


@dataclass(frozen=True)
class Memory:
    """One batch in memory, time first, and numpy views to write it."""

    batch: TensorDict
    observation: Tensor
    observations: NDArray[Any]
    outputs: list[NDArray[Any]]
    next_observations: NDArray[Any]
    reward: NDArray[Any]
    done: NDArray[Any]
    terminated: NDArray[Any]
    truncated: NDArray[Any]
    trajectory: NDArray[Any]


def allocate(sizes: tuple[int, ...], first: NDArray[Any], act: Act, names: Sequence[str]) -> Memory:
    """Memory for `sizes` frames of observations like `first` and of what `act` makes of them."""
    seen = torch.from_numpy(first)
    with torch.no_grad():
        return memory_for(sizes, seen, act(seen), names)


def memory_for(
    sizes: tuple[int, ...], seen: Tensor, outs: Sequence[Tensor], names: Sequence[str]
) -> Memory:
    """Memory for `sizes` frames of observations like `seen` and outputs like `outs`."""
    observation = torch.zeros(sizes[0], *seen.shape, dtype=seen.dtype)
    outputs = [torch.zeros(sizes[0], *out.shape, dtype=out.dtype) for out in outs]
    after: dict[str, Tensor] = {name: torch.zeros(*sizes, 1, dtype=torch.bool) for name in FLAGS}
    after |= {"observation": torch.zeros_like(observation), "reward": torch.zeros(*sizes, 1)}
    trajectory = torch.zeros(*sizes, dtype=torch.int64)
    batch = TensorDict(
        {
            "observation": observation,
            **{name: torch.zeros(*sizes, 1, dtype=torch.bool) for name in FLAGS},
            **dict(zip(names, outputs, strict=True)),
            "next": TensorDict(after, sizes),
            "collector": TensorDict({"traj_ids": trajectory}, sizes),
        },
        sizes,
    )
    return Memory(
        batch=batch,
        observation=observation,
        observations=observation.numpy(),
        outputs=[out.numpy() for out in outputs],
        next_observations=after["observation"].numpy(),
        reward=after["reward"].squeeze(-1).numpy(),
        done=after["done"].squeeze(-1).numpy(),
        terminated=after["terminated"].squeeze(-1).numpy(),
        truncated=after["truncated"].squeeze(-1).numpy(),
        trajectory=trajectory.numpy(),
    )


def single(
    env: Any, act: Act, frames: int, names: Sequence[str] = ("action",), blocks: int = 1
) -> Source:
    """One Gymnasium environment, and memory for so many batches, filled in turn; 0: for each."""
    observation, _ = env.reset(seed=0)
    trajectory = 0
    if blocks:
        memories = cycle([allocate((frames,), observation, act, names) for _ in range(blocks)])
    else:
        seen = torch.from_numpy(observation)
        with torch.no_grad():
            outs = act(seen)
        memories = (memory_for((frames,), seen, outs, names) for _ in repeat(None))
    for memory in memories:
        with torch.no_grad():
            for t in range(frames):
                memory.observations[t] = observation
                outputs = [out.numpy() for out in act(memory.observation[t])]
                for kept, output in zip(memory.outputs, outputs, strict=True):
                    kept[t] = output
                observation, reward, terminated, truncated, _ = env.step(outputs[0])
                memory.next_observations[t] = observation
                memory.reward[t] = reward
                memory.terminated[t] = terminated
                memory.truncated[t] = truncated
                memory.done[t] = terminated or truncated
                memory.trajectory[t] = trajectory
                if terminated or truncated:
                    observation, _ = env.reset()
                    trajectory += 1
        yield frames, memory.batch


def vector(env: Any, act: Act, steps: int) -> Source:
    """A Gymnasium vector environment with `AutoresetMode.SAME_STEP`.

    That mode is the natural one here: every step of it is a frame, and the last observation of an
    episode comes as `final_obs`. The memory is time first and is delivered as a transposed view.
    """
    observation, _ = env.reset(seed=0)
    memory = allocate((steps, env.num_envs), observation, act, ("action",))
    delivered = memory.batch.transpose(0, 1)
    trajectory = np.arange(env.num_envs)
    while True:
        with torch.no_grad():
            for t in range(steps):
                memory.observations[t] = observation
                action = act(memory.observation[t])[0].numpy()
                memory.outputs[0][t] = action
                observation, reward, terminated, truncated, info = env.step(action)
                done = terminated | truncated
                memory.next_observations[t] = observation
                memory.reward[t] = reward
                memory.terminated[t] = terminated
                memory.truncated[t] = truncated
                memory.done[t] = done
                memory.trajectory[t] = trajectory
                if done.any():
                    memory.next_observations[t, done] = np.stack(info["final_obs"][done])
                    trajectory[done] = trajectory.max() + 1 + np.arange(done.sum())
        yield steps * env.num_envs, delivered


def several(
    envs: Sequence[Any], act: Act, steps: int, names: Sequence[str] = ("action",)
) -> Source:
    """A list of Gymnasium environments, stepped one after the other straight into the memory."""
    count = len(envs)
    observation = np.stack([env.reset(seed=i)[0] for i, env in enumerate(envs)])
    memory = allocate((steps, count), observation, act, names)
    delivered = memory.batch.transpose(0, 1)
    trajectory = np.arange(count)
    while True:
        with torch.no_grad():
            for t in range(steps):
                memory.observations[t] = observation
                outputs = [out.numpy() for out in act(memory.observation[t])]
                for kept, output in zip(memory.outputs, outputs, strict=True):
                    kept[t] = output
                action = outputs[0]
                memory.trajectory[t] = trajectory
                for i, env in enumerate(envs):
                    seen, reward, terminated, truncated, _ = env.step(action[i])
                    memory.next_observations[t, i] = seen
                    memory.reward[t, i] = reward
                    memory.terminated[t, i] = terminated
                    memory.truncated[t, i] = truncated
                    memory.done[t, i] = terminated or truncated
                    if terminated or truncated:
                        seen, _ = env.reset()
                        trajectory[i] = trajectory.max() + 1
                    observation[i] = seen
        yield steps * count, delivered


def subprocesses(env: Any, act: Act, steps: int) -> Source:
    """A vector environment of Stable-Baselines3, which is closed at the end."""
    observation = env.reset()
    memory = allocate((steps, env.num_envs), observation, act, ("action",))
    delivered = memory.batch.transpose(0, 1)
    trajectory = np.arange(env.num_envs)
    try:
        while True:
            with torch.no_grad():
                for t in range(steps):
                    memory.observations[t] = observation
                    action = act(memory.observation[t])[0].numpy()
                    memory.outputs[0][t] = action
                    observation, reward, done, infos = env.step(action)
                    memory.next_observations[t] = observation
                    memory.reward[t] = reward
                    memory.truncated[t] = [info["TimeLimit.truncated"] for info in infos]
                    memory.terminated[t] = done & ~memory.truncated[t]
                    memory.done[t] = done
                    memory.trajectory[t] = trajectory
                    for i in np.flatnonzero(done):
                        memory.next_observations[t, i] = infos[i]["terminal_observation"]
                        trajectory[i] = trajectory.max() + 1
            yield steps * env.num_envs, delivered
    finally:
        env.close()


def pool(env: Any, act: Act, steps: int) -> Source:
    """EnvPool with its own auto-reset: the step after the end of an episode is only a reset.

    Such a step is stored too and marked in a mask; it is no frame, so it is not counted.
    """
    observation, _ = env.reset()
    count = len(observation)
    memory = allocate((steps, count), observation, act, ("action",))
    mask = torch.zeros(steps, count, dtype=torch.bool)
    memory.batch["collector", "mask"] = mask
    real = mask.numpy()
    delivered = memory.batch.transpose(0, 1)
    trajectory = np.arange(count)
    done = np.zeros(count, bool)
    while True:
        with torch.no_grad():
            for t in range(steps):
                memory.observations[t] = observation
                action = act(memory.observation[t])[0].numpy()
                memory.outputs[0][t] = action
                observation, reward, terminated, truncated, _ = env.step(action)
                np.logical_not(done, out=real[t])
                memory.next_observations[t] = observation
                memory.reward[t] = reward
                memory.terminated[t] = terminated
                memory.truncated[t] = truncated
                memory.trajectory[t] = trajectory
                done = terminated | truncated
                memory.done[t] = done
                if done.any():
                    trajectory[done] = trajectory.max() + 1 + np.arange(done.sum())
        yield int(real.sum()), delivered


def ready_pool(env: Any, act: Act, frames: int) -> Source:
    """EnvPool that returns whoever is ready; steps that are only resets are left out.

    The memory has room for one more result. Frames beyond a batch are moved to the next one.
    """
    env.async_reset()
    observation, reward, terminated, truncated, info = env.recv()
    count = env.num_envs
    most = frames + len(observation)
    memory = allocate((most,), observation[0], act, ("action",))
    env_index, version = torch.zeros(2, most, dtype=torch.int64).unbind()
    memory.batch.update({"env_index": env_index, "policy_version": version})
    delivered = memory.batch[:frames]
    indices, versions = env_index.numpy(), version.numpy()
    before = np.zeros((count, *observation.shape[1:]), observation.dtype)
    actions = np.zeros((count, *memory.outputs[0].shape[1:]), memory.outputs[0].dtype)
    trajectory, last, done = np.arange(count), count - 1, np.ones(count, bool)
    row = 0
    while True:
        with torch.no_grad():
            while row < frames:
                ready = ids = info["env_id"]
                after, gained, ends, cuts = observation, reward, terminated, truncated
                resets = done[ready]
                if resets.any():
                    real = ~resets
                    ids, after, gained = ready[real], observation[real], reward[real]
                    ends, cuts = terminated[real], truncated[real]
                rows = slice(row, row + len(ids))
                memory.observations[rows] = before[ids]
                memory.outputs[0][rows] = actions[ids]
                memory.next_observations[rows] = after
                memory.reward[rows] = gained
                memory.terminated[rows] = ends
                memory.truncated[rows] = cuts
                memory.done[rows] = ends | cuts
                memory.trajectory[rows] = trajectory[ids]
                indices[rows] = ids
                versions[rows] = 0
                row = rows.stop
                done[ready] = ended = terminated | truncated
                if ended.any():
                    trajectory[ready[ended]] = last + 1 + np.arange(ended.sum())
                    last += ended.sum()
                before[ready] = observation
                action = act(torch.from_numpy(observation))[0].numpy()
                actions[ready] = action
                env.send(action, ready)
                observation, reward, terminated, truncated, info = env.recv()
        yield frames, delivered
        row -= frames
        memory.batch[:row].update_(memory.batch[frames : frames + row])


def torchrl_env(env: Any, module: Callable[[Tensor], Tensor], frames: int) -> Source:
    """A TorchRL environment, stepped through its own protocol."""
    state = env.reset()
    while True:
        steps = []
        with torch.no_grad():
            for _ in range(frames):
                state["action"] = module(state["observation"])
                step, state = env.step_and_maybe_reset(state)
                steps.append(step)
        yield frames, torch.stack(steps)
