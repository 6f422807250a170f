"""How contenders are measured: in turns, in one process, each doing the same work.

A contender is a generator that collects one batch each time it is asked to. In every round each
contender works for the same time, and a round's ratio compares speeds of that round alone: what
else the machine is doing then burdens all of them alike. The median of the rounds is reported.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Literal

from tensordict import TensorDictBase

# The frames of one batch, and the batch where it is a TensorDict with the layout of a collector.
Delivery = tuple[int, TensorDictBase | None]
Source = Generator[Delivery, None, None]
Clock = Literal["wall", "cpu"]

TRAWL = "Trawl"
HAND = "hand-written loop"


@dataclass(frozen=True)
class Contender:
    """Somebody who can do the work of a case.

    Attributes:
        name: Shown in the report.
        build: Makes the source, whose first batch may raise `ImportError`: the contender is then
            left out.
        goal: Trawl shall be at least so many times as fast; None where nothing was promised.
        note: How the contender is configured.
    """

    name: str
    build: Callable[[], Source]
    goal: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Case:
    """One kind of work, and who does it."""

    name: str
    title: str
    contenders: tuple[Contender, ...]


@dataclass
class Result:
    """Frames per second of each contender of a case, one number per round."""

    case: Case
    speeds: dict[str, list[float]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def ratios(self, name: str, to: str) -> list[float]:
        """How many times as fast as `to` the contender `name` was in each round."""
        if name not in self.speeds or to not in self.speeds:
            return []
        return [a / b for a, b in zip(self.speeds[name], self.speeds[to], strict=True)]

    def ratio(self, name: str, to: str) -> float | None:
        """The median of `ratios`, or None where one of the two is missing."""
        ratios = self.ratios(name, to)
        return statistics.median(ratios) if ratios else None


def measure(case: Case, rounds: int, seconds: float, clock: Clock = "wall") -> Result:
    """Let the contenders of `case` work in turns, `rounds` times `seconds` each."""
    result = Result(case)
    sources = _open(case, result)
    try:
        for source in sources.values():
            speed(source, seconds, clock)  # warm-up: caches, lazy initialisation, page faults
        result.speeds = {name: [] for name in sources}
        for turn in range(rounds):
            for name in list(sources) if turn % 2 == 0 else reversed(sources):
                result.speeds[name].append(speed(sources[name], seconds, clock))
    finally:
        for source in sources.values():
            source.close()
    return result


def _open(case: Case, result: Result) -> dict[str, Source]:
    """Start the contenders that are installed, and check that they deliver the same things."""
    sources: dict[str, Source] = {}
    layouts: dict[str, dict[str, str]] = {}
    for contender in case.contenders:
        try:
            source = contender.build()
            _, batch = next(source)
        except ImportError as error:
            if contender.name == TRAWL:
                raise  # the others alone would answer nothing
            result.missing[contender.name] = str(error)
            continue
        sources[contender.name] = source
        if batch is not None:
            layouts[contender.name] = layout_of(batch)
    check_same_work(case.name, layouts)
    return sources


def layout_of(batch: TensorDictBase) -> dict[str, str]:
    """Shape and dtype of every leaf."""
    return {
        ".".join((key,) if isinstance(key, str) else key): f"{list(leaf.shape)} {leaf.dtype}"
        for key, leaf in batch.items(True, True)
    }


def check_same_work(case: str, layouts: dict[str, dict[str, str]]) -> None:
    """Who delivers less than the hand-written loop has not done the same work."""
    wanted = layouts.get(HAND, {})
    for name, layout in layouts.items():
        for key, leaf in wanted.items():
            if key != "collector.mask" and layout.get(key) != leaf:
                raise ValueError(
                    f"case {case!r}: {name} delivers {layout.get(key)} as {key!r}, "
                    f"but the work is to deliver {leaf}"
                )


def speed(source: Source, seconds: float, clock: Clock) -> float:
    """Frames per second over about `seconds` of work."""
    now = time.perf_counter if clock == "wall" else time.process_time
    tidy()
    frames = 0
    start = now()
    while (elapsed := now() - start) < seconds:
        frames += next(source)[0]
    return frames / elapsed


def tidy() -> None:
    """Nobody pays for collecting what others left behind, and everybody pays for their own."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
