"""Environments that number their own steps, and a check of the frames collected from them."""

from trawl.testing.envs import (
    FaultyEnv,
    ImageEnv,
    NestedEnv,
    NumberedEnv,
    RaggedEnv,
    SelfResettingVectorEnv,
)
from trawl.testing.ledger import Ledger
from trawl.testing.script import Script
from trawl.testing.tensor_envs import NumberedTorchEnv

__all__ = [
    "FaultyEnv",
    "ImageEnv",
    "Ledger",
    "NestedEnv",
    "NumberedEnv",
    "NumberedTorchEnv",
    "RaggedEnv",
    "Script",
    "SelfResettingVectorEnv",
]
