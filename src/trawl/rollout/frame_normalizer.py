"""Base of the normalisers of batches of arrays and of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from typing_extensions import override

from trawl.keys import DONE, MASK, Key, next_of, show_key
from trawl.rollout.batch_statistics import BatchStatistics, DiscountedReturns, raw_reward_of
from trawl.rollout.layout import Leaf
from trawl.rollout.moments import BaseMoments
from trawl.rollout.normalization import Normalization, NormalizeOptions
from trawl.rollout.policy_leaves import PolicyLeaves
from trawl.rollout.stage import Rows, Stage, View


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


class FrameNormalizer(Stage[Rows, View]):
    """Stage that normalises the frames of an environment."""

    normalization: Normalization
    _observations: Sequence[NormalizedEntry]
    _rewards: Sequence[DiscountedReturns]
    # True for environments that were reset since the last batch. Their first observation is
    # normalised when the next batch begins, with the statistics of that batch.
    _fresh: Rows
    _options: NormalizeOptions
    _statistics: BatchStatistics
    # Entries of the batch that is being filled, with time first.
    _rows: Mapping[Key, Any]

    @property
    @override
    def keys(self) -> list[Key]:  # type: ignore[override]
        return [one.key for one in self._observations]

    @property
    @override
    def more_leaves(self) -> dict[Key, Leaf]:  # type: ignore[override]
        return {
            raw_reward_of(one.key): Leaf(tuple(one.carry.shape[1:]), torch.float32)
            for one in self._rewards
            if one.options.keep_raw
        }

    @override
    def check_policy(self, leaves: PolicyLeaves) -> None:
        for key in leaves.states:
            if key in self.keys:
                raise ValueError(
                    f"the policy writes {show_key(next_of(key))}, so the environment's own values "
                    "can't be normalised: leave the key out of NormalizeObservation(keys=...)"
                )

    @override
    def first_rows(self, rows: Mapping[Key, Rows]) -> Mapping[Key, Rows]:
        return {**rows, **{one.key: one.raw_next for one in self._observations}}

    @override
    def saved_rows(self) -> dict[str, Rows]:
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
