"""Layout of a model's tensors in one flat buffer, and copies to and from that buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from trawl.foreign.torch import copy_all, entries_of
from trawl.memory import aligned
from trawl.weights.tensors import (
    check_dtype,
    check_extra_state,
    check_whole,
    is_castable,
    named_tensors,
    set_extra_state,
    weights_of,
)

# Prefixes that wrappers add to names: TensorDictModule or DataParallel, torch.compile, or both.
_WRAPPERS = ("module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.")
_POINTER, _CONTIGUOUS = Tensor.data_ptr, Tensor.is_contiguous
_SHAPE = attrgetter("shape")

# Addresses of tensors, then whether each tensor is contiguous, then the shapes.
_Places = list[Any]


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a model.

    Attributes:
        names: names of the tensor; several if the tensor is tied.
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        required: True for a tensor that every set of weights must include. Buffers may be missing.
        start: offset of the first byte in the buffer.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    required: bool
    start: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class FlatLayout:
    """Layout of a model's tensors in a buffer. Tensors of the same dtype lie side by side.

    Args:
        tensors: the tensors by name. A tensor with several names is packed only once.
        required: names of the tensors that every set of weights must include.

    Attributes:
        entries: the tensors, in their order in the buffer.
        nbytes: size of the buffer in bytes. The buffer begins with an int64 for each entry and one
            for extra state. Each int64 is the number of the update that brought the entry or the
            extra state, or 0 if there was no such update.
    """

    def __init__(self, tensors: Mapping[str, Tensor], required: Collection[str]) -> None:
        names: dict[int, list[str]] = {}
        for name, tensor in tensors.items():
            names.setdefault(id(tensor), []).append(name)
        firsts = [(tensors[own[0]], own) for own in names.values()]
        # Sorting is stable: tensors of the same dtype stay in the model's order.
        firsts.sort(key=lambda pair: str(pair[0].dtype))
        self.entries: list[TensorEntry] = []
        start = aligned(8 * len(firsts) + 8)
        before: torch.dtype | None = None
        for tensor, own in firsts:
            if tensor.dtype != before:
                start, before = aligned(start), tensor.dtype
            entry = TensorEntry(
                tuple(own),
                tuple(tensor.shape),
                tensor.dtype,
                any(name in required for name in own),
                start,
            )
            self.entries.append(entry)
            start += entry.nbytes
        self.nbytes = start
        self._numbers = {name: i for i, entry in enumerate(self.entries) for name in entry.names}

    @classmethod
    def of(cls, module: nn.Module) -> FlatLayout:
        """Returns the layout of a module's tensors, in which all parameters are required."""
        parameters = dict(module.named_parameters(remove_duplicate=False))
        return cls(named_tensors(module), parameters)

    def match(self, tensors: Mapping[str, Tensor], model: str) -> list[Tensor | None]:
        """Returns the tensor for each entry, or None for an entry without a tensor.

        Args:
            tensors: tensors by name.
            model: name of the model, for error messages.

        Raises:
            KeyError: if names are missing or unknown.
            ValueError: if a tensor is sparse or on the meta device, a shape differs, a dtype can't
                be cast, or a tied tensor has different values under its names.
        """
        found: list[Tensor | None] = [None] * len(self.entries)
        unknown = []
        for name, value in tensors.items():
            number = self._numbers.get(name)
            if number is None:
                unknown.append(name)
                continue
            _check(name, value, self.entries[number])
            other = found[number]
            if other is not None and not _equal(value, other):
                raise ValueError(
                    f"weights {', '.join(map(repr, self.entries[number].names))} are tied in the "
                    "policy, but different values were given for them"
                )
            found[number] = value
        missing = [
            entry.names[0]
            for entry, value in zip(self.entries, found, strict=True)
            if value is None and entry.required
        ]
        if missing or unknown:
            raise KeyError(
                f"weights don't fit the policy {model}: missing {sorted(missing)}, unknown "
                f"{sorted(unknown)}{_hint(missing, unknown)}"
            )
        return found

    def difference(self, other: FlatLayout) -> str:
        """Describes why tensors of this layout don't fit another layout; empty if they fit."""
        own, its = ({n: e for e in one.entries for n in e.names} for one in (self, other))
        differing = sorted(
            name
            for name in own.keys() & its.keys()
            if own[name].shape != its[name].shape
            or not is_castable(own[name].dtype, its[name].dtype)
        )
        parts = {
            "only here": sorted(own.keys() - its.keys()),
            "only in the workers": sorted(its.keys() - own.keys()),
            "with another shape or dtype": differing,
        }
        return ", ".join(f"{what} {names}" for what, names in parts.items() if names)

    def runs(self) -> list[tuple[int, int]]:
        """Returns the runs, one for each dtype.

        A run is a range of entries with the same dtype, given as the index of the first entry and
        the index after the last entry.
        """
        found, first = [], 0
        for _, group in groupby(self.entries, key=lambda entry: entry.dtype):
            count = len(list(group))
            found.append((first, first + count))
            first += count
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlatLayout) and self.entries == other.entries

    def __hash__(self) -> int:
        return hash(tuple(self.entries))


def _hint(missing: Sequence[str], unknown: Sequence[str]) -> str:
    """Returns a hint for an error message if the names differ only by the prefix of a wrapper."""
    for prefix in _WRAPPERS:
        if missing and {prefix + name for name in missing} <= set(unknown):
            return f". They fit without the prefix {prefix!r}: pass the module inside the wrapper"
        if unknown and {prefix + name for name in unknown} >= set(missing) != set():
            return f". They fit with the prefix {prefix!r}: pass the module that contains this one"
    return ""


def _check(name: str, value: Tensor, entry: TensorEntry) -> None:
    if value.shape != entry.shape:
        raise ValueError(
            f"weight {name!r} has shape {tuple(value.shape)}, but the policy's has {entry.shape}"
        )
    if value.layout is not torch.strided:
        raise ValueError(f"weight {name!r} is {value.layout}: only dense tensors can be sent")
    if value.is_meta:
        raise ValueError(f"weight {name!r} is on the meta device: it has no values")
    check_dtype(name, value.dtype, entry.dtype)


def _equal(one: Tensor, other: Tensor) -> bool:
    if one is other or one.data_ptr() == other.data_ptr():
        return True
    return torch.equal(one, other.to(one.device, one.dtype))


class Slot:
    """Buffer that contains the tensors of a model.

    Args:
        layout: layout of the tensors.
        buffer: memory of at least ``layout.nbytes`` bytes, aligned to 64 bytes.
    """

    def __init__(self, layout: FlatLayout, buffer: Any) -> None:
        self.layout = layout
        # A slot that is made in inference mode must be usable outside it, too.
        with torch.inference_mode(False):
            self._map(buffer)

    def _map(self, buffer: Any) -> None:
        layout = self.layout
        whole = torch.frombuffer(buffer, dtype=torch.uint8, count=layout.nbytes)
        numbers = whole[: 8 * len(layout.entries) + 8].view(torch.int64).numpy()
        self.updates, self._extra = numbers[:-1], numbers[-1:]
        self.views = [
            whole[e.start : e.start + e.nbytes].view(e.dtype).view(e.shape) for e in layout.entries
        ]
        self._flat = [
            whole[layout.entries[a].start : _end(layout.entries[b - 1])].view(
                layout.entries[a].dtype
            )
            for a, b in layout.runs()
        ]

    def tensors(self, since: int = 0) -> list[Tensor | None]:
        """Returns the tensor of each entry; None for a tensor that is missing or not newer.

        Args:
            since: number of an update. Tensors of this update and earlier ones are left out.
        """
        newer = self.updates > since
        if newer.all():
            return list(self.views)
        return [view if new else None for view, new in zip(self.views, newer, strict=True)]

    def named(self, since: int = 0) -> dict[str, Tensor]:
        """Returns the same tensors as :meth:`tensors`, but by name.

        A tied tensor appears under each of its names.
        """
        pairs = zip(self.layout.entries, self.tensors(since), strict=True)
        return {n: tensor for entry, tensor in pairs if tensor is not None for n in entry.names}

    @property
    def complete(self) -> bool:
        """True if no tensor is missing."""
        return bool(self.updates.all())

    @property
    def newest(self) -> int:
        """Number of the newest update that brought a tensor; 0 if all are missing."""
        return int(self.updates.max(initial=0))

    @property
    def extra_number(self) -> int:
        """Number of the update that brought the extra state; 0 if there is none."""
        return int(self._extra[0])

    @extra_number.setter
    def extra_number(self, number: int) -> None:
        self._extra[0] = number

    @torch.no_grad()
    def put(self, tensors: Sequence[Tensor | None], update: int = 1) -> None:
        """Fills the slot with one tensor for each entry. None stands for a missing tensor."""
        self.updates[:] = [0 if tensor is None else update for tensor in tensors]
        _copy(self.views, [None if tensor is None else tensor.detach() for tensor in tensors])

    @torch.no_grad()
    def complete_by(self, other: Slot) -> None:
        """Copies missing tensors from another slot.

        If this slot has no extra state, it also gets the number of the other slot's extra state.
        """
        self._extra[self._extra == 0] = other.extra_number
        if other.layout != self.layout:
            return
        missing = self.updates == 0
        given = [t if m else None for t, m in zip(other.tensors(), missing, strict=True)]
        self.updates[missing] = other.updates[missing]
        _copy(self.views, given)

    @torch.no_grad()
    def put_flat(self, tensors: Sequence[Sequence[Tensor]], update: int = 1) -> None:
        """Fills the slot with flat CPU tensors, grouped by run. Copies a run in one operation."""
        self.updates[:] = update
        for run, parts in zip(self._flat, tensors, strict=True):
            torch.cat(list(parts), out=run)


def _copy(targets: Sequence[Tensor | None], sources: Sequence[Tensor | None]) -> None:
    pairs = [
        (target, source)
        for target, source in zip(targets, sources, strict=True)
        if source is not None and target is not None
    ]
    if pairs:
        into, of = zip(*pairs, strict=True)
        copy_all(list(into), list(of))


# Fills a slot; the second argument is the number of the update.
Write = Callable[[Slot, int], None]


class ModuleWeights:
    """Current tensors of a module.

    The tensors are looked up once. After that, each use checks only the identities of the tensors.
    Copying them to a slot also checks their addresses.

    Args:
        module: the module.
        layout: layout of the module's tensors; by default, ``FlatLayout.of(module)``.

    Raises:
        KeyError, ValueError: if the module doesn't fit the layout.
    """

    def __init__(self, module: nn.Module, layout: FlatLayout | None = None) -> None:
        self.module = module
        self.layout = FlatLayout.of(module) if layout is None else layout
        self._fitting: FlatLayout | None = None
        self._tables: list[Mapping[str, Any]] = []
        self._known: list[int] = []
        self._whole = False
        # Keeps the objects with the known ids alive, so that no new object gets one of these ids.
        self._kept: list[Any] = []
        self._tensors: list[Tensor | None] = []
        self._flat: tuple[_Places, list[list[Tensor]] | None] = [], None
        self.tensors()

    def tensors(self) -> list[Tensor | None]:
        """Returns the module's tensor for each entry; None for a buffer that the module lacks."""
        if not self._known or self._known != _identities(self._tables):
            self._look_up()
        return self._tensors

    def _checked(self) -> list[Tensor | None]:
        """Checks that all weights of the module are tensors, and returns :meth:`tensors`."""
        tensors = self.tensors()
        if not self._whole:
            check_whole(self.module)
            self._whole = True
        return tensors

    def _look_up(self) -> None:
        self._whole = False
        own = named_tensors(self.module)
        self._tensors = self.layout.match(own, type(self.module).__name__)
        self._tables = [table for part in self.module.modules() for table in entries_of(part)]
        self._kept = [value for table in self._tables for value in table.values()]
        self._known = _identities(self._tables)

    def writer(self) -> Write:
        """Checks the tensors, and returns a function that copies them to a slot.

        Raises:
            KeyError, ValueError: if the module's tensors no longer fit the layout.
            TypeError: if the module has weights that are not tensors.
        """
        tensors = self._checked()
        flat = self._flattened(tensors)
        return _writer(tensors, flat)

    def _flattened(self, tensors: Sequence[Tensor | None]) -> list[list[Tensor]] | None:
        """Returns flat views of all tensors by run; None if a tensor can't be copied bytewise."""
        # A tensor may have new memory (after ``p.data = ...`` or ``module.to(...)``).
        whole = [tensor for tensor in tensors if tensor is not None]
        places = [*map(_POINTER, whole), *map(_CONTIGUOUS, whole), *map(_SHAPE, whole)]
        known, flat = self._flat
        if places != known:
            for entry, tensor in zip(self.layout.entries, tensors, strict=True):
                if tensor is not None:
                    _check(entry.names[0], tensor, entry)
            flat = _flat_views(self.layout, tensors)
            self._flat = places, flat
        return flat

    @torch.no_grad()
    def load(self, tensors: Sequence[Tensor | None]) -> None:
        """Copies tensors, one for each entry, into the module."""
        _copy(self._checked(), tensors)

    def prepare(self, source: Any) -> Callable[[], None]:
        """Checks weights, and returns the function that loads them into the module.

        Args:
            source: weights in any of the forms of :func:`~trawl.weights.tensors.weights_of`.

        Raises:
            TypeError: if the weights are in none of the forms.
            KeyError: if names are missing or unknown.
            ValueError: if a shape differs, or a dtype can't be cast.
        """
        weights = weights_of(source)
        matched = self.layout.match(weights.tensors, type(self.module).__name__)
        check_extra_state(self.module, weights.extra)

        def load() -> None:
            # Extra state is set first, so that nothing else has changed if the module rejects it.
            set_extra_state(self.module, weights.extra)
            self.load(matched)

        return load

    def load_slot(self, slot: Slot, since: int) -> None:
        """Copies the tensors of a slot that are newer than update ``since`` into the module.

        Raises:
            KeyError, ValueError: if the weights don't fit the module.
        """
        # Usually, the layout is the same object as in the last call. A full comparison takes as
        # long as a copy.
        if slot.layout is self._fitting or slot.layout == self.layout:
            self._fitting = slot.layout
            self.load(slot.tensors(since))
        elif newer := slot.named(since):
            self.load(self.layout.match(newer, type(self.module).__name__))


def writer(layout: FlatLayout, tensors: Sequence[Tensor | None]) -> Write:
    """Returns a function that copies tensors, one for each entry, to a slot."""
    return _writer(tensors, _flat_views(layout, tensors))


def _writer(tensors: Sequence[Tensor | None], flat: Sequence[Sequence[Tensor]] | None) -> Write:
    def write(slot: Slot, update: int) -> None:
        if flat is None:
            slot.put(tensors, update)
        else:
            slot.put_flat(flat, update)

    return write


def _flat_views(layout: FlatLayout, tensors: Sequence[Tensor | None]) -> list[list[Tensor]] | None:
    """Returns flat views of all tensors by run; None if a tensor can't be copied bytewise."""
    pairs = zip(layout.entries, tensors, strict=True)
    flat = [tensor.detach().view(-1) for entry, tensor in pairs if _is_plain(tensor, entry)]
    return [flat[a:b] for a, b in layout.runs()] if len(flat) == len(tensors) else None


def _is_plain(tensor: Tensor | None, entry: TensorEntry) -> TypeGuard[Tensor]:
    """Returns True if a tensor can be copied byte for byte."""
    return (
        tensor is not None
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.dtype == entry.dtype
        and tensor.is_contiguous()
    )


def _identities(tables: Sequence[Mapping[str, Any]]) -> list[int]:
    return [id(value) for table in tables for value in table.values()]


def _end(entry: TensorEntry) -> int:
    return entry.start + entry.nbytes
