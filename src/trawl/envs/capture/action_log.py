"""Log of an environment's steps, from which another environment repeats them.

It serves environments whose state can't be read. A log has where the steps begin, their actions, a
checksum of their rewards, and the last observation. The log is not a wrapper: code that resets and
steps the environment passes the resets and the actions to the log.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trawl.envs.entries.spaces import SpaceLeaf
from trawl.envs.specs import MultiOneHot, NonTensor
from trawl.errors import EnvStateError
from trawl.keys import show_key
from trawl.memory import Array, Mask

#: Way of an environment whose steps are replayed.
REPLAY = "replay"
# Maximum number of discrete values that take one byte each.
_BYTE = 256


class ActionLog:
    """Actions of the steps of an environment, and a checksum of their rewards.

    Args:
        owner: the environment, a :class:`~trawl.envs.logged.LoggedEnv`.

    Attributes:
        is_state: True if the log alone is the state of the environment.
        most_steps: number of steps above which the log is given up.
        most_bytes: size of the actions above which the log is given up.
        steps: number of steps.
        observed: the observation after the last step, an array for each leaf.
        why: reason why the steps can't be repeated; None if they can.
        skipped: number of rows of the current batch that do not belong to the log.
    """

    is_state = False
    most_steps = 2**62
    most_bytes = 64 * 2**20

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        # Indices take less memory than one-hot vectors, and are decoded to the same actions.
        self._codec = owner.action_codec.compact()
        self._leaves: list[SpaceLeaf] = owner.observation_codec.leaves
        self._rows = [_ActionRows(leaf) for leaf in owner.action_codec.leaves]
        self._digest = 0
        self.steps = self.skipped = 0
        self.observed: Sequence[Any] = ()
        self.why: str | None = "no episode has begun since the log was made"

    def clear(self) -> None:
        """Forgets all steps."""
        for rows in self._rows:
            rows.clear()
        self.steps = self._digest = 0

    def lose(self, why: str) -> None:
        """Gives up the log.

        Args:
            why: the reason, a clause that can follow "it can't be replayed, because".
        """
        self.clear()
        self.why = why

    def remade(self) -> None:
        """Prepares for an environment that was made anew."""
        raise NotImplementedError

    def why_not(self, env: Any) -> str | None:
        """Returns the reason why an environment can't be replayed; None if it can be."""
        return self.why

    def extend(self, actions: Sequence[Array], rewards: Array, ended: Mask) -> None:
        """Adds steps.

        Args:
            actions: the actions of the steps as the policy wrote them, an array for each leaf, with
                time as the first dimension.
            rewards: the rewards of the steps, float32, with time as the first dimension.
            ended: True where an environment of a pool was reset right after a step.
        """
        if self.why is not None or not len(rewards):
            return
        steps = self.steps + len(rewards)
        if steps > self.most_steps:
            self.lose(f"more than {self.most_steps:,} steps would have to be repeated")
            return
        for rows, array in zip(self._rows, actions, strict=True):
            if not rows.extend(array):
                self.lose("actions have values outside their space, or of several types")
                return
        if sum(rows.nbytes for rows in self._rows) > self.most_bytes:
            self.lose(f"the actions take more than {self.most_bytes:,} bytes")
            return
        self.steps = steps
        self._digest = digest(rewards, self._digest)

    def add_step(self, actions: Sequence[Array], reward: Any) -> None:
        """Adds one step, with an action for each leaf. Resets after it are added by themselves."""
        rewards = np.asarray(reward, np.float32)[None]
        rows = [np.asarray(action)[None] for action in actions]
        self.extend(rows, rewards, np.zeros(rewards.shape, np.bool_))

    def observe(self, leaves: Sequence[Any], rows: Array | None = None) -> None:
        """Sets the last observation; with a mask of rows, only in these rows."""
        # Texts and the like have no arrays, and are not compared.
        changed = [
            np.empty(0) if isinstance(leaf.spec, NonTensor) else np.array(value)
            for leaf, value in zip(self._leaves, leaves, strict=True)
        ]
        if rows is not None:
            for array, before in zip(changed, self.observed, strict=True):
                if len(array) == len(rows):
                    array[~rows] = before[~rows]
        self.observed = changed

    def action(self, step: int) -> Any:
        """Returns the action of a step, in the form that the environment takes."""
        return self._codec.decode([rows[step] for rows in self._rows])

    def state(self) -> dict[str, Any]:
        """Returns the steps and the last observation as plain data."""
        return {
            "steps": self.steps,
            "actions": [rows.state() for rows in self._rows],
            "rewards": self._digest,
            "observed": [
                torch.from_numpy(np.array(value))
                for leaf, value in zip(self._leaves, self.observed, strict=True)
                if not isinstance(leaf.spec, NonTensor)
            ],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Loads the steps and the last observation that :meth:`state` returned."""
        for rows, saved in zip(self._rows, state["actions"], strict=True):
            rows.load(saved)
        self.steps, self._digest = state["steps"], state["rewards"]
        self.why = None
        observed = list(self.observed) or [np.empty(0) for _ in self._leaves]
        fixed = [i for i, leaf in enumerate(self._leaves) if not isinstance(leaf.spec, NonTensor)]
        for index, value in zip(fixed, state["observed"], strict=True):
            array = value.numpy()
            if observed[index].shape == array.shape:
                # Written in place, because the array may belong to a batch writer.
                observed[index][...] = array
            else:
                observed[index] = array.copy()
        self.observed = observed

    def capture(self, env: Any) -> dict[str, Any]:
        """Returns the log as plain data.

        Raises:
            NotPlain: if the environment can't be replayed.
        """
        raise NotImplementedError

    def check_state(self, env: Any, state: Any, place: str) -> None:
        """Checks a state of an environment whose log is its state.

        Raises:
            EnvStateError: if an entry is damaged, or the state belongs to another environment.
        """
        raise NotImplementedError

    def replay(self, env: Any, state: Mapping[str, Any]) -> None:
        """Repeats a saved log, and continues it in this one.

        Args:
            env: an environment that was made in the same way.
            state: the state that :meth:`capture` returned.

        Raises:
            EnvStateError: if a step can't be repeated, or its results differ.
        """
        self.load(state)
        try:
            observed, rewards = self._begin(env, state), 0
            for step in range(self.steps):
                observed, reward, ended = self._step(step)
                rewards = digest(reward, rewards)
                if ended and step + 1 < self.steps:
                    raise EnvStateError(
                        f"{env} was replayed, but its episode ended after {step + 1} steps instead "
                        f"of going on for {self.steps}"
                    )
            self._check(env, observed, rewards, state)
            self._end(env, state)
        except BaseException as error:
            self.lose("a replay has failed")
            if isinstance(error, EnvStateError) or not isinstance(error, Exception):
                raise
            why = f"{type(error).__name__}: {error}"
            raise EnvStateError(f"{env} can't be replayed: {why}") from error

    def _begin(self, env: Any, state: Mapping[str, Any]) -> Sequence[Any]:
        """Repeats what came before the first step, and returns the observation."""
        raise NotImplementedError

    def _step(self, step: int) -> tuple[Sequence[Any], Any, bool]:
        """Repeats a step; returns the observation, the reward and whether the episode ended."""
        found: tuple[Sequence[Any], Any, bool] = self.owner.replay_step(self.action(step))
        return found

    def _end(self, env: Any, state: Mapping[str, Any]) -> None:
        """Compares the environment with the original one, and restores what is not replayed."""

    def _check(
        self, env: Any, leaves: Sequence[Any], rewards: int, state: Mapping[str, Any]
    ) -> None:
        """Compares the results of repeated steps with the original results in a state."""
        steps = f"{state['steps']} steps of {env} were replayed"
        expected = iter(state["observed"])
        for leaf, value in zip(self._leaves, leaves, strict=True):
            if isinstance(leaf.spec, NonTensor):
                continue
            wanted = next(expected).numpy()
            found = np.asarray(value).astype(wanted.dtype)
            if found.shape != wanted.shape or found.tobytes() != wanted.tobytes():
                raise EnvStateError(
                    f"{steps}, but the observation {show_key(leaf.key)} after them differs from "
                    "the one to go on from: the environment depends on something outside of its "
                    "episode, or on chance that its generator does not decide"
                )
        if rewards != state["rewards"]:
            raise EnvStateError(f"{steps}, but their rewards differ from the original ones")


def digest(rewards: Any, before: int) -> int:
    """Returns the checksum of all rewards, given the checksum ``before`` of earlier rewards."""
    values: Any = np.ascontiguousarray(rewards, np.float32)
    return zlib.crc32(values, before)


class _ActionRows:
    """Values of one leaf of the actions, with a row for each step.

    Args:
        leaf: the leaf, as the policy writes it.
    """

    def __init__(self, leaf: SpaceLeaf) -> None:
        self._spec: Any = leaf.spec
        self._shape = leaf.space.shape or ()
        # Number of values of each choice in the leaf, or None if the leaf has no choices.
        sizes = [self._spec.n] if hasattr(self._spec, "n") else getattr(self._spec, "nvec", None)
        self._bytes = sizes is not None and max(np.ravel(np.asarray(sizes))) <= _BYTE
        self._array: Array | None = None
        self._dtype: np.dtype[Any] | None = None
        self._count = 0

    @property
    def nbytes(self) -> int:
        return 0 if self._array is None else self._array[: self._count].nbytes

    def clear(self) -> None:
        self._array, self._count = None, 0

    def extend(self, rows: Array) -> bool:
        """Adds rows; returns False if the log can't hold their values exactly."""
        rows = self._indices(rows) if isinstance(self._spec, MultiOneHot) else rows
        kept = rows.astype(np.uint8) if self._bytes else rows
        if self._array is None:
            self._dtype = rows.dtype
        if rows.dtype != self._dtype or (self._bytes and not np.array_equal(kept, rows)):
            return False
        stop = self._count + len(kept)
        if self._array is None or stop > len(self._array):
            grown = np.empty((max(stop, 2 * self._count), *kept.shape[1:]), kept.dtype)
            if self._array is not None:
                grown[: self._count] = self._array[: self._count]
            self._array = grown
        self._array[self._count : stop] = kept
        self._count = stop
        return True

    def _indices(self, rows: Array) -> Array:
        """Returns the indices of the values that one-hot vectors stand for."""
        sizes = self._spec.nvec
        if not self._shape:
            return np.asarray(rows.argmax(-1))
        parts = np.split(rows, np.cumsum(sizes)[:-1], -1)
        index = np.stack([part.argmax(-1) for part in parts], -1)
        return index.reshape(*index.shape[:-1], *self._shape)

    def __getitem__(self, step: int) -> Array:
        assert self._array is not None
        return self._array[step, ...].astype(self._dtype)

    def state(self) -> dict[str, Any] | None:
        if self._array is None or self._dtype is None:
            return None
        rows = torch.from_numpy(self._array[: self._count].copy())
        return {"dtype": self._dtype.str, "rows": rows}

    def load(self, state: Mapping[str, Any] | None) -> None:
        self.clear()
        if state is not None:
            self._dtype, self._array = np.dtype(state["dtype"]), state["rows"].numpy().copy()
            self._count = len(state["rows"])
