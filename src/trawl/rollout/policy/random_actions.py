"""Random actions for the rows of a batch, which follow action masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trawl.envs.base import TensorDictEnv
from trawl.envs.entries.masks import fits, is_mask, masked_rand, observed_masks, warn_unfit
from trawl.envs.tensor_env import TensorEnv
from trawl.keys import Key, as_key, show_key
from trawl.memory import Array
from trawl.rollout.batches import ActFn
from trawl.rollout.policy.leaves import PolicyLeaves
from trawl.rollout.policy.outputs import PolicyOutputs, host_array

# Number of random actions that are drawn at once for each environment of a pool.
_DRAWN = 64
_Draw = Callable[[Any], Iterator[tuple[Key, Tensor]]]


class RandomActions:
    """Draws random actions that the masks in observations or infos allow.

    Args:
        env: the environments.
        leaves: entries that the policy writes.
        outputs: rule for the dtypes of these entries.
    """

    def __init__(self, env: TensorDictEnv, leaves: PolicyLeaves, outputs: PolicyOutputs) -> None:
        self._env, self._leaves, self._outputs = env, leaves, outputs
        self._actions = {as_key(key): key for key in env.action_keys}

    def fill(
        self,
        rows: Mapping[Key, Tensor],
        start: int,
        stop: int,
        next_row: Mapping[Key, Array] | Mapping[Key, Tensor],
    ) -> ActFn | None:
        """Draws all actions of a chunk at once; the policy's other entries become zero.

        Args:
            rows: the entries of a batch, with time first.
            start: first row of the chunk.
            stop: row after the last one of the chunk.
            next_row: for each entry of the next frame, the row after the batch's last row.

        Returns:
            None; if masks apply, a function of ``t`` that draws actions for row ``start + t``.
        """
        leaves, specs = self._leaves, self._env.full_action_spec
        for key in leaves.written:
            chunk = rows[key][start:stop]
            if key in self._actions:
                drawn = specs[self._actions[key]].rand((stop - start,))
                chunk.copy_(self._converted(key, drawn, start))
            else:
                chunk.zero_()
        for key in leaves.states:
            rows[key][start + 1 : stop + 1] = 0
        for key in (*leaves.states, *leaves.memories):
            next_row[key][...] = 0
        draw = self._masked(rows, lambda key: rows[key][0], len(self._env.batch_size))
        if draw is None:
            return None

        def act(t: int) -> None:
            row = start + t
            for key, drawn in draw(row):
                rows[key][row].copy_(self._converted(key, drawn, row))

        return act

    def _converted(self, key: Key, drawn: Tensor, row: int) -> Tensor:
        """Returns random actions in the dtype of the policy's actions."""
        return self._outputs.converted(key, drawn, row, "random actions gave")

    def _masked(
        self, rows: Mapping[Key, Tensor], newest: Callable[[Key], Tensor], batch: int
    ) -> _Draw | None:
        """Returns a function that draws the actions that have masks; None if no action has one.

        The function's argument is the index of the rows whose masks are read.

        Args:
            rows: observations, by key.
            newest: function that returns one of the rows with a key.
            batch: number of batch dimensions of such a row.
        """
        env, specs = self._env, self._env.full_action_spec

        def shown(key: Key) -> Tensor | None:
            return newest(key) if key in rows else None

        found = observed_masks(specs, env.action_keys, shown, batch)
        if found:
            observed = [(as_key(key), specs[key], rows[mask]) for key, mask in found.items()]
            return lambda row: ((key, masked_rand(spec, one[row])) for key, spec, one in observed)
        mask = env.newest_mask() if len(env.action_keys) == 1 else None
        if mask is None:
            return None
        ((action, name),) = self._actions.items()
        spec, known, applies = specs[name], None, False
        if isinstance(env, TensorEnv) and not fits(spec, mask.shape, 1):
            warn_unfit(spec, mask.shape[1:])
            return None

        def draw(row: Any) -> Iterator[tuple[Key, Tensor]]:
            nonlocal applies, known
            mask = env.newest_mask()
            assert mask is not None
            if mask.shape != known:
                known, applies = mask.shape, is_mask(spec, mask.shape)
            if applies:
                yield action, masked_rand(spec, mask)

        return draw


class ReadyActions(RandomActions):
    """Random actions for environments that step each at its own pace.

    Without masks, many actions are drawn at once.

    Args:
        env: the environments.
        leaves: entries that the policy writes.
        rows: entries that each environment's next step begins with, by key; actions are written
            there.
    """

    def __init__(self, env: TensorDictEnv, leaves: PolicyLeaves, rows: Mapping[Key, Array]) -> None:
        outputs = PolicyOutputs({key: leaf.dtype for key, leaf in leaves.written.items()}, 1)
        super().__init__(env, leaves, outputs)
        self._count = env.batch_size.numel()
        self._rows = rows
        self._shown = {key: torch.from_numpy(row) for key, row in rows.items()}
        self.forget()

    def forget(self) -> None:
        """Drops the actions that were drawn in advance, because the seed has changed."""
        self._drawn: dict[Key, Array] = {}
        self._next = 0

    def write(self, chosen: NDArray[Any]) -> None:
        """Draws actions for the environments with these numbers; other entries become zero."""
        drawn = self._draw(chosen)
        for key in self._leaves.written:
            self._rows[key][chosen] = drawn.get(key, 0)

    def _draw(self, chosen: NDArray[Any]) -> dict[Key, Array]:
        masked = self._masked(self._shown, self._shown.__getitem__, 1)
        if masked is not None:
            # The masks say what is allowed in this step, so nothing can be drawn in advance.
            found = self._arrays({**self._rand(()), **dict(masked(...))})
            return {key: values[chosen] for key, values in found.items()}
        if not self._drawn or self._next + len(chosen) > _DRAWN * self._count:
            self._drawn = self._arrays(self._rand((_DRAWN,)))
            self._next = 0
        first, self._next = self._next, self._next + len(chosen)
        return {key: values[first : self._next] for key, values in self._drawn.items()}

    def _rand(self, shape: tuple[int, ...]) -> dict[Key, Any]:
        drawn = self._env.full_action_spec.rand(shape)
        return {key: drawn.get(name) for key, name in self._actions.items()}

    def state_dict(self) -> dict[str, Any]:
        """Returns the actions that were drawn in advance."""
        left = {key: torch.from_numpy(one[self._next :]) for key, one in self._drawn.items()}
        return {"next": self._next, "left": {show_key(key): one for key, one in left.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that :meth:`state_dict` returned."""
        self.forget()
        if state["left"]:
            self._next = state["next"]
            left = {key: state["left"][show_key(key)].numpy() for key in self._actions}
            self._drawn = {
                # The actions in front have been used.
                key: np.concatenate([np.zeros((self._next, *one.shape[1:]), one.dtype), one])
                for key, one in left.items()
            }

    def _arrays(self, drawn: Mapping[Key, Any]) -> dict[Key, Array]:
        """Returns actions as arrays with a row for each environment."""
        found = {}
        for key, value in drawn.items():
            shape = self._leaves.written[key].shape
            found[key] = host_array(self._converted(key, value, 0).reshape(-1, *shape))
        return found
