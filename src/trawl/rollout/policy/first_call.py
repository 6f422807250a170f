"""Observation of a policy's first call: the keys that it reads, and the networks that it calls.

An entry that a policy writes under ``"next"`` is carried to the next frame only if the policy reads
it there. Modules name the keys that they read. A function doesn't, so its TensorDict notes the keys
that are looked up in it. Nor does a function tell which networks it calls, so these are noted, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from contextvars import ContextVar
from threading import get_ident
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from typing_extensions import override

from trawl.keys import Key, as_key
from trawl.tensordicts import is_lazy

_finding = ContextVar("finding", default=False)


@contextmanager
def networks_noted() -> Iterator[None]:
    """Context in which :func:`call_noting_networks` looks for networks."""
    token = _finding.set(True)
    try:
        yield
    finally:
        _finding.reset(token)


def call_noting_networks(
    policy: Any, call: Callable[..., Any], *inputs: Any
) -> tuple[Any, list[nn.Module]]:
    """Calls a policy, and looks for networks that it calls and that are not part of it.

    It looks only within :func:`networks_noted`, because it has a cost: modules that are compiled
    in the call are compiled again later.

    Args:
        policy: the policy.
        call: function that calls it.
        *inputs: arguments of ``call``.

    Returns:
        The result of ``call``, and the networks that have weights to be trained.
    """
    if not _finding.get():
        return call(*inputs), []
    result, called = called_modules(policy, call, *inputs)
    return result, foreign_networks(policy, called)


def called_modules(
    policy: Any, call: Callable[..., Any], *inputs: Any
) -> tuple[Any, list[nn.Module]]:
    """Calls a policy, and lists the modules that are called, unless it calls only its own.

    Args:
        policy: the policy.
        call: function that calls it.
        *inputs: arguments of ``call``.

    Returns:
        The result of ``call``, and the modules.
    """
    if not _calls_function(policy):
        return call(*inputs), []
    called: list[nn.Module] = []
    thread = get_ident()

    def note(module: nn.Module, _: Any) -> None:
        # A compiled module is called like others, and its inner modules can't be noted.
        if not torch.compiler.is_compiling() and get_ident() == thread:
            called.append(module)

    handle = register_module_forward_pre_hook(note)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using `torch.compile.* global hooks")
            result = call(*inputs)
    finally:
        handle.remove()
    return result, called


def _calls_function(policy: Any) -> bool:
    """Returns True if a policy is a function, or has modules that call functions."""
    if not isinstance(policy, nn.Module):
        return True
    functions = (getattr(module, "module", None) for module in policy.modules())
    return any(callable(one) and not isinstance(one, nn.Module) for one in functions)


def foreign_networks(policy: Any, called: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns the called modules with weights to be trained that are not part of the policy.

    Modules within other ones that it returns are left out.
    """
    known = set(policy.modules()) if isinstance(policy, nn.Module) else set()
    found = []
    for module in called:
        trained = any(parameter.requires_grad for parameter in module.parameters())
        if module not in known and trained:
            found.append(module)
        known.update(module.modules())
    return found


# The keys that were looked up in the trial call that is under way, or None.
_looked_up: ContextVar[set[Key] | None] = ContextVar("looked_up", default=None)


class PolicyReads:
    """Keys that a policy may read.

    Args:
        declared: the keys that modules name as their inputs.
    """

    def __init__(self, declared: Iterable[Key] = ()) -> None:
        self._declared = set(declared)
        self._looked_up: set[Key] = set()

    def __contains__(self, key: Key) -> bool:
        # A key may be looked up in a nested TensorDict, without the keys of the outer ones.
        return key in self._declared or any(key[-len(one) :] == one for one in self._looked_up)

    def noting(self, values: TensorDictBase, device: torch.device | None) -> TensorDictBase:
        """Returns a TensorDict with the same tensors that notes what :meth:`call` reads.

        Args:
            values: a TensorDict.
            device: device of the result, on which the tensors are; None for no device.
        """
        made: TensorDictBase = _noting(values, device)
        return made

    def call(self, policy: Any, values: TensorDictBase) -> tuple[Any, list[nn.Module]]:
        """Calls a policy, and adds the keys that it reads.

        Args:
            policy: the policy.
            values: TensorDict from :meth:`noting`.

        Returns:
            The result, and the modules that the policy called, if it calls functions.
        """
        token = _looked_up.set(self._looked_up)
        try:
            result, called = called_modules(policy, policy, values)
        finally:
            _looked_up.reset(token)
        own = policy.modules() if isinstance(policy, nn.Module) else [policy]
        for module in (*own, *called):
            self._declared.update(map(as_key, getattr(module, "in_keys", None) or ()))
        return result, called


class NotingTensorDict(TensorDict):  # type: ignore[misc]
    """TensorDict that notes the keys that are looked up in it, even if they are absent."""

    @override
    def get(self, key: Any, *args: Any, **kwargs: Any) -> Any:
        _note(key)
        return super().get(key, *args, **kwargs)

    @override
    def __getitem__(self, index: Any) -> Any:
        _note(index)
        return super().__getitem__(index)

    @override
    def pop(self, key: Any, *args: Any, **kwargs: Any) -> Any:
        _note(key)
        return super().pop(key, *args, **kwargs)

    @override
    def keys(self, *args: Any, **kwargs: Any) -> Any:
        return _NotingKeys(super().keys(*args, **kwargs))


class _NotingKeys(AbstractSet[Any]):
    """Keys of a TensorDict; notes those whose presence is tested."""

    def __init__(self, keys: Any) -> None:
        self._keys = keys

    def __contains__(self, key: object) -> bool:
        _note(key)
        return key in self._keys

    def __iter__(self) -> Iterator[Any]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    @classmethod
    def _from_iterable(cls, iterable: Iterable[Any]) -> Any:
        return set(iterable)


def _note(key: object) -> None:
    if torch.compiler.is_compiling():
        return
    noted = _looked_up.get()
    if noted is None or not isinstance(key, (str, tuple)):
        return
    parts = (key,) if isinstance(key, str) else key
    if parts and all(isinstance(part, (str, tuple)) for part in parts):
        noted.add(as_key(parts))


def _noting(values: Any, device: torch.device | None) -> Any:
    """Returns a copy that notes what is looked up, and shares its tensors."""
    if is_lazy(values):
        return values if values.device == device else values.copy().clear_device_()
    made = NotingTensorDict({}, values.batch_size, device=device)
    for key, value in values.items():
        branch = is_tensor_collection(value) and not is_non_tensor(value)
        made.set(key, _noting(value, device) if branch else value)
    return made
