"""The command ``trawl collect``."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import gymnasium
from rich.console import Console

from trawl.cli.arguments import CollectArguments
from trawl.cli.collectors import batch_size, make_collector
from trawl.cli.environments import check_numbers, env_kwargs, env_of_minari
from trawl.cli.errors import CliError, StoppedEarly, describe, message_of
from trawl.cli.interrupts import Interrupts
from trawl.cli.logging import log_sinks, logged
from trawl.cli.notes import print_note
from trawl.cli.outcome import bottleneck_finder, run_facts
from trawl.cli.policies import fingerprint
from trawl.cli.resume import is_resumed, previous_facts
from trawl.cli.saving import StateSaver, continues, state_to_continue
from trawl.cli.statistics import load_statistics, save_statistics
from trawl.cli.summary import print_summary, run_name
from trawl.cli.transforms import check_transforms, transform_facts
from trawl.cli.versions import versions
from trawl.data import MemmapSink, MinariSink, ParquetSink, Sink
from trawl.data.sinks.base import check_free
from trawl.data.sinks.states import SavedState
from trawl.envs.seeding import derive
from trawl.observe import CollectionProgress
from trawl.supported import COMMAND_PROCESSES


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
        "arguments": asdict(args),
        # Replaces the value of an earlier run, which --resume continues.
        "stopped_by": None,
    }
    if kwargs := env_kwargs(args):
        facts["env_kwargs"] = kwargs
    if args.info_keys:
        facts["info_keys"] = list(args.info_keys)
    facts |= transform_facts(args)
    if args.deterministic:
        facts["deterministic"] = True
    if args.trace is not None:
        facts["trace"] = os.path.abspath(args.trace)
    return facts


def _begin_trace(args: CollectArguments, collector: Any) -> None:
    """Begins the timeline that the arguments ask for; it ends with the collector."""
    if args.trace is None:
        return
    try:
        collector.trace(args.trace)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else message_of(error)
        raise CliError(f"--trace {args.trace} can't be written: {why}") from error


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
        kind = ParquetSink if args.format == "parquet" else MemmapSink
        return kind(directory, info, resume=args.resume)
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
            collector, args.env, find_bottleneck=bottleneck_finder(args)
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
    check_numbers(args, "frames", "frames_per_batch", "max_frames_per_traj", "envs")
    check_transforms(args)
    env_kwargs(args)
    if args.deterministic and args.policy == "random":
        raise CliError("--deterministic needs a policy, but the actions are random: pass --policy")
    if args.env_processes < 0 or (args.env_processes and args.envs % args.env_processes):
        raise CliError(
            "--env-processes must divide the number of environments (--envs), which is "
            f"{args.envs}, but it is {args.env_processes}"
        )
    if args.env_processes and args.workers:
        raise CliError(COMMAND_PROCESSES.text("--env-processes", against="--workers"))
    if args.trace is not None and not args.trace:
        raise CliError("--trace must name a file, such as run.json.gz, but it is empty")
    if args.asynchronous and not args.workers:
        raise CliError("--async needs worker processes: pass --workers")
