"""Keys that a policy reads, found in its trial call.

An entry that a policy writes under ``"next"`` is carried to the next frame only if the policy reads
it there. Modules name the keys that they read. A function doesn't, so its TensorDict notes the keys
that are looked up in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextvars import ContextVar
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection
from torch import nn
from typing_extensions import override

from trawl.keys import Key, as_key
from trawl.rollout.networks import called_modules
from trawl.tensordicts import is_lazy

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
