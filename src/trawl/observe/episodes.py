"""Returns and lengths of episodes, out of batches."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor

from trawl.keys import Key, as_key, next_of, show_key
from trawl.observe.entries import DONE, IDS, MASK, REWARD, done_keys, reward_keys


@dataclass(frozen=True)
class Episodes:
    """Episodes that ended, in the order of their ends.

    Attributes:
        traj_ids: their trajectories' ids, int64.
        returns: sums of their rewards, float64; of several agents, the mean of their sums.
        lengths: numbers of their frames, int64.
        ends: for each, the number of frames seen when it ended, itself included, int64.
    """

    traj_ids: NDArray[np.int64]
    returns: NDArray[np.float64]
    lengths: NDArray[np.int64]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.traj_ids)

    def __getitem__(self, index: NDArray[Any]) -> Episodes:
        return Episodes(*(getattr(self, name)[index] for name in _FIELDS))

    @classmethod
    def concatenate(cls, parts: list[Episodes]) -> Episodes:
        """The episodes of several batches."""
        if not parts:
            none = np.empty(0, np.int64)
            return cls(none, np.empty(0), none, none)
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in _FIELDS))


_FIELDS = tuple(each.name for each in fields(Episodes))


@dataclass
class Moments:
    """Mean, standard deviation and range of the numbers that come by.

    Attributes:
        count: how many.
        mean: their mean; NaN if there are none, as the others.
        low: the least.
        high: the greatest.
    """

    count: int = 0
    mean: float = math.nan
    low: float = math.nan
    high: float = math.nan
    _squares: float = field(default=0.0, repr=False)

    def add(self, values: NDArray[Any]) -> None:
        """Takes in more numbers.

        The moments of both parts are joined by the formula of Chan, Golub and LeVeque (1979).
        """
        if not len(values):
            return
        values = values.astype(np.float64)
        count, mean = len(values), float(values.mean())
        squares = float(np.square(values - mean).sum())
        if self.count:
            total = self.count + count
            apart = mean - self.mean
            squares += self._squares + apart * apart * self.count * count / total
            count, mean = total, self.mean + apart * count / total
        self.count, self.mean, self._squares = count, mean, squares
        self.low = float(np.fmin(self.low, values.min()))
        self.high = float(np.fmax(self.high, values.max()))

    @property
    def std(self) -> float:
        """Their standard deviation (of the whole, not an estimate from a sample)."""
        return math.sqrt(self._squares / self.count) if self.count else math.nan


class EpisodeStats:
    """Follows trajectories through successive batches, and tells their returns and lengths.

    An episode counts when it ends. Its frames may come in any number of batches, of any shape,
    among those of others: trajectory ids keep them apart.

    Args:
        recent: how many of the last episodes :attr:`recent_return` and :attr:`recent_length`
            speak of.

    Attributes:
        frames: number of frames seen.
        returns: moments of the returns of all episodes that ended.
        lengths: moments of their lengths.

    Example:
        >>> from trawl import Collector
        >>> from trawl.observe import EpisodeStats
        >>> stats = EpisodeStats()
        >>> with Collector("Pendulum-v1", frames_per_batch=150, total_frames=600) as collector:
        ...     for batch in collector:
        ...         ended = stats.update(batch)
        >>> stats.count, stats.recent_length
        (3, 200.0)
    """

    def __init__(self, recent: int = 100) -> None:
        self.frames = 0
        self.returns, self.lengths = Moments(), Moments()
        self._recent: deque[tuple[float, int]] = deque(maxlen=recent)
        self._open = Episodes.concatenate([])

    def update(self, batch: TensorDictBase) -> Episodes:
        """Takes in a batch.

        Args:
            batch: with ``("collector", "traj_ids")``, ``("next", "reward")`` and
                ``("next", "done")``. Rows masked out, or with id -1, are left out. Groups of
                agents may have rewards and flags of their own, such as
                ``("next", "agents", "reward")``. If a frame has several rewards, their mean counts,
                and any of several flags ends the episode.

        Returns:
            The episodes that ended in it.

        Raises:
            KeyError: if one of these is missing.
        """
        ids, rewards, done = _columns(batch)
        if not len(ids):
            return Episodes.concatenate([])
        # Sorted by trajectory, and in it by time, what belongs together is a run of rows: up to
        # the next trajectory, or to an end.
        order = np.argsort(ids, kind="stable")
        ids, rewards, done = ids[order], rewards[order], done[order]
        starts = np.flatnonzero(np.r_[True, (ids[1:] != ids[:-1]) | done[:-1]])
        stops = np.r_[starts[1:], len(ids)]
        lasts = stops - 1
        runs = Episodes(
            ids[starts],
            np.add.reduceat(rewards, starts),
            stops - starts,
            self.frames + order[lasts] + 1,
        )
        self.frames += len(ids)
        self._join_open(runs)
        over = done[lasts]
        self._open = Episodes.concatenate([self._open, runs[~over]])
        ended = runs[over]
        ended = ended[np.argsort(ended.ends)]
        self._record(ended)
        return ended

    def _join_open(self, runs: Episodes) -> None:
        """Adds what trajectories had before to their first runs in this batch."""
        before = self._open
        first = np.searchsorted(runs.traj_ids, before.traj_ids)
        goes_on = runs.traj_ids[np.minimum(first, len(runs) - 1)] == before.traj_ids
        first = first[goes_on]
        runs.returns[first] += before.returns[goes_on]
        runs.lengths[first] += before.lengths[goes_on]
        self._open = before[~goes_on]

    def _record(self, ended: Episodes) -> None:
        self.returns.add(ended.returns)
        self.lengths.add(ended.lengths)
        self._recent.extend(zip(ended.returns.tolist(), ended.lengths.tolist(), strict=True))

    @property
    def count(self) -> int:
        """Number of episodes that ended."""
        return self.returns.count

    @property
    def recent_return(self) -> float:
        """Mean return of the last episodes; NaN if none has ended."""
        return _mean([value for value, _ in self._recent])

    @property
    def recent_length(self) -> float:
        """Mean length of the last episodes; NaN if none has ended."""
        return _mean([length for _, length in self._recent])

    def summary(self) -> dict[str, Any]:
        """``count``, and mean, std, min and max of ``return`` and ``length``, for JSON.

        What isn't a finite number (there was no episode, or a reward was NaN) is None.
        """
        return {
            "count": self.count,
            "return": _facts(self.returns),
            "length": _facts(self.lengths),
        }


def _columns(batch: TensorDictBase) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Trajectory ids, rewards and ends, a number for each frame, row after row.

    A batch with time last is read in the order of its rows, so that within a batch of several
    environments the ends are in the order of the environments.
    """
    following = batch.get("next", None)
    keys = [] if following is None else [next_of(as_key(key)) for key in following.keys(True, True)]
    ids = _column(batch, IDS)[:, 0].numpy()
    # Several values in a row are those of agents, in one group or in several.
    agents = [_column(batch, key).double() for key in reward_keys(keys) or [REWARD]]
    rewards = torch.cat(agents, -1).mean(-1).numpy()
    flags = [_column(batch, key).any(-1) for key in done_keys(keys) or [DONE]]
    done = torch.stack(flags).any(0).numpy()
    keep: NDArray[np.bool_] = ids >= 0
    if batch.get(MASK, None) is not None:
        keep &= _column(batch, MASK)[:, 0].numpy()
    if keep.all():
        return ids, rewards, done
    return ids[keep], rewards[keep], done[keep]


def _column(batch: TensorDictBase, key: Key) -> Tensor:
    """The values of an entry, a row for each frame."""
    value = batch.get(key, None)
    if value is None:
        hint = " (track_traj_ids=True gives it)" if key == IDS else ""
        raise KeyError(
            f"the statistics of episodes need {show_key(key)}, which the batch does not have{hint}"
        )
    width = value.shape[batch.ndim :].numel()
    column: Tensor = value.detach().cpu().reshape(batch.shape.numel(), width)
    return column


def _mean(values: list[Any]) -> float:
    return float(np.mean(values)) if values else math.nan


def _facts(moments: Moments) -> dict[str, float | None]:
    named = {
        "mean": moments.mean,
        "std": moments.std,
        "min": moments.low,
        "max": moments.high,
    }
    return {name: value if math.isfinite(value) else None for name, value in named.items()}
