"""Workers that are ranks of process groups."""

from trawl.backends.launch import LocalLauncher
from trawl.backends.process_group import ProcessGroupBackend
from trawl.testing import BackendConformance


class TestProcessGroupBackend(BackendConformance):
    shares_memory = False
    many = 6

    def new_backend(self):
        return ProcessGroupBackend(LocalLauncher())
