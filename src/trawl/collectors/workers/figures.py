"""Figures of a collector's workers."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from trawl.collectors.multi_config import MultiConfig
from trawl.collectors.watch.figures import Figures
from trawl.collectors.watch.times import shares_of
from trawl.collectors.watch.tracer import Tracer
from trawl.collectors.workers.assembler import BatchAssembler
from trawl.collectors.workers.lag import Lags
from trawl.collectors.workers.pool import WorkerPool
from trawl.collectors.workers.scheduler import Scheduler
from trawl.collectors.workers.slot import summary
from trawl.collectors.workers.tracer import WorkerTracer
from trawl.collectors.workers.weight_sender import WeightSender
from trawl.observe.trace_options import TraceOptions
from trawl.rollout.slab import SlabPool


class WorkersFigures(Figures):
    """Figures of a collector's workers.

    Args:
        config: options of the collector.
        sync: True if all workers contribute to each batch.
        ahead: True if a worker may make several batches at the same time.
        remote: True if workers may be on other machines.

    Attributes:
        pool: the workers; None until they are started.
        scheduler: the object that requests batches.
        assembler: the object that makes batches of those of workers.
        sender: the object that sends weights to workers.
        lags: number of frames with each lag.
    """

    def __init__(self, config: MultiConfig, sync: bool, ahead: bool, remote: bool) -> None:
        self._config, self._sync, self._ahead, self._remote = config, sync, ahead, remote
        self.pool: WorkerPool | None = None
        self.scheduler: Scheduler | None = None
        self.assembler: BatchAssembler | None = None
        self.sender: WeightSender | None = None
        self.lags = Lags()
        self._waited = 0.0

    @property
    @override
    def batches_ready(self) -> int:  # type: ignore[override]
        return 0 if self.scheduler is None else self.scheduler.batches_ready

    @property
    @override
    def queue_depth(self) -> int:  # type: ignore[override]
        return 0 if self.pool is None else sum(len(slot.pending) for slot in self.pool.slots)

    @override
    def pop_waited(self) -> float:
        assert self.scheduler is not None
        before, self._waited = self._waited, self.scheduler.waited
        return self._waited - before

    @override
    def shares(self) -> dict[str, Any]:
        return {} if self.pool is None else shares_of([slot.times for slot in self.pool.slots])

    @override
    def per_worker(self) -> dict[str, Any]:
        if self.pool is None or self.scheduler is None or self.sender is None:
            return {}
        together = summary(self.pool.slots)
        facts = {name: together[name] for name in ("workers", "workers_alive")}
        for slot in self.pool.slots:
            one = slot.stats()
            # A worker that is being added has no batches yet.
            if slot.index < len(self.scheduler.frames):
                one["requested_frames_per_batch"] = self.scheduler.frames[slot.index]
            version = self.sender.acknowledged(slot)
            if isinstance(version, int):
                one["policy_version"] = version
            facts |= {f"worker_{slot.index}/{name}": value for name, value in one.items()}
        return facts

    @override
    def aggregate(self) -> dict[str, Any]:
        if self.pool is None:
            return {}
        facts = summary(self.pool.slots)
        facts["batches_held"] = sum(pool.leased for pool in self._memory)
        facts["memory_bytes"] = sum(pool.nbytes for pool in self._memory)
        ahead = "prefetch" if self._config.prefetch else "synchronous"
        facts["schedule"] = ahead if self._sync else "asynchronous"
        runs_ahead = not self._sync or self._config.prefetch or self._ahead
        if runs_ahead or self._config.preempts:
            facts |= self.lags.stats()
        if self._config.on_env_error == "restart":
            facts.setdefault("env_restarts", 0)
        return facts

    @property
    def _memory(self) -> list[SlabPool]:
        return [] if self.assembler is None else list(self.assembler.pools)

    # --- timelines

    @override
    def new_tracer(self, options: TraceOptions) -> Tracer:
        return WorkerTracer("trace", options, self._remote)

    @override
    def connect(self, tracer: Tracer | None) -> None:
        if self.pool is None or self.scheduler is None:
            return
        drawn = tracer if isinstance(tracer, WorkerTracer) else None
        self.scheduler.on_wait = None if drawn is None else drawn.waited
        self.scheduler.samples_steps = drawn is not None and drawn.samples_steps
        for slot in self.pool.slots:
            slot.lane = None if drawn is None else drawn.lane(slot.index)

    @override
    def counters(self) -> dict[str, float]:
        if self.assembler is None:
            return {}
        return {
            "policy lag": self.lags.last,
            "batches held": sum(pool.leased for pool in self._memory),
            "memory": sum(pool.nbytes for pool in self._memory),
        }
