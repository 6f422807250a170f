"""Workers in threads of this process."""

from backend_conformance import BackendConformance

from trawl.backends.thread import ThreadBackend


class TestThread(BackendConformance):
    isolated = False
    kills_by_signal = False

    def new_backend(self):
        return ThreadBackend()
