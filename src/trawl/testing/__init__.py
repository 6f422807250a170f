"""Environments whose frames can be checked, and the check: for tests of what collects them."""

from trawl.testing.envs import (
    FaultyEnv,
    ImageEnv,
    NestedEnv,
    NumberedEnv,
    RaggedEnv,
    SelfResettingVectorEnv,
)
from trawl.testing.ledger import Ledger

__all__ = [
    "FaultyEnv",
    "ImageEnv",
    "Ledger",
    "NestedEnv",
    "NumberedEnv",
    "RaggedEnv",
    "SelfResettingVectorEnv",
]
