"""Base of the normalisers of batches of arrays and of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import torch

from trawl.keys import Key, show_key
from trawl.rollout.batch_statistics import DiscountedReturns, raw_reward_of
from trawl.rollout.layout import Leaf
from trawl.rollout.normalization import Normalization

_Rows = TypeVar("_Rows")


class NormalizedEntry(Protocol):
    """An observation that is normalised.

    Attributes:
        key: key of the observation.
        raw_next: the observations of the environment with which the next batch begins.
    """

    key: Key
    raw_next: Any


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
