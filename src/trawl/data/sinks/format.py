"""The methods that each format of datasets implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from tensordict import TensorDictBase

from trawl.data.sinks.entries import Entry
from trawl.data.sinks.record import Record


class SinkFormat(ABC):
    """The part of a sink that depends on the format."""

    #: Name of the format.
    format: ClassVar[str]

    @abstractmethod
    def _begin(self, entries: list[Entry]) -> None:
        """Prepares the files for frames with these entries, before the first frames are added."""

    @abstractmethod
    def _append(self, rows: TensorDictBase) -> None:
        """Adds frames of shape ``(frames,)``, or raises an exception and adds none of them."""

    @abstractmethod
    def _flush(self, everything: bool) -> None:
        """Commits waiting frames.

        Args:
            everything: True to commit all of them; False to commit only those that can be
                committed now.
        """

    @abstractmethod
    def _layout(self) -> dict[str, Any]:
        """Returns the format's own part of the record."""

    @abstractmethod
    def _restore(self, record: Record) -> None:
        """Continues after the commit that the record describes, and ignores any later data.

        Raises:
            ValueError: if committed data is missing or damaged. In this case, nothing is changed.
        """

    @abstractmethod
    def _finish(self) -> None:
        """Completes the files, after the last commit and before the final record."""

    @abstractmethod
    def _release(self) -> None:
        """Closes files, and drops frames that were not committed."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Number of frames that were written but are not committed yet."""

    def _waiting_state(self) -> Any:
        """Returns the frames that are still waiting after a commit, as plain data."""
        return None

    def _restore_waiting(self, state: Any) -> None:
        """Restores the frames that :meth:`_waiting_state` returned."""
        if state is not None:
            raise ValueError(f"the format {self.format} has no frames that wait after a commit")
