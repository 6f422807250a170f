"""The collector whose policy acts for the environments that are ready."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from tensordict import TensorDictBase
from typing_extensions import override

from trawl.collectors.arguments import accepts, describe
from trawl.collectors.options import did_you_mean
from trawl.collectors.serving_options import AsyncBatchedArguments
from trawl.collectors.single import Collector
from trawl.collectors.weak import weak
from trawl.keys import as_key
from trawl.rollout.batch_writer import BatchOptions
from trawl.rollout.ready_loop import ReadyRollout
from trawl.rollout.ready_writer import ENV_INDEX
from trawl.rollout.serving import ServingOptions


@describe(AsyncBatchedArguments)
class AsyncBatchedCollector(Collector):
    """Collects from many environments, each of which steps at its own pace.

    Each environment has a process or a thread. The policy acts for the environments that are
    ready, in one call, while the others step. No environment waits for the slowest one.

    A batch is a TensorDict of shape ``(frames_per_batch,)``. Its frames are in the order in which
    their steps ended. The frames of an environment are therefore in order, with frames of other
    environments between them. Each frame has the entries of a :class:`Collector`'s frame, and also
    ``"env_index"`` (int64), the number of its environment, and ``"policy_version"`` (int64), the
    version of the policy that chose its action. The last batch is shorter if ``total_frames`` is
    not a multiple of ``frames_per_batch``.

    When a batch is delivered, the environments go on with the actions that they have, and then
    wait for the next batch. The order of frames depends on timing, unless the policy waits for all
    environments (``min_batch_size=len(create_env_fn)`` and ``server_timeout=math.inf``).

    Args:
        create_env_fn: list of functions, each of which makes an environment. Gymnasium ids work as
            well.
        policy: a policy that a :class:`Collector` accepts.
        **options: options of the collector.

    Raises:
        TypeError: if an argument has the wrong type, or arguments contradict each other.
        ValueError: if a value is out of range or has no meaning here, or if the data of the
            environments has no fixed layout.
        WorkerError: during collection, if an environment raised an exception; the error is also an
            instance of the exception's type.
        WorkerDied: during collection, if a process died.

    Example:
        >>> from trawl.collectors import AsyncBatchedCollector, RandomPolicy
        >>> from trawl.envs import GymEnv
        >>> policy = RandomPolicy(GymEnv("CartPole-v1").full_action_spec.expand(4))
        >>> with AsyncBatchedCollector(
        ...     ["CartPole-v1"] * 4, policy=policy, frames_per_batch=50, total_frames=120
        ... ) as collector:
        ...     sizes = [len(batch) for batch in collector]
        >>> sizes == [50, 50, 20]
        True
    """

    @accepts(AsyncBatchedArguments)
    def __init__(self, create_env_fn: Any, *, policy: Any = None, **options: Any) -> None:
        names = [one.name for one in fields(AsyncBatchedArguments)]
        unknown = sorted(set(options) - set(names))
        if unknown:
            raise TypeError(
                f"{type(self).__name__} got unknown arguments: {', '.join(unknown)}"
                f"{did_you_mean(unknown, names)}"
            )
        if "frames_per_batch" not in options:
            raise TypeError(f"{type(self).__name__} needs the argument frames_per_batch")
        self._arguments = arguments = AsyncBatchedArguments(create_env_fn, policy=policy, **options)
        super().__init__(arguments.make_envs, policy, **arguments.collector_options())

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
        key = self._arguments.policy_version_key
        serving = ServingOptions(
            self._arguments.batching,
            None if key is None else as_key(key),
            weak(self._current_version),
        )
        self._rollout: ReadyRollout
        return ReadyRollout(
            self.env, self._resolved, options, self.config.exploration_type, serving
        )

    def _current_version(self) -> int:
        assert self._version is not None
        return int(self._version.version)

    # --- collecting

    @override
    def _run(self) -> TensorDictBase:
        left = math.inf if self.config.endless else self.config.total_frames - self._frames
        # After the budget is used up, only a call of rollout() gets here.
        self._rollout.most = int(min(self.frames_per_batch, left if left > 0 else math.inf))
        with running_on(self._arguments.driver_affinity):
            return super()._run()

    @override
    def _stamp(self, batch: TensorDictBase, version: int | str | None) -> None:
        """Does nothing: each frame has the version that chose its action."""

    @override
    def _by_source(self, frames: TensorDictBase) -> list[tuple[int, TensorDictBase]]:
        index = frames.get(ENV_INDEX)
        return [(int(env), frames[index == env]) for env in index.unique()]

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


@contextmanager
def running_on(cores: Sequence[int] | None) -> Iterator[None]:
    """Context in which this thread runs on some cores only; None for no change."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
