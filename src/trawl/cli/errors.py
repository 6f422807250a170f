"""Errors as one line."""

from __future__ import annotations

import re
import reprlib

from trawl.errors import WorkerError

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
# Characters of a value that are shown.
_LONGEST = 500
# TorchScript tells what went wrong in the last line of its message, not the first.
_SCRIPT_ERROR = "The following operation failed in the TorchScript interpreter"


class CliError(Exception):
    """What is wrong, in words for the user: shown as one line, without a traceback."""


class Stopped(Exception):
    """Collection ended before its end; what there is was kept.

    Args:
        message: says so.
        code: the exit code.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def message_of(error: BaseException) -> str:
    """The message of an exception, on one line."""
    # str() of a KeyError is the repr of its message.
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return one_line(str(text))


def describe(error: BaseException) -> str:
    """The type and message of an exception out of a user's code, and where it happened."""
    noted: BaseException | None = error
    notes = []
    if isinstance(error, WorkerError) and error.message.startswith("in "):
        # "in worker 1: ValueError: no", and then the traceback of that.
        where, _, line = one_line(error.message).partition(": ")
        notes, noted = [where], error.original
    else:
        parts = [type(error).__name__, message_of(error)]
        line = ": ".join(part for part in parts if part)
    notes = [*map(one_line, getattr(noted, "__notes__", [])), *notes]
    return f"{line} ({'; '.join(notes)})" if notes else line


def printable(text: str) -> str:
    r"""The text, with escapes for all that a terminal would act on.

    Example:
        >>> print(printable("red: \x1b[31m"))
        red: \x1b[31m
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(value: object) -> str:
    """A value out of a dataset, which may be anything, as a few words."""
    text = value if isinstance(value, str) else reprlib.repr(value)
    return printable(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…")


def one_line(text: str) -> str:
    """The first line that says something, without escape codes."""
    lines = [line.strip() for line in _ESCAPES.sub("", text).splitlines() if line.strip()]
    if not lines:
        return ""
    if lines[0].startswith(_SCRIPT_ERROR):
        return lines[-1].removeprefix("RuntimeError: ")
    return lines[0]
