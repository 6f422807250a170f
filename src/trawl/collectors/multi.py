"""Collectors whose workers are processes on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from trawl.backends.base import Backend
from trawl.backends.places import backend_at
from trawl.collectors.arguments import (
    AsyncArguments,
    MultiArguments,
    MultiCollectorArguments,
    accepts,
    describe,
)
from trawl.collectors.config import warn
from trawl.collectors.worker_collector import WorkerCollector
from trawl.envs.build import refuse_policy
from trawl.envs.types import is_list

# For each open collector, the number of its workers, and its request for torch threads in this
# process. None requests one thread less for each worker.
_open: dict[int, tuple[int, int | None]] = {}
_before: list[int] = []


def _take_threads(owner: object, workers: int, threads: int | None) -> None:
    """Sets the number of torch threads in this process, to leave cores to a collector's workers.

    :func:`_give_threads_back` undoes this.

    Args:
        owner: the collector.
        workers: number of its workers.
        threads: number of threads for this process; None for one thread less for each worker.
    """
    if not _open:
        _before[:] = [torch.get_num_threads()]
    _open[id(owner)] = workers, threads
    _apply()


def _give_threads_back(owner: object) -> None:
    """Undoes :func:`_take_threads` for a collector whose workers have ended."""
    if _open.pop(id(owner), None) is not None:
        _apply()


def _apply() -> None:
    """Applies the newest open collector's request for threads, or restores the original number."""
    left = _before[0] - sum(workers for workers, _ in _open.values())
    asked = [threads for _, threads in _open.values()]
    torch.set_num_threads(max(1, left) if not asked or asked[-1] is None else asked[-1])


@describe(MultiCollectorArguments)
class MultiCollector(WorkerCollector):
    """Collects experience in several processes.

    ``MultiCollector(sync=True, ...)`` creates a :class:`MultiSyncCollector`, in which all workers
    contribute to each batch. ``sync=False`` creates a :class:`MultiAsyncCollector`, in which each
    batch comes from one worker, and batches are delivered in the order in which they are finished.

    A worker that dies is replaced, up to ``max_restarts`` times. Its death doesn't cause any frame
    to be lost, duplicated or mixed up.

    Args:
        **options: the attributes of :class:`~trawl.collectors.multi_config.MultiConfig`.
    """

    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, sync: bool | None = None, **options: Any) -> MultiCollector:
            """Returns an instance of the class that ``sync`` selects."""
            if cls is not MultiCollector:
                return super().__new__(cls)
            if not isinstance(sync, bool):
                raise TypeError(
                    "MultiCollector needs sync=True (each batch comes from all workers together) "
                    f"or sync=False (each batch comes from one worker), but sync is {sync!r}"
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
            raise ValueError(
                f"{type(self).__name__} always has sync={self.sync}, but sync={sync!r} was passed"
            )
        refuse_policy(create_env_fn)
        if options.get("num_workers") is None and not is_list(create_env_fn):
            warn(
                f"{type(self).__name__} has one worker, because create_env_fn is one environment: "
                "pass num_workers, or a list of environments (num_workers=1 is silent)"
            )
        super().__init__(create_env_fn, policy, *more, **options)

    @override
    def _new_backend(self) -> Backend:
        return backend_at(self.config.start_method)

    @override
    def _prepare(self) -> None:
        if self._backend.isolated:
            _take_threads(self, self.num_workers, self.config.num_threads)
        super()._prepare()

    @override
    def _close(self, close_env: bool) -> None:
        try:
            super()._close(close_env)
        finally:
            _give_threads_back(self)


@describe(MultiArguments)
class MultiSyncCollector(MultiCollector):
    """Collects batches to which all workers contribute, each in its own process.

    With ``n`` workers, a batch has the shape ``(n, *B, frames_per_batch / n / prod(B))``, where
    ``B`` is the batch size of a worker's environment. Row ``i`` comes from worker ``i``.
    ``cat_results=0`` and ``-1`` concatenate the workers' parts instead. Workers write into the
    memory of the delivered batch, so usually nothing is copied.

    Workers wait until the next batch is requested. If the policy is updated in between, the whole
    next batch is collected with the new weights. With ``prefetch=1``, the next batch is requested
    when a batch is delivered, so it has the weights of that moment.

    Args:
        **options: the attributes of :class:`~trawl.collectors.multi_config.MultiConfig`.
            ``frames_per_batch`` is divided among the workers.

    Examples:
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


@describe(MultiArguments)
class MultiAsyncCollector(MultiCollector):
    """Collects batches that come from one worker each, in the order in which they are finished.

    A batch has the shape ``(*B, frames_per_batch / prod(B))``, where ``B`` is the batch size of a
    worker's environment. Workers continue while the learner works, and no step is thrown away. At
    most one finished batch of each worker waits while the worker makes the next one. After an
    update, each worker uses the new weights from the next batch that it begins.

    Args:
        **options: the attributes of :class:`~trawl.collectors.multi_config.MultiConfig`.
            ``frames_per_batch`` counts the frames of one worker's batch.

    Examples:
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


@describe(AsyncArguments)
class AsyncCollector(MultiAsyncCollector):
    """Collects experience in another process, while the learner works.

    Args:
        create_env_fn: the environment of the worker, in any form that
            :class:`~trawl.collectors.Collector` accepts.
        policy: the policy; the worker gets a copy.
        **options: the attributes of :class:`~trawl.collectors.multi_config.MultiConfig`.

    Examples:
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
                f"AsyncCollector has one worker, but num_workers={options['num_workers']}: use "
                "MultiAsyncCollector for several workers"
            )
        # A list from the user is a batch of environments for the only worker.
        super().__init__([create_env_fn], policy, *more, **options)
