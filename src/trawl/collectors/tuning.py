"""Search for the fastest layout of environments; it stands in ``trawl.extras``."""

from trawl.lazy import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__)
