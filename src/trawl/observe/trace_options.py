"""Options of a timeline: its file, and how much it shows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

DETAILS = ("batch", "step")


@dataclass(frozen=True)
class TraceOptions:
    """File and detail of a timeline.

    Args:
        path: path of the file. With the suffix ``.gz``, the file is compressed. An existing file is
            replaced.
        detail: ``"batch"`` draws the spans of each batch. ``"step"`` also draws single steps: the
            first 8 of every 512 steps of a batch.

    Raises:
        TypeError: if ``path`` is not a path.
        ValueError: if ``path`` is empty, or ``detail`` has another value.

    Examples:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from trawl import Collector
        >>> from trawl.observe import TraceOptions
        >>> path = Path(tempfile.mkdtemp(), "run.json.gz")
        >>> options = {"frames_per_batch": 100, "total_frames": 300}
        >>> trace = TraceOptions(path, detail="step")
        >>> with Collector("Pendulum-v1", trace=trace, **options) as collector:
        ...     for batch in collector:
        ...         pass
        >>> path.exists()
        True
    """

    path: str | os.PathLike[str]
    detail: Literal["batch", "step"] = "batch"

    def __post_init__(self) -> None:
        if not isinstance(self.path, (str, os.PathLike)):
            raise TypeError(
                "path must be a str or an os.PathLike, but it is "
                f"{type(self.path).__name__}: {self.path!r}"
            )
        if not os.fspath(self.path):
            raise ValueError("path must name a file, but it is empty")
        if self.detail not in DETAILS:
            raise ValueError(f"detail must be 'batch' or 'step', but it is {self.detail!r}")

    @property
    def file(self) -> Path:
        """Absolute path of the file."""
        return Path(os.path.abspath(os.fspath(self.path)))


#: Value of an argument that asks for a timeline: a path, or options.
TraceLike: TypeAlias = TraceOptions | str | os.PathLike[str]


def check_trace(name: str, value: Any) -> TraceOptions | None:
    """Returns the options of a timeline; None if there is no timeline.

    Raises:
        TypeError: if ``value`` is neither a path nor ``TraceOptions``.
        ValueError: if the path is empty.
    """
    if value is None or isinstance(value, TraceOptions):
        return value
    if not isinstance(value, (str, os.PathLike)):
        raise TypeError(
            f"{name} must be the path of a file, or trawl.observe.TraceOptions(path, detail=...), "
            f"but it is {type(value).__name__}: {value!r}"
        )
    if not os.fspath(value):
        raise ValueError(f"{name} must name a file, such as 'run.json.gz', but it is empty")
    return TraceOptions(value)
