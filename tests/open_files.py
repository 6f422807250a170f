"""The files that a test has open."""

from __future__ import annotations

import os
import time
from pathlib import Path


def open_files() -> set[tuple[str, str]]:
    """Descriptors of the open files of this process, and the names of these files."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
        except FileNotFoundError:
            continue  # the listing's own
    return found


def wait_until_closed(directory: Path, patience: float = 60.0) -> None:
    """Waits until this process has no file below a directory open; fails if that takes too long.

    Arrow reads files in threads of its own, which close them after the reader has returned.
    """
    deadline = time.monotonic() + patience
    while left := [name for _, name in open_files() if name.startswith(f"{directory}/")]:
        assert time.monotonic() < deadline, f"open after {patience} s: {left}"
        time.sleep(0.01)
