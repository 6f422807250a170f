"""Attributes and methods of the environments in a batch, in this process or in others."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle

from trawl.envs.base import TensorDictEnv
from trawl.paths import Distant, call_path, first_name, get_path

#: A function, and its arguments after the environment.
Application = tuple[Any, ...]
ApplyEach = Callable[[Mapping[int, Application]], Mapping[int, Any]]
# Methods that collectors call, and what to do instead.
_OWN = {
    "reset": "call reset() of the batch, or of its collector",
    "step": "call step() of the batch",
    "close": "call close() of the batch, or shutdown() of its collector",
}


class EnvHandle(Distant):
    """Stands for an environment of a :class:`~trawl.envs.ParallelEnv`.

    Paths such as ``"env.envs[0].unwrapped.level"`` go on in the environment's process.

    Args:
        apply_each: function that calls functions with environments in their processes, and returns
            the results by number.
        index: number of the environment.
        text: representation of the environment.
    """

    def __init__(self, apply_each: ApplyEach, index: int, text: str) -> None:
        self._apply_each = apply_each
        self._index = index
        self._text = text

    def apply(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls ``function(env, *arguments)`` in the environment's process."""
        return self._apply_each({self._index: (function, *arguments)})[self._index]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"environment {self._index} is in another process, where {name!r} can be read with "
            f"get_attr({name!r}) of the ParallelEnv, or with a path: "
            f"collector.get_distant_attr('env.envs[{self._index}].{name}')"
        )

    def __repr__(self) -> str:
        return f"EnvHandle({self._index}, {self._text})"


def pack(value: Any, what: str = "the arguments") -> bytes:
    """Returns a value as a pickle, for the process of an environment.

    Args:
        value: a function and its arguments, or an option.
        what: name of the value in the error message.

    Raises:
        TypeError: if it can't be pickled.
    """
    try:
        packed: bytes = cloudpickle.dumps(value)
    except Exception as error:
        raise TypeError(f"{what} can't be sent to the environments' processes: {error}") from error
    return packed


def packed_result(env: Any, data: bytes) -> bytes:
    """Calls a pickled function with an environment, and returns the pickled result."""
    function, *arguments = cloudpickle.loads(data)
    result = function(env, *arguments)
    try:
        packed: bytes = cloudpickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"the result, {type(result).__name__}, can't be sent from the environment's process "
            f"({error}): ask for attributes of it that are data"
        ) from error
    return packed


# --- functions of an environment, by name


def get_named(env: Any, name: str) -> Any:
    """Returns an attribute of an environment or of one of its wrappers."""
    return get_path(_owner(env, name), name)


def call_named(env: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls a method of an environment or of one of its wrappers; returns other attributes."""
    return call_path(_owner(env, name), name, args, kwargs)


def set_named(env: Any, name: str, value: Any) -> None:
    """Sets an attribute of an environment or of one of its wrappers, where it is found."""
    inner, _, last = name.rpartition(".")
    target = get_path(_owner(env, name), inner)
    if not hasattr(target, last):
        raise _missing(target, last)
    setattr(target, last, value)


def _owner(env: Any, path: str) -> Any:
    """Returns the outermost layer of an environment that has the first attribute of a path itself.

    Wrappers of Gymnasium don't pass attributes on. Others do, but setting an attribute of theirs
    would not reach the environment.
    """
    name, passing = first_name(path), None
    for layer in _layers(env):
        if name in getattr(layer, "__dict__", ()) or hasattr(type(layer), name):
            return layer
        if passing is None and hasattr(layer, name):
            passing = layer
    if passing is None:
        raise _missing(env, name)
    return passing


def _layers(env: Any) -> Iterator[Any]:
    """Yields the simulator that an environment of Trawl steps, and what it wraps in turn."""
    layer = getattr(env, "env", env) if isinstance(env, TensorDictEnv) else env
    seen: set[int] = set()
    while layer is not None and id(layer) not in seen:
        seen.add(id(layer))
        yield layer
        layer = getattr(layer, "env", None)


def _missing(env: Any, name: str) -> AttributeError:
    return AttributeError(f"neither {env!r} nor what it wraps has an attribute {name!r}")


# --- arguments


def check_name(name: object) -> str:
    """Returns the name of an attribute, or a path that begins with one.

    Raises:
        TypeError: if it is not a string.
        ValueError: if it is empty.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be the name of an attribute, but it is {name!r}")
    if not name or not (name[0].isalpha() or name[0] == "_"):
        raise ValueError(f"name must begin with the name of an attribute, but it is {name!r}")
    return name


def check_method(name: object) -> str:
    """Returns the name of a method that users may call; see :func:`check_name`.

    Raises:
        ValueError: if the method is one that collectors call.
    """
    checked = check_name(name)
    *layers, last = checked.split(".")
    if last in _OWN and set(layers) <= {"env", "unwrapped"}:
        raise ValueError(f"call({name!r}) would disturb the collection: {_OWN[last]}")
    return checked


def chosen(indices: Any, count: int) -> list[int]:
    """Returns the numbers of the environments that ``indices`` name.

    Args:
        indices: a number, a sequence of different numbers, or None for all environments.
        count: number of environments.

    Raises:
        TypeError: if an index is not an integer.
        IndexError: if there is no environment with this number.
        ValueError: if an index occurs twice.
    """
    if indices is None:
        return list(range(count))
    found = []
    several = hasattr(indices, "__iter__") and getattr(indices, "ndim", None) != 0
    for index in indices if several else [indices]:
        if isinstance(index, bool) or not hasattr(index, "__index__"):
            raise TypeError(
                f"indices must be numbers of environments, but {indices!r} has {index!r}"
            )
        number = operator.index(index)
        if not 0 <= number < count:
            raise IndexError(
                f"indices has {number}, but there are {count} environments, from 0 to {count - 1}"
            )
        if number in found:
            raise ValueError(f"indices has {number} twice")
        found.append(number)
    return found


def values_of(values: Any, count: int) -> list[Any]:
    """Returns the value for each of ``count`` environments.

    Args:
        values: a list or tuple with one value for each, or one value for all.
        count: number of environments.

    Raises:
        ValueError: if a list or tuple does not have ``count`` entries.
    """
    if not isinstance(values, (list, tuple)):
        return [values] * count
    if len(values) != count:
        raise ValueError(
            f"values has {len(values)} entries, but there are {count} environments: pass a list "
            "with one value for each, or a value that is no list or tuple for all"
        )
    return list(values)
