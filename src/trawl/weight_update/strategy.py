"""How weights are taken out of a model, and put into one."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from tensordict import NonTensorData, TensorDict, TensorDictBase
from torch import Tensor, nn

from trawl.weight_update.packing import Packing, load_weights
from trawl.weight_update.tensors import EXTRA, Weights, check_dtype, set_extra_state, weights_of

_FORMS = ("tensordict", "state_dict")


class WeightStrategy:
    """Takes weights out of a model in one form, and puts weights of any form into one.

    Args:
        extract_as: ``"tensordict"`` for a nested TensorDict, ``"state_dict"`` for a flat dict.

    Raises:
        ValueError: for another form.

    Example:
        >>> import torch
        >>> from trawl.weight_update import WeightStrategy
        >>> strategy = WeightStrategy()
        >>> learner, actor = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
        >>> strategy.apply_weights(actor, strategy.extract_weights(learner))
        >>> bool((actor.weight == learner.weight).all())
        True
    """

    def __init__(self, extract_as: str = "tensordict") -> None:
        check_strategy("extract_as", extract_as)
        self.extract_as = extract_as

    def extract_weights(self, source: Any) -> Any:
        """The weights of a module, a TensorDict or a dict.

        Returns:
            Parameters and buffers, not copied, in the form of this strategy; modules' extra state
            (``nn.Module.get_extra_state``) under ``"__extra_state__"``, if there is such. None
            for None.

        Raises:
            TypeError: if ``source`` has no weights.
        """
        return None if source is None else in_form(weights_of(source), self.extract_as)

    def apply_weights(self, destination: Any, weights: Any, inplace: bool = True) -> None:
        """Puts weights into a module, or into a TensorDict or dict of tensors.

        Args:
            destination: where they are put.
            weights: in any form; names with dots are those of submodules. None changes nothing.
            inplace: whether values are copied into the tensors that are there; otherwise a
                module gets parameters of its own, which are the tensors given.

        Raises:
            ValueError: if weights can't be put into such a destination, or shapes differ.
            TypeError: if weights are in no known form.
            KeyError: if names don't fit.
        """
        if weights is None:
            return
        given = weights_of(weights)
        if isinstance(destination, nn.Module):
            load_weights(destination, given) if inplace else _swap(destination, given)
        elif isinstance(destination, (TensorDictBase, Mapping)):
            _update(destination, given)
        else:
            raise ValueError(
                "weights can be put into a module, a TensorDict or a dict of tensors, but "
                f"destination is {type(destination).__name__}"
            )


def check_strategy(name: str, form: str) -> None:
    """Refuses what is no form of weights."""
    if form not in _FORMS:
        raise ValueError(f"{name} must be 'tensordict' or 'state_dict', but it is {form!r}")


def in_form(weights: Weights, form: str) -> Any:
    """Weights as a nested TensorDict, or as a flat dict."""
    tensors = {name: tensor.detach() for name, tensor in weights.tensors.items()}
    if form == "state_dict":
        return {**tensors, EXTRA: dict(weights.extra)} if weights.extra else tensors
    nested = TensorDict({tuple(name.split(".")): value for name, value in tensors.items()})
    if weights.extra:
        nested.set(EXTRA, NonTensorData(dict(weights.extra)))
    return nested


def take_in(weights: Weights, into: Any, strategy: WeightStrategy | None) -> Any:
    """Puts weights that were received into a model or tensors, if there are any.

    Args:
        weights: what was received.
        into: a module, a TensorDict or a dict of tensors; or None.
        strategy: how they are put there, and the form that they are returned in.

    Returns:
        The weights in that form.
    """
    form = strategy or WeightStrategy()
    if into is not None:
        form.apply_weights(into, weights)
    return in_form(weights, form.extract_as)


def _swap(module: nn.Module, weights: Weights) -> None:
    packing = Packing.of(module)
    found = packing.match(weights.tensors, type(module).__name__)
    for entry, value in zip(packing.entries, found, strict=True):
        if value is None:
            continue
        # Under all of its names the module has the same new one: what was tied stays tied.
        old = operator.attrgetter(entry.names[0])(module)
        new = value.detach()
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
        for name in entry.names:
            path, _, last = name.rpartition(".")
            setattr(module.get_submodule(path), last, new)
    set_extra_state(module, weights.extra)


def _update(destination: Any, weights: Weights) -> None:
    own: dict[str, Tensor] = weights_of(destination).tensors
    unknown = sorted(set(weights.tensors) - set(own))
    if unknown:
        raise KeyError(f"destination has no weights {unknown}; it has {sorted(own)}")
    for name, value in weights.tensors.items():
        if own[name].shape != value.shape:
            raise ValueError(
                f"weight {name!r} has shape {tuple(value.shape)}, but that of destination has "
                f"{tuple(own[name].shape)}"
            )
        check_dtype(name, value.dtype, own[name].dtype)
    for name, value in weights.tensors.items():
        own[name].data.copy_(value)
