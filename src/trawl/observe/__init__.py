"""Statistics of episodes, progress displays, monitors and plots for a collection."""

from trawl.observe.episodes import Episodes, EpisodeStats
from trawl.observe.monitor import Monitor
from trawl.observe.progress import CollectionProgress
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
    "CSVSink",
    "CollectionProgress",
    "EpisodeStats",
    "Episodes",
    "FunctionSink",
    "LoggerSink",
    "MLflowSink",
    "Monitor",
    "PrometheusSink",
    "StatsSink",
    "TensorBoardSink",
    "WandbSink",
]
