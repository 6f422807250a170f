"""Memory of this process."""

from __future__ import annotations

import os
import time
from contextlib import suppress

# The system is asked at most this often, in seconds.
_INTERVAL = 1.0


class ResidentMemory:
    """Resident memory of this process, which is looked up once a second at most."""

    def __init__(self) -> None:
        self._bytes = 0
        self._read: float | None = None

    @property
    def bytes(self) -> int:
        """Number of bytes of memory that the process uses; 0 if the system doesn't tell."""
        now = time.monotonic()
        if self._read is None or now - self._read > _INTERVAL:
            self._bytes, self._read = _resident_bytes(), now
        return self._bytes


def _resident_bytes() -> int:
    # Linux has this file.
    with suppress(OSError, ValueError, IndexError), open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
