"""Normalisation of observations and rewards: its options and its statistics.

A batch writer and the driver of workers each have a :class:`Normalization`. A request carries the
driver's statistics, and its answer those of the batch alone, which the driver merges when it counts
the frames. A request that is sent again to a replacement carries the same statistics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from numbers import Real
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from trawl.errors import StateError
from trawl.keys import Key, as_key, distinct_keys, show_key, show_keys
from trawl.rollout.moments import Formula, RunningMoments, TensorMoments
from trawl.schema.checks import UNKNOWN
from trawl.schema.states import NORMALIZATION

Statistics: TypeAlias = dict[Key, RunningMoments]


def _check_positive(name: str, value: Any) -> float:
    number = not isinstance(value, bool) and isinstance(value, Real)
    if not number or not value > 0:
        raise ValueError(f"{name} must be a number above 0, but it is {value!r}")
    return float(value)


@dataclass(frozen=True, kw_only=True)
class NormalizeObservation:
    """Options of the collectors' ``normalize_observations``.

    Each element of an observation is normalised to
    ``(value - mean) / sqrt(variance + epsilon)``, and clipped.

    Attributes:
        keys: keys of the observations to normalise. None normalises all observations of
            floating-point numbers, except entries of ``info`` and the discount of dm_env.
        clip: largest absolute value of a normalised element; ``math.inf`` for no limit.
        epsilon: number that is added to the variance.

    Raises:
        ValueError: if ``clip`` or ``epsilon`` is not positive, or ``keys`` is empty.

    Examples:
        >>> from trawl.collectors import Collector, NormalizeObservation
        >>> options = NormalizeObservation(clip=5.0)
        >>> with Collector(
        ...     "Pendulum-v1", frames_per_batch=50, normalize_observations=options
        ... ) as collector:
        ...     batch = collector.next()
        >>> bool(batch["observation"].abs().max() <= 5)
        True
    """

    keys: Sequence[Any] | None = None
    clip: float = 10.0
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip", _check_positive("clip", self.clip))
        object.__setattr__(self, "epsilon", _check_positive("epsilon", self.epsilon))
        if self.keys is not None:
            keys = distinct_keys(self.keys)
            if not keys:
                raise ValueError("keys must name at least one observation, but it is empty")
            object.__setattr__(self, "keys", keys)


@dataclass(frozen=True, kw_only=True)
class NormalizeReward:
    """Options of the collectors' ``normalize_rewards``.

    A reward is divided by ``sqrt(variance + epsilon)`` and clipped, where ``variance`` is the
    variance of the discounted return. The mean is not subtracted, so rewards keep their sign.

    Attributes:
        gamma: discount of the return, from 0 to 1.
        clip: largest absolute value of a normalised reward; ``math.inf`` for no limit.
        epsilon: number that is added to the variance.
        keep_raw: True to write the environment's rewards to ``("next", "raw_reward")``.

    Raises:
        ValueError: if a value is out of range.

    Examples:
        >>> from trawl.collectors import Collector, NormalizeReward
        >>> options = NormalizeReward(gamma=0.9, keep_raw=True)
        >>> with Collector(
        ...     "Pendulum-v1", frames_per_batch=50, normalize_rewards=options
        ... ) as collector:
        ...     batch = collector.next()
        >>> bool((batch["next", "reward"] > batch["next", "raw_reward"]).all())
        True
    """

    gamma: float = 0.99
    clip: float = 10.0
    epsilon: float = 1e-8
    keep_raw: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "clip", _check_positive("clip", self.clip))
        object.__setattr__(self, "epsilon", _check_positive("epsilon", self.epsilon))
        number = not isinstance(self.gamma, bool) and isinstance(self.gamma, Real)
        if not number or not 0 <= self.gamma <= 1:
            raise ValueError(f"gamma must be a number from 0 to 1, but it is {self.gamma!r}")
        object.__setattr__(self, "gamma", float(self.gamma))


@dataclass(frozen=True)
class NormalizeOptions:
    """Options of everything that a collector normalises.

    Attributes:
        observations: options for observations; None to leave them as they are.
        rewards: options for rewards; None to leave them as they are.
    """

    observations: NormalizeObservation | None = None
    rewards: NormalizeReward | None = None

    def __bool__(self) -> bool:
        return self.observations is not None or self.rewards is not None


@dataclass(frozen=True)
class SharedStatistics:
    """Statistics of all workers together, which the driver sends with a request.

    Attributes:
        statistics: the statistics of each entry.
        training: True if the worker may add its frames to them.
    """

    statistics: Statistics
    training: bool


class Normalization:
    """Statistics with which a collector normalises observations and rewards.

    ``collector.normalization`` is an object of this class. With workers, it holds the merged
    statistics of all batches that were delivered or written to a buffer.

    Args:
        options: options of the observations and the rewards.
        statistics: initial statistics of each entry, by key.

    Attributes:
        training: False to freeze the statistics. With workers, a change applies to batches that
            are requested later.

    Examples:
        >>> from trawl.collectors import Collector
        >>> with Collector(
        ...     "Pendulum-v1", frames_per_batch=50, normalize_observations=True
        ... ) as collector:
        ...     batch = collector.next()
        ...     found = collector.normalization.observations["observation"]
        >>> found.count, found.mean.shape, found.var.shape
        (50, (3,), (3,))
    """

    def __init__(self, options: NormalizeOptions, statistics: Statistics) -> None:
        self.options = options
        self.training = True
        self._statistics = dict(statistics)
        # What was added since pop_delta() was called.
        self._delta: Statistics = {}

    @property
    def observations(self) -> dict[Any, RunningMoments]:
        """Count, mean and variance of each observation, by key."""
        found = self._statistics.items()
        return {_name(key): one for key, one in found if not _is_reward(key)}

    @property
    def rewards(self) -> dict[Any, RunningMoments]:
        """Count, mean and variance of the discounted return, by the key of the reward."""
        return {_name(key[1:]): one for key, one in self._statistics.items() if _is_reward(key)}

    def normalize_observation(self, values: Tensor, key: Any = "observation") -> Tensor:
        """Normalises observations of the environment, as the collector does for the policy.

        Args:
            values: observations of shape ``(*batch_size, *shape)``, which are not changed.
            key: key of the observation.

        Raises:
            KeyError: if the collector doesn't normalise this observation.
        """
        options, name = self.options.observations, as_key(key)
        if options is None or name not in self._statistics:
            raise KeyError(
                f"{show_key(name)} is not normalised: pass one of {list(self.observations)} as key"
            )
        found = TensorMoments.on(torch.device("cpu"), self._statistics[name])
        formula = Formula(values, found.mean.shape, options.clip, options.epsilon)
        formula.load(found)
        result: Tensor = formula.normalize(values)
        return result

    # --- sharing

    def of(self, key: Key) -> RunningMoments:
        """Returns the statistics of an entry."""
        return self._statistics[key]

    def merge(self, delta: Mapping[Key, RunningMoments]) -> None:
        """Adds the statistics of new frames, unless the statistics are frozen."""
        if self.training:
            self._statistics = _merged(self._statistics, delta)
            self._delta = _merged(self._delta, delta)

    def pop_delta(self) -> Statistics:
        """Returns what was added since the last call."""
        delta, self._delta = self._delta, {}
        return delta

    def share(self) -> SharedStatistics:
        """Returns the statistics in the form in which they are sent."""
        return SharedStatistics(self._statistics, self.training)

    def load(self, shared: SharedStatistics | None) -> None:
        """Replaces the statistics by those that were sent; None leaves them unchanged."""
        if shared is not None:
            self._statistics = {key: shared.statistics[key] for key in self._statistics}
            self.training = shared.training
            self._delta = {}

    def check_shared(self, name: str, shared: SharedStatistics) -> None:
        """Checks that statistics fit this collector's environment, so that they can be loaded.

        Args:
            name: name of the argument that the statistics come from.
            shared: the statistics.

        Raises:
            ValueError: if statistics are missing, or have another shape.
        """
        for key, own in self._statistics.items():
            found, rest = shared.statistics.get(key), show_key(key)
            if found is None:
                what = f"only of {show_keys(set(shared.statistics))}, but not of {rest}"
            elif found.mean.shape != own.mean.shape:
                what = f"of {rest} of shape {found.mean.shape}, not {own.mean.shape}"
            elif found.counts.ndim and found.counts.shape != own.counts.shape:
                what = f"of {rest} with {found.counts.size} counts, not {own.counts.size}"
            else:
                continue
            raise ValueError(
                f"{name} doesn't fit the environment: it has statistics {what}. Pass the "
                "statistics of a collector with the same environment"
            )

    def frozen(self) -> SharedStatistics:
        """Returns the present statistics, which the receiver doesn't change."""
        return SharedStatistics(dict(self._statistics), training=False)

    def empty(self) -> Statistics:
        """Returns the statistics of no frames."""
        return {key: one.cleared() for key, one in self._statistics.items()}

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Returns the options and the statistics as numbers, lists and tensors."""
        observations, rewards = self.options.observations, self.options.rewards
        return {
            "training": self.training,
            "observations": None if observations is None else asdict(observations),
            "rewards": None if rewards is None else asdict(rewards),
            "statistics": [
                {"key": list(key), **one.state_dict()} for key, one in self._statistics.items()
            ],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Normalization:
        """Makes a normalisation from a state, for example to use the policy in another program.

        Args:
            state: state that :meth:`state_dict` returned.

        Raises:
            StateError: if ``state`` is something else.
        """
        try:
            NORMALIZATION(state, "the state", UNKNOWN)
            observations, rewards = state["observations"], state["rewards"]
            options = NormalizeOptions(
                None if observations is None else NormalizeObservation(**observations),
                None if rewards is None else NormalizeReward(**rewards),
            )
            found = cls(options, _statistics_of(state))
            found.training = bool(state["training"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise StateError(
                "the state must be one that collector.normalization.state_dict() returned, but "
                f"{error!r} was raised while it was read"
            ) from error
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the statistics of a state that :meth:`state_dict` returned.

        The options stay those of this object.

        Raises:
            StateError: if the state has other entries, or entries of another shape. In this case,
                nothing is changed.
        """
        self._statistics |= self._read(state)
        self.training = bool(state["training"])
        self._delta = {}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises an error if :meth:`load_state_dict` would raise one."""
        self._read(state)

    def _read(self, state: Mapping[str, Any]) -> Statistics:
        NORMALIZATION(state, "the state", UNKNOWN)
        found = _statistics_of(state)
        if found.keys() != self._statistics.keys():
            raise StateError(
                f"the state has statistics of {show_keys(set(found))}, but the collector "
                f"normalises {show_keys(set(self._statistics))}: load the state into a collector "
                "that is made with the same options"
            )
        return {key: _fitted(key, one, self._statistics[key]) for key, one in found.items()}

    def __repr__(self) -> str:
        counts = {show_key(key): one.count for key, one in self._statistics.items()}
        return f"{type(self).__name__}(training={self.training}, counts={counts})"


def empty_statistics(found: Normalization | None) -> Statistics:
    """Returns the statistics of no frames, for each entry that a worker's collector normalises."""
    return {} if found is None else found.empty()


def load_statistics(found: Normalization | None, sent: SharedStatistics | None) -> None:
    """Replaces the statistics of a worker's collector by those that the driver sent."""
    if found is not None:
        found.load(sent)


def pop_statistics(found: Normalization | None) -> Statistics:
    """Returns the statistics of a worker's frames since the last call."""
    return {} if found is None else found.pop_delta()


def _merged(one: Mapping[Key, RunningMoments], other: Mapping[Key, RunningMoments]) -> Statistics:
    found = dict(one)
    for key, moments in other.items():
        found[key] = found[key].merged(moments) if key in found else moments
    for key, moments in other.items():
        if not math.isfinite(float(np.sum(moments.deviations))):
            raise ValueError(
                f"{show_key(key)} has values that are not finite, so it can't be normalised: "
                "replace them in the environment, for example by gymnasium.wrappers."
                "TransformObservation or TransformReward"
            )
    return found


def _statistics_of(state: Mapping[str, Any]) -> Statistics:
    return {tuple(one["key"]): RunningMoments.from_state(one) for one in state["statistics"]}


def _fitted(key: Key, found: RunningMoments, own: RunningMoments) -> RunningMoments:
    """Returns the statistics of a state, with as many counts as the collector has."""
    if found.mean.shape != own.mean.shape:
        raise StateError(
            f"the state has statistics of {show_key(key)} of shape {found.mean.shape}, but the "
            f"collector has them of shape {own.mean.shape}"
        )
    if found.counts.ndim and found.counts.shape != own.counts.shape:
        raise StateError(
            f"the state has {found.counts.size} counts of {show_key(key)}, but the collector has "
            f"{own.counts.size}: load the state into a collector of the same agents"
        )
    counts = np.broadcast_to(found.counts, own.counts.shape).copy()
    return RunningMoments(counts, found.mean, found.deviations)


def _is_reward(key: Key) -> bool:
    return key[0] == "next"


def _name(key: Key) -> Any:
    return key[0] if len(key) == 1 else key
