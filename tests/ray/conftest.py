"""Settings of the tests in a Ray cluster."""

import os
import sys
from collections.abc import Iterator

import pytest

ray = pytest.importorskip("ray")
pytest.register_assert_rewrite("backend_conformance")
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "collectors"))


@pytest.fixture(scope="module")
def sent_by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Actors can't import the file of the tests, so its classes go to them by value."""
    ray.cloudpickle.register_pickle_by_value(request.module)
    yield
    ray.cloudpickle.unregister_pickle_by_value(request.module)
