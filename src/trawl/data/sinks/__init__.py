"""Sinks that write collected frames to disk, one for each format."""

from trawl.data.sinks.base import Sink
from trawl.data.sinks.memmap import MemmapSink
from trawl.data.sinks.parts import FilesSink

__all__ = ["FilesSink", "MemmapSink", "Sink"]
