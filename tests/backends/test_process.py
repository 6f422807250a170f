"""Workers in processes: what all backends promise."""

from backend_conformance import BackendConformance

from trawl.backends import ProcessBackend


class TestForkServer(BackendConformance):
    def new_backend(self):
        return ProcessBackend("forkserver")


class TestSpawn(BackendConformance):
    # Each is a fresh interpreter.
    many = 4

    def new_backend(self):
        return ProcessBackend("spawn")
