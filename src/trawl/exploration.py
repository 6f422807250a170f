"""The names that reinforcement learning has for tensordict's types of interaction."""

from tensordict.nn import InteractionType as ExplorationType
from tensordict.nn import set_interaction_type as set_exploration_type
from tensordict.nn.probabilistic import interaction_type as exploration_type

__all__ = ["ExplorationType", "exploration_type", "set_exploration_type"]
