"""Groups of receivers that get the same weights, and weights that were checked for a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from trawl.weights.layout import FlatLayout, ModuleWeights, Slot, Write, writer
from trawl.weights.messages import WeightMessage
from trawl.weights.store import Receiver, Store, Version
from trawl.weights.tensors import (
    Weights,
    check_extra_state,
    extra_state,
    packed_extra,
    weights_of,
)


@dataclass
class ReceiverGroup:
    """Receivers that get the same weights.

    Attributes:
        workers: numbers of the receivers.
        live: model whose current weights are sent if an update includes no weights; or None.
        fixed: source of the weights in place of ``live``: a TensorDict, a dict, or a module whose
            tensors had no shapes yet; or None.
        layout: layout of the receivers' models; None while it is not known.
        model: name of the model, for error messages.
        misfit: reason why the group's own weights don't fit the receivers; empty if they do.
    """

    workers: tuple[int, ...]
    live: ModuleWeights | None = None
    fixed: Any = None
    layout: FlatLayout | None = None
    model: str = "of the receiver"
    misfit: str = ""

    @property
    def ready(self) -> bool:
        """True if the group has weights of its own, and they fit the receivers."""
        known = self.live is not None or (self.fixed is not None and self.layout is not None)
        return known and not self.misfit

    @classmethod
    def of(cls, workers: Iterable[int], source: Any) -> ReceiverGroup:
        """Returns a group with weights from ``source``.

        If ``source`` is None, updates must include weights.
        """
        if isinstance(source, nn.Module):
            model = type(source).__name__
            if any(is_lazy(parameter) for parameter in source.parameters()):
                # Lazy parameters get their shapes in the first call. Until then, there is no
                # layout.
                return cls(tuple(workers), fixed=source, model=model)
            live = ModuleWeights(source)
            return cls(tuple(workers), live, None, live.layout, model)
        group = cls(tuple(workers), fixed=source)
        if source is not None:
            tensors = weights_of(source).tensors
            group.layout = FlatLayout(tensors, tensors)
        return group

    def set_layout(self, layout: FlatLayout) -> None:
        """Sets the layout of a receiver's model, which the sender may not know."""
        if self.layout is None:
            self.layout = layout
        elif difference := self.layout.difference(layout):
            # Weights have to fit the receivers' model.
            self.layout = layout
            self.misfit = (
                f"the policy {self.model} in this process differs from the workers' policy: "
                f"{difference}"
            )

    def prepare(
        self, workers: tuple[int, ...], weights: Any, layout: FlatLayout | None
    ) -> PreparedUpdate:
        """Checks weights for receivers of this group, and returns them as an update.

        If ``weights`` is None, the update has the group's own weights.

        Raises:
            Exception: the errors of :meth:`~trawl.weight_update.WeightSyncScheme.prepare`.
        """
        if weights is None and self.misfit:
            raise ValueError(f"{self.misfit}. Pass weights that fit the workers' policy")
        if weights is None and self.live is not None:
            write, extra = self.live.writer(), packed_extra(extra_state(self.live.module))
            return PreparedUpdate(self, workers, self.live.layout, write, extra)
        source = self.fixed if weights is None else weights
        if source is None:
            raise RuntimeError(
                "there are no weights to send: the policy is not a module, or policy_factory "
                "makes it, or init_on_sender() got no model. Pass the weights"
            )
        given = weights_of(source)
        if self.live is not None and not self.misfit:
            check_extra_state(self.live.module, given.extra)
        layout = layout or FlatLayout(given.tensors, given.tensors)
        write = writer(layout, layout.match(given.tensors, self.model))
        return PreparedUpdate(self, workers, layout, write, packed_extra(given.extra))


@dataclass(frozen=True)
class PreparedUpdate:
    """Checked weights for some receivers of a group."""

    group: ReceiverGroup
    workers: tuple[int, ...]
    layout: FlatLayout
    write: Write
    extra: bytes

    def copy(self) -> tuple[PreparedUpdate, Slot]:
        """Returns the update with a copy of its weights, and the slot that holds the copy."""
        slot = Slot(self.layout, np.empty(self.layout.nbytes, dtype=np.uint8))
        self.write(slot, 1)
        return replace(self, write=writer(self.layout, slot.tensors())), slot


class WeightHost(Protocol):
    """Collector that sends weights to its workers through schemes."""

    def groups(self, model_id: str) -> list[ReceiverGroup]:
        """Returns groups of workers whose models have the same weights."""

    def deliver(self, model_id: str, worker: int, message: WeightMessage) -> None:
        """Delivers a message with weights to a worker."""


class ReceiverGroups:
    """All receivers of a scheme, and the stores that have their weights.

    Args:
        groups: the receivers, in groups that get the same weights.
    """

    def __init__(self, groups: Sequence[ReceiverGroup] = ()) -> None:
        self._groups = list(groups)
        self._stores: dict[int, tuple[Store, int]] = {}

    @classmethod
    def of(
        cls,
        source: Any,
        params_map: Mapping[int, Any] | None,
        device_map_fn: Callable[[int, Any], Any] | None,
        count: int,
    ) -> ReceiverGroups:
        """Returns the receivers that a sender's arguments describe."""
        if params_map is not None:
            alike: dict[int, list[int]] = {}
            for index, weights in params_map.items():
                alike.setdefault(id(weights), []).append(index)
            return cls([ReceiverGroup.of(own, params_map[own[0]]) for own in alike.values()])
        if device_map_fn is not None:
            return cls([ReceiverGroup.of([i], device_map_fn(i, source)) for i in range(count)])
        return cls([ReceiverGroup.of(range(count), source)])

    def __iter__(self) -> Iterator[ReceiverGroup]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: ReceiverGroup) -> None:
        """Adds a group."""
        self._groups.append(group)

    @property
    def workers(self) -> list[int]:
        """Numbers of all receivers."""
        return sorted(i for group in self._groups for i in group.workers)

    @property
    def have_sources(self) -> bool:
        """True if weights can be sent to all receivers without being passed."""
        found = [group.live is not None or group.fixed is not None for group in self._groups]
        return bool(found) and all(found)

    def set_layout(self, worker: int, layout: FlatLayout) -> None:
        """Sets the layout of a receiver's model, which the sender may not know."""
        for group in self._groups:
            if worker in group.workers:
                group.set_layout(layout)

    def chosen(self, worker_ids: Any) -> list[int]:
        """Returns the numbers of the selected receivers. None selects all receivers.

        Raises:
            ValueError: if a receiver is unknown, or no receiver is selected.
            TypeError: if ``worker_ids`` are not integers.
        """
        known = self.workers
        if worker_ids is None:
            return known
        single = not isinstance(worker_ids, Iterable) or isinstance(worker_ids, (str, Tensor))
        given: list[Any] = [worker_ids] if single else list(cast("Iterable[Any]", worker_ids))
        if any(isinstance(i, bool) or not isinstance(i, (int, np.integer)) for i in given):
            raise TypeError(
                "worker_ids must be the number of a worker, or several such numbers, but it is "
                f"{worker_ids!r}"
            )
        chosen = [int(i) for i in given]
        if not chosen:
            raise ValueError("worker_ids is empty: no worker would receive the weights")
        for index in chosen:
            if index not in known:
                raise ValueError(
                    f"worker_ids names worker {index}, but the workers are {_listed(known)}"
                )
        return chosen

    def prepare(self, weights: Any, workers: Sequence[int]) -> Iterator[PreparedUpdate]:
        """Checks weights for receivers, and yields them as prepared updates.

        Raises:
            Exception: the errors of :meth:`~trawl.weight_update.WeightSyncScheme.prepare`.
        """
        own = by_worker(weights)
        if own:
            workers = [i for i in self.chosen(list(own)) if i in workers]
            if not workers:
                raise ValueError(
                    f"the weights are only for workers {sorted(own)}, none of which was selected"
                )
        for group in self._groups:
            chosen = tuple(i for i in group.workers if i in workers)
            sets = [((i,), own[i]) for i in chosen] if own else [(chosen, weights)] * bool(chosen)
            layout = group.layout
            for some, given in sets:
                update = group.prepare(some, given, layout)
                layout = update.layout
                for worker in some:
                    self._stores[worker][0].check(update.layout, update.extra)
                yield update

    # --- the stores that have the weights

    def keep_in(self, store: Store, numbers: Mapping[int, int]) -> None:
        """Sets the store that has the weights of some receivers, with their numbers in it."""
        self._stores |= {worker: (store, number) for worker, number in numbers.items()}

    @property
    def stores(self) -> list[Store]:
        """The stores, each once."""
        return list(dict.fromkeys(store for store, _ in self._stores.values()))

    def publish(self, update: PreparedUpdate, version: Version) -> None:
        """Publishes weights for receivers."""
        by_store: dict[Store, list[int]] = {}
        for worker in update.workers:
            store, number = self._stores[worker]
            by_store.setdefault(store, []).append(number)
        for store, numbers in by_store.items():
            store.publish(update.layout, update.write, update.extra, version, numbers)
        update.group.layout = update.layout

    def publish_version(self, version: Version, workers: Iterable[int]) -> None:
        """Publishes a new version for the weights that receivers got last."""
        for worker in workers:
            store, number = self._stores[worker]
            store.publish_version(version, [number])

    def reader(self, worker: int) -> Receiver:
        """Returns a receiver's source of new weights, which is sent to its process at its start."""
        store, number = self._stores[worker]
        return store.reader(number)

    def count(self, worker: int) -> int:
        """Returns the number of updates for a receiver."""
        store, number = self._stores[worker]
        return store.count(number)

    def newest(self, worker: int) -> Weights | None:
        """Returns a copy of a receiver's newest weights; None before the first weights."""
        store, number = self._stores[worker]
        return store.newest(number)


def by_worker(weights: Any) -> dict[int, Any]:
    """Returns the weights if they are a dict keyed by receiver number, or else an empty dict."""
    if not isinstance(weights, Mapping) or isinstance(weights, TensorDictBase):
        return {}
    return dict(weights) if all(type(name) is int for name in weights) else {}


def receivers_of(
    num_workers: int | None,
    devices: Sequence[Any] | None,
    params_map: Mapping[int, Any] | None,
    context: Any,
) -> int:
    """Returns the number of receivers that a sender's arguments describe.

    Raises:
        ValueError: if the arguments contradict each other, or there are no receivers.
        TypeError: if a number is not an integer.
    """
    counts: dict[str, Any] = {} if num_workers is None else {"num_workers": num_workers}
    for name, given in (("devices", devices), ("params_map", params_map)):
        if given is not None:
            counts[name] = len(given)
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"{name} must be an integer, but it is {count!r}")
        if count < 1:
            raise ValueError(f"{name} is {count}, but there must be at least one receiver")
    if len(set(counts.values())) > 1:
        raise ValueError(f"the arguments disagree on the number of receivers: {counts}")
    return next(iter(counts.values()), getattr(context, "num_workers", None) or 1)


def entry_of(entries: Mapping[int, Any], worker: int) -> Any:
    """Returns the entry for a receiver (its channel or the address of its channel).

    Raises:
        ValueError: if the sender has no receiver with this number.
    """
    if worker not in entries:
        raise ValueError(f"worker_idx is {worker}, but the receivers are {sorted(entries)}")
    return entries[worker]


def _listed(numbers: Sequence[int]) -> str:
    """Returns sorted numbers as text; as a range if none is missing in between."""
    if 1 < len(numbers) == numbers[-1] - numbers[0] + 1:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))
