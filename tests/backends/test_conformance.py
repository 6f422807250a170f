"""What all backends promise, on one machine; those over networks have files of their own."""

from backend_conformance import BackendConformance
from memory_backend import MemoryCarrier, ThreadLauncher

from trawl.backends import InlineBackend, ProcessBackend
from trawl.backends.launching.launch import LaunchPlan
from trawl.backends.remote import RemoteBackend
from trawl.backends.thread import ThreadBackend


class TestInline(BackendConformance):
    isolated = concurrent = kills_by_signal = False

    def new_backend(self):
        return InlineBackend()


class TestInlineByMessages(TestInline):
    shares_memory = False

    def new_backend(self):
        return InlineBackend(shares_memory=False)


class TestThread(BackendConformance):
    isolated = kills_by_signal = False

    def new_backend(self):
        return ThreadBackend()


class TestThreadsByMessages(BackendConformance):
    """Messages stay in memory: this shows what any place has to provide."""

    shares_memory = isolated = kills_by_signal = False

    def new_backend(self):
        found = RemoteBackend(LaunchPlan(ThreadLauncher()), MemoryCarrier())
        found.isolated = False
        return found


class TestForkServer(BackendConformance):
    def new_backend(self):
        return ProcessBackend("forkserver")


class TestSpawn(BackendConformance):
    # Each is a fresh interpreter.
    many = 4
    lives_only = True

    def new_backend(self):
        return ProcessBackend("spawn")
