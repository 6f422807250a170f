"""A worker: a ``Collector`` in another place, which carries out the requests of its driver.

The driver sends requests, and each gets one answer. Requests to collect wait in a queue. All other
messages are handled as soon as the batch under way is finished: new weights don't wait for batches
that were requested before them.
"""

from __future__ import annotations

import pickle
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from trawl.backends.base import Asked, Port, Service
from trawl.backends.failure import Failure
from trawl.collectors.config import muted
from trawl.collectors.delivery import count_frames
from trawl.collectors.dispatch import DIRECT
from trawl.collectors.handle_calls import HandleCalls
from trawl.collectors.orders import (
    Arrange,
    Broken,
    Call,
    Collect,
    Done,
    Drop,
    NewWeights,
    NotClosed,
    Ready,
    Reply,
    Warned,
    Writing,
    Written,
)
from trawl.collectors.policy_version import stamp
from trawl.collectors.single import Collector, overrides_rollout
from trawl.collectors.weights import POLICY
from trawl.envs.own_process import take_process
from trawl.rollout.block import Block, as_batch
from trawl.rollout.layout import Joint
from trawl.rollout.record import MASK
from trawl.rollout.slab import Lease, tensors_in, tensors_over
from trawl.tensordicts import drop_private
from trawl.weight_update.mailbox import Mailbox
from trawl.weight_update.packing import Packing
from trawl.weight_update.scheme import Receiver

# Number of blocks that a worker keeps open. A user who holds many batches may need thousands.
_MOST_BLOCKS = 256


@dataclass(frozen=True)
class Program:
    """Specification of a worker, which can be sent to another process.

    Attributes:
        index: number of the worker.
        collector_class: the class of its collector.
        create_env_fn: source of its environment.
        policy: pickled copy of its policy, from when the collector was made; or None.
        options: the options of its collector.
        init_fn: called before anything else.
        threads: number of torch threads; None to leave it unchanged.
        registry: environments registered with Gymnasium in the driver, beside Gymnasium's own.
        trajectory: id of its first trajectory.
        stride: difference between successive trajectory ids.
        receivers: sources of new weights, by model.
        version: version of the policy, until new weights bring theirs; None if it is not tracked.
        seed: the seed, and whether all environments share it; or None.
        env_state: state to load into its environment, or None.
        given: weights of its policy that are newer than the last ones sent to it, or None.
        whole: whether the driver assembles whole trajectories.
    """

    index: int
    collector_class: Callable[..., Any]
    create_env_fn: Any
    policy: bytes | None
    options: Mapping[str, Any]
    init_fn: Callable[[], Any] | None = None
    threads: int | None = None
    registry: Mapping[str, Any] = field(default_factory=dict)
    trajectory: int = 0
    stride: int = 1
    receivers: Mapping[str, Receiver] = field(default_factory=dict)
    version: int | str | None = None
    seed: tuple[int, bool] | None = None
    env_state: Any = None
    given: Any = None
    whole: bool = False

    def __call__(self, port: Port) -> CollectorService:
        """Makes the service; called where the worker lives."""
        return CollectorService(self, port)


class CollectorService(HandleCalls, Service):
    """Service that runs in a worker, and drives its collector.

    Args:
        program: specification of the worker.
        port: connection to the driver.
    """

    def __init__(self, program: Program, port: Port) -> None:
        self._port = port
        self._whole = program.whole
        self._orders: deque[Collect] = deque()
        self._joints: dict[int, Joint] = {}
        self._blocks: dict[int, Block] = {}
        self._own: tuple[Block, NDArray[np.uint8]] | None = None
        if program.threads is not None:
            take_process(program.threads, program.registry)
            self._pass_warnings_on()
        if program.init_fn is not None:
            program.init_fn()
        policy = None if program.policy is None else pickle.loads(program.policy)
        options = dict(program.options)
        if program.collector_class is Collector:
            # Overrides torchrl.service_backend, which a worker in the driver's process would see.
            options["backend"] = DIRECT
        with muted():
            self.collector = program.collector_class(program.create_env_fn, policy, **options)
        try:
            self._begin(program)
        except BaseException:
            # No caller has a reference yet with which to close it.
            self.close()
            raise

    def _begin(self, program: Program) -> None:
        """Brings the fresh collector to the state in its program, and reports that it is ready.

        A replacement continues where the dead worker stopped.
        """
        frames = self.collector._rollout.frames
        frames.episodes.load(program.trajectory, program.stride)
        if program.env_state:
            self.collector.env.load_state_dict(program.env_state)
        if program.seed is not None:
            self.collector.set_seed(*program.seed)
        self._take_first_weights(program)
        self._hidden = frozenset(frames.hidden)
        # An overridden rollout() may return batches of any layout: these are sent as they are.
        self._layout = layout = None if overrides_rollout(self.collector) else frames.layout
        self._masked = layout is None or MASK in layout.leaves
        self._port.send(
            Ready(
                layout=layout,
                hidden=self._hidden,
                lanes=frames.lanes,
                steps=self.collector.frames_per_batch,
                batch_size=tuple(self.collector.env.batch_size),
                trajectory=frames.episodes.next_id,
                packings=self._packings(),
                doubts=tuple(frames.doubts),
            )
        )

    def _take_first_weights(self, program: Program) -> None:
        self.collector._receivers |= program.receivers
        self._take_version(program)
        # Weights that came after the program was made bring a newer version.
        self._up_to_date()
        if program.given is not None:
            self.collector.update_policy_weights_(program.given)
            self._take_version(program)

    def _take_version(self, program: Program) -> None:
        if program.version is not None:
            self.collector._version.version = program.version

    @override
    def _up_to_date(self) -> Any:
        self.collector._take_weights()
        return self.collector

    @property
    @override
    def _updates(self) -> int:
        count: int = self.collector._receivers[POLICY].count
        return count

    def _packings(self) -> dict[str, Packing]:
        """Returns the memory layout of the weights of each model that may receive some.

        Raises:
            KeyError: if the collector lacks one of the models.
        """
        found = {}
        for model_id in self.collector._receivers:
            model = self._model(model_id)
            if isinstance(model, nn.Module) and not any(map(is_lazy, model.parameters())):
                found[model_id] = Packing.of(model)
        return found

    def _model(self, model_id: str) -> Any:
        return self.collector._models.find(model_id)

    def _pass_warnings_on(self) -> None:
        """Forwards warnings to the driver, whose filters decide what becomes of them."""
        warnings.resetwarnings()
        warnings.simplefilter("default")
        for ignored in (DeprecationWarning, PendingDeprecationWarning, ImportWarning):
            warnings.simplefilter("ignore", ignored)
        warnings.showwarning = self._show_warning

    def _show_warning(self, message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
        self._port.send(Warned(str(message), category))

    @property
    @override
    def busy(self) -> bool:
        return bool(self._orders)

    @override
    def handle(self, content: Collect | Call | Arrange | Drop | NewWeights | Asked) -> None:
        if isinstance(content, Collect):
            self._orders.append(content)
            return
        if isinstance(content, Asked):
            self._answer(content)
            return
        if isinstance(content, NewWeights):
            receiver = self.collector._receivers[content.model_id]
            assert isinstance(receiver, Mailbox)
            receiver.put(content.packet)
            return
        if isinstance(content, Arrange):
            self._joints[content.name] = content.joint
            return
        if isinstance(content, Drop):
            self._joints.pop(content.name, None)
            self._blocks.pop(content.name, None)
            return
        try:
            function, args, kwargs = pickle.loads(content.function)
            value = cloudpickle.dumps(function(self._up_to_date(), *args, **kwargs))
        except Exception as error:
            self._port.send(Broken(content.number, Failure.of(error)))
        else:
            self._port.send(Reply(content.number, value))

    @override
    def work(self) -> None:
        order = self._orders.popleft()
        try:
            done = self._collect(order)
        except Exception as error:
            self._orders.clear()
            self._port.send(Broken(order.number, Failure.of(error)))
        else:
            self._port.send(done)

    @override
    def close(self) -> None:
        try:
            self.collector.shutdown()
        except Exception as error:
            self._port.send(NotClosed(Failure.of(error)))

    def _collect(self, order: Collect) -> Done:
        collector = self.collector
        with nullcontext() if collector._profiler is None else collector._profiler.turn():
            if collector.config.replay_buffer is not None:
                before = collector._frames
                if not self._name_writes(order):
                    collector._writing = partial(self._tell_of_write, order)
                collector._collect()
                return self._done(order, collector._frames - before)
            block = self._block(order)
            batch = collector._run_into(block, order.random, self._stopped(order))
        lanes, filled = collector._rollout.frames.lanes, collector._rollout.filled
        apart, own = batch is not None, order.memory is None
        if batch is not None:
            batch = batch.exclude(*self._hidden)
        elif block is not None and self._looks_at_batches:
            batch = as_batch(block.lease, self._hidden, None)
        # Without a mask, all rows are experience.
        frames = lanes * filled if batch is None else count_frames(batch, filled)
        collector._frames += frames
        collector._batches += 1
        if batch is not None:
            self._finish(batch, filled)
        if apart:
            return self._done(order, frames, batch=cloudpickle.dumps(batch))
        return self._done(order, frames, block=self._own[1] if own and self._own else None)

    def _name_writes(self, order: Collect) -> bool:
        """Gives the replay buffer the number of the request, so that it writes the batch once only.

        Returns:
            False if the buffer takes no numbers.
        """
        buffer = self.collector.config.replay_buffer
        # Looked up in the class: TorchRL's clients of an actor have an attribute of any name.
        if not hasattr(type(buffer), "write_as"):
            return False
        buffer.write_as(order.number)
        return True

    @contextmanager
    def _tell_of_write(self, order: Collect, frames: int) -> Iterator[None]:
        """Context for writing a batch, which tells the driver before and after the write.

        The driver must know if a worker dies while it writes, as others wait for the buffer's
        locks. If a worker dies after the write, its batch must not be collected again.
        """
        with self._port.undisturbed():
            self._port.send(Writing())
            yield
            self._port.send(Written(self._done(order, frames)))

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
        """Marks a batch as truncated and calls the hook, as options ask for."""
        collector = self.collector
        if collector.config.set_truncated:
            collector._delivery.truncate_last(batch, filled)
        if collector.post_collect_hook is not None:
            # A copy: the hook may keep it, while the driver may reuse the leased memory.
            shown = batch.clone()
            # New weights are taken only before a batch, so this version made the batch.
            version = collector.policy_version
            if version is not None:
                stamp(shown, version, not collector.config.compact_obs)
            collector.post_collect_hook(drop_private(shown))

    def _done(
        self, order: Collect, frames: int, batch: bytes | None = None, block: Any = None
    ) -> Done:
        rollout = self.collector._rollout
        facts = rollout.frames.describe()
        facts["env_time_share"] = rollout.env_share
        if self.collector._restarts is not None:
            facts["env_restarts"] = self.collector._restarts.count
        return Done(
            number=order.number,
            frames=frames,
            filled=rollout.filled,
            version=self.collector.policy_version,
            weights=self._updates,
            trajectory=rollout.frames.episodes.next_id,
            batch=batch,
            block=block,
            facts=facts,
            random=order.random,
        )

    def _stopped(self, order: Collect) -> Callable[[], bool] | None:
        if not order.breakable:
            return None
        number, interrupted = order.number, self._port.interrupted
        return lambda: interrupted() >= number

    def _block(self, order: Collect) -> Block | None:
        """Returns the memory that a request names; it is opened once, and kept for later ones."""
        if order.memory is None:
            return self._own_block()
        block = self._blocks.pop(order.memory, None)
        if block is None:
            joint = self._joints[order.joint]
            tensors, _ = tensors_over(joint.whole, self._port.memory(order.memory))
            part = joint.part(order.part, tensors)
            block = Block(Lease(joint.layouts[order.part], part))
        self._blocks[order.memory] = block  # the most recently used comes last
        if len(self._blocks) > _MOST_BLOCKS:
            del self._blocks[next(iter(self._blocks))]
        return block

    def _own_block(self) -> Block | None:
        """Returns memory for batches that are sent; None if they have no fixed layout.

        One block is enough, because each batch is sent before the next one begins.
        """
        if self._layout is None:
            return None
        if self._own is None:
            array = np.zeros(self._layout.nbytes, dtype=np.uint8)
            lease = Lease(self._layout, tensors_in(self._layout, array))
            self._own = Block(lease), array
        return self._own[0]


def call_path(collector: Any, path: str, args: Any, kwargs: Any) -> Any:
    """Calls the method at a path of a worker's collector."""
    (result,) = collector.map_fn(path, [args], [kwargs])
    return result


def fake(collector: Any) -> TensorDictBase:
    """Returns a batch of zeros with the layout of a worker's batches."""
    batch: TensorDictBase = collector._rollout.frames.fake()
    return batch
