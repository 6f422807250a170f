"""The collector that acts for environments that are ready, in this process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from tensordict import TensorDictBase
from typing_extensions import override

from trawl.collectors.single import Collector
from trawl.collectors.weak import weak
from trawl.envs.parallel import ParallelEnv
from trawl.rollout.batch_writer import BatchOptions
from trawl.rollout.ready_loop import ReadyRollout
from trawl.rollout.serving import ServingOptions, by_environment


class ServingCollector(Collector):
    """Collects from environments that step each at its own pace.

    Args:
        create_env_fn: a :class:`~trawl.envs.ParallelEnv`, or a function that makes one.
        policy: a policy that a :class:`Collector` accepts.
        serving: options for acting in environments that are ready. Frames have versions only if
            the collector tracks them.
        **options: options of a :class:`Collector`.

    Raises:
        ValueError: if the data of the environments has no fixed layout.
    """

    versions_frames = True

    def __init__(
        self, create_env_fn: Any, policy: Any = None, *, serving: ServingOptions, **options: Any
    ) -> None:
        self._serving = serving
        super().__init__(create_env_fn, policy, **options)

    @override
    def _set_frames_per_batch(self, environments: int) -> int:
        self.requested_frames_per_batch = self.config.frames_per_batch
        return self.requested_frames_per_batch

    @override
    def _new_rollout(self, options: BatchOptions) -> ReadyRollout:
        if not self.env.fixed_layout:
            raise ValueError(
                "AsyncBatchedCollector needs environments whose data has a fixed layout, but "
                f"{self.env.name} has none: use MultiAsyncCollector"
            )
        serving = self._serving
        if self._version is None:
            serving = replace(serving, version_key=None)
        self._rollout: ReadyRollout
        return ReadyRollout(
            self.env,
            self._resolved,
            options,
            self.config.exploration_type,
            serving,
            weak(self._current_version),
        )

    def _current_version(self) -> int:
        return 0 if self._version is None else int(self._version.version)

    # --- collecting

    @override
    def _run(self) -> TensorDictBase:
        left = math.inf if self.config.endless else self.config.total_frames - self._frames
        # After the budget is used up, only a call of rollout() gets here.
        self._rollout.most = int(min(self.frames_per_batch, left if left > 0 else math.inf))
        return super()._run()

    @override
    def _stamp(self, batch: TensorDictBase, version: int | str | None) -> None:
        """Does nothing: each frame has the version that chose its action."""

    @override
    def _by_source(self, frames: TensorDictBase) -> list[tuple[int, TensorDictBase]]:
        return by_environment(frames)

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
        record = self._rollout.writer.record
        figures = {**record.describe(), "policy_version": self._current_version()}
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
