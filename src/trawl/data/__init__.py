"""Collected frames on disk, and whole trajectories out of batches."""

from trawl.data.dataset import DatasetWriter, info, load
from trawl.data.ray_buffer import RayReplayBuffer
from trawl.data.trajectories import TrajectoryAssembler, join

__all__ = ["DatasetWriter", "RayReplayBuffer", "TrajectoryAssembler", "info", "join", "load"]
