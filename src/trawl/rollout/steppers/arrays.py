"""Steppers, which step environments on arrays, without TensorDicts in the loop.

A stepper is bound to a chunk of a batch's rows, and returns a function of the row number. This
function reads the actions in the row, steps the environment, and writes the results into the row.
It writes the observation for the next step into the next row. Steppers can be nested: the stepper
of a list of environments has one stepper for each environment. A vector environment has a single
stepper.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from trawl.envs.agents.groups import AgentActions
from trawl.envs.entries.infos import InfoCodec
from trawl.envs.entries.spaces import SpaceCodec
from trawl.envs.gym import GymEnv
from trawl.envs.outcomes import NO, RESET_GIVES, checked_rewards, flag_of, reset_results, wrong_step
from trawl.envs.seeding import next_kwargs
from trawl.envs.vector import VectorAdapter
from trawl.errors import add_note, resetting
from trawl.keys import MASK, REWARD, Key, as_key, next_of
from trawl.memory import Array
from trawl.rollout.batches import StepFn
from trawl.rollout.episodes import EpisodeEnds, EpisodeTracker, StepArrays, VectorEnds
from trawl.rollout.steppers.observation_rows import ObservationRows, leaf_reader

#: Arrays that a stepper writes, or tensors.
View = TypeVar("View", contravariant=True)


class Stepper(Protocol[View]):
    """Steps one or more environments, and writes into the rows of a batch.

    Attributes:
        num_envs: number of environments.
        agent_groups: names of the groups of agents, which have flags of their own.
    """

    num_envs: int
    agent_groups: Sequence[str] = ()

    def reset(self, view: View, mask: Any, **kwargs: Any) -> None:
        """Begins episodes, and writes their first observations to ``view.next_obs``.

        Args:
            view: the arrays of the environments, or their tensors.
            mask: mask of the environments to reset, bool of shape ``(num_envs,)``, an array or a
                tensor like those of ``view``; None for all.
            **kwargs: arguments of the environments' ``reset``.
        """

    def bind(self, view: View, episodes: EpisodeTracker, start: int, stop: int) -> StepFn:
        """Returns a function of ``t`` that takes the step of row ``start + t``."""

    def bound_to(self, episodes: EpisodeTracker) -> Any:
        """Returns what a bound function depends on besides its rows.

        While this stays equal, the function can be used for the same rows again. None if it can't.
        """
        return None


ArrayStepper = Stepper[StepArrays]


class EnvStepper(Stepper[View], Protocol[View]):
    """Steps one environment, which may be a vector environment.

    Attributes:
        root_keys: keys of the entries that a reset writes.
    """

    root_keys: Sequence[Key]

    def begin_after(self, view: Any, row: int) -> None:
        """Begins episodes everywhere after ``row``, when the environment was made anew."""
        self.reset(view, None)
        for key in self.root_keys:
            rows = view.arrays[key]
            if row + 1 < len(rows):
                rows[row + 1] = view.next_obs[key]


class SingleStepper(EnvStepper[StepArrays]):
    """Steps one Gymnasium environment."""

    num_envs = 1

    def __init__(self, env: GymEnv) -> None:
        self.env = env
        codec = env.observation_codec
        self._direct = codec.direct if isinstance(codec, InfoCodec) else None
        self._observed = ObservationRows(codec, (), self._direct)
        self.root_keys = self._observed.keys

    @override
    def reset(self, view: StepArrays, mask: NDArray[np.bool_] | None, **kwargs: Any) -> None:
        if mask is not None and not mask[0]:
            return
        with resetting(self.env, f"; {RESET_GIVES}"):
            leaves = self.env.begin_episode(**kwargs)
            for index, value in enumerate(self._observed.ordered(leaves)):
                view.next_obs[self._observed.keys[index]][0] = self._observed.checked(index, value)

    def _reset_function(self) -> Callable[[], Any]:
        """Returns the function that begins an episode, with arguments and a log if there are."""
        plain = self.env.log is None and self.env.reset_arguments is None
        reset: Any = self.env.env.reset if plain else self.env.reset_simulator
        return reset  # type: ignore[no-any-return]

    @override
    def bind(self, view: StepArrays, episodes: EpisodeTracker, start: int, stop: int) -> StepFn:
        view = view.single()
        ends = EpisodeEnds(view, episodes, start, stop)
        bind = self._bind_array if self._observed.is_array else self._bind_leaves
        return bind(view, ends, start, stop)

    @override
    def bound_to(self, episodes: EpisodeTracker) -> Any:
        env = self.env
        # With a limit, a function knows the step that brings the current episode to it.
        again = env.log is None and env.reset_arguments is None and episodes.limit is None
        # Methods may have been replaced.
        return (self._methods, env.mask_check.done) if again else None

    @property
    def _methods(self) -> tuple[Any, ...]:
        """The functions of the simulator that a bound function calls."""
        return self.env.env, self.env.env.step, self.env.env.reset

    def _restarter(
        self, ends: EpisodeEnds, read: Callable[[Any], Any]
    ) -> Callable[[int, Any, Any, Any, int], tuple[Any, int]]:
        """Returns a function that ends the episode if step ``t`` was its last.

        The function's arguments are ``t``, the step's observation, its flags, and the step that
        brings the episode to the limit. It returns the next step's observation, and the step that
        brings its episode to the limit.

        Args:
            ends: the ends of episodes.
            read: function that reads an observation from the results of a reset.
        """
        env, gym_reset = self.env, self._reset_function()

        def restart(
            t: int, obs: Any, terminated: Any, truncated: Any, cutoff: int
        ) -> tuple[Any, int]:
            terminated = flag_of(terminated, "terminated", env)
            truncated = flag_of(truncated, "truncated", env)
            if not (terminated or truncated or t >= cutoff):
                return obs, cutoff
            cutoff = ends.end(t, terminated, truncated)
            return read(gym_reset()), cutoff

        return restart

    def _bind_array(self, view: StepArrays, ends: EpisodeEnds, start: int, stop: int) -> StepFn:
        """Returns the step function for an observation that is one array."""
        env, gym_step = self.env, self.env.mask_check.watched(self.env, self.env.env.step)
        read_action = action_reader(env.action_codec, view, start, stop)
        restart, cutoff = self._restarter(ends, itemgetter(0)), ends.cutoff()
        rewards = checked_rewards(view.arrays[REWARD][start:stop], env)
        (key,) = self._observed.keys
        next_row, root_row = view.rows(next_of(key), start, stop), view.following(key, start, stop)
        (shape,), checked = self._observed.shapes, self._observed.checked
        (dtype,) = self._observed.dtypes
        latest = view.latest

        def step(t: int) -> None:
            nonlocal dtype, cutoff
            found = gym_step(read_action(t))
            try:
                obs, reward, terminated, truncated, _ = found
            except (TypeError, ValueError):
                raise wrong_step(found, env.env) from None
            try:
                rewards[t] = reward
            except TypeError:
                rewards[t] = env.checked_reward(reward)
            if obs.__class__ is not np.ndarray or obs.shape != shape or obs.dtype is not dtype:
                obs = checked(0, obs)
                dtype = obs.dtype
            next_row[t][...] = obs
            # False itself is by far the most common flag; anything else is examined.
            if (
                (terminated is not False and terminated is not NO)
                or (truncated is not False and truncated is not NO)
                or t >= cutoff
            ):
                obs, cutoff = restart(t, obs, terminated, truncated, cutoff)
                if obs.__class__ is not np.ndarray or obs.shape != shape or obs.dtype is not dtype:
                    obs = checked(0, obs)
            root_row[t][...] = obs
            if latest is not None:
                latest.array = obs

        return step

    def _bind_leaves(self, view: StepArrays, ends: EpisodeEnds, start: int, stop: int) -> StepFn:
        """Returns the step function for an observation of several leaves."""
        env, read_leaves = self.env, self._leaf_reader()
        gym_step = env.mask_check.watched(env, env.env.step)
        read_action = action_reader(env.action_codec, view, start, stop)
        restart, cutoff = self._restarter(ends, self._read_reset), ends.cutoff()
        rewards = checked_rewards(view.arrays[REWARD][start:stop], env)
        write_next, write_root, write_both = self._observed.bind(view, start, stop)

        def step(t: int) -> None:
            nonlocal cutoff
            found = gym_step(read_action(t))
            try:
                obs, reward, terminated, truncated, info = found
            except (TypeError, ValueError):
                raise wrong_step(found, env.env) from None
            try:
                rewards[t] = reward
            except TypeError:
                rewards[t] = env.checked_reward(reward)
            leaves = read_leaves(obs, info)
            if (
                (terminated is not False and terminated is not NO)
                or (truncated is not False and truncated is not NO)
                or t >= cutoff
            ):
                write_next(t, leaves)
                begun, cutoff = restart(t, None, terminated, truncated, cutoff)
                write_root(t, leaves if begun is None else begun)
            else:
                write_both(t, leaves)

        return step

    def _read_reset(self, found: Any) -> list[Any]:
        obs, info = reset_results(found, self.env.env)
        return self._observed.ordered(self.env.read(obs, info, "reset"))

    def _leaf_reader(self) -> Callable[[Any, Any], list[Any]]:
        """Returns a function that reads the leaves of a step from its observation and info."""
        env, codec = self.env, self.env.observation_codec
        if not isinstance(codec, InfoCodec):
            return lambda obs, _: codec.encode(obs)
        infos = self._direct
        if infos is None:
            return lambda obs, info: env.read(obs, info, "step")
        leaves = enumerate(codec.leaves)
        paths = [codec.merge.path(leaf.path) for index, leaf in leaves if index not in infos]
        return leaf_reader(list(infos.values()), paths)


class SerialStepper(ArrayStepper):
    """Steps several environments, one after the other."""

    def __init__(self, children: Sequence[ArrayStepper]) -> None:
        self.children = list(children)
        self.num_envs = sum(child.num_envs for child in children)

    def _parts(self) -> list[tuple[ArrayStepper, int]]:
        parts, first = [], 0
        for child in self.children:
            parts.append((child, first))
            first += child.num_envs
        return parts

    @override
    def reset(self, view: StepArrays, mask: NDArray[np.bool_] | None, **kwargs: Any) -> None:
        for child, first in self._parts():
            part = None if mask is None else mask[first : first + child.num_envs]
            child.reset(view.part(first, child.num_envs), part, **kwargs)
            kwargs = next_kwargs(kwargs)

    @override
    def bound_to(self, episodes: EpisodeTracker) -> Any:
        found = [child.bound_to(episodes) for child in self.children]
        return None if None in found else found

    @override
    def bind(self, view: StepArrays, episodes: EpisodeTracker, start: int, stop: int) -> StepFn:
        steps = [
            child.bind(view.part(first, child.num_envs), episodes, start, stop)
            for child, first in self._parts()
        ]

        def step(t: int) -> None:
            index = 0
            try:
                for index, step_one in enumerate(steps):  # noqa: B007
                    step_one(t)
            except Exception as error:
                add_note(error, f"in environment {index} of the {len(steps)} in the batch")
                raise

        return step


class VectorStepper(EnvStepper[StepArrays]):
    """Steps a vector environment."""

    def __init__(self, env: GymEnv) -> None:
        if env.vector is None:
            raise TypeError(f"{env!r} is not a vector environment")
        self.env = env
        self.num_envs = env.vector.num_envs
        self._observed = ObservationRows(env.observation_codec, (self.num_envs,))
        self.root_keys = self._observed.keys

    @property
    def vector(self) -> VectorAdapter:
        """Adapter of the vector environment, which may be made anew."""
        assert self.env.vector is not None
        return self.env.vector

    @override
    def reset(self, view: StepArrays, mask: NDArray[np.bool_] | None, **kwargs: Any) -> None:
        with resetting(self.env):
            if mask is None or mask.all():
                leaves = self.vector.reset(self.env.pop_seeds(), **kwargs)
                mask = np.ones(self.num_envs, dtype=np.bool_)
            elif mask.any():
                leaves = self.vector.restart(mask, **kwargs)
            else:
                return
            for index, value in enumerate(leaves):
                checked = self._observed.checked(index, value)
                view.next_obs[self._observed.keys[index]][mask] = checked[mask]

    @override
    def bound_to(self, episodes: EpisodeTracker) -> Any:
        # With a limit, a function knows the step that brings the next episode to it.
        return self.vector if episodes.limit is None else None

    @override
    def bind(self, view: StepArrays, episodes: EpisodeTracker, start: int, stop: int) -> StepFn:
        vector = self.vector
        keys = self._observed.keys
        write_next = self._observed.writer([view.rows(next_of(k), start, stop) for k in keys])
        root_rows = [view.following(k, start, stop) for k in keys]
        write_root = self._observed.writer(root_rows)
        read_action = action_reader(self.env.action_codec, view, start, stop)
        size = stop - start, self.num_envs, *self.env.reward_shape
        rewards = view.arrays[REWARD][start:stop].reshape(size)
        ends, masked = VectorEnds(view, episodes, start, stop), MASK in view.arrays

        def step(t: int) -> None:
            leaves, reward, terminated, truncated = vector.step(read_action(t))
            write_next(t, leaves)
            rewards[t] = reward
            autoresets = vector.autoreset_mask() if masked else None
            if autoresets is not None:
                ends.skip(t, autoresets)
            done = terminated | truncated
            if t >= ends.nearest:
                done = done | ends.late(t)
            if done.any():
                ends.end(t, terminated, truncated, done)
                begun, values = vector.begin_next(done)
                if begun is not ...:
                    write_root(t, leaves)
                    for rows, value in zip(root_rows, values, strict=True):
                        rows[t][begun] = value
                    return
                leaves = values
            write_root(t, leaves)

        return step


def from_bfloat16(array: Array) -> Array:
    """Converts bfloat16 values, stored as int16, to float32 values with the same upper half."""
    return np.asarray((array.astype(np.uint32) << 16).view(np.float32))


def action_reader(
    codec: SpaceCodec | AgentActions, view: StepArrays, start: int, stop: int
) -> Callable[[int], Any]:
    """Returns a function that reads row ``t``'s actions in the form that ``env.step`` expects."""
    keys = [as_key(leaf.key) for leaf in codec.leaves]
    rows = [view.rows(key, start, stop) for key in keys]
    decode = codec.decode
    if not view.bfloat16.isdisjoint(keys):
        exact = [from_bfloat16 if key in view.bfloat16 else np.copy for key in keys]
        return lambda t: decode([read(row[t]) for read, row in zip(exact, rows, strict=True)])
    if codec.plain and not codec.leaves[0].path:
        (only,) = rows
        dtype = codec.leaves[0].space.dtype
        # A copy, because the environment may keep and change its action, but the batch must not.
        if only[0].dtype == dtype:
            return lambda t: only[t].copy()
        return lambda t: only[t].astype(dtype)
    if len(rows) == 1:
        (only,) = rows
        if isinstance(codec, SpaceCodec) and codec.decode_one is not None:
            decode_one = codec.decode_one
            return lambda t: decode_one(only[t])
        return lambda t: decode((only[t],))
    return lambda t: decode([leaf_rows[t] for leaf_rows in rows])
