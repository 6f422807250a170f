"""Messages of the ``trawl`` command on stderr: errors, notes and warnings, each on one line."""

from __future__ import annotations

import re
import reprlib
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trawl.errors import WorkerError, raised_by_reset

# How a warning of a worker begins.
_WORKER = re.compile(r"^in worker \d+: ")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
# Maximum number of characters of a value that are shown.
_LONGEST = 500
# If an error begins with this text, the cause is in its last line, not in its first line.
_SCRIPT_ERROR = "The following operation failed in the TorchScript interpreter"


class CliError(Exception):
    """Error that the command reports to the user in one line."""


class StoppedEarly(Exception):
    """Raised if a collection was stopped early; committed frames are kept.

    Args:
        message: message for the user.
        code: the exit code.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def explained(
    what: str,
    kinds: type[BaseException] | tuple[type[BaseException], ...] = Exception,
    hint: str = "",
) -> Iterator[None]:
    """Turns exceptions that a user's code raises in the context into a :class:`CliError`.

    Args:
        what: beginning of the message.
        kinds: types of the exceptions to turn into errors.
        hint: end of the message.
    """
    try:
        yield
    except CliError:
        raise
    except kinds as error:
        raise CliError(f"{what}: {describe(error)}{hint}") from error


def message_of(error: BaseException) -> str:
    """Returns the message of an exception, on one line."""
    # str() of a KeyError is the repr of its message.
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    return one_line(str(text))


def describe(error: BaseException) -> str:
    """Returns the type, message and place of an exception from a user's code, on one line."""
    noted: BaseException | None = error
    notes = []
    if isinstance(error, WorkerError) and error.message.startswith("in "):
        # "in worker 1: ValueError: no", followed by that error's traceback.
        where, _, line = one_line(error.message).partition(": ")
        notes, noted = [where], error.original
    else:
        parts = [type(error).__name__, message_of(error)]
        line = ": ".join(part for part in parts if part)
    notes = [*map(one_line, getattr(noted, "__notes__", [])), *notes]
    return f"{line} ({'; '.join(notes)})" if notes else line


@contextmanager
def blamed(env: str, policy: str | None = None) -> Iterator[None]:
    """Turns exceptions into a :class:`CliError` while a collector or an evaluator is made.

    Args:
        env: the environment, as the user passed it.
        policy: the policy, as the user passed it; None if the policy can't be the cause.
    """
    try:
        yield
    except CliError:
        raise
    except Exception as error:
        if raised_by_reset(error):
            what = f"environment {env} failed"
        elif policy in (None, "random"):
            what = "the run can't start"
        else:
            what = f"--policy {policy}"
        raise CliError(f"{what}: {describe(error)}") from error


def printable(text: str) -> str:
    r"""Escapes unprintable characters in a text, such as control codes for a terminal.

    Examples:
        >>> print(printable("red: \x1b[31m"))
        red: \x1b[31m
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(value: object) -> str:
    """Returns a short, printable text for any value from a dataset."""
    text = value if isinstance(value, str) else reprlib.repr(value)
    return printable(text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…")


def one_line(text: str) -> str:
    """Returns the line of an error message that states the cause, without escape codes."""
    lines = [line.strip() for line in _ESCAPES.sub("", text).splitlines() if line.strip()]
    if not lines:
        return ""
    if lines[0].startswith(_SCRIPT_ERROR):
        return lines[-1].removeprefix("RuntimeError: ")
    return lines[0]


def print_note(message: str) -> None:
    """Prints a line on stderr."""
    print(f"trawl: {printable(message)}", file=sys.stderr, flush=True)


def print_traceback() -> None:
    """Prints the traceback of the current exception on stderr."""
    for line in traceback.format_exc().splitlines():
        print(printable(line), file=sys.stderr)


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Prints each warning in the context as one line on stderr, without its source code."""
    printed: set[str] = set()

    def show(message: Warning | str, *where: Any, **more: Any) -> None:
        note = one_line(str(message))
        text = _WORKER.sub("", note)
        # Workers make the environment and policy again, and would repeat warnings of this process.
        if text == note or text not in printed:
            print_note(f"note: {note}")
        printed.add(text)

    with warnings.catch_warnings():
        if not sys.warnoptions:
            warnings.simplefilter("default")
            for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
                warnings.simplefilter("ignore", category)
            # Gymnasium uses this category to report that an environment is out of date.
            warnings.filterwarnings("default", category=DeprecationWarning, module="gymnasium")
        warnings.showwarning = show
        yield
