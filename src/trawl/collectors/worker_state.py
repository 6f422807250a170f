"""Calls of functions in workers, and the state of a collector with workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from operator import methodcaller
from typing import Any, Literal

import cloudpickle
from typing_extensions import override

from trawl.collectors.assembler import NO_SLICE, BatchAssembler, WorkerBatch
from trawl.collectors.budget import PROGRESS, progress_of
from trawl.collectors.requests import BatchReady
from trawl.collectors.resuming import check_loadable
from trawl.collectors.worker_weights import WorkerWeights
from trawl.envs.capture.kinds import from_plain, to_plain
from trawl.errors import StateError, WorkerDied
from trawl.paths import first_name, get_path
from trawl.rollout.episode_sums import EndedEpisodes
from trawl.rollout.moments import RunningMoments
from trawl.schema.checks import UNKNOWN, integer
from trawl.schema.states import check_collector

# Entry of the state with the batches that were finished, but not delivered.
_FINISHED = "finished"
# Entry of the state: True if all requests for the next batch had been sent.
_REQUESTED = "requested"


class WorkerState(WorkerWeights):
    """The part of a collector with workers that calls functions in workers, and has their state.

    Attributes:
        resumed: True if the episodes of the state that was loaded last go on.
    """

    num_workers: int
    _assembler: BatchAssembler
    resumed = False

    def _all(self, function: Any, *arguments: Any) -> list[Any]:
        """Calls a function with each worker's collector, and returns the results."""
        return self._each(function, [arguments] * self.num_workers)

    def _each(self, function: Any, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Calls a function with the collector of each worker that has an entry in ``arguments``."""
        self._check_open(getattr(function, "__name__", "a call"))
        with self._held():
            results = self._call({i: (function, *own) for i, own in enumerate(arguments)})
        return list(results.values())

    def _call(self, calls: dict[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Calls functions with the collectors of workers, which have the newest weights then."""
        self._catch_up()
        return self._pool.call(calls)

    def _catch_up(self) -> None:
        """Waits for a batch that was requested ahead, and sends updates that wait for it."""
        if self._sender.holding:
            self._pool.settle()
            self._sender.release()

    @override
    def get_distant_attr(self, attr: str) -> list[Any]:
        """Returns the attribute at path ``attr`` of each worker's collector."""
        if self._is_of_buffer(attr):
            return [get_path(self, attr)] * self.num_workers
        return self._all(get_distant, attr)

    def _is_of_buffer(self, path: str) -> bool:
        """Returns True if a path leads to the replay buffer, which exists once for all workers."""
        return self.config.replay_buffer is not None and first_name(path) == "replay_buffer"

    # --- state

    def env_state_methods(self) -> list[str]:
        """Returns the way in which the state of each environment is captured, worker by worker.

        See :meth:`Collector.env_state_methods`.
        """
        each = self._all(methodcaller("env_state_methods"))
        return [way for ways in each for way in ways]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state needed to continue later, once workers have finished their batches.

        The state holds counts, the state of each worker's collector, and batches that workers have
        finished. A collector that is made with the same arguments, and loads the state, delivers
        these batches, and then those that the workers would have collected next. See
        :meth:`Collector.state_dict`.
        """
        self._check_open("state_dict()")
        with self._held():
            self._catch_up()
            self._pool.settle()
            finished = self._scheduler.finished()
            states = self._all(methodcaller("state_dict"))
            for slot, one in zip(self._pool.slots, states, strict=True):
                # Counts of the workers before a replacement, too.
                one[PROGRESS] = asdict(slot.progress)
            state: dict[str, Any] = {f"worker{i}": one for i, one in enumerate(states)}
            last = max(states, key=lambda one: int(one["traj_pool"]["traj_id"]))
            state |= {"frames": self._frames, "iter": self._batches, "traj_pool": last["traj_pool"]}
            state[PROGRESS] = asdict(self.progress)
            state["seeds"] = [setup.seed and list(setup.seed) for setup in self._setups]
            state[_FINISHED] = [self._saved(part) for part in finished]
            state[_REQUESTED] = self._scheduler.requested
            state |= self._delivery_state()
            state |= self._normalization_state()
            if self._version is not None:
                state["policy_version"] = self._version.version
        return state

    def _saved(self, part: WorkerBatch) -> dict[str, Any]:
        """Returns a finished batch as plain data."""
        answer = part.answer
        batch = None if self._workers_write else to_plain(self._assembler.batch_of(part).clone())
        return {
            "worker": part.index,
            "batch": batch,
            "frames": answer.frames,
            "filled": answer.filled,
            "version": answer.version,
            "lag": self._sender.count(part.index) - answer.weights,
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
            weights=self._sender.count(saved["worker"]) - saved["lag"],
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

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        *,
        trust: bool = False,
        on_state_mismatch: Literal["raise", "new_episodes"] = "raise",
    ) -> None:
        """Restores the state that :meth:`state_dict` returned.

        Args:
            state_dict: the state.
            strict: whether to raise an error if the weights don't fit exactly.
            trust: True to open pickled environments, which can run any code.
            on_state_mismatch: reaction to the state of an environment that can't be restored.
                ``"raise"`` raises an error. ``"new_episodes"`` begins new episodes in all
                environments of the worker, and warns.

        Raises:
            StateError: if an entry is missing, damaged or of another collector. This collector is
                as it was before.
            EnvStateError: if the state of an environment can't be restored. This collector is as it
                was before; where its own environments can't be captured, new episodes begin.
        """
        self._check_open("load_state_dict()")
        with self._held(), self._in_bounds(range(self.num_workers)):
            before = self._present()
            self._check_state(state_dict, before or {})
            options = {"trust": trust, "on_state_mismatch": on_state_mismatch}
            given = options if trust or on_state_mismatch != "raise" else {}
            if on_state_mismatch == "raise":
                # All workers check before any worker changes.
                states = [state_dict[name] for name in self._names]
                self._pool.call({i: (check_loadable, one, strict) for i, one in enumerate(states)})
            resumed = self.resumed
            try:
                self._load(state_dict, strict, given)
            except Exception as error:
                if before is not None:
                    with suppress(WorkerDied):
                        again = {"trust": True, "on_state_mismatch": "new_episodes"}
                        self._load(before, True, again)
                self.resumed = resumed
                if isinstance(error, (StateError, WorkerDied)):
                    raise
                raise StateError(
                    f"state_dict can't be loaded: {type(error).__name__}: {error}"
                ) from error

    def _present(self) -> dict[str, Any] | None:
        """Returns the present state; None if a worker can't return it."""
        try:
            return self.state_dict()
        except Exception:
            # The next batch raises the error, unless a state is loaded.
            return None

    @property
    def _names(self) -> list[str]:
        return [f"worker{index}" for index in range(self.num_workers)]

    def _check_state(self, state_dict: Any, own: Mapping[str, Any]) -> None:
        """Checks all entries that are not those of a worker's collector."""
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"state_dict must be a mapping that state_dict() returned, but it is {state_dict!r}"
            )
        check_collector(state_dict, own, self._names)
        made_by = sum(name.startswith("worker") for name in state_dict)
        if made_by != self.num_workers:
            raise StateError(
                f"state_dict comes from a collector with {made_by} workers, but this one has "
                f"{self.num_workers}"
            )
        for name in self._names:
            check_collector(state_dict[name], own.get(name, UNKNOWN), place=f"state_dict[{name!r}]")
        for part in state_dict.get(_FINISHED, ()):
            integer(0, self.num_workers - 1)(part["worker"], f"{_FINISHED}: worker", UNKNOWN)
        self._check_normalization(state_dict)

    def _load(self, state_dict: Mapping[str, Any], strict: bool, given: dict[str, Any]) -> None:
        """Loads a state whose entries have been checked; an exception leaves it loaded in part."""
        names = self._names
        version = state_dict.get("policy_version", self._version and self._version.version)
        loaded = {
            i: weights
            for i, name in enumerate(names)
            if (weights := state_dict[name].get("policy_state_dict")) is not None
        }
        send = self._sender.prepare_each(loaded)
        # Batches that were requested earlier belong to old episodes.
        self._pool.settle()
        self._catch_up()
        self._scheduler.pop_finished()
        last = self._pool.last_request
        before = self._sender.versions, [setup.env_state for setup in self._setups]
        for setup, name in zip(self._setups, names, strict=True):
            setup.env_state = state_dict[name].get("env_state_dict")
        if self._version is not None:
            self._sender.versions = [
                state_dict[name].get("policy_version", version) for name in names
            ]
        # Sent before the call, because a worker may be replaced while others load.
        send()
        try:
            resumed = self._pool.call(
                {
                    index: (_load, state_dict[name], strict, given)
                    for index, name in enumerate(names)
                }
            )
        except BaseException:
            self._sender.versions, env_states = before
            for setup, env_state in zip(self._setups, env_states, strict=True):
                setup.env_state = env_state
            raise
        self.resumed = all(resumed.values())
        self._sender.set_version(version)
        self._frames, self._batches = int(state_dict["frames"]), int(state_dict["iter"])
        for slot, name in zip(self._pool.slots, names, strict=True):
            slot.progress.load(progress_of(state_dict[name]))
        self._load_progress(state_dict)
        self._load_delivery(state_dict, last, self.resumed)
        self._load_normalization(state_dict)
        parts = [self._loaded(one) for one in state_dict.get(_FINISHED, ())]
        self._scheduler.put_back(parts, state_dict.get(_REQUESTED, False))
        for setup, seed in zip(self._setups, state_dict.get("seeds", ()), strict=False):
            setup.seed = None if seed is None else (int(seed[0]), bool(seed[1]))
        for slot, name in zip(self._pool.slots, names, strict=True):
            if "traj_pool" in state_dict[name]:
                begins = int(state_dict[name]["traj_pool"]["traj_id"])
                slot.trajectory = max(slot.trajectory, begins)


def _ended(saved: Sequence[Any]) -> EndedEpisodes:
    number, returns, lengths = saved
    return EndedEpisodes(int(number), tuple(returns), tuple(lengths))


def _load(collector: Any, state: Mapping[str, Any], strict: bool, given: dict[str, Any]) -> bool:
    """Loads a worker's state; returns True if its episodes go on."""
    collector.load_state_dict(state, strict, **given)
    return bool(getattr(collector, "resumed", False))


def call_path(collector: Any, path: str, args: Any, kwargs: Any) -> Any:
    """Calls the method at path ``path`` of a worker's collector, or of each of its own workers."""
    if isinstance(collector, WorkerState):
        count = collector.num_workers
        return collector.map_fn(path, [args] * count, [kwargs] * count)
    (result,) = collector.map_fn(path, [args], [kwargs])
    return result


def get_distant(collector: Any, path: str) -> Any:
    """Returns the attribute at a path of a worker's collector.

    If the collector has workers of its own, a path that begins with ``env`` leads to theirs.
    """
    if isinstance(collector, WorkerState) and first_name(path) == "env":
        return collector.get_distant_attr(path)
    return get_path(collector, path)
