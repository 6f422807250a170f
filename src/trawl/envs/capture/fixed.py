"""Parts of an environment that do not change while it is in use, and its identity."""

from __future__ import annotations

import dis
import re
import sys
import types
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from trawl.errors import EnvStateError
from trawl.foreign.environments import CONSTANT, is_seeded
from trawl.schema.checks import PLAIN

_FIXED = (types.ModuleType, np.dtype, np.ufunc, type, EnvSpec, AutoresetMode)
# Windows and images of renderers, on which no step depends.
_SHOWN = frozenset({"pygame.surface.Surface", "pygame.time.Clock", "pygame.font.Font"})
# Attributes of Gymnasium that never change.
_CONSTANT = CONSTANT | {"metadata", "spec"}
# Attributes of SyncVectorEnv that never change.
_FACTORIES = frozenset({"env_fns"})
# Objects that added infos to observations, around environments of earlier versions.
_INFOS = re.compile(r"\btrawl\.envs\.(info_wrappers|tensor_infos)\.|^InfoEnvPool$")


class _Simple:
    """An empty class, with the smallest possible instances."""


def constant_names(owner: Any) -> frozenset[str]:
    """Returns the names of the attributes of an object that never change."""
    return _CONSTANT | _FACTORIES if isinstance(owner, SyncVectorEnv) else _CONSTANT


def is_fixed(value: Any, members: Mapping[int, int], kinds: tuple[type, ...] = ()) -> bool:
    """Returns True for values that do not change while the environment is in use.

    Args:
        value: the value of an attribute.
        members: numbers of the environments of a wrapper chain, by identity.
        kinds: additional classes whose instances do not change.
    """
    if id(value) in members:
        return True
    if isinstance(value, partial):
        parts = [value.func, *value.args, *value.keywords.values()]
        return all(_is_constant(part, members, kinds) for part in parts)
    if isinstance(value, types.FunctionType):
        return _is_fixed_function(value, members, kinds)
    if isinstance(value, types.MethodType):
        return id(value.__self__) in members or isinstance(value.__self__, type)
    if isinstance(value, types.BuiltinFunctionType):
        # A method of an object may change the object.
        return value.__self__ is None or isinstance(value.__self__, (type, types.ModuleType))
    return (
        isinstance(value, (*_FIXED, *kinds))
        or (isinstance(value, Space) and not draws(value))
        or class_name(value) in _SHOWN
    )


def _is_fixed_function(
    function: types.FunctionType, members: Mapping[int, int], kinds: tuple[type, ...]
) -> bool:
    """Returns True for a function that remembers nothing between two calls."""
    stores = {"STORE_DEREF", "STORE_GLOBAL"}
    if vars(function) or any(one.opname in stores for one in dis.get_instructions(function)):
        return False
    used = [cell.cell_contents for cell in function.__closure__ or ()]
    used += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    # A function may refer to itself.
    known = {**members, id(function): -1}
    return all(_is_constant(value, known, kinds) for value in used)


def _is_constant(value: Any, members: Mapping[int, int], kinds: tuple[type, ...]) -> bool:
    """Returns True for values that a function uses but does not change, such as limits."""
    plain = type(value) in PLAIN or isinstance(value, (np.ndarray, np.generic))
    return plain or is_fixed(value, members, kinds)


def spaces_in(space: Any) -> list[Any]:
    """Returns a space and the spaces in it."""
    inner = getattr(space, "spaces", ())
    parts = inner.values() if isinstance(inner, Mapping) else inner
    return [space, *(found for part in parts for found in spaces_in(part))]


def draws(space: Any) -> bool:
    """Returns True if a space was seeded, or samples were drawn from it."""
    return any(map(is_seeded, spaces_in(space)))


def is_simple(kind: type) -> bool:
    """Returns True for a class whose instances have only the attributes in ``vars()``."""
    return _is_simple(kind)


@lru_cache(maxsize=1024)
def _is_simple(kind: Any) -> bool:
    classes = kind.__mro__[:-1]
    heap = all(one.__flags__ & 1 << 9 for one in classes)
    slots = any(vars(one).get("__slots__") for one in classes)
    # Instances of C++ classes are larger than instances of Python classes.
    own = kind.__basicsize__ <= _Simple.__basicsize__
    return heap and own and not slots and "__dict__" in dir(kind)


def has_own_methods(value: Any) -> bool:
    """Returns True if the class of an object has the methods ``get_state`` and ``set_state``."""
    names = ("get_state", "set_state")
    return all(callable(getattr(type(value), name, None)) for name in names)


def class_name(value: Any) -> str:
    """Returns the full name of a value's class."""
    return full_name(type(value))


def full_name(kind: type) -> str:
    """Returns the full name of a class."""
    # Some extension types have no module.
    return f"{getattr(kind, '__module__', '')}.{kind.__qualname__}"


def package_of(env: Any) -> str:
    """Returns the name and version of the package that an environment comes from."""
    name = type(env).__module__.partition(".")[0]
    return f"{name} {getattr(sys.modules.get(name), '__version__', '')}".strip()


def check_identity(
    mine: Mapping[str, str],
    other: Mapping[str, str],
    owner: Any,
    what: str = "environment",
    verb: str = "is",
) -> None:
    """Checks that an environment was made in the same way as that of a state.

    Args:
        mine: the description of the environment.
        other: the description in the state.
        owner: the environment, for the error message.
        what: what the environment is called in the error message.
        verb: "are" if the names are plurals.

    Raises:
        EnvStateError: if the descriptions differ; see also :func:`check_infos`.
    """
    check_infos(other, owner)
    whose = f"{'that' if verb == 'is' else 'those'} of {owner}"
    for name in mine:
        if mine[name] != other.get(name):
            raise EnvStateError(
                f"the state is one of another {what}: its {name} {verb} {other.get(name)}, but "
                f"{whose} {verb} {mine[name]}"
            )


def check_infos(identity: Mapping[str, str], owner: Any) -> None:
    """Checks that a state is not one of an earlier version of Trawl with ``info_keys``.

    In such a state, objects that added infos to the observations are numbered.

    Args:
        identity: the description in the state.
        owner: the environment, for the error message.

    Raises:
        EnvStateError: if it is such a state.
    """
    if any(_INFOS.search(str(value)) for value in identity.values()):
        raise EnvStateError(
            f"the state of {owner} was saved with info_keys by an earlier version of Trawl, and "
            "can be loaded only with that version: load it there, or save it anew there without "
            "info_keys"
        )
