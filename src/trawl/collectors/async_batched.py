"""The collector whose policy acts for the environments that are ready."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

from tensordict import TensorDictBase
from tensordict.nn import InteractionType
from typing_extensions import override

from trawl.checks import check_number
from trawl.collectors.policy_version import PolicyVersion
from trawl.collectors.serving_options import (
    Batching,
    check_transport,
    device_options,
    env_backend_of,
    policy_backend_of,
)
from trawl.collectors.single import Collector
from trawl.collectors.types import PolicyLike
from trawl.collectors.weak import weak
from trawl.envs.affinity import Affinity, check_cores
from trawl.envs.parallel import ParallelEnv
from trawl.envs.types import DeviceLike, EnvKwargs, is_list
from trawl.keys import Key, as_key
from trawl.rollout.batch_writer import BatchOptions
from trawl.rollout.ready_loop import ReadyRollout
from trawl.rollout.ready_writer import ENV_INDEX, ServingOptions


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
        policy_factory: function without arguments that makes the policy; alternative to ``policy``.
        frames_per_batch: number of frames in a batch.
        total_frames: number of frames after which iteration ends; -1: no limit.
        max_batch_size: maximum number of environments for which the policy acts at once. Default:
            64.
        min_batch_size: number of ready environments that the policy waits for. Default: 1.
        server_timeout: seconds after the first ready environment, after which the policy acts even
            if fewer than ``min_batch_size`` are ready. Default: 0.01.
        transport: has no effect, because environments and policy share memory. ``None``,
            ``"auto"`` and ``"driver"`` are accepted.
        device: device of the policy; short for ``device_config`` with only this device.
        backend: default for ``env_backend``.
        env_backend: ``"multiprocessing"`` (the default) runs environments in processes, and
            ``"threading"`` in threads of this process.
        env_exchange: has no effect. ``"auto"`` and ``"shm"`` are accepted.
        envs_per_worker: number of environments in each process. They become ready together.
        transition_chunk_size: has no effect. ``"auto"`` and 1 are accepted.
        policy_backend: ``"threading"``: the policy runs in the thread that collects.
        reset_at_each_iter: True to reset all environments before each batch.
        postproc: function called with each batch; its result is delivered instead.
        exploration_type: way in which probabilistic policies choose actions.
        replay_buffer: buffer to which batches are written; iteration then yields None.
        post_collect_hook: function called with each batch when it is delivered.
        yield_completed_trajectories: True to deliver whole trajectories, one at a time, instead of
            batches.
        weight_sync: scheme through which the policy gets new weights.
        weight_sync_model_id: name of the model that ``weight_sync`` updates.
        verbose: has no effect; ``server_stats()`` has the figures.
        create_env_kwargs: keyword arguments for the functions: one mapping for all, or a list.
        worker_affinity: CPU cores of each process, as in :class:`~trawl.envs.ParallelEnv`.
        driver_affinity: CPU cores on which the thread that collects runs while it collects.
        server_config: mapping, or object with attributes, that sets ``max_batch_size``,
            ``min_batch_size``, ``timeout`` and ``static_batch_size``. With the latter, the policy
            always gets a batch of this size, as CUDA graphs need it.
        device_config: mapping, or object with attributes, that sets ``policy_device``,
            ``env_device`` and ``storing_device``.
        policy_version: version of the policy before the first update.
        policy_version_key: key of the policy version; None to leave it out.

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
        ...     [len(batch) for batch in collector]
        [50, 50, 20]
    """

    def __init__(
        self,
        create_env_fn: Sequence[Any],
        *,
        policy: PolicyLike | None = None,
        policy_factory: Callable[[], Any] | None = None,
        frames_per_batch: int,
        total_frames: int = -1,
        max_batch_size: int | None = None,
        min_batch_size: int | None = None,
        server_timeout: float | None = None,
        transport: Literal["auto", "driver"] | None = None,
        device: DeviceLike | None = None,
        backend: Literal["threading", "multiprocessing"] | None = None,
        env_backend: Literal["threading", "multiprocessing"] | None = None,
        env_exchange: Literal["auto", "shm"] = "auto",
        envs_per_worker: int = 1,
        transition_chunk_size: int | Literal["auto"] = "auto",
        policy_backend: Literal["threading"] | None = None,
        reset_at_each_iter: bool = False,
        postproc: Callable[[TensorDictBase], Any] | None = None,
        exploration_type: Any = InteractionType.RANDOM,
        replay_buffer: Any = None,
        post_collect_hook: Callable[[Any], Any] | None = None,
        yield_completed_trajectories: bool = False,
        weight_sync: Any = None,
        weight_sync_model_id: str = "policy",
        verbose: bool = False,
        create_env_kwargs: EnvKwargs | None = None,
        worker_affinity: Affinity | None = None,
        driver_affinity: Sequence[int] | None = None,
        server_config: Any = None,
        device_config: Any = None,
        policy_version: int = 0,
        policy_version_key: str | tuple[str, ...] | None = "policy_version",
    ) -> None:
        if not is_list(create_env_fn):
            raise TypeError(
                "create_env_fn must be a list with a function for each environment, but it is "
                f"{create_env_fn!r}"
            )
        if (policy is None) == (policy_factory is None):
            raise TypeError("exactly one of policy and policy_factory must be given")
        check_transport(transport, env_exchange, transition_chunk_size)
        policy_backend_of(backend, policy_backend, server_config)
        self._batching = Batching.of(
            len(create_env_fn), max_batch_size, min_batch_size, server_timeout, server_config
        )
        self._batching.check_workers(check_number("envs_per_worker", envs_per_worker, 1))
        self._cores = None
        if driver_affinity is not None:
            self._cores = check_cores(driver_affinity, "driver_affinity")
        self._version_key: Key | None = None
        version = PolicyVersion()
        version.version = check_number("policy_version", policy_version, 0)
        if policy_version_key is not None:
            self._version_key = as_key(policy_version_key)
        whole = yield_completed_trajectories
        schemes = None if weight_sync is None else {weight_sync_model_id: weight_sync}
        super().__init__(
            partial(
                ParallelEnv,
                len(create_env_fn),
                list(create_env_fn),
                create_env_kwargs=create_env_kwargs,
                envs_per_worker=envs_per_worker,
                worker_affinity=worker_affinity,
                backend=env_backend_of(backend, env_backend),
            ),
            policy,
            policy_factory=policy_factory,
            frames_per_batch=frames_per_batch,
            total_frames=total_frames,
            reset_at_each_iter=reset_at_each_iter,
            postproc=postproc,
            exploration_type=exploration_type,
            replay_buffer=replay_buffer,
            post_collect_hook=post_collect_hook,
            weight_sync_schemes=schemes,
            track_policy_version=version,
            trajs_per_batch=1 if whole else None,
            traj_format="cat" if whole and replay_buffer is None else None,
            **device_options(device, device_config),
        )

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
        batching = self._batching
        serving = ServingOptions(
            batching.least,
            batching.most,
            batching.patience,
            batching.size,
            self._version_key,
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
        self._rollout.most = int(max(1, min(self.frames_per_batch, left)))
        with running_on(self._cores):
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
