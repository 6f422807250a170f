"""Trawl collects experience for reinforcement learning in PyTorch."""

import sys
import warnings

from trawl.lazy import names_of_stub
from trawl.lean import import_lean

if sys.platform in ("win32", "cygwin"):
    raise ImportError(
        "trawl needs Linux, and does not work on Windows: use it in WSL (the Windows Subsystem for "
        "Linux) or in a container"
    )
if sys.platform != "linux":
    warnings.warn(
        f"trawl is made for Linux: on {sys.platform}, everything works but clusters, with "
        "processes that take longer to start",
        stacklevel=2,
    )

import_lean()

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = names_of_stub(__name__)
