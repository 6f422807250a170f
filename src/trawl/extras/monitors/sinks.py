"""Destinations of a monitor: their base class, helpers, and those that call the program itself."""

from __future__ import annotations

import errno
import importlib
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any, ClassVar

from trawl.registry import Registry

# Prefix of the names in tools that show values of other sources as well.
PREFIX = "collector/"


class StatsSink(ABC):
    """Destination of a collector's statistics.

    A :class:`~trawl.observe.Monitor` opens its sinks in its constructor, writes to them in its own
    thread, and closes them at the end. Another monitor can use a closed sink again.

    A subclass implements :meth:`write`. If it needs files or connections, it opens them in
    :meth:`open` and closes them in :meth:`close`.

    Examples:
        >>> from trawl import Collector
        >>> from trawl.observe import Monitor, StatsSink
        >>> class LastFrames(StatsSink):
        ...     def write(self, stats, step):
        ...         self.frames = step
        >>> sink = LastFrames()
        >>> with (
        ...     Collector("CartPole-v1", frames_per_batch=10, total_frames=30) as collector,
        ...     Monitor(collector, [sink]),
        ... ):
        ...     for batch in collector:
        ...         pass
        >>> sink.frames
        30
    """

    #: What follows the name of the sink in ``trawl collect --log NAME:``.
    target: ClassVar[str] = "TARGET"

    @classmethod
    def from_text(cls, target: str, resume: bool) -> StatsSink:
        """Makes a sink for ``trawl collect --log NAME:TARGET``; by default, calls the class.

        Args:
            target: the text after the name of the sink.
            resume: True if the command continues a dataset.

        Raises:
            ValueError: if the text is not valid.
        """
        return cls(target)  # type: ignore[call-arg]

    def open(self) -> None:  # noqa: B027 - optional
        """Opens the files and connections that the sink needs.

        The constructor of the monitor raises any error of this method.
        """

    @abstractmethod
    def write(self, stats: Mapping[str, Any], step: int) -> None:
        """Writes the statistics of one poll.

        If the method raises an error, the monitor warns once, and goes on.

        Args:
            stats: the collector's statistics: numbers, booleans and strings, by name.
            step: the number of frames delivered so far.
        """

    def close(self) -> None:  # noqa: B027 - optional
        """Closes files and connections; called by the thread that called :meth:`write`."""

    def __repr__(self) -> str:
        return type(self).__name__


#: The classes of sinks, by their names in ``trawl collect --log NAME:TARGET``.
STATS_SINKS: Registry[type[StatsSink]] = Registry(
    "trawl.stats_sinks",
    {
        "csv": "trawl.extras.monitors.csv:CSVSink",
        "mlflow": "trawl.extras.monitors.mlflow:MLflowSink",
        "prometheus": "trawl.extras.monitors.prometheus:PrometheusSink",
        "tensorboard": "trawl.extras.monitors.tensorboard:TensorBoardSink",
        "wandb": "trawl.extras.monitors.wandb:WandbSink",
    },
    lambda found: isinstance(found, type) and issubclass(found, StatsSink),
    "a subclass of trawl.observe.StatsSink",
)


def finite_numbers(stats: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the statistics that are finite numbers, with a prefix before each name.

    Examples:
        >>> finite_numbers({"frames": 3, "env_path": "array", "mean": float("nan")}, "collector/")
        {'collector/frames': 3}
    """
    return {
        f"{prefix}{name}": value
        for name, value in stats.items()
        if isinstance(value, Real) and math.isfinite(value)
    }


def load_library(module: str, extra: str) -> Any:
    """Imports a library that is an extra.

    Args:
        module: the module to import.
        extra: the name of the extra.

    Raises:
        ModuleNotFoundError: if the library is not installed; the message names the extra.
    """
    library = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != library:
            raise
        raise ModuleNotFoundError(
            f"logging with {library} needs another package: pip install 'trawl-rl[{extra}]'",
            name=library,
        ) from None


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables within the context, unless the user has set them.

    Some libraries read settings from nowhere else.
    """
    added = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def unwritable(path: str, remedy: str) -> Iterator[None]:
    """Turns an ``OSError`` in the context into one that names a path and a remedy."""
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)
        # With a number, Python picks the subclass, such as PermissionError.
        raise OSError(error.errno, f"{why} ({remedy})", path) from error


def make_folder(path: str, remedy: str) -> None:
    """Makes a folder with its parents, unless it exists.

    Raises:
        OSError: if the folder can't be made, or files can't be made in it.
    """
    with unwritable(path, remedy):
        os.makedirs(path, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


class FunctionSink(StatsSink):
    """Calls a function with the statistics of each poll.

    A :class:`~trawl.observe.Monitor` makes this sink for a function in its list of sinks.

    Args:
        function: function that is called with a new dict, in the monitor's thread.
    """

    def __init__(self, function: Callable[[dict[str, Any]], object]) -> None:
        self.function = function

    def write(self, stats: Mapping[str, Any], step: int) -> None:
        """Calls the function."""
        self.function(dict(stats))

    def __repr__(self) -> str:
        return repr(self.function)


class LoggerSink(StatsSink):
    """Logs the statistics that are finite numbers with a logger of TorchRL.

    A :class:`~trawl.observe.Monitor` makes this sink for a logger in its list of sinks. It does not
    close the logger, because other code may use the logger as well.

    Args:
        logger: a logger of TorchRL, or another object with a method
            ``log_scalar(name, value, step=...)``. The monitor's thread calls this method.
        prefix: prefix of the names.
    """

    def __init__(self, logger: Any, prefix: str = PREFIX) -> None:
        self.logger, self.prefix = logger, prefix

    def write(self, stats: Mapping[str, Any], step: int) -> None:
        """Logs each number."""
        for name, value in finite_numbers(stats, self.prefix).items():
            self.logger.log_scalar(name, float(value), step=step)

    def __repr__(self) -> str:
        return repr(self.logger)
