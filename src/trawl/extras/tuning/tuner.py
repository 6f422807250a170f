"""The function :func:`~trawl.tune`."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import MISSING, fields, replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from trawl.checks import check_frames, check_number, check_seconds, did_you_mean
from trawl.collectors.config import CollectorConfig
from trawl.collectors.options import TUNED, check_callable, tagged
from trawl.collectors.single import Collector
from trawl.envs.frame_stack import FrameStack
from trawl.extras.tuning.candidate import Candidate
from trawl.extras.tuning.halving import TIE, Halving
from trawl.extras.tuning.result import TuneResult, ordered
from trawl.extras.tuning.space import space_for, usable_cores
from trawl.extras.tuning.trial import (
    Learner,
    Measurement,
    Probe,
    Trial,
    check_source,
    measure,
    own_copy,
    probe,
    undisturbed,
)
from trawl.observe.formats import plural, short
from trawl.rollout.normalization import NormalizeObservation, NormalizeReward

_LEAST_SECONDS = 1.0
# Numbers of frames in a batch: the largest that one environment collects in a short time.
_FRAMES = (1000, 500, 200, 100, 50, 20, 10, 5, 2)
_BATCH_SECONDS = 1.0
# Number of batches that have to fit in the budget: one to warm up, and one to measure.
_LEAST_BATCHES = 2
# Other options belong to one collector (schemes, buffers, sinks), or take effect in the driver.
_OPTIONS = tagged(CollectorConfig, TUNED)


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
            ``policy_factory``, ``device`` or ``max_frames_per_traj``. With ``compile_policy``, the
            best layouts are also measured without it.

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
        frames_per_batch = check_frames("frames_per_batch", frames_per_batch, 1)
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
            compiled=bool(options.get("compile_policy")),
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
    others = candidate.chosen(options)
    others.pop("create_env_kwargs", None)
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


class TuneProgress:
    """Shows what is measured, and the fastest layout so far.

    On a terminal, the display is a bar that fills with the budget. Elsewhere, a line is printed
    for the first measurement of each layout.

    Args:
        budget: seconds for the search.
        console: console to print to; by default, the standard error stream.
    """

    def __init__(self, budget: float, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr)
        self._budget = budget
        self._started = time.perf_counter()
        self._best: Trial | None = None
        self._printed: set[Candidate] = set()
        self._live = self._console.is_terminal and not self._console.is_dumb_terminal
        # Refreshed only between measurements, so that no thread disturbs them.
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[best]}", markup=False),
            auto_refresh=False,
            transient=True,
            console=self._console,
        )
        self._task = self._bar.add_task("looking at the environment", total=budget, best="")

    def __enter__(self) -> TuneProgress:
        if self._live:
            self._bar.start()
            self._bar.refresh()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._live:
            self._bar.stop()

    def update(self, event: Candidate | Trial) -> None:
        """Shows that a layout is measured now, or the result of a measurement."""
        if isinstance(event, Trial):
            self._note(event)
        if self._live:
            self._show(event.candidate if isinstance(event, Trial) else event)

    def _note(self, trial: Trial) -> None:
        best = self._best
        if trial.measured and (
            best is None
            or best.candidate == trial.candidate
            or trial.frames_per_second > best.frames_per_second
        ):
            self._best = trial
        if not self._live and trial.candidate not in self._printed:
            self._printed.add(trial.candidate)
            seconds = time.perf_counter() - self._started
            line = f"{seconds:5.1f} s  {trial.candidate.label}: {_result(trial)}"
            self._console.print(Text(line), soft_wrap=True)

    def _show(self, candidate: Candidate) -> None:
        best = self._best
        text = f"best: {best.candidate.label}, {_result(best)}" if best else ""
        passed = min(self._budget, time.perf_counter() - self._started)
        self._bar.update(self._task, completed=passed, description=candidate.label, best=text)
        self._bar.refresh()


def _result(trial: Trial) -> str:
    if not trial.measured:
        return trial.error or "not measured"
    size = trial.candidate.frames_per_batch
    return f"{short(trial.frames_per_second)} frames/s in batches of {size:,}"


# Share of the time from which on waiting is worth a sentence.
_MUCH = 0.1
# Share of the processors from which on other programs change the figures.
_BUSY = 0.5


def reason(trials: Sequence[Trial], best: Trial) -> str:
    """Returns one to three sentences about the best layout.

    Args:
        trials: results of all layouts.
        best: result of the layout that is recommended.
    """
    sentences = [_comparison(trials, best), _cause(trials, best), _waiting(best)]
    missing = sum(1 for trial in trials if not trial.measured and trial.error is None)
    if missing:
        sentences.append(
            f"{plural(missing, 'layout')} of {len(trials)} could not be measured in time: a larger "
            "budget compares more."
        )
    return " ".join(filter(None, sentences))


def busy(load: float, cores: int) -> str:
    """Returns a sentence about other programs that the search competed with, or an empty text.

    Args:
        load: load average over the last minute, when the search began.
        cores: number of processors.

    Examples:
        >>> busy(0.2, 2)
        ''
        >>> busy(3.0, 2)
        'Other programs were busy when the search began (load 3.0 on 2 cores): measure again later.'
    """
    if load <= _BUSY * cores:
        return ""
    return (
        f"Other programs were busy when the search began (load {load:.1f} on "
        f"{plural(cores, 'core')}): measure again later."
    )


def _comparison(trials: Sequence[Trial], best: Trial) -> str:
    base = _find(trials, workers=0, envs=1, env_processes=0)
    name = str(best.candidate)
    name = name[0].upper() + name[1:]
    verb = "collect" if best.candidate.workers > 1 else "collects"
    if base is None or base.candidate == best.candidate:
        # The same processes with batches of another size are no other layout.
        rest = [t for t in trials if t.measured and str(t.candidate) != str(best.candidate)]
        if not rest:
            return f"{name} is the only layout that was measured."
        other = max(rest, key=lambda trial: trial.frames_per_second)
        times = other.frames_per_second / best.frames_per_second
        ending = "no more than 3% faster" if times > 1 else f"at {times:.0%} of its speed"
        return (
            f"{name} {verb} {best.frames_per_second:,.0f} frames per second; the best of the other "
            f"layouts ({other.candidate}) is {ending}."
        )
    rate = _ratio(best.frames_per_second / base.frames_per_second)
    return f"{name} {verb} {rate} frames per second as {base.candidate}."


def _ratio(times: float) -> str:
    """Returns a ratio as the beginning of a comparison: ``... frames as``.

    Examples:
        >>> [_ratio(times) for times in (0.9, 1.05, 2.5)]
        ['about as many', '1.05 times as many', '2.5 times as many']
    """
    if times < 1 + TIE:
        return "about as many"
    return f"{times:.2f} times as many" if times < 1.2 else f"{times:.1f} times as many"


def _cause(trials: Sequence[Trial], best: Trial) -> str:
    """Returns a sentence about what the processes divide, or what one call saves."""
    chosen = best.candidate
    processes = chosen.workers or chosen.env_processes
    if not processes:
        return _cause_of_batch(trials, best)
    # The same environments, but all in one process.
    alone = chosen.envs if chosen.workers else chosen.envs // chosen.env_processes
    one = _find(trials, workers=0, envs=alone, env_processes=0)
    if one is None or one.env_share is None:
        return ""
    times, envs = best.frames_per_second / one.frames_per_second, plural(alone, "environment")
    # The comparison with one environment has just been made.
    effect = f", and collect {_ratio(times)} frames as one process with {envs}" if alone > 1 else ""
    if chosen.workers:
        return (
            f"In one process, the environment takes {one.env_share:.0%} of the time, and the "
            f"policy and the collector take the rest. {plural(processes, 'worker').capitalize()} "
            f"divide all of this{effect}."
        )
    return (
        f"In one process, the environment takes {one.env_share:.0%} of the time; "
        f"{processes} processes divide this share, while the policy acts once for all "
        f"environments{effect}."
    )


def _cause_of_batch(trials: Sequence[Trial], best: Trial) -> str:
    base = _find(trials, workers=0, envs=1, env_processes=0)
    if base is None or best.candidate.envs == 1 or base.env_share is None:
        return ""
    return (
        f"With one environment, {1 - base.env_share:.0%} of the time goes to the policy and the "
        f"collector, which now work once for {best.candidate.envs} environments."
    )


def _waiting(best: Trial) -> str:
    idle = best.shares.get("idle_share", 0.0)
    if not best.candidate.workers or not idle >= _MUCH:
        return ""
    return f"Its workers wait for {idle:.0%} of the time."


def _find(trials: Sequence[Trial], **numbers: int) -> Trial | None:
    """Returns the fastest measured trial whose candidate has these numbers."""
    found = [trial for trial in trials if trial.measured and _has(trial.candidate, numbers)]
    return max(found, key=lambda trial: trial.frames_per_second, default=None)


def _has(candidate: Candidate, numbers: dict[str, int]) -> bool:
    changes: dict[str, int] = numbers
    return replace(candidate, **changes) == candidate  # type: ignore[arg-type]


# Values whose repr can be used as code.
_PLAIN = (bool, int, float, str, type(None))
# Code for an infinite number, whose repr is not code.
_INFINITY = "float('inf')"
# Public modules of the objects that are shown as calls of their classes.
_MODULES: dict[type, str] = {
    FrameStack: "trawl.envs",
    NormalizeObservation: "trawl.collectors",
    NormalizeReward: "trawl.collectors",
}


def code_of(
    candidate: Candidate,
    source: Any,
    policy: Any,
    options: Mapping[str, Any],
) -> str:
    """Returns Python code that makes a collector, and collects a batch.

    Args:
        candidate: the layout.
        source: the source of one environment. An id is shown as it is, other sources as
            ``make_env``.
        policy: the policy; shown as ``policy``, unless it is None.
        options: further options. Plain values, stacks and normalisation are shown; a policy
            factory is shown as ``make_policy``, and other values by the option's name.

    Examples:
        >>> one = Candidate(workers=2, envs=4, frames_per_batch=800, sync=False)
        >>> print(code_of(one, "CartPole-v1", None, {}))
        from trawl import MultiAsyncCollector
        collector = MultiAsyncCollector([['CartPole-v1'] * 4] * 2, frames_per_batch=800)
        batch = collector.next()
    """
    name = "Collector"
    if candidate.workers:
        name = "MultiSyncCollector" if candidate.sync else "MultiAsyncCollector"
    env = repr(source) if isinstance(source, str) else "make_env"
    rest = candidate.chosen(options)
    names = [name]
    if candidate.env_processes:
        names.append("ParallelEnv")
        env = _parallel(candidate, env, rest.pop("create_env_kwargs", None))
    elif candidate.envs > 1:
        env = f"[{env}] * {candidate.envs}"
    if candidate.workers:
        env = f"[{env}] * {candidate.workers}"
    arguments = [env, *([] if policy is None else ["policy"])]
    arguments.append(f"frames_per_batch={candidate.frames_per_batch}")
    if candidate.prefetch:
        arguments.append(f"prefetch={candidate.prefetch}")
    arguments += (f"{option}={_text(option, value)}" for option, value in rest.items())
    kinds = {type(one) for one in rest.values()} & _MODULES.keys()
    imports = sorted(f"from {_MODULES[kind]} import {kind.__name__}" for kind in kinds)
    return "\n".join(
        [
            *imports,
            f"from trawl import {', '.join(names)}",
            f"collector = {name}({', '.join(arguments)})",
            "batch = collector.next()",
        ]
    )


def _parallel(candidate: Candidate, env: str, kwargs: Any) -> str:
    each = candidate.envs // candidate.env_processes
    more = f", envs_per_worker={each}" if each > 1 else ""
    if kwargs:
        more += f", create_env_kwargs={_text('create_env_kwargs', kwargs)}"
    return f"ParallelEnv({candidate.envs}, {env}{more})"


def _text(option: str, value: Any) -> str:
    if option == "policy_factory":
        return "make_policy"
    if type(value) in _MODULES:
        return _call(value)
    return repr(value) if _is_plain(value) else option


def _call(value: Any) -> str:
    """Returns the call that makes an object of options, without arguments that are defaults."""
    given = [(field, getattr(value, field.name)) for field in fields(value)]
    arguments = [
        f"{field.name}={_INFINITY if each == math.inf else repr(each)}"
        for field, each in given
        if field.default is MISSING or each != field.default
    ]
    return f"{type(value).__name__}({', '.join(arguments)})"


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
