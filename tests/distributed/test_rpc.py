"""Workers that are nodes of RPC."""

from backend_conformance import BackendConformance

from trawl.backends.launch import LocalLauncher
from trawl.backends.rpc import RpcBackend


class TestRpcBackend(BackendConformance):
    shares_memory = False
    many = 6
    patience = 15.0

    def new_backend(self):
        return RpcBackend(LocalLauncher())
