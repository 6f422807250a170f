"""Settings of the tests in a Ray cluster."""

import os
import sys
from collections.abc import Iterator

import pytest

ray = pytest.importorskip("ray")
pytest.register_assert_rewrite("backend_conformance", "cluster_conformance")
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "collectors"))

#: Modules of tests that actors can't import.
_HELPERS = ("cluster_conformance", "multi_parts", "ray_parts", "test_ray_handles")


@pytest.fixture(scope="module")
def sent_by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Actors can't import the files of the tests, so their classes go to them by value."""
    helpers = (sys.modules[name] for name in _HELPERS if name in sys.modules)
    modules = {request.module, *helpers}
    for module in modules:
        ray.cloudpickle.register_pickle_by_value(module)
    yield
    for module in modules:
        ray.cloudpickle.unregister_pickle_by_value(module)
