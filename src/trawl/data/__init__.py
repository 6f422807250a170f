"""Collected frames on disk, whole trajectories out of batches, and functions of batches."""

from trawl.data.dataset import DatasetWriter, info, load
from trawl.data.postprocs import MultiStep
from trawl.data.ray_buffer import RayReplayBuffer
from trawl.data.trajectories import TrajectoryAssembler, join

__all__ = [
    "DatasetWriter",
    "MultiStep",
    "RayReplayBuffer",
    "TrajectoryAssembler",
    "info",
    "join",
    "load",
]
