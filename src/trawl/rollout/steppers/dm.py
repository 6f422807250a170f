"""Stepper of dm_env environments, which reads their time steps without Gymnasium's interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from typing_extensions import override

from trawl.envs.dm import DISCOUNT, FIRST_DISCOUNT, DMEnv
from trawl.envs.entries.spaces import SpaceCodec
from trawl.envs.gym import GymEnv
from trawl.envs.outcomes import checked_rewards
from trawl.keys import REWARD, next_of
from trawl.memory import Array
from trawl.rollout.batches import StepFn
from trawl.rollout.episodes import EpisodeEnds, EpisodeTracker, StepArrays
from trawl.rollout.steppers.arrays import SingleStepper, action_reader

_DISCOUNT = (DISCOUNT,)
_Leaf = tuple[int, str, np.dtype[Any], tuple[int, ...], Array]


def has_named_arrays(env: GymEnv) -> bool:
    """Returns True for a dm_env environment with a flat mapping of arrays as its observation.

    An environment with a wrapper around its :class:`DMEnv` doesn't count.
    """
    codec = env.observation_codec
    return (
        type(env.env) is DMEnv
        and env.env.has_names
        and type(codec) is SpaceCodec
        and codec.verbatim
        and all(len(leaf.path) == 1 for leaf in codec.leaves)
    )


class DMStepper(SingleStepper):
    """Steps one dm_env environment whose observation is a mapping of arrays."""

    @property
    @override
    def _methods(self) -> tuple[Any, ...]:
        inner = getattr(self.env.env, "env", None)
        return *super()._methods, getattr(inner, "step", None)

    def _targets(
        self, view: StepArrays, start: int, stop: int
    ) -> tuple[list[_Leaf], list[Array], list[Array]]:
        """Returns the arrays into which observations are written, without the discount.

        Returns:
            For each leaf, its number, name, dtype and shape, and the array of the observations
            after the steps of a chunk; the arrays of the observations from which the next steps
            begin; and those from which the next batch begins.
        """
        numbers = [n for n, key in enumerate(self._observed.keys) if key != _DISCOUNT]
        keys = [self._observed.keys[n] for n in numbers]
        # Indexing an array takes less time than making a list of its rows, each used only once.
        arrays = [view.arrays[next_of(key)][start:stop] for key in keys]
        observed = [
            (n, key[0], self._observed.dtypes[n], self._observed.shapes[n], rows)
            for n, key, rows in zip(numbers, keys, arrays, strict=True)
        ]
        inner_roots = [view.arrays[key][start + 1 : stop + 1] for key in keys]
        last_roots = [view.next_obs[key][None] for key in keys]
        return observed, inner_roots, last_roots

    @override
    def bind(self, view: StepArrays, episodes: EpisodeTracker, start: int, stop: int) -> StepFn:
        env = self.env
        dm: Any = env.env
        if type(dm) is not DMEnv:
            # An evaluation has wrapped it since this stepper was made.
            return super().bind(view, episodes, start, stop)
        view = view.single()
        dm_step, checked = dm.env.step, self._observed.checked
        read_action = action_reader(env.action_codec, view, start, stop)
        observed, inner_roots, last_roots = self._targets(view, start, stop)
        # Unlike an array, a memoryview accepts only numbers, and assigning to it is faster.
        rewards = checked_rewards(view.arrays[REWARD][start:stop], env)
        discounts: Any = view.arrays[next_of(_DISCOUNT)][start:stop, 0].data
        root_discounts: Any = view.arrays[_DISCOUNT][start + 1 : stop + 1, 0].data
        last_discount, inside = view.next_obs[_DISCOUNT], len(root_discounts)
        ends = EpisodeEnds(view, episodes, start, stop)
        end, cutoff = self._end_function(ends, observed), ends.cutoff()

        def step(t: int) -> None:
            nonlocal cutoff
            timestep = dm_step(read_action(t))
            roots, at = (inner_roots, t) if t < inside else (last_roots, 0)
            discount = timestep.discount
            if discount is None:
                raise dm.no_discount(timestep)
            try:
                rewards[t] = timestep.reward
            except TypeError:
                rewards[t] = env.checked_reward(timestep.reward)
            try:
                discounts[t] = discount
            except TypeError as error:
                raise TypeError(
                    f"step of {env!r} returned discount={discount!r}, but it must be a number"
                ) from error
            if timestep.last() or t >= cutoff:
                cutoff = end(t, timestep, roots, at)
                discount = FIRST_DISCOUNT
            else:
                found = timestep.observation
                for leaf, following in zip(observed, roots, strict=True):
                    number, name, dtype, shape, rows = leaf
                    value = found[name]
                    known = value.__class__ is np.ndarray and value.dtype is dtype
                    if not known or value.shape != shape:
                        value = checked(number, value)
                    rows[t] = value
                    following[at] = value
            if t < inside:
                root_discounts[t] = discount
            else:
                last_discount[0] = discount

        return step

    def _end_function(
        self, ends: EpisodeEnds, observed: list[_Leaf]
    ) -> Callable[[int, Any, list[Array], int], int]:
        """Returns a function that ends the episode with step ``t``, and begins the next one.

        The function's arguments are ``t``, the time step, and the arrays and the row of the next
        episode's first observation. It returns the step that brings the next episode to the limit.
        """
        reset, checked = self._reset_function(), self._observed.checked

        def end(t: int, timestep: Any, roots: list[Array], at: int) -> int:
            for number, name, _, _, rows in observed:
                rows[t] = checked(number, timestep.observation[name])
            terminated = bool(timestep.last() and not timestep.discount)
            cutoff = ends.end(t, terminated, not terminated)
            first = reset()[0]
            for (number, name, *_), following in zip(observed, roots, strict=True):
                following[at] = checked(number, first[name])
            return cutoff

        return end
