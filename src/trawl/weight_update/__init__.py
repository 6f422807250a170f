"""Public names of schemes, transports and updaters, which stand in other modules."""

from trawl.lazy import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__)
