"""Workers in processes: what all backends promise."""

from trawl.backends import ProcessBackend
from trawl.testing import BackendConformance


class TestForkServer(BackendConformance):
    def new_backend(self):
        return ProcessBackend("forkserver")


class TestSpawn(BackendConformance):
    # Each is a fresh interpreter.
    many = 4

    def new_backend(self):
        return ProcessBackend("spawn")
