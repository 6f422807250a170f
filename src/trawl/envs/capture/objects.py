"""State of an environment that is a graph of objects with tensors, such as a simulator of VMAS.

The walk begins at the environment, and reaches all objects in its attributes and in their lists,
tuples and dictionaries. Each object is captured by its methods ``get_state`` and ``set_state`` or,
if it has none, by its attributes. Objects are never made from data: the walk through another
environment must reach objects of the same classes in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gymnasium import Space

from trawl.envs.capture.codec import Decoder, Encoder, NotPlain, difference
from trawl.envs.capture.fixed import (
    check_identity,
    check_infos,
    class_name,
    constant_names,
    has_own_methods,
    is_fixed,
    is_simple,
    package_of,
)
from trawl.envs.capture.kinds import FIXED_IN_GRAPHS
from trawl.errors import EnvStateError, env_errors
from trawl.schema.checks import UNKNOWN, entries, table, text
from trawl.schema.states import check_graph

_CONTAINERS = (list, tuple, dict)


class ObjectGraph:
    """Captures and restores the state of an environment whose data are tensors.

    Args:
        env: the environment.
        owner: object that steps the environment.
        names: attributes of ``owner`` that belong to the state.
    """

    def __init__(self, env: Any, owner: Any, names: Sequence[str]) -> None:
        self._env, self._owner, self._names = env, owner, names
        self._objects = objects_of(env)

    @property
    def way(self) -> str:
        """Way in which the environment is captured; ``"none"`` if it can't be."""
        try:
            self.capture()
        except EnvStateError:
            return "none"
        base = getattr(self._env, "unwrapped", self._env)
        return "get_state" if has_own_methods(base) else "attributes"

    def capture(self) -> dict[str, Any]:
        """Returns the state as plain data.

        Raises:
            EnvStateError: if an attribute can't be captured.
        """
        encoder = Encoder(self._objects, fixed=FIXED_IN_GRAPHS)
        try:
            states = [_captured(one, encoder) for one in self._objects]
            own = {name: encoder.encode(getattr(self._owner, name)) for name in self._names}
        except NotPlain as error:
            raise EnvStateError(
                f"the state of {self._owner!r} can't be captured: {error}. Give the environment "
                "the methods get_state() and set_state(state)"
            ) from error
        return {"identity": self._identity(), "objects": states, "own": own}

    def check(self, state: Mapping[str, Any]) -> None:
        """Checks that a state belongs to an environment that was made in the same way.

        Raises:
            EnvStateError: if it does not; the message says what differs.
        """
        with env_errors():
            own = self.capture()
            entries({"identity": table(text)})(state, "state", UNKNOWN)
            check_infos(state["identity"], self._owner)
            check_graph(state, "state", own, self._names)
        check_identity(own["identity"], state["identity"], self._owner)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a state that :meth:`capture` returned.

        Raises:
            EnvStateError: if the state belongs to another environment, or can't be restored.
        """
        self.check(state)
        # Tensors are written in place, because a graph of operations may refer to them.
        decoder = Decoder(self._objects, in_graph=True, in_place=True)
        try:
            for one, data in zip(self._objects, state["objects"], strict=True):
                _restore(one, data, decoder)
            for name in self._names:
                present = getattr(self._owner, name, None)
                setattr(self._owner, name, decoder.decode(state["own"][name], present))
        except (KeyError, NotPlain, RuntimeError) as error:
            raise EnvStateError(
                f"the state of {self._owner!r} can't be restored: {error}"
            ) from error
        again = ObjectGraph(self._env, self._owner, self._names).capture()
        if difference(again, dict(state)):
            raise EnvStateError(
                f"{self._owner!r} has another state than before after it was restored"
            )

    def _identity(self) -> dict[str, str]:
        base = getattr(self._env, "unwrapped", self._env)
        return {
            "list of objects": " ".join(map(class_name, self._objects)),
            "number of environments": str(getattr(self._env, "num_envs", "")),
            "device": str(self._owner.home),
            "package": package_of(base),
        }


def objects_of(env: Any) -> list[Any]:
    """Returns an environment and the objects in it, in an order that depends only on their names.

    The nearest objects come first, and those in lists, tuples and dictionaries before those that
    are attributes. An attribute that refers to one of several objects, such as the goal of an
    agent, then doesn't change the order. Objects that have ``get_state`` and ``set_state`` are not
    searched.
    """
    found: list[Any] = []
    # All values that have been seen, which keeps them alive, so that their ids are not used again.
    known: dict[int, Any] = {}
    level = [env]
    while level:
        fresh = list(_new_objects(level, known))
        found += fresh
        inner = [value for one in fresh for value in _attributes(one)]
        level = sorted(inner, key=lambda value: type(value) not in _CONTAINERS)
    return found


def _new_objects(values: Sequence[Any], known: dict[int, Any]) -> Iterator[Any]:
    """Yields the objects among values, and in containers among them, that are not known yet."""
    waiting = list(reversed(values))
    while waiting:
        value = waiting.pop()
        if id(value) in known:
            continue
        known[id(value)] = value
        if type(value) in _CONTAINERS:
            waiting += reversed(value.values() if type(value) is dict else value)
        elif _is_object(value):
            yield value


def _attributes(one: Any) -> list[Any]:
    if has_own_methods(one):
        return []
    return [vars(one)[name] for name in sorted(vars(one).keys() - constant_names(one))]


def _is_object(value: Any) -> bool:
    if isinstance(value, (type, Space)) or not is_simple(type(value)):
        return False
    return not is_fixed(value, {}, FIXED_IN_GRAPHS)


def _captured(one: Any, encoder: Encoder) -> dict[str, Any]:
    if has_own_methods(one):
        # Tensors that are shared with other objects are not shared after set_state().
        return {"state": Encoder(fixed=FIXED_IN_GRAPHS).encode(one.get_state())}
    constant = constant_names(one)
    values = {name: value for name, value in vars(one).items() if name not in constant}
    return {"attributes": encoder.named(type(one).__name__, values)}


def _restore(one: Any, data: Mapping[str, Any], decoder: Decoder) -> None:
    if "state" in data:
        one.set_state(Decoder(in_graph=True).decode(data["state"]))
        return
    attributes = data["attributes"]
    for name in vars(one).keys() - attributes.keys() - constant_names(one):
        del vars(one)[name]
    decoder.write(one, attributes)
