"""Pickles functions and objects of a user's program for other processes.

Code that can't be imported is pickled by value (``cloudpickle``): lambdas, closures, local classes
and all of ``__main__``. The receiver's ``__main__`` gets the names that this code uses, so that its
functions read and write their global variables there. Tensors in shared memory stay shared, as do
locks and values of ``multiprocessing``. Everything else is copied.
"""

from __future__ import annotations

import builtins
import io
import os
import pickle
import sys
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import context
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, NamedTuple

import cloudpickle
from typing_extensions import override

# Descriptors of the payload that is being unpacked.
_received: list[int] = []
# Part of a process's identity, because processes of different machines may have the same id.
_NONCE = os.urandom(8)


class ProgramPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler of objects of a user's program.

    In a process that receives several pickles, a name of ``__main__`` keeps the object that
    arrived first. In the process that made the pickle, ``__main__`` stays as it is.

    Args:
        file: file to write to.
        **options: further arguments of :class:`pickle.Pickler`.

    Attributes:
        copies_modules: True to copy the tensors of modules, even if they are in shared memory.
    """

    copies_modules = False

    def __init__(self, file: io.BytesIO, **options: Any) -> None:
        super().__init__(file, protocol=5, **options)
        self._main = vars(sys.modules["__main__"])
        # All functions of __main__ have this object as their global variables.
        self.globals_ref[id(self._main)] = _Namespace(self._main)
        self._sender = _this_process()
        self._named: dict[str, Any] = {}
        self._copied: set[int] = set()

    @override
    def dump(self, obj: Any) -> None:
        """Pickles an object; objects of earlier calls are referred to, and not pickled again."""
        self._named = {}
        # The names are pickled after the object, and are known then.
        super().dump(_Opened(obj, self._named, self._sender))

    @override
    def reducer_override(self, obj: Any) -> Any:
        if (self.copies_modules or self._copied) and "torch" in sys.modules:
            import torch

            if self.copies_modules and isinstance(obj, torch.nn.Module):
                tensors = (*obj.parameters(), *obj.buffers())
                self._copied.update(filter(None, map(_memory_of, tensors)))
            elif _memory_of(obj) in self._copied:
                return obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        reduced = super().reducer_override(obj)
        if isinstance(reduced, tuple) and len(reduced) == 6:
            named = obj.__module__ == "__main__" and self._main.get(obj.__qualname__) is obj
            if named:
                self._named[obj.__qualname__] = obj
            if named or getattr(obj, "__globals__", None) is self._main:
                *most, setter = reduced
                most[2] = (self._sender, setter, most[2])
                return (*most, _set_state)
        return reduced


class _Namespace:
    """The global variables of ``__main__``; unpickled, those of the receiver's ``__main__``."""

    def __init__(self, main: Mapping[str, Any]) -> None:
        # Relative imports need these attributes.
        names = ("__package__", "__path__")
        self._given = {name: main[name] for name in names if main.get(name) is not None}

    def __reduce__(self) -> Any:
        return _namespace, (_this_process(), self._given)


class _Opened(NamedTuple):
    """Object to pickle; unpickled, the object itself.

    Attributes:
        content: the object.
        named: functions and classes of ``__main__`` that the object refers to, by name.
        sender: identity of this process.
    """

    content: Any
    named: Mapping[str, Any]
    sender: Any

    def __reduce__(self) -> Any:
        return _opened, tuple(self)


def _opened(content: Any, named: Mapping[str, Any], sender: Any) -> Any:
    _adopt(sender, named)
    return content


def _namespace(sender: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    _adopt(sender, given)
    return vars(sys.modules["__main__"])


def _set_state(made: Any, given: tuple[Any, Callable[[Any, Any], None], Any]) -> None:
    """Gives a function or a class of ``__main__`` its state."""
    sender, setter, state = given
    main = vars(sys.modules["__main__"])
    if isinstance(made, type):
        # In the process that made the pickle, this is the program's own class.
        if sender != _this_process() or main.get(made.__qualname__) is not made:
            setter(made, state)
        return
    _adopt(sender, state[1]["__globals__"])
    state[1]["__globals__"] = {}
    setter(made, state)
    main["__builtins__"] = builtins


def _adopt(sender: Any, names: Mapping[str, Any]) -> None:
    """Sets names of this process's ``__main__``, except those that have been set before."""
    main, here = vars(sys.modules["__main__"]), _this_process()
    arrived = set(main) if sender == here else _arrived.setdefault(here, set())
    for name in names.keys() - arrived:
        main[name] = names[name]
        arrived.add(name)


# Names of __main__ that came from another process, by the identity of this process: a forked copy
# of a process gets names anew.
_arrived: dict[Any, set[str]] = {}


def _this_process() -> tuple[int, bytes]:
    return os.getpid(), _NONCE


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
        return pickle.loads, (_dumps(self._content, ForkingPickler(io.BytesIO()).dispatch_table),)


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
        with _spawning(self.fds):
            self.data = _dumps(content, _reducers())


def packed(content: Any) -> bytes:
    """Returns the pickle of an object for a process that shares nothing with this one."""
    file = io.BytesIO()
    ProgramPickler(file).dump(content)
    return file.getvalue()


def unsendable(name: str, whose: str, error: Exception) -> TypeError:
    """Returns the error for an argument that can't be pickled.

    Args:
        name: name of the argument.
        whose: whom the argument is for, such as ``"worker 0"``.
        error: the error of pickling.
    """
    instead = "policy_factory" if name == "policy" else "create_env_fn"
    text = str(error).rstrip(".")
    reason = f"{text}. Pass a function that makes it there, as {instead}"
    if "created in a fork context" in str(error):
        reason = (
            "it has a lock that only forked processes can share, but workers are spawned. Call "
            "torch.multiprocessing.set_start_method('spawn', force=True) before you create it"
        )
    return TypeError(f"{name} (of {whose}) can't be sent to another process: {reason}")


def unpack(data: bytes, fds: list[int]) -> Any:
    """Returns the content of a payload, and takes over its descriptors."""
    try:
        with _receiving(fds):
            return pickle.loads(data)
    finally:
        _close_all(fds)


class Package:
    """Objects of the program as they are now, pickled in one go but unpickled one by one.

    Objects that several parts refer to are one object afterwards, too. Iterating over a package
    unpickles the parts anew, each when it is asked for. The package itself can be pickled as part
    of the specification of a worker.

    Args:
        parts: the objects.
        copied: positions of parts whose modules are copied even if their tensors are in shared
            memory.
        pickler: function that makes the pickler for a file; by default, a pickler for other
            machines, which shares nothing.
        refs: list to which the pickler appends what it keeps apart from the pickle.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        copied: Sequence[int] = (),
        pickler: Callable[[io.BytesIO], ProgramPickler] = ProgramPickler,
        refs: Sequence[Any] = (),
    ) -> None:
        file = io.BytesIO()
        made = pickler(file)
        for position, part in enumerate(parts):
            made.copies_modules = position in copied
            made.dump(part)
        self.fill(file.getvalue(), len(parts), refs, [])

    def fill(self, data: bytes, count: int, refs: Sequence[Any], fds: list[int]) -> None:
        """Sets the pickled parts, and what they refer to."""
        self._data, self._count, self._refs, self.fds = data, count, refs, fds
        weakref.finalize(self, _close_all, fds)

    @classmethod
    def shared(cls, parts: Sequence[Any], copied: Sequence[int] = ()) -> Package:
        """Returns a package for child processes, with which tensors and locks can be shared."""
        fds: list[int] = []
        with _spawning(fds):
            package = cls(parts, copied, _sharing(_reducers()))
        package.fds.extend(fds)
        return package

    def __iter__(self) -> Iterator[Any]:
        unpickler = _Unpickler(io.BytesIO(self._data), self._refs)
        for _ in range(self._count):
            with _receiving(self.fds):
                part = unpickler.load()
            yield part

    def __reduce__(self) -> Any:
        return _package, (self._data, self._count, self._refs, [DupFd(fd) for fd in self.fds])


def _package(data: bytes, count: int, refs: Sequence[Any], fds: Sequence[_Descriptor]) -> Package:
    package = Package.__new__(Package)
    package.fill(data, count, refs, [fd.detach() for fd in fds])
    return package


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, refs: Sequence[Any]) -> None:
        super().__init__(file)
        self._refs = refs

    @override
    def persistent_load(self, pid: int) -> Any:
        return self._refs[pid]


@contextmanager
def _spawning(fds: list[int]) -> Iterator[None]:
    """Context in which pickled descriptors are added to ``fds``."""
    before = context.get_spawning_popen()
    context.set_spawning_popen(_Recipient(fds))  # type: ignore[arg-type]
    try:
        yield
    finally:
        context.set_spawning_popen(before)


@contextmanager
def _receiving(fds: list[int]) -> Iterator[None]:
    """Context in which pickles that refer to the descriptors are unpickled."""
    before = _received[:]
    _received[:] = fds
    try:
        yield
    finally:
        _received[:] = before


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
        self.fds = fds

    def duplicate_for_child(self, fd: int) -> int:
        """Adds a descriptor to the payload; returns its position."""
        self.fds.append(os.dup(fd))
        return len(self.fds) - 1


def _dumps(content: Any, reducers: Mapping[type, Any]) -> bytes:
    file = io.BytesIO()
    _sharing(reducers)(file).dump(content)
    return file.getvalue()


def _sharing(reducers: Mapping[type, Any]) -> type[ProgramPickler]:
    # A new class for each table, because a pickler reads its table only when it is created.
    table = ChainMap(dict(reducers), cloudpickle.Pickler.dispatch_table)
    return type("SharingPickler", (ProgramPickler,), {"dispatch_table": table})


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
        # A sparse tensor has no storage. The tensors that it consists of have storages.
        storage = _storage_of(memory)
        shared = storage is not None and (storage.device.type != "cpu" or storage.is_shared())
        return reduce(memory) if shared else memory.__reduce_ex__(pickle.HIGHEST_PROTOCOL)

    return reduce_memory


def _storage_of(memory: Any) -> Any:
    """Returns the storage of a tensor, or an untyped one of a storage; None if there is none."""
    import torch

    if isinstance(memory, torch.Tensor):
        try:
            return memory.untyped_storage()
        except (NotImplementedError, RuntimeError, ValueError):
            return None
    if not isinstance(memory, torch.TypedStorage | torch.UntypedStorage):
        return None
    # A typed storage itself would warn that it is deprecated.
    from trawl.foreign.torch import untyped

    return untyped(memory)


def _memory_of(memory: Any) -> int | None:
    """Returns the address of a tensor's or a storage's memory; None for other objects."""
    storage = _storage_of(memory)
    try:
        return storage.data_ptr() if storage is not None and storage.nbytes() else None
    except (NotImplementedError, RuntimeError):
        return None


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()
