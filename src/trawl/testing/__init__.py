"""Test environments, a check of the frames they yield, and a conformance suite for backends.

The environments and the check are for tests of collectors.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trawl.testing.backends import BackendConformance
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
    "BackendConformance",
    "FaultyEnv",
    "ImageEnv",
    "Ledger",
    "NestedEnv",
    "NumberedEnv",
    "RaggedEnv",
    "SelfResettingVectorEnv",
]

# Module of each name. Imports are lazy because a worker of the suite is a fresh process, which
# needs nothing else of this package.
_HOMES = dict.fromkeys(__all__, "trawl.testing.envs") | {
    "BackendConformance": "trawl.testing.backends",
    "Ledger": "trawl.testing.ledger",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trawl.testing' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
