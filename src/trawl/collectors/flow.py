"""Limits how far background collection runs ahead of a learner that samples its frames."""

from __future__ import annotations


class Flow:
    """Counts frames inserted into a replay buffer, and frames sampled from it.

    Args:
        ratio: number of samples to draw for each inserted frame.
        ahead: number of frames that may be inserted before anything is sampled for them.

    Attributes:
        inserted: number of frames inserted so far.
        sampled: number of frames sampled so far; a frame that is drawn twice counts twice.
    """

    def __init__(self, ratio: float, ahead: int) -> None:
        self._ratio = ratio
        self._ahead = ahead
        self.inserted = 0
        self.sampled = 0

    def room(self, more: int = 0) -> bool:
        """Returns True if another batch may begin while ``more`` frames are under way."""
        return self.inserted + more < self._ahead + self.sampled / self._ratio
