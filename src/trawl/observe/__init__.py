"""Episodes, bottlenecks, timelines and reports of a collection, and public names of monitors."""

from trawl.lazy import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__)
