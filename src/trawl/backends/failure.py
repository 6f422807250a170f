"""Exceptions from workers, in a form that can be sent to the driver and raised there."""

from __future__ import annotations

import bdb
import pickle
import traceback
from dataclasses import dataclass
from typing import Any

import cloudpickle

from trawl.errors import WorkerError

_NO_DEBUGGER = (
    ". A debugger (breakpoint()) has no terminal in another process. To debug, collect in this "
    'process: use Collector, or start_method="inline" with workers'
)
# Longest text, and longest line, of an exception that is sent.
_MOST_TEXT, _MOST_LINE = 100_000, 2_000
# Largest exception that is sent as it is, in bytes.
_MOST_BYTES = 1 << 20
_OF_OSERROR = ("errno", "strerror", "filename", "filename2")


@dataclass(frozen=True)
class Failure:
    """Exception in a form that can be sent to another process.

    Attributes:
        summary: the type and message, in one line.
        text: the traceback, as Python would have printed it in the worker, without the middle of a
            very long one.
        pickled: the exception itself, or None if it can't be pickled. Very long texts among its
            arguments are cut as well.
    """

    summary: str
    text: str
    pickled: bytes | None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Makes a :class:`Failure` from an exception that was just caught."""
        text = "".join(traceback.format_exception(error))
        summary = "".join(traceback.format_exception_only(type(error), error)).strip()
        first = summary[: _MOST_TEXT + 1].splitlines()[0] if summary else type(error).__name__
        return cls(shortened(first, _MOST_LINE), shortened(text, _MOST_TEXT), _pickled(error))

    def original(self) -> BaseException | None:
        """Returns the original exception, or None if it can't be restored."""
        if self.pickled is None:
            return None
        try:
            error = pickle.loads(self.pickled)
        except Exception:  # a user's class may fail in any way
            return None
        return error if isinstance(error, BaseException) else None

    def error(self, where: str) -> WorkerError:
        """Returns the :class:`WorkerError` to raise in this process.

        If possible, this error is also an instance of the original exception's type.

        Args:
            where: the place where the exception was raised, such as ``"worker 3"``.
        """
        original = self.original()
        hint = _NO_DEBUGGER if isinstance(original, bdb.BdbQuit) else ""
        message = f"in {where}: {self.summary}{hint}\n\nOriginal traceback:\n\n{self.text}"
        return _rebuilt(message, original)


def _pickled(error: BaseException) -> bytes | None:
    for form in (error, _Remains(error)):
        try:
            data: bytes = cloudpickle.dumps(form)
            if len(data) > _MOST_BYTES:
                continue
            pickle.loads(data)
        except Exception:  # an exception may refer to any object
            continue
        return data
    return None


def shortened(text: str, most: int) -> str:
    """Returns a text; if it has more than ``most`` characters, without its middle."""
    left_out = len(text) - most
    if left_out <= 0:
        return text
    half = most // 2
    return f"{text[:half]} [... {left_out} characters left out ...] {text[-half:]}"


class _Remains:
    """Replacement for an exception that can't be pickled as it is.

    The exception's class may need other arguments than pickle passes, or the exception may refer to
    objects that can't be sent or are very large. The unpickled exception has the same class. It
    lacks the attributes that can't be sent. Each argument that can't be sent is replaced with its
    ``repr``, and very long texts are cut.
    """

    def __init__(self, error: BaseException) -> None:
        attributes = {name: v for name, v in vars(error).items() if _can_be_sent(v)}
        arguments = tuple(
            v if _can_be_sent(v) else shortened(v if isinstance(v, str) else repr(v), _MOST_TEXT)
            for v in error.args
        )
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
    if isinstance(value, str) and len(value) > _MOST_TEXT:
        return False
    try:
        data = cloudpickle.dumps(value)
        pickle.loads(data)
    except Exception:  # the value may be any object
        return False
    return len(data) <= _MOST_BYTES


def _rebuilt(message: str, original: BaseException | None) -> WorkerError:
    try:
        error = _kind(original)(message, original)
        for name, value in _attributes(original).items():
            setattr(error, name, value)
    except Exception:  # a user's class may raise anything when it is called
        return WorkerError(message, original)
    return error


def _kind(original: BaseException | None) -> type[WorkerError]:
    """Returns a class that ``except WorkerError`` and ``except <original type>`` both catch."""
    # An error that is raised in an iterator must not look like the end of the iteration.
    if not isinstance(original, Exception) or isinstance(original, StopIteration):
        return WorkerError
    if isinstance(original, WorkerError):
        return type(original)
    kind = type(original)
    members = {
        # Tracebacks show these names, so the class looks like the original's class.
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__str__": _text,
        "__reduce__": _reduce,
        # These hide properties with the same names, which the original's class may have.
        "message": "",
        "original": None,
    }
    return type(kind.__name__, (WorkerError, kind), members)


def _attributes(original: BaseException | None) -> dict[str, Any]:
    """Returns the attributes of an exception that an ``except`` block may want to read."""
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
    # No module contains the classes that `_kind` makes, so they can't be pickled by name.
    return _rebuilt, (self.message, self.original)
