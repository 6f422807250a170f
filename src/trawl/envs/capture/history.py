"""Replay of all steps and resets of an environment pool since it was made.

The environments of an EnvPool get their seed when the pool is made. Afterwards, their generators
can neither be read nor set. A new pool with the same seed therefore repeats all steps and resets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from typing_extensions import override

from trawl.envs.capture.replay import REPLAY
from trawl.envs.capture.step_log import StepLog, digest
from trawl.envs.spaces import SpaceCodec
from trawl.errors import EnvStateError, env_errors
from trawl.memory import Array, Mask
from trawl.schema.states import check_pool_log

#: Bytes of actions above which a pool can't be replayed.
MOST_BYTES = 64 * 2**20
_NO_LIMIT = 2**62
# Settings of a pool that don't change its results.
_SPEED = frozenset({"num_threads", "thread_affinity_offset", "base_path"})


class ReplayedPool(Protocol):
    """Pool of environments that repeats logged steps and resets."""

    env: Any

    def reset(self) -> list[Array]:
        """Begins an episode in every environment."""

    def step(self, action: Any) -> tuple[list[Array], Array, Array, Array]:
        """Steps every environment."""

    def restart(self, mask: Mask) -> list[Array]:
        """Begins new episodes where ``mask`` is True."""

    def begin_next(self, ended: Mask) -> tuple[Any, list[Array]]:
        """Begins new episodes in the environments whose episode the last step ended."""


class PoolLog(StepLog):
    """All steps and resets of a pool since it was made.

    Args:
        observations: codec of the observations.
        actions: codec of the actions, which have a fixed layout.

    Attributes:
        skipped: number of rows of the current batch that belong to an earlier pool.
    """

    def __init__(self, observations: SpaceCodec, actions: SpaceCodec) -> None:
        super().__init__(observations, actions, _NO_LIMIT, MOST_BYTES)
        self.why = None
        self.skipped = 0
        # For each reset between two steps: number of steps before it, and its mask; None for all.
        self._resets: list[tuple[int, Array | None]] = []
        # For each step: mask of the environments that were reset right after it, as bits.
        self._ended: list[Array] = []

    @override
    def clear(self) -> None:
        super().clear()
        self._resets, self._ended = [], []

    def remade(self) -> None:
        """Empties the log, after the pool was made anew."""
        self.clear()
        self.why = None

    def reset(self, mask: Mask | None) -> None:
        """Adds a reset between two steps, of the environments in ``mask`` or of all."""
        if self.why is None:
            self._resets.append((self.steps, None if mask is None else np.packbits(mask)))

    def add(self, actions: Sequence[Array], rewards: Array, ended: Mask) -> None:
        """Adds steps, and the resets right after them.

        Args:
            actions: see :meth:`extend`.
            rewards: see :meth:`extend`.
            ended: True for environments that were reset after a step, ``(steps, num_envs)``.
        """
        self.extend(actions, rewards)
        if self.why is None:
            self._ended.append(np.packbits(ended, axis=-1))

    @override
    def add_step(self, actions: Sequence[Array], reward: Any) -> None:
        super().add_step(actions, reward)
        if self.why is None:
            # Resets are added by themselves.
            self._ended.append(np.packbits(np.zeros((1, len(reward)), np.bool_), axis=-1))

    def begins(self, state: Mapping[str, Any]) -> bool:
        """Returns True if this log has no steps, and a saved log begins with the same resets."""
        return not self.steps and self._saved_resets() == state["resets"][: len(self._resets)]

    def _saved_resets(self) -> list[list[Any]]:
        return [[step, None if bits is None else bits.tobytes()] for step, bits in self._resets]

    def capture(self, env: Any) -> dict[str, Any]:
        """Returns the log as plain data.

        Raises:
            EnvStateError: if the pool can't be replayed.
        """
        if self.why is not None:
            raise EnvStateError(f"the state of {env} can't be captured: {REPLAY}: {self.why}")
        width = -(-int(env.num_envs) // 8)
        ended = np.concatenate([np.empty((0, width), np.uint8), *self._ended])
        self._ended = [ended]
        return {
            "way": REPLAY,
            "identity": _identity(env),
            "resets": self._saved_resets(),
            "ended": torch.from_numpy(ended.copy()),
            **self.state(),
        }

    @override
    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self._ended = [state["ended"].numpy().copy()]
        self._resets = [
            (step, None if bits is None else np.frombuffer(bits, np.uint8))
            for step, bits in state["resets"]
        ]

    def replay(self, pool: ReplayedPool, state: Mapping[str, Any]) -> None:
        """Repeats all steps and resets.

        Args:
            pool: a new pool with the same settings (see :func:`check_pool`), which has made the
                resets in this log. The caller stops logging its steps and resets meanwhile.
            state: the state that :meth:`capture` returned.

        Raises:
            EnvStateError: if the pool has been used before, or the results differ.
        """
        env = pool.env
        if not self.begins(state):
            raise EnvStateError(
                f"{env} can't be replayed, because it was used before: load the state into a "
                "collector that was just made"
            )
        done = len(self._resets)
        self.load(state)
        try:
            leaves, rewards = self._repeat(pool, done)
            self.check(env, leaves, rewards, state)
        except EnvStateError:
            self.lose("a replay has failed")
            raise
        except Exception as error:
            self.lose("a replay has failed")
            why = f"{type(error).__name__}: {error}"
            raise EnvStateError(f"{env} can't be replayed: {why}") from error

    def _repeat(self, pool: ReplayedPool, done: int) -> tuple[Sequence[Array], int]:
        """Repeats all steps and resets after the first ``done`` resets.

        Returns:
            The observations to go on from, and a digest of the rewards.
        """
        count = int(pool.env.num_envs)
        ended = np.unpackbits(self._ended[0], axis=-1, count=count).astype(np.bool_)
        resets = self._resets[done:]
        leaves: Sequence[Array] = self.observed
        rewards = 0
        for step in range(self.steps + 1):
            while resets and resets[0][0] == step:
                leaves = _reset(pool, resets.pop(0)[1], leaves, count)
            if step == self.steps:
                break
            leaves, reward, _, _ = pool.step(self.action(step))
            rewards = digest(reward, rewards)
            if ended[step].any():
                rows, begun = pool.begin_next(ended[step])
                leaves = _with_rows(leaves, rows, begun)
        return leaves, rewards


def _reset(
    pool: ReplayedPool, bits: Array | None, leaves: Sequence[Array], count: int
) -> Sequence[Array]:
    if bits is None:
        return pool.reset()
    mask = np.unpackbits(bits, count=count).astype(np.bool_)
    return _with_rows(leaves, mask, [leaf[mask] for leaf in pool.restart(mask)])


def _with_rows(leaves: Sequence[Array], rows: Any, values: Sequence[Array]) -> list[Array]:
    """Returns copies of observations in which some rows are replaced."""
    changed = [np.array(leaf) for leaf in leaves]
    for leaf, value in zip(changed, values, strict=True):
        leaf[rows] = value
    return changed


def _identity(env: Any) -> dict[str, str]:
    settings = {name: repr(one) for name, one in env.config.items() if name not in _SPEED}
    return {"class": type(env).__name__, **settings}


def check_pool(env: Any, state: Any, place: str = "the state") -> None:
    """Checks a captured state, and that a pool has the same settings as the pool of the state.

    Raises:
        EnvStateError: if an entry is damaged, or the settings differ.
    """
    with env_errors():
        check_pool_log(state, place, int(env.num_envs))
    mine, other = _identity(env), state["identity"]
    for name in sorted({*mine, *other}):
        if mine.get(name) != other.get(name):
            raise EnvStateError(
                f"the state is one of another pool: its {name} is {other.get(name)}, but that of "
                f"{env} is {mine.get(name)}"
            )
