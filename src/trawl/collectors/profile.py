"""Profiles of collection, by ``torch.profiler``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import profiler

from trawl.collectors.config import CollectorConfig


@dataclass
class ProfileConfig:
    """Options of a profile.

    Attributes:
        workers: numbers of the workers to profile; a collector that is no worker is number 0.
        num_rollouts: batches after which profiling ends, warm-up included.
        warmup_rollouts: batches before it begins.
        save_path: file for the Chrome trace; ``"{worker_idx}"`` in it becomes the worker's
            number. Default ``./collector_profile_{worker_idx}.json``.
        activities: ``"cpu"`` and ``"cuda"``; activities that the machine lacks are left out.
        record_shapes: whether shapes of operators' inputs are recorded.
        profile_memory: whether allocations are recorded.
        with_stack: whether source lines are recorded.
        with_flops: whether floating-point operations are counted.
        on_trace_ready: called with the profiler at the end, instead of saving.

    Raises:
        ValueError: if nothing would be left to profile, or an activity is unknown.
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
            raise ValueError(f"activities must be 'cpu' or 'cuda', but there is {sorted(unknown)}")

    def should_profile_worker(self, worker_idx: int) -> bool:
        """Returns True if a worker is among those to profile."""
        return worker_idx in self.workers

    def get_save_path(self, worker_idx: int) -> Path:
        """Returns the file for the trace of a worker."""
        template = self.save_path or "./collector_profile_{worker_idx}.json"
        return Path(str(template).replace("{worker_idx}", str(worker_idx)))

    def get_activities(self) -> list[profiler.ProfilerActivity]:
        """Returns those of ``activities`` that ``torch.profiler`` supports on this machine."""
        wanted = [getattr(profiler.ProfilerActivity, name.upper()) for name in self.activities]
        possible = profiler.supported_activities()
        return [activity for activity in wanted if activity in possible]


class RolloutProfiler:
    """Profiles the batches that a :class:`ProfileConfig` names.

    Args:
        config: what to profile.
        worker: number of this worker.
    """

    def __init__(self, config: ProfileConfig, worker: int) -> None:
        self.config = config
        self.worker = worker
        self._seen = 0
        self._profile: Any = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Context for the collection of each batch; begins and ends the profile when due."""
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
        """Ends the profile, if it runs, and saves its trace."""
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


class ProfiledCollector:
    """Profiles of a collector's batches."""

    config: CollectorConfig
    _batches: int
    _profiler: RolloutProfiler | None
    _profile_config: ProfileConfig | None

    if TYPE_CHECKING:
        _check_open: Callable[[str], None]
        is_running: Callable[[], bool]

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
            workers: numbers of the workers to profile; the first by default. A collector in
                this process is number 0.
            num_rollouts: batches after which profiling ends, warm-up included.
            warmup_rollouts: batches before profiling begins.
            save_path: file for the Chrome trace, as
                :class:`~trawl.collectors.ProfileConfig` takes it.
            activities: ``"cpu"`` and ``"cuda"``; both by default.
            record_shapes: True to record the shapes of operators' inputs.
            profile_memory: True to record allocations.
            with_stack: True to record source lines.
            with_flops: True to count floating-point operations.
            on_trace_ready: function called with the profiler at the end, instead of saving.

        Raises:
            RuntimeError: if batches were collected already, or the collector is closed.
            ValueError: if the options leave nothing to profile, or an activity is unknown.
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
        self._check_open("enable_profile()")
        if self._batches or self.is_running():
            raise RuntimeError("enable_profile() must be called before the first batch")
        self._begin_profile(config)
        self._profile_config = config

    def _begin_profile(self, config: ProfileConfig) -> None:
        """Profiles the next batches."""
        worker = self.config.worker_idx or 0
        profiled = config.should_profile_worker(worker)
        self._profiler = RolloutProfiler(config, worker) if profiled else None

    def disable_profile(self) -> None:
        """Ends the profile that :meth:`enable_profile` began, and saves what was recorded."""
        profiler, self._profiler, self._profile_config = self._profiler, None, None
        if profiler is not None:
            profiler.finish()

    @property
    def profile_config(self) -> ProfileConfig | None:
        """Options given to :meth:`enable_profile`; None if there is no profile."""
        return self._profile_config
