"""Who is sent which weights: groups of receivers, and what is on its way to them."""

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
        workers: their numbers.
        live: the model that weights come from, if none are given; or None.
        fixed: what they come from instead: a TensorDict, a dict, or a module whose tensors had no
            shapes yet; or None.
        packing: how the receivers' models are packed, as far as is known.
        model: what the model is, for errors.
        misfit: why the receivers can't have the weights of that model; empty if they can.
    """

    workers: tuple[int, ...]
    live: Live | None = None
    fixed: Any = None
    packing: Packing | None = None
    model: str = "of the receiver"
    misfit: str = ""

    @classmethod
    def of(cls, workers: Iterable[int], source: Any) -> Group:
        """A group whose weights come from a module, or from other weights, or are given."""
        if isinstance(source, nn.Module):
            model = type(source).__name__
            if any(is_lazy(parameter) for parameter in source.parameters()):
                # It gets its shapes by the first call: before that there is nothing to pack.
                return cls(tuple(workers), fixed=source, model=model)
            live = Live(source)
            return cls(tuple(workers), live, None, live.packing, model)
        group = cls(tuple(workers), fixed=source)
        if source is not None:
            tensors = weights_of(source).tensors
            group.packing = Packing(tensors, tensors)
        return group

    def know(self, packing: Packing) -> None:
        """Says how the model of a receiver is packed."""
        if self.packing is None:
            self.packing = packing
        elif difference := self.packing.difference(packing):
            # It is theirs that weights are for.
            self.packing = packing
            self.misfit = (
                f"the {self.model} that is here is not like those of workers: {difference}"
            )


@dataclass(frozen=True)
class Shipment:
    """Weights that were checked, for some receivers of a group."""

    group: Group
    workers: tuple[int, ...]
    packing: Packing
    write: Write
    extra: bytes


def by_worker(weights: Any) -> dict[int, Any]:
    """Weights for each receiver, if that is what they are."""
    if not isinstance(weights, Mapping) or isinstance(weights, TensorDictBase):
        return {}
    return dict(weights) if all(type(name) is int for name in weights) else {}


def shipment_of(
    group: Group, packing: Packing | None, workers: tuple[int, ...], weights: Any
) -> Shipment:
    """Weights for receivers of a group: those given, or else the group's own.

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
    """The groups of receivers, by what a sender was given."""
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
    """The number of receivers, by what a sender was given.

    Raises:
        ValueError: if it is given twice, and not the same, or there are none.
        TypeError: if it is no number.
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
