"""Exceptions that happened elsewhere."""

from __future__ import annotations

import bdb
import pickle
import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle

from trawl.errors import WorkerError

_NO_DEBUGGER = (
    ". A debugger (breakpoint()) has no terminal in another process: collect in this one, by "
    'Collector, or by start_method="inline" with workers'
)
_OF_OSERROR = ("errno", "strerror", "filename", "filename2")


@dataclass(frozen=True)
class Failure:
    """An exception, in a form that travels.

    Attributes:
        summary: its type and message, in a line.
        text: the traceback as it would have been printed over there.
        pickled: the exception itself, or None if it can't be pickled.
    """

    summary: str
    text: str
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describes an exception that was just caught."""
        text = "".join(traceback.format_exception(error))
        summary = "".join(traceback.format_exception_only(type(error), error)).strip()
        return cls(
            summary.splitlines()[0] if summary else type(error).__name__,
            text,
            _pickled(error),
        )

    def original(self) -> BaseException | None:
        """The exception as it was, or None if it can't be had."""
        if self.pickled is None:
            return None
        try:
            error = pickle.loads(self.pickled)
        except Exception:  # what comes from a user's class may fail in any way
            return None
        return error if isinstance(error, BaseException) else None

    def error(self, where: str) -> WorkerError:
        """The exception to raise here: a :class:`WorkerError` that is also of the original type.

        Args:
            where: whom it happened to: ``"worker 3"``.
        """
        original = self.original()
        hint = _NO_DEBUGGER if isinstance(original, bdb.BdbQuit) else ""
        message = f"in {where}: {self.summary}{hint}\n\nThere it was:\n\n{self.text}"
        return _rebuilt(message, original)


def _pickled(error: BaseException) -> bytes | None:
    for form in (error, _Remains(error)):
        try:
            data: bytes = cloudpickle.dumps(form)
            pickle.loads(data)
        except Exception:  # an exception may hold anything
            continue
        return data
    return None


class _Remains:
    """An exception whose class can't be called as pickle does, or that holds what can't be sent.

    What comes out of the pickle is an exception of its class, with all that could be sent.
    """

    def __init__(self, error: BaseException) -> None:
        attributes = {name: v for name, v in vars(error).items() if _can_be_sent(v)}
        arguments = tuple(v if _can_be_sent(v) else repr(v) for v in error.args)
        self._parts = type(error), arguments, attributes

    def __reduce__(self) -> Any:
        return _put_together, self._parts


def _put_together(
    kind: type[BaseException], arguments: tuple[Any, ...], attributes: dict[str, Any]
) -> BaseException:
    error = kind.__new__(kind, *arguments)
    error.args = arguments
    vars(error).update(attributes)
    return error


def _can_be_sent(value: Any) -> bool:
    try:
        pickle.loads(cloudpickle.dumps(value))
    except Exception:  # it may be anything
        return False
    return True


def _rebuilt(message: str, original: BaseException | None) -> WorkerError:
    try:
        error = _kind(original)(message, original)
        for name, value in _attributes(original).items():
            setattr(error, name, value)
    except Exception:  # what a user's class does when it is made
        return WorkerError(message, original)
    return error


def _kind(original: BaseException | None) -> type[WorkerError]:
    """A class that both ``except WorkerError`` and ``except <the original's type>`` catch."""
    # An error that is raised in a generator must not seem to be the generator's end.
    if not isinstance(original, Exception) or isinstance(original, StopIteration):
        return WorkerError
    if isinstance(original, WorkerError):
        return type(original)
    kind = type(original)
    members = {
        # Tracebacks show these: the class looks as the original's does.
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__str__": _text,
        "__reduce__": _reduce,
        # The original's class may have properties of these names.
        "message": "",
        "original": None,
    }
    return type(kind.__name__, (WorkerError, kind), members)


def _attributes(original: BaseException | None) -> dict[str, Any]:
    """What those who catch an exception of this type may want to read, besides its message."""
    found = {
        name: value
        for name, value in getattr(original, "__dict__", {}).items()
        if name not in ("__notes__", "message", "original")
    }
    if isinstance(original, OSError):
        found |= {name: getattr(original, name) for name in _OF_OSERROR}
    return found


def _text(self: WorkerError) -> str:
    return self.message


def _reduce(self: WorkerError) -> Any:
    # Classes that were made here can't be found by their names.
    return _rebuilt, (self.message, self.original)
