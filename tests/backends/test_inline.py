"""Workers in this process."""

from backend_conformance import BackendConformance

from trawl.backends import InlineBackend


class TestInline(BackendConformance):
    isolated = False
    concurrent = False
    kills_by_signal = False

    def new_backend(self):
        return InlineBackend()


class TestInlineByMessages(BackendConformance):
    shares_memory = False
    isolated = False
    concurrent = False
    kills_by_signal = False

    def new_backend(self):
        return InlineBackend(shares_memory=False)
