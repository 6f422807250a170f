"""Exceptions of this library, and what is done to others."""

from __future__ import annotations

import builtins
from typing import Any

# Groups of exceptions, which Python has since 3.11.
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())


class WorkerError(Exception):
    """Something went wrong in a worker.

    An exception that a worker raised comes as a subclass that is of the original type as well:
    ``except ValueError`` catches it if the environment raised a ``ValueError``.

    Attributes:
        message: what happened where, with the traceback of the worker if there is one.
        original: the exception as the worker raised it, or None.
    """

    def __new__(cls, message: str = "", original: BaseException | None = None) -> WorkerError:
        """An instance, whatever the constructor of the original's type takes."""
        if isinstance(original, _GROUP) and issubclass(cls, _GROUP):
            return super().__new__(cls, message, original.exceptions)
        if issubclass(cls, MemoryError):
            # It has a constructor of its own, which is for no class with another base.
            return Exception.__new__(cls, message)
        # Some types (OSError) would read the second argument as theirs.
        return super().__new__(cls, message)

    def __init__(self, message: str = "", original: BaseException | None = None) -> None:
        Exception.__init__(self, message)
        self.message = message
        self.original = original

    def __str__(self) -> str:
        return self.message


class WorkerDied(WorkerError):
    """A worker died, and is not to be replaced again."""


def add_note(error: BaseException, note: str) -> None:
    """Adds a line that the traceback shows (Python 3.10 shows it in the message instead)."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
