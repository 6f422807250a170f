"""Checks of actions, rewards and states, with errors that state what was expected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase, is_non_tensor
from torch import Tensor

from trawl.envs.base import TensorDictEnv
from trawl.envs.specs import Binary, Categorical, MultiCategorical, MultiOneHot, OneHot, is_fixed
from trawl.errors import StateError
from trawl.keys import Key, as_key, show_key, show_keys
from trawl.supported import LIMIT_ALL_AT_ONCE
from trawl.tensordicts import is_lazy


def name_of(policy: Any) -> str:
    """Returns the name of a policy, for messages."""
    return getattr(policy, "__name__", None) or type(policy).__name__


def missing_action(key: Key, policy: Any, wrote: set[Key]) -> KeyError:
    """Returns the error for a policy that writes no action."""
    return KeyError(
        f"policy {name_of(policy)} wrote no action: the environment takes {show_key(key)}, but the "
        f"policy wrote {show_keys(wrote)}. Name the action in the policy's out_keys."
    )


def check_actions(env: Any, policy: Any, found: dict[Key, Any]) -> None:
    """Compares the actions that a policy wrote with the environment's action spec.

    Raises:
        KeyError: if an action is missing.
        ValueError: if an action has the wrong shape, or is not one of the discrete choices.
        TypeError: if a discrete action has a floating-point dtype.
    """
    for name in env.action_keys:
        key, spec = as_key(name), env.full_action_spec[name]
        if key not in found:
            raise missing_action(key, policy, set(found))
        value = found[key]
        if not isinstance(value, Tensor):
            continue
        if value.shape != spec.shape:
            raise ValueError(
                f"policy wrote {show_key(key)} with shape {tuple(value.shape)}, but the "
                f"environment's action spec says {tuple(spec.shape)}: {spec}.{_hint(spec)}"
            )
        exact = isinstance(spec, (Binary, Categorical, MultiCategorical))
        if exact and value.dtype.is_floating_point:
            raise TypeError(
                f"policy wrote {show_key(key)} as {value.dtype}, but the environment's action "
                f"spec says {spec.dtype}: {spec}"
            )
        if isinstance(spec, (MultiOneHot, Categorical, MultiCategorical)) and not (
            spec.contains(value)
        ):
            what, encode = "an index in the valid range", ""
            if isinstance(spec, MultiOneHot):
                what, encode = "one-hot values", ", and encode it (torch.nn.functional.one_hot)"
            raise ValueError(
                f"policy wrote {show_key(key)} = {value.flatten()[:8].tolist()}, but the "
                f"environment's action spec requires {what}: {spec}. Choose an action by argmax "
                f"or by sampling{encode}."
            )


def action_warnings(env: Any, found: dict[Key, Any]) -> list[str]:
    """Returns warnings about the actions for an environment that isn't Trawl's own.

    These are not errors, because the environment decides how to interpret an action, and something
    other than the policy may write the action.
    """
    warnings = []
    for name in env.action_keys:
        value, spec = found.get(as_key(name)), env.full_action_spec[name]
        if not isinstance(value, Tensor) or value.shape == spec.shape:
            continue
        text = (
            f"policy wrote {show_key(as_key(name))} with shape {tuple(value.shape)}, but the "
            f"environment's action spec says {tuple(spec.shape)}"
        )
        lead = tuple(spec.shape[:-1])
        index = not value.dtype.is_floating_point and tuple(value.shape) in (lead, (*lead, 1))
        if index and type(spec).__name__ == "OneHot":
            text += (
                ": an index for a one-hot spec. TorchRL decodes one-hot actions by argmax, which "
                "turns any index into action 0. Encode the index (torch.nn.functional.one_hot), "
                "or make the environment with categorical_action_encoding=True"
            )
        else:
            text += ". How it is interpreted is up to the environment"
        warnings.append(text)
    return warnings


def _hint(spec: Any) -> str:
    if isinstance(spec, (OneHot, MultiOneHot)):
        return (
            " For a policy that returns an index, make the environment with "
            "categorical_action_encoding=True (an argument of GymEnv; with an id, pass it in "
            "create_env_kwargs)."
        )
    return ""


def has_fixed_shapes(env: Any) -> bool:
    """Returns True if an environment's specs say that all its data are tensors of fixed shapes."""
    specs = (env.full_observation_spec, env.full_action_spec)
    return all(is_fixed(leaf) for spec in specs for leaf in spec.values(True, True))


def has_autoreset_steps(env: TensorDictEnv, limit: int | None) -> bool:
    """Returns True if some steps of the environment are resets, so that frames need a mask.

    Raises:
        ValueError: if episodes have a limit, but the environment can't cut them off.
    """
    if limit is not None and env.cannot_restart:
        name = f"{env.cannot_restart[0]}, which can't restart only some of its environments"
        raise LIMIT_ALL_AT_ONCE.error("max_frames_per_traj", limit, against=name)
    return env.autoreset_mask() is not None


def _first_nan(values: NDArray[Any], index: int) -> int | None:
    """Returns the first row in which an environment's values have a NaN, or None."""
    own = values[:, index] if index < values.shape[1] else values
    if not np.issubdtype(own.dtype, np.floating):
        return None
    rows = np.flatnonzero(np.isnan(own.reshape(len(own), -1)).any(-1))
    return int(rows[0]) if len(rows) else None


def check_rewards(
    rewards: NDArray[Any], actions: Callable[[], Mapping[Key, NDArray[Any]]] = dict
) -> None:
    """Rejects rewards that are NaN.

    Args:
        rewards: rewards of shape ``(steps, num_envs)``.
        actions: function that returns the actions of these steps, by key, each of shape
            ``(steps, num_envs, ...)``. If an action is NaN at or before the step of the first NaN
            reward, the error names this action as the cause.

    Raises:
        ValueError: if a reward is NaN; the message names the step and the environment.
    """
    if not np.count_nonzero(np.isnan(rewards)):
        return
    for row, index in np.argwhere(np.isnan(rewards)):
        which = f" of environment {index}" if rewards.shape[1] > 1 else ""
        for key, values in actions().items():
            cause = _first_nan(values[: row + 1], index)
            if cause is not None:
                raise ValueError(
                    f"policy wrote nan to {show_key(key)}{which} at step {cause} of this batch, "
                    f"and the reward (key ('next', 'reward')) of step {row} is nan; an action "
                    "must not be nan. Look for NaN in the policy's weights and its inputs"
                )
        raise ValueError(
            f"the environment returned a reward of nan (key ('next', 'reward')){which} at step "
            f"{row} of this batch; a reward must be a number"
        )


def check_same_layout(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Compares the entries of a state with the entries that a step begins with.

    Args:
        own: the entries that the next step would begin with: objects with ``shape`` and ``dtype``.
        state: the entries of the state.

    Raises:
        StateError: if a state has other entries, or an entry has another shape or dtype.
    """
    for name in sorted({*own, *state}):
        mine, other = own.get(name), state.get(name)
        if mine is None or other is None or (mine.shape, mine.dtype) != (other.shape, other.dtype):
            raise StateError(
                f"the state has {_layout(other)} in {name}, but the collector has {_layout(mine)}: "
                "load the state into a collector that is made with the same environments, policy "
                "and options"
            )


def _layout(value: Any) -> str:
    return "no entry" if value is None else f"{value.dtype} of shape {tuple(value.shape)}"


class _Layout(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def check_carrier(env: Any, written: set[Key], own: TensorDictBase, state: TensorDictBase) -> None:
    """Compares the entries of a state with the entries that a step begins with.

    Between an environment's reset and its next step, there may be other entries than between two
    steps. An environment of TorchRL keeps what the policy wrote.

    Args:
        env: the environment.
        written: keys that the policy writes.
        own: the entries that the next step would begin with.
        state: the entries of the state.

    Raises:
        ValueError: if the state has other entries, or an entry has another shape or dtype.
    """
    mine, other = dict(_leaves(own, ())), dict(_leaves(state, ()))
    if not isinstance(env, TensorDictEnv):
        needed, varying = _entries_of(env)
        for place in [place for place in mine if place not in other]:
            if _names(place) not in needed:
                del mine[place]
        for place in [place for place in other if place not in mine]:
            key = _names(place)
            if any(key[: len(one)] == one for one in needed | written):
                del other[place]
        for place in mine.keys() & other.keys():
            if _names(place) in varying:
                del mine[place], other[place]
    check_same_layout(
        {show_key(tuple(map(str, place))): value for place, value in mine.items()},
        {show_key(tuple(map(str, place))): value for place, value in other.items()},
    )


def _leaves(value: Any, place: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], _Layout]]:
    """Yields the layouts of tensors, and their places.

    A place has a number for each part of a lazy stack, unless the parts are alike. TorchRL uses
    lazy stacks and dense ones alternately.
    """
    if is_lazy(value):
        parts = [dict(_leaves(part, ())) for part in value.tensordicts]
        for index, part in enumerate(parts):
            if any(part != other for other in parts):
                yield from (((*place, index, *inner), leaf) for inner, leaf in part.items())
            elif index == 0:
                for inner, leaf in part.items():
                    shape = list(leaf.shape)
                    shape.insert(value.stack_dim, len(parts))
                    yield (*place, *inner), _Layout(tuple(shape), leaf.dtype)
    elif isinstance(value, TensorDictBase) and not is_non_tensor(value):
        for name, entry in value.items():
            yield from _leaves(entry, (*place, name))
    elif isinstance(value, Tensor):
        yield place, _Layout(tuple(value.shape), value.dtype)


def _names(place: tuple[Any, ...]) -> Key:
    return tuple(part for part in place if isinstance(part, str))


def _entries_of(env: Any) -> tuple[set[Key], set[Key]]:
    """Returns the keys that each step begins with, and those among them whose shape varies."""
    specs = (env.full_observation_spec, env.full_state_spec, env.full_done_spec)
    leaves = {as_key(key): leaf for spec in specs for key, leaf in spec.items(True, True)}
    return set(leaves), {key for key, leaf in leaves.items() if -1 in leaf.shape}
