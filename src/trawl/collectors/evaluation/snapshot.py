"""Copies of policies and weights, as they are at the call."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from trawl.weight_update.tensors import Weights, weights_of

POLICY = "policy"


def private_copy(policy: Any) -> Any:
    """A policy that evaluates while the original is trained.

    Args:
        policy: a module is copied, and the copy put into evaluation mode; anything else has no
            mode and no weights, and is used as it is.

    Raises:
        TypeError: if a module can't be copied.
    """
    if not isinstance(policy, nn.Module):
        return policy
    try:
        copied = copy.deepcopy(policy)
    except Exception as error:
        raise TypeError(
            f"policy {type(policy).__name__} can't be copied: {error}. Give policy_factory, a "
            "function that makes it, and pass its weights to each evaluation"
        ) from error
    return copied.eval()


def snapshot(source: Any) -> Weights:
    """A copy of weights on the CPU, which later updates of the original don't reach.

    Args:
        source: a module, a TensorDict, a nested mapping of tensors, or a state dict.

    Raises:
        TypeError: if it is none of these.
    """
    weights = weights_of(source)
    copies: dict[int, Tensor] = {}
    for value in weights.tensors.values():
        if id(value) not in copies:
            copies[id(value)] = value.detach().to("cpu", copy=True)
    tensors = {name: copies[id(value)] for name, value in weights.tensors.items()}
    return Weights(tensors, copy.deepcopy(weights.extra))


def snapshots(
    policy: Any, weights: Any, weights_dict: Mapping[str, Any] | None
) -> dict[str, Weights]:
    """Copies of all weights that an evaluation is to use, by model.

    Args:
        policy: the policy that was given when the evaluator was made, or None.
        weights: weights of the policy; None for those that ``policy`` has now.
        weights_dict: weights by model; the policy's take precedence over ``weights``.

    Returns:
        The copies. A policy made by a factory keeps the weights that it has, if none are given.

    Raises:
        TypeError: for weights of a wrong type, or of a policy that has none.
    """
    given = dict(weights_dict or {})
    if weights is not None:
        given.setdefault(POLICY, weights)
    if POLICY not in given and isinstance(policy, nn.Module):
        given[POLICY] = policy
    if POLICY in given and policy is not None and not isinstance(policy, nn.Module):
        raise TypeError(
            f"policy {type(policy).__name__} has no weights to change: it is evaluated as it is"
        )
    return {model: snapshot(source) for model, source in given.items()}
