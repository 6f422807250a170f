"""State of a collector with workers, from which another collector continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from operator import methodcaller
from typing import Any

import cloudpickle
from typing_extensions import override

from trawl.collectors.driver.budget import PROGRESS, progress_of
from trawl.collectors.driver.state import OPTIONS, VERSION, CollectorState, LoadOptions, State
from trawl.collectors.local.state import check_loadable
from trawl.collectors.workers.access import WorkerCalls
from trawl.collectors.workers.assembler import NO_SLICE, WorkerBatch
from trawl.collectors.workers.gathering import Gathering
from trawl.collectors.workers.pool import WorkerPool
from trawl.collectors.workers.requests import BatchReady
from trawl.collectors.workers.setups import WorkerSetups
from trawl.collectors.workers.weights import WorkersWeights
from trawl.envs.capture.kinds import from_plain, to_plain
from trawl.errors import StateError, WorkerDied
from trawl.rollout.episode_sums import EndedEpisodes
from trawl.rollout.moments import RunningMoments
from trawl.rollout.normalization import Normalization
from trawl.schema.checks import UNKNOWN, integer
from trawl.schema.states import check_collector

# Entry of the state with the batches that were finished, but not delivered.
_FINISHED = "finished"
# Entry of the state: True if all requests for the next batch had been sent.
_REQUESTED = "requested"


class WorkersState(CollectorState):
    """The state of a collector with workers.

    Args:
        collector: the collector, to whose parts the object refers.
        setups: setup of each worker.
        pool: the workers.
        calls: calls functions with the workers' collectors.
        gathering: the object that makes batches of those of the workers.
    """

    _known_errors = (StateError, WorkerDied)
    _weights: WorkersWeights

    def __init__(
        self,
        collector: Any,
        setups: WorkerSetups,
        pool: WorkerPool,
        calls: WorkerCalls,
        gathering: Gathering,
    ) -> None:
        super().__init__(collector)
        self._setups, self._pool, self._calls, self._gathering = setups, pool, calls, gathering
        self._lifetime = collector.parts.lifetime

    @property
    @override
    def normalization(self) -> Normalization | None:
        return self._gathering.normalization

    def env_state_methods(self) -> list[str]:
        """Returns the way in which the state of each environment is captured, worker by worker.

        See :meth:`Collector.env_state_methods`.
        """
        each = self._calls.all(methodcaller("env_state_methods"))
        return [way for ways in each for way in ways]

    @override
    def state_dict(self) -> dict[str, Any]:
        """Returns the state needed to continue later, once workers have finished their batches.

        The state holds counts, the state of each worker's collector, and batches that workers have
        finished. A collector that is made with the same arguments, and loads the state, delivers
        these batches, and then those that the workers would have collected next. See
        :meth:`Collector.state_dict`.
        """
        self._lifetime.check_open("state_dict()")
        with self._background.held():
            self._calls.catch_up()
            self._pool.settle()
            finished = self._gathering.scheduler.finished()
            states = self._calls.all(methodcaller("state_dict"))
            for slot, one in zip(self._pool.slots, states, strict=True):
                # Counts of the workers before a replacement, too.
                one[PROGRESS] = asdict(slot.progress)
                # The options are those of this collector, which warns if they have changed.
                one.pop(OPTIONS, None)
            state: dict[str, Any] = {f"worker{i}": one for i, one in enumerate(states)}
            last = max(states, key=lambda one: int(one["traj_pool"]["traj_id"]))
            state |= self._shared()
            state["traj_pool"] = last["traj_pool"]
            state["seeds"] = [setup.seed and list(setup.seed) for setup in self._setups]
            state[_FINISHED] = [self._saved(part) for part in finished]
            state[_REQUESTED] = self._gathering.scheduler.requested
        return state

    def _saved(self, part: WorkerBatch) -> dict[str, Any]:
        """Returns a finished batch as plain data."""
        answer = part.answer
        batch, gathering = None, self._gathering
        if not gathering.workers_write:
            batch = to_plain(gathering.assembler.batch_of(part).clone())
        return {
            "worker": part.index,
            "batch": batch,
            "frames": answer.frames,
            "filled": answer.filled,
            "version": answer.version,
            "lag": self._weights.sender.count(part.index) - answer.weights,
            "trajectory": answer.trajectory,
            "random": answer.random,
            "ended": [answer.ended.number, *map(list, answer.ended[1:])],
            "statistics": [[list(k), v.state_dict()] for k, v in answer.statistics.items()],
        }

    def _loaded(self, saved: Mapping[str, Any]) -> WorkerBatch:
        """Returns a batch that :meth:`_saved` converted."""
        batch = saved["batch"]
        answer = BatchReady(
            number=self._pool.next_number(),
            frames=saved["frames"],
            filled=saved["filled"],
            version=saved["version"],
            weights=self._weights.sender.count(saved["worker"]) - saved["lag"],
            trajectory=saved["trajectory"],
            batch=None if batch is None else cloudpickle.dumps(from_plain(batch)),
            facts={},
            random=saved["random"],
            ended=_ended(saved.get("ended", (0, (), ()))),
            statistics={
                tuple(key): RunningMoments.from_state(one)
                for key, one in saved.get("statistics", ())
            },
        )
        return WorkerBatch(saved["worker"], NO_SLICE, answer)

    @override
    @contextmanager
    def _loading(self) -> Iterator[None]:
        self._lifetime.check_open("load_state_dict()")
        with self._background.held(), self._weights.in_bounds(range(self._setups.count)):
            yield

    @override
    def _loader(self, state: State, how: LoadOptions, own: State | None) -> Callable[[], None]:
        self._check_state(state, own or {})
        if how.raises:
            # All workers check before any worker changes.
            calls = {
                i: (check_loadable, state[name], how.strict) for i, name in enumerate(self._names)
            }
            self._pool.call(calls)
        return partial(self._load, state, how)

    @override
    def _put_back(self, before: State | None) -> None:
        if before is not None:
            with suppress(WorkerDied):
                self._load(before, LoadOptions(strict=True, trust=True, raises=False))

    @property
    def _names(self) -> list[str]:
        return [f"worker{index}" for index in range(self._setups.count)]

    def _check_state(self, state_dict: Any, own: State) -> None:
        """Checks all entries that are not those of a worker's collector."""
        check_collector(state_dict, own, self._names)
        made_by = sum(name.startswith("worker") for name in state_dict)
        if made_by != self._setups.count:
            raise StateError(
                f"state_dict comes from a collector with {made_by} workers, but this one has "
                f"{self._setups.count}"
            )
        for name in self._names:
            check_collector(state_dict[name], own.get(name, UNKNOWN), place=f"state_dict[{name!r}]")
        for part in state_dict.get(_FINISHED, ()):
            integer(0, self._setups.count - 1)(part["worker"], f"{_FINISHED}: worker", UNKNOWN)
        self._check_shared(state_dict)

    def _load(self, state_dict: State, how: LoadOptions) -> None:
        """Loads a state whose entries have been checked; an exception leaves it loaded in part."""
        names = self._names
        tracker = self._weights.tracker
        version = state_dict.get(VERSION, tracker and tracker.version)
        loaded = {
            i: weights
            for i, name in enumerate(names)
            if (weights := state_dict[name].get("policy_state_dict")) is not None
        }
        send = self._weights.sender.prepare_each(loaded)
        # Batches that were requested earlier belong to old episodes.
        self._pool.settle()
        self._calls.catch_up()
        self._gathering.scheduler.pop_finished()
        last = self._pool.last_request
        before = self._weights.sender.versions, [setup.env_state for setup in self._setups]
        for setup, name in zip(self._setups, names, strict=True):
            setup.env_state = state_dict[name].get("env_state_dict")
        if tracker is not None:
            self._weights.sender.versions = [
                state_dict[name].get(VERSION, version) for name in names
            ]
        # Sent before the call, because a worker may be replaced while others load.
        send()
        try:
            resumed = self._pool.call(
                {index: (_load, state_dict[name], how) for index, name in enumerate(names)}
            )
        except BaseException:
            self._weights.sender.versions, env_states = before
            for setup, env_state in zip(self._setups, env_states, strict=True):
                setup.env_state = env_state
            raise
        self.resumed = all(resumed.values())
        self._weights.sender.set_version(version)
        for slot, name in zip(self._pool.slots, names, strict=True):
            slot.progress.load(progress_of(state_dict[name]))
        self._load_shared(state_dict, last)
        parts = [self._loaded(one) for one in state_dict.get(_FINISHED, ())]
        self._gathering.scheduler.put_back(parts, state_dict.get(_REQUESTED, False))
        for setup, seed in zip(self._setups, state_dict.get("seeds", ()), strict=False):
            setup.seed = None if seed is None else (int(seed[0]), bool(seed[1]))
        for slot, name in zip(self._pool.slots, names, strict=True):
            if "traj_pool" in state_dict[name]:
                begins = int(state_dict[name]["traj_pool"]["traj_id"])
                slot.trajectory = max(slot.trajectory, begins)


def _ended(saved: Sequence[Any]) -> EndedEpisodes:
    number, returns, lengths = saved
    return EndedEpisodes(int(number), tuple(returns), tuple(lengths))


def _load(collector: Any, state: State, how: LoadOptions) -> bool:
    """Loads a worker's state; returns True if its episodes go on."""
    mode = "raise" if how.raises else "new_episodes"
    given = {"trust": how.trust, "on_state_mismatch": mode} if how.trust or not how.raises else {}
    collector.load_state_dict(state, how.strict, **given)
    return bool(getattr(collector, "resumed", False))
