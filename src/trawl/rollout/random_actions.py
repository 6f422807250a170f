"""Random actions for environments that step each at its own pace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trawl.envs.masks import rand_actions
from trawl.keys import Key, as_key, show_key
from trawl.memory import Array
from trawl.rollout.layout import Leaf
from trawl.rollout.policy_outputs import PolicyOutputs, host_array

# Number of random actions that are drawn at once for each environment.
_DRAWN = 64


class RandomActions:
    """Random actions, many of which are drawn at once.

    Args:
        env: the environments.
        written: layout of the entries that the policy writes.
    """

    def __init__(self, env: Any, written: Mapping[Key, Leaf]) -> None:
        self._env, self._count = env, env.batch_size.numel()
        self._leaves = {as_key(key): written[as_key(key)] for key in env.action_keys}
        self._outputs = PolicyOutputs({key: leaf.dtype for key, leaf in self._leaves.items()})
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
            found[key] = host_array(values.reshape(-1, *leaf.shape))
        return found
