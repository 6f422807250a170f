"""Context for errors that come out of a user's environment or policy."""

from __future__ import annotations


def add_note(error: BaseException, note: str) -> None:
    """Adds a line to what the traceback of ``error`` shows (from Python 3.11 on)."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        notes = [*getattr(error, "__notes__", []), note]
        setattr(error, "__notes__", notes)  # noqa: B010 - mypy knows it from 3.11 on only
