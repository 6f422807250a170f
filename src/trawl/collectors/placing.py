"""The policy on its device, compiled as was asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Transform = Callable[[Callable[..., Any]], Callable[..., Any]]


def on_device(policy: Any, device: torch.device | None) -> Any:
    """The policy on ``device``: itself if it is there, else a copy."""
    if device is None or all(tensor.device == device for tensor in tensors_of(policy)):
        return policy
    return copy.deepcopy(policy).to(device)


def tensors_of(policy: Any) -> list[Tensor]:
    """The parameters and buffers of the policy, if it is a module."""
    if not isinstance(policy, nn.Module):
        return []
    return [*policy.parameters(), *policy.buffers()]


def compiler(
    compile_policy: bool | Mapping[str, Any] | None,
    cudagraph_policy: bool | Mapping[str, Any] | None,
    device: torch.device | None,
) -> Transform | None:
    """What makes the policy's function faster, or None.

    Args:
        compile_policy: whether to compile it, or arguments of ``torch.compile``.
        cudagraph_policy: whether to run it as a CUDA graph, or arguments of ``CudaGraphModule``.
        device: where the policy runs.

    Raises:
        ValueError: for a CUDA graph on another device.
    """
    if cudagraph_policy not in (None, False):
        if device is None or device.type != "cuda":
            raise ValueError(
                f"cudagraph_policy needs a policy_device of type cuda, but it is {device}"
            )
        arguments = dict(cudagraph_policy) if isinstance(cudagraph_policy, Mapping) else {}

        def graph(call: Callable[..., Any]) -> Callable[..., Any]:
            from tensordict.nn import CudaGraphModule

            compiled = torch.compile(call, **_options(compile_policy)) if compile_policy else call
            captured: Callable[..., Any] = CudaGraphModule(compiled, **arguments)
            return captured

        return graph
    if compile_policy in (None, False):
        return None
    return lambda call: torch.compile(call, **_options(compile_policy))


def _options(argument: bool | Mapping[str, Any] | None) -> dict[str, Any]:
    return dict(argument) if isinstance(argument, Mapping) else {}
