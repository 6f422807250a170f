"""The synchronous collector of a launcher's workers, at the same module path as in TorchRL."""

from trawl.lazy import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__)
