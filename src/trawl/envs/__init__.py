"""Gymnasium environments with the TensorDict interface, single ones and batches."""

from trawl.envs.gym import GymEnv
from trawl.envs.masks import ObserveActionMask
from trawl.envs.parallel import ParallelEnv
from trawl.envs.pettingzoo import PettingZooEnv
from trawl.envs.serial import SerialEnv

__all__ = ["GymEnv", "ObserveActionMask", "ParallelEnv", "PettingZooEnv", "SerialEnv"]
