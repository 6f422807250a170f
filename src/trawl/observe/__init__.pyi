# What type checkers see, and the list of names that are imported when they are first used.

from trawl.extras.monitors.csv import CSVSink as CSVSink
from trawl.extras.monitors.mlflow import MLflowSink as MLflowSink
from trawl.extras.monitors.monitor import Monitor as Monitor
from trawl.extras.monitors.progress import CollectionProgress as CollectionProgress
from trawl.extras.monitors.prometheus import PrometheusSink as PrometheusSink
from trawl.extras.monitors.sinks import FunctionSink as FunctionSink
from trawl.extras.monitors.sinks import LoggerSink as LoggerSink
from trawl.extras.monitors.sinks import StatsSink as StatsSink
from trawl.extras.monitors.tensorboard import TensorBoardSink as TensorBoardSink
from trawl.extras.monitors.wandb import WandbSink as WandbSink
from trawl.observe.bottleneck import Bottleneck as Bottleneck
from trawl.observe.episodes import Episodes as Episodes
from trawl.observe.episodes import EpisodeStats as EpisodeStats
from trawl.observe.report import Report as Report
from trawl.observe.timeline import Instant as Instant
from trawl.observe.timeline import Span as Span
from trawl.observe.timeline import Timeline as Timeline
from trawl.observe.timeline import read_trace as read_trace
from trawl.observe.trace_options import TraceOptions as TraceOptions
