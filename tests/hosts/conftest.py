import os
import sys

import pytest

# What tests of collectors over networks have in common.
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "distributed"))


@pytest.fixture(scope="module")
def nursery():
    """What programs on hosts are forked from."""
    from nursery import Nursery

    found = Nursery("hosts_parts")
    yield found
    found.close()
