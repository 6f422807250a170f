"""Checks whether a state fits a collector, before the state is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from trawl.errors import StateError
from trawl.schema.checks import shown

#: Entry of a collector's state with its episodes. Without this entry, new episodes begin.
RESUME = "resume"
#: Entry of the state in its place: the reason why the environments can't be captured.
UNCAPTURED = "uncaptured"
# Entries of a state: the weights of the policy, and the description of an environment.
_WEIGHTS, _IDENTITY = "policy_state_dict", "identity"


def workers_of(state: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns the states of the workers in the state of a collector, by name."""
    names = (name for name in state if name.removeprefix("worker").isdecimal())
    return {name: state[name] for name in names if isinstance(state[name], Mapping)}


def has_episodes(state: Mapping[str, Any]) -> bool:
    """Returns True if the episodes in all environments go on after the state is loaded."""
    workers = workers_of(state)
    if workers:
        return all(map(has_episodes, workers.values()))
    return state.get(RESUME) is not None


def why_uncaptured(state: Mapping[str, Any]) -> str:
    """Returns the reason why new episodes begin after a state is loaded."""
    whys = [why_uncaptured(one) for one in workers_of(state).values() if not has_episodes(one)]
    return str(whys[0] if whys else state.get(UNCAPTURED, "the state has no environments"))


def check_fits(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Checks that a state comes from a collector that was made with the same arguments.

    Args:
        state: the state to load.
        own: the state that the collector has now.

    Raises:
        StateError: if the state comes from a collector with another number of workers, other
            environments or another policy. The message says what differs.
    """
    theirs, mine = workers_of(state), workers_of(own)
    if len(theirs) != len(mine):
        raise StateError(
            f"the state comes from a collector with {len(theirs)} workers, but this one has "
            f"{len(mine)}: make the collector with the same arguments"
        )
    for name in mine:
        if name not in theirs:
            raise StateError(f"the state has no {name}")
        try:
            check_fits(theirs[name], mine[name])
        except StateError as error:
            raise StateError(f"{name}: {error}") from None
    _check_weights(state.get(_WEIGHTS), own.get(_WEIGHTS))
    _check_environments(state.get(RESUME), own.get(RESUME))


def _check_weights(theirs: Any, mine: Any) -> None:
    if not (isinstance(theirs, Mapping) and isinstance(mine, Mapping)):
        if (theirs is None) != (mine is None):
            has = "no weights of a policy" if theirs is None else "weights of a policy"
            raise StateError(f"the state has {has}, unlike this collector: pass the same policy")
        return
    for name in sorted({*theirs, *mine}):
        one, other = (_shown(weights, name) for weights in (theirs, mine))
        if one != other:
            raise StateError(
                f"the state is one of another policy: {name!r} is {one} there, and {other} in this "
                "collector's policy"
            )


def _shown(weights: Mapping[str, Any], name: str) -> str:
    if name not in weights:
        return "missing"
    value = weights[name]
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return type(value).__name__


def _check_environments(theirs: Any, mine: Any) -> None:
    # An environment that can't be captured before its first reset has no description yet.
    if theirs is None or mine is None:
        return
    before, now = list(_identities(theirs)), list(_identities(mine))
    if not before or not now:
        return
    if len(before) != len(now):
        raise StateError(
            f"the state has {len(before)} environments, but this collector has {len(now)}"
        )
    for index, (one, other) in enumerate(zip(before, now, strict=True)):
        for name in sorted(other):
            value = one.get(name, "")
            if not isinstance(value, type(other[name])):
                raise StateError(
                    f"the state must describe environment {index} as this collector does, but its "
                    f"{name!r} is {shown(value)}"
                )
            if value != other[name]:
                raise StateError(
                    f"the state is one of another environment: {name!r} of environment {index} is "
                    f"{value or 'empty'} there, and {other[name] or 'empty'} in this collector"
                )


def _identities(state: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the descriptions of the environments in a state."""
    if isinstance(state, Mapping):
        found = state.get(_IDENTITY)
        if isinstance(found, Mapping):
            yield found
        else:
            for value in state.values():
                yield from _identities(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            if not isinstance(value, (int, float, str)):
                yield from _identities(value)
