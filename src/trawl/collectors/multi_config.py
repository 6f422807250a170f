"""Options of a collector with workers, and the sources of the workers' environments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import Any, Literal

from trawl.backends.places import Place, check_place
from trawl.checks import check_number, seconds_above_zero
from trawl.collectors.config import CollectorConfig, warn
from trawl.collectors.options import (
    EVALUATOR,
    WHOLE,
    at_least,
    check_callable,
    option,
)
from trawl.envs.build import distinct, refuse_policy
from trawl.envs.types import is_list
from trawl.supported import check


def _share(name: str, value: Any) -> Any:
    number = not isinstance(value, bool) and isinstance(value, Real)
    if value is not None and not number:
        raise TypeError(f"{name} must be a number, but it is {value!r}")
    if value is not None and not 0 <= value <= 1:
        raise ValueError(f"{name} must be from 0 to 1, but it is {value!r}")
    return value


@dataclass(frozen=True, kw_only=True)
class MultiConfig(CollectorConfig):
    """The options of a collector with workers.

    The options of :class:`~trawl.collectors.Collector` are available, except ``interruptor`` and
    ``return_same_td``. The options below are added.

    ``policy``, ``policy_factory``, the devices, ``create_env_kwargs`` and ``frames_per_batch``
    may be lists, with an entry for each worker.

    Attributes:
        num_workers: number of workers, if ``create_env_fn`` is not a list.
        collector_class: class of the workers' collectors: a subclass of ``Collector``.
        cat_results: layout of a synchronous batch: ``"stack"`` (also None), 0 or -1. ``"stack"``
            makes batches of shape ``(workers, *B, T)``, where ``B`` is the batch size of a worker's
            environment and ``T`` is the number of steps. 0 concatenates the workers' batches along
            the first dimension, and -1 along time.
        preemptive_threshold: share of the workers, from 0 to 1, for which a batch waits; None or 1:
            all. When these workers have finished, the others are interrupted at their next step.
        prefetch: for synchronous collectors, number of batches that are requested ahead, 0 or 1.
            With 1, workers collect the next batch while the learner uses the last one. The weights
            of an update then take effect one batch later.
        update_at_each_batch: True to call ``update_policy_weights_()`` before each batch.
        max_policy_lag: for asynchronous collectors, the maximum number of weight updates by which
            a batch may be behind when it is delivered; None: no limit. To keep to the limit, the
            collector delays requests to workers, but throws no frame away. If workers have workers
            of their own, the limit holds for all levels.
        num_threads: number of torch threads in this process while workers are running; None: the
            current number, less one for each worker.
        num_sub_threads: number of torch threads in each worker.
        init_fn: function without arguments that is called in each worker before anything else.
        max_restarts: maximum number of times that any one worker is replaced after its death; 0:
            never.
        max_total_restarts: maximum number of replacements of all workers together.
        worker_timeout: seconds without an answer after which a worker counts as dead; None: no
            limit. The timeout must be longer than a batch takes.
        worker_snapshots: number of batches after which each worker sends its state to this process;
            0: never. If the worker dies, its replacement then continues its episodes from the last
            state, so the death changes no frame. A state has the policy's weights, so a large
            policy calls for a large number. Without a state, a replacement begins new episodes.
        start_method: way in which worker processes are started, ``"forkserver"`` or ``"spawn"``;
            ``"portable"``, which works on every system; ``"inline"``, which runs the workers in
            this process, where a debugger can follow them; the name of a place that another package
            adds; or a function that makes a :class:`~trawl.backends.Backend`.
    """

    # Only a collector that has its own environment accepts these options.
    interruptor: None = field(default=None, init=False)
    return_same_td: bool = field(default=False, init=False)

    num_workers: int | None = option(None, None, EVALUATOR)
    collector_class: Callable[..., Any] | None = option(None, check_callable, EVALUATOR)
    cat_results: Literal["stack", 0, -1] | None = option(None, None, EVALUATOR)
    preemptive_threshold: float | None = option(None, _share, EVALUATOR)
    prefetch: Literal[0, 1] = option(0, None, WHOLE)
    update_at_each_batch: bool = option(False)
    max_policy_lag: int | None = option(None, at_least(0), WHOLE)
    num_threads: int | None = option(None, at_least(1))
    num_sub_threads: int = option(1, at_least(1))
    init_fn: Callable[[], Any] | None = option(None, check_callable, EVALUATOR)
    max_restarts: int = option(10, at_least(0))
    max_total_restarts: int = option(100, at_least(0))
    worker_timeout: float | None = option(None, seconds_above_zero)
    worker_snapshots: int = option(0, at_least(0))
    start_method: Literal["forkserver", "spawn", "inline", "portable"] | Place = option(
        "forkserver", check_place
    )

    @property
    def workers_can_write(self) -> bool:
        """True if workers can write to the replay buffer with no frame lost or written twice."""
        # If a worker adds frames one by one and dies, its frames can't be distinguished from the
        # frames of its replacement. With preemption, the frames of a late worker can't be
        # distinguished from frames that come after the end. Whole trajectories in a worker
        # would be lost if the worker died, or written again by its replacement.
        return self.extend_buffer and not self.preempts and not self.whole_trajectories

    @property
    def preempts(self) -> bool:
        """True if a batch may be finished before all workers have filled their parts."""
        return self.preemptive_threshold not in (None, 1)

    def check_sync(self, sync: bool) -> None:
        """Checks the options that depend on whether all workers contribute to each batch.

        Raises:
            ValueError: if an option has no meaning with ``sync``.
        """
        check({**vars(self), "sync": sync})
        if not sync and self.preempts:
            warn(
                f"preemptive_threshold={self.preemptive_threshold} has no effect with "
                "sync=False, where no worker waits for others"
            )


# Options of a collector that a collector with workers doesn't have.
NOT_HERE = frozenset(one.name for one in fields(MultiConfig) if not one.init)


def sources(create_env_fn: Any, num_workers: int | None) -> list[Any]:
    """Returns the source of each worker's environment.

    If several workers are given the same environment object, all but the first get copies.

    Raises:
        ValueError: if ``num_workers`` does not match the list, or there are no workers.
        TypeError: if ``num_workers`` is not an integer, or ``create_env_fn`` is a policy.
    """
    refuse_policy(create_env_fn)
    if num_workers is not None:
        num_workers = check_number("num_workers", num_workers, 1)
    if is_list(create_env_fn):
        if not create_env_fn:
            raise ValueError("create_env_fn must not be an empty list")
        if num_workers not in (None, len(create_env_fn)):
            raise ValueError(
                f"num_workers={num_workers} does not match create_env_fn, a list of "
                f"{len(create_env_fn)} entries: the list needs one entry for each worker"
            )
        found = list(create_env_fn)
    else:
        found = [create_env_fn] * (num_workers or 1)
    return distinct(found)
