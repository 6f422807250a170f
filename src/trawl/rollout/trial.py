"""Trial calls of a policy, which leave the policy and the random generators as they were."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trawl.envs.generators import draws_privately, get_states, set_states
from trawl.envs.layers import layers_of, owns_parts
from trawl.foreign.torch import FORWARD_HOOKS, buffers_of, uncompiled

# Larger arrays and tensors are data rather than statistics, and take too long to copy.
_LARGEST = 1 << 26
_LISTS = (list, deque, bytearray)
_SETS = (set,)
_DICTS = (dict, OrderedDict, defaultdict, Counter)
_LIBRARIES = ("torch", "tensordict")
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_NUMBERS = (bool, int, float, complex, str, bytes, np.generic)
_DATA = (
    *_NUMBERS,
    *_LISTS,
    *_SETS,
    *_DICTS,
    *_GENERATORS,
    tuple,
    Tensor,
    np.ndarray,
    TensorDictBase,
)
# Attributes of every module: tables of parts and of hooks.
_TABLES = frozenset(vars(nn.Module())) - {"training"}


@contextmanager
def trial(policy: Any) -> Iterator[None]:
    """Context for a trial call of a policy, after which the call has had no effects.

    Restores the global generators, and the policy's buffers, attributes, containers and
    generators, with those of its modules, hooks and functions. Parameters and other objects that
    the policy refers to are left alone, as are those that it makes in its first call.

    Args:
        policy: the policy, or another module.
    """
    module = policy if isinstance(policy, nn.Module) else None
    device = None if module is None else next((p.device for p in module.parameters()), None)
    # The global generators may belong to another thread, which draws from them meanwhile.
    states = get_states(device) if draws_privately.get() is None else None
    kept = Kept()
    kept.owner(policy)
    try:
        yield
    finally:
        kept.restore()
        if states is not None:
            set_states(states, device)


def kept_envs(envs: Sequence[Any]) -> Kept:
    """Keeps statistics, generators and attributes of environments, and the global generators.

    Environments in other processes are left alone.
    """
    layers = [layer for env in envs for layer in layers_of(env)]
    kept = Kept(but=filter(owns_parts, layers))
    for layer in layers:
        kept.owner(layer)
        for name in ("obs_rms", "return_rms"):  # of Gymnasium's wrappers
            if name in getattr(layer, "__dict__", {}):
                kept.owner(vars(layer)[name])
    if envs and draws_privately.get() is None:
        kept.globals()
    return kept


class Kept:
    """State of a policy or another object before a call, with all that it consists of.

    Args:
        but: objects that are left alone.
    """

    def __init__(self, but: Iterable[Any] = ()) -> None:
        # Keeps all objects alive, so that no other object gets the id of one of them.
        self._known: dict[int, Any] = {id(one): one for one in but}
        self._owners = set(self._known)
        self._undo: list[Callable[[], object]] = []

    def restore(self) -> None:
        """Restores everything."""
        with torch.no_grad():
            for undo in self._undo:
                undo()

    def globals(self) -> None:
        """Keeps the global generators."""
        self._undo.append(partial(set_states, get_states()))

    def _is_new(self, value: Any) -> bool:
        new = id(value) not in self._known
        self._known[id(value)] = value
        return new

    def owner(self, value: Any) -> None:
        """Keeps the state of a policy or an environment, which may be an object of any class."""
        if isinstance(value, (nn.Module, FunctionType, MethodType, partial)):
            self.value(value)
        elif type(value).__module__.partition(".")[0] in (*_LIBRARIES, "torchrl"):
            # Objects of libraries, such as clients of a service, may count what others know of.
            return
        elif id(value) not in self._owners:
            # As the value of an attribute, the object is known, but its state was left alone.
            self._owners.add(id(value))
            self._known[id(value)] = value
            self._whole(getattr(value, "__dict__", {}))
            self._slots(value)

    def value(self, value: Any) -> None:
        """Keeps the state of a value that can be restored; any other value is left alone."""
        if not self._is_new(value):
            return
        if isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, np.ndarray):
            self._array(value)
        elif isinstance(value, TensorDictBase):
            self._values(value.values(True, True))
        elif type(value) in _DICTS:
            self._whole(value)
        elif type(value) in (*_LISTS, *_SETS):
            self._undo.append(partial(_refill, value, list(value)))
            self._values(value)
        elif isinstance(value, tuple):
            self._values(value)
        elif isinstance(value, (FunctionType, MethodType, partial)):
            self._function(value)
        else:
            self._generator(value)

    def _values(self, values: Iterable[Any]) -> None:
        for value in values:
            self.value(value)

    def _space(self, space: MutableMapping[Any, Any], before: Mapping[Any, Any]) -> None:
        """Keeps entries of a dictionary, which may be the attributes of an object."""
        self._undo.append(partial(_reset, space, before))
        self._values(before.values())

    def _whole(self, space: MutableMapping[Any, Any]) -> None:
        """Keeps a dictionary with exactly the entries that it has."""
        self._undo.append(partial(_drop_others, space, set(space)))
        self._space(space, dict(space))

    def _slots(self, value: Any) -> None:
        missing = object()
        for cls in type(value).__mro__:
            slots = vars(cls).get("__slots__", ())
            for name in [slots] if isinstance(slots, str) else slots:
                before = getattr(value, name, missing)
                if before is not missing and name not in ("__dict__", "__weakref__"):
                    self._undo.append(partial(setattr, value, name, before))
                    self.value(before)

    def _module(self, module: nn.Module) -> None:
        home = type(module).__module__
        self._values([part for part in module.children() if part is not None])
        if home.startswith("torch.distributed") or any(map(is_lazy, module.parameters(False))):
            # A lazy module becomes another one in its first call.
            return
        self._values(module.buffers(recurse=False))
        if isinstance(module, torch.jit.ScriptModule):
            return
        buffers = buffers_of(module)
        for name, buffer in buffers.items():
            self._undo.append(partial(buffers.__setitem__, name, buffer))
        for table in FORWARD_HOOKS:
            self._values(vars(module)[table].values())
        own = {name: value for name, value in vars(module).items() if name not in _TABLES}
        if home.partition(".")[0] not in _LIBRARIES:
            self._undo.append(partial(_drop_others, vars(module), {*own, *_TABLES}))
            self._space(vars(module), own)
            return
        # Libraries keep in their modules what must not be lost, such as compiled code.
        tensors = {name: value for name, value in own.items() if isinstance(value, Tensor)}
        self._space(vars(module), tensors | {"training": module.training})
        self.owner(own.get("module"))  # what a TensorDictModule calls

    def _function(self, function: Any) -> None:
        function = uncompiled(function)
        if isinstance(function, partial):
            self._values([*function.args, *function.keywords.values()])
            self.owner(function.func)
        elif isinstance(function, MethodType):
            self.owner(function.__self__)
        elif draws_privately.get():
            return  # another thread may change the function's variables meanwhile
        elif (function.__module__ or "").partition(".")[0] not in _LIBRARIES:
            for cell in function.__closure__ or ():
                self._cell(cell)
            known = function.__globals__
            names = [name for name in function.__code__.co_names if name in known]
            values = {name: known[name] for name in names}
            self._space(known, {k: v for k, v in values.items() if type(v) is not FunctionType})

    def _cell(self, cell: CellType) -> None:
        try:
            before = cell.cell_contents
        except ValueError:  # the cell is empty
            return
        self._undo.append(partial(setattr, cell, "cell_contents", before))
        self.value(before)

    def _tensor(self, value: Tensor) -> None:
        plain = type(value) in (Tensor, nn.Buffer) and value.layout is torch.strided
        if plain and not value.is_meta and value.nbytes <= _LARGEST and not value.is_quantized:
            before = value.detach().clone()
            self._undo.append(partial(_rewrite, value, before))

    def _array(self, value: np.ndarray[Any, Any]) -> None:
        if value.flags.writeable and value.nbytes <= _LARGEST:
            self._undo.append(partial(np.copyto, value, value.copy()))

    def _generator(self, value: Any) -> None:
        if isinstance(value, torch.Generator):
            self._undo.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, np.random.Generator):
            bits: Any = value.bit_generator
            self._undo.append(partial(setattr, bits, "state", bits.state))
        elif isinstance(value, np.random.RandomState):
            self._undo.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, random.Random):
            self._undo.append(partial(value.setstate, value.getstate()))


def _refill(container: Any, before: list[Any]) -> None:
    container.clear()
    (container.update if isinstance(container, _SETS) else container.extend)(before)


def _drop_others(space: MutableMapping[Any, Any], names: set[Any]) -> None:
    for name in [name for name in space if name not in names]:
        if isinstance(space[name], _DATA):
            del space[name]


def _reset(space: MutableMapping[Any, Any], before: Mapping[Any, Any]) -> None:
    for name, value in before.items():
        now = space.get(name)
        if now is not value and (value is not None or isinstance(now, _DATA)):
            space[name] = value


def _rewrite(value: Tensor, before: Tensor) -> None:
    if value.shape == before.shape and not torch.equal(value.detach(), before):
        value.detach().copy_(before)
