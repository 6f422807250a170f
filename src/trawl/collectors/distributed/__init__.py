"""Collectors whose workers are on other machines."""

from functools import partial

from trawl.compat.older_names import lookup
from trawl.lazy import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__, partial(lookup, module=__name__))
