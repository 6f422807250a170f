"""Messages between a worker and its driver."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from trawl.backends.base import Answer
from trawl.backends.failure import Failure
from trawl.collectors.driver.budget import FrameCounts
from trawl.collectors.watch.times import BatchTimes
from trawl.collectors.workers.snapshots import Snapshot
from trawl.envs.kinds import KINDS
from trawl.keys import Key
from trawl.rollout.episode_sums import NO_EPISODES, EndedEpisodes
from trawl.rollout.layout import BatchPartition, Layout
from trawl.rollout.normalization import SharedStatistics, Statistics
from trawl.rollout.times import StepSamples
from trawl.weights.layout import FlatLayout
from trawl.weights.messages import WeightMessage


@dataclass(frozen=True)
class CollectRequest:
    """Request to collect a batch.

    Attributes:
        number: number of the request. The number increases with each request to any worker.
        random: whether the actions are random.
        memory: name of the memory to write the batch into; None to send the batch.
        partition: name of the partition that divides the memory among workers.
        part: index of this worker's part.
        breakable: whether an interrupt with this number, or a higher one, ends the batch early.
        most: number of frames that are still wanted; infinite for a whole batch.
        samples_steps: whether to record the times of single steps.
        normalization: statistics with which the batch begins; None if nothing is normalised.
        ahead: whether a worker with workers of its own may have these begin batches that are not
            requested yet.
    """

    number: int = 0
    random: bool = False
    memory: int | None = None
    partition: int = 0
    part: int = 0
    breakable: bool = False
    most: float = math.inf
    samples_steps: bool = False
    normalization: SharedStatistics | None = None
    ahead: bool = True


@dataclass(frozen=True)
class MapBuffer:
    """Message that names a partition of memory, so that later requests can refer to it."""

    name: int
    partition: BatchPartition


@dataclass(frozen=True)
class UnmapBuffer:
    """Message that releases memory or a partition to which no later request refers."""

    name: int


@dataclass(frozen=True)
class NewWeights:
    """New weights of a model, for a worker that shares no memory with the driver.

    The worker doesn't answer this message.
    """

    model_id: str
    message: WeightMessage


@dataclass(frozen=True)
class CallRequest:
    """Request to call a function with the worker's collector.

    Attributes:
        number: number of the request.
        function: pickled tuple of the function and its arguments after the collector.
    """

    number: int
    function: bytes


@dataclass(frozen=True)
class WorkerReady:
    """First message of a worker, sent when its collector has been made.

    Attributes:
        layout: memory layout of the worker's batches, or None if it is not fixed.
        hidden: entries of the layout that are not delivered.
        num_envs: number of environments in a batch.
        steps: number of steps of each environment in a batch.
        batch_size: batch size of the environment.
        trajectory: id of the next trajectory to begin.
        weight_layouts: memory layouts of the models' weights, by model.
        warnings: warnings about the environment and the policy, which the driver shows.
        masked: whether rows of a batch may hold no frame.
        versioned: whether each frame has a policy version of its own already.
        first_ready: whether frames come in the order of their arrival.
        version: version of the policy; None if versions are not tracked.
        snapshot: the state of the worker, or None.
        statistics: statistics of no frames, for each entry that is normalised.
        asks_others: True if kinds of environments of other packages were needed.
        at: time at which the worker was ready, by its ``time.perf_counter()``.
    """

    layout: Layout | None
    hidden: frozenset[Key]
    num_envs: int
    steps: int
    batch_size: tuple[int, ...]
    trajectory: int
    weight_layouts: Mapping[str, FlatLayout] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    masked: bool = False
    versioned: bool = False
    first_ready: bool = False
    version: int | str | None = None
    snapshot: Snapshot | None = None
    statistics: Statistics = field(default_factory=dict)
    asks_others: bool = field(default_factory=lambda: KINDS.asks_others)
    at: float = field(default_factory=perf_counter)


@dataclass(frozen=True)
class BatchReady:
    """Answer to :class:`CollectRequest`: a batch was collected.

    Attributes:
        number: number of the request.
        frames: number of frames of experience in the batch.
        filled: number of steps in the batch; later rows are empty.
        version: version of the policy that made the batch, and of its frames, unless they have
            versions of their own already.
        weights: number of weight updates that were sent to the worker, up to and including the
            update whose weights made the batch.
        trajectory: id of the next trajectory to begin.
        batch: the pickled batch; None if it is in ``block``, in the memory that the request
            named, or in a replay buffer.
        buffers: memory of large tensors of the pickled batch, which are not in the pickle.
        block: bytes of the batch in the worker's layout, if the batch is sent in that form.
        facts: the worker's statistics, for ``stats()``.
        times: the times of the batch; None if they are not known.
        steps: times of single steps; None if they were not recorded.
        ended: the episodes that ended in the batch.
        cut: ids of trajectories that a failure has ended with their last frame in an earlier batch.
        random: whether the actions were random.
        snapshot: the state of the worker after the batch, or None.
        statistics: statistics of the frames of the batch, for each entry that is normalised.
        begun: number of the next episode of each environment, if ``reset_kwargs`` is a function.
        progress: what the worker has counted since its last answer.
    """

    number: int
    frames: int
    filled: int
    version: int | str | None
    weights: int
    trajectory: int
    batch: bytes | None
    facts: Mapping[str, Any]
    times: BatchTimes | None = None
    steps: StepSamples | None = None
    ended: EndedEpisodes = NO_EPISODES
    cut: tuple[int, ...] = ()
    random: bool = False
    buffers: Sequence[Any] = ()
    block: Any = None
    snapshot: Snapshot | None = None
    statistics: Statistics = field(default_factory=dict)
    begun: Sequence[int] = ()
    progress: FrameCounts = field(default_factory=FrameCounts)


@dataclass(frozen=True)
class WriteBegan:
    """Notice that the worker begins to write a batch into the shared replay buffer."""


@dataclass(frozen=True)
class WriteEnded:
    """Message: a batch is in the replay buffer.

    The batch counts even if the worker dies before it answers the request.

    Attributes:
        answer: answer to the request, for use if the worker dies before it answers.
    """

    answer: BatchReady


@dataclass(frozen=True)
class StateChanged:
    """Notice that a call through the worker's handle changed state that a replacement needs.

    Attributes:
        weights: all weights of the policy; None if the call didn't change them.
        count: number of weight updates that the worker had received from the driver before.
        version: version of the weights.
        seed: the new seed, and whether all environments share it; None if the call set no seed.
        env_state: state that the call loaded into the environment, or None.
    """

    weights: Any = None
    count: int = 0
    version: int | str | None = None
    seed: tuple[int, bool] | None = None
    env_state: Any = None


@dataclass(frozen=True)
class WorkerWarning:
    """Warning from a worker, which the driver shows."""

    text: str
    category: type[Warning]


@dataclass(frozen=True)
class WorkerAnswer(Answer):
    """Answer to :class:`CallRequest`, with a pickled result, or to a request that failed.

    Attributes:
        snapshot: the state of the worker after the call, or None.
        progress: what the worker has counted since its last answer.
        version: version of the worker's policy after the call.
    """

    snapshot: Snapshot | None = None
    progress: FrameCounts = field(default_factory=FrameCounts)
    version: int | str | None = None


@dataclass(frozen=True)
class CloseFailed:
    """Notice that a worker's collector raised an exception while it was being closed."""

    failure: Failure


#: Any message to a worker.
Request = CollectRequest | CallRequest | MapBuffer | UnmapBuffer | NewWeights
#: Any message from a worker.
FromWorker = (
    WorkerReady
    | BatchReady
    | WorkerAnswer
    | StateChanged
    | WorkerWarning
    | WriteBegan
    | WriteEnded
    | CloseFailed
)
