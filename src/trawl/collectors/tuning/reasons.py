"""Sentences that explain, from the measured figures, why a layout is the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trawl.collectors.tuning.candidate import Candidate
from trawl.collectors.tuning.halving import TIE
from trawl.collectors.tuning.trial import Trial
from trawl.observe.formats import plural

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
