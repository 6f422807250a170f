"""Exceptions that Trawl raises, and functions that add notes to exceptions."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# The base class of exception groups, which exist since Python 3.11.
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())
# Beginning of the note on an exception that a reset raised.
_RESETTING = "while resetting"


class WorkerError(Exception):
    """Raised if something goes wrong in a worker.

    Where possible, the class of the error is a subclass of both this class and the type of the
    exception that the worker raised. If the environment raised a ``ValueError``, ``except
    ValueError`` therefore catches the error.

    Attributes:
        message: the error and the place where it happened, with the worker's traceback if there
            is one.
        original: the exception as the worker raised it, or None.
    """

    def __new__(cls, message: str = "", original: BaseException | None = None) -> WorkerError:
        """Creates an instance, whatever arguments the original type's constructor takes."""
        if isinstance(original, _GROUP) and issubclass(cls, _GROUP):
            return super().__new__(cls, message, original.exceptions)
        if issubclass(cls, MemoryError):
            # `MemoryError.__new__` refuses classes that also have another exception as a base.
            return Exception.__new__(cls, message)
        # Without `original`, because some types, such as OSError, interpret a second argument.
        return super().__new__(cls, message)

    def __init__(self, message: str = "", original: BaseException | None = None) -> None:
        Exception.__init__(self, message)
        self.message = message
        self.original = original

    def __str__(self) -> str:
        return self.message


class WorkerDied(WorkerError):
    """Raised if a worker died and is not replaced."""


class StateError(ValueError, RuntimeError):
    """Raised if a state or a checkpoint is damaged, does not fit, or can't be restored.

    The message names the file, if the state comes from one, and the entry. The object that was to
    load the state is as it was before.
    """


class MissingEntryError(StateError, KeyError):
    """Raised if a state lacks an entry that is needed."""

    __str__ = Exception.__str__


class EnvStateError(StateError):
    """Raised if the state of an environment can't be captured or restored."""


@contextmanager
def env_errors() -> Iterator[None]:
    """Turns errors of the schema into errors about the state of an environment."""
    try:
        yield
    except EnvStateError:
        raise
    except StateError as error:
        raise EnvStateError(str(error)) from None


@contextmanager
def named_state_errors(place: object) -> Iterator[None]:
    """Adds the file, or the place, that a state comes from to errors about it."""
    try:
        yield
    except EnvStateError as error:
        raise EnvStateError(f"{place}: {error}") from error
    except StateError as error:
        raise StateError(f"{place}: {error}") from error


@contextmanager
def resetting(env: Any, hint: str = "") -> Iterator[None]:
    """Adds a note to each exception that is raised while an environment is reset in the context.

    Args:
        env: the environment, which the note names.
        hint: text to append to the note.
    """
    try:
        yield
    except Exception as error:
        name = repr(env)
        if "\n" in name:  # for example, TorchRL's TransformedEnv
            name = type(env).__name__
        add_note(error, f"{_RESETTING} {name}{hint}")
        raise


def raised_by_reset(error: BaseException) -> bool:
    """Returns True if an environment's reset raised the error, here or in a worker."""
    cause = error
    if isinstance(error, WorkerError) and error.original is not None:
        cause = error.original
    # On Python 3.10, the notes are in the message.
    notes = [*getattr(cause, "__notes__", []), *str(cause).splitlines()]
    return any(note.startswith(_RESETTING) for note in notes)


def add_note(error: BaseException, note: str) -> None:
    """Adds a note to an exception.

    Python 3.10 has no notes. There, the text is added to the exception's message.
    """
    if hasattr(error, "add_note"):
        error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
