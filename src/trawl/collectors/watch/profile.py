"""Profiling of collection with ``torch.profiler``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import profiler


@dataclass
class ProfileConfig:
    """Options of a profile.

    Attributes:
        workers: numbers of the workers to profile. A collector without workers has the number 0.
        num_rollouts: number of batches after which profiling ends, including the warm-up.
        warmup_rollouts: number of batches before profiling begins.
        save_path: file for the Chrome trace. ``"{worker_idx}"`` in the path is replaced by the
            worker's number. Default: ``./collector_profile_{worker_idx}.json``.
        activities: activities to record: ``"cpu"``, ``"cuda"`` or both. Activities that the
            machine doesn't support are left out.
        record_shapes: whether to record the shapes of operators' inputs.
        profile_memory: whether to record allocations.
        with_stack: whether to record source lines.
        with_flops: whether to count floating-point operations.
        on_trace_ready: function that is called with the profiler at the end, in place of saving
            the trace.

    Raises:
        ValueError: if the options leave no batch to profile, or an activity is unknown.
    """

    workers: list[int] = field(default_factory=lambda: [0])
    num_rollouts: int = 3
    warmup_rollouts: int = 1
    save_path: str | Path | None = None
    activities: list[str] = field(default_factory=lambda: ["cpu", "cuda"])
    record_shapes: bool = True
    profile_memory: bool = False
    with_stack: bool = True
    with_flops: bool = False
    on_trace_ready: Callable[[Any], Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.warmup_rollouts < 0:
            raise ValueError(
                f"warmup_rollouts must not be negative, but it is {self.warmup_rollouts}"
            )
        if self.num_rollouts <= self.warmup_rollouts:
            raise ValueError(
                f"num_rollouts={self.num_rollouts} must be more than "
                f"warmup_rollouts={self.warmup_rollouts}: nothing would be profiled"
            )
        unknown = set(self.activities) - {"cpu", "cuda"}
        if unknown:
            raise ValueError(
                f"activities must be 'cpu' or 'cuda', but they include {sorted(unknown)}"
            )

    def should_profile_worker(self, worker_idx: int) -> bool:
        """Returns True if a worker is to be profiled."""
        return worker_idx in self.workers

    def get_save_path(self, worker_idx: int) -> Path:
        """Returns the path of the file for a worker's trace."""
        template = self.save_path or "./collector_profile_{worker_idx}.json"
        return Path(str(template).replace("{worker_idx}", str(worker_idx)))

    def get_activities(self) -> list[profiler.ProfilerActivity]:
        """Returns the requested activities that ``torch.profiler`` supports on this machine."""
        wanted = [getattr(profiler.ProfilerActivity, name.upper()) for name in self.activities]
        possible = profiler.supported_activities()
        return [activity for activity in wanted if activity in possible]


class RolloutProfiler:
    """Profiles the batches that a :class:`ProfileConfig` selects.

    Args:
        config: options of the profile.
        worker: number of this worker.
    """

    def __init__(self, config: ProfileConfig, worker: int) -> None:
        self.config = config
        self.worker = worker
        self._seen = 0
        self._profile: Any = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Context in which one batch is collected; it begins or ends the profile when due."""
        if self._seen == self.config.warmup_rollouts:
            self._profile = self._new()
            self._profile.start()
        try:
            yield
        finally:
            self._seen += 1
            if self._seen == self.config.num_rollouts:
                self.finish()

    def finish(self) -> None:
        """Ends the profile if one is running, and saves its trace."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        profile.stop()
        if self.config.on_trace_ready is not None:
            self.config.on_trace_ready(profile)
        else:
            path = self.config.get_save_path(self.worker)
            path.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(path))

    def _new(self) -> Any:
        config = self.config
        return profiler.profile(
            activities=config.get_activities(),
            record_shapes=config.record_shapes,
            profile_memory=config.profile_memory,
            with_stack=config.with_stack,
            with_flops=config.with_flops,
        )


class Profiling:
    """The profile of a collector's batches.

    Args:
        worker: number of the collector's worker; 0 if it belongs to none.
        check: function that raises an exception if it is too late to begin a profile.

    Attributes:
        profiler: profiles the batches of this process; None if they are not profiled.
        config: options given to :meth:`enable_profile`; None if there is no profile.
    """

    def __init__(self, worker: int, check: Callable[[], None]) -> None:
        self.profiler: RolloutProfiler | None = None
        self.config: ProfileConfig | None = None
        self._worker, self._check = worker, check

    def turn(self) -> AbstractContextManager[None]:
        """Returns the context in which one batch is collected."""
        return nullcontext() if self.profiler is None else self.profiler.turn()

    def enable_profile(
        self,
        workers: Sequence[int] | None = None,
        num_rollouts: int = 3,
        warmup_rollouts: int = 1,
        save_path: str | Path | None = None,
        activities: Sequence[str] | None = None,
        record_shapes: bool = True,
        profile_memory: bool = False,
        with_stack: bool = True,
        with_flops: bool = False,
        on_trace_ready: Callable[[Any], Any] | None = None,
    ) -> None:
        """Profiles the first batches with ``torch.profiler``.

        Args:
            workers: numbers of the workers to profile; the first by default. A collector without
                workers has the number 0.
            num_rollouts: number of batches after which profiling ends, including the warm-up.
            warmup_rollouts: number of batches before profiling begins.
            save_path: file for the Chrome trace (see :class:`~trawl.collectors.ProfileConfig`).
            activities: activities to record: ``"cpu"``, ``"cuda"`` or both; both by default.
            record_shapes: True to record the shapes of operators' inputs.
            profile_memory: True to record allocations.
            with_stack: True to record source lines.
            with_flops: True to count floating-point operations.
            on_trace_ready: function that is called with the profiler at the end, in place of
                saving the trace.

        Raises:
            RuntimeError: if the collector has already collected batches, or is closed.
            ValueError: if the options leave no batch to profile, or an activity is unknown.
        """
        config = ProfileConfig(
            [0] if workers is None else list(workers),
            num_rollouts,
            warmup_rollouts,
            save_path,
            ["cpu", "cuda"] if activities is None else list(activities),
            record_shapes,
            profile_memory,
            with_stack,
            with_flops,
            on_trace_ready,
        )
        self._check()
        self._begin(config)
        self.config = config

    def _begin(self, config: ProfileConfig) -> None:
        """Profiles the next batches."""
        profiled = config.should_profile_worker(self._worker)
        self.profiler = RolloutProfiler(config, self._worker) if profiled else None

    def disable_profile(self) -> None:
        """Ends the profile that :meth:`enable_profile` began, and saves its trace."""
        profiler, self.profiler, self.config = self.profiler, None, None
        if profiler is not None:
            profiler.finish()
