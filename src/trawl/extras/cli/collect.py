"""The command ``trawl collect``."""

from __future__ import annotations

import math
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import gymnasium
from rich.console import Console

from trawl.checks import did_you_mean
from trawl.data import MinariSink, Sink
from trawl.data.sinks.base import check_free
from trawl.data.sinks.record import FORMATS
from trawl.data.sinks.states import SavedState
from trawl.envs.seeding import derive
from trawl.extras.cli.arguments import CollectArguments, flat
from trawl.extras.cli.collectors import batch_size, make_collector
from trawl.extras.cli.environments import check_numbers, env_kwargs, env_of_minari
from trawl.extras.cli.errors import CliError, StoppedEarly, describe, message_of, print_note
from trawl.extras.cli.policies import fingerprint
from trawl.extras.cli.saving import (
    StateSaver,
    continues,
    is_resumed,
    previous_facts,
    state_to_continue,
)
from trawl.extras.cli.statistics import load_statistics, save_statistics
from trawl.extras.cli.summary import print_summary, run_name
from trawl.extras.cli.transforms import check_options, recorded_options
from trawl.extras.monitors.sinks import STATS_SINKS
from trawl.observe import (
    Bottleneck,
    CollectionProgress,
    Monitor,
    StatsSink,
)
from trawl.observe.bottleneck import bottleneck_of
from trawl.observe.waits import LIMITS
from trawl.supported import COMMAND_PROCESSES
from trawl.versions import versions


def collect(args: CollectArguments) -> int:
    """Collects frames into a dataset on disk.

    Returns:
        The exit code: 0.

    Raises:
        CliError: if the arguments are not valid, or collection fails. Frames that were already
            committed are kept.
        StoppedEarly: if a signal stopped the collection; committed frames are kept.
        OSError: if the dataset can't be written.
    """
    _check(args)
    sinks = log_sinks(args)
    started = datetime.now(timezone.utc)
    directory = Path(args.out or run_name(args.env, started))
    before = _before(args, directory)
    frames = before["frames"]
    if frames >= args.frames:
        return _nothing_to_do(args, directory, before)
    drawn = secrets.randbits(31) if args.seed is None else args.seed
    seed = before.get("seed", drawn)
    each = args.frames_per_batch or before.get("frames_per_batch") or batch_size(args)
    # The same seed would give the same frames again.
    stream = derive(seed, "resume", frames) if frames else seed
    found = _continued(replace(args, frames_per_batch=each), directory, before, seed)
    if found is None:
        rest = replace(args, frames=args.frames - frames, frames_per_batch=each)
        collector, saved = make_collector(rest, seed, stream), None
        uncounted = frames
        if frames:
            load_statistics(collector, directory, frames)
    else:
        collector, saved = found
        uncounted = 0
        stream, frames = seed, saved.sink.frames
    info = _facts(args, started, seed)
    if frames:
        again = {"frames": frames, "date": info["date"], "seed": stream}
        info["resumed"] = [*before.get("resumed", []), again]
        info["date"] = before.get("date", info["date"])
        # The timeline of an earlier run does not show this one.
        info.setdefault("trace", None)
    with collector, logged(collector, sinks, args.log_every, uncounted):
        _begin_trace(args, collector)
        return _Run(args, collector, directory, info, saved).run()


def _facts(args: CollectArguments, started: datetime, seed: int) -> dict[str, Any]:
    """Returns facts about a collection, for the dataset's record."""
    facts: dict[str, Any] = {
        "env": args.env,
        "policy": args.policy,
        "policy_sha256": fingerprint(args.policy),
        "seed": seed,
        "date": started.isoformat(timespec="seconds"),
        "versions": versions(),
        "arguments": flat(args),
        # Replaces the value of an earlier run, which --resume continues.
        "stopped_by": None,
    }
    if kwargs := env_kwargs(args):
        facts["env_kwargs"] = kwargs
    if args.info_keys:
        facts["info_keys"] = list(args.info_keys)
    facts |= recorded_options(args.options)
    if args.deterministic:
        facts["deterministic"] = True
    if args.options.trace is not None:
        facts["trace"] = os.path.abspath(args.options.trace)
    return facts


def _begin_trace(args: CollectArguments, collector: Any) -> None:
    """Begins the timeline that the arguments ask for; it ends with the collector."""
    if args.options.trace is None:
        return
    try:
        collector.trace(args.options.trace)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else message_of(error)
        raise CliError(f"--trace {args.options.trace} can't be written: {why}") from error


def _continued(
    args: CollectArguments, directory: Path, before: dict[str, Any], seed: int
) -> tuple[Any, SavedState] | None:
    """Returns a collector that continues from the dataset's state, and the state.

    If there is no such state, or the collector can't continue from it, returns None.
    """
    if not is_resumed(before):
        return None
    saved = state_to_continue(args, directory, before)
    if saved is None:
        return None
    collector = make_collector(args, seed)
    return (collector, saved) if continues(collector, saved, args.unsafe_pickle) else None


def _before(args: CollectArguments, directory: Path) -> dict[str, Any]:
    """Returns the facts about the dataset to resume.

    If no dataset is to be resumed, only ``frames`` is returned, which is 0.
    """
    if args.resume:
        return previous_facts(args, directory)
    try:
        check_free(directory)
    except FileExistsError as error:
        raise CliError(f"{message_of(error)}: pass another --out, or --resume") from None
    return {"frames": 0}


def _nothing_to_do(args: CollectArguments, directory: Path, before: dict[str, Any]) -> int:
    """Reports that no more frames are needed, and marks a dataset with all frames as complete."""
    frames, asked = before["frames"], int((before.get("arguments") or {}).get("frames", 0))
    message = (
        f"{directory} already has {frames:,} frames, and --frames {args.frames} asks for no more"
    )
    if frames >= asked:
        with _new_sink(args, directory, {}):
            pass
    elif not before["complete"]:
        message += f" (the last run asked for --frames {asked})"
    print_note(f"{message}: nothing was collected")
    return 0


def _opened(
    args: CollectArguments, directory: Path, info: dict[str, Any], saved: SavedState | None
) -> Sink:
    """Opens the sink that the arguments specify, and lets it continue from a state."""
    sink = _new_sink(args, directory, info)
    if saved is not None:
        try:
            sink.continue_from(saved)
        except Exception as error:  # the state may come from a stranger
            raise CliError(f"{directory} can't be continued: {describe(error)}") from error
    return sink


def _new_sink(args: CollectArguments, directory: Path, info: dict[str, Any]) -> Sink:
    try:
        if args.format == "minari":
            metadata = {"algorithm_name": args.policy}
            env = env_of_minari(args)
            return MinariSink(directory, env, info, resume=args.resume, metadata=metadata)
        found: Sink = FORMATS[args.format](directory, info, resume=args.resume)
        return found
    except (ImportError, ValueError, gymnasium.error.Error) as error:
        raise CliError(message_of(error)) from error
    except FileExistsError as error:
        raise CliError(f"{message_of(error)}: pass another --out") from error
    except OSError as error:
        raise CliError(_unwritable(directory, error)) from error


def _unwritable(directory: Path, error: OSError) -> str:
    return f"{directory} can't be written: {error.strerror or message_of(error)}"


class _Run:
    """One run of ``trawl collect``, from the first batch to the closed dataset.

    Args:
        args: arguments of the command.
        collector: the collector.
        directory: path of the dataset.
        info: facts about the dataset, for its record.
        saved: the state that the collector has loaded from the dataset, if any.
    """

    def __init__(
        self,
        args: CollectArguments,
        collector: Any,
        directory: Path,
        info: dict[str, Any],
        saved: SavedState | None,
    ) -> None:
        self.saved = saved
        self.args, self.collector, self.directory, self.info = args, collector, directory, info
        each = collector.stats()["requested_frames_per_batch"]
        self.info["frames_per_batch"] = each
        self.progress = CollectionProgress(
            collector, args.env, find_bottleneck=bottleneck_finder(args), learner="writing"
        )
        self.interrupts = Interrupts(self.progress.say)
        self.hurried = False
        self.error: CliError | None = None

    def run(self) -> int:
        with self.interrupts:
            self.sink = _opened(self.args, self.directory, self.info, self.saved)
            self.saver = StateSaver(self.collector, self.sink)
            try:
                with self.progress:
                    self._gather()
            except KeyboardInterrupt:
                self.hurried = True
            self._finish()
        if self.sink.frames:
            console = Console(file=sys.stdout)
            facts = {**self.sink.info, "frames": self.sink.frames}
            print_summary(console, self.directory, facts, self.progress.episodes)
        if self.error is not None:
            raise CliError(f"{self.error}; {self._kept()}") from self.error.__cause__
        if self.interrupts.signum is not None:
            raise StoppedEarly(f"interrupted; {self._kept()}", 128 + self.interrupts.signum)
        return 0

    def _gather(self) -> None:
        """Collects until all frames are collected, a signal arrives, or an error is raised."""
        try:
            self._save()
            for batch in self.collector:
                self._write(batch)
                self.progress.update(batch)
                if self.interrupts.signum is not None:
                    return
        except CliError as error:
            self.error = error
        except (Exception, SystemExit) as error:
            self.error = CliError(f"collection failed: {describe(error)}")
            self.error.__cause__ = error

    def _write(self, batch: Any) -> None:
        try:
            self.sink.write(batch)
            self.saver.note(batch)
        except OSError as error:
            raise CliError(_unwritable(self.directory, error)) from error
        except (TypeError, ValueError) as error:
            raise CliError(message_of(error)) from error

    def _save(self) -> None:
        try:
            self.saver.save()
        except OSError as error:
            raise CliError(_unwritable(self.directory, error)) from error

    def _finish(self) -> None:
        """Saves the collector's state, and closes the dataset.

        If a second signal arrives meanwhile, the dataset is closed without waiting for the disk.
        """
        self.sink.info.update(self._outcome())
        complete = self.sink.frames + self.sink.waiting >= self.args.frames
        for sync in (not self.hurried, False):
            try:
                # After an error or in the middle of a batch, only the last state is of use.
                if sync and self.error is None:
                    self._save()
                self.sink.close(complete=complete, sync=sync)
                if self.sink.frames:
                    frames = self.sink.frames
                    save_statistics(self.collector, self.directory, frames, wait=sync)
                return
            except KeyboardInterrupt:
                continue
            except CliError as error:
                self.error = error
            except OSError as error:
                if self.error is None:
                    self.error = CliError(_unwritable(self.directory, error))
                    self.error.__cause__ = error
                return
        raise StoppedEarly(f"stopped; {self._kept()}", 128 + signal.SIGINT)

    def _outcome(self) -> dict[str, Any]:
        facts, signum = self.collector.stats(), self.interrupts.signum
        stopped = None if signum is None else signal.Signals(signum).name
        outcome = {
            "stopped_by": stopped if self.error is None else str(self.error),
            "seconds": round(self.progress.seconds, 3),
            "env_time_share": round(facts.get("env_time_share", 0.0), 4),
            "episodes": self.progress.episodes.summary(),
            **run_facts(self.progress),
        }
        if self.args.workers:
            outcome["workers"] = self._workers(facts["restarts"])
        return outcome

    def _workers(self, restarts: int) -> dict[str, Any]:
        facts, count = self.collector.stats("per_worker"), self.args.workers
        return {
            "count": count,
            "sync": not self.args.asynchronous,
            "restarts": restarts,
            "frames": [facts[f"worker_{index}/frames"] for index in range(count)],
        }

    def _kept(self) -> str:
        if not self.sink.frames:
            return "no batch was complete, so nothing was written"
        return f"kept the {self.sink.frames:,} frames collected so far, in {self.directory}"


def _check(args: CollectArguments) -> None:
    check_numbers(args, "frames", "frames_per_batch", "envs")
    check_options(args.options)
    env_kwargs(args)
    if args.format not in FORMATS:
        raise CliError(f"--format {args.format} is unknown: the formats are {', '.join(FORMATS)}")
    if args.deterministic and args.policy == "random":
        raise CliError("--deterministic needs a policy, but the actions are random: pass --policy")
    if args.env_processes < 0 or (args.env_processes and args.envs % args.env_processes):
        raise CliError(
            "--env-processes must divide the number of environments (--envs), which is "
            f"{args.envs}, but it is {args.env_processes}"
        )
    if args.env_processes and args.workers:
        raise CliError(COMMAND_PROCESSES.text("--env-processes", against="--workers"))
    if args.asynchronous and not args.workers:
        raise CliError("--async needs worker processes: pass --workers")


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


def run_facts(progress: CollectionProgress) -> dict[str, Any]:
    """Returns the statistics, the throughput and the bottleneck of a run, as plain JSON."""
    found = progress.bottleneck
    return {
        "stats": plain(progress.stats),
        "throughput": [[round(seconds, 3), frames] for seconds, frames in progress.throughput],
        "bottleneck": None if found.part == "unknown" else plain(asdict(found)),
    }


def plain(value: Any) -> Any:
    """Returns a value as plain JSON, in which None stands for numbers that are not finite.

    Examples:
        >>> plain({"frames": 10, "episode_return_mean": float("nan")})
        {'frames': 10, 'episode_return_mean': None}
    """
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else None


def bottleneck_finder(args: CollectArguments) -> Callable[[Mapping[str, Any]], Bottleneck]:
    """Returns a function that finds the bottleneck of a run, and names options of the command.

    Args:
        args: arguments of the command.
    """

    def find(stats: Mapping[str, Any]) -> Bottleneck:
        found = bottleneck_of(stats)
        subject, remedy = _subject(found), _remedy(found.part, args)
        if subject is None:
            return found
        return replace(found, sentence=f"{subject}: {remedy}." if remedy else f"{subject}.")

    return find


def _subject(found: Bottleneck) -> str | None:
    """Returns the first part of the sentence; None if the sentence need not be changed."""
    busy, total = f"({found.share:.0%} of busy time)", f"({found.share:.0%} of the time)"
    match found.part:
        case "environment" | "policy" | "overhead":
            return f"{LIMITS[found.part].subject} limits the rate {busy}"
        case "learner":
            return f"Writing the dataset limits the rate {total}"
        case "driver":
            return f"Receiving batches limits the rate {total}"
        case "straggler":
            return f"Worker {found.worker} limits the rate, because the others wait for it"
        case _:
            return None


def _remedy(part: str, args: CollectArguments) -> str | None:
    """Returns an option that may help; None if there is none."""
    match part:
        case "environment":
            return "use more --workers if there are idle cores"
        case "policy":
            return "use more --envs, to act for many at once"
        case "overhead" | "driver" | "learner":
            return "use a larger --frames-per-batch"
        case "straggler" if not args.asynchronous:
            return "with --async, no worker waits"
        case _:
            return None


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
    if name not in STATS_SINKS:
        raise CliError(
            f"--log {text} doesn't begin with one of {', '.join(f'{one}:' for one in STATS_SINKS)}"
            f"{did_you_mean([name], STATS_SINKS)}"
        )
    try:
        kind = STATS_SINKS[name]
        if not target:
            raise CliError(f"--log {text} needs a value: --log {name}:{kind.target}")
        return kind.from_text(target, resume)
    except (ImportError, ValueError) as error:
        raise CliError(f"--log {text}: {message_of(error)}") from error


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
