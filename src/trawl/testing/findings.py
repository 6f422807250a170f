"""Findings of the checks of a user's environment or policy."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from typing_extensions import Self

from trawl.envs.capture.rehearsal import is_deliberate
from trawl.envs.generators import get_states, seed_generators, set_states
from trawl.errors import WorkerError

Level = Literal["error", "warning", "note"]
_LEVELS: tuple[Level, ...] = ("error", "warning", "note")
# Largest number of characters of an exception's message in a finding.
_LONGEST = 600


class CheckFailed(AssertionError):
    """Raised by :meth:`CheckReport.raise_for_errors`; the message lists the errors.

    Attributes:
        report: the report.
    """

    def __init__(self, report: CheckReport) -> None:
        super().__init__(str(report))
        self.report = report


@dataclass(frozen=True)
class Finding:
    """A fact about an environment or a policy, with its remedy.

    Attributes:
        level: ``"error"`` if a collector would deliver wrong data, or fail; ``"warning"`` if data
            or states may not be what you expect; ``"note"`` if collectors cope with it.
        topic: what was checked, such as ``"seeds"``.
        message: a sentence that says what was found, and what to do.
        place: the last line of the traceback, if code of the user raised an exception.
    """

    level: Level
    topic: str
    message: str
    place: str | None = None

    def __str__(self) -> str:
        place = "" if self.place is None else f" [{self.place}]"
        return f"{self.level}: {self.topic}: {self.message}{place}"


@dataclass(frozen=True)
class CheckReport:
    """Result of a check.

    Attributes:
        name: name of the environment or the policy.
        findings: the findings, errors first.
        figures: measurements, such as ``"microseconds per step"``.
        not_checked: what was not checked, and why.

    Examples:
        >>> from trawl.testing import check_env
        >>> report = check_env("CartPole-v1", worker=False)
        >>> report.ok, list(report.findings)
        (True, [])
    """

    name: str
    findings: tuple[Finding, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    not_checked: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if there are no errors; there may be warnings and notes."""
        return not self.of_level("error")

    def of_level(self, level: Level) -> list[Finding]:
        """Returns the findings of one level."""
        return [finding for finding in self.findings if finding.level == level]

    def raise_for_errors(self) -> Self:
        """Raises an error if there are errors; otherwise, returns the report itself.

        Raises:
            CheckFailed: if there are errors. It is an ``AssertionError``.
        """
        if not self.ok:
            raise CheckFailed(self)
        return self

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as plain data, which ``json.dumps`` accepts."""
        return {
            "name": self.name,
            "ok": self.ok,
            "findings": [asdict(finding) for finding in self.findings],
            "figures": dict(self.figures),
            "not_checked": list(self.not_checked),
        }

    @property
    def verdict(self) -> str:
        """The number of findings of each level, as text."""
        counts = [(len(self.of_level(level)), level) for level in _LEVELS]
        found = [f"{count} {level}{'s' * (count > 1)}" for count, level in counts if count]
        return ", ".join(found) or "nothing found"

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.verdict}"]
        lines += [f"  {finding}" for finding in self.findings]
        lines += [f"  {name}: {value:,.4g}" for name, value in self.figures.items()]
        lines += [f"  not checked: {what}" for what in self.not_checked]
        return "\n".join(lines)


class Findings:
    """Collects the findings of one check; of several about the same matter, it keeps the first.

    Attributes:
        not_checked: what was not checked, and why.
        figures: measurements.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Finding] = {}
        self.not_checked: list[str] = []
        self.figures: dict[str, float] = {}

    def add(
        self,
        level: Level,
        topic: str,
        message: str,
        matter: str = "",
        error: BaseException | None = None,
    ) -> None:
        """Adds a finding.

        Args:
            level: level of the finding.
            topic: topic of the finding.
            message: its sentence.
            matter: what tells it from others of the same topic, such as the key of an entry.
            error: exception that it is about.
        """
        place = None if error is None else place_of(error)
        self._found.setdefault((topic, matter), Finding(level, topic, message, place))

    @property
    def has_errors(self) -> bool:
        """True if there is an error."""
        return any(finding.level == "error" for finding in self._found.values())

    def has(self, topic: str) -> bool:
        """Returns True if there is a finding about a topic."""
        return any(known == topic for known, _ in self._found)

    @contextmanager
    def catching(
        self, topic: str, what: str, remedy: str, level: Level = "error"
    ) -> Iterator[None]:
        """Turns an exception in the context into a finding.

        Args:
            topic: topic of the finding.
            what: what is tried in the context, as the subject of a sentence.
            remedy: what to do about an exception of the user's own code. The messages of Trawl's
                exceptions say it themselves.
            level: level of the finding.
        """
        try:
            yield
        except (Exception, SystemExit) as error:
            self.failed(topic, what, remedy, error, level)

    def failed(
        self, topic: str, what: str, remedy: str, error: BaseException, level: Level = "error"
    ) -> None:
        """Adds a finding about an exception; see :meth:`catching`."""
        told = told_by(error)
        if not is_of_trawl(error) or topic == "states":
            told = f"{told.rstrip('.')}: {remedy}"
        # The same exception is often met in several ways.
        if not any(told_by(error) in known.message for known in self._found.values()):
            self.add(level, topic, f"{what} failed: {told}", what, error)

    def report(self, name: str) -> CheckReport:
        """Returns everything that was found."""
        findings = sorted(self._found.values(), key=lambda one: _LEVELS.index(one.level))
        return CheckReport(name, tuple(findings), dict(self.figures), tuple(self.not_checked))

    @contextmanager
    def quietly(self, seed: int) -> Iterator[None]:
        """Turns warnings of Trawl into findings, and seeds the global generators in the context.

        Args:
            seed: the seed. Afterwards, the generators are as they were before.
        """
        states = get_states()
        seed_generators(seed)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.showwarning = self._warned
                yield
        finally:
            set_states(states)

    def _warned(
        self, message: Warning | str, category: type[Warning], *where: Any, **more: Any
    ) -> None:
        caller: Any = sys._getframe()
        while caller is not None and caller.f_globals.get("__name__") in ("warnings", __name__):
            caller = caller.f_back
        name = "" if caller is None else str(caller.f_globals.get("__name__"))
        text = _one_line(str(message))
        # Warnings of workers are passed on by the library, but need not be its own.
        if (
            issubclass(category, UserWarning)
            and name.startswith("trawl.")
            and not text.startswith("in worker")
        ):
            self.add("warning", "autoreset" if "autoreset" in text else "warnings", text, text)


def told_by(error: BaseException) -> str:
    """Returns the type and the message of an exception, on one line."""
    # str() of a KeyError is the repr of its message.
    text = error.args[0] if isinstance(error, KeyError) and error.args else error
    if isinstance(error, WorkerError):
        return _one_line(error.message)
    try:
        message = _one_line(str(text))
    except Exception as failure:
        message = f"its message can't be shown: {type(failure).__name__}"
    if is_of_trawl(error):
        return message or type(error).__name__
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _one_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = lines[0] if lines else ""
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"


def is_of_trawl(error: BaseException) -> bool:
    """Returns True for an exception that a check of the library raised."""
    frames = _frames(error)
    return bool(frames) and _is_library(frames[-1][0]) and is_deliberate(error)


def _frames(error: BaseException) -> list[tuple[Any, int]]:
    return list(traceback.walk_tb(error.__traceback__))


def _is_library(frame: Any) -> bool:
    return str(frame.f_globals.get("__name__")).startswith("trawl.")


def place_of(error: BaseException) -> str | None:
    """Returns the place in the user's code where an exception was raised; None if there is none.

    Calls within other libraries that the user's code calls are left out.
    """
    frames = [pair for pair in _frames(error) if not _is_library(pair[0])]
    if not frames or is_of_trawl(error):
        return None
    own = [pair for pair in frames if not _is_installed(pair[0].f_code.co_filename)]
    frame, line = (own or frames)[-1]
    file = frame.f_code.co_filename
    source = linecache.getline(file, line).strip()
    place = f"{os.path.basename(file)}, line {line}, in {frame.f_code.co_name}"
    return f"{place}: {source}" if source else place


def _is_installed(file: str) -> bool:
    return "site-packages" in file or file.startswith("<frozen ")
