"""Groups of receivers that get the same weights, and checked weights for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase
from torch import nn
from torch.nn.parameter import is_lazy

from trawl.weight_update.packing import Live, Packing, Write, writer
from trawl.weight_update.tensors import check_extra_state, extra_state, packed_extra, weights_of


@dataclass
class Group:
    """Receivers that get the same weights.

    Attributes:
        workers: numbers of the receivers.
        live: model that provides the weights if none are given; or None.
        fixed: source of the weights in place of ``live``: a TensorDict, a dict, or a module whose
            tensors had no shapes yet; or None.
        packing: layout of the receivers' models; None while it is not known.
        model: name of the model, for errors.
        misfit: reason why the receivers can't take the weights of ``live``; empty if they can.
    """

    workers: tuple[int, ...]
    live: Live | None = None
    fixed: Any = None
    packing: Packing | None = None
    model: str = "of the receiver"
    misfit: str = ""

    @classmethod
    def of(cls, workers: Iterable[int], source: Any) -> Group:
        """Returns a group with weights from ``source``; with None, updates must include them."""
        if isinstance(source, nn.Module):
            model = type(source).__name__
            if any(is_lazy(parameter) for parameter in source.parameters()):
                # Lazy parameters get their shapes in the first call. Until then, there is no
                # layout.
                return cls(tuple(workers), fixed=source, model=model)
            live = Live(source)
            return cls(tuple(workers), live, None, live.packing, model)
        group = cls(tuple(workers), fixed=source)
        if source is not None:
            tensors = weights_of(source).tensors
            group.packing = Packing(tensors, tensors)
        return group

    def know(self, packing: Packing) -> None:
        """Takes in the layout of a receiver's model."""
        if self.packing is None:
            self.packing = packing
        elif difference := self.packing.difference(packing):
            # Weights have to fit the receivers' model.
            self.packing = packing
            self.misfit = (
                f"the {self.model} that is here is not like those of workers: {difference}"
            )


@dataclass(frozen=True)
class Shipment:
    """Checked weights for some receivers of a group."""

    group: Group
    workers: tuple[int, ...]
    packing: Packing
    write: Write
    extra: bytes


def by_worker(weights: Any) -> dict[int, Any]:
    """Returns the weights of each receiver if they are a dict by number, else an empty dict."""
    if not isinstance(weights, Mapping) or isinstance(weights, TensorDictBase):
        return {}
    return dict(weights) if all(type(name) is int for name in weights) else {}


def shipment_of(
    group: Group, packing: Packing | None, workers: tuple[int, ...], weights: Any
) -> Shipment:
    """Checks weights for receivers of a group: the given ones, or else the group's own.

    Raises:
        as :meth:`~trawl.weight_update.WeightSyncScheme.prepare`.
    """
    if weights is None and group.misfit:
        raise ValueError(f"{group.misfit}. Give weights that fit")
    if weights is None and group.live is not None:
        write = group.live.writer()
        extra = packed_extra(extra_state(group.live.module))
        return Shipment(group, workers, group.live.packing, write, extra)
    source = group.fixed if weights is None else weights
    if source is None:
        raise RuntimeError(
            "there are no weights to take: the policy is no module, or was made by a "
            "policy_factory; give the weights"
        )
    given = weights_of(source)
    if group.live is not None and not group.misfit:
        check_extra_state(group.live.module, given.extra)
    packing = packing or Packing(given.tensors, given.tensors)
    matched = packing.match(given.tensors, group.model)
    return Shipment(group, workers, packing, writer(packing, matched), packed_extra(given.extra))


def groups_of(
    source: Any,
    params_map: Mapping[int, Any] | None,
    device_map_fn: Callable[[int, Any], Any] | None,
    count: int,
) -> list[Group]:
    """Returns the groups of receivers that a sender's arguments describe."""
    if params_map is not None:
        return [Group.of([index], weights) for index, weights in params_map.items()]
    if device_map_fn is not None:
        return [Group.of([index], device_map_fn(index, source)) for index in range(count)]
    return [Group.of(range(count), source)]


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
    given = {
        "num_workers": num_workers,
        "devices": None if devices is None else len(devices),
        "params_map": None if params_map is None else len(params_map),
    }
    counts = {name: count for name, count in given.items() if count is not None}
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"{name} must be an integer, but it is {count!r}")
        if count < 1:
            raise ValueError(f"{name} is {count}: there have to be receivers")
    if len(set(counts.values())) > 1:
        raise ValueError(f"the number of receivers is not clear: {counts}")
    return next(iter(counts.values()), getattr(context, "num_workers", None) or 1)
