"""Collectors whose policy acts for the environments that are ready."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from typing_extensions import override

from trawl.collectors.arguments import accepts, describe
from trawl.collectors.local.first_ready import check_pool_options, pool_batching, pool_of
from trawl.collectors.multi import MultiAsyncCollector
from trawl.collectors.options import check_callable, check_names
from trawl.collectors.serving_options import (
    DEFAULT_SERVING,
    AsyncBatchedArguments,
    has_own_process,
)
from trawl.collectors.single import Collector
from trawl.envs.processes.parallel import ParallelEnv
from trawl.rollout.batches import BatchOptions
from trawl.rollout.ready.loop import ReadyRollout
from trawl.rollout.ready.serving import ServingOptions
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
        self.parts.outbox.hook = check_callable("hook", hook)

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


@describe(AsyncBatchedArguments)
class AsyncBatchedCollector(ServingCollector):
    """Collects from many environments, each of which steps at its own pace.

    Each environment has a process or a thread. The policy acts for the environments that are
    ready, in one call, while the others step. No environment waits for the slowest one.

    A batch is a TensorDict of shape ``(frames_per_batch,)``. Its frames are in the order in which
    their steps ended. The frames of an environment are therefore in order, with frames of other
    environments between them. Each frame has the entries of a :class:`Collector`'s frame, and also
    ``"env_index"`` (int64), the number of its environment, and ``"policy_version"`` (int64), the
    version of the policy that chose its action. The last batch is shorter if ``total_frames`` is
    not a multiple of ``frames_per_batch``.

    With ``policy_backend="multiprocessing"``, the policy has a process of its own, and the
    constructor returns an
    :class:`~trawl.collectors.async_batched.InferenceProcessCollector`, which has the same
    methods as other collectors with workers.

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

    Examples:
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

    # The class of a worker's collector, if this class is given as ``collector_class``.
    in_worker = staticmethod(partial(serving_worker, DEFAULT_SERVING))

    if not TYPE_CHECKING:

        def __new__(cls, *args: Any, **options: Any) -> Any:
            """Returns a collector in this process, or one whose policy has a process of its own."""
            place = options.get("policy_backend"), options.get("server_config")
            if cls is AsyncBatchedCollector and has_own_process(*place):
                return InferenceProcessCollector(_checked(cls.__name__, *args, **options))
            return super().__new__(cls)

    @accepts(AsyncBatchedArguments)
    def __init__(self, create_env_fn: Any, *more: Any, policy: Any = None, **options: Any) -> None:
        arguments = _checked(type(self).__name__, create_env_fn, *more, policy=policy, **options)
        if arguments.in_process:
            raise TypeError("only AsyncBatchedCollector itself takes another policy_backend")
        super().__init__(
            arguments.env_factory(),
            policy,
            serving=arguments.serving,
            **arguments.collector_options(),
        )


def _checked(name: str, create_env_fn: Any, *more: Any, **options: Any) -> AsyncBatchedArguments:
    """Returns the arguments of a collector of the class ``name``.

    Raises:
        TypeError: if an argument is unknown or missing, or has the wrong type.
        ValueError: if a value is out of range or has no meaning here.
    """
    if more:
        raise TypeError(
            f"{name} takes 1 positional argument (create_env_fn), but got {1 + len(more)}: pass "
            "the others by name, such as policy=RandomPolicy()"
        )
    check_names(name, options, AsyncBatchedArguments)
    return AsyncBatchedArguments(create_env_fn, **options)
