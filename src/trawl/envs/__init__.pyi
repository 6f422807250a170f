# What type checkers see, and the list of names that are imported when they are first used.

from trawl.envs.agents.pettingzoo import PettingZooEnv as PettingZooEnv
from trawl.envs.batches.serial import SerialEnv as SerialEnv
from trawl.envs.dm import DMEnv as DMEnv
from trawl.envs.entries.info_keys import InfoKey as InfoKey
from trawl.envs.entries.masks import ObserveActionMask as ObserveActionMask
from trawl.envs.frame_stack import FrameStack as FrameStack
from trawl.envs.gym import GymEnv as GymEnv
from trawl.envs.kinds import EnvKind as EnvKind
from trawl.envs.processes.parallel import ParallelEnv as ParallelEnv
from trawl.envs.source import Source as Source
from trawl.envs.torch_vector import TorchVectorEnv as TorchVectorEnv
from trawl.extras.jax.env import JaxEnv as JaxEnv
from trawl.extras.jax.functions import JaxFunctionalEnv as JaxFunctionalEnv
from trawl.extras.vmas import VmasEnv as VmasEnv
