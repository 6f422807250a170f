"""Number of torch threads in this process while workers use the cores."""

from __future__ import annotations

import torch

# For each open collector, its workers and the threads it asked for (None: one less per worker).
_open: dict[int, tuple[int, int | None]] = {}
_before: list[int] = []


def take_threads(owner: object, workers: int, threads: int | None) -> None:
    """Leaves cores to the workers of a collector, until :func:`give_threads_back`.

    Args:
        owner: the collector.
        workers: number of its workers.
        threads: number of threads for this process; None for one less for each worker.
    """
    if not _open:
        _before[:] = [torch.get_num_threads()]
    _open[id(owner)] = workers, threads
    _apply()


def give_threads_back(owner: object) -> None:
    """Takes back the cores of a collector whose workers have ended."""
    if _open.pop(id(owner), None) is not None:
        _apply()


def _apply() -> None:
    """Applies the request of the newest open collector; without any, the original number."""
    left = _before[0] - sum(workers for workers, _ in _open.values())
    asked = [threads for _, threads in _open.values()]
    torch.set_num_threads(max(1, left) if not asked or asked[-1] is None else asked[-1])
