"""The collector whose policy has a process of its own, and acts for environments that are ready."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from typing_extensions import override

from trawl.collectors.multi import MultiAsyncCollector
from trawl.collectors.serving import serving_worker
from trawl.collectors.serving_options import AsyncBatchedArguments


class InferenceProcessCollector(MultiAsyncCollector):
    """An :class:`~trawl.collectors.AsyncBatchedCollector` whose policy has a process of its own.

    ``AsyncBatchedCollector(..., policy_backend="multiprocessing")`` makes an instance. The
    *inference process* starts the environments, acts for them, and fills batches in memory that it
    shares with this process. It collects ahead while the learner works, at most two batches. If the
    policy is on a GPU, only the inference process uses the GPU for acting.

    Each new batch begins with the newest weights. Frames whose steps were under way at that time
    follow with the older version. If the inference process dies, it is replaced, together with its
    environments.

    Args:
        arguments: the arguments of the ``AsyncBatchedCollector``.
    """

    _always_exact = True

    def __init__(self, arguments: AsyncBatchedArguments) -> None:
        options = arguments.collector_options()
        hook = options.pop("post_collect_hook", None)
        most = arguments.max_policy_lag
        # A worker's batch may wait for its delivery. Its frames may have been late before.
        within = None if most is None else min(most, 1)
        super().__init__(
            [arguments.env_factory()],
            arguments.policy,
            collector_class=partial(serving_worker, replace(arguments.serving, max_lag=within)),
            max_policy_lag=None if most is None or within is None else most - within,
            **options,
        )
        self.parts.outbox.hook = hook

    @property
    @override
    def _workers_write(self) -> bool:
        """False: this process counts the frames exactly before it writes them."""
        return False

    @override
    def set_post_collect_hook(self, hook: Callable[[Any], Any] | None) -> None:
        # This process delivers the batches, while the inference process collects ahead.
        self.parts.outbox.hook = hook

    @property
    def server_backend(self) -> str:
        """Place where the policy runs: ``"process"``, the inference process."""
        return "process"

    def server_stats(self, *, reset: bool = False) -> dict[str, float | int]:
        """Returns figures about the policy's calls, once the inference process ends its batch.

        See :meth:`AsyncBatchedCollector.server_stats`.

        Args:
            reset: True to count anew from now on.
        """
        (figures,) = self.map_fn("server_stats", [()], [{"reset": reset}])
        return dict(figures)
