import os
import sys

import pytest

pytest.register_assert_rewrite("backend_conformance")
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "collectors"))


@pytest.fixture(autouse=True)
def state_home(tmp_path, monkeypatch):
    """Processes of the tests leave no keys for each other in the home of the user."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
