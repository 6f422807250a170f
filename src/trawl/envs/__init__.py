"""Environments with the TensorDict interface, single ones and batches."""

from trawl.envs.dm import DMEnv
from trawl.envs.frame_stack import FrameStack
from trawl.envs.gym import GymEnv
from trawl.envs.info_keys import InfoKey
from trawl.envs.jax_env import JaxEnv
from trawl.envs.jax_functions import JaxFunctionalEnv
from trawl.envs.kinds import EnvKind
from trawl.envs.masks import ObserveActionMask
from trawl.envs.parallel import ParallelEnv
from trawl.envs.pettingzoo import PettingZooEnv
from trawl.envs.serial import SerialEnv
from trawl.envs.source import Source
from trawl.envs.torch_vector import TorchVectorEnv
from trawl.envs.vmas_env import VmasEnv

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
