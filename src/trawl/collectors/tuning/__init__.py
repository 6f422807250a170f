"""Search for the layout of environments and processes that collects fastest on this machine."""

from trawl.collectors.tuning.candidate import Candidate
from trawl.collectors.tuning.result import TuneResult
from trawl.collectors.tuning.trial import Trial
from trawl.collectors.tuning.tuner import tune

__all__ = ["Candidate", "Trial", "TuneResult", "tune"]
