"""Pickles functions and objects of a user's program for other processes.

Code that can't be imported is pickled by value (``cloudpickle``): lambdas, closures, local classes
and all of ``__main__``. Tensors in shared memory stay shared, as do locks and values of
``multiprocessing``. Everything else is copied.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import weakref
from collections import ChainMap
from collections.abc import Callable, Mapping
from multiprocessing import context
from multiprocessing.reduction import ForkingPickler
from typing import Any

import cloudpickle

# Descriptors of the payload that is being unpacked.
_received: list[int] = []


class Shared:
    """Wrapper for an object that the sender and the receiver of a payload share.

    All tensors of the object are moved to shared memory. The unpacked payload contains the object
    itself instead of the wrapper.

    Args:
        content: the object.
    """

    def __init__(self, content: Any) -> None:
        self._content = content

    def __reduce__(self) -> Any:

        table = ForkingPickler(io.BytesIO()).dispatch_table
        return pickle.loads, (_dumps(self._content, table),)


class SpawnPayload:
    """Pickle of an object, and the descriptors that it refers to.

    Args:
        content: the object.

    Attributes:
        data: the pickle.
        fds: the descriptors; closed with this object.
    """

    def __init__(self, content: Any) -> None:
        self.fds: list[int] = []
        weakref.finalize(self, _close_all, self.fds)
        before = context.get_spawning_popen()
        context.set_spawning_popen(_Recipient(self.fds))  # type: ignore[arg-type]
        try:
            self.data = _dumps(content, _reducers())
        finally:
            context.set_spawning_popen(before)


def unpack(data: bytes, fds: list[int]) -> Any:
    """Returns the content of a payload, and takes over its descriptors."""
    _received[:] = fds
    try:
        return pickle.loads(data)
    finally:
        _close_all([fd for fd in _received if fd >= 0])
        _received.clear()


class _Descriptor:
    """Placeholder for a descriptor in a payload, with the interface of ``multiprocessing``."""

    def __init__(self, position: int) -> None:
        self._position = position

    def detach(self) -> int:
        """Returns the descriptor, which the caller must close."""
        # Returns a duplicate, because this method may be called twice.
        return os.dup(_received[self._position])


class _Recipient:
    """Substitute for the process that ``multiprocessing`` believes it starts."""

    DupFd = _Descriptor

    def __init__(self, fds: list[int]) -> None:
        self._fds = fds

    def duplicate_for_child(self, fd: int) -> int:
        """Adds a descriptor to the payload; returns its position."""
        self._fds.append(os.dup(fd))
        return len(self._fds) - 1


def _dumps(content: Any, reducers: Mapping[type, Any]) -> bytes:
    # A new class for each table, because a pickler reads its table only when it is created.
    table = ChainMap(dict(reducers), cloudpickle.Pickler.dispatch_table)
    cls = type("SharingPickler", (cloudpickle.Pickler,), {"dispatch_table": table})
    file = io.BytesIO()
    cls(file, protocol=pickle.HIGHEST_PROTOCOL).dump(content)
    return file.getvalue()


def _reducers() -> dict[type, Any]:
    """Returns the reducers by which ``multiprocessing`` and ``torch`` share objects.

    ``torch`` would move all tensors to shared memory. With these reducers, a tensor is shared only
    if it is already in shared memory.
    """
    known = dict(ForkingPickler(io.BytesIO()).dispatch_table)
    if "torch" not in sys.modules:
        # Without torch there are no tensors, and the program need not wait for its import.
        return known

    import torch
    import torch.multiprocessing
    from torch import Tensor, nn

    # The import may have added reducers.
    known = dict(ForkingPickler(io.BytesIO()).dispatch_table)
    storages = (torch.TypedStorage, torch.UntypedStorage)
    own = {
        cls: reduce
        for cls, reduce in known.items()
        if not issubclass(cls, (Tensor, *storages)) and not _is_legacy_tensor(cls)
    }
    for cls in (Tensor, nn.Parameter, *storages):
        own[cls] = _reduce_if_shared(known[cls])
    return own


def _is_legacy_tensor(cls: type) -> bool:
    return cls.__module__.startswith("torch") and cls.__name__.endswith("Tensor")


def _reduce_if_shared(reduce: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def reduce_memory(memory: Any) -> Any:
        # A typed storage itself would warn that it is deprecated.
        storage = getattr(memory, "_untyped_storage", memory)
        try:
            shared = storage.device.type != "cpu" or storage.is_shared()
        except NotImplementedError:
            # A sparse tensor has no storage. The tensors that it consists of have storages.
            shared = False
        return reduce(memory) if shared else memory.__reduce_ex__(pickle.HIGHEST_PROTOCOL)

    return reduce_memory


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()
