"""Workers that are nodes of RPC."""

from backend_conformance import BackendConformance

from trawl.backends.launching.launch import LaunchPlan, LocalLauncher
from trawl.backends.remote import RemoteBackend
from trawl.backends.rpc import RpcCarrier


class TestRpc(BackendConformance):
    shares_memory = False
    many = 6
    flood = 300

    def new_backend(self):
        return RemoteBackend(LaunchPlan(LocalLauncher()), RpcCarrier())
