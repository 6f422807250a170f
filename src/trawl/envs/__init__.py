"""Environments with the TensorDict interface, single ones and batches."""

from trawl.envs.agents.pettingzoo import PettingZooEnv
from trawl.envs.agents.vmas import VmasEnv
from trawl.envs.batches.serial import SerialEnv
from trawl.envs.dm import DMEnv
from trawl.envs.entries.info_keys import InfoKey
from trawl.envs.entries.masks import ObserveActionMask
from trawl.envs.frame_stack import FrameStack
from trawl.envs.gym import GymEnv
from trawl.envs.jax.env import JaxEnv
from trawl.envs.jax.functions import JaxFunctionalEnv
from trawl.envs.kinds import EnvKind
from trawl.envs.processes.parallel import ParallelEnv
from trawl.envs.source import Source
from trawl.envs.torch_vector import TorchVectorEnv

__all__ = [
    "DMEnv",
    "EnvKind",
    "FrameStack",
    "GymEnv",
    "InfoKey",
    "JaxEnv",
    "JaxFunctionalEnv",
    "ObserveActionMask",
    "ParallelEnv",
    "PettingZooEnv",
    "SerialEnv",
    "Source",
    "TorchVectorEnv",
    "VmasEnv",
]
