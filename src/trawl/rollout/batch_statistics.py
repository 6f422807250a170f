"""Statistics of the frames of a batch that is being filled, on any device.

:class:`BatchStatistics` decides which frames count, and when the statistics are updated.
:class:`DiscountedReturns` has the returns by which rewards are normalised. Both work with arrays of
numpy and with tensors, and never wait for a device before the batch is finished.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from trawl.envs.features import is_feature
from trawl.keys import RAW_REWARD, Key, show_key, show_keys
from trawl.rollout.layout import Leaf
from trawl.rollout.moments import BaseMoments, RunningMoments
from trawl.rollout.normalization import (
    Normalization,
    NormalizeObservation,
    NormalizeOptions,
    NormalizeReward,
    Statistics,
)

# Within a batch, the statistics are updated whenever their count has doubled. The first update is
# after this many frames.
_FIRST_FRAMES = 16
NEVER = 2**62


def observation_keys(options: NormalizeObservation, observed: Mapping[Key, Leaf]) -> list[Key]:
    """Returns the keys of the observations to normalise.

    Args:
        options: the options.
        observed: layout of the observations.

    Raises:
        KeyError: if a key of the options is not the key of an observation.
        ValueError: if a chosen observation is not of floating-point numbers, or if the environment
            has no observation of floating-point numbers.
    """
    floats = [key for key, leaf in observed.items() if leaf.dtype.is_floating_point]
    if options.keys is None:
        found = [key for key in floats if is_feature(key)]
        if not found:
            raise ValueError(
                "normalize_observations needs an observation of floating-point numbers, but the "
                f"environment has only {show_keys(set(observed))}"
            )
        return found
    for key in options.keys:
        if key not in observed:
            raise KeyError(
                f"normalize_observations has the key {show_key(key)}, but the observations are "
                f"{show_keys(set(observed))}"
            )
        if key not in floats:
            raise ValueError(
                f"normalize_observations has the key {show_key(key)}, but its dtype is "
                f"{observed[key].dtype}: only floating-point numbers can be normalised"
            )
    return list(options.keys)


def raw_reward_of(key: Key) -> Key:
    """Returns the key of the environment's own reward, for the key of a normalised one."""
    return (*key[:-1], RAW_REWARD)


class BatchStatistics:
    """Statistics of all frames before a batch and of the frames of the batch so far.

    Args:
        options: options of everything that is normalised.
        empty: statistics of no frames, by key of the entry.
        num_envs: number of environments.
        load: function that brings statistics to the device of the data.

    Attributes:
        normalization: the statistics of all frames before the batch.
        most_frames: largest number of frames of the batch that count.
        first: first row of the batch that has not been counted.
        due: row of the step after which the statistics are to be updated.
    """

    def __init__(
        self,
        options: NormalizeOptions,
        empty: Statistics,
        num_envs: int,
        load: Callable[[RunningMoments], BaseMoments],
    ) -> None:
        self.normalization = Normalization(options, empty)
        self.most_frames = math.inf
        self.first, self.due = 0, NEVER
        self._observed = None if options.observations is None else next(iter(empty))
        self._num_envs = num_envs
        self._load = load
        self._base: dict[Key, BaseMoments] = {}
        self._delta: dict[Key, BaseMoments] = {}

    @property
    def training(self) -> bool:
        """False if the statistics are frozen."""
        return self.normalization.training

    def load(self) -> None:
        """Loads the newest statistics, between two batches."""
        found = self.normalization.share().statistics
        self._base = {key: self._load(one) for key, one in found.items()}
        self._delta = {}

    def begin(self, in_groups: bool) -> None:
        """Begins a batch.

        Args:
            in_groups: True if the rows of a step are not filled all at once.
        """
        self.load()
        self.first, self.due = 0, NEVER
        if self._observed is not None and self.training and not in_groups:
            self._before = self.normalization.of(self._observed).count
            self.set_due(0)

    def set_due(self, row: int) -> None:
        """Sets ``due`` after an update of the statistics.

        Args:
            row: the first row that the update did not count.
        """
        # The number of frames may be known only to the device, so rows without frames count here.
        before = self._before + row * self._num_envs
        self.due = row + -(-max(before, _FIRST_FRAMES) // self._num_envs) - 1

    def is_cut(self, rows: int) -> bool:
        """Returns True if some frames of the first ``rows`` rows of a batch don't count."""
        return self.most_frames < rows * self._num_envs

    def cut(self, mask: Any) -> Any:
        """Returns the mask of the frames that count.

        Args:
            mask: True where a row holds a frame, ``(rows, num_envs)``, from the batch's first row.
        """
        order = mask.reshape(-1).cumsum(0).reshape(mask.shape)
        return mask & (order <= self.most_frames)

    def add(self, key: Key, moments: BaseMoments) -> None:
        """Adds the statistics of frames of the batch."""
        self._delta[key] = self._delta[key].merged(moments) if key in self._delta else moments

    def of(self, key: Key) -> BaseMoments:
        """Returns the statistics of all frames that have been counted, on the device."""
        base = self._base[key]
        return base.merged(self._delta[key]) if key in self._delta else base

    def finish(self) -> None:
        """Adds the batch's frames to the statistics, which may wait for the device."""
        delta, self._delta = self._delta, {}
        if delta:
            self.normalization.merge({key: one.on_host() for key, one in delta.items()})


class DiscountedReturns:
    """Discounted returns of the environments, by which a reward is normalised.

    Args:
        key: key of the reward.
        options: the options.
        carry: zeros of float64, with the shape of the rewards of a step.
        add: ``numpy.add`` or ``torch.add``.
        multiply: ``numpy.multiply`` or ``torch.mul``.

    Attributes:
        carry: discounted return of each environment's episode so far, to add to its next reward.
    """

    def __init__(
        self,
        key: Key,
        options: NormalizeReward,
        carry: Any,
        add: Callable[..., Any],
        multiply: Callable[..., Any],
    ) -> None:
        self.key, self.options, self.carry = key, options, carry
        self._add, self._multiply = add, multiply

    def add(self, returns: Any, keep: Any) -> None:
        """Turns rewards into discounted returns, in place.

        Args:
            returns: rewards of the environment, ``(steps, *shape)``, float64; overwritten.
            keep: factor of each return in the next one: gamma, or 0 where an episode ends,
                float64.
        """
        # The reward of an episode's last step still belongs to the episode's return.
        carry, add, multiply = self.carry, self._add, self._multiply
        for row, kept in zip(returns, keep, strict=True):
            add(row, carry, out=row)
            multiply(row, kept, out=carry)
