"""Workers that are ranks of process groups."""

from backend_conformance import BackendConformance

from trawl.backends.launching.launch import LaunchPlan, LocalLauncher
from trawl.backends.process_group import ProcessGroupCarrier
from trawl.backends.remote import RemoteBackend


class TestProcessGroups(BackendConformance):
    shares_memory = False
    many = 6
    flood = 300

    def new_backend(self):
        return RemoteBackend(LaunchPlan(LocalLauncher()), ProcessGroupCarrier())
