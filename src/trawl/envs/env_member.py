"""An environment in another process, whose actions and results are in shared memory."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from trawl.envs.attributes import packed_result
from trawl.envs.batches.foreign import as_member
from trawl.envs.entries.masks import MASK_KEY, is_joint, mask_shapes, unfit_mask
from trawl.envs.entries.spaces import SpaceCodec
from trawl.envs.generators import seed_generators
from trawl.envs.gym import GymEnv
from trawl.envs.logged import LoggedEnv
from trawl.envs.outcomes import (
    RESET_GIVES,
    checked_rewards,
    flag_of,
    reset_results,
    wrong_step,
)
from trawl.envs.processes.buffers import (
    AUTORESET,
    FLAT,
    JOINT,
    MOST_COMBINATIONS,
    RESET,
    TERMINATED,
    TRUNCATED,
    UNMASKED,
    SharedStepBuffers,
)
from trawl.envs.seeding import stream_seed
from trawl.errors import EnvStateError, env_errors, resetting
from trawl.keys import RESET_MASK, Key, as_key
from trawl.memory import Array
from trawl.schema.checks import UNKNOWN
from trawl.schema.states import MEMBER


class EnvMember:
    """An environment in a process.

    Args:
        index: number of the environment.
        make: function that makes the environment.
        leads: True if the environment's seed is also that of the process's global generators.

    Attributes:
        env: the environment.
        step_buffers: function that takes a step with the actions in the shared memory. Its
            argument is True to also reset rows whose episode ends.
    """

    step_buffers: Callable[[bool], None]

    def __init__(self, index: int, make: Callable[[], Any], leads: bool = False) -> None:
        self.index = index
        self._leads = leads
        self._make = make
        # The option and the index of the first environment, and the numbers of the next episodes.
        self._reset_kwargs: tuple[Any, int] | None = None
        self._counts: Array | None = None
        self.env = self._made()
        self._buffers: SharedStepBuffers | None = None
        # What the last reset or step returned.
        self.root: TensorDictBase | None = None

    def _made(self) -> Any:
        """Makes the environment, which keeps a log if it may have to be replayed."""
        env = as_member(self._make())
        if isinstance(env, LoggedEnv) and env.vector is None:
            env.keep_log()
        return env

    def close(self) -> None:
        """Closes the environment."""
        if not getattr(self.env, "is_closed", False):
            self.env.close(raise_if_closed=False)

    def attach(self, buffers: SharedStepBuffers) -> None:
        """Prepares steps that use the shared memory."""
        self._buffers = buffers
        single = type(self.env) is GymEnv and self.env.vector is None
        rows = buffers.rows(self.index)
        self.step_buffers = (
            _single(self.env, buffers, rows) if single else _nested(self, buffers, rows)
        )

    def restart(self, failed: bool, seed: int | None) -> tuple[TensorDictBase, Array | None] | None:
        """Resets the environment, which is made anew first if it has failed.

        Args:
            failed: True if the environment has failed; False if it has just been made.
            seed: seed of the environment, or None.

        Returns:
            The result of :meth:`reset`, unless it is in the shared memory.
        """
        if failed:
            with suppress(Exception):
                self.close()
            self.env, self.root = self._made(), None
            self._give_arguments()
        if seed is not None:
            self.env.set_seed(seed, False)
            if not failed:
                self._seed_generators(seed)
        if self._buffers is None:
            return self.reset(None, {})
        self.begin(None, {})
        # Afterwards, because the first reset wraps an environment that returns masks.
        self.attach(self._buffers)
        return None

    def seed(self, seed: int, static_seed: bool) -> Any:
        """Seeds the next reset, and returns the seed for the next environment."""
        following = self.env.set_seed(seed, static_seed)
        # After the environment, because some draw from the generators, or seed them themselves.
        self._seed_generators(seed)
        return following

    def _seed_generators(self, seed: int) -> None:
        if self._leads:
            seed_generators(stream_seed(seed))

    def begin(self, mask: Array | None, kwargs: Mapping[str, Any]) -> None:
        """Resets environments, and writes their observations to the shared memory.

        Args:
            mask: mask of the rows to reset; None for all rows.
            kwargs: arguments of the environment's ``reset``.
        """
        buffers = self._buffers
        assert buffers is not None
        fresh, masks = self.reset(mask, kwargs)
        rows = buffers.rows(self.index)
        for key, target in buffers.reset_observed.items():
            target[rows] = _numbers(fresh.get(key)).reshape(target[rows].shape)
        self._publish_masks(masks, buffers)

    def _publish_masks(self, masks: Array | None, buffers: SharedStepBuffers) -> None:
        """Writes action masks to the shared memory, or marks that there are none."""
        rows, kind = buffers.rows(self.index), UNMASKED
        if masks is not None:
            joint = is_joint(self.env.action_spec_unbatched, masks.shape[1:])
            kind = JOINT if joint else FLAT
        if (buffers.masked[rows] != kind).any():
            buffers.masked[rows] = kind
            self.attach(buffers)
        if masks is not None:
            _show_masks(masks, buffers, rows)

    def reset(
        self, mask: Array | None, kwargs: Mapping[str, Any]
    ) -> tuple[TensorDictBase, Array | None]:
        """Resets all environments, or those in ``mask``.

        Returns:
            The TensorDict that the reset returned, and the action masks from ``info``.
        """
        part = None
        # A vector environment may have begun all next episodes already.
        if mask is not None and (not mask.all() or self.env.batch_size):
            flags = torch.from_numpy(mask).reshape(*self.env.batch_size, 1)
            before = self.env.fake_tensordict() if self.root is None else self.root.copy()
            part = before.set(RESET_MASK, flags)
        with resetting(self.env):
            self.root = self.env.reset(part, **kwargs)
        return self.root, self._masks()

    def step(
        self, tensordict: TensorDictBase
    ) -> tuple[TensorDictBase, Tensor | None, Array | None]:
        """Takes a step.

        Returns:
            The results of the step, a mask of the rows in which the step was only a reset, and the
            action masks from ``info``.
        """
        return *self.take(tensordict), self._masks()

    def take(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, Tensor | None]:
        """Takes a step like :meth:`step`, but returns no action masks."""
        following = self.env.step(tensordict).get("next")
        self.root = following.exclude("reward")
        return following, self.env.autoreset_mask()

    # --- arguments of resets

    def set_reset_kwargs(self, given: Any, first: int) -> None:
        """Sets arguments of resets; see :meth:`~trawl.envs.base.TensorDictEnv.set_reset_kwargs`.

        Args:
            given: the option ``reset_kwargs``, or a pickle of it.
            first: index of the first environment.
        """
        self._reset_kwargs = pickle.loads(given) if isinstance(given, bytes) else given, first
        self._give_arguments()

    def _give_arguments(self) -> None:
        if self._reset_kwargs is None:
            return
        given, first = self._reset_kwargs
        if self._buffers is not None:
            # A process that replaces this one goes on counting.
            self._counts = self._buffers.episodes[self._buffers.rows(self.index)]
        elif self._counts is None:
            self._counts = np.zeros(max(1, self.env.batch_size.numel()), np.int64)
        self.env.set_reset_kwargs(given, first, self._counts)
        if self._buffers is not None:
            self.attach(self._buffers)

    def episode_counts(self) -> Array:
        """Returns the number of the next episode of each row."""
        own = self._counts
        assert own is not None
        found: Array = self.env.episode_counts(own)
        return found.copy()

    def load_episode_counts(self, counts: Array) -> None:
        """Sets the number of the next episode of each row."""
        assert self._counts is not None
        self._counts[:] = counts
        self.env.load_episode_counts(counts)

    # --- calls of users

    def apply(self, call: Sequence[Any]) -> Any:
        """Calls a function with the environment and further arguments."""
        function, *arguments = call
        return function(self.env, *arguments)

    def apply_packed(self, data: bytes) -> bytes:
        """Calls a pickled function with the environment, and returns the pickled result."""
        return packed_result(self.env, data)

    # --- the state

    def state_methods(self) -> list[str]:
        """Returns the way in which the state of each environment is captured."""
        return [way for part in self.env.parts for way in part.state_methods]

    def capture(self) -> dict[str, Any]:
        """Returns the state of the environment as plain data.

        Raises:
            EnvStateError: if it can't be captured.
        """
        return {"parts": [part.capture() for part in self.env.parts]}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Checks that a state is one of an environment like this.

        Raises:
            EnvStateError: if it is the state of another environment.
        """
        with env_errors():
            MEMBER(state, "state", UNKNOWN)
        parts, others = self.env.parts, state["parts"]
        if len(parts) != len(others):
            raise EnvStateError(
                f"the state has {len(others)} environments, but {self.env!r} has {len(parts)}"
            )
        for part, one in zip(parts, others, strict=True):
            part.check_state(one)

    def restore(self, state: Mapping[str, Any], trust: bool) -> Array | None:
        """Continues from a state that :meth:`capture` returned, and returns the action masks.

        Raises:
            EnvStateError: if it is the state of another environment, or can't be restored.
        """
        for part, one in zip(self.env.parts, state["parts"], strict=True):
            part.restore(one, trust)
        self.root = None
        masks = self._masks()
        if self._buffers is not None:
            self._publish_masks(masks, self._buffers)
            # The step function is bound to the environment, which may be another object now.
            self.attach(self._buffers)
        return masks

    def _masks(self) -> Array | None:
        masks: Array | None = self.env.action_mask()
        return masks


# --- steps in shared memory


def _show_masks(masks: Array, buffers: SharedStepBuffers, rows: slice) -> None:
    """Writes the action masks of a process's environments to shared memory."""
    kind = int(buffers.masked[rows.start])
    target = buffers.masks[kind][rows]
    shape, sizes = masks.shape[1:], buffers.choices
    # Rows for each choice are flat in memory.
    fits = shape == target.shape[1:] or shape in mask_shapes(sizes)
    if masks.size != target.size or not fits:
        given = f"info[{MASK_KEY!r}]"
        if kind == JOINT and not target.size:
            raise ValueError(
                f"the environment returned {given} with {masks[0].size} entries, but processes "
                f"share masks of at most {MOST_COMBINATIONS} combinations of values: return the "
                "masks of all choices, concatenated"
            )
        if shape in mask_shapes(sizes):
            raise ValueError(
                f"the environment returned {given} of shape {shape} in a step, but of shape "
                f"{target.shape[1:]} before: masks must keep their shape"
            )
        raise unfit_mask(sizes, shape)
    masks = masks.reshape(target.shape)
    target[...] = (masks != 0).astype(np.int8) + (masks == 2)


def _single(env: GymEnv, buffers: SharedStepBuffers, rows: slice) -> Callable[[bool], None]:
    """Returns the function that steps a single Gymnasium environment."""
    gym_step = env.mask_check.watched(env, env.env.step)
    row = rows.start
    write_observed, write_begun = (
        _observation_writer(env, [arrays[key][row, ...] for key in arrays], method)
        for arrays, method in ((buffers.observed, "step"), (buffers.reset_observed, "reset"))
    )
    read_action = _action_reader(env.action_codec, buffers, row)
    encode = env.observation_codec.encode
    actions = [buffers.actions[as_key(leaf.key)][row, ...] for leaf in env.action_codec.leaves]
    (given,) = (array[rows] for array in buffers.rewards.values())
    rewards = checked_rewards(given, env)
    flags, cut = buffers.flags[rows].data, buffers.cut[rows]
    is_masked = buffers.masked[row] != UNMASKED

    def begin() -> None:
        seeds = env.pop_seeds()
        with resetting(env, f"; {RESET_GIVES}"):
            given = {} if seeds is None else {"seed": seeds[0]}
            obs, info = reset_results(env.reset_simulator(**given), env.env)
            write_begun(obs, info)
            if env.log is not None:
                env.log.observe(encode(obs, info))

    def step(eager: bool) -> None:
        found = gym_step(read_action())
        try:
            obs, reward, terminated, truncated, info = found
        except (TypeError, ValueError):
            raise wrong_step(found, env.env) from None
        try:
            rewards[0] = reward
        except TypeError:
            rewards[0] = env.checked_reward(reward)
        write_observed(obs, info)
        if env.log is not None:
            env.log.add_step([action.copy() for action in actions], given[0])
            env.log.observe(encode(obs, info))
        bits = 0
        if terminated is not False and flag_of(terminated, "terminated", env):
            bits = TERMINATED
        if truncated is not False and flag_of(truncated, "truncated", env):
            bits |= TRUNCATED
        if eager and (bits or cut[0]):
            begin()
            bits |= RESET
        flags[0] = bits
        if is_masked:
            masks = env.action_mask()
            assert masks is not None
            _show_masks(masks, buffers, rows)

    return step


def _observation_writer(
    env: GymEnv, targets: list[Array], method: str
) -> Callable[[Any, Any], None]:
    """Returns a function that writes observations and infos, and rejects those that don't fit."""
    codec, read = env.observation_codec, env.read
    places = list(zip(codec.leaves, targets, strict=True))

    def write(obs: Any, info: Any) -> None:
        for (leaf, target), value in zip(places, read(obs, info, method), strict=True):
            array = np.asarray(value)
            leaf.check(array)
            target[...] = array

    if not codec.plain or codec.leaves[0].path:
        return write
    (only,) = targets
    shape, dtype = only.shape, only.dtype

    def write_array(obs: Any, info: Any) -> None:
        if obs.__class__ is np.ndarray and obs.shape == shape and obs.dtype == dtype:
            only[...] = obs
        else:
            write(obs, info)

    return write_array


def _action_reader(codec: SpaceCodec, buffers: SharedStepBuffers, row: int) -> Callable[[], Any]:
    """Returns a function that reads the action in the form that the environment expects."""
    arrays = buffers.actions
    parts = [arrays[as_key(leaf.key)][row, ...] for leaf in codec.leaves]
    decode = codec.decode
    if codec.plain and not codec.leaves[0].path:
        (only,) = parts
        dtype = codec.leaves[0].space.dtype
        # A copy: the environment may keep its action.
        return only.copy if only.dtype == dtype else lambda: only.astype(dtype)
    return lambda: decode(parts)


def _ends(following: TensorDictBase) -> tuple[Array, Array]:
    """Returns which environments were terminated, and which were truncated.

    An environment without one of these flags ends with ``"done"``.
    """
    found = (following.get(key, None) for key in ("terminated", "truncated"))
    terminated, truncated = (None if one is None else _numbers(one).ravel() for one in found)
    if terminated is None or truncated is None:
        done = _numbers(following.get("done")).ravel()
        if terminated is None:
            terminated = done if truncated is None else done & ~truncated
        if truncated is None:
            truncated = done & ~terminated
    return terminated, truncated


def _nested(member: EnvMember, buffers: SharedStepBuffers, rows: slice) -> Callable[[bool], None]:
    """Returns the function that steps a batch of environments, or one of another library."""
    env = member.env
    actions = {key: array[rows] for key, array in buffers.actions.items()}
    flags, cut = buffers.flags[rows], buffers.cut[rows]
    results = {key: a[rows] for key, a in {**buffers.observed, **buffers.rewards}.items()}
    begun = {key: array[rows] for key, array in buffers.reset_observed.items()}
    batch = env.batch_size
    is_masked = buffers.masked[rows.start] != UNMASKED

    def write(arrays: dict[Key, Array], tensordict: TensorDictBase, mask: Any = ...) -> None:
        for key, array in arrays.items():
            array[mask] = _numbers(tensordict.get(key)).reshape(array.shape)[mask]

    def step(eager: bool) -> None:
        tensordict = TensorDict({}, batch, device=env.device)
        for key, array in actions.items():
            value = torch.from_numpy(array.copy()).reshape((*batch, *array.shape[1:]))
            tensordict.set(key, value)
        following, autoresets = member.take(tensordict)
        write(results, following)
        terminated, truncated = _ends(following)
        bits = terminated * TERMINATED | truncated * TRUNCATED
        if autoresets is not None:
            bits |= _numbers(autoresets).ravel() * AUTORESET
        ended = terminated | truncated | cut
        if eager and ended.any():
            assert member.root is not None
            mask = torch.from_numpy(ended).reshape(*batch, 1)
            member.root = env.reset(member.root.set(RESET_MASK, mask))
            write(begun, member.root, ended)
            bits |= ended * RESET
        flags[:] = bits
        if is_masked:
            masks = env.action_mask()
            assert masks is not None
            _show_masks(masks, buffers, rows)

    return step


def _numbers(tensor: Tensor) -> Array:
    array: Array = tensor.detach().cpu().numpy()
    return array
