"""The ``trawl`` command."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trawl.extras.cli.errors import (
    CliError,
    StoppedEarly,
    message_of,
    print_note,
    print_traceback,
    warnings_as_notes,
)

if TYPE_CHECKING:
    from trawl.extras.cli.arguments import Arguments

# Torch, rich and tyro are imported only when needed, so that other commands start fast.


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the ``trawl`` command.

    Args:
        argv: the command's arguments, without its name; by default, the arguments of this process.

    Returns:
        The exit code: 0 after success, 1 if ``trawl check`` found errors, 2 after an error (one
        line on stderr describes the error), or 128 plus the signal's number if a signal ended the
        command (130 for Ctrl-C).

    Examples:
        >>> from trawl.extras.cli import main
        >>> main(["show", "no/such/dataset"])
        2
    """
    argv = sys.argv[1:] if argv is None else argv
    for stream in (sys.stdout, sys.stderr):
        # A character that the terminal's encoding lacks must not end the command.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        return _main(argv)
    except StoppedEarly as stop:
        print_note(str(stop))
        return stop.code
    except CliError as error:
        print_note(str(error))
    except BrokenPipeError:
        # The reader of the output is gone, so Python must not try to flush the rest to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except SystemExit:  # rich raises this for a broken pipe
        pass
    except OSError as error:
        print_note(message_of(error))
    except KeyboardInterrupt:
        print_note("interrupted: nothing was written")
        return 130
    return 2


def _main(argv: Sequence[str]) -> int:
    if list(argv) == ["--version"]:
        from trawl.versions import version

        print(f"trawl {version()}")
        return 0
    command = _parse(argv or ["--help"])
    if isinstance(command, int):
        return command if argv else 2
    with warnings_as_notes():
        try:
            return _run(command)
        except (CliError, OSError):
            if command.traceback:
                print_traceback()
            raise


def _parse(argv: Sequence[str]) -> Arguments | int:
    """Returns the parsed command, or an exit code if only help or an error was printed."""
    from trawl.extras.cli.arguments import parse

    try:
        return parse(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2


def _run(command: Arguments) -> int:
    from trawl.extras.cli.arguments import (
        CheckArguments,
        CollectArguments,
        EvaluateArguments,
        TuneArguments,
    )

    if isinstance(command, CheckArguments):
        from trawl.extras.cli.check import check

        return check(command)
    if isinstance(command, CollectArguments):
        from trawl.extras.cli.collect import collect

        return collect(command)
    if isinstance(command, EvaluateArguments):
        from trawl.extras.cli.evaluate import evaluate

        return evaluate(command)
    if isinstance(command, TuneArguments):
        from trawl.extras.cli.tune import tune

        return tune(command)
    from trawl.extras.cli.show import show

    return show(command)
