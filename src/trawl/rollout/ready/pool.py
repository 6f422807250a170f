"""Pools of EnvPool and ALE as a source of results in the order in which they come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from trawl.envs.batches.pool import Pool, PoolResults
from trawl.envs.gym import GymEnv
from trawl.envs.processes.buffers import AUTORESET, RESET, TERMINATED, TRUNCATED
from trawl.envs.processes.ready import Rows
from trawl.errors import EnvStateError, resetting
from trawl.keys import Key, as_key
from trawl.memory import Array, Mask
from trawl.rollout.ready.source import NO_ROWS, ReadyResults, ReadySource
from trawl.rollout.steppers.restarts import EnvRestarts, FailureCounter

# By the flags of a step: the flags with RESET if the episode ended, and the next step's flags if
# that step will be the reset.
_ENDED = np.arange(16, dtype=np.uint8) & (TERMINATED | TRUNCATED) != 0
_WITH_RESET = np.where(_ENDED, np.arange(16) | RESET, np.arange(16)).astype(np.uint8)
_NEXT = np.where(_ENDED, AUTORESET, 0).astype(np.uint8)


class ReadyPool(ReadySource):
    """The sub-environments of a :class:`~trawl.envs.batches.pool.Pool`.

    The sub-environments whose results are received together get their actions together.

    Args:
        env: the environment around the pool.
        pool: the pool.
        restarts: the collector's record of failures; None to raise errors.
    """

    def __init__(self, env: GymEnv, pool: Pool, restarts: EnvRestarts | None) -> None:
        self._env, self._pool = env, pool
        self._failures = None if restarts is None else FailureCounter(restarts, 0, pool.num_envs)
        self.broken: list[int] = []
        self.restarted: list[int] = []
        self._leaves = env.observation_codec.leaves
        self._keys = [as_key(leaf.key) for leaf in self._leaves]
        self._acted = [as_key(leaf.key) for leaf in env.action_codec.leaves]
        count = pool.num_envs
        self._stepping = np.zeros(count, np.bool_)
        # Sub-environments that have taken no step since the last failure.
        self._unproven = np.zeros(count, np.bool_)
        # The flag of steps that are only resets, for each sub-environment's next result.
        self._resetting = np.zeros(count, np.uint8)
        # Sub-environments to be reset after their step.
        self._late: Mask | None = None
        # Sub-environments to be reset once they are ready; their results are dropped.
        self._stale = np.zeros(count, np.bool_)
        self._has_stale = False
        # First observations of episodes that the last step has begun.
        self._begun: dict[Key, Array] = {}
        self._due: ReadyResults | None = None
        # Rows that were received and have no action yet.
        self._turn = NO_ROWS

    @override
    def start(self) -> Mapping[Key, Array]:
        self.reset(None)
        self.wait()
        assert self._due is not None
        count, found = self._pool.num_envs, dict[Key, Array]()
        for key, leaf in zip(self._keys, self._leaves, strict=True):
            array = self._due.results[key]
            leaf.check(array, (len(array),))
            found[key] = np.resize(array, (count, *array.shape[1:]))
        return found

    @override
    def set_action_dtypes(self, dtypes: Mapping[Key, np.dtype[Any]]) -> None:
        """Does nothing: each action is converted when it is sent."""

    @override
    def begin(self) -> None:
        """Does nothing: the pool determines which environments get actions."""

    @override
    def wait(self) -> None:
        while self._due is None:
            try:
                self._receive()
            except Exception as error:
                self._restart(error)

    def _receive(self) -> None:
        results = self._pool.receive()
        self._stepping[results.rows] = False
        if self._has_stale:
            results = self._without_stale(results)
        if len(results.rows):
            due = self._with_flags(results)
            self._turn = results.rows
            if self._late is not None:
                self._turn = self._turn[~self._stepping[self._turn]]
            if self._failures is not None and self._failures.failures:
                self._note_success(self._failures, due)
            self._due = due

    def _note_success(self, failures: FailureCounter, results: ReadyResults) -> None:
        """Clears the count of failures once each sub-environment has taken a step again."""
        self._unproven[results.rows[results.flags & AUTORESET == 0]] = False
        if not self._unproven.any():
            failures.failures = 0

    def _restart(self, error: Exception) -> None:
        """Makes the pool anew after an error; what its environments were doing is lost."""
        if self._failures is None:
            raise error
        when = f"after {self._failures.restarts.steps_done} frames of all"
        self._failures.restart(error, 0, self._rebuild, when=when)
        self.broken += range(self._pool.num_envs)

    def _rebuild(self) -> None:
        self._env.rebuild()
        pool = self._env.vector
        assert isinstance(pool, Pool)
        self._pool, self._due, self._late = pool, None, None
        self._stepping[:] = self._stale[:] = self._has_stale = False
        self._unproven[:] = True
        self.reset(None)

    def _without_stale(self, results: PoolResults) -> PoolResults:
        """Resets sub-environments that wait for it, and drops their results."""
        stale = self._stale[results.rows]
        if not stale.any():
            return results
        self._send_reset(results.rows[stale], {})
        self._stale[results.rows] = False
        self._has_stale = bool(self._stale.any())
        return results.only(~stale)

    def _with_flags(self, results: PoolResults) -> ReadyResults:
        rows, leaves, rewards, terminated, truncated, begun = results
        # The bits are TERMINATED and TRUNCATED.
        flags: NDArray[np.uint8] = terminated.view(np.uint8) | self._resetting[rows]
        flags |= truncated.view(np.uint8) << 1
        if flags.tobytes() != bytes(len(flags)):
            self._resetting[rows] = _NEXT[flags] if self._pool.resets_next else 0
            flags = _WITH_RESET[flags]
        if self._late is not None:
            late = self._late[rows] & (flags & (RESET | AUTORESET) == 0)
            flags[late] |= RESET
            if late.any():
                self._send_reset(rows[late], {})
        if begun is not None:
            self._note_begun(rows, begun)
        found = dict(zip(self._keys, leaves, strict=True))
        found["reward",] = rewards
        return ReadyResults(rows, found, flags)

    def _note_begun(self, rows: Rows, begun: list[Array]) -> None:
        for key, values in zip(self._keys, begun, strict=True):
            if key not in self._begun:
                shape = (self._pool.num_envs, *values.shape[1:])
                self._begun[key] = np.zeros(shape, values.dtype)
            self._begun[key][rows] = values

    @override
    def take(self, most: int, room: int) -> ReadyResults:
        due = self._due
        assert due is not None
        if len(due.rows) <= most:
            self._due = None
            return due
        self._due = due.only(slice(most, None))
        return due.only(slice(most))

    @override
    def begun(self, rows: Rows) -> Mapping[Key, Array]:
        return {key: array[rows] for key, array in self._begun.items()}

    @override
    def turn(self, room: int) -> Rows | None:
        return self._turn if self._due is None and len(self._turn) else None

    @override
    def send(self, actions: Mapping[Key, Array], late: Mask | None) -> None:
        rows = self._turn
        if late is not None:
            self._late = (
                np.zeros(self._pool.num_envs, np.bool_) if self._late is None else self._late
            )
            self._late[rows] = late
        action = self._env.action_codec.decode([actions[key] for key in self._acted])
        try:
            self._pool.send(action, rows)
        except Exception as error:
            self._restart(error)
        else:
            self._turn = NO_ROWS
            self._stepping[rows] = True

    @override
    def reset(self, mask: NDArray[np.bool_] | None, **kwargs: Any) -> Rows:
        seeds = self._env.pop_seeds()
        if seeds is not None:
            kwargs.setdefault("seed", seeds[0])
        with resetting(self._env):
            if self._pool.can_restart:
                chosen = np.ones_like(self._stepping) if mask is None else mask
                # Before the flags below change, because it may raise.
                stepping = self._stepping.copy()
                self._reset_some(chosen, kwargs)
                self._stale |= chosen & stepping
                self._has_stale = bool(self._stale.any())
            elif mask is None or mask.all():
                self._reset_all(kwargs)
            elif mask.any():
                name = type(self._pool.env).__name__
                raise ValueError(f"{name} can't reset only some of its sub-environments: reset all")
        return NO_ROWS

    def _reset_some(self, mask: NDArray[np.bool_], kwargs: dict[str, Any]) -> None:
        self._send_reset(np.flatnonzero(mask & ~self._stepping), kwargs)
        self._turn = self._turn[~mask[self._turn]]
        if self._due is not None:
            due = self._due.only(~mask[self._due.rows])
            self._due = due if len(due.rows) else None

    def _reset_all(self, kwargs: dict[str, Any]) -> None:
        pool = self._pool
        if self._stepping.any() and pool.num_envs % pool.ready_envs:
            raise ValueError(
                f"{type(pool.env).__name__} can be reset again only if batch_size divides "
                f"num_envs, but they are {pool.ready_envs} and {pool.num_envs}: it returns no "
                "results of fewer environments, so it can't finish the steps that are under way"
            )
        self._due, self._turn = None, NO_ROWS
        while self._stepping.any():
            self._stepping[pool.receive().rows] = False
        self._send_reset(np.arange(pool.num_envs), kwargs)

    def _send_reset(self, rows: Rows, kwargs: dict[str, Any]) -> None:
        self._pool.send_reset(rows, **kwargs)
        self._stepping[rows] = True
        self._resetting[rows] = AUTORESET

    @override
    def recover(self) -> None:
        """Does nothing: received results are kept, and actions that were not sent will be."""

    @override
    def settle(self) -> None:
        """Does nothing: the sub-environments can't be called."""

    @override
    def state_dict(self) -> dict[str, Any]:
        raise EnvStateError(f"the state of {self._env!r} can't be captured")

    @override
    def check_state(self, state: Mapping[str, Any]) -> None:
        raise EnvStateError(f"no state can be restored in {self._env!r}")

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state(state)
