"""Checks of your environment and policy, and environments that number their own steps."""

from trawl.lazy import public_dir
from trawl.testing.env_checks import check_env
from trawl.testing.envs import (
    FaultyEnv,
    ImageEnv,
    NestedEnv,
    NumberedEnv,
    RaggedEnv,
    SelfResettingVectorEnv,
)
from trawl.testing.findings import CheckFailed, CheckReport, Finding
from trawl.testing.ledger import Ledger
from trawl.testing.policy_checks import check_policy
from trawl.testing.script import Script
from trawl.testing.tensor_envs import NumberedTorchEnv

__all__ = [
    "CheckFailed",
    "CheckReport",
    "FaultyEnv",
    "Finding",
    "ImageEnv",
    "Ledger",
    "NestedEnv",
    "NumberedEnv",
    "NumberedTorchEnv",
    "RaggedEnv",
    "Script",
    "SelfResettingVectorEnv",
    "check_env",
    "check_policy",
]

__dir__ = public_dir(__name__)
