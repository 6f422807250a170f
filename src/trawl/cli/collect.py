"""``trawl collect``."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console

from trawl.cli.arguments import Collect
from trawl.cli.collectors import make_collector
from trawl.cli.errors import CliError, Stopped, describe, message_of
from trawl.cli.interrupts import Interrupts
from trawl.cli.policies import fingerprint
from trawl.cli.summary import print_summary
from trawl.cli.versions import versions
from trawl.data import DatasetWriter
from trawl.data.dataset import check_free
from trawl.observe import CollectionProgress


def collect(args: Collect) -> int:
    """Collects frames into a dataset on disk.

    Returns:
        The exit code: 0.

    Raises:
        CliError: if what was asked for can't be done; nothing was written then.
        Stopped: if it ended before its end; what there is was kept.
        OSError: if the dataset can't be written.
    """
    _check(args)
    started = datetime.now(timezone.utc)
    directory = Path(args.out or _directory(args.env, started))
    try:
        check_free(directory)
    except FileExistsError as error:
        raise CliError(f"{message_of(error)}: give another --out") from None
    seed = secrets.randbits(31) if args.seed is None else args.seed
    with make_collector(args, seed) as collector:
        info = {
            "env": args.env,
            "policy": args.policy,
            "policy_sha256": fingerprint(args.policy),
            "seed": seed,
            "date": started.isoformat(timespec="seconds"),
            "versions": versions(),
            "arguments": asdict(args),
        }
        return _Run(args, collector, directory, info).go()


class _Run:
    """One collection, from its first batch to the dataset."""

    def __init__(
        self, args: Collect, collector: Any, directory: Path, info: dict[str, Any]
    ) -> None:
        self.args, self.collector, self.directory, self.info = args, collector, directory, info
        self.progress = CollectionProgress(collector, args.env)
        self.interrupts = Interrupts(self.progress.say)
        self.hurried = False
        self.error: CliError | None = None

    def go(self) -> int:
        with self.interrupts:
            try:
                self.writer = DatasetWriter(self.directory, self.info)
            except OSError as error:
                raise CliError(self._unwritable(error)) from error
            try:
                with self.progress:
                    self._gather()
            except KeyboardInterrupt:
                self.hurried = True
            self._finish()
        if self.writer.frames:
            console = Console(file=sys.stdout)
            print_summary(console, self.directory, self.writer.info, self.progress.episodes)
        if self.error is not None:
            raise CliError(f"{self.error}; {self._kept()}") from self.error.__cause__
        if self.interrupts.signum is not None:
            raise Stopped(f"interrupted; {self._kept()}", 128 + self.interrupts.signum)
        return 0

    def _gather(self) -> None:
        """Collects until the end, a signal or an error."""
        try:
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
            self.writer.add(batch)
        except OSError as error:
            raise CliError(self._unwritable(error)) from error
        except (TypeError, ValueError) as error:
            raise CliError(message_of(error)) from error

    def _finish(self) -> None:
        """Makes a dataset of what there is; a signal meanwhile only ends the wait for the disk."""
        self.writer.info.update(self._outcome())
        complete = self.writer.frames >= self.args.frames
        for sync in (not self.hurried, False):
            try:
                self.writer.finish(complete=complete, sync=sync)
                return
            except KeyboardInterrupt:
                continue
            except OSError as error:
                raise CliError(f"{self._unwritable(error)}; {self._left()}") from error
        raise Stopped(f"stopped; {self._left()}", 128 + signal.SIGINT)

    def _outcome(self) -> dict[str, Any]:
        facts, signum = self.collector.stats(), self.interrupts.signum
        stopped = None if signum is None else signal.Signals(signum).name
        outcome = {
            "stopped_by": stopped if self.error is None else str(self.error),
            "frames_per_batch": facts["requested_frames_per_batch"],
            "seconds": round(self.progress.seconds, 3),
            "env_time_share": round(facts.get("env_time_share", 0.0), 4),
            "episodes": self.progress.episodes.summary(),
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
        if not self.writer.frames:
            return "no batch was whole, so nothing was written"
        return f"kept the {self.writer.frames:,} frames collected before, in {self.directory}"

    def _left(self) -> str:
        return f"what was collected is left, unfinished, in {self.writer.partial}"

    def _unwritable(self, error: OSError) -> str:
        return f"{self.directory} can't be written: {error.strerror or message_of(error)}"


def _check(args: Collect) -> None:
    for name in ("frames", "frames_per_batch", "max_frames_per_traj", "envs"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise CliError(f"--{name.replace('_', '-')} must be at least 1, but it is {value}")
    if args.workers < 0:
        raise CliError(f"--workers must be at least 0, but it is {args.workers}")
    if args.backend != "process" and not args.workers:
        raise CliError(f"--backend {args.backend} needs workers: give --workers")
    if args.asynchronous and not args.workers:
        raise CliError("--async needs processes to collect in: give --workers")
    if args.seed is not None and not 0 <= args.seed < 2**63:
        raise CliError(f"--seed must be between 0 and 2**63 - 1, but it is {args.seed}")


def _directory(env: str, started: datetime) -> str:
    name = env.replace(os.sep, "-").replace(":", "-")
    return os.path.join("runs", f"{name}-{started.astimezone():%Y%m%d-%H%M%S}")
