"""Workers in Ray actors, as any backend's."""

import pytest

from trawl.backends.ray_backend import RayBackend
from trawl.testing import BackendConformance

FREE = {"num_cpus": 0}


@pytest.mark.usefixtures("cluster")
class TestRay(BackendConformance):
    shares_memory = False
    kills_by_signal = False
    many = 6

    def new_backend(self):
        return RayBackend(FREE)
