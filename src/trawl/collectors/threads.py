"""Threads of torch in this process, while workers have the cores."""

from __future__ import annotations

import torch

# What each collector that is open has asked for: how many, or None for those its workers leave.
_open: dict[int, tuple[int, int | None]] = {}
_before: list[int] = []


def take_threads(owner: object, workers: int, threads: int | None) -> None:
    """Leaves cores to the workers of a collector, until :func:`give_threads_back`.

    Args:
        owner: the collector.
        workers: how many it has.
        threads: threads that this process is to have; None for one less for each worker.
    """
    if not _open:
        _before[:] = [torch.get_num_threads()]
    _open[id(owner)] = workers, threads
    _apply()


def give_threads_back(owner: object) -> None:
    """The workers of a collector are gone."""
    if _open.pop(id(owner), None) is not None:
        _apply()


def _apply() -> None:
    """What was asked for last counts; with nobody open, it is as it was before the first."""
    left = _before[0] - sum(workers for workers, _ in _open.values())
    asked = [threads for _, threads in _open.values()]
    torch.set_num_threads(max(1, left) if not asked or asked[-1] is None else asked[-1])
