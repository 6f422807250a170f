"""Private names of Python's own library."""

from __future__ import annotations

import signal
from collections.abc import Callable
from importlib import import_module
from typing import Any

#: What ``signal.signal`` calls, in a tenth of its time: it turns no handler into an enum,
#: and takes none. What it returns, it takes.
set_signal_handler: Callable[[int, Any], Any]
try:
    set_signal_handler = import_module("_signal").signal
except ImportError:  # another implementation of Python
    set_signal_handler = signal.signal
