"""Log of all steps and resets of an environment pool since it was made.

The environments of an EnvPool get their seed when the pool is made. Afterwards, their generators
can neither be read nor set. A new pool with the same seed therefore repeats all steps and resets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from trawl.envs.capture.action_log import REPLAY, ActionLog
from trawl.envs.capture.codec import NotPlain
from trawl.envs.capture.fixed import check_identity
from trawl.errors import EnvStateError, env_errors
from trawl.memory import Array, Mask
from trawl.schema.states import check_pool_log

# Settings of a pool that don't change its results.
_SPEED = frozenset({"num_threads", "thread_affinity_offset", "base_path"})


class PoolLog(ActionLog):
    """All steps and resets of a pool since it was made."""

    is_state = True

    def __init__(self, owner: Any) -> None:
        super().__init__(owner)
        # For each reset between two steps: number of steps before it, and its mask; None for all.
        self._resets: list[tuple[int, Array | None]] = []
        # For each step: mask of the environments that were reset right after it, as bits.
        self._ended: list[Array] = []
        # The resets of a replay that have not been repeated yet.
        self._waiting: list[Any] = []
        self.why = None

    @override
    def clear(self) -> None:
        super().clear()
        self._resets, self._ended = [], []

    @override
    def remade(self) -> None:
        self.clear()
        self.why = None

    def reset(self, mask: Mask | None) -> None:
        """Adds a reset between two steps, of the environments in ``mask`` or of all."""
        if self.why is None:
            self._resets.append((self.steps, None if mask is None else np.packbits(mask)))

    @override
    def extend(self, actions: Sequence[Array], rewards: Array, ended: Mask) -> None:
        super().extend(actions, rewards, ended)
        if self.why is None and len(rewards):
            self._ended.append(np.packbits(ended, axis=-1))

    @override
    def capture(self, env: Any) -> dict[str, Any]:
        if self.why is not None:
            raise NotPlain(self.why)
        width = -(-int(env.num_envs) // 8)
        self._ended = [np.concatenate([np.empty((0, width), np.uint8), *self._ended])]
        return {
            "way": REPLAY,
            "identity": _identity(env),
            "resets": self._saved_resets(),
            "ended": torch.from_numpy(self._ended[0].copy()),
            **self.state(),
        }

    def _saved_resets(self) -> list[list[Any]]:
        return [[step, None if bits is None else bits.tobytes()] for step, bits in self._resets]

    @override
    def load(self, state: Mapping[str, Any]) -> None:
        super().load(state)
        self._ended = [state["ended"].numpy().copy()]
        self._resets = [
            (step, None if bits is None else np.frombuffer(bits, np.uint8))
            for step, bits in state["resets"]
        ]

    @override
    def check_state(self, env: Any, state: Any, place: str) -> None:
        with env_errors():
            check_pool_log(state, place, int(env.num_envs))
        mine = _identity(env)
        unknown = dict.fromkeys(state["identity"].keys() - mine.keys(), "missing")
        check_identity({**mine, **unknown}, state["identity"], env, "pool")

    @override
    def replay(self, env: Any, state: Mapping[str, Any]) -> None:
        """Repeats all steps and resets; makes the pool anew first, if it has been used."""
        if not self._precedes(state) and self.owner.remake is not None:
            self.owner.rebuild()
            env = self.owner.env
        if not self._precedes(state):
            raise EnvStateError(
                f"{env} can't be replayed, because it was used before: load the state into a "
                "collector that was just made"
            )
        done = len(self._resets)
        self.owner.vector.log = None
        self._waiting = state["resets"][done:]
        try:
            super().replay(env, state)
        finally:
            self.owner.vector.log = self

    def _precedes(self, state: Mapping[str, Any]) -> bool:
        """Returns True if this log has no steps, and a saved log begins with the same resets."""
        return not self.steps and self._saved_resets() == state["resets"][: len(self._resets)]

    @override
    def _begin(self, env: Any, state: Mapping[str, Any]) -> Sequence[Array]:
        return self._reset(0, self.observed)

    @override
    def _step(self, step: int) -> tuple[Sequence[Array], Array, bool]:
        pool = self.owner.vector
        leaves, reward, _, _ = pool.step(self.action(step))
        ended = self._mask(self._ended[0][step])
        if ended.any():
            leaves = with_rows(leaves, *pool.begin_next(ended))
        return self._reset(step + 1, leaves), reward, False

    def _reset(self, step: int, leaves: Sequence[Array]) -> Sequence[Array]:
        """Repeats the resets before a step."""
        pool = self.owner.vector
        while self._waiting and self._waiting[0][0] == step:
            bits = self._waiting.pop(0)[1]
            if bits is None:
                leaves = pool.reset()
            else:
                mask = self._mask(np.frombuffer(bits, np.uint8))
                leaves = with_rows(leaves, mask, [leaf[mask] for leaf in pool.restart(mask)])
        return leaves

    def _mask(self, bits: Array) -> Mask:
        return np.unpackbits(bits, count=int(self.owner.env.num_envs)).astype(np.bool_)


def with_rows(leaves: Sequence[Array], rows: Any, values: Sequence[Array]) -> list[Array]:
    """Returns copies of observations in which some rows are replaced."""
    changed = [np.array(leaf) for leaf in leaves]
    for leaf, value in zip(changed, values, strict=True):
        leaf[rows] = value
    return changed


def _identity(env: Any) -> dict[str, str]:
    settings = {name: repr(one) for name, one in env.config.items() if name not in _SPEED}
    return {"class": type(env).__name__, **settings}
