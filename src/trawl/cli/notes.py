"""Warnings as lines on stderr."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from trawl.cli.errors import one_line

_told: set[str] = set()


def tell(message: str) -> None:
    """Prints a line on stderr."""
    print(f"trawl: {message}", file=sys.stderr, flush=True)


@contextmanager
def notes() -> Iterator[None]:
    """Within it a warning is a line on stderr, and not also a line of code."""
    _told.clear()
    with warnings.catch_warnings():
        _listen()
        yield


def for_workers() -> Callable[[], None]:
    """What makes it so in another process, which doesn't say again what was said here."""
    return partial(_listen, frozenset(_told))


def _listen(known: Iterable[str] = ()) -> None:
    _told.update(known)

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        note = one_line(str(message))
        if note not in known:
            _told.add(note)
            tell(f"note: {note}")

    if not sys.warnoptions:
        warnings.simplefilter("default")
        for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", category)
        # So it says that an environment is out of date.
        warnings.filterwarnings("default", category=DeprecationWarning, module="gymnasium")
    warnings.showwarning = show
