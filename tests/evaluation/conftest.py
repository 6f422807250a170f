"""One Ray cluster on this machine for all tests of a process that ask for it."""

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A cluster with few CPUs, which ends with the tests."""
    pytest.importorskip("ray")
    from trawl.backends.ray_cluster import DEFAULT_RAY_INIT_CONFIG, connect, import_ray

    ray = import_ray()
    assert connect({**DEFAULT_RAY_INIT_CONFIG, "num_cpus": 4, "object_store_memory": 300 << 20})
    yield ray
    ray.shutdown()
