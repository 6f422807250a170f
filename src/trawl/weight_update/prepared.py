"""Groups of receivers that get the same weights, and checked weights for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase
from torch import nn
from torch.nn.parameter import is_lazy

from trawl.weight_update.layout import FlatLayout, ModuleWeights, Write, writer
from trawl.weight_update.tensors import check_extra_state, extra_state, packed_extra, weights_of


@dataclass
class ReceiverGroup:
    """Receivers that get the same weights.

    Attributes:
        workers: numbers of the receivers.
        live: model that provides the weights if none are given; or None.
        fixed: source of the weights in place of ``live``: a TensorDict, a dict, or a module whose
            tensors had no shapes yet; or None.
        layout: layout of the receivers' models; None while it is not known.
        model: name of the model, for errors.
        misfit: reason why the receivers can't take the weights of ``live``; empty if they can.
    """

    workers: tuple[int, ...]
    live: ModuleWeights | None = None
    fixed: Any = None
    layout: FlatLayout | None = None
    model: str = "of the receiver"
    misfit: str = ""

    @classmethod
    def of(cls, workers: Iterable[int], source: Any) -> ReceiverGroup:
        """Returns a group with weights from ``source``; with None, updates must include them."""
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
                f"the {self.model} that is here is not like those of workers: {difference}"
            )

    def prepare(
        self, workers: tuple[int, ...], weights: Any, layout: FlatLayout | None
    ) -> PreparedUpdate:
        """Checks weights for receivers of this group: the given ones, or else the group's own.

        Raises:
            Exception: the errors of :meth:`~trawl.weight_update.WeightSyncScheme.prepare`.
        """
        if weights is None and self.misfit:
            raise ValueError(f"{self.misfit}. Give weights that fit")
        if weights is None and self.live is not None:
            write, extra = self.live.writer(), packed_extra(extra_state(self.live.module))
            return PreparedUpdate(self, workers, self.live.layout, write, extra)
        source = self.fixed if weights is None else weights
        if source is None:
            raise RuntimeError(
                "there are no weights to take: the policy is no module, or was made by a "
                "policy_factory; give the weights"
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


def by_worker(weights: Any) -> dict[int, Any]:
    """Returns the weights of each receiver if they are a dict by number, else an empty dict."""
    if not isinstance(weights, Mapping) or isinstance(weights, TensorDictBase):
        return {}
    return dict(weights) if all(type(name) is int for name in weights) else {}


def groups_of(
    source: Any,
    params_map: Mapping[int, Any] | None,
    device_map_fn: Callable[[int, Any], Any] | None,
    count: int,
) -> list[ReceiverGroup]:
    """Returns the groups of receivers that a sender's arguments describe."""
    if params_map is not None:
        alike: dict[int, list[int]] = {}
        for index, weights in params_map.items():
            alike.setdefault(id(weights), []).append(index)
        return [ReceiverGroup.of(own, params_map[own[0]]) for own in alike.values()]
    if device_map_fn is not None:
        return [ReceiverGroup.of([i], device_map_fn(i, source)) for i in range(count)]
    return [ReceiverGroup.of(range(count), source)]


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
            raise ValueError(f"{name} is {count}: there have to be receivers")
    if len(set(counts.values())) > 1:
        raise ValueError(f"the number of receivers is not clear: {counts}")
    return next(iter(counts.values()), getattr(context, "num_workers", None) or 1)
