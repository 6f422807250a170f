"""Comparison of the entries that a step of a TensorDict environment begins with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase, is_non_tensor
from torch import Tensor

from trawl.envs.base import TensorDictEnv
from trawl.keys import Key, as_key, show_key
from trawl.rollout.checks import check_same_layout
from trawl.tensordicts import is_lazy


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
        needed, varying = _entries(env)
        for place in [place for place in mine if place not in other]:
            if _key(place) not in needed:
                del mine[place]
        for place in [place for place in other if place not in mine]:
            key = _key(place)
            if any(key[: len(one)] == one for one in needed | written):
                del other[place]
        for place in mine.keys() & other.keys():
            if _key(place) in varying:
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


def _key(place: tuple[Any, ...]) -> Key:
    return tuple(part for part in place if isinstance(part, str))


def _entries(env: Any) -> tuple[set[Key], set[Key]]:
    """Returns the keys that each step begins with, and those among them whose shape varies."""
    specs = (env.full_observation_spec, env.full_state_spec, env.full_done_spec)
    leaves = {as_key(key): leaf for spec in specs for key, leaf in spec.items(True, True)}
    return set(leaves), {key for key, leaf in leaves.items() if -1 in leaf.shape}
