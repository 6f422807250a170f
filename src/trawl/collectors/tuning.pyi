# What type checkers see, and the list of names that are imported when they are first used.

from trawl.extras.tuning import Candidate as Candidate
from trawl.extras.tuning import Trial as Trial
from trawl.extras.tuning import TuneResult as TuneResult
from trawl.extras.tuning import tune as tune
