"""Snapshots of policies and weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from trawl.weights.tensors import Weights, weights_of

POLICY = "policy"


def private_copy(policy: Any) -> Any:
    """Returns a policy that can evaluate while the original is trained.

    Args:
        policy: the policy. A module is copied, and the copy is put into evaluation mode. Any other
            policy has no mode and no weights, and is returned unchanged.

    Raises:
        TypeError: if a module can't be copied.
    """
    if not isinstance(policy, nn.Module):
        return policy
    try:
        copied = copy.deepcopy(policy)
    except Exception as error:
        raise TypeError(
            f"policy {type(policy).__name__} can't be copied: {error}. Pass policy_factory, a "
            "function that makes the policy, and pass its weights to each evaluation"
        ) from error
    return copied.eval()


def snapshot(source: Any) -> Weights:
    """Returns a copy of weights on the CPU, which later updates of the original don't change.

    Args:
        source: a module, a TensorDict, a nested mapping of tensors, or a state dict.

    Raises:
        TypeError: if ``source`` is none of these.
    """
    return weights_of(source).copy()


def check_different(policy: Any, first: Any, second: Any) -> None:
    """Refuses to compare a policy with itself.

    Args:
        policy: the policy that was passed to the evaluator's constructor, or None.
        first: weights of the first policy; None for the weights of ``policy``.
        second: weights of the second policy; None for the weights of ``policy``.

    Raises:
        ValueError: if both policies are the same object, or there is no second policy.
    """
    if policy is None and second is None:
        raise ValueError(
            "compare() needs two policies, but second is None, and an evaluator with a "
            "policy_factory has no weights of its own to compare with: pass the weights of both "
            "policies"
        )
    one, other = (policy if weights is None else weights for weights in (first, second))
    if one is other:
        what = "the evaluator's own policy" if one is policy else f"the same {type(one).__name__}"
        raise ValueError(
            f"compare() needs two different policies, but first and second are both {what}: pass "
            "another policy or its weights, such as a copy made earlier"
        )


def snapshots(
    policy: Any, weights: Any, weights_dict: Mapping[str, Any] | None
) -> dict[str, Weights]:
    """Copies all weights that an evaluation will use.

    Args:
        policy: the policy that was passed to the evaluator's constructor, or None.
        weights: weights of the policy; None for the current weights of ``policy``.
        weights_dict: weights by model. Weights of the policy in this mapping take precedence over
            ``weights``.

    Returns:
        The copies, by model. If no weights are given for a policy made by a factory, there is no
        copy, and the policy keeps its weights.

    Raises:
        TypeError: if weights have the wrong type, or the policy has no weights to replace.
    """
    given = dict(weights_dict or {})
    if weights is not None:
        given.setdefault(POLICY, weights)
    if POLICY not in given and isinstance(policy, nn.Module):
        given[POLICY] = policy
    if POLICY in given and policy is not None and not isinstance(policy, nn.Module):
        raise TypeError(
            f"policy {type(policy).__name__} has no weights to replace, because it is not a module"
        )
    return {model: snapshot(source) for model, source in given.items()}
