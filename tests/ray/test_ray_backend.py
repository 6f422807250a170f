"""Workers in Ray actors, as any backend's."""

import time
from dataclasses import replace

import pytest
from backend_conformance import BackendConformance, Basics, Messages

from trawl.extras.clusters.network.control import ControlConnection
from trawl.extras.clusters.ray import backend as ray_backend
from trawl.extras.clusters.ray.backend import RayBackend

FREE = {"num_cpus": 0}


@pytest.mark.usefixtures("cluster")
class OnRay(Basics):
    shares_memory = False
    kills_by_signal = False
    many = 4
    flood = 300

    def new_backend(self):
        return RayBackend(FREE)


class TestRay(OnRay, BackendConformance):
    pass


class TestRayInStep(OnRay, Messages):
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

    def test_an_actor_whose_line_is_lost_is_dead(self):
        worker = self.launch()
        assert self.ask(worker, "echo", 1) == 1
        worker.requests.close()
        assert self.end(worker)[2].reason.startswith("died")


class LineToNowhere(ControlConnection):
    """One that no worker gets to, as a firewall may have it."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.rendezvous = replace(self.rendezvous, port=1)


class TestRayBehindAFirewall(OnRay, Messages):
    """Where Ray's own connections are the only ones."""

    @pytest.fixture(autouse=True)
    def firewall(self, monkeypatch):
        monkeypatch.setattr(ray_backend, "ControlConnection", LineToNowhere)

    def wait_arrived(self, worker):
        # The call that fetches is under way, so that calls which have ended brought the messages.
        deadline = time.monotonic() + self.patience
        while worker._waiting or worker._under_way or not worker.fetching:
            assert time.monotonic() < deadline
            time.sleep(0.001)
