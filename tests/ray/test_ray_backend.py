"""Workers in Ray actors, as any backend's."""

import time

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


@pytest.mark.usefixtures("cluster")
class TestRayInStep(TestRay):
    """Where what a worker says next is asked for together with what it is told."""

    def new_backend(self):
        return RayBackend(FREE, in_step=True)

    def test_what_is_said_unasked_is_heard_without_waiting(self):
        worker = self.launch()
        assert self.ask(worker, "echo", 1) == 1
        worker.send(("count", 3))
        deadline = time.monotonic() + self.patience
        found = []
        while len(found) < 3 and time.monotonic() < deadline:
            found += [event.content for event in self.backend.wait(0)]
        assert found == [0, 1, 2]
