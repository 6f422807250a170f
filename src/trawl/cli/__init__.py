"""The ``trawl`` command."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trawl.cli.errors import CliError, Stopped, message_of
from trawl.cli.notes import notes, tell, tell_traceback
from trawl.lean import import_lean

if TYPE_CHECKING:
    from trawl.cli.arguments import Collect, Evaluate, Show

# Torch, rich and tyro are imported only where needed, so that commands without them start fast.


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the ``trawl`` command.

    Args:
        argv: the command's arguments; by default those of this process.

    Returns:
        The exit code: 0 after success, 2 after an error (one line on stderr describes it), 128
        plus the signal's number if a signal ended the command (130 for Ctrl-C).

    Example:
        >>> from trawl.cli import main
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
    except Stopped as stop:
        tell(str(stop))
        return stop.code
    except CliError as error:
        tell(str(error))
    except BrokenPipeError:
        # The reader of the output has gone, so Python must not try to flush the rest to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except SystemExit:  # rich raises this for a broken pipe
        pass
    except OSError as error:
        tell(message_of(error))
    except KeyboardInterrupt:
        tell("interrupted: nothing was written")
        return 130
    return 2


def _main(argv: Sequence[str]) -> int:
    if list(argv) == ["--version"]:
        from trawl.cli.versions import version

        print(f"trawl {version('trawl-rl')}")
        return 0
    command = _parse(argv or ["--help"])
    if isinstance(command, int):
        return command if argv else 2
    with notes():
        try:
            return _run(command)
        except (CliError, OSError):
            if command.traceback:
                tell_traceback()
            raise


def _parse(argv: Sequence[str]) -> Collect | Evaluate | Show | int:
    """Returns the command; an exit code if only help or an error was printed."""
    from trawl.cli.arguments import parse

    try:
        return parse(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 2


def _run(command: Collect | Evaluate | Show) -> int:
    from trawl.cli.arguments import Collect, Evaluate

    import_lean()
    if isinstance(command, Collect):
        from trawl.cli.collect import collect

        return collect(command)
    if isinstance(command, Evaluate):
        from trawl.cli.evaluate import evaluate

        return evaluate(command)
    from trawl.cli.show import show

    return show(command)
