"""Collectors, which run a policy in environments and deliver batches of experience."""

from trawl.compat.older_names import warn_of
from trawl.lazy import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__, warn_of)
