"""Environments with the TensorDict interface, single ones and batches."""

from trawl.lazy import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__)
