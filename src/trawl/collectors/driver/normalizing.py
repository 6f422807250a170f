"""Normalisation: statistics between workers and their driver."""

from __future__ import annotations

from trawl.collectors.config import CollectorConfig
from trawl.rollout.normalization import (
    Normalization,
    NormalizeObservation,
    NormalizeOptions,
    NormalizeReward,
    SharedStatistics,
    Statistics,
)


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
