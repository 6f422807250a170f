"""Search for the layout of environments and processes that collects fastest on this machine."""

from trawl.extras.tuning.candidate import Candidate
from trawl.extras.tuning.result import TuneResult
from trawl.extras.tuning.trial import Trial
from trawl.extras.tuning.tuner import tune

__all__ = ["Candidate", "Trial", "TuneResult", "tune"]
