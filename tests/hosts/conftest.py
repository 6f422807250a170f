import os
import sys

import pytest

# This folder has helpers for tests of collectors over networks.
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "distributed"))


@pytest.fixture(scope="module")
def nursery():
    """Yields the process that programs on hosts are forked from."""
    from nursery import Nursery

    found = Nursery("hosts_parts")
    yield found
    found.close()
