"""Handling of SIGINT and SIGTERM: the first finishes the batch, the second stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Records the first SIGINT or SIGTERM within its ``with`` block.

    The second signal raises ``KeyboardInterrupt``.

    Args:
        notify: function that receives a message for the user. The signal handler calls it at the
            first signal.

    Attributes:
        signum: number of the first signal, or None.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.signum: int | None = None
        self._notify = notify
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        # Python allows signal handlers only in the main thread.
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # A shell starts background jobs with Ctrl-C ignored, and they keep ignoring it.
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, signum: int, frame: object) -> None:
        if self.signum is not None:
            raise KeyboardInterrupt
        self.signum = signum
        self._notify("finishing this batch; press Ctrl-C again to stop at once")
