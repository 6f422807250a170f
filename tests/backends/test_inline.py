"""Workers in this process."""

from trawl.backends import InlineBackend
from trawl.testing import BackendConformance


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
