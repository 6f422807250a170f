"""Statistics of a collector, as a monitor reads them."""

from __future__ import annotations

import threading
from typing import Any

_thread = threading.local()


def full_stats(collector: Any) -> dict[str, Any]:
    """Returns a collector's ``stats()``, with those of each worker if it has workers."""
    view = ("both",) if getattr(collector, "num_workers", 0) else ()
    facts: dict[str, Any] = collector.stats(*view)
    return facts


def poll(collector: Any) -> dict[str, Any]:
    """Returns :func:`full_stats` for an observer, to whom errors of the collection don't belong.

    ``stats()`` raises an error that ended collection in the background, once. Here, the error is
    left for the learner.
    """
    _thread.polls = True
    try:
        return dict(full_stats(collector))
    finally:
        _thread.polls = False


def is_polling() -> bool:
    """Returns True while this thread is in :func:`poll`."""
    return getattr(_thread, "polls", False)
