"""Parameters of tests for which either class of collectors will do: one of them is a long test."""

import pytest

_LONG = pytest.mark.long
_SYNC, _ASYNC = pytest.param(True, id="sync"), pytest.param(False, id="async")
SYNC = pytest.mark.parametrize("sync", [_SYNC, pytest.param(False, id="async", marks=_LONG)])
ASYNC = pytest.mark.parametrize("sync", [pytest.param(True, id="sync", marks=_LONG), _ASYNC])
