"""Workers whose collectors have their own workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from typing_extensions import override

from trawl.collectors.driver.delivery import count_frames
from trawl.collectors.driver.weights import POLICY
from trawl.collectors.multi_config import NOT_HERE
from trawl.collectors.workers.requests import BatchReady, CollectRequest, WorkerReady
from trawl.collectors.workers.service import CollectorService, WorkerProgram, WorkerSpec
from trawl.extras.clusters.network.folding import fold
from trawl.keys import TRAJ_IDS
from trawl.observe.episodes import RecentEpisodes
from trawl.rollout.episode_sums import EndedEpisodes
from trawl.rollout.normalization import empty_statistics, load_statistics, pop_statistics
from trawl.rollout.times import LoopTimes


def nested(program: WorkerProgram, count: int) -> WorkerProgram:
    """Returns the program of a worker whose collector has ``count`` workers."""
    sources = program.create_env_fn if count > 1 else [program.create_env_fn]
    options = {name: value for name, value in program.options.items() if name not in NOT_HERE}
    options["num_workers"] = count
    return replace(program, create_env_fn=sources, options=options)


class NestedService(CollectorService):
    """Service of a worker whose collector has workers; it forwards the collector's batches."""

    @override
    def _begin(self, spec: WorkerSpec) -> None:
        collector = self.collector
        self._loop = LoopTimes()
        # The collector's trajectory ids are renumbered, so that each worker has different ids.
        self._stride, self._base = spec.stride, spec.trajectory
        self._next = spec.trajectory
        if spec.first_env:
            collector.number_environments(spec.first_env)
        if spec.seed is not None:
            collector.set_seed(*spec.seed)
        self._load_first_weights(spec)
        self._hidden, self._masked = frozenset(), False
        self._port.send(
            WorkerReady(
                layout=None,
                hidden=frozenset(),
                num_envs=1,
                steps=collector.requested_frames_per_batch,
                batch_size=(),
                trajectory=self._next,
                weight_layouts=self._weight_layouts(),
                # The workers of the collector have written the versions of their frames.
                versioned=True,
                first_ready=collector.parts.outbox.delivery.first_ready,
                version=collector.policy_version,
                statistics=empty_statistics(collector.normalization),
            )
        )

    @override
    def _take_version(self, spec: WorkerSpec) -> None:
        if spec.version is not None and self.collector.parts.weights.tracker is not None:
            super()._take_version(spec)
            self.collector.parts.weights.announce_version()

    @override
    def _model(self, model_id: str) -> Any:
        return self.collector.policy if model_id == POLICY else None

    @override
    def _collect(self, request: CollectRequest) -> BatchReady:
        collector = self.collector
        demand = collector.parts.gathering.demand
        demand.random_for = request.random
        # The driver counts the batches that it has requested.
        demand.most_batches = math.inf if request.ahead else len(self._requests) + 1
        collector.parts.budget.most = request.most
        load_statistics(collector.normalization, request.normalization)
        before = collector.parts.budget.frames
        self._name_writes(request)
        batch = collector.next()
        if batch is None:
            return self._answer_to(request, collector.parts.budget.frames - before, None)
        self._number(batch)
        frames = count_frames(batch, batch.shape[-1])
        return self._answer_to(request, frames, *fold(batch))

    def _number(self, batch: TensorDictBase) -> None:
        ids = batch.get(TRAJ_IDS, None)
        if ids is not None:
            ids.copy_(torch.where(ids < 0, ids, ids * self._stride + self._base))
            self._next = max(self._next, int(ids.max()) + self._stride)

    @override
    def _next_apart(self) -> Any:
        batch = self.collector.next()
        self.collector.parts.weights.pop_oldest()
        self._number(batch)
        return batch

    @override
    def _policy_weights(self) -> Any:
        return self.collector.get_cached_weights(POLICY)

    @override
    def _begin_turn(self, received: float) -> None:
        super()._begin_turn(received)
        self._before = self._inner_seconds(), self._episodes.count

    @override
    def _timed(self, answer: BatchReady) -> BatchReady:
        self._clock.end()
        seconds, count = self._before
        env, policy, weights = self._inner_seconds() - seconds
        loop = self._loop
        loop.began, loop.ended = self._clock.began, self._clock.ended
        loop.env, loop.policy = loop.env + env, loop.policy + policy
        loop.weights += weights
        count = self._episodes.count - count
        ended = EndedEpisodes(count, *self._episodes.newest(count))
        cut = tuple(
            one * self._stride + self._base for one in self.collector.parts.gathering.pop_cut()
        )
        times, statistics = (
            self._clock.batch_times(loop),
            pop_statistics(self.collector.normalization),
        )
        progress = self._pop_progress()
        return replace(
            answer, times=times, ended=ended, cut=cut, statistics=statistics, progress=progress
        )

    @property
    def _episodes(self) -> RecentEpisodes:
        episodes: RecentEpisodes = self.collector.parts.watch.episodes
        return episodes

    def _inner_seconds(self) -> NDArray[np.float64]:
        """Returns the seconds that an inner worker has spent, on average.

        They are the seconds in the environment, in the policy, and loading weights.
        """
        facts = self.collector.stats()
        names = ("env_seconds", "policy_seconds", "weights_seconds")
        seconds = np.array([facts.get(name, 0.0) for name in names])
        return seconds / float(facts["workers"])

    def _facts(self) -> dict[str, Any]:
        """Returns the statistics of the inner workers, in the form of one worker's statistics."""
        pool, facts = self.collector.parts.figures.pool, self.collector.stats()
        own = {name: facts[name] for name in ("env_time_share", "env_restarts") if name in facts}
        return {**pool.slots[0].facts, **own, "worker_restarts": pool.restarts}

    def _answer_to(
        self, request: CollectRequest, frames: int, batch: bytes | None, buffers: Sequence[Any] = ()
    ) -> BatchReady:
        collector = self.collector
        oldest = collector.parts.weights.pop_oldest()
        return BatchReady(
            number=request.number,
            frames=frames,
            filled=collector.requested_frames_per_batch,
            version=collector.policy_version,
            weights=self._updates if oldest == math.inf else int(oldest),
            trajectory=self._next,
            batch=batch,
            buffers=buffers,
            facts=self._facts(),
            # A batch of random actions may answer a request that came later.
            random=request.random or oldest == math.inf,
        )
