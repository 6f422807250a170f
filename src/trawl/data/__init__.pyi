# What type checkers see, and the list of names that are imported when they are first used.

from trawl.data.dataset import info as info
from trawl.data.dataset import load as load
from trawl.data.postprocs import MultiStep as MultiStep
from trawl.data.sinks import FilesSink as FilesSink
from trawl.data.sinks import MemmapSink as MemmapSink
from trawl.data.sinks import Sink as Sink
from trawl.data.time_limits import BootstrapTimeLimits as BootstrapTimeLimits
from trawl.data.time_limits import bootstrap_time_limits as bootstrap_time_limits
from trawl.data.trajectories import TrajectoryAssembler as TrajectoryAssembler
from trawl.data.trajectories import join as join
from trawl.extras.clusters.ray.buffer import RayReplayBuffer as RayReplayBuffer
from trawl.extras.formats.minari import MinariSink as MinariSink
from trawl.extras.formats.parquet import ParquetSink as ParquetSink
from trawl.stacked_frames import StackedFrames as StackedFrames
