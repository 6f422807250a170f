"""State of modules, wrappers and generators that a trial call must leave as it was."""

from __future__ import annotations

import functools
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from trawl.envs.generators import kept_generators

_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_LIBRARIES = frozenset({"torch", "tensordict", "torchrl", "trawl", "numpy", "gymnasium"})
# Containers with more items are restored, but not the items themselves.
_MOST_ITEMS = 1000
Restore = Callable[[], None]


class KeptState:
    """Remembers the attributes of objects, to which :meth:`restore` sets them back.

    Buffers, arrays, numbers, containers and generators are remembered, as attributes of an object
    or of an object that is an attribute, such as the statistics of a wrapper. Parameters are not.

    If modules or parameters were made or replaced meanwhile, the call has initialised a module,
    which would be done again. Modules then stay as they are.

    Args:
        objects: the objects; the modules within a module count, too.
    """

    def __init__(self, objects: Iterable[Any]) -> None:
        found: dict[int, Any] = {}
        for one in objects:
            parts = one.modules() if isinstance(one, nn.Module) else [one]
            found |= {id(part): part for part in parts if hasattr(part, "__dict__")}
        self._objects = list(found.values())
        self._structure = self._current_structure()
        self._restores = [(one, _kept(one, 1)) for one in self._objects]

    def _current_structure(self) -> list[Any]:
        modules = [one for one in self._objects if isinstance(one, nn.Module)]
        return [
            (type(one), *map(id, one.parameters(False)), *map(id, one.children()))
            for one in modules
        ]

    def restore(self) -> None:
        """Sets the attributes back."""
        initialised = self._structure != self._current_structure()
        for one, restore in self._restores:
            if not (initialised and isinstance(one, nn.Module)):
                restore()


@contextmanager
def trial_call(policy: Any, device: torch.device | None = None) -> Iterator[None]:
    """Context in which a policy is called to see what it does, and which leaves no trace.

    Afterwards, the policy's buffers and attributes and the global generators are as before.

    Args:
        policy: the policy.
        device: the policy's device, if it is known.
    """
    kept = KeptState(_objects_of(policy))
    try:
        with kept_generators(device):
            yield
    finally:
        kept.restore()


def _objects_of(policy: Any) -> list[Any]:
    """Returns the objects that a call of a policy may change.

    These are modules, objects that can be called and have attributes, and all such objects to which
    their functions refer.
    """
    found: dict[int, Any] = {}
    seen: set[int] = set()
    waiting = [policy]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, functools.partial):
            waiting += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, MethodType):
            waiting += [one.__self__, one.__func__]
        elif isinstance(one, FunctionType):
            waiting += _referred_to(one)
        elif isinstance(one, nn.Module):
            found[id(one)] = one
            for module in one.modules():
                # A TensorDictModule may call a function.
                waiting += [vars(module).get("module"), type(module).forward]
        elif _has_own_state(one):
            found[id(one)] = one
            waiting += [type(one).__call__, *vars(one).values()]
    return list(found.values())


def _referred_to(function: FunctionType) -> list[Any]:
    """Returns the variables outside a function that it uses, unless it belongs to a library."""
    if str(function.__module__).partition(".")[0] in _LIBRARIES:
        return []
    names = set(function.__code__.co_names) & function.__globals__.keys()
    cells = map(_content, function.__closure__ or ())
    return [*cells, *(function.__globals__[name] for name in names)]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None


def _has_own_state(value: Any) -> bool:
    """Returns True for an object of a user's class that can be called and has attributes."""
    if isinstance(value, type) or not callable(value) or not hasattr(value, "__dict__"):
        return False
    return str(type(value).__module__).partition(".")[0] not in _LIBRARIES


def _kept(one: Any, depth: int) -> Restore:
    """Returns the function that sets the attributes of an object back."""
    attributes = vars(one)
    module = isinstance(one, nn.Module)
    before = {k: v for k, v in attributes.items() if not (module and k in _INTERNAL)}
    inner = [_value(value, depth) for value in before.values()]
    if module:
        inner += [_value(one._buffers, depth)]

    def restore() -> None:
        for name in [k for k in attributes if k not in before and not (module and k in _INTERNAL)]:
            del attributes[name]
        attributes.update(before)
        for each in inner:
            if each is not None:
                each()

    return restore


def _value(value: Any, depth: int) -> Restore | None:
    """Returns the function that sets the content of a value back; None if it can't change."""
    if isinstance(value, Tensor):
        return None if isinstance(value, nn.Parameter) else _tensor(value)
    if isinstance(value, TensorDictBase):
        return _all(_value(one, depth) for one in value.values(True, True))
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else functools.partial(_copy, value, value.copy())
    if isinstance(value, (dict, list, set, deque)):
        return _container(value, depth)
    generator = _generator(value)
    if generator is not None or not depth or callable(value) or isinstance(value, ModuleType):
        return generator
    return _kept(value, depth - 1) if hasattr(value, "__dict__") else None


def _all(restores: Iterable[Restore | None]) -> Restore | None:
    found = [one for one in restores if one is not None]

    def restore() -> None:
        for one in found:
            one()

    return restore if found else None


def _tensor(value: Tensor) -> Restore:
    before = value.detach().clone()

    def restore() -> None:
        with torch.no_grad():
            # Others may write to shared memory: it is left alone if the call did not change it.
            if value.shape == before.shape and not torch.equal(value.detach(), before):
                value.detach().copy_(before)

    return restore


def _copy(value: Any, before: Any) -> None:
    if value.shape == before.shape and value.flags.writeable:
        value[...] = before


def _container(value: Any, depth: int) -> Restore:
    before = value.copy()
    items = before.values() if isinstance(before, dict) else before
    few = items if len(before) <= _MOST_ITEMS else ()
    inner = _all(_value(one, depth and depth - 1) for one in few)

    def restore() -> None:
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(before)
        if inner is not None:
            inner()

    return restore


def _generator(value: Any) -> Restore | None:
    if isinstance(value, torch.Generator):
        return functools.partial(_set_state, value, value.get_state())
    if isinstance(value, np.random.Generator):
        return functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    return None


def _set_state(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)
