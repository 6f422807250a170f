"""New weights for a policy, in whatever form they come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from trawl.collectors.config import warn
from trawl.keys import as_key


def chosen_weights(forms: Mapping[str, Any], model_id: str | None) -> Any:
    """The weights for the policy, from the one form in which they were given; or None.

    Args:
        forms: the arguments that weights may be given by, by name.
        model_id: the model that they are for.

    Raises:
        ValueError: if there are several, or ``weights_dict`` comes with a ``model_id``.
        KeyError: if a model is unknown.
    """
    given = {name: form for name, form in forms.items() if form is not None}
    if "policy_weights" in given:
        warn("policy_weights is an older name of policy_or_weights: use that", DeprecationWarning)
    if len(given) > 1:
        raise ValueError(f"give one of {', '.join(given)}, not several")
    by_model = given.get("weights_dict")
    if by_model is not None and model_id is not None:
        raise ValueError(f"weights_dict names its models; leave model_id={model_id!r} out")
    for name in {*(by_model or {}), model_id or "policy"} - {"policy"}:
        raise KeyError(f"there is no model {name!r}; this collector has 'policy'")
    return next(iter(given.values()), None) if by_model is None else by_model.get("policy")


@torch.no_grad()
def load_weights(module: nn.Module, weights: Any) -> None:
    """Copies weights into a module, across devices and dtypes.

    Args:
        module: the policy.
        weights: a module of the same structure, a TensorDict or a (nested) mapping of its
            parameters and buffers, or its state dict.

    Raises:
        TypeError: if the weights are none of these.
        KeyError: if names are missing or unknown.
        ValueError: if a shape differs.
    """
    new, own = check_weights(module, weights), _named(module)
    for name, value in new.items():
        own[name].copy_(value)


def plain_weights(weights: Any) -> dict[str, Tensor]:
    """Weights in any form as tensors of this moment on the CPU, by name.

    Raises:
        TypeError: if they are in none of the forms.
    """
    return {name: value.detach().cpu().clone() for name, value in _by_name(weights).items()}


def check_weights(module: nn.Module, weights: Any) -> dict[str, Tensor]:
    """The weights by name, if they fit the module.

    Raises:
        TypeError, KeyError, ValueError: as :func:`load_weights`.
    """
    new = _by_name(weights)
    own = _named(module)
    # A tensor under two names needs to be given once.
    given = {id(own[name]) for name in set(new) & set(own)}
    parameters = {name for name, p in module.named_parameters() if id(p) not in given}
    unknown, missing = set(new) - set(own), parameters - set(new)
    if unknown or missing:
        raise KeyError(
            f"weights don't fit the policy {type(module).__name__}: "
            f"missing {sorted(missing)}, unknown {sorted(unknown)}"
        )
    for name, value in new.items():
        if value.shape != own[name].shape:
            raise ValueError(
                f"weight {name!r} has shape {tuple(value.shape)}, but the policy's has "
                f"{tuple(own[name].shape)}"
            )
    return new


def _named(module: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers, tied ones under each of their names."""
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return {**dict(parameters), **dict(buffers)}


def _by_name(weights: Any) -> dict[str, Tensor]:
    if isinstance(weights, nn.Module):
        return _named(weights)
    if isinstance(weights, TensorDictBase):
        return {".".join(as_key(k)): v for k, v in weights.items(True, True)}
    if isinstance(weights, Mapping):
        return dict(_flatten(weights, ""))
    raise TypeError(
        "weights must be a module, a TensorDict or a dict of tensors, but they are "
        f"{type(weights).__name__}"
    )


def _flatten(weights: Mapping[str, Any], prefix: str) -> Any:
    for name, value in weights.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, Tensor):
            yield f"{prefix}{name}", value
        else:
            raise TypeError(f"weight {prefix}{name!r} is no tensor but {type(value).__name__}")
