"""Processes that are killed, and programs that get a signal while they work with files."""

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import nursery

# Counts what the process does with the files in a folder; a signal comes at a given number.
_HOOK = """
import os, sys

_at, _number, _place = int(sys.argv[1]), int(sys.argv[2]), os.path.abspath(sys.argv[3])
del sys.argv[1:4]
_count = 0
_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}

def _hook(event, args):
    global _count
    if event in _EVENTS and isinstance(args[0], (str, bytes, os.PathLike)):
        name = os.fsdecode(args[0])
        # Files are also opened by their names in a folder.
        if not os.path.dirname(name) or os.path.abspath(name).startswith(_place):
            _count += 1
            if _count == _at:
                os.kill(os.getpid(), _number)

sys.addaudithook(_hook)
"""


def run(code, *arguments, place, at=0, number=signal.SIGKILL, **options):
    """Runs a program as :func:`nursery.run` does.

    Args:
        code: the program. It may read ``_count``, the number of events so far.
        *arguments: what it finds in ``sys.argv``.
        place: path of the folder, whose files count.
        at: number of the event at which the signal comes; 0 for none.
        number: the signal.
        **options: of :func:`nursery.run`.
    """
    return nursery.run(_HOOK + code, at, int(number), place, *arguments, **options)


def strike(*pids: int, signum: int = signal.SIGKILL) -> None:
    """Kills processes that may already be gone, and waits until all of them are gone."""
    with watched(*pids) as wait:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
        wait()


@contextmanager
def watched(*pids: int) -> Iterator[Callable[[], None]]:
    """Yields a function that waits until these processes have ended.

    When the function is called, other processes may already have the ids of ended ones.
    """
    handles: list[int] = []

    def wait() -> None:
        for handle in handles:
            assert select.select([handle], [], [], 300)[0], "a process is still there"

    try:
        for pid in pids:
            with suppress(ProcessLookupError):
                handles.append(os.pidfd_open(pid))
        yield wait
    finally:
        for handle in handles:
            os.close(handle)
