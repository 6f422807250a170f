"""Evaluation of policies on whole episodes, during training."""

from trawl.extras.evaluation.estimates import bootstrap_estimate, paired_comparison
from trawl.extras.evaluation.evaluator import Evaluator
from trawl.extras.evaluation.reading import EvaluatedEpisodes
from trawl.extras.evaluation.results import Comparison, EvaluationResult

__all__ = [
    "Comparison",
    "EvaluatedEpisodes",
    "EvaluationResult",
    "Evaluator",
    "bootstrap_estimate",
    "paired_comparison",
]
