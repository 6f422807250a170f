import os
import sys

import nursery
import pytest

pytest.register_assert_rewrite("backend_conformance", "cluster_conformance")
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "collectors"))


@pytest.fixture(autouse=True)
def state_home(tmp_path, monkeypatch):
    """Processes of the tests leave no keys for each other in the home of the user."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def forked(monkeypatch):
    """Workers of the test are forked, also those that commands or libraries start."""
    monkeypatch.setattr(sys, "executable", nursery.python())
