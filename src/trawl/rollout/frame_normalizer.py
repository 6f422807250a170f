"""Base of the normalisers of batches of arrays and of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from trawl.keys import DONE, MASK, Key, show_key
from trawl.rollout.batch_statistics import BatchStatistics, DiscountedReturns, raw_reward_of
from trawl.rollout.layout import Leaf
from trawl.rollout.moments import BaseMoments
from trawl.rollout.normalization import Normalization, NormalizeOptions

_Rows = TypeVar("_Rows")


class NormalizedEntry(Protocol):
    """An observation that is normalised.

    Attributes:
        key: key of the observation.
        raw_next: the observations of the environment with which the next batch begins.
    """

    key: Key
    raw_next: Any

    def load(self, moments: BaseMoments, epsilon: float) -> None:
        """Sets the statistics for all rows from now on."""


class FrameNormalizer(Generic[_Rows]):
    """Normaliser of the frames of an environment, which by default leaves them as they are.

    Attributes:
        normalization: the statistics; None if nothing is normalised.
    """

    normalization: Normalization | None = None
    _observations: Sequence[NormalizedEntry] = ()
    _rewards: Sequence[DiscountedReturns] = ()
    # True for environments that were reset since the last batch. Their first observation is
    # normalised when the next batch begins, with the statistics of that batch.
    _fresh: _Rows
    _options: NormalizeOptions
    _statistics: BatchStatistics
    # Entries of the batch that is being filled, with time first.
    _rows: Mapping[Key, Any]

    @property
    def keys(self) -> list[Key]:
        """Keys of the observations that are normalised."""
        return [one.key for one in self._observations]

    @property
    def more_leaves(self) -> dict[Key, Leaf]:
        """Layout of further entries of a batch."""
        return {
            raw_reward_of(one.key): Leaf(tuple(one.carry.shape[1:]), torch.float32)
            for one in self._rewards
            if one.options.keep_raw
        }

    @property
    def raw_next(self) -> dict[Key, _Rows]:
        """The environment's own observations with which the next batch begins, by key."""
        return {one.key: one.raw_next for one in self._observations}

    def saved_rows(self) -> dict[str, _Rows]:
        """Returns the rows to save in a state, by name."""
        if self.normalization is None:
            return {}
        found = {f"raw {show_key(one.key)}": one.raw_next for one in self._observations}
        found |= {f"return {show_key(one.key)}": one.carry for one in self._rewards}
        return found | {"fresh": self._fresh}

    def _load(self) -> None:
        """Makes the newest statistics those of all rows from now on."""
        options = self._options.observations
        for one in self._observations:
            assert options is not None
            one.load(self._statistics.of(one.key), options.epsilon)

    def _counted(self, stop: int) -> Any:
        """Returns a mask of the frames up to a row that count; None if all of them do."""
        mask = self._rows[MASK][:stop] if MASK in self._rows else None
        if self._statistics.is_cut(stop):
            every = self._rows[DONE][:stop, :, 0] | True
            mask = self._statistics.cut(every if mask is None else mask)
        return mask
