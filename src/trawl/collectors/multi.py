"""Collectors whose workers are processes of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
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
from trawl.collectors.worker_collector import WorkerCollector

# For each open collector, its workers and the threads it asked for (None: one less per worker).
_open: dict[int, tuple[int, int | None]] = {}
_before: list[int] = []


def _take_threads(owner: object, workers: int, threads: int | None) -> None:
    """Leaves cores to the workers of a collector, until :func:`_give_threads_back`.

    Args:
        owner: the collector.
        workers: number of its workers.
        threads: number of threads for this process; None for one less for each worker.
    """
    if not _open:
        _before[:] = [torch.get_num_threads()]
    _open[id(owner)] = workers, threads
    _apply()


def _give_threads_back(owner: object) -> None:
    """Takes back the cores of a collector whose workers have ended."""
    if _open.pop(id(owner), None) is not None:
        _apply()


def _apply() -> None:
    """Applies the request of the newest open collector; without any, the original number."""
    left = _before[0] - sum(workers for workers, _ in _open.values())
    asked = [threads for _, threads in _open.values()]
    torch.set_num_threads(max(1, left) if not asked or asked[-1] is None else asked[-1])


@describe(MultiCollectorArguments)
class MultiCollector(WorkerCollector):
    """Collects experience in several processes.

    ``MultiCollector(sync=True, ...)`` creates a :class:`MultiSyncCollector`, in which all workers
    contribute to each batch. ``sync=False`` creates a :class:`MultiAsyncCollector`, in which each
    batch comes from one worker, and batches are delivered in the order in which they are finished.

    A worker that dies is replaced, up to ``max_restarts`` times. No frame is lost, duplicated or
    mixed up by its death.

    Args:
        create_env_fn: a list with the environment of each worker, in any form that
            :class:`~trawl.collectors.Collector` takes; or one environment for all
            ``num_workers``.
        policy: the policy, of which every worker gets a copy; or a list with one for each worker.
        **options: the attributes of :class:`~trawl.collectors.multi_config.MultiConfig`.

    Raises:
        TypeError: for an unknown argument or one of a wrong type, or if ``sync`` is missing.
        ValueError: for a value that is out of range, or arguments that contradict each other.
        WorkerError: if a worker can't make its environment or policy. It is also an instance of
            the original exception's type.
    """

    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, sync: bool | None = None, **options: Any) -> MultiCollector:
            """Returns an instance of the class that ``sync`` selects."""
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

    @override
    def _new_backend(self) -> Backend:
        method = self.config.start_method
        return InlineBackend() if method == "inline" else ProcessBackend(method)

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

    With ``n`` workers a batch has the shape ``(n, *B, frames_per_batch / n / prod(B))``, where
    ``B`` is the batch size of a worker's environment. Row ``i`` comes from worker ``i``.
    ``cat_results=0`` and ``-1`` concatenate the workers' parts instead. Workers write into the
    memory of the delivered batch, so that usually nothing is copied.

    Workers wait until the next batch is requested. A policy that was updated in between collects
    the whole next batch.

    Args:
        create_env_fn: a list with the environment of each worker, in any form that
            :class:`~trawl.collectors.Collector` takes; or one environment for all
            ``num_workers``.
        policy: the policy, of which every worker gets a copy; or a list with one for each worker.
        **options: the attributes of :class:`~trawl.collectors.multi_config.MultiConfig`.
            ``frames_per_batch`` is divided among the workers.

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


@describe(MultiArguments)
class MultiAsyncCollector(MultiCollector):
    """Collects batches of one worker each, in the order in which they are finished.

    A batch has the shape ``(*B, frames_per_batch / prod(B))``, where ``B`` is the batch size of a
    worker's environment. Workers continue while the learner works: at most one finished batch of
    each worker waits while the worker makes the next one, and no step is thrown away. After an
    update, each worker uses the new weights from the next batch that it begins.

    Args:
        create_env_fn: a list with the environment of each worker, in any form that
            :class:`~trawl.collectors.Collector` takes; or one environment for all
            ``num_workers``.
        policy: the policy, of which every worker gets a copy; or a list with one for each worker.
        **options: the attributes of :class:`~trawl.collectors.multi_config.MultiConfig`.
            ``frames_per_batch`` counts the frames of one worker's batch.

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


@describe(AsyncArguments)
class AsyncCollector(MultiAsyncCollector):
    """Collects experience in one other process, while the learner works.

    Args:
        create_env_fn: the environment of the worker, in any form that
            :class:`~trawl.collectors.Collector` takes.
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
        # A list from the user is a batch of environments for the one worker.
        super().__init__([create_env_fn], policy, *more, **options)
