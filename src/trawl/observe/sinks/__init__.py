"""Destinations of a collector's statistics, for a monitor."""

from trawl.observe.sinks.base import StatsSink
from trawl.observe.sinks.csv import CSVSink
from trawl.observe.sinks.function import FunctionSink
from trawl.observe.sinks.logger import LoggerSink
from trawl.observe.sinks.mlflow import MLflowSink
from trawl.observe.sinks.prometheus import PrometheusSink
from trawl.observe.sinks.tensorboard import TensorBoardSink
from trawl.observe.sinks.wandb import WandbSink

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
