"""Warnings of a worker, which its driver shows."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from trawl.backends.base import Port
from trawl.collectors.requests import WorkerWarning


def forward_warnings(port: Port) -> None:
    """Forwards warnings to the driver, whose filters decide which warnings are shown."""

    def send(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
        port.send(WorkerWarning(str(message), category))

    warnings.resetwarnings()
    warnings.simplefilter("default")
    for ignored in (DeprecationWarning, PendingDeprecationWarning, ImportWarning):
        warnings.simplefilter("ignore", ignored)
    warnings.showwarning = send


def unreached_networks(networks: Iterable[nn.Module], models: Iterable[Any]) -> list[str]:
    """Returns a warning if weight updates don't reach networks that the policy calls.

    Args:
        networks: networks that the policy calls.
        models: models that receive weights.
    """
    modules = [model.modules() for model in models if isinstance(model, nn.Module)]
    reached = {part for parts in modules for part in parts}
    found = [one for one in networks if one not in reached]
    if not found:
        return []
    names = ", ".join(sorted({type(one).__name__ for one in found}))
    return [
        f"the policy calls a network that is not part of it ({names}): workers act with a "
        "copy of the network, and weight updates don't reach the copy. Pass the network "
        "itself as the policy, for example as TensorDictModule(network, ['observation'], "
        "['action']). If its weights stay as they are, call network.requires_grad_(False)"
    ]
