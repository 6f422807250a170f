"""Statistics, progress, bottlenecks, monitors and plots of a collection."""

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

__all__ = [
    "Bottleneck",
    "CSVSink",
    "CollectionProgress",
    "EpisodeStats",
    "Episodes",
    "FunctionSink",
    "LoggerSink",
    "MLflowSink",
    "Monitor",
    "PrometheusSink",
    "Report",
    "StatsSink",
    "TensorBoardSink",
    "WandbSink",
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
    "LoggerSink": "sinks",
    "MLflowSink": "sinks",
    "Monitor": "monitor",
    "PrometheusSink": "sinks",
    "Report": "report",
    "StatsSink": "sinks",
    "TensorBoardSink": "sinks",
    "WandbSink": "sinks",
}


# Hidden from type checkers, because with this function they would accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
