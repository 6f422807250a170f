"""Successive halving: all candidates are measured briefly, and the better half goes on."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from trawl.extras.tuning.candidate import Candidate
from trawl.extras.tuning.trial import Clock, Measurement, Trial

Measure = Callable[[Candidate, float], Measurement]
# Number of candidates whose neighbours are tried.
FEW = 3
# Neighbours of one candidate that a plan expects.
_NEIGHBOURS = 2
# A candidate below this share of the best rate is dropped even if it is in the better half.
_HOPELESS = 0.5
# Longest measurement at a time, in seconds and in times of what the start of processes takes.
# Candidates take turns, so that what else the machine does burdens all of them alike.
_TURN_SECONDS, _TURN_STARTS = 0.7, 3.0
# Candidates within this share of the best rate count as equally fast; the simplest is chosen.
TIE = 0.03


def rounds_of(count: int) -> int:
    """Returns the number of rounds after which one of ``count`` candidates is left.

    Examples:
        >>> [rounds_of(count) for count in (1, 2, 3, 12)]
        [1, 1, 2, 4]
    """
    return max(1, math.ceil(math.log2(count))) if count else 0


def rounds_left(count: int, refines: bool) -> int:
    """Returns the number of rounds to come.

    Args:
        count: number of candidates in the next round.
        refines: True if the neighbours of the best few are still to be tried.
    """
    if not refines:
        return rounds_of(count)
    first = 1
    while math.ceil(count / 2) > FEW:
        count, first = math.ceil(count / 2), first + 1
    return first + rounds_of(FEW * (1 + _NEIGHBOURS))


def survivors(trials: Iterable[Trial]) -> list[Candidate]:
    """Returns the candidates that go on to the next round, the fastest first.

    Examples:
        >>> rates = [100, 90, 30, 80]
        >>> trials = [Trial(Candidate(frames_per_batch=n), n, 1.0) for n in rates]
        >>> [each.frames_per_batch for each in survivors(trials)]
        [100, 90]
    """
    measured = sorted(
        (trial for trial in trials if trial.measured),
        key=lambda trial: trial.frames_per_second,
        reverse=True,
    )
    half = measured[: math.ceil(len(measured) / 2)]
    least = _HOPELESS * half[0].frames_per_second if half else 0.0
    return [trial.candidate for trial in half if trial.frames_per_second >= least]


def choose(trials: Sequence[Trial], finalists: Sequence[Candidate]) -> Trial:
    """Returns the simplest of the candidates that are as fast as the best, but for a few percent.

    Args:
        trials: results of all candidates.
        finalists: candidates of the last round. The best of them sets the standard, because
            candidates that were dropped before were measured too briefly to beat it.
    """
    final = [trial for trial in trials if trial.measured and trial.candidate in finalists]
    top = max(final, key=lambda trial: trial.frames_per_second)
    equal = [
        trial
        for trial in trials
        if trial.frames_per_second >= (1 - TIE) * top.frames_per_second
        and trial.seconds >= top.seconds / 2
    ]
    return min([top, *equal], key=lambda trial: trial.candidate.complexity)


class Halving:
    """Search for the fastest candidate within a time budget.

    Args:
        measure: function that measures a candidate for a number of seconds, all included. An
            exception from it drops the candidate.
        budget: seconds for the search. A measurement that takes longer than it was given ends
            late, but none begins after the budget is used up, except if nothing was measured yet.
        neighbours: function that returns candidates close to a good one, or None.
        clock: function that returns the time in seconds.
        report: function that is called before each measurement, with its candidate, and after it,
            with the candidate's result.

    Attributes:
        trials: result of each candidate, in the order in which they were known.
        errors: exceptions with which candidates failed.
        finalists: candidates of the last round.
    """

    def __init__(
        self,
        measure: Measure,
        budget: float,
        *,
        neighbours: Callable[[Candidate], list[Candidate]] | None = None,
        clock: Clock = time.perf_counter,
        report: Callable[[Candidate | Trial], None] = lambda _: None,
    ) -> None:
        self._measure = measure
        self._neighbours = neighbours
        self._clock = clock
        self._end = clock() + budget
        self._report = report
        # Seconds that starts of processes took, and their number.
        self._starts = (0.0, 0)
        self._rounds: list[dict[Candidate, Measurement]] = []
        self.trials: dict[Candidate, Trial] = {}
        self.errors: list[Exception] = []
        self.finalists: list[Candidate] = []

    def run(self, candidates: Sequence[Candidate]) -> Trial:
        """Searches, and returns the result of the candidate that is chosen.

        Raises:
            RuntimeError: if all candidates failed; its cause is the first failure.
        """
        refine = self._neighbours
        field = self._enter(candidates)
        while field and not self._is_over():
            left = max(0.0, self._end - self._clock())
            self._round(field, left / rounds_left(len(field), refine is not None))
            best = survivors(self.trials[each] for each in field)
            # With the time over, a round may end before all, or even any, were measured.
            self.finalists = [each for each in field if each in self._rounds[-1]] or [
                each for each in self.finalists if self.trials[each].measured
            ]
            if refine is not None and len(best) <= FEW:
                best += self._enter(new for one in best for new in refine(one))
                refine = None
            field = best if len(best) > 1 else []
        if not self.finalists:
            first = self.errors[0]
            raise RuntimeError(
                "no layout could be measured; the first one failed: "
                f"{type(first).__name__}: {first}"
            ) from first
        return choose(list(self.trials.values()), self.finalists)

    def _is_over(self) -> bool:
        """Returns True if the budget is used up, and something was measured."""
        return self._clock() >= self._end and any(self._rounds)

    def _enter(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        found = [each for each in dict.fromkeys(candidates) if each not in self.trials]
        self.trials.update((each, Trial(each)) for each in found)
        return found

    def _round(self, field: Sequence[Candidate], seconds: float) -> None:
        """Measures all candidates, in turn, for about the given number of seconds in total."""
        self._rounds.append({})
        end = min(self._clock() + seconds, self._end)
        order, left = list(field), self._turns(seconds / len(field))
        while left:
            for index, candidate in enumerate(order):
                if self._is_over():
                    break
                share = (end - self._clock()) / (left * len(order) - index)
                self._try(candidate, max(0.0, share))
            # Every second turn runs backwards, which cancels a steady change of conditions.
            order = [each for each in order[::-1] if self.trials[each].error is None]
            # By now it is known how long processes take to start.
            seconds = end - self._clock()
            goes_on = left > 1 and seconds > 0 and bool(order)
            left = self._turns(seconds / len(order)) if goes_on else 0
        for candidate, rate in adjusted_rates(self._rounds).items():
            self.trials[candidate] = replace(self.trials[candidate], frames_per_second=rate)

    def _turns(self, seconds: float) -> int:
        """Returns the number of measurements into which to divide a candidate's time."""
        total, count = self._starts
        start = total / count if count else 0.0
        return max(1, math.ceil(seconds / max(_TURN_SECONDS, _TURN_STARTS * start)))

    def _try(self, candidate: Candidate, seconds: float) -> None:
        self._report(candidate)
        began = self._clock()
        trial = self.trials[candidate]
        try:
            found = self._measure(candidate, seconds)
        except Exception as error:
            self.errors.append(error)
            trial = trial.fail(error)
            for each in self._rounds:
                each.pop(candidate, None)
        else:
            current = self._rounds[-1]
            current[candidate] = current[candidate] + found if candidate in current else found
            trial = trial.add(found)
            took = self._clock() - began - found.seconds
            self._starts = (self._starts[0] + max(0.0, took), self._starts[1] + 1)
        self.trials[candidate] = trial
        self._report(trial)


Round = Mapping[Candidate, Measurement]


def adjusted_rates(rounds: Sequence[Round]) -> dict[Candidate, float]:
    """Returns the rates of candidates, adjusted to the conditions of the last round.

    Other programs may make the machine faster or slower during a search, which affects all
    candidates of a round alike. Candidates that were measured in two successive rounds show by
    how much the conditions changed.

    Args:
        rounds: measurements by candidate, for each round.

    Examples:
        >>> a, b = (Candidate(frames_per_batch=n) for n in (1, 2))
        >>> one = {a: Measurement(300, 1.0), b: Measurement(200, 1.0)}
        >>> other = {a: Measurement(150, 1.0)}  # half as fast as before
        >>> rates = adjusted_rates([one, other])
        >>> {each.frames_per_batch: round(rate) for each, rate in rates.items()}
        {1: 150, 2: 100}
    """
    sums: dict[Candidate, float] = {}
    seconds: dict[Candidate, float] = {}
    for found, change in zip(rounds, _changes(rounds), strict=True):
        for candidate, measurement in found.items():
            time = measurement.seconds
            level = math.log(measurement.rate) + change
            sums[candidate] = sums.get(candidate, 0.0) + time * level
            seconds[candidate] = seconds.get(candidate, 0.0) + time
    return {candidate: math.exp(total / seconds[candidate]) for candidate, total in sums.items()}


def _changes(rounds: Sequence[Round]) -> list[float]:
    """Returns the logarithm of the speed-up from each round to the last round."""
    changes = [0.0]
    for before, after in reversed(list(pairwise(rounds))):
        both = [math.log(after[each].rate / before[each].rate) for each in before if each in after]
        changes.append(changes[-1] + (statistics.fmean(both) if both else 0.0))
    return changes[::-1][: len(rounds)]
