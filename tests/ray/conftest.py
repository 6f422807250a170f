"""What the tests in a Ray cluster share."""

import os
import sys

import pytest

pytest.importorskip("ray")
pytest.register_assert_rewrite("trawl.testing.backends")
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "collectors"))
