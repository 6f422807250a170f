"""Counter of policy versions."""

from __future__ import annotations

import uuid
from typing import Any


class PolicyVersion:
    """Counts the versions of a policy.

    Args:
        version_type: ``int`` or ``"int"`` for 0, 1, 2, …; ``str``, ``"str"`` or ``"uuid"`` for
            random identifiers.

    Attributes:
        version: the current version; it can be assigned.
        version_history: all versions so far, ending with the current one.

    Examples:
        >>> from trawl.collectors import PolicyVersion
        >>> version = PolicyVersion()
        >>> version.increment_version()
        >>> version.version
        1
    """

    def __init__(self, version_type: Any = int) -> None:
        if version_type not in (int, "int", str, "str", "uuid"):
            raise ValueError(
                f"version_type must be int, 'int', str or 'uuid', but it is {version_type!r}"
            )
        self.version_type = int if version_type in (int, "int") else str
        self.version_history: list[int | str] = []
        self.version = self._first()

    def _first(self) -> int | str:
        return 0 if self.version_type is int else str(uuid.uuid4())

    @property
    def version(self) -> int | str:
        """The current version."""
        return self._version

    @version.setter
    def version(self, value: int | str) -> None:
        self._version = value
        self.version_history.append(value)

    def increment_version(self) -> None:
        """Advances to the next version."""
        self.version = self.version + 1 if isinstance(self.version, int) else self._first()
