"""Results of evaluations: metrics of one policy, comparisons of two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from trawl.extras.evaluation.engine import Measured
from trawl.extras.evaluation.reading import EvaluatedEpisodes
from trawl.extras.evaluation.statistics import summarise


class EvaluationResult(dict[str, Any]):
    """Metrics of an evaluation, by name.

    Attributes:
        episodes: returns and lengths of the evaluation's episodes.
    """

    episodes: EvaluatedEpisodes

    def __init__(self, metrics: dict[str, Any], episodes: EvaluatedEpisodes) -> None:
        super().__init__(metrics)
        self.episodes = episodes


@dataclass(frozen=True)
class Comparison:
    """Paired comparison of two policies on the same episodes.

    Attributes:
        difference: mean difference of the returns, first policy minus second policy.
        sem: standard error of the difference, from the differences of single episodes.
        low: lower end of the bootstrap confidence interval (95 %) of the difference.
        high: upper end of that interval.
        wins: share of the episodes in which the first policy had the higher return; ties count
            half.
        first: result of the first policy.
        second: result of the second policy.
    """

    difference: float
    sem: float
    low: float
    high: float
    wins: float
    first: EvaluationResult
    second: EvaluationResult

    def __str__(self) -> str:
        return (
            f"difference {self.difference:.4g} (95 % interval {self.low:.4g} to {self.high:.4g}), "
            f"better in {self.wins:.0%} of {len(self.first.episodes)} episodes"
        )


def result_of(
    measured: Measured, prefix: str, step: int, metrics: dict[str, Any]
) -> EvaluationResult:
    """Returns the metrics of an evaluation.

    Args:
        measured: outcome of the evaluation.
        prefix: prefix of the metrics' names.
        step: number of the step at which the evaluation is logged.
        metrics: additional metrics, by name; they replace other metrics of the same names.
    """
    episodes = measured.episodes
    rewards = summarise(episodes.returns)
    found: dict[str, Any] = {
        "reward": rewards.mean,
        "reward_std": rewards.std,
        "reward_sem": rewards.sem,
        "reward_iqm": rewards.iqm,
        "reward_ci_low": rewards.low,
        "reward_ci_high": rewards.high,
        "num_episodes": len(episodes),
        "episode_length": float(episodes.lengths.mean()),
        "fps": measured.frames / measured.seconds,
        "step": step,
    }
    found |= {f"{name}/reward": float(values.mean()) for name, values in episodes.groups.items()}
    if measured.video is not None:
        found["video"] = torch.from_numpy(measured.video)
    found |= metrics
    return EvaluationResult({f"{prefix}/{name}": found[name] for name in found}, episodes)


def metrics_of(returned: Any) -> dict[str, Any]:
    """Returns the metrics that a ``metrics_fn`` returned.

    Raises:
        TypeError: if the function did not return a mapping.
    """
    if not isinstance(returned, Mapping):
        raise TypeError(
            "metrics_fn must return a dict of metrics by name, such as {'success_rate': 0.5}, "
            f"but it returned {type(returned).__name__}: {returned!r}"
        )
    return dict(returned)


def as_tensordict(result: EvaluationResult) -> TensorDict:
    """Returns the metrics as a TensorDict with an empty batch size."""
    return TensorDict(dict(result), batch_size=[])


def comparison_of(first: EvaluationResult, second: EvaluationResult) -> Comparison:
    """Compares two policies, episode by episode.

    Args:
        first: result of the first policy.
        second: result of the second policy, on episodes with the same seeds.
    """
    differences = first.episodes.returns - second.episodes.returns
    summary = summarise(differences)
    wins = float(np.mean(np.sign(differences) / 2 + 0.5))
    return Comparison(summary.mean, summary.sem, summary.low, summary.high, wins, first, second)
