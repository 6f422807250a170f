"""Output of notes, tracebacks and warnings on stderr."""

from __future__ import annotations

import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trawl.extras.cli.errors import one_line, printable

_WORKER = re.compile(r"^in worker \d+: ")


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
