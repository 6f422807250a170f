"""Statistics, progress, bottlenecks, monitors, timelines and plots of a collection."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trawl.observe.bottleneck import Bottleneck
    from trawl.observe.episodes import Episodes, EpisodeStats
    from trawl.observe.monitor import Monitor
    from trawl.observe.progress import CollectionProgress
    from trawl.observe.report import Report
    from trawl.observe.sinks import (
        CSVSink,
        FunctionSink,
        LoggerSink,
        MLflowSink,
        PrometheusSink,
        StatsSink,
        TensorBoardSink,
        WandbSink,
    )
    from trawl.observe.timeline import Instant, Span, Timeline, read_trace
    from trawl.observe.trace_options import TraceOptions

__all__ = [
    "Bottleneck",
    "CSVSink",
    "CollectionProgress",
    "EpisodeStats",
    "Episodes",
    "FunctionSink",
    "Instant",
    "LoggerSink",
    "MLflowSink",
    "Monitor",
    "PrometheusSink",
    "Report",
    "Span",
    "StatsSink",
    "TensorBoardSink",
    "Timeline",
    "TraceOptions",
    "WandbSink",
    "read_trace",
]

# Module of each public name. The module is imported when the name is first used, because collectors
# need only some of them.
_HOMES = {
    "Bottleneck": "bottleneck",
    "CSVSink": "sinks",
    "CollectionProgress": "progress",
    "EpisodeStats": "episodes",
    "Episodes": "episodes",
    "FunctionSink": "sinks",
    "Instant": "timeline",
    "LoggerSink": "sinks",
    "MLflowSink": "sinks",
    "Monitor": "monitor",
    "PrometheusSink": "sinks",
    "Report": "report",
    "Span": "timeline",
    "StatsSink": "sinks",
    "TensorBoardSink": "sinks",
    "Timeline": "timeline",
    "TraceOptions": "trace_options",
    "WandbSink": "sinks",
    "read_trace": "timeline",
}


# Hidden from type checkers, because with this function they would accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
