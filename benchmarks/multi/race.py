"""How many-process contenders are measured: in turns, each in a process of its own."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from harness import HAND, TRAWL, check_same_work
from multi.host import SAID, Contestant, Host

Values = dict[str, list[float]]


@dataclass(frozen=True)
class Measure:
    """Something that is measured of each contender, and whether less of it is better."""

    unit: str
    less: bool = False
    digits: int = 0

    def better(self, one: float, other: float) -> float:
        """How many times as good `one` is."""
        return other / one if self.less else one / other


SPEED = Measure("frames/s")


@dataclass(frozen=True)
class Contender:
    """Somebody who can do the work.

    Attributes:
        name: Shown in the report.
        build: Makes the contestant, in a process of its own; `ImportError` leaves it out.
        note: How it is configured.
        may_fail: A failure leaves it out, and is reported.
    """

    name: str
    build: Callable[[], Contestant]
    note: str = ""
    may_fail: bool = False


@dataclass(frozen=True)
class Goal:
    """Trawl's `measure` shall reach `bound`, or be `bound` times as good as that of `against`."""

    measure: str
    bound: float
    against: str = ""


@dataclass(frozen=True)
class Race:
    """One kind of work, who does it, what is measured of it, and what was promised.

    Attributes:
        fresh: What counts is how a contender starts: in each round it is made anew.
        stretch: A turn is so many times as long as other races' turns.
        patience: Seconds without an answer after which a contender has failed; None: no limit.
    """

    name: str
    title: str
    contenders: tuple[Contender, ...]
    measures: dict[str, Measure] = field(default_factory=lambda: {"speed": SPEED})
    goals: tuple[Goal, ...] = ()
    fresh: bool = False
    stretch: float = 1.0
    patience: float | None = None


@dataclass(frozen=True)
class Verdict:
    """What became of a goal, in each round; `wanted` is what it asks for."""

    goal: Goal
    wanted: str
    rounds: list[float]
    met: bool

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


@dataclass
class Result:
    """What was measured of each contender of a race, one number per round."""

    race: Race
    values: dict[str, Values] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, measured: dict[str, float]) -> None:
        """Keep what one round measured of a contender."""
        kept = self.values.setdefault(name, {})
        for measure, value in measured.items():
            kept.setdefault(measure, []).append(value)

    def median(self, name: str, measure: str) -> float | None:
        """The median of the rounds; None for what was not measured."""
        rounds = self.values.get(name, {}).get(measure)
        return statistics.median(rounds) if rounds else None

    def ratios(self, measure: str, to: str, name: str = TRAWL) -> list[float]:
        """How many times as good as `to` the contender `name` was in each round.

        Nothing, if one of them did not take part, or if it is nothing that one of them needs.
        """
        ours, theirs = (self.values.get(who, {}).get(measure, []) for who in (name, to))
        if not (ours and theirs and all(ours) and all(theirs)):
            return []
        better = self.race.measures[measure].better
        return [better(one, other) for one, other in zip(ours, theirs, strict=True)]

    def verdicts(self) -> list[Verdict]:
        """What became of the goals whose contenders took part."""
        verdicts = [self._judge(goal) for goal in self.race.goals]
        return [verdict for verdict in verdicts if verdict is not None]

    def _judge(self, goal: Goal) -> Verdict | None:
        measure = self.race.measures[goal.measure]
        if goal.against:
            rounds, at_most = self.ratios(goal.measure, goal.against), False
            wanted = f"≥ {goal.bound:g} × {goal.against}"
        else:
            rounds, at_most = self.values.get(TRAWL, {}).get(goal.measure, []), measure.less
            wanted = f"{'≤' if at_most else '≥'} {goal.bound:g} {measure.unit}"
        if not rounds:
            return None
        median = statistics.median(rounds)
        met = median <= goal.bound if at_most else median >= goal.bound
        return Verdict(goal, wanted, rounds, met)


def measure(race: Race, rounds: int, seconds: float) -> Result:
    """Let the contenders work in turns, `rounds` times `seconds` each."""
    return _starts(race, rounds) if race.fresh else _turns(race, rounds, seconds * race.stretch)


def _turns(race: Race, rounds: int, seconds: float) -> Result:
    result = Result(race)
    hosts: dict[str, Host] = {}
    try:
        for contender in race.contenders:
            host = _open(contender, result)
            if host is not None:
                hosts[contender.name] = host
                result.add(contender.name, _measured(race, host.facts))
        _check(race, hosts)
        for name in list(hosts):
            _turn(result, hosts, name, seconds)  # warm-up: caches, lazy initialisation, page faults
        for turn in range(rounds):
            for name in list(hosts) if turn % 2 == 0 else list(reversed(hosts)):
                measured = _turn(result, hosts, name, seconds)
                if measured is not None:
                    result.add(name, _measured(race, measured))
    finally:
        for host in hosts.values():
            host.close()
    return result


def _turn(
    result: Result, hosts: dict[str, Host], name: str, seconds: float
) -> dict[str, float] | None:
    """What a contender measured; None if it failed and may: it is out then."""
    try:
        return hosts[name].turn(seconds)
    except RuntimeError as error:
        contender = next(one for one in result.race.contenders if one.name == name)
        _failed(contender, result, error)
        hosts.pop(name).close()
        return None


def _failed(contender: Contender, result: Result, error: RuntimeError) -> None:
    """A contender failed: an error for all, unless it may."""
    if not contender.may_fail:
        raise RuntimeError(f"{result.race.name}, {contender.name}: {error}") from None
    lines = [line for line in str(error).partition(SAID)[0].splitlines() if line.strip()]
    result.missing[contender.name] = f"failed: {lines[-1]}"
    result.values.pop(contender.name, None)


def _starts(race: Race, rounds: int) -> Result:
    result = Result(race)
    for turn in range(rounds):
        for contender in race.contenders if turn % 2 == 0 else reversed(race.contenders):
            if contender.name in result.missing:
                continue
            host = _open(contender, result)
            if host is not None:
                result.add(contender.name, _measured(race, host.facts))
                host.close()
    return result


def _open(contender: Contender, result: Result) -> Host | None:
    """The contender in its process; None if it is not installed."""
    try:
        return Host(contender.build, result.race.patience)
    except ImportError as error:
        result.missing[contender.name] = str(error)
    except RuntimeError as error:
        _failed(contender, result, error)
    return None


def _measured(race: Race, values: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in values.items() if key in race.measures}


def _check(race: Race, hosts: dict[str, Host]) -> None:
    """Those who deliver batches deliver at least what the hand-written loops do."""
    layouts = {name: host.layout for name, host in hosts.items() if host.layout}
    if HAND in layouts:
        check_same_work(race.name, layouts)
