"""Devices of a collector, and compilation of its policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trawl.collectors.config import CollectorConfig
from trawl.devices import optional_device

Transform = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Devices:
    """Devices of a collector, resolved by :func:`resolve_devices`."""

    policy: torch.device | None
    env: torch.device | None
    storing: torch.device | None


def resolve_devices(
    config: CollectorConfig, own: Mapping[str, Any] | None = None, here: bool = True
) -> Devices:
    """Resolves the devices of the policy, the environment and the stored batches.

    ``device`` is the default for all three. If neither ``device`` nor ``storing_device`` is given,
    and the policy and the environment have the same device, batches are stored on that device.

    Args:
        config: the options.
        own: options that take precedence over ``config``.
        here: True if the policy and the environment are on this machine.

    Raises:
        TypeError: if an option is not a device.
        ValueError: if it is not a device, or if this machine does not have the device.
    """

    def given(name: str, here: bool = here) -> torch.device | None:
        return optional_device(name, (own or {}).get(name, getattr(config, name)), here)

    general = given("device")
    policy = given("policy_device") or general
    env = given("env_device") or general
    # Batches of workers on other machines are stored on this machine.
    storing = given("storing_device", True) or given("device", True)
    if storing is None and env is not None and env == policy:
        storing = env
    return Devices(policy, env, storing)


def compiler(
    compile_policy: bool | Mapping[str, Any] | None,
    cudagraph_policy: bool | Mapping[str, Any] | None,
    device: torch.device | None,
) -> Transform | None:
    """Returns a function that compiles or captures the policy, or None if neither is requested.

    Args:
        compile_policy: whether to compile the policy, or arguments of ``torch.compile``.
        cudagraph_policy: whether to run the policy as a CUDA graph, or arguments of
            ``CudaGraphModule``.
        device: device that the policy runs on.

    Raises:
        ValueError: if a CUDA graph is requested, but ``device`` is not a CUDA device.
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
