"""Collectors whose workers are processes of this machine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from trawl.backends.base import Backend
from trawl.backends.inline import InlineBackend
from trawl.backends.process import ProcessBackend
from trawl.collectors.arguments import (
    AsyncArguments,
    MultiArguments,
    MultiCollectorArguments,
    accepts,
    describe,
)
from trawl.collectors.config import warn
from trawl.collectors.fleet_collector import FleetCollector
from trawl.collectors.multi_config import MultiConfig, PerWorker
from trawl.collectors.threads import give_threads_back, take_threads


def frames_of_sync_workers(config: MultiConfig, own: PerWorker, count: int) -> list[int]:
    """Frames of each worker in a batch that all make together."""
    if own.frames is not None:
        return own.frames
    wanted = config.frames_per_batch
    each = math.ceil(wanted / count)
    if each * count != wanted:
        warn(
            f"frames_per_batch={wanted} is not a multiple of the {count} workers: each will "
            f"collect {each} frames, {each * count} in all"
        )
    return [each] * count


@describe(MultiCollectorArguments)
class MultiCollector(FleetCollector):
    """Collects experience in several processes.

    ``MultiCollector(sync=True, ...)`` makes a :class:`MultiSyncCollector`, whose batches are made
    by all workers together; ``sync=False`` a :class:`MultiAsyncCollector`, whose batches are each
    made by one, and come as they are finished.

    Workers may die: others take their places, and no frame is lost, doubled or mixed up by it.

    Args:
        create_env_fn: what each worker makes its environment of (as
            :class:`~trawl.collectors.Collector` takes it), in a list; or one such thing for
            ``num_workers``.
        policy: a policy that every worker gets a copy of, or a list of policies.
        **options: the attributes of :class:`~trawl.collectors.multi_config.MultiConfig`.

    Raises:
        TypeError: for an argument of a wrong type, or unknown; without ``sync``.
        ValueError: for a value that is out of range, or arguments that contradict each other.
        WorkerError: if a worker can't make its environment or policy; of the original type, too.
    """

    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, sync: bool | None = None, **options: Any) -> MultiCollector:
            """An instance of the class that ``sync`` asks for."""
            if cls is not MultiCollector:
                return super().__new__(cls)
            if not isinstance(sync, bool):
                raise TypeError(
                    "MultiCollector needs sync=True (batches of all workers together) or "
                    f"sync=False (of each as it comes), but it is {sync!r}"
                )
            return super().__new__(MultiSyncCollector if sync else MultiAsyncCollector)

    @accepts(MultiCollectorArguments)
    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *more: Any,
        sync: bool | None = None,
        **options: Any,
    ) -> None:
        if sync not in (None, self.sync):
            raise ValueError(f"{type(self).__name__} has sync={self.sync}, but it is {sync!r}")
        super().__init__(create_env_fn, policy, *more, **options)

    # An instance is always of a subclass, but type checkers would take this class for abstract.
    @override
    def _frames_of_workers(self) -> list[int]:
        raise NotImplementedError

    @override
    def _new_backend(self) -> Backend:
        method = self.config.start_method
        return InlineBackend() if method == "inline" else ProcessBackend(method)

    @override
    def _prepare(self) -> None:
        if self._backend.isolated:
            take_threads(self, self.num_workers, self.config.num_threads)
        super()._prepare()

    @override
    def _close(self, close_env: bool) -> None:
        try:
            super()._close(close_env)
        finally:
            give_threads_back(self)


@describe(MultiArguments)
class MultiSyncCollector(MultiCollector):
    """Collects batches that all workers make together, each in a process of its own.

    With ``n`` workers a batch has the shape ``(n, *B, frames_per_batch / n / prod(B))``, ``B``
    being the batch size of a worker's environment; ``cat_results=0`` and ``-1`` put the workers'
    parts behind each other instead. Row ``i`` is that of worker ``i``. Workers write where the
    batch is delivered: nothing is copied.

    Workers wait until the next batch is asked for, so that a policy which was updated in between
    collects all of it.

    Args:
        create_env_fn: what each worker makes its environment of (as
            :class:`~trawl.collectors.Collector` takes it), in a list; or one such thing for
            ``num_workers``.
        policy: a policy that every worker gets a copy of, or a list of policies.
        **options: the attributes of :class:`~trawl.collectors.multi_config.MultiConfig`.
            ``frames_per_batch`` is shared out among the workers.

    Example:
        >>> from trawl.collectors import MultiSyncCollector
        >>> with MultiSyncCollector(
        ...     "CartPole-v1", num_workers=2, frames_per_batch=100, total_frames=200
        ... ) as collector:
        ...     shapes = [batch.shape for batch in collector]
        >>> shapes
        [torch.Size([2, 50]), torch.Size([2, 50])]
    """

    sync = True

    @accepts(MultiArguments)
    def __init__(self, create_env_fn: Any, policy: Any = None, *more: Any, **options: Any) -> None:
        super().__init__(create_env_fn, policy, *more, **options)

    @override
    def _frames_of_workers(self) -> list[int]:
        return frames_of_sync_workers(self.config, self._own, self.num_workers)


@describe(MultiArguments)
class MultiAsyncCollector(MultiCollector):
    """Collects batches that one worker makes each, in the order in which they are finished.

    A batch has the shape ``(*B, frames_per_batch / prod(B))``, ``B`` being the batch size of a
    worker's environment. Workers go on while the learner works: at most one batch of each waits
    to be taken while it makes the next, and no step is thrown away. A policy that was updated
    collects what a worker begins after that.

    Args:
        create_env_fn: what each worker makes its environment of (as
            :class:`~trawl.collectors.Collector` takes it), in a list; or one such thing for
            ``num_workers``.
        policy: a policy that every worker gets a copy of, or a list of policies.
        **options: the attributes of :class:`~trawl.collectors.multi_config.MultiConfig`.
            ``frames_per_batch`` are those of each worker.

    Example:
        >>> from trawl.collectors import MultiAsyncCollector
        >>> with MultiAsyncCollector(
        ...     ["CartPole-v1", "CartPole-v1"], frames_per_batch=50, total_frames=200
        ... ) as collector:
        ...     shapes = [batch.shape for batch in collector]
        >>> len(shapes), shapes[0]
        (4, torch.Size([50]))
    """

    sync = False

    @accepts(MultiArguments)
    def __init__(self, create_env_fn: Any, policy: Any = None, *more: Any, **options: Any) -> None:
        super().__init__(create_env_fn, policy, *more, **options)

    @override
    def _frames_of_workers(self) -> list[int]:
        return [self.config.frames_per_batch] * self.num_workers


@describe(AsyncArguments)
class AsyncCollector(MultiAsyncCollector):
    """Collects in one other process, while the learner works.

    Args:
        create_env_fn: what the worker makes its environment of, as
            :class:`~trawl.collectors.Collector` takes it.
        policy: the policy; the worker gets a copy.
        **options: the attributes of :class:`~trawl.collectors.multi_config.MultiConfig`.

    Example:
        >>> from trawl.collectors import AsyncCollector
        >>> with AsyncCollector("CartPole-v1", frames_per_batch=50, total_frames=100) as collector:
        ...     frames = sum(batch.numel() for batch in collector)
        >>> frames
        100
    """

    @accepts(AsyncArguments)
    def __init__(self, create_env_fn: Any, policy: Any = None, *more: Any, **options: Any) -> None:
        if options.get("num_workers") not in (None, 1):
            raise ValueError(
                f"AsyncCollector has one worker, but num_workers={options['num_workers']}; "
                "MultiAsyncCollector has several"
            )
        # A list is the batch of environments of the one worker.
        super().__init__([create_env_fn], policy, *more, **options)
