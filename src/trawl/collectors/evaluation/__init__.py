"""Evaluation of policies on whole episodes, during training."""

from trawl.collectors.evaluation.evaluator import Evaluator
from trawl.collectors.evaluation.reading import EvaluatedEpisodes
from trawl.collectors.evaluation.results import Comparison, EvaluationResult

__all__ = ["Comparison", "EvaluatedEpisodes", "EvaluationResult", "Evaluator"]
