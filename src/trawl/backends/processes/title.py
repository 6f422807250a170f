"""Name of this process, as ``ps`` and ``top`` show it."""

from __future__ import annotations

import contextlib
import ctypes
import sys

_PR_SET_NAME = 15
# Positions of fields in /proc/self/stat, counted from the state, which follows the name.
_ARG_START, _ARG_END = 45, 46


def set_title(name: str, rest: str = "") -> None:
    """Sets the name and the command line of this process, on Linux only.

    Args:
        name: short name; the kernel cuts it after 15 bytes.
        rest: text that follows the name in the command line.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    # The system may hide the addresses.
    with contextlib.suppress(OSError, ValueError, IndexError):
        _overwrite_arguments(f"{name}{rest}".encode())


def _overwrite_arguments(title: bytes) -> None:
    """Overwrites the arguments that the process was started with, which ``ps`` reads."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(") ")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    with open("/proc/self/maps") as file:
        writable = any(_holds(line, start, end) for line in file)
    if start and writable:
        # The last byte stays zero: to the kernel, another value means that more bytes follow.
        ctypes.memmove(start, title[: end - start - 1].ljust(end - start, b"\0"), end - start)


def _holds(line: str, start: int, end: int) -> bool:
    """Returns True if a line of /proc/self/maps describes writable memory with these bytes."""
    addresses, flags, *_ = line.split()
    first, last = (int(address, 16) for address in addresses.split("-"))
    return "w" in flags and first <= start < end <= last
