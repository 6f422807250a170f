"""Collected frames on disk."""

from trawl.data.dataset import DatasetWriter, info, load

__all__ = ["DatasetWriter", "info", "load"]
