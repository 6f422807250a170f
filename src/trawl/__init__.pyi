# What type checkers see, and the list of names that are imported when they are first used.

from trawl.collectors import AsyncCollector as AsyncCollector
from trawl.collectors import BaseCollector as BaseCollector
from trawl.collectors import Collector as Collector
from trawl.collectors import Evaluator as Evaluator
from trawl.collectors import MultiAsyncCollector as MultiAsyncCollector
from trawl.collectors import MultiCollector as MultiCollector
from trawl.collectors import MultiSyncCollector as MultiSyncCollector
from trawl.collectors import PolicyVersion as PolicyVersion
from trawl.collectors import RandomPolicy as RandomPolicy
from trawl.collectors import split_trajectories as split_trajectories
from trawl.collectors import tune as tune
from trawl.envs import GymEnv as GymEnv
from trawl.envs import ParallelEnv as ParallelEnv
from trawl.envs import SerialEnv as SerialEnv
from trawl.exploration import ExplorationType as ExplorationType
from trawl.exploration import exploration_type as exploration_type
from trawl.exploration import set_exploration_type as set_exploration_type

__version__: str
