"""Datasets on disk, trajectory assembly, batch transforms and a replay buffer for Ray."""

from trawl.data.dataset import info, load
from trawl.data.postprocs import MultiStep
from trawl.data.ray_buffer import RayReplayBuffer
from trawl.data.sinks import FilesSink, MemmapSink, MinariSink, ParquetSink, Sink
from trawl.data.time_limits import BootstrapTimeLimits, bootstrap_time_limits
from trawl.data.trajectories import TrajectoryAssembler, join
from trawl.stacked_frames import StackedFrames

__all__ = [
    "BootstrapTimeLimits",
    "FilesSink",
    "MemmapSink",
    "MinariSink",
    "MultiStep",
    "ParquetSink",
    "RayReplayBuffer",
    "Sink",
    "StackedFrames",
    "TrajectoryAssembler",
    "bootstrap_time_limits",
    "info",
    "join",
    "load",
]
