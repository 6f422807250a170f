"""One Ray cluster on this machine for all tests of a process."""

import os
import sys

import pytest

pytest.importorskip("ray")
pytest.register_assert_rewrite("trawl.testing.backends")
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "collectors"))


@pytest.fixture(scope="session")
def cluster():
    """A cluster with few CPUs, which ends with the tests."""
    from trawl.backends.ray_cluster import DEFAULT_RAY_INIT_CONFIG, connect, import_ray

    ray = import_ray()
    options = {**DEFAULT_RAY_INIT_CONFIG, "num_cpus": 4, "object_store_memory": 300 << 20}
    for left in reversed(range(10)):
        try:
            assert connect(options)
            break
        except Exception as error:
            # Ray gives a node 30 s to start, which is too short on a busy machine.
            if "timed out during startup" not in str(error) or not left:
                raise
            ray.shutdown()
    yield ray
    ray.shutdown()
