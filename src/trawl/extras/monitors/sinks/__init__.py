"""Destinations of a collector's statistics, for a monitor."""

from trawl.extras.monitors.sinks.base import StatsSink
from trawl.extras.monitors.sinks.csv import CSVSink
from trawl.extras.monitors.sinks.function import FunctionSink
from trawl.extras.monitors.sinks.logger import LoggerSink
from trawl.extras.monitors.sinks.mlflow import MLflowSink
from trawl.extras.monitors.sinks.prometheus import PrometheusSink
from trawl.extras.monitors.sinks.tensorboard import TensorBoardSink
from trawl.extras.monitors.sinks.wandb import WandbSink

__all__ = [
    "CSVSink",
    "FunctionSink",
    "LoggerSink",
    "MLflowSink",
    "PrometheusSink",
    "StatsSink",
    "TensorBoardSink",
    "WandbSink",
]
