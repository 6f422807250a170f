"""A worker: a ``Collector`` somewhere else, which does what it is told.

Its parent sends orders; each brings one answer. An order to collect is carried out when its turn
has come. All else is done at once, between two batches: new weights don't wait for batches that
were ordered before.
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

# Blocks that a worker keeps at hand. A user who holds thousands of batches gets as many blocks.
_MOST_BLOCKS = 256


@dataclass(frozen=True)
class Program:
    """What a worker is made of; it can be sent.

    Attributes:
        index: number of the worker.
        collector_class: the class of its collector.
        create_env_fn: makes its environment.
        policy: its policy, pickled: a copy, as it was when it was given.
        options: the options of its collector.
        init_fn: called before anything else.
        threads: threads of torch; None to leave them as they are.
        registry: Gymnasium ids that the parent knows, and a fresh process may not.
        trajectory: id of its first trajectory, and of the next, and so on by ``stride``.
        receivers: where it looks for new weights, by model.
        version: version of the policy, or None if it is not tracked; that of new weights replaces
            it.
        seed: for random numbers, and whether it is that of all environments; or None.
        env_state: what its environment had in its state when that was loaded, or None.
        given: weights of its policy that are newer than those that it was sent, or None.
        whole: whether the parent puts whole trajectories together.
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
        """Makes the worker, in the place where it is to be."""
        return CollectorService(self, port)


class CollectorService(HandleCalls, Service):
    """What runs in a worker.

    Args:
        program: what it is made of.
        port: the connection to its parent.
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
            # Whatever a context chooses: a worker may live in the process that made it.
            options["backend"] = DIRECT
        with muted():
            self.collector = program.collector_class(program.create_env_fn, policy, **options)
        try:
            self._begin(program)
        except BaseException:
            # Nobody knows of it yet who could close it.
            self.close()
            raise

    def _begin(self, program: Program) -> None:
        """Makes of a fresh collector one that goes on where another left off, and says so."""
        frames = self.collector._rollout.frames
        frames.episodes.load(program.trajectory, program.stride)
        if program.env_state:
            self.collector.env.load_state_dict(program.env_state)
        if program.seed is not None:
            self.collector.set_seed(*program.seed)
        self._take_first_weights(program)
        self._hidden = frozenset(frames.hidden)
        # What a subclass's own rollout() returns may have any layout: it is sent as it is.
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
        # Of weights that came since the program was made, the version is newer, too.
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
        """How models are packed that weights may come for.

        Raises:
            KeyError: if there is no such model.
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
        """Leaves it to the parent, and its filters, what becomes of warnings."""
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
        # Without a mask all is experience.
        frames = lanes * filled if batch is None else count_frames(batch, filled)
        collector._frames += frames
        collector._batches += 1
        if batch is not None:
            self._finish(batch, filled)
        if apart:
            return self._done(order, frames, batch=cloudpickle.dumps(batch))
        return self._done(order, frames, block=self._own[1] if own and self._own else None)

    def _name_writes(self, order: Collect) -> bool:
        """Names what is written now to a replay buffer that writes each name once, if it does."""
        buffer = self.collector.config.replay_buffer
        # Asked of its class: TorchRL's clients of an actor have an attribute of any name.
        if not hasattr(type(buffer), "write_as"):
            return False
        buffer.write_as(order.number)
        return True

    @contextmanager
    def _tell_of_write(self, order: Collect, frames: int) -> Iterator[None]:
        """Tells the parent of a batch that is written within.

        Others wait for the buffer's locks, so a worker that dies while it writes must be known.
        One that dies later must not have its batch collected again.
        """
        with self._port.undisturbed():
            self._port.send(Writing())
            yield
            self._port.send(Written(self._done(order, frames)))

    @property
    def _looks_at_batches(self) -> bool:
        """Whether there is more to be done with a batch than to collect it."""
        collector = self.collector
        return (
            self._masked
            or collector.config.set_truncated
            or collector.post_collect_hook is not None
        )

    def _finish(self, batch: TensorDictBase, filled: int) -> None:
        """Does with a batch what options ask for."""
        collector = self.collector
        if collector.config.set_truncated:
            collector._delivery.truncate_last(batch, filled)
        if collector.post_collect_hook is not None:
            # Memory that is leased to the parent is used again when the parent lets go of it.
            shown = batch.clone()
            # New weights are taken before a batch begins: these are those that made it.
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
        """The memory that an order names. It comes again and again: it is looked at once."""
        if order.memory is None:
            return self._own_block()
        block = self._blocks.pop(order.memory, None)
        if block is None:
            joint = self._joints[order.joint]
            tensors, _ = tensors_over(joint.whole, self._port.memory(order.memory))
            part = joint.part(order.part, tensors)
            block = Block(Lease(joint.layouts[order.part], part))
        self._blocks[order.memory] = block  # the last used is the last
        if len(self._blocks) > _MOST_BLOCKS:
            del self._blocks[next(iter(self._blocks))]
        return block

    def _own_block(self) -> Block | None:
        """Memory for batches that are sent: by the time of the next, the last one is."""
        if self._layout is None:
            return None
        if self._own is None:
            array = np.zeros(self._layout.nbytes, dtype=np.uint8)
            lease = Lease(self._layout, tensors_in(self._layout, array))
            self._own = Block(lease), array
        return self._own[0]


def call_path(collector: Any, path: str, args: Any, kwargs: Any) -> Any:
    """Calls what is at a path of a worker's collector."""
    (result,) = collector.map_fn(path, [args], [kwargs])
    return result


def fake(collector: Any) -> TensorDictBase:
    """A batch of zeros with the layout of what a worker delivers."""
    batch: TensorDictBase = collector._rollout.frames.fake()
    return batch
