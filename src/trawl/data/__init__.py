"""Datasets on disk, trajectory assembly, batch transforms and a replay buffer for Ray."""

from trawl.lazy import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__)
