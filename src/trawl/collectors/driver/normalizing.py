"""Normalisation: statistics in states, between workers and their driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trawl.collectors.config import CollectorConfig
from trawl.rollout.normalization import (
    Normalization,
    NormalizeObservation,
    NormalizeOptions,
    NormalizeReward,
    SharedStatistics,
    Statistics,
)

# Entry of a state with the statistics.
_NORMALIZATION = "normalization"


def normalization_state(found: Normalization | None) -> dict[str, Any]:
    """Returns the statistics of a collector, as an entry of a state."""
    return {} if found is None else {_NORMALIZATION: found.state_dict()}


def check_normalization(found: Normalization | None, state: Mapping[str, Any]) -> None:
    """Checks that a state has the statistics that a collector needs.

    Raises:
        KeyError: if the state has no statistics.
        ValueError: if it has the statistics of other entries, or if the collector has none.
    """
    if found is None and _NORMALIZATION in state:
        raise ValueError(
            "state_dict has statistics for normalisation, but this collector has none: "
            "load it into a collector with the same normalize_observations and "
            "normalize_rewards"
        )
    if found is not None:
        if _NORMALIZATION not in state:
            raise KeyError(
                f"state_dict has no {_NORMALIZATION!r}; it has {sorted(state)}: load it into "
                "a collector without normalize_observations and normalize_rewards"
            )
        found.check_state(state[_NORMALIZATION])


def load_normalization(found: Normalization | None, state: Mapping[str, Any]) -> None:
    """Restores the entry that :func:`normalization_state` returned."""
    if found is not None:
        found.load_state_dict(state[_NORMALIZATION])


def normalize_options(config: CollectorConfig) -> NormalizeOptions:
    """Returns what a collector normalises, and how."""
    observations, rewards = config.normalize_observations, config.normalize_rewards
    return NormalizeOptions(
        observations if isinstance(observations, NormalizeObservation) else None,
        rewards if isinstance(rewards, NormalizeReward) else None,
    )


# --- in a worker


def empty_statistics(found: Normalization | None) -> Statistics:
    """Returns the statistics of no frames, for each entry that a collector normalises."""
    return {} if found is None else found.empty()


def load_statistics(found: Normalization | None, sent: SharedStatistics | None) -> None:
    """Replaces the statistics of a worker's collector by those that the driver sent."""
    if found is not None:
        found.load(sent)


def pop_statistics(found: Normalization | None) -> Statistics:
    """Returns the statistics of the frames since the last call."""
    return {} if found is None else found.pop_delta()
