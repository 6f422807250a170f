"""Functions and objects of a user's program, packed for other processes.

Code is packed by value where it can't be imported (``cloudpickle``): lambdas, closures, local
classes and all of ``__main__``. What lies in shared memory stays shared, as do locks and values
of ``multiprocessing``; all else is copied.
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

# Descriptors of the parcel that is being opened.
_received: list[int] = []


class Shared:
    """Something in a parcel that sender and receiver are to have in common.

    All its tensors are moved to shared memory. What comes out of the parcel is the object
    itself.

    Args:
        content: the object.
    """

    def __init__(self, content: Any) -> None:
        self._content = content

    def __reduce__(self) -> Any:

        table = ForkingPickler(io.BytesIO()).dispatch_table
        return pickle.loads, (_dumps(self._content, table),)


class Parcel:
    """An object, packed.

    Args:
        content: the object.

    Attributes:
        data: the pickle.
        fds: descriptors that belong to it; closed with this object.
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
    """The content of a parcel; the descriptors are taken over."""
    _received[:] = fds
    try:
        return pickle.loads(data)
    finally:
        _close_all([fd for fd in _received if fd >= 0])
        _received.clear()


class _Descriptor:
    """Stands in a parcel for a descriptor (the protocol is that of ``multiprocessing``)."""

    def __init__(self, position: int) -> None:
        self._position = position

    def detach(self) -> int:
        """The descriptor, for the caller to close."""
        # One that is asked for twice has to be there twice.
        return os.dup(_received[self._position])


class _Recipient:
    """What ``multiprocessing`` takes for the process that is being started."""

    DupFd = _Descriptor

    def __init__(self, fds: list[int]) -> None:
        self._fds = fds

    def duplicate_for_child(self, fd: int) -> int:
        """The position of a descriptor in the parcel."""
        self._fds.append(os.dup(fd))
        return len(self._fds) - 1


def _dumps(content: Any, reducers: Mapping[type, Any]) -> bytes:
    # Pickler reads its table once, as it is made.
    table = ChainMap(dict(reducers), cloudpickle.Pickler.dispatch_table)
    cls = type("SharingPickler", (cloudpickle.Pickler,), {"dispatch_table": table})
    file = io.BytesIO()
    cls(file, protocol=pickle.HIGHEST_PROTOCOL).dump(content)
    return file.getvalue()


def _reducers() -> dict[type, Any]:
    """What ``multiprocessing`` and ``torch`` do to share things.

    ``torch`` would move all tensors to shared memory: only those that are there stay there.
    """
    known = dict(ForkingPickler(io.BytesIO()).dispatch_table)
    if "torch" not in sys.modules:
        # Then there are no tensors, and a program without them need not wait for the import.
        return known

    import torch
    import torch.multiprocessing
    from torch import Tensor, nn

    # That import may have added to them.
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
        # A typed storage, asked itself, warns that it will be no more.
        storage = getattr(memory, "_untyped_storage", memory)
        try:
            shared = storage.device.type != "cpu" or storage.is_shared()
        except NotImplementedError:
            # A sparse tensor has no storage; the tensors that it is made of have.
            shared = False
        return reduce(memory) if shared else memory.__reduce_ex__(pickle.HIGHEST_PROTOCOL)

    return reduce_memory


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()
