"""The files that a test and its processes have open."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
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


def check_no_named_memory(pids: Iterable[int]) -> None:
    """Checks that none of these processes uses memory with a name, which could be left behind.

    It looks at what they use, not at the names that there are: tests that run at the same time make
    names, too.
    """
    for pid in pids:
        used = Path(f"/proc/{pid}/maps").read_text().splitlines()
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                used.append(os.readlink(descriptor))
            except FileNotFoundError:
                continue  # closed since
        named = [line for line in used if "/dev/shm/" in line and "(deleted)" not in line]
        assert not named, f"process {pid} uses {named}"
