"""Statistics of episodes, computed from batches."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor

from trawl.keys import (
    DONE,
    MASK,
    RAW_REWARD,
    REWARD,
    TRAJ_IDS,
    Key,
    as_key,
    end_keys,
    next_of,
    show_key,
)
from trawl.observe.formats import short

#: Prefix of the names of logged values in the statistics of a collector.
LOGGED = "logged/"


@dataclass(frozen=True)
class Episodes:
    """Episodes that ended, in the order in which they ended.

    Attributes:
        traj_ids: trajectory id of each episode, int64.
        returns: sum of the rewards of each episode, float64. With several agents, the mean of the
            agents' sums.
        lengths: number of frames of each episode, int64.
        ends: number of frames seen when each episode ended, including the frames of other
            episodes, int64.
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
        """Joins the episodes of several batches."""
        if not parts:
            none = np.empty(0, np.int64)
            return cls(none, np.empty(0), none, none)
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in _FIELDS))


_FIELDS = tuple(each.name for each in fields(Episodes))


@dataclass
class Moments:
    """Mean, standard deviation and range of numbers that are added over time.

    Attributes:
        count: number of values.
        mean: mean of the values; NaN if there are none.
        low: smallest value; NaN if there are none.
        high: largest value; NaN if there are none.
    """

    count: int = 0
    mean: float = math.nan
    low: float = math.nan
    high: float = math.nan
    _squares: float = field(default=0.0, repr=False)

    def state_dict(self) -> dict[str, float]:
        """Returns the moments as plain data."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @classmethod
    def from_state(cls, name: str, state: Mapping[str, Any]) -> Moments:
        """Returns moments from a state that :meth:`state_dict` returned.

        Args:
            name: name of the state, for error messages.
            state: the state.

        Raises:
            ValueError: if it is no such state.
        """
        names = [one.name for one in fields(cls)]
        values = _numbers(name, [_entry(name, state, each) for each in names])
        return cls(int(values[0]), *values[1:])

    def add(self, values: NDArray[Any]) -> None:
        """Adds numbers to the statistics.

        The previous moments and the moments of the new numbers are combined by the formula of
        Chan, Golub and LeVeque (1979).
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
        """Population standard deviation of the values; NaN if there are none."""
        return math.sqrt(self._squares / self.count) if self.count else math.nan


class RecentEpisodes:
    """Number of episodes that ended, and averages over the most recent ones.

    Args:
        window: number of most recent episodes over which averages are taken.

    Attributes:
        window: number of most recent episodes over which averages are taken.
        count: number of all episodes.

    Examples:
        >>> from trawl.observe.episodes import RecentEpisodes
        >>> episodes = RecentEpisodes()
        >>> episodes.add(2, returns=[1.0, 2.0], lengths=[10, 30])
        >>> episodes.mean_return, episodes.mean_length
        (1.5, 20.0)
    """

    def __init__(self, window: int = 100) -> None:
        self.window = window
        self.count = 0
        self._returns: deque[float] = deque(maxlen=window)
        self._lengths: deque[int] = deque(maxlen=window)

    def add(self, count: int, returns: Sequence[float], lengths: Sequence[int]) -> None:
        """Adds episodes.

        Args:
            count: number of episodes.
            returns: returns of these episodes, or of the last ones if the window has no more room.
            lengths: lengths of the same episodes.
        """
        self.count += count
        self._returns.extend(returns)
        self._lengths.extend(lengths)

    def newest(self, count: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Returns the returns and lengths of the last episodes, as far as the window has them."""
        if not count:
            return (), ()
        return tuple(self._returns)[-count:], tuple(self._lengths)[-count:]

    @property
    def mean_return(self) -> float:
        """Mean return of the most recent episodes; NaN if no episode has ended."""
        return _mean(list(self._returns))

    @property
    def mean_length(self) -> float:
        """Mean length of the most recent episodes; NaN if no episode has ended."""
        return _mean(list(self._lengths))

    def state_dict(self) -> dict[str, Any]:
        """Returns the statistics as plain data."""
        lists = {"returns": list(self._returns), "lengths": list(self._lengths)}
        return {"count": self.count, **lists}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores statistics that :meth:`state_dict` returned.

        Raises:
            ValueError: if it is no such state. Nothing is changed then.
        """
        (count,) = _numbers("count", [_entry("the state", state, "count")])
        returns = _numbers("returns", _entry("the state", state, "returns"))
        lengths = _numbers("lengths", _entry("the state", state, "lengths"))
        if len(returns) != len(lengths):
            raise ValueError(
                f"the state has {len(returns)} returns, but {len(lengths)} lengths of episodes"
            )
        self.count = int(count)
        self._returns = deque(returns, self._returns.maxlen)
        self._lengths = deque(map(int, lengths), self._lengths.maxlen)

    def stats(self) -> dict[str, Any]:
        """Returns the statistics under the names that a collector's ``stats()`` uses."""
        return {
            "episodes": self.count,
            "episode_return_mean": self.mean_return,
            "episode_length_mean": self.mean_length,
        }


class EpisodeStats:
    """Follows trajectories through successive batches, and computes their returns and lengths.

    An episode is counted when it ends. Its frames may be spread over any number of batches of any
    shape, and mixed with the frames of other episodes. The trajectory ids assign the frames to
    episodes. If an environment fails in the first row of a batch (``on_env_error="restart"``), its
    episode has ended without a flag, and is counted only in the collector's ``stats()``.

    Args:
        recent: number of most recent episodes over which :attr:`recent_return` and
            :attr:`recent_length` are averaged.

    Attributes:
        frames: number of frames seen.
        returns: moments of the returns of all episodes that ended.
        lengths: moments of the lengths of all episodes that ended.

    Examples:
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
        self._recent = RecentEpisodes(recent)
        self._open = Episodes.concatenate([])

    def update(self, batch: TensorDictBase) -> Episodes:
        """Adds the frames of a batch to the statistics.

        Args:
            batch: batch with ``("collector", "traj_ids")``, ``("next", "reward")`` and
                ``("next", "done")``. Rows that are masked out, or have trajectory id -1, are
                ignored. Groups of agents may have their own rewards and flags, such as
                ``("next", "agents", "reward")``. If a frame has several rewards, their mean is
                used. Without ``("next", "done")``, any flag of an agent ends the episode.

        Returns:
            The episodes that ended in the batch.

        Raises:
            KeyError: if a required entry is missing.
        """
        ids, rewards, done = _columns(batch)
        if not len(ids):
            return Episodes.concatenate([])
        # Sorts the rows by trajectory, and within a trajectory by time. Each run of rows up to the
        # end of an episode, or up to the next trajectory, then belongs to one episode.
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
        """Adds returns and lengths from earlier batches to the first run of each trajectory."""
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
        self._recent.add(len(ended), ended.returns.tolist(), ended.lengths.tolist())

    def state_dict(self) -> dict[str, Any]:
        """Returns the statistics as plain data, with the episodes that have not ended.

        Statistics that load the state go on as these do: after a resumed run, both are equal.
        """
        return {
            "frames": self.frames,
            "returns": self.returns.state_dict(),
            "lengths": self.lengths.state_dict(),
            "recent": self._recent.state_dict(),
            "open": {name: getattr(self._open, name).tolist() for name in _FIELDS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores statistics that :meth:`state_dict` returned.

        Raises:
            ValueError: if it is no such state. Nothing is changed then.
        """
        (frames,) = _numbers("frames", [_entry("the state", state, "frames")])
        moments = {
            name: Moments.from_state(name, _entry("the state", state, name))
            for name in ("returns", "lengths")
        }
        recent = RecentEpisodes(self._recent.window)
        recent.load_state_dict(_entry("the state", state, "recent"))
        given = _entry("the state", state, "open")
        columns = [_numbers(name, _entry("open", given, name)) for name in _FIELDS]
        if len(set(map(len, columns))) > 1:
            raise ValueError("the open episodes of the state have columns of unequal length")
        ids, returns, lengths, ends = columns
        self._open = Episodes(
            np.array(ids, np.int64),
            np.array(returns, np.float64),
            np.array(lengths, np.int64),
            np.array(ends, np.int64),
        )
        self.frames, self._recent = int(frames), recent
        self.returns, self.lengths = moments["returns"], moments["lengths"]

    @property
    def count(self) -> int:
        """Number of episodes that ended."""
        return self.returns.count

    @property
    def recent_return(self) -> float:
        """Mean return of the most recent episodes; NaN if no episode has ended."""
        return self._recent.mean_return

    @property
    def recent_length(self) -> float:
        """Mean length of the most recent episodes; NaN if no episode has ended."""
        return self._recent.mean_length

    def summary(self) -> dict[str, Any]:
        """Returns the statistics as a dictionary that can be written as JSON.

        The dictionary has ``count``, the number of episodes, and the dictionaries ``return`` and
        ``length``, each with ``mean``, ``std``, ``min`` and ``max``. Values that are not finite (no
        episode has ended, or a reward was NaN) are None.
        """
        return {
            "count": self.count,
            "return": _facts(self.returns),
            "length": _facts(self.lengths),
        }


def _columns(batch: TensorDictBase) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Returns trajectory ids, rewards and done flags, with one value for each frame.

    The batch is read row after row. In a batch of several environments, with time last, the
    frames of the first environment therefore come before those of the second.
    """
    following = batch.get("next", None)
    keys = [] if following is None else [next_of(as_key(key)) for key in following.keys(True, True)]
    ids = _column(batch, TRAJ_IDS)[:, 0].numpy()
    # If a frame has several values, they belong to agents in one or several groups.
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
    """Returns the values of an entry, with one row for each frame."""
    value = batch.get(key, None)
    if value is None:
        hint = " (track_traj_ids=True adds it)" if key == TRAJ_IDS else ""
        raise KeyError(
            f"episode statistics need {show_key(key)}, which the batch does not have{hint}"
        )
    width = value.shape[batch.ndim :].numel()
    column: Tensor = value.detach().cpu().reshape(batch.shape.numel(), width)
    return column


class LoggedValues:
    """Values that a user logs, by name, each with a mean over the most recent ones.

    Args:
        window: number of most recent values over which a mean is taken.
    """

    def __init__(self, window: int = 100) -> None:
        self._window = window
        self._values: dict[str, deque[float]] = {}

    def add(self, values: Mapping[str, Any]) -> None:
        """Adds values.

        Raises:
            TypeError: if a name is no string, or a value is no number. Nothing is added then.
        """
        found = {name: logged_number(name, value) for name, value in values.items()}
        for name, value in found.items():
            self._values.setdefault(name, deque(maxlen=self._window)).append(value)

    def stats(self) -> dict[str, float]:
        """Returns the means under the names that a collector's ``stats()`` uses."""
        return {LOGGED + name: _mean(list(values)) for name, values in self._values.items()}

    def state_dict(self) -> dict[str, list[float]]:
        """Returns the most recent values as plain data."""
        return {name: list(values) for name, values in self._values.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores values that :meth:`state_dict` returned.

        Raises:
            ValueError: if it is no such state. Nothing is changed then.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"the logged values must be lists by name, but they are {state!r}")
        found = {str(name): _numbers(str(name), values) for name, values in state.items()}
        self._values = {name: deque(values, self._window) for name, values in found.items()}


def logged_number(name: Any, value: Any) -> float:
    """Returns a value to log as a float.

    Raises:
        TypeError: if the name is no string, or the value is no single number.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(f"the name of a logged value must be a string, but it is {name!r}")
    if isinstance(value, Tensor):
        single = value.numel() == 1 and not value.is_complex()
    elif isinstance(value, np.ndarray):
        single = value.size == 1 and value.dtype.kind in "buif"
    else:
        single = isinstance(value, Real)
    if not single:
        raise TypeError(f"the logged value {name} must be a number, but it is {value!r}")
    return float(value.item() if isinstance(value, (Tensor, np.ndarray)) else value)


def show_logged(stats: Mapping[str, Any]) -> str:
    """Returns the logged values in the statistics of a collector as one line of text."""
    return ", ".join(
        f"{name.removeprefix(LOGGED)} {short(value)}"
        for name, value in stats.items()
        if name.startswith(LOGGED)
    )


def _entry(where: str, state: Any, name: str) -> Any:
    if not isinstance(state, Mapping) or name not in state:
        raise ValueError(f"{where} must have the entry {name!r}, but it is {state!r:.200}")
    return state[name]


def _numbers(name: str, values: Any) -> list[float]:
    if not isinstance(values, list) or not all(isinstance(one, (int, float)) for one in values):
        raise ValueError(f"{name} must be numbers, but they are {values!r:.200}")
    return values


def _mean(values: list[Any]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _facts(moments: Moments) -> dict[str, float | None]:
    named = {
        "mean": moments.mean,
        "std": moments.std,
        "min": moments.low,
        "max": moments.high,
    }
    return {name: value if math.isfinite(value) else None for name, value in named.items()}


def reward_keys(keys: Iterable[Key]) -> list[Key]:
    """Returns the key of the reward, or the keys of the rewards of groups of agents.

    If a batch has both normalised rewards and the environment's own rewards, the keys are those of
    the environment's own rewards.

    Args:
        keys: keys of all entries.
    """
    there = list(keys)
    by_group = {key[:-1]: key for name in ("reward", RAW_REWARD) for key in _named(name, there)}
    own = by_group.get(REWARD[:-1])
    return sorted(by_group.values()) if own is None else [own]


def done_keys(keys: Iterable[Key]) -> list[Key]:
    """Returns the keys of the ``done`` flags of which any ends the episode.

    Args:
        keys: keys of all entries.
    """
    return [next_of(key) for key in sorted(end_keys(key[1:] for key in keys if key[0] == "next"))]


def _named(name: str, keys: Iterable[Key]) -> list[Key]:
    return sorted(key for key in keys if key[0] == "next" and key[-1] == name)
