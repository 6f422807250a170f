"""Options, record and limits of a policy's calls for environments that step at their own pace."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from trawl.keys import ENV_INDEX, MASK, Key

# Number of recent calls whose times are kept.
_WINDOW = 1024
# Number of recent batches for each of which the number of updates before it is kept.
_REMEMBERED = 256


@dataclass(frozen=True)
class Batching:
    """Sizes of the batches for which the policy acts.

    Attributes:
        least: number of ready environments that the policy waits for.
        most: maximum number of environments for which the policy acts at once.
        patience: seconds after the first ready environment in which the others are waited for.
        size: number of rows in each batch that the policy gets, filled up with copies of the last
            row; None for no filling.
    """

    least: int
    most: int
    patience: float
    size: int | None


@dataclass(frozen=True)
class ServingOptions:
    """Options for acting in environments that are ready.

    Attributes:
        batching: sizes of the batches for which the policy acts.
        version_key: key of the policy version in the frames; None to leave it out.
        max_lag: maximum number of updates by which a frame may be behind when it is delivered;
            None for no limit.
        cores: CPU cores on which the policy acts; None for all.
        ends_idle: True to begin no step whose frame has no room in the batch, because all
            environments are reset before the next one.
    """

    batching: Batching
    version_key: Key | None = None
    max_lag: int | None = None
    cores: Sequence[int] | None = None
    ends_idle: bool = False


@contextmanager
def running_on(cores: Sequence[int] | None) -> Iterator[None]:
    """Context in which this thread runs on some cores only; None for no change."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class ServingRecord:
    """Counts and times of a policy's calls.

    Attributes:
        calls: number of calls.
        frames: number of environments for which the policy acted, in all calls.
        waited: seconds in which no environment was ready.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begins a new record."""
        self.calls = self.frames = 0
        self.waited = self._acted = 0.0
        self._times: deque[float] = deque(maxlen=_WINDOW)
        self._began = perf_counter()

    def add(self, frames: int, seconds: float) -> None:
        """Adds a call for ``frames`` environments that took ``seconds``."""
        self.calls += 1
        self.frames += frames
        self._acted += seconds
        self._times.append(seconds)

    def describe(self) -> dict[str, Any]:
        """Returns the record, under the names that a collector's ``server_stats()`` uses."""
        elapsed = max(perf_counter() - self._began, 1e-9)
        middle, high = np.percentile(self._times, (50, 95)) * 1e3 if self._times else (0.0, 0.0)
        return {
            "requests": self.frames,
            "batches": self.calls,
            "requests_per_s": self.frames / elapsed,
            "batches_per_s": self.calls / elapsed,
            "avg_batch_size": self.frames / self.calls if self.calls else 0.0,
            "p50_forward_ms": float(middle),
            "p95_forward_ms": float(high),
            "forward_share": self._acted / elapsed,
            # In a collector's `stats()`, this is the share in which the driver waits for batches.
            "wait_share": self.waited / elapsed,
        }


def env_numbers(frames: TensorDictBase) -> Tensor | None:
    """Returns the environment of each frame, if frames have such numbers, else None.

    Frames next to each other are then of different environments, and those of each are in order.
    """
    index = frames.get(ENV_INDEX, None)
    numbered = isinstance(index, Tensor) and index.shape == frames.shape
    return index if numbered and index.dtype is torch.int64 else None


def by_environment(frames: TensorDictBase) -> list[tuple[int, TensorDictBase]]:
    """Returns the frames of each environment, with its number, if frames have such numbers.

    Otherwise, all frames are returned together, with the number 0.
    """
    index = env_numbers(frames)
    if index is None:
        return [(0, frames)]
    return [(int(env), frames[index == env]) for env in index.unique()]


def in_env_order(frames: TensorDictBase) -> TensorDictBase:
    """Returns frames environment by environment, if frames have the numbers of environments.

    Args:
        frames: frames of shape ``(*workers, steps)``. Those of each worker stay together.
    """
    index = env_numbers(frames)
    if index is None:
        return frames
    order = index.argsort(dim=-1, stable=True).reshape(-1, frames.shape[-1])
    before = torch.arange(len(order), device=order.device)[:, None] * frames.shape[-1]
    return frames.reshape(-1)[(before + order).reshape(-1)].reshape(frames.shape)


def last_frames(frames: TensorDictBase, numbered: bool) -> Tensor:
    """Returns a mask of the last frame of each environment, in which time is the last dimension.

    Args:
        frames: the frames.
        numbered: True if frames may have the numbers of environments.
    """
    mask, index = frames.get(MASK, None), env_numbers(frames) if numbered else None
    if index is None:
        found = torch.zeros(frames.shape, dtype=torch.bool, device=frames.device)
        found[..., -1:] = True
    else:
        index = index if mask is None else index.where(mask, -1)
        order = index.argsort(dim=-1, stable=True)
        last = index.gather(-1, order).diff(append=index[..., :1] * 0 - 2) != 0
        found = torch.zeros_like(last).scatter(-1, order, last)
    return found if mask is None else found & mask


class LagLimit:
    """Keeps frames from being delivered with actions of too old a policy.

    While a batch is filled, rows are kept free for frames that would be too old in a later batch.
    The policy chooses no action whose frame could not be delivered in time. The limit counts the
    updates between recent batches, and assumes that the learner sends no more than the largest of
    these counts between two batches. Until the learner has sent updates, it assumes ``most``
    updates, but at least one.

    Args:
        most: maximum number of updates by which a frame may be behind when it is delivered.
        rows: number of rows of a batch.
        processes: number of processes, each of which has one environment.
        version: function that returns the policy's current version.
    """

    def __init__(self, most: int, rows: int, processes: int, version: Callable[[], int]) -> None:
        self._most, self._rows, self._version = most, rows, version
        self._seen: deque[int] = deque([0], maxlen=_REMEMBERED)
        self._now = version()
        # Whether an environment has an action, but its frame is not recorded; and the version of
        # the policy that chose the action.
        self._open = np.zeros(processes, np.bool_)
        self._chosen = np.zeros(processes, np.int64)

    @property
    def _step(self) -> int:
        """Number of updates that are expected until the next batch."""
        return max(self._seen) or max(1, self._most)

    def begin(self) -> None:
        """Notes the beginning of a batch."""
        now = self._version()
        if self._open.any():
            self._seen.append(max(0, now - self._now))
        self._now = now

    def to_act_for(self, processes: list[int], room: int) -> int:
        """Returns for how many of the processes the policy may act now.

        Args:
            processes: processes that wait for actions.
            room: number of rows that are left in the batch.
        """
        later = self._most // self._step * self._rows
        return min(len(processes), max(0, room + later - int(self._open.sum())))

    def acted(self, processes: Sequence[int]) -> None:
        """Notes that the policy has acted for some processes."""
        self._open[processes] = True
        self._chosen[processes] = self._version()

    def recorded(self, process: int) -> None:
        """Notes that the frame of a process is recorded, or dropped."""
        self._open[process] = False

    def keep(self, processes: Sequence[int]) -> None:
        """Notes that all frames are dropped, except those of some processes."""
        kept = self._open[processes]
        self._open[:] = False
        self._open[processes] = kept

    def slack(self, process: int) -> int:
        """Returns the number of batches that the frame of a process may wait for its delivery."""
        return int(self._slack(self._chosen[process]))

    def may_record(self, process: int, room: int) -> bool:
        """Returns True if all frames that may wait less than this one can still be in time.

        Args:
            process: process whose frame is to be recorded.
            room: number of rows that are left in the batch.
        """
        slack = self.slack(process)
        if not slack:
            return True
        waiting = self._slack(self._chosen[self._open])
        # Number of frames that must be delivered in this batch, up to the next batch, and so on.
        needed = np.bincount(waiting, minlength=slack).cumsum()[:slack]
        return bool((needed < room + np.arange(slack) * self._rows).all())

    def state_dict(self) -> dict[str, Any]:
        """Returns the record of updates, and of the frames that are not recorded yet."""
        return {
            "seen": list(self._seen),
            "now": self._now,
            "open": self._open.tolist(),
            "chosen": self._chosen.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that :meth:`state_dict` returned."""
        self._seen = deque(state["seen"], maxlen=_REMEMBERED)
        self._now = state["now"]
        self._open[:], self._chosen[:] = state["open"], state["chosen"]

    def _slack(self, chosen: Any) -> Any:
        return np.maximum(0, (self._most - (self._now - chosen)) // self._step)


def lag_limit(
    most: int | None, steps: int, rows: Sequence[Sized], version: Callable[[], int]
) -> LagLimit | None:
    """Returns the limit for batches of ``steps`` rows; None if there is no limit.

    Args:
        most: maximum number of updates by which a frame may be behind, or None.
        steps: number of rows of a batch.
        rows: rows of the environments of each process.
        version: function that returns the policy's current version.

    Raises:
        ValueError: if a process has several environments.
    """
    if most is None:
        return None
    each = max(map(len, rows))
    if each > 1:
        raise ValueError(
            f"max_policy_lag={most} needs processes with one environment each, but each has "
            f"{each}: leave out envs_per_worker or max_policy_lag"
        )
    return LagLimit(most, steps, len(rows), version)
