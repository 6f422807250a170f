"""The collector that acts for environments that are ready, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from typing_extensions import override

from trawl.collectors.local.first_ready import check_pool_options, pool_batching, pool_of
from trawl.collectors.single import Collector
from trawl.envs.processes.parallel import ParallelEnv
from trawl.rollout.ready.loop import ReadyRollout
from trawl.rollout.ready.serving import ServingOptions
from trawl.rollout.writers.batch_writer import BatchOptions
from trawl.supported import Trait, check


class ServingCollector(Collector):
    """Collects from environments that step each at its own pace.

    Args:
        create_env_fn: a :class:`~trawl.envs.ParallelEnv` or a pool, or a function that makes one.
        policy: a policy that a :class:`Collector` accepts.
        serving: options for acting in environments that are ready. Frames have versions only if
            the collector tracks them.
        **options: options of a :class:`Collector`.

    Raises:
        ValueError: if the data of the environments has no fixed layout.
    """

    def __init__(
        self, create_env_fn: Any, policy: Any = None, *, serving: ServingOptions, **options: Any
    ) -> None:
        self._serving = serving
        super().__init__(create_env_fn, policy, **options)

    @property
    @override
    def _takes_first_ready(self) -> bool:
        return True

    @override
    def _new_rollout(self, options: BatchOptions) -> ReadyRollout:
        pool, serving = pool_of(self.env), self._serving
        if pool is None:
            check(vars(self.config), {Trait.READY}, "AsyncBatchedCollector")
        else:
            check_pool_options(self.config, self.env, pool)
            serving = replace(serving, batching=pool_batching(pool))
        return self._new_ready_rollout(options, serving)

    # --- figures

    @property
    def server_backend(self) -> str:
        """Place where the policy runs: ``"thread"``, the thread that collects."""
        return "thread"

    def server_stats(self, *, reset: bool = False) -> dict[str, float | int]:
        """Returns figures about the policy's calls.

        ``requests`` counts the environments that the policy has acted for, and ``batches`` the
        calls. ``p50_forward_ms`` and ``p95_forward_ms`` are percentiles of the time of a call, in
        milliseconds. ``forward_share`` and ``wait_share`` are the shares of time in which the
        policy acted, and in which no environment was ready.

        Args:
            reset: True to count anew from now on.
        """
        record = cast(ReadyRollout, self.parts.loop.rollout).writer.record
        figures = {**record.describe(), "policy_version": self._version()}
        if reset:
            record.reset()
        return figures


def serving_worker(
    serving: ServingOptions, create_env_fn: Any, policy: Any = None, **options: Any
) -> ServingCollector:
    """Makes the collector of a worker.

    Args:
        serving: options for acting in environments that are ready.
        create_env_fn: a list with an environment, or a function that makes one, for each process;
            or a function that makes a :class:`~trawl.envs.ParallelEnv`.
        policy: the worker's policy.
        **options: options of the worker's collector.
    """
    if isinstance(create_env_fn, Sequence):
        kwargs = options.pop("create_env_kwargs", None)
        sources = list(create_env_fn)
        create_env_fn = partial(ParallelEnv, len(sources), sources, create_env_kwargs=kwargs)
    return ServingCollector(create_env_fn, policy, serving=serving, **options)
