"""Private names of Python's standard library."""

from __future__ import annotations

import subprocess
from typing import Any

#: Returns the options with which this interpreter was started, as the options of another one.
#: ``sys.flags`` and ``sys.warnoptions`` don't say how to write them.
interpreter_options: Any = getattr(subprocess, "_args_from_interpreter_flags")  # noqa: B009
