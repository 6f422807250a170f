"""What all backends promise; that of Ray has a file of its own."""

from backend_conformance import BackendConformance, Lives

from trawl.backends import InlineBackend, ProcessBackend
from trawl.backends.portable import PortableBackend
from trawl.backends.thread import ThreadBackend
from trawl.extras.clusters.launching.launch import LaunchPlan, LocalLauncher
from trawl.extras.clusters.network import backend
from trawl.extras.clusters.network.backend import RemoteBackend


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


class TestForkServer(BackendConformance):
    def new_backend(self):
        return ProcessBackend("forkserver")


class TestSpawn(Lives):
    # Each is a fresh interpreter.
    many = repeats = 2

    def new_backend(self):
        return ProcessBackend("spawn")


class TestPortable(BackendConformance):
    # Each is a fresh interpreter.
    many = repeats = 2

    def new_backend(self):
        return PortableBackend()


class TestNetwork(BackendConformance):
    shares_memory = False
    many = 6
    flood = 300

    def new_backend(self):
        return RemoteBackend(LaunchPlan(LocalLauncher()))

    def test_a_message_that_is_read_after_the_death_comes_before_it(self, monkeypatch):
        """However long this process takes to read it, or was suspended."""
        monkeypatch.setattr(backend, "_LATE", 0)
        worker, size = self.launch(), 32 << 20
        worker.send(("blow", size))
        worker.send(("vanish", 3))
        contents, _, death = self.end(worker)
        assert [len(content) for content in contents] == [size]
        assert death.reason == "exited with status 3"
