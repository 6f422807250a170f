"""Conversion of trajectories to episodes of Minari, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase

from trawl.data.sinks.entries import Entry, from_numbers, from_texts, to_numbers, to_texts
from trawl.envs.entries.spaces import SpaceCodec, SpaceLeaf
from trawl.keys import DONE, DONE_KEYS, REWARD, Key, nested, next_of, show_key
from trawl.rollout.cuts import mark_cut


class EpisodeCodec:
    """Converts between the frames of a trajectory and an episode of Minari.

    An episode has one more observation than steps, because the last observation follows the last
    step. Entries of the frames that are not observations, actions, rewards or flags become infos,
    which have the names of the entries' columns. Infos also have one more row than steps. An info
    from an entry under ``"next"`` repeats its first row at the beginning, and any other info
    repeats its last row at the end. A value that is constant in an episode, such as the trajectory
    id, stays constant.

    Args:
        entries: entries of the frames.
        observations: observation space of the environment.
        actions: action space of the environment.

    Raises:
        ValueError: if the frames lack an entry that an episode needs, or an entry does not fit its
            space.
    """

    def __init__(
        self, entries: Sequence[Entry], observations: Space[Any], actions: Space[Any]
    ) -> None:
        self.entries = {entry.key: entry for entry in entries}
        self.observations = self._codec("observation", observations)
        self.actions = self._codec("action", actions)
        for leaf in self.observations.leaves:
            if next_of(leaf.key) not in self.entries:
                raise ValueError(
                    "an episode includes the observation after its last step, but the frames "
                    f"have no {show_key(next_of(leaf.key))}: collect without compact_obs"
                )
        reward = self.entries.get(REWARD)
        if reward is None or reward.size != 1:
            raise ValueError(
                f"an episode has one reward per step, but {show_key(REWARD)} "
                f"{'is missing' if reward is None else f'has shape {reward.shape}'}"
            )
        done = self.entries.get(DONE)
        if done is None or done.size != 1:
            raise ValueError(
                "the frames need ('next', 'done'), with one flag per frame, to mark the end of "
                "an episode"
            )
        taken = {leaf.key for leaf in (*self.observations.leaves, *self.actions.leaves)}
        taken |= {next_of(leaf.key) for leaf in self.observations.leaves}
        taken |= {REWARD, *((name,) for name in DONE_KEYS), *(("next", name) for name in DONE_KEYS)}
        self.infos = [entry for entry in entries if entry.key not in taken and entry.size]
        self.empty = [entry for entry in entries if entry.key not in taken and not entry.size]

    def _codec(self, root: str, space: Space[Any]) -> SpaceCodec:
        """Returns a codec for the space.

        The codec represents discrete values as the frames do, by one-hot vectors or indices.
        """
        codecs = [SpaceCodec(space, root, categorical) for categorical in (False, True)]
        for codec in codecs:
            if all(_is_of(self.entries.get(leaf.key), leaf) for leaf in codec.leaves):
                return codec
        wanted = {show_key(leaf.key): tuple(leaf.spec.shape) for leaf in codecs[0].leaves}
        there = {show_key(key): entry.shape for key, entry in self.entries.items()}
        raise ValueError(
            f"the environment's {root} space needs {wanted}, but the frames have {there}: pass "
            "the environment that the frames come from (with the option frame_stack, "
            "gymnasium.wrappers.FrameStackObservation(env, size)), or env=None"
        )

    # --- to Minari

    def encode(self, rows: TensorDictBase, cut: bool) -> dict[str, Any]:
        """Returns the arguments of Minari's ``EpisodeBuffer`` for a trajectory.

        Args:
            rows: the trajectory, of shape ``(steps,)``.
            cut: True if the trajectory was cut after these rows. The last step is then marked as
                truncated, unless it is marked as done.
        """
        leaves = self.observations.leaves
        before = [self._array(rows, leaf.key, leaf) for leaf in leaves]
        after = [self._array(rows, next_of(leaf.key), leaf) for leaf in leaves]
        for leaf, one, other in zip(leaves, before, after, strict=True):
            if not np.array_equal(one[1:], other[:-1], equal_nan=one.dtype.kind == "f"):
                raise ValueError(
                    f"observation {show_key(leaf.key)} of a step differs from the observation "
                    "after the previous step, but an episode of Minari can hold only one of them"
                )
        acted = [self._array(rows, leaf.key, leaf) for leaf in self.actions.leaves]
        pairs = zip(before, after, strict=True)
        whole = [np.concatenate([one, other[-1:]]) for one, other in pairs]
        done, terminated, truncated = self._ends(rows)
        mark_cut(truncated[-1:], done[-1:], cut, ended_too=False)
        return {
            "observations": self.observations.decode(whole),
            "actions": self.actions.decode(acted),
            "rewards": to_numbers(rows.get(REWARD)).reshape(-1),
            "terminations": terminated,
            "truncations": truncated,
            "infos": {entry.column: self._info(entry, rows) for entry in self.infos} or None,
        }

    def _array(self, rows: TensorDictBase, key: Key, leaf: SpaceLeaf) -> NDArray[Any]:
        values = _values(rows, self.entries[key])
        if isinstance(leaf.space, spaces.Text):
            return values
        array = values.reshape(len(rows), *leaf.spec.shape)
        if not np.can_cast(array.dtype, leaf.dtype, "safe"):
            raise ValueError(
                f"entry {show_key(key)} is {self.entries[key].dtype}, but its space says "
                f"{leaf.dtype}, which can't hold it exactly"
            )
        return array.astype(leaf.dtype, copy=False)

    def _ends(self, rows: TensorDictBase) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Returns the flags ``done``, ``terminated`` and ``truncated`` of each step."""
        done = to_numbers(rows.get(DONE)).reshape(-1).copy()
        flags: dict[str, NDArray[Any]] = {}
        for name in ("terminated", "truncated"):
            value = rows.get(("next", name), None)
            if value is not None:
                flags[name] = to_numbers(value).reshape(-1).copy()
        truncated = flags.get("truncated", np.zeros_like(done))
        terminated = flags.get("terminated", done & ~truncated)
        if "truncated" not in flags:
            truncated = done & ~terminated
        return done, terminated, truncated

    def _info(self, entry: Entry, rows: TensorDictBase) -> Any:
        values = _values(rows, entry)
        after = entry.key[0] == "next"
        array = np.concatenate([values[:1], values] if after else [values, values[-1:]])
        # Minari writes lists of texts, but no arrays of objects.
        return array.tolist() if entry.dtype is None else array

    # --- from Minari

    def decode(self, episode: Any) -> TensorDictBase:
        """Returns the frames of an ``EpisodeData``, of shape ``(steps,)``."""
        steps = len(episode.rewards)
        tensors: dict[Key, Any] = {}
        encoded = self.observations.encode(episode.observations)
        for leaf, array in zip(self.observations.leaves, encoded, strict=True):
            tensors[leaf.key] = self._column(leaf.key, array[:-1])
            tensors[next_of(leaf.key)] = self._column(next_of(leaf.key), array[1:])
        acted = self.actions.encode(episode.actions)
        for leaf, array in zip(self.actions.leaves, acted, strict=True):
            tensors[leaf.key] = self._column(leaf.key, array)
        tensors[REWARD] = self._column(REWARD, episode.rewards)
        ended = {"terminated": episode.terminations, "truncated": episode.truncations}
        ended["done"] = ended["terminated"] | ended["truncated"]
        for name in DONE_KEYS:
            for key, flags in (((name,), np.zeros(steps, bool)), (("next", name), ended[name])):
                if key in self.entries:
                    tensors[key] = self._column(key, flags)
        for entry in self.infos:
            array = episode.infos[entry.column]
            tensors[entry.key] = self._column(
                entry.key, array[1:] if entry.key[0] == "next" else array[:-1]
            )
        for entry in self.empty:
            tensors[entry.key] = torch.empty((steps, *entry.shape), dtype=entry.dtype)
        return TensorDict(nested(tensors), [steps])

    def _column(self, key: Key, array: Any) -> Any:
        entry = self.entries[key]
        if entry.dtype is None:
            texts = list(array)
            if not all(isinstance(text, str) for text in texts):
                raise ValueError(f"{show_key(key)} has values that are not text")
            return from_texts(texts)
        return from_numbers(entry, np.asarray(array).reshape(len(array), -1))


def _values(rows: TensorDictBase, entry: Entry) -> NDArray[Any]:
    """Returns an entry's values as numbers, ``(steps, n)``, or as strings, ``(steps,)``."""
    value = rows.get(entry.key)
    if entry.dtype is None:
        return np.array(to_texts(value), dtype=object)
    return to_numbers(value)


def _is_of(entry: Entry | None, leaf: SpaceLeaf) -> bool:
    """Returns True if an entry fits a leaf of a space.

    If both have only one value, their shapes may differ.
    """
    shape = tuple(leaf.spec.shape)
    if entry is None or (entry.dtype is None) != isinstance(leaf.space, spaces.Text):
        return False
    return entry.shape == shape or (entry.size == 1 and int(np.prod(shape)) == 1)


def spaces_of(entries: Sequence[Entry]) -> tuple[Space[Any], Space[Any]]:
    """Returns spaces of observations and actions, without bounds, that fit the entries.

    Observations are the entries that also occur under ``"next"``, except for ``done``,
    ``terminated`` and ``truncated``.

    Raises:
        ValueError: if there is no observation or no action, or an entry fits no space.
    """
    keys = {entry.key for entry in entries}
    flags = {(name,) for name in DONE_KEYS}
    observed = [e for e in entries if next_of(e.key) in keys and e.key not in flags]
    acted = [entry for entry in entries if entry.key[-1] == "action" and entry.key[0] != "next"]
    for name, found in (("observation", observed), ("action", acted)):
        if not found:
            raise ValueError(f"the frames have no {name}, but an episode of Minari needs one")
    return _space(observed, ("observation",)), _space(acted, ("action",))


def _space(entries: Sequence[Entry], alone: Key) -> Space[Any]:
    if [entry.key for entry in entries] == [alone]:
        return _box(entries[0])
    return _dict(nested({entry.key: _box(entry) for entry in entries}))


def _dict(tree: Mapping[str, Any]) -> spaces.Dict:
    return spaces.Dict({k: _dict(v) if isinstance(v, dict) else v for k, v in tree.items()})


def _box(entry: Entry) -> Space[Any]:
    if entry.dtype is None:
        raise ValueError(
            f"entry {show_key(entry.key)} is text, and the frames don't define its space: pass "
            "the environment that they come from"
        )
    if entry.dtype == torch.bool:
        return spaces.MultiBinary(entry.shape)
    try:
        dtype = torch.empty(0, dtype=entry.dtype).numpy().dtype
    except TypeError:
        raise ValueError(
            f"entry {show_key(entry.key)} is {entry.dtype}, and no space has this dtype"
        ) from None
    if dtype.kind == "c":
        raise ValueError(
            f"entry {show_key(entry.key)} is {entry.dtype}, and no space has this dtype"
        )
    if dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, entry.shape, dtype.type)
    limits = np.iinfo(dtype)
    return spaces.Box(limits.min, limits.max, entry.shape, dtype.type)
