# What type checkers see, and the list of names that are imported when they are first used.

from trawl.collectors.async_batched import AsyncBatchedCollector as AsyncBatchedCollector
from trawl.collectors.base import BaseCollector as BaseCollector
from trawl.collectors.config import CollectorConfig as CollectorConfig
from trawl.collectors.multi import AsyncCollector as AsyncCollector
from trawl.collectors.multi import MultiAsyncCollector as MultiAsyncCollector
from trawl.collectors.multi import MultiCollector as MultiCollector
from trawl.collectors.multi import MultiSyncCollector as MultiSyncCollector
from trawl.collectors.multi_config import MultiConfig as MultiConfig
from trawl.collectors.single import Collector as Collector
from trawl.collectors.utils import split_trajectories as split_trajectories
from trawl.collectors.watch.profile import ProfileConfig as ProfileConfig
from trawl.compat.updaters import MultiProcessedWeightUpdater as MultiProcessedWeightUpdater
from trawl.compat.updaters import RayWeightUpdater as RayWeightUpdater
from trawl.compat.updaters import RemoteModuleWeightUpdater as RemoteModuleWeightUpdater
from trawl.compat.updaters import VanillaWeightUpdater as VanillaWeightUpdater
from trawl.compat.updaters import WeightUpdaterBase as WeightUpdaterBase
from trawl.envs.transforms import PolicyVersion as PolicyVersion
from trawl.extras.evaluation import Comparison as Comparison
from trawl.extras.evaluation import EvaluationResult as EvaluationResult
from trawl.extras.evaluation import Evaluator as Evaluator
from trawl.extras.evaluation import bootstrap_estimate as bootstrap_estimate
from trawl.extras.evaluation import paired_comparison as paired_comparison
from trawl.extras.tuning import TuneResult as TuneResult
from trawl.extras.tuning import tune as tune
from trawl.rollout.normalization import Normalization as Normalization
from trawl.rollout.normalization import NormalizeObservation as NormalizeObservation
from trawl.rollout.normalization import NormalizeReward as NormalizeReward
from trawl.rollout.policy.random_policy import RandomPolicy as RandomPolicy

# Older names.
SyncDataCollector = Collector
MultiSyncDataCollector = MultiSyncCollector
MultiaSyncDataCollector = MultiAsyncCollector
aSyncDataCollector = AsyncCollector
DataCollectorBase = BaseCollector
