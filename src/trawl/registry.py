"""Registries of what other packages add to Trawl, by entry points.

Each registry has a group of entry points. Those of Trawl are named in a table, in the order in
which they are asked; those of other packages come from their metadata, which is read when it is
needed for the first time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, TypeVar

_Thing = TypeVar("_Thing")
_Answer = TypeVar("_Answer")
# True in a process whose driver has warned of the entry points that can't be used.
_driver_warns = False


class _AsksOthers(Protocol):
    @property
    def asks_others(self) -> bool:
        """See :attr:`Registry.asks_others`."""


class BrokenEntry(ImportError):
    """Raised if an entry point can't be loaded; the message names it."""


class Registry(Mapping[str, _Thing]):
    """Objects that the entry points of one group name, by these names.

    Args:
        group: name of the group.
        own: the entry points of Trawl: their names, and where to find what they name.
        fits: function that returns True for what an entry point may name.
        what: text that says what an entry point has to name.
    """

    def __init__(
        self, group: str, own: Mapping[str, str], fits: Callable[[Any], bool], what: str
    ) -> None:
        self.group = group
        self._own = {name: EntryPoint(name, value, group) for name, value in own.items()}
        self._fits, self._what = fits, what
        self._found: dict[EntryPoint, _Thing] = {}
        self._warned: set[EntryPoint] = set()

    @property
    def own(self) -> tuple[str, ...]:
        """Names of the entry points of Trawl."""
        return tuple(self._own)

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._others

    def __iter__(self) -> Iterator[str]:
        """Yields the names of all entry points, those of Trawl first."""
        yield from self._own
        yield from self._others

    def __len__(self) -> int:
        return len(self._own) + len(self._others)

    def __getitem__(self, name: str) -> _Thing:
        """Returns what a known entry point names.

        Raises:
            KeyError: if there is no such entry point.
            BrokenEntry: if the entry point can't be loaded.
        """
        return self._loaded(self._own.get(name) or self._others[name])

    def first(self, question: Callable[[_Thing], _Answer | None]) -> _Answer | None:
        """Returns the first answer that is not None; those of Trawl are asked first.

        An entry point of another package that can't be loaded, or can't answer, is left out with a
        warning.
        """
        for entry in self._own.values():
            answer = question(self._loaded(entry))
            if answer is not None:
                return answer
        for entry in self._others.values():
            try:
                answer = question(self._loaded(entry))
            except Exception as error:
                self._warn_of(entry, error)
            else:
                if answer is not None:
                    return answer
        return None

    @property
    def asks_others(self) -> bool:
        """True if the entry points of other packages were needed in this process."""
        return "_others" in vars(self)

    @contextmanager
    def warning_for(self, started: Sequence[_AsksOthers]) -> Iterator[None]:
        """Context for starting processes that leave their warnings to this one.

        It warns of entry points of other packages that can't be loaded. This reads files of all
        installed packages, so it is done only if a process has needed them, or has failed.

        Args:
            started: an empty list, which gets what the processes send when they have started.
        """
        try:
            yield
        finally:
            if not started or any(one.asks_others for one in started):
                for entry in self._others.values():
                    try:
                        self._loaded(entry)
                    except BrokenEntry as error:
                        self._warn_of(entry, error)

    @cached_property
    def _others(self) -> dict[str, EntryPoint]:
        """The entry points of other packages by name.

        Each of them is ignored, with a warning, if another one has its name.
        """
        found: dict[str, EntryPoint] = {}
        for entry in entry_points(group=self.group):
            known = self._own.get(entry.name) or found.setdefault(entry.name, entry)
            if known.value != entry.value and not _driver_warns:
                taken = f"the name belongs to {self._described(known)}"
                warnings.warn(f"{self._described(entry)} is ignored, because {taken}", stacklevel=2)
        return found

    def _loaded(self, entry: EntryPoint) -> _Thing:
        found = self._found.get(entry)
        if found is not None:
            return found
        try:
            found = entry.load()
        except Exception as error:
            raise BrokenEntry(
                f"{self._described(entry)} can't be loaded: {type(error).__name__}: {error}"
            ) from error
        if not self._fits(found):
            raise BrokenEntry(
                f"{self._described(entry)} must name {self._what}, but it names {found!r}"
            )
        return self._found.setdefault(entry, found)

    def _warn_of(self, entry: EntryPoint, error: Exception) -> None:
        """Warns that an entry point is left out, once for each."""
        is_broken = isinstance(error, BrokenEntry)
        if entry not in self._warned and not (is_broken and _driver_warns):
            self._warned.add(entry)
            why = f"{self._described(entry)} is left out, because of {type(error).__name__}: "
            warnings.warn(str(error) if is_broken else f"{why}{error}", stacklevel=2)

    def _described(self, entry: EntryPoint) -> str:
        package = "trawl" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
        return (
            f"the entry point {entry.name} = {entry.value!r} of {self.group}, in the package "
            f"{package},"
        )


def leave_warnings_to_driver() -> None:
    """Leaves warnings of entry points to the driver; see :meth:`Registry.warning_for`."""
    global _driver_warns
    _driver_warns = True
