"""Compares observations with their spaces and specs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces
from tensordict import TensorDictBase
from torch import Tensor

from trawl.envs.entries.spaces import SpaceCodec, picker
from trawl.keys import Key, as_key, show_key
from trawl.memory import Array
from trawl.testing.findings import Findings

# Share of a bound by which a float may exceed it, because of rounding.
_ROUNDING = 1e-5


class Lie(Exception):
    """Raised to end a look at an environment whose data can't be read; there is a finding."""


class Samples:
    """Compares the observations that an environment returns with their space.

    Args:
        codec: codec of the space.
        batch: batch size of the environment.
        findings: the findings to add to.
        owner: whose observations they are, as the end of a phrase, such as ``" of agent 'a'"``.
    """

    def __init__(
        self, codec: SpaceCodec, batch: Sequence[int], findings: Findings, owner: str = ""
    ) -> None:
        self._codec = codec
        self._batch = tuple(batch)
        self._findings = findings
        self._owner = owner
        self._pick = picker([leaf.path for leaf in codec.leaves])
        self._when = ""

    def pick(self, obs: Any) -> list[Any]:
        """Returns the parts of an observation, with tensors as arrays."""
        return [as_array(value) for value in self._pick(obs)]

    def look(self, obs: Any, when: str) -> list[tuple[Key, Array]]:
        """Compares an observation with the space.

        Args:
            obs: the observation.
            when: the step or reset that returned it.

        Returns:
            The arrays in the observation, with their keys.

        Raises:
            Lie: if it can't be read.
        """
        self._when = f"{when}{self._owner}"
        self._check_structure(self._codec.space, obs, ())
        found = []
        for leaf, value in zip(self._codec.leaves, self.pick(obs), strict=True):
            if isinstance(value, np.ndarray):
                found.append((leaf.key, value))
            if leaf in self._codec.loose:
                self._check_loose(leaf, value)
            else:
                self._check_leaf(leaf, value)
        return found

    def _check_structure(self, space: Space[Any], value: Any, path: tuple[Any, ...]) -> None:
        """Rejects a sample that doesn't have the entries of a Dict or Tuple space."""
        kind: Any
        parts: list[tuple[Any, Space[Any]]]
        if isinstance(space, spaces.Dict):
            kind, parts = Mapping, list(space.spaces.items())
        elif isinstance(space, spaces.Tuple):
            kind, parts = Sequence, list(enumerate(space.spaces))
        else:
            return
        what = f"the observation{''.join(f'[{part!r}]' for part in path)} of {self._when}"
        if not isinstance(value, kind):
            self._lie(
                path,
                f"{what} is {type(value).__name__}, but its space is a "
                f"{type(space).__name__} of {[name for name, _ in parts]}: return what it says",
            )
        present = set(value.keys()) if isinstance(value, Mapping) else set(range(len(value)))
        if missing := [name for name, _ in parts if name not in present]:
            self._lie(
                path,
                f"{what} lacks {missing}, which its space has: return all entries of the "
                "space in each step, or leave them out of the space",
            )
        for name, part in parts:
            self._check_structure(part, value[name], (*path, name))

    def _lie(self, matter: Any, message: str) -> None:
        self._add("error", "observations", message, matter)
        raise Lie

    def _check_loose(self, leaf: Any, value: Any) -> None:
        values = [value] if not self._batch else list(value)
        if not all(leaf.space.contains(one) for one in values):
            self._add(
                "warning",
                "observations",
                f"observation {show_key(leaf.key)} of {self._when} is not in its space "
                f"{leaf.space}: {_short(value)}: state a space that has all observations",
                leaf.key,
            )

    def _check_leaf(self, leaf: Any, value: Any) -> None:
        what = f"observation {show_key(leaf.key)} of {self._when}"
        space, array = leaf.space, np.asarray(value)
        expected = (*self._batch, *space.shape)
        if array.dtype.kind not in "biuf":
            self._lie(
                leaf.key,
                f"{what} is {type(value).__name__} ({_short(value)}), but its space has "
                f"{space.dtype}: return an array of numbers",
            )
        if array.shape != expected:
            self._lie(
                leaf.key,
                f"{what} has the shape {array.shape}, but its space says {expected}: "
                "return that shape, or state the true shape in the space",
            )
        self._check_dtype(leaf, array, what)
        if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
            self._check_choice(leaf, array, what)
        check_values(what, leaf.key, array, *_bounds(space), self._findings)

    def _check_choice(self, leaf: Any, array: Array, what: str) -> None:
        """Rejects a choice that its space doesn't have."""
        low, high = _bounds(leaf.space)
        if ((array < low) | (array > high)).any():
            self._lie(
                leaf.key,
                f"{what} is {_short(array.tolist())}, but its space is {leaf.space}: state a "
                "space that has all values",
            )

    def _check_dtype(self, leaf: Any, array: Array, what: str) -> None:
        space = leaf.space
        if array.dtype == space.dtype:
            return
        if not np.can_cast(array.dtype, space.dtype, "same_kind"):
            self._lie(
                leaf.key,
                f"{what} is {array.dtype}, but its space says {space.dtype}, to which it "
                f"can't be converted without loss: state dtype={array.dtype} in the space",
            )
        if isinstance(space, spaces.Box):
            self._add(
                "warning",
                "observations",
                f"{what} is {array.dtype}, but its space says {space.dtype}, so that each is "
                f"converted: return {space.dtype}, or state dtype={array.dtype} in the space",
                (leaf.key, "dtype"),
            )

    def _add(self, level: Any, topic: str, message: str, matter: Any = "") -> None:
        # Of agents with the same lie, one is enough.
        self._findings.add(level, topic, message, str(matter))


def as_array(value: Any) -> Any:
    """Returns a tensor as an array that shares its memory if it can; anything else unchanged."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    return (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()


def check_entries(env: Any, data: TensorDictBase, when: str, findings: Findings) -> None:
    """Compares the observations of a TensorDict with the environment's specs.

    Args:
        env: the environment.
        data: what a reset or a step returned.
        when: the step, for messages.
        findings: the findings to add to.

    Raises:
        Lie: if entries are missing, or have another shape or dtype.
    """
    for name, spec in env.full_observation_spec.items(True, True):
        key = as_key(name)
        what = f"observation {show_key(key)} of {when}"
        value = data.get(name, None)
        if value is None:
            findings.add(
                "error",
                "observations",
                f"{what} is missing, but the specs have it: return all "
                "entries of the specs in each step",
                str(key),
            )
            raise Lie
        if not isinstance(value, Tensor):
            continue
        for kind, has, says in (
            ("shape", tuple(value.shape), tuple(spec.shape)),
            ("dtype", value.dtype, spec.dtype),
        ):
            if has != says:
                findings.add(
                    "error",
                    "observations",
                    f"{what} has the {kind} {has}, but its spec says {says}: make both the same",
                    str(key),
                )
                raise Lie
        low, high = getattr(spec, "low", None), getattr(spec, "high", None)
        limits = [None if one is None else one.cpu().numpy() for one in (low, high)]
        array = (
            value.detach().cpu().float().numpy()
            if value.dtype.itemsize == 2
            else (value.detach().cpu().numpy())
        )
        if limits[0] is None and not spec.is_in(value):
            findings.add(
                "warning",
                "observations",
                f"{what} is not in its spec {_short(spec)}: {_short(value)}: state a spec that "
                "has all observations",
                str((key, "bounds")),
            )
        check_values(what, key, array, limits[0], limits[1], findings)


def check_values(
    what: str, key: Key, array: Array, low: Any, high: Any, findings: Findings
) -> None:
    """Looks for NaN, and for numbers outside of bounds.

    Args:
        what: the subject of messages.
        key: key of the array.
        array: the numbers.
        low: the lower bounds; None for none.
        high: the upper bounds; None for none.
        findings: the findings to add to.
    """
    if array.dtype.kind == "f" and np.isnan(array).any():
        place = _place(np.isnan(array))
        findings.add(
            "error",
            "observations",
            f"{what} has NaN{place}: find the step of the simulation in which it arises, and end "
            "the episode there or mend it",
            str((key, "nan")),
        )
        return
    for side, bound, beyond in (("below", low, np.less), ("above", high, np.greater)):
        if bound is None:
            continue
        slack = np.abs(bound) * _ROUNDING + _ROUNDING if array.dtype.kind == "f" else 0
        limit = bound - slack if side == "below" else bound + slack
        wrong = beyond(array, limit)
        if wrong.any():
            worst = array[wrong].flat[0]
            says = np.broadcast_to(bound, array.shape)[wrong].flat[0]
            findings.add(
                "warning",
                "observations",
                f"{what} is {worst}{_place(wrong)}, {side} the bound {says} of its space: state "
                "bounds that hold, or clip the observation",
                str((key, "bounds")),
            )


def _bounds(space: Space[Any]) -> tuple[Any, Any]:
    if isinstance(space, spaces.Box):
        return (space.low, space.high)
    elif isinstance(space, spaces.Discrete):
        return (np.asarray(space.start), np.asarray(space.start + space.n - 1))
    elif isinstance(space, spaces.MultiDiscrete):
        start = np.asarray(space.start)
        return (start, start + np.asarray(space.nvec) - 1)
    else:
        return (np.asarray(0), np.asarray(1))


def _place(wrong: Array) -> str:
    """Returns the index of the first element of a mask, as the end of a phrase."""
    if wrong.ndim == 0:
        return ""
    index = [int(part) for part in np.argwhere(wrong)[0]]
    return f" at {index}"


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:100]}…"
