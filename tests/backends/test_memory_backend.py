"""Workers that are threads, whose messages stay in memory: what any place has to provide."""

from backend_conformance import BackendConformance
from memory_backend import MemoryCarrier, ThreadLauncher

from trawl.backends.launch import LaunchPlan
from trawl.backends.remote import RemoteBackend


class TestThreads(BackendConformance):
    shares_memory = False
    isolated = False
    kills_by_signal = False

    def new_backend(self):
        found = RemoteBackend(LaunchPlan(ThreadLauncher()), MemoryCarrier())
        found.isolated = False
        return found
