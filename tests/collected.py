"""Collects the tests when it is imported, for processes of pytest-xdist that are forked then.

They find all modules of tests imported, and need a sixth of the time to collect them. Those that
can't be imported are left to them to report.
"""

import contextlib
import io
import json
import os

import pytest

_QUIET = ("--collect-only", "-qq", "-p", "no:cacheprovider", "-p", "no:xdist")
with contextlib.redirect_stdout(io.StringIO()):
    pytest.main([*_QUIET, *json.loads(os.environ.pop("COLLECTED"))])
