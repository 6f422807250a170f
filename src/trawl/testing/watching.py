"""Looks at what an environment returns, before it is converted to the layout of a batch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import VectorWrapper
from tensordict import TensorDictBase
from torch import Tensor

from trawl.envs.capture.ways import chain
from trawl.envs.final_obs import final_sample
from trawl.envs.gym import GymEnv
from trawl.envs.outcomes import flag_of, reset_results, step_results
from trawl.envs.pool import is_pool
from trawl.envs.spaces import SpaceCodec, picker
from trawl.envs.vector import SameStepVector, is_envpool
from trawl.keys import Key, as_key, show_key
from trawl.memory import Array
from trawl.testing.findings import Findings

# Share of a bound by which a float may exceed it, because of rounding.
_ROUNDING = 1e-5


class Lie(Exception):
    """Raised to end a look at an environment whose data can't be read; there is a finding."""


class Watched:
    """Looks at all that a Gymnasium environment returns to its adapter.

    Args:
        adapter: the adapter.
        findings: the findings to add to.

    Attributes:
        env: the environment, without the wrapper that watches it.
        when: the step or the reset that was watched last.
        durations: seconds that each step took.
    """

    def __init__(self, adapter: GymEnv, findings: Findings) -> None:
        self.env = adapter.env
        self.durations: list[float] = []
        self._adapter = adapter
        self._findings = findings
        self._codec: SpaceCodec = adapter.observation_codec
        self._pick = picker([leaf.path for leaf in self._codec.leaves])
        self._batch = tuple(adapter.batch_size)
        self.when = "the first reset"
        self._steps = 0
        # Arrays that were returned last, with copies.
        self._shown: list[tuple[Key, Array, Array]] = []
        # The shapes of the entries of the info of each step, and whether an episode ended.
        self._infos: list[tuple[dict[str, Any], bool]] = []
        # Whether the last observation of an episode was the first of the next one, for each end.
        self._finals: list[bool] = []
        self._varies = False
        kind = _WatchedEnv if adapter.vector is None else _WatchedVector
        self._wrapper: Any = kind(self.env, self)
        adapter.env = self._wrapper
        if adapter.vector is not None:
            adapter.vector.env = self._wrapper

    def unwatch(self) -> None:
        """Puts the environment back into its adapter, and into what the adapter added to it."""
        for holder in (self._adapter, self._adapter.vector, *chain(self._adapter.env)):
            if getattr(holder, "env", None) is self._wrapper:
                holder.env = self.env

    def finish(self) -> None:
        """Adds the findings about all steps together."""
        self._compare_infos()
        if self._finals and all(self._finals) and self._varies:
            self._findings.add(
                "warning",
                "autoreset",
                "info['final_obs'] always equals the first observation of the next episode, which "
                "the same step returned, so that the last observations of episodes are lost: "
                "copy it before the reset, or declare the autoreset mode in which the "
                "environment really resets",
            )

    def reset(self, **kwargs: Any) -> Any:
        """Resets the environment, and looks at the results."""
        self.when = f"the reset after step {self._steps}" if self._steps else "the first reset"
        found = self.env.reset(**kwargs)
        self._find_reuse()
        obs, info = reset_results(found, self.env)
        self._look(obs)
        self._check_info(info, "reset")
        return found

    def step(self, action: Any) -> Any:
        """Steps the environment, and looks at the results."""
        self._steps += 1
        self.when = f"step {self._steps}"
        begun = time.perf_counter()
        found = self.env.step(action)
        self.durations.append(time.perf_counter() - begun)
        self._find_reuse()
        obs, reward, terminated, truncated, info = step_results(found, self.env)
        before = [copied for _, _, copied in self._shown]
        self._look(obs)
        self._check_reward(reward)
        self._check_info(info, "step")
        if self._adapter.vector is None:
            ended = flag_of(terminated, "terminated", self.env)
            ended |= flag_of(truncated, "truncated", self.env)
            if isinstance(info, Mapping):
                self._infos.append(({str(name): _shape(info[name]) for name in info}, ended))
            self._check_own_reset(info)
        elif isinstance(self._adapter.vector, SameStepVector):
            self._compare_finals(obs, info, np.logical_or(terminated, truncated), before)
        return found

    # --- observations

    def _look(self, obs: Any) -> None:
        self._check_structure(self._codec.space, obs, ())
        self._shown = []
        for leaf, value in zip(self._codec.leaves, self._pick(obs), strict=True):
            if isinstance(value, np.ndarray):
                self._shown.append((leaf.key, value, value.copy()))
            if leaf in self._codec.loose:
                self._check_loose(leaf, value)
            else:
                self._check_leaf(leaf, value)

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
        what = f"the observation{''.join(f'[{part!r}]' for part in path)} of {self.when}"
        if not isinstance(value, kind):
            self._lie(
                path,
                f"{what} is {type(value).__name__}, but its space is a "
                f"{type(space).__name__} of {[name for name, _ in parts]}: return what it says",
            )
        present = set(value) if isinstance(value, Mapping) else set(range(len(value)))
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

    def _add(self, level: Any, topic: str, message: str, matter: Any = "") -> None:
        self._findings.add(level, topic, message, str(matter))

    def _check_loose(self, leaf: Any, value: Any) -> None:
        values = [value] if not self._batch else list(value)
        if not all(leaf.space.contains(one) for one in values):
            self._add(
                "warning",
                "observations",
                f"observation {show_key(leaf.key)} of {self.when} is not in its space "
                f"{leaf.space}: {_short(value)}: state a space that has all observations",
                leaf.key,
            )

    def _check_leaf(self, leaf: Any, value: Any) -> None:
        what = f"observation {show_key(leaf.key)} of {self.when}"
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

    def _find_reuse(self) -> None:
        """Finds arrays that were changed after they had been returned."""
        for key, array, copied in self._shown:
            if array.tobytes() != copied.tobytes():
                self._add(
                    "note",
                    "buffers",
                    f"the array of observation {show_key(key)} that was returned before "
                    f"{self.when} was overwritten in it: collectors copy each observation, but "
                    "other code that keeps one sees it change: return a copy",
                    key,
                )

    # --- rewards and infos

    def _check_reward(self, reward: Any) -> None:
        try:
            array = np.asarray(reward)
        except ValueError:
            return
        if array.dtype.kind not in "biuf":
            return  # the adapter's own check rejects it
        wrong = ~(np.abs(array.astype(np.float64)) <= np.finfo(np.float32).max)
        if wrong.any():
            self._add(
                "error",
                "rewards",
                f"the reward of {self.when} is {array[wrong][0]}, which is no finite float32: "
                "return finite numbers below 3.4e38",
            )

    def _check_info(self, info: Any, method: str) -> None:
        if not isinstance(info, Mapping):
            self._add(
                "warning",
                "infos",
                f"the info of {self.when} is {type(info).__name__}, so that entries can't be "
                f"collected with info_keys: return a dict from {method}, {{}} if it is empty",
            )

    def _check_own_reset(self, info: Any) -> None:
        for name in ("final_obs", "final_observation", "terminal_observation"):
            if isinstance(info, Mapping) and name in info:
                self._add(
                    "warning",
                    "autoreset",
                    f"info[{name!r}] of {self.when} says that the environment begins the next "
                    "episode itself, although it is no vector environment, so that the last "
                    "observations of episodes are lost: return the last observation, and begin "
                    "an episode only in reset",
                )

    def _compare_infos(self) -> None:
        # What is reported only when an episode ends is expected to be missing elsewhere.
        inner = [names for names, ended in self._infos if not ended]
        if not inner:
            return
        every = set[str]().union(*inner)
        varying = every - set[str].intersection(*[set(names) for names in inner])
        if varying:
            names = sorted(varying)
            first = next(i for i, (has, _) in enumerate(self._infos) if not varying <= set(has))
            self._add(
                "note",
                "infos",
                f"the info has {', '.join(names)} only in some steps (for example not in step "
                f"{first + 1}): if you collect it with info_keys, it is zero where it is missing, "
                "so return it in each step",
            )
        for name in sorted(every):
            shapes = sorted({names[name] for names in inner if names.get(name) is not None})
            if len(shapes) > 1:
                self._add(
                    "note",
                    "infos",
                    f"info[{name!r}] has the shapes {shapes} in different steps, so that it can't "
                    "be collected with info_keys: return one shape",
                    name,
                )

    def _compare_finals(self, obs: Any, info: Any, ended: Any, before: list[Array]) -> None:
        now = self._pick(obs)
        for row in map(int, np.flatnonzero(ended)):
            final = final_sample(info, row)
            if final is None:
                continue  # the adapter rejects it
            last = self._pick(final)
            self._finals.append(
                all(np.array_equal(a, np.asarray(b)[row]) for a, b in zip(last, now, strict=True))
            )
            self._varies |= any(
                not np.array_equal(a[row], np.asarray(b)[row])
                for a, b in zip(before, now, strict=False)
            )


class _WatchedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: Any, watch: Watched) -> None:
        super().__init__(env)
        self._watch = watch

    def reset(self, **kwargs: Any) -> Any:
        return self._watch.reset(**kwargs)

    def step(self, action: Any) -> Any:
        return self._watch.step(action)


class _WatchedVector(VectorWrapper):
    def __init__(self, env: Any, watch: Watched) -> None:
        super().__init__(env)
        self._watch = watch

    def reset(self, **kwargs: Any) -> Any:
        return self._watch.reset(**kwargs)

    def step(self, actions: Any) -> Any:
        return self._watch.step(actions)


def watched(env: Any, findings: Findings) -> Watched | None:
    """Watches a Gymnasium environment; returns None for environments of other kinds.

    Args:
        env: the adapter of the environment.
        findings: the findings to add to.
    """
    if not isinstance(env, GymEnv) or is_envpool(env.env) or is_pool(env.env):
        return None
    if not isinstance(env.env, (gymnasium.Env, gymnasium.vector.VectorEnv)):
        return None
    return Watched(env, findings)


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


def _shape(value: Any) -> tuple[int, ...] | None:
    """Returns the shape of a number or an array; None for anything else."""
    known = isinstance(value, (bool, int, float, np.generic, np.ndarray))
    return np.shape(value) if known else None


def _place(wrong: Array) -> str:
    """Returns the index of the first element of a mask, as the end of a phrase."""
    if wrong.ndim == 0:
        return ""
    index = [int(part) for part in np.argwhere(wrong)[0]]
    return f" at {index}"


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:100]}…"
