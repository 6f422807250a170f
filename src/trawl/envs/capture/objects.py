"""State of an environment that is a graph of objects with tensors, such as a simulator of VMAS.

The walk begins at the environment, and reaches all objects in its attributes and in their lists,
tuples and dictionaries. Each object is captured by its methods ``get_state`` and ``set_state`` or,
if it has none, by its attributes. Objects are never made from data: the walk through another
environment must reach objects of the same classes in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gymnasium import Space
from typing_extensions import override

from trawl.envs.capture.attributes import (
    NotPlain,
    class_name,
    constant_names,
    is_simple,
    same_data,
)
from trawl.envs.capture.tensors import TensorDecoder, TensorEncoder
from trawl.errors import EnvStateError, env_errors
from trawl.schema.states import check_graph

_SETS = (set, frozenset)
_CONTAINERS = (list, tuple, dict)
_CONSTANTS = (type(None), bool, int, float, str, bytes)


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
        encoder = _GraphEncoder(self._objects)
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
            check_graph(state, "state", own, self._names)
        mine, other = own["identity"], state["identity"]
        for name, value in mine.items():
            if value != other.get(name):
                raise EnvStateError(
                    f"the state belongs to another environment: its {name} is {other.get(name)}, "
                    f"but the {name} of {self._owner!r} is {value}"
                )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a state that :meth:`capture` returned.

        Raises:
            EnvStateError: if the state belongs to another environment, or can't be restored.
        """
        self.check(state)
        decoder = _GraphDecoder(self._objects)
        try:
            # Tensors are written in place, because a graph of operations may refer to them.
            with decoder.in_place():
                for one, data in zip(self._objects, state["objects"], strict=True):
                    _restored(one, data, decoder)
                for name in self._names:
                    present = getattr(self._owner, name, None)
                    setattr(self._owner, name, decoder.decode(state["own"][name], present))
        except (KeyError, NotPlain, RuntimeError) as error:
            raise EnvStateError(
                f"the state of {self._owner!r} can't be restored: {error}"
            ) from error
        again = ObjectGraph(self._env, self._owner, self._names).capture()
        if not same_data(again, dict(state)):
            raise EnvStateError(
                f"{self._owner!r} has another state than before after it was restored"
            )

    def _identity(self) -> dict[str, str]:
        base = getattr(self._env, "unwrapped", self._env)
        package = type(base).__module__.partition(".")[0]
        version = getattr(sys.modules.get(package), "__version__", "")
        return {
            "list of objects": " ".join(map(class_name, self._objects)),
            "number of environments": str(getattr(self._env, "num_envs", "")),
            "device": str(self._owner.home),
            "package": f"{package} {version}".strip(),
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


def has_own_methods(value: Any) -> bool:
    """Returns True if an object has the methods ``get_state`` and ``set_state``."""
    names = ("get_state", "set_state")
    return all(callable(getattr(type(value), name, None)) for name in names)


def _is_object(value: Any) -> bool:
    if isinstance(value, (type, Space)) or not is_simple(type(value)):
        return False
    return not _PROBE.is_fixed(value)


def _captured(one: Any, encoder: TensorEncoder) -> dict[str, Any]:
    if has_own_methods(one):
        # Tensors that are shared with other objects are not shared after set_state().
        return {"state": TensorEncoder(()).encode(one.get_state())}
    return {"attributes": dict(_encoded(one, encoder))}


def _encoded(one: Any, encoder: TensorEncoder) -> Iterator[tuple[str, Any]]:
    for name, value in sorted(vars(one).items()):
        if name in constant_names(one):
            continue
        try:
            yield name, encoder.encode(value, inside=False)
        except NotPlain as error:
            raise NotPlain(f"{type(one).__name__}.{name}, {error}") from None


def _restored(one: Any, data: Mapping[str, Any], decoder: TensorDecoder) -> None:
    if "state" in data:
        one.set_state(TensorDecoder(()).decode(data["state"]))
        return
    attributes = data["attributes"]
    for name in vars(one).keys() - attributes.keys() - constant_names(one):
        del vars(one)[name]
    decoder.write(one, attributes)


class _GraphEncoder(TensorEncoder):
    """Encoder that knows sets of objects, classes, constants and tuples of these."""

    @override
    def _encoded(self, value: Any, inside: bool) -> dict[str, Any]:
        if type(value) not in _SETS:
            return super()._encoded(value, inside)
        # The order of a set differs between processes.
        items = sorted(map(self._item, value), key=repr)
        return {"kind": "set", "frozen": type(value) is frozenset, "items": items}

    def _item(self, value: Any) -> list[Any]:
        if id(value) in self._members:
            return ["object", self._members[id(value)]]
        if isinstance(value, type):
            return ["class", f"{value.__module__}.{value.__qualname__}"]
        if isinstance(value, _CONSTANTS):
            return ["constant", value]
        if type(value) is tuple:
            return ["tuple", list(map(self._item, value))]
        raise NotPlain(f"which is a set with a {class_name(value)}")


class _GraphDecoder(TensorDecoder):
    @override
    def _decoded(self, data: Mapping[str, Any], present: Any) -> Any:
        if data["kind"] != "set":
            return super()._decoded(data, present)
        known = present if type(present) in _SETS else ()
        classes = {f"{one.__module__}.{one.__qualname__}": one for one in known if _is_class(one)}
        found = [self._item(kind, item, classes) for kind, item in data["items"]]
        return frozenset(found) if data["frozen"] else set(found)

    def _item(self, kind: str, value: Any, classes: Mapping[str, type]) -> Any:
        if kind == "class" and value not in classes:
            raise NotPlain(f"which has the class {value}, but the environment has no such set")
        if kind == "tuple":
            return tuple(self._item(inner, item, classes) for inner, item in value)
        table: Any = {"object": self._members, "class": classes}.get(kind)
        return value if table is None else table[value]


def _is_class(value: Any) -> bool:
    return isinstance(value, type)


_PROBE = _GraphEncoder(())
