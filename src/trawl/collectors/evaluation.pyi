# What type checkers see, and the list of names that are imported when they are first used.

from trawl.extras.evaluation import Comparison as Comparison
from trawl.extras.evaluation import EvaluatedEpisodes as EvaluatedEpisodes
from trawl.extras.evaluation import EvaluationResult as EvaluationResult
from trawl.extras.evaluation import Evaluator as Evaluator
from trawl.extras.evaluation import bootstrap_estimate as bootstrap_estimate
from trawl.extras.evaluation import paired_comparison as paired_comparison
