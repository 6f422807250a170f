"""Extraction of weights from a model, and loading of weights into a model."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor, nn

from trawl.weights.layout import FlatLayout, ModuleWeights
from trawl.weights.tensors import (
    Weights,
    check_dtype,
    check_whole,
    set_extra_state,
    update_extra_state,
    weights_of,
)

_FORMS = ("tensordict", "state_dict")


class WeightStrategy:
    """Extracts the weights of a model in one form, and loads weights of any form into a model.

    Args:
        extract_as: ``"tensordict"`` for a nested TensorDict, ``"state_dict"`` for a flat dict.

    Raises:
        ValueError: for another form.

    Examples:
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
        """Returns the weights of a module, a TensorDict or a dict.

        Returns:
            Parameters and buffers, not copied, in the form of this strategy, together with a copy
            of the extra state of modules (``nn.Module.get_extra_state``). A TensorDict has it under
            the key ``"__extra_state__"`` of each module, such as ``("__extra_state__", "mean")``; a
            state dict has it under PyTorch's key ``"_extra_state"``. The result is None if
            ``source`` is None.

        Raises:
            TypeError: if ``source`` has no weights.
        """
        return None if source is None else weights_of(source).in_form(self.extract_as)

    def apply_weights(self, destination: Any, weights: Any, inplace: bool = True) -> None:
        """Loads weights into a module, or into a TensorDict or dict of tensors.

        Args:
            destination: the module, TensorDict or dict.
            weights: weights in any form. In a flat dict, names with dots belong to submodules. None
                changes nothing.
            inplace: whether values are copied into the existing tensors. Otherwise, a module gets
                new parameters and buffers, which share the memory of the given tensors. Extra state
                is copied in either case. A TensorDict or dict gets extra state only in the entries
                that it has for it.

        Raises:
            ValueError: if ``destination`` is of another type, a shape differs, or a dtype can't be
                cast.
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
                "destination must be a module, a TensorDict or a dict of tensors, but it is "
                f"{type(destination).__name__}"
            )


def check_strategy(name: str, form: str) -> None:
    """Raises a ``ValueError`` for an unknown form of weights."""
    if form not in _FORMS:
        raise ValueError(f"{name} must be 'tensordict' or 'state_dict', but it is {form!r}")


def load_weights(module: nn.Module, source: Any) -> None:
    """Copies weights into a module, across devices and dtypes.

    Args:
        module: the module to load into.
        source: weights in any of the forms of :func:`~trawl.weights.tensors.weights_of`.

    Raises:
        TypeError: if the weights are in none of the forms, or the module has weights that are
            not tensors.
        KeyError: if names are missing or unknown.
        ValueError: if a shape differs, or a dtype can't be cast.
    """
    check_whole(module)
    ModuleWeights(module).prepare(source)()


def _swap(module: nn.Module, weights: Weights) -> None:
    layout = FlatLayout.of(module)
    found = layout.match(weights.tensors, type(module).__name__)
    for entry, value in zip(layout.entries, found, strict=True):
        if value is None:
            continue
        # The new tensor replaces the old one under all of its names, so tied tensors stay tied.
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
                f"weight {name!r} has shape {tuple(value.shape)}, but in destination it has "
                f"shape {tuple(own[name].shape)}"
            )
        check_dtype(name, value.dtype, own[name].dtype)
    for name, value in weights.tensors.items():
        own[name].data.copy_(value)
    update_extra_state(destination, weights.extra)
