"""CPU cores on which processes and threads may run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from trawl.checks import check_number

Affinity = Sequence[Sequence[int]] | Callable[[int], Sequence[int]]


def affinity_of(option: Affinity | None, count: int) -> Callable[[int], Sequence[int] | None]:
    """Returns a function that returns the cores of a process; None stands for all cores.

    Args:
        option: the user's ``worker_affinity``.
        count: number of processes.

    Raises:
        TypeError: if the option is neither a sequence nor a function.
        ValueError: if a sequence has the wrong length, or if a core does not exist.
    """
    if option is None:
        return lambda _: None
    if not callable(option):
        if isinstance(option, (str, bytes)) or not isinstance(option, Sequence):
            raise TypeError(
                "worker_affinity must be a sequence with the cores of each process, or a function, "
                f"but it is {option!r}"
            )
        if len(option) != count:
            raise ValueError(
                f"worker_affinity has {len(option)} entries, but there are {count} processes"
            )
        option = option.__getitem__
    chosen = [
        check_cores(option(index), f"worker_affinity, process {index}") for index in range(count)
    ]
    return chosen.__getitem__


def check_cores(cores: Any, name: str) -> tuple[int, ...]:
    """Returns the cores as a tuple.

    Raises:
        TypeError: if ``cores`` is not a sequence of integers.
        ValueError: if there are none, or if this process may not use one of them.
    """
    if isinstance(cores, (str, bytes)) or not isinstance(cores, Iterable):
        raise TypeError(f"{name}: must be a sequence of core numbers, but it is {cores!r}")
    cores = [check_number(name, core, 0) for core in cores]
    usable = os.sched_getaffinity(0)
    if not cores or not usable.issuperset(cores):
        raise ValueError(
            f"{name}: must name cores that this process may use, {sorted(usable)}, but it is "
            f"{cores}"
        )
    return tuple(cores)
