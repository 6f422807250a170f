"""Libraries that some tests need."""

import importlib.util

import pytest


def require(name):
    """Skips the calling module if a library is missing, and does not import it yet.

    Each process of tests imports all modules of tests, but runs only some of them: libraries that
    take a second to import are imported by the tests themselves.
    """
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed", allow_module_level=True)
