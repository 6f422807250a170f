"""The option ``--log`` of ``trawl collect``, which logs statistics during collection."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from trawl.checks import did_you_mean
from trawl.cli.arguments import CollectArguments
from trawl.cli.errors import CliError, describe, message_of
from trawl.observe import (
    CSVSink,
    MLflowSink,
    Monitor,
    PrometheusSink,
    StatsSink,
    TensorBoardSink,
    WandbSink,
)


def log_sinks(args: CollectArguments) -> list[StatsSink]:
    """Returns the sinks that the arguments specify.

    Raises:
        CliError: if an option is not valid, or the library of a sink is missing.
    """
    if not args.log_every > 0:
        raise CliError(f"--log-every must be above 0 seconds, but it is {args.log_every}")
    return [_sink(text, args.resume) for text in args.log]


def _sink(text: str, resume: bool) -> StatsSink:
    name, _, target = text.partition(":")
    kinds: dict[str, tuple[str, Callable[[str], StatsSink]]] = {
        "csv": ("FILE", lambda file: CSVSink(file, append=resume)),
        "mlflow": ("DIR or mlflow:URI", MLflowSink),
        "prometheus": ("PORT", _prometheus),
        "tensorboard": ("DIR", TensorBoardSink),
        "wandb": ("PROJECT", WandbSink),
    }
    if name not in kinds:
        raise CliError(
            f"--log {text} doesn't begin with one of {', '.join(f'{one}:' for one in kinds)}"
            f"{did_you_mean([name], kinds)}"
        )
    what, make = kinds[name]
    if not target:
        raise CliError(f"--log {text} needs a value: --log {name}:{what}")
    try:
        return make(target)
    except (ImportError, ValueError) as error:
        raise CliError(f"--log {text}: {message_of(error)}") from error


def _prometheus(target: str) -> PrometheusSink:
    host, _, port = target.rpartition(":")
    if not port.isdecimal():
        raise ValueError("PORT must be a number: pass prometheus:PORT or prometheus:HOST:PORT")
    return PrometheusSink(int(port), **({"host": host} if host else {}))


class _Shifted(StatsSink):
    """Adds the frames of earlier runs, which the collector of a resumed run doesn't count."""

    def __init__(self, sink: StatsSink, earlier: int) -> None:
        self._sink, self._earlier = sink, earlier

    def open(self) -> None:
        """Opens the sink."""
        self._sink.open()

    def write(self, stats: Mapping[str, Any], step: int) -> None:
        """Writes the statistics with all frames."""
        counts = {name: stats[name] + self._earlier for name in ("frames", "total_frames")}
        self._sink.write({**stats, **counts}, step + self._earlier)

    def close(self) -> None:
        """Closes the sink."""
        self._sink.close()

    def __repr__(self) -> str:
        return repr(self._sink)


@contextmanager
def logged(
    collector: Any, sinks: list[StatsSink], every: float, earlier: int = 0
) -> Iterator[None]:
    """Logs a collector's statistics within the context, if there are sinks.

    Args:
        collector: the collector.
        sinks: the sinks.
        every: seconds between two polls.
        earlier: number of frames that earlier runs collected, and the collector doesn't count.

    Raises:
        CliError: if a sink can't be opened.
    """
    if not sinks:
        yield
        return
    try:
        monitor = Monitor(collector, [_Shifted(sink, earlier) for sink in sinks], every)
    except Exception as error:  # each library has errors of its own
        said = message_of(error) if isinstance(error, OSError) else describe(error)
        raise CliError(f"--log can't start: {said}") from error
    try:
        yield
    finally:
        # The dataset is complete by now, so Ctrl-C ends the wait for slow sinks only.
        with suppress(KeyboardInterrupt):
            monitor.close()
