"""Trawl collects experience for reinforcement learning in PyTorch."""

from tensordict.nn import InteractionType as ExplorationType
from tensordict.nn import set_interaction_type as set_exploration_type
from tensordict.nn.probabilistic import interaction_type as exploration_type

from trawl.collectors import (
    BaseCollector,
    Collector,
    PolicyVersion,
    RandomPolicy,
    split_trajectories,
)
from trawl.envs import GymEnv, SerialEnv

__all__ = [
    "BaseCollector",
    "Collector",
    "ExplorationType",
    "GymEnv",
    "PolicyVersion",
    "RandomPolicy",
    "SerialEnv",
    "exploration_type",
    "set_exploration_type",
    "split_trajectories",
]
