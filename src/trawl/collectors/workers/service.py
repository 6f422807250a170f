"""A worker: a ``Collector`` that runs elsewhere, and carries out the requests of its driver.

The driver sends requests, and the worker answers each request once. Requests to collect wait in a
queue. All other messages are handled as soon as the current batch is finished, so new weights
don't wait for batches that were requested earlier.
"""

from __future__ import annotations

import pickle
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from time import perf_counter
from typing import Any, cast

import cloudpickle
import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from trawl.backends.base import HandleCall, Port, Service
from trawl.backends.failure import Failure
from trawl.collectors.config import muted
from trawl.collectors.dispatch import DIRECT
from trawl.collectors.driver.budget import FrameCounts
from trawl.collectors.driver.delivery import count_frames
from trawl.collectors.driver.policy_version import stamp
from trawl.collectors.driver.weights import POLICY
from trawl.collectors.single import Collector, overrides_rollout
from trawl.collectors.watch.times import TurnClock
from trawl.collectors.watch.watching import ResidentMemory
from trawl.collectors.workers import requests
from trawl.collectors.workers.handle_calls import HandleCalls
from trawl.collectors.workers.requests import CollectRequest, WorkerWarning
from trawl.collectors.workers.snapshots import Recovery, SnapshotTaker, recover
from trawl.envs.capture.pickling import signing_key, use_signing_key
from trawl.envs.processes.own_process import prepare_process
from trawl.keys import MASK
from trawl.rollout.block import Block, as_batch
from trawl.rollout.layout import BatchPartition, Layout
from trawl.rollout.loop import Rollout
from trawl.rollout.normalization import empty_statistics, load_statistics, pop_statistics
from trawl.rollout.policy.first_call import networks_noted
from trawl.rollout.slab import Lease, byte_ranges, tensors_in, tensors_over
from trawl.tensordicts import drop_private
from trawl.weights.layout import FlatLayout
from trawl.weights.messages import Inbox
from trawl.weights.store import Receiver


@dataclass
class WorkerProgram:
    """Parts of the user's program that a worker gets.

    Attributes:
        init_fn: function that is called before anything else.
        policy: the worker's policy; None if the worker makes it.
        collector_class: the class of the worker's collector.
        create_env_fn: source of the worker's environment.
        options: the options of the worker's collector.
        receivers: sources of new weights, by model.
    """

    init_fn: Callable[[], Any] | None
    policy: Any
    collector_class: Callable[..., Any]
    create_env_fn: Any
    options: Mapping[str, Any]
    receivers: Mapping[str, Receiver]

    @property
    def parts(self) -> list[Any]:
        """The parts in the order in which a worker needs them; the policy is part 1."""
        made_of = self.collector_class, self.create_env_fn, dict(self.options)
        return [self.init_fn, self.policy, made_of, self.receivers]


@dataclass(frozen=True)
class WorkerSpec:
    """Specification of a worker, which can be sent to another process.

    Attributes:
        index: number of the worker.
        program: the parts of a :class:`WorkerProgram`, as they were when it was packed.
        options: options that have changed since then.
        receivers: sources of new weights, by model; None for those of the program.
        threads: number of torch threads; None to leave it unchanged.
        registry: environments registered with Gymnasium in the driver, besides Gymnasium's own.
        trajectory: id of the worker's first trajectory.
        stride: difference between successive trajectory ids.
        version: version of the policy until new weights arrive; None if versions are not tracked.
        seed: the seed, and whether all environments share it; or None.
        env_state: state to load into the environment, or None.
        first_env: index of the worker's first environment, if ``reset_kwargs`` is a function.
        begun: numbers of the next episodes, if ``reset_kwargs`` is a function.
        given: weights of the policy that are newer than the last weights sent to the worker, or
            None.
        whole: whether the driver assembles whole trajectories.
        snapshots: number of batches between two snapshots of the worker; 0 for none.
        recovery: state of the dead worker that this worker replaces, and its batches since; or
            None.
        service: function that makes the service from the specification; None for
            :class:`CollectorService`.
        signing_key: key with which the worker signs pickles in the states of its environments.
    """

    index: int
    program: Iterable[Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    receivers: Mapping[str, Receiver] | None = None
    threads: int | None = None
    registry: Mapping[str, Any] = field(default_factory=dict)
    trajectory: int = 0
    stride: int = 1
    version: int | str | None = None
    seed: tuple[int, bool] | None = None
    env_state: Any = None
    first_env: int = 0
    begun: Sequence[int] = ()
    given: Any = None
    whole: bool = False
    snapshots: int = 0
    recovery: Recovery | None = None
    service: Callable[[WorkerSpec, Port], CollectorService] | None = None
    signing_key: bytes = field(default_factory=signing_key, repr=False)

    def __call__(self, port: Port) -> CollectorService:
        """Makes the service; called where the worker runs."""
        return (self.service or CollectorService)(self, port)


class CollectorService(HandleCalls, Service):
    """Service that runs in a worker, and drives its collector.

    Args:
        spec: specification of the worker.
        port: connection to the driver.
    """

    def __init__(self, spec: WorkerSpec, port: Port) -> None:
        self._port = port
        self._whole = spec.whole
        self._requests: deque[tuple[requests.CollectRequest, float]] = deque()  # and their arrival
        self._memory = WorkerMemory(port)
        self._resident = ResidentMemory()
        self._clock = TurnClock()
        use_signing_key(spec.signing_key)
        if spec.threads is not None:
            prepare_process(spec.threads, spec.registry)
            forward_warnings(port)
        # Unpickling a part may need what init_fn does.
        parts = iter(spec.program)
        init_fn = next(parts)
        if init_fn is not None:
            init_fn()
        policy = next(parts)
        self._got_policy = policy is not None
        collector_class, create_env_fn, options = next(parts)
        if spec.receivers is None:
            spec = replace(spec, receivers=next(parts))
        options |= spec.options
        if collector_class is Collector:
            # Overrides torchrl.service_backend, which a worker in the driver's process would see.
            options["backend"] = DIRECT
        with muted(), networks_noted():
            self.collector = collector_class(create_env_fn, policy, **options)
        # The length of a batch of an overridden rollout() does not tell how many steps were taken.
        every = min(spec.snapshots, 1) if overrides_rollout(self.collector) else spec.snapshots
        self._snapshots = SnapshotTaker(self.collector, every, self._warn)
        try:
            self._begin(spec)
            # A replacement has the counts of the dead worker, which the driver has already.
            self._reported: FrameCounts = self.collector.progress
        except BaseException:
            # The caller has no reference to this object yet, so only this code can close it.
            self.close()
            raise

    def _begin(self, spec: WorkerSpec) -> None:
        """Brings the fresh collector to the state in its spec, and reports that it is ready.

        A replacement continues where the dead worker stopped.
        """
        writer = self._rollout.writer
        writer.episodes.load(spec.trajectory, spec.stride)
        if spec.env_state:
            self.collector.env.load_state_dict(spec.env_state)
        if spec.first_env:
            self.collector.number_environments(spec.first_env)
        if spec.seed is not None:
            self.collector.set_seed(*spec.seed)
        if spec.begun and spec.recovery is None:
            self.collector.parts.loop.continue_from(spec.begun)
        self._load_first_weights(spec)
        self._numbers_episodes = callable(self.collector.config.reset_kwargs)
        self._hidden = frozenset(writer.hidden)
        # An overridden rollout() may return batches of any layout, which are sent unchanged.
        layout = None if overrides_rollout(self.collector) else writer.layout
        self._memory.layout = layout
        self._masked = layout is None or MASK in layout.leaves
        # Frames of environments at their own pace are one row, whatever their number.
        self._rows = writer.num_envs if writer.layout is None else prod(writer.layout.batch)
        self._port.send(
            requests.WorkerReady(
                layout=layout,
                hidden=self._hidden,
                num_envs=self._rows,
                steps=self.collector.frames_per_batch,
                batch_size=tuple(self.collector.env.batch_size),
                trajectory=writer.episodes.next_id,
                weight_layouts=self._weight_layouts(),
                warnings=(*writer.warnings, *self._network_warnings()),
                masked=self._masked,
                versioned=self._rollout.stamps_frames,
                first_ready=self.collector.parts.outbox.delivery.first_ready,
                version=self.collector.policy_version,
                snapshot=self._snapshots.take(self._updates),
                statistics=empty_statistics(self.collector.normalization),
            )
        )

    def _load_first_weights(self, spec: WorkerSpec) -> None:
        self.collector.parts.weights.receivers |= spec.receivers or {}
        if spec.recovery is not None:
            recover(self.collector, spec.recovery)
        else:
            self._take_version(spec)
        # Weights that arrived after the spec was made have a newer version.
        self._up_to_date()
        # A snapshot is newer than weights that came through the handle of the dead worker.
        if spec.given is not None and spec.recovery is None:
            self.collector.update_policy_weights_(spec.given)
            self._take_version(spec)

    def _take_version(self, spec: WorkerSpec) -> None:
        if spec.version is not None:
            self.collector.parts.weights.tracker.version = spec.version

    @override
    def _up_to_date(self) -> Any:
        self.collector.parts.weights.load_new()
        return self.collector

    @property
    @override
    def _updates(self) -> int:
        count: int = self.collector.parts.weights.receivers[POLICY].count
        return count

    def _network_warnings(self) -> list[str]:
        """Returns a warning if the policy was sent with networks that updates can't reach."""
        if not self._got_policy:
            return []
        models = [self._model(model_id) for model_id in self.collector.parts.weights.receivers]
        return unreached_networks(self.collector.parts.loop.policy.networks, models)

    def _weight_layouts(self) -> dict[str, FlatLayout]:
        """Returns the memory layout of the weights of each model that may receive weights.

        Raises:
            KeyError: if the collector lacks one of the models.
        """
        found = {}
        for model_id in self.collector.parts.weights.receivers:
            model = self._model(model_id)
            if isinstance(model, nn.Module) and not any(map(is_lazy, model.parameters())):
                found[model_id] = FlatLayout.of(model)
        return found

    def _model(self, model_id: str) -> Any:
        return self.collector.parts.weights.models.find(model_id)

    def _warn(self, text: str) -> None:
        self._port.send(requests.WorkerWarning(text, RuntimeWarning))

    @property
    @override
    def busy(self) -> bool:
        return bool(self._requests)

    @override
    def handle(self, content: requests.Request | HandleCall) -> None:
        match content:
            case requests.CollectRequest():
                self._requests.append((content, perf_counter()))
            case HandleCall():
                self._snapshots.expire()
                self._answer(content)
            case requests.NewWeights(model_id=model_id, message=message):
                receiver = self.collector.parts.weights.receivers[model_id]
                assert isinstance(receiver, Inbox)
                receiver.put(message)
            case requests.MapBuffer(name=name, partition=partition):
                self._memory.add(name, partition)
            case requests.UnmapBuffer(name=name):
                self._memory.remove(name)
            case requests.CallRequest():
                self._call(content)

    def _call(self, request: requests.CallRequest) -> None:
        try:
            function, *args = pickle.loads(request.function)
            value = cloudpickle.dumps(function(self._up_to_date(), *args))
        except Exception as error:
            answer = requests.WorkerAnswer(request.number, failure=Failure.of(error))
        else:
            answer = requests.WorkerAnswer(request.number, value)
        # A call that failed may have changed something, too.
        snapshot, progress = self._snapshots.take(self._updates), self._pop_progress()
        version = self.collector.policy_version
        self._port.send(replace(answer, snapshot=snapshot, progress=progress, version=version))

    @override
    def work(self) -> None:
        request, received = self._requests.popleft()
        self._begin_turn(received)
        try:
            done = self._timed(self._collect(request))
        except Exception as error:
            self._requests.clear()
            self._port.send(requests.WorkerAnswer(request.number, failure=Failure.of(error)))
        else:
            snapshot = self._snapshots.after_batch(done.weights)
            self._port.send(done if snapshot is None else replace(done, snapshot=snapshot))

    def _begin_turn(self, received: float) -> None:
        self._clock.begin(received)
        self._measured: dict[str, Any] = {}

    def _timed(self, answer: requests.BatchReady) -> requests.BatchReady:
        """Returns an answer with the times of its batch, and the episodes that ended."""
        if not self._measured:  # a batch that was written into a buffer has been measured then
            self._clock.end()
            times, rollout = self._clock.batch_times(self._rollout.times), self._rollout
            steps, ended = rollout.pop_steps(), self.collector.parts.figures.count(answer.frames)
            self._measured = {"times": times, "steps": steps, "ended": ended}
            self._measured["statistics"] = pop_statistics(self.collector.normalization)
            self._measured["progress"] = self._pop_progress()
        return replace(answer, **self._measured)

    def _pop_progress(self) -> FrameCounts:
        """Returns what the collector has counted since the last call."""
        before, self._reported = self._reported, self.collector.progress
        return self._reported.since(before)

    @property
    def _rollout(self) -> Rollout:
        return cast(Rollout, self.collector.parts.loop.rollout)

    @override
    def close(self) -> None:
        try:
            self.collector.shutdown()
        except Exception as error:
            self._port.send(requests.CloseFailed(Failure.of(error)))

    def _collect(self, request: requests.CollectRequest) -> requests.BatchReady:
        collector = self.collector
        collector.parts.budget.most = request.most
        load_statistics(collector.normalization, request.normalization)
        collector.parts.loop.rollout.record_steps(request.samples_steps)
        with collector.parts.profiling.turn():
            if collector.config.replay_buffer is not None:
                before = collector.parts.budget.frames
                if not self._name_writes(request):
                    collector.parts.outbox.writing = partial(self._announce_write, request)
                collector.parts.turns.collect()
                return self._done(request, collector.parts.budget.frames - before)
            block = self._memory.block(request)
            batch = collector.parts.turns.run_into(
                block, request.random, self._interrupted(request)
            )
        filled = self._rollout.filled
        apart, own = batch is not None, request.memory is None
        if batch is not None:
            batch = batch.exclude(*self._hidden)
        elif block is not None and self._looks_at_batches:
            batch = as_batch(block.lease, self._hidden, None)
        # Without a mask, all rows are experience.
        frames = self._rows * filled if batch is None else count_frames(batch, filled)
        if not overrides_rollout(collector):
            # The driver cuts the batch where its statistics end.
            frames = int(min(frames, request.most))
        collector.parts.budget.count(frames)
        if batch is not None:
            self._finish(batch, filled)
        if apart:
            return self._done(request, frames, batch=cloudpickle.dumps(batch))
        return self._done(request, frames, block=self._memory.own_bytes if own else None)

    def _name_writes(self, request: requests.CollectRequest) -> bool:
        """Passes the request's number to the replay buffer, which then writes a batch only once.

        Returns:
            False if the buffer accepts no request numbers.
        """
        buffer = self.collector.config.replay_buffer
        # Looked up in the class, because TorchRL's actor clients have an attribute of any name.
        if not hasattr(type(buffer), "write_as"):
            return False
        buffer.write_as(request.number)
        return True

    @contextmanager
    def _announce_write(self, request: requests.CollectRequest, frames: int) -> Iterator[None]:
        """Context for writing a batch; it notifies the driver before and after the write.

        The driver must know if a worker dies while writing, because other workers wait for the
        buffer's locks. If a worker dies after the write, its batch must not be collected again.
        """
        with self._port.undisturbed():
            self._port.send(requests.WriteBegan())
            yield
            self._port.send(requests.WriteEnded(self._timed(self._done(request, frames))))

    @property
    def _looks_at_batches(self) -> bool:
        """True if the worker has to read or change a batch after collecting it."""
        collector = self.collector
        return (
            self._masked
            or collector.config.set_truncated
            or collector.post_collect_hook is not None
        )

    def _finish(self, batch: TensorDictBase, filled: int) -> None:
        """Marks the last step as truncated and calls the hook, if the options say so."""
        collector = self.collector
        if collector.config.set_truncated:
            collector.parts.outbox.delivery.truncate_last(batch, filled)
        if collector.post_collect_hook is not None:
            # The hook gets a copy that it may keep, because the driver may reuse the memory.
            shown = batch.clone()
            # New weights are loaded only before a batch, so this version collected the batch.
            version = collector.policy_version
            if version is not None:
                stamp(shown, version, not collector.config.compact_obs)
            collector.post_collect_hook(drop_private(shown))

    def _done(
        self,
        request: requests.CollectRequest,
        frames: int,
        batch: bytes | None = None,
        block: Any = None,
    ) -> requests.BatchReady:
        rollout = self._rollout
        facts = rollout.writer.describe()
        facts["env_time_share"] = rollout.times.env_share
        facts["process_bytes"] = self._resident.bytes
        if self.collector.parts.loop.restarts is not None:
            facts["env_restarts"] = self.collector.parts.loop.restarts.count
        return requests.BatchReady(
            number=request.number,
            frames=frames,
            filled=rollout.filled,
            version=self.collector.policy_version,
            weights=self._updates,
            trajectory=rollout.writer.episodes.next_id,
            batch=batch,
            block=block,
            facts=facts,
            cut=rollout.writer.episodes.pop_cut(),
            random=request.random or self.collector.parts.turns.acted_randomly,
            begun=self.collector.parts.loop.begun() if self._numbers_episodes else (),
        )

    def _interrupted(self, request: requests.CollectRequest) -> Callable[[], bool] | None:
        if not request.breakable:
            return None
        number, interrupted = request.number, self._port.interrupted
        return lambda: interrupted() >= number


def fake(collector: Any) -> TensorDictBase:
    """Returns a batch of zeros with the layout of a worker's batches."""
    batch: TensorDictBase = collector.parts.loop.rollout.writer.fake()
    return batch


def forward_warnings(port: Port) -> None:
    """Forwards warnings to the driver, whose filters decide which warnings are shown."""

    def send(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
        port.send(WorkerWarning(str(message), category))

    warnings.resetwarnings()
    warnings.simplefilter("default")
    for ignored in (DeprecationWarning, PendingDeprecationWarning, ImportWarning):
        warnings.simplefilter("ignore", ignored)
    warnings.showwarning = send


def unreached_networks(networks: Iterable[nn.Module], models: Iterable[Any]) -> list[str]:
    """Returns a warning if weight updates don't reach networks that the policy calls.

    Args:
        networks: networks that the policy calls.
        models: models that receive weights.
    """
    modules = [model.modules() for model in models if isinstance(model, nn.Module)]
    reached = {part for parts in modules for part in parts}
    found = [one for one in networks if one not in reached]
    if not found:
        return []
    names = ", ".join(sorted({type(one).__name__ for one in found}))
    return [
        f"the policy calls a network that is not part of it ({names}): workers act with a "
        "copy of the network, and weight updates don't reach the copy. Pass the network "
        "itself as the policy, for example as TensorDictModule(network, ['observation'], "
        "['action']). If its weights stay as they are, call network.requires_grad_(False)"
    ]


# Maximum number of blocks that a worker keeps open: a user who holds many batches may need
# thousands.
_MOST_BLOCKS = 256


class WorkerMemory:
    """Memory for the batches of a worker: shared with the driver, or the worker's own.

    Args:
        port: connection to the driver.

    Attributes:
        layout: layout of the worker's batches; None if it is not fixed.
    """

    def __init__(self, port: Port) -> None:
        self._port = port
        self.layout: Layout | None = None
        self._partitions: dict[int, BatchPartition] = {}
        self._blocks: dict[int, Block] = {}
        self._own: tuple[Block, NDArray[np.uint8]] | None = None

    @property
    def own_bytes(self) -> Any:
        """Bytes of the worker's own block; None if it has none."""
        return None if self._own is None else self._own[1]

    def add(self, name: int, partition: BatchPartition) -> None:
        """Records a partition, to which requests refer by its name."""
        self._partitions[name] = partition

    def remove(self, name: int) -> None:
        """Forgets a partition or a block to which no later request refers."""
        self._partitions.pop(name, None)
        self._blocks.pop(name, None)

    def block(self, request: CollectRequest) -> Block | None:
        """Returns the memory for a request's batch; None if batches have no fixed layout.

        Memory that a request names is kept open for later requests, up to ``_MOST_BLOCKS`` blocks.
        """
        if request.memory is None:
            return self._own_block()
        block = self._blocks.pop(request.memory, None)
        if block is None:
            partition = self._partitions[request.partition]
            memory = self._port.memory(request.memory)
            tensors, _ = tensors_over(partition.whole, memory)
            part, index = partition.part(request.part, tensors), request.part
            for start, stop in byte_ranges(partition.written(index, tensors).values(), memory):
                self._port.populate(request.memory, start, stop)
            starts = partition.pool_starts(index)
            layout = partition.layouts[index]
            block = Block(layout, Lease(layout, part, pool_starts=starts))
        self._blocks[request.memory] = block  # the most recently used comes last
        if len(self._blocks) > _MOST_BLOCKS:
            del self._blocks[next(iter(self._blocks))]
        return block

    def _own_block(self) -> Block | None:
        """Returns memory for batches that are sent; None if batches have no fixed layout.

        One block is enough, because each batch is sent before the next one begins.
        """
        if self.layout is None:
            return None
        if self._own is None:
            array = np.zeros(self.layout.nbytes, dtype=np.uint8)
            lease = Lease(self.layout, tensors_in(self.layout, array))
            self._own = Block(self.layout, lease), array
        return self._own[0]
