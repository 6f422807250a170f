"""The function :func:`~trawl.tune`."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from trawl.checks import check_number, check_seconds, did_you_mean
from trawl.collectors.options import check_callable
from trawl.collectors.single import Collector
from trawl.collectors.tuning.candidate import Candidate
from trawl.collectors.tuning.code import code_of
from trawl.collectors.tuning.halving import Halving
from trawl.collectors.tuning.probe import Probe, check_source, own_copy, probe
from trawl.collectors.tuning.progress import TuneProgress
from trawl.collectors.tuning.reasons import busy, reason
from trawl.collectors.tuning.result import TuneResult, ordered
from trawl.collectors.tuning.space import space_for, usable_cores
from trawl.collectors.tuning.trial import Learner, Measurement, measure, undisturbed

_LEAST_SECONDS = 1.0
# Numbers of frames in a batch: the largest that one environment collects in a short time.
_FRAMES = (1000, 500, 200, 100, 50, 20, 10, 5, 2)
_BATCH_SECONDS = 1.0
# Number of batches that have to fit in the budget: one to warm up, and one to measure.
_LEAST_BATCHES = 2
# Options that influence the speed of workers, and that may be used several times. Others belong to
# one collector (schemes, buffers, sinks), or take effect in the driver.
_OPTIONS = (
    "auto_register_policy_transforms",
    "compact_obs",
    "compile_policy",
    "create_env_kwargs",
    "cudagraph_policy",
    "device",
    "env_device",
    "exploration_type",
    "frame_stack",
    "max_frames_per_traj",
    "normalize_observations",
    "normalize_rewards",
    "on_env_error",
    "policy_device",
    "policy_factory",
    "reset_at_each_iter",
    "reset_kwargs",
    "storing_device",
    "track_traj_ids",
    "trust_policy",
)


def tune(
    create_env_fn: Any,
    policy: Any = None,
    *,
    budget: float = 60.0,
    frames_per_batch: int | None = None,
    sync: bool | None = None,
    learner: Learner | None = None,
    max_workers: int | None = None,
    max_envs: int | None = None,
    progress: bool = True,
    **options: Any,
) -> TuneResult:
    """Measures on this machine which layout collects the most frames per second.

    A layout divides environments among processes: all in this process, in the processes of a
    :class:`~trawl.ParallelEnv`, or in workers. The function compares layouts with different numbers
    of environments and processes. It measures all of them briefly, then the better half for
    longer, and so on. Ctrl-C raises ``KeyboardInterrupt`` after all processes of the search have
    ended.

    Args:
        create_env_fn: the source of one environment: a Gymnasium id, or a function that makes it.
        policy: the policy, in any form that :class:`~trawl.Collector` accepts; or None for random
            actions.
        budget: number of seconds for the search. The search ends a little later if a measurement
            takes longer than planned.
        frames_per_batch: number of frames in a batch. None: the function compares batches of about
            1,000 and 4,000 frames, or smaller ones if the environment is slow.
        sync: True to compare only synchronous workers, False to compare only asynchronous ones.
            None: both.
        learner: function that is called with each batch, and takes as long as the learner does. It
            must not change the policy, so let it train a copy. None: batches are dropped.
        max_workers: largest number of processes. None: the number of CPU cores that the program may
            use, or more if the environment mostly waits.
        max_envs: largest number of environments in all processes together. None: no limit.
        progress: True to show the progress on stderr.
        **options: options of all measured collectors, such as ``create_env_kwargs``,
            ``policy_factory``, ``device`` or ``max_frames_per_traj``.

    Raises:
        TypeError: if an argument is unknown or has the wrong type.
        ValueError: if an argument is out of range, or the budget is too small for this environment.
        RuntimeError: if no layout could be measured.
        Exception: any error of the environment or the policy.

    Examples:
        >>> import trawl
        >>> result = trawl.tune("CartPole-v1", budget=2, max_envs=4, progress=False)
        >>> with trawl.Collector(**result.options) as collector:
        ...     batch = collector.next()
    """
    began, load = time.perf_counter(), os.getloadavg()[0]
    check_source(create_env_fn, "tune")
    _check(budget, sync, learner, options)
    if frames_per_batch is not None:
        frames_per_batch = check_number("frames_per_batch", frames_per_batch, 1)
    limits = {
        name: None if value is None else check_number(name, value, 1)
        for name, value in (("max_workers", max_workers), ("max_envs", max_envs))
    }
    own = own_copy(policy)
    with ExitStack() as stack:
        stack.enter_context(undisturbed())
        shown = stack.enter_context(TuneProgress(budget)) if progress else None
        seen = probe(create_env_fn, own, options)
        frames = frames_per_batch or default_frames(seen)
        _check_budget(budget, frames, seen)
        space = space_for(
            cores=usable_cores(),
            waits=seen.waits,
            batched=seen.env_batch > 0,
            frames=frames,
            fixed_frames=frames_per_batch is not None,
            sync=sync,
            learner=learner is not None,
            **limits,
        )
        run = _Trials(create_env_fn, own, learner, options)
        search = Halving(
            run,
            budget - (time.perf_counter() - began),
            neighbours=space.neighbours,
            report=shown.update if shown else lambda _: None,
        )
        best = search.run(space.initial())
    trials = ordered(list(search.trials.values()))
    return TuneResult(
        trials=trials,
        best=best,
        options=_options(best.candidate, create_env_fn, options),
        code=code_of(best.candidate, create_env_fn, policy, options),
        why=f"{reason(trials, best)} {busy(load, os.cpu_count() or 1)}".strip(),
        seconds=time.perf_counter() - began,
    )


class _Trials:
    """Measures a layout with the user's environment, policy and options."""

    def __init__(
        self, source: Any, policy: Any, learner: Learner | None, options: Mapping[str, Any]
    ) -> None:
        self._source, self._policy = source, policy
        self._learner, self._options = learner, options

    def __call__(self, candidate: Candidate, seconds: float) -> Measurement:
        """Measures the layout for a number of seconds."""
        arguments = _options(candidate, self._source, self._options)
        return measure(lambda: Collector(policy=self._policy, **arguments), seconds, self._learner)


def _options(candidate: Candidate, source: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a collector, with the user's options."""
    others = {name: value for name, value in options.items() if name != "create_env_kwargs"}
    return {**candidate.options(source, options.get("create_env_kwargs")), **others}


def default_frames(seen: Probe) -> int:
    """Returns the smaller of the two sizes of a batch that a search compares."""
    quick = (count for count in _FRAMES if count * seen.seconds_per_frame <= _BATCH_SECONDS)
    return next(quick, 1)


def _check(budget: Any, sync: Any, learner: Any, options: Mapping[str, Any]) -> None:
    if not check_seconds("budget", budget) >= _LEAST_SECONDS:
        raise ValueError(f"budget must be at least {_LEAST_SECONDS:g} seconds, but it is {budget}")
    if not (sync is None or isinstance(sync, bool)):
        raise TypeError(f"sync must be True, False or None, but it is {sync!r}")
    check_callable("learner", learner)
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise TypeError(
            f"tune got unknown arguments: {', '.join(unknown)}{did_you_mean(unknown, _OPTIONS)}"
        )


def _check_budget(budget: float, frames: int, seen: Probe) -> None:
    """Rejects a budget that is too small to measure anything.

    What it took to make the environment does not count, because the next time may be shorter.
    """
    batch = frames * seen.seconds_per_frame
    least = math.ceil(_LEAST_BATCHES * batch)
    if budget < least:
        raise ValueError(
            f"budget must be at least {least} seconds, but it is {budget}: one environment takes "
            f"about {batch:.1f} s for a batch of {frames:,} frames"
        )
