"""Evaluation of policies on whole episodes, during training."""

from trawl.collectors.evaluation.estimates import bootstrap_estimate, paired_comparison
from trawl.collectors.evaluation.evaluator import Evaluator
from trawl.collectors.evaluation.reading import EvaluatedEpisodes
from trawl.collectors.evaluation.results import Comparison, EvaluationResult

__all__ = [
    "Comparison",
    "EvaluatedEpisodes",
    "EvaluationResult",
    "Evaluator",
    "bootstrap_estimate",
    "paired_comparison",
]
