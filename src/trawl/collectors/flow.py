"""How far collection in the background may be ahead of a learner that samples what it collects."""

from __future__ import annotations


class Flow:
    """Counts frames that were put into a replay buffer, and frames that were sampled from it.

    Args:
        ratio: samples that are to be drawn for each frame that is put in.
        ahead: frames that may be put in before anything is sampled for them.

    Attributes:
        inserted: frames that were put in.
        sampled: frames that were sampled; one that is drawn twice counts twice.
    """

    def __init__(self, ratio: float, ahead: int) -> None:
        self._ratio = ratio
        self._ahead = ahead
        self.inserted = 0
        self.sampled = 0

    def room(self, more: int = 0) -> bool:
        """Whether a batch may be begun, while so many frames are under way already."""
        return self.inserted + more < self._ahead + self.sampled / self._ratio
