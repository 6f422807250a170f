"""Random actions, in the dtypes of the policy's actions, within the masks of the environments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trawl.envs.base import TensorDictEnv
from trawl.envs.masks import (
    MASK_KEY,
    fits,
    mask_dims,
    mask_key_of,
    masked_rand,
    rand_actions,
    warn_unfit,
)
from trawl.envs.tensor_env import TensorEnv
from trawl.keys import Key, as_key, show_key
from trawl.memory import Array
from trawl.rollout.batch_writer import ActFn
from trawl.rollout.block import as_array
from trawl.rollout.layout import Leaf
from trawl.rollout.policy_leaves import PolicyLeaves
from trawl.rollout.policy_outputs import PolicyOutputs

# Number of random actions that are drawn at once for each environment.
_DRAWN = 64


class ChunkActions:
    """Random actions for chunks of a batch's rows.

    Args:
        env: the environment.
        leaves: entries that the policy writes.
        outputs: rule for the outputs of the policy.
        next_row: the entries that the policy reads one step later, by key: for each entry, the row
            after the last row of a batch.
    """

    def __init__(
        self,
        env: TensorDictEnv,
        leaves: PolicyLeaves,
        outputs: PolicyOutputs,
        next_row: Mapping[Key, Any],
    ) -> None:
        self._env, self._leaves, self._outputs, self._next_row = env, leaves, outputs, next_row

    def bind(self, tensors: Mapping[Key, Tensor], start: int, stop: int) -> ActFn | None:
        """Draws all actions of the chunk at once, and sets the policy's other entries to zero.

        Returns:
            None, unless masks apply. In this case, returns a function of ``t`` that draws allowed
            actions for row ``start + t``.
        """
        specs = {as_key(key): self._env.full_action_spec[key] for key in self._env.action_keys}
        for key in self._leaves.written:
            rows = tensors[key][start:stop]
            if key in specs:
                rows.copy_(self._converted(key, specs[key].rand((stop - start,)), start))
            else:
                rows.zero_()
        for key in self._leaves.states:
            tensors[key][start + 1 : stop + 1] = 0
        for row in self._next_row.values():
            row[...] = 0
        observed = {key: self._masks(tensors, key, spec) for key, spec in specs.items()}
        masks = {key: found for key, found in observed.items() if found is not None}
        if not masks:
            ((key, spec), *more) = specs.items()
            return None if more else self._act_by_info(tensors[key], key, spec, start)

        def act(t: int) -> None:
            for key, mask in masks.items():
                drawn = masked_rand(specs[key], mask[start + t])
                tensors[key][start + t].copy_(self._converted(key, drawn, start + t))

        return act

    def _masks(self, tensors: Mapping[Key, Tensor], key: Key, spec: Any) -> Tensor | None:
        """Returns the rows of the mask that the observation has for an action, or None."""
        shown, size = tensors.get(mask_key_of(key)), self._env.batch_size
        # A mask at the root belongs to the only action; one in a group belongs to its agents.
        if shown is None and len(self._env.action_keys) == 1:
            shown = tensors.get((MASK_KEY,))
        if shown is None:
            return None
        dims = mask_dims(spec, shown.shape[1:])
        one_each = math.prod(shown.shape[1 : shown.ndim - dims]) == size.numel()
        # The masks of agents are flat; in front, they have a dimension for the agents.
        if not dims or not (one_each if len(key) == 1 else dims == 1):
            warn_unfit(spec, shown.shape[1 + len(size) :])
            return None
        return shown

    def _act_by_info(self, rows: Tensor, key: Key, spec: Any, start: int) -> ActFn | None:
        """Returns a function that draws actions that the mask in the info allows.

        Returns None if there is no such mask.
        """
        env, known = self._env, None
        newest: Callable[[], Any] = env.action_mask
        if isinstance(env, TensorEnv):
            # On the device, without waiting for it.
            newest = env.newest_mask
            if (first := newest()) is not None and not fits(spec, first.shape, 1):
                warn_unfit(spec, first.shape[1:])
                return None
            known = None if first is None else first.shape
        if newest() is None:
            return None

        def act(t: int) -> None:
            nonlocal known
            mask = torch.as_tensor(newest())
            if mask.shape != known:
                # Raises an error if the mask is of another size.
                rand_actions(env.full_action_spec, None, env.action_mask())
                if not fits(spec, mask.shape, 1):
                    return  # the action was drawn with those of the whole chunk
                known = mask.shape
            rows[start + t].copy_(self._converted(key, masked_rand(spec, mask), start + t))

        return act

    def _converted(self, key: Key, actions: Tensor, row: int) -> Tensor:
        """Returns random actions in the dtype of the policy's actions."""
        return self._outputs.converted(key, actions, row, "random actions gave")


class RandomActions:
    """Random actions, many of which are drawn at once.

    Args:
        env: the environments.
        written: layout of the entries that the policy writes.
    """

    def __init__(self, env: Any, written: Mapping[Key, Leaf]) -> None:
        self._env, self._count = env, env.batch_size.numel()
        self._leaves = {as_key(key): written[as_key(key)] for key in env.action_keys}
        self._outputs = PolicyOutputs({key: leaf.dtype for key, leaf in self._leaves.items()}, 1)
        self.forget()

    def forget(self) -> None:
        """Drops the actions that were drawn in advance, because the seed has changed."""
        self._drawn: dict[Key, Array] = {}
        self._next = 0

    def draw(self, chosen: NDArray[Any]) -> dict[Key, Array]:
        """Returns random actions for the environments with these numbers."""
        mask = self._env.action_mask()
        if mask is not None:
            # The mask says what is allowed in this step, so nothing can be drawn in advance.
            found = self._arrays(rand_actions(self._env.full_action_spec, None, mask))
            return {key: values[chosen] for key, values in found.items()}
        if not self._drawn or self._next + len(chosen) > _DRAWN * self._count:
            self._drawn = self._arrays(self._env.full_action_spec.rand((_DRAWN,)))
            self._next = 0
        first, self._next = self._next, self._next + len(chosen)
        return {key: values[first : self._next] for key, values in self._drawn.items()}

    def state_dict(self) -> dict[str, Any]:
        """Returns the actions that were drawn in advance."""
        left = {key: torch.from_numpy(one[self._next :]) for key, one in self._drawn.items()}
        return {"next": self._next, "left": {show_key(key): one for key, one in left.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that :meth:`state_dict` returned."""
        self.forget()
        if state["left"]:
            self._next = state["next"]
            left = {key: state["left"][show_key(key)].numpy() for key in self._leaves}
            self._drawn = {
                # The actions in front have been used.
                key: np.concatenate([np.zeros((self._next, *one.shape[1:]), one.dtype), one])
                for key, one in left.items()
            }

    def _arrays(self, drawn: Any) -> dict[Key, Array]:
        """Returns actions as arrays with a row for each environment."""
        found = {}
        for key, leaf in self._leaves.items():
            values = self._outputs.converted(key, drawn.get(key), 0, "random actions gave")
            found[key] = as_array(values.reshape(-1, *leaf.shape).cpu())
        return found
