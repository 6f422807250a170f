"""Types of the arguments that describe environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import torch


class EnvLike(Protocol):
    """Environment object of Gymnasium, EnvPool, TorchRL or Trawl."""

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        """Begins an episode."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Takes a step."""


#: A Gymnasium id, an environment, or a function that makes one of these.
EnvSource = str | EnvLike | Callable[..., Any]
#: The environments of one collector; a sequence of several is stepped as one batch.
EnvSources = EnvSource | Sequence[EnvSource]
#: Keyword arguments of the functions that make environments: one mapping for all, or a sequence
#: with one entry for each.
EnvKwargs = Mapping[str, Any] | Sequence[Mapping[str, Any] | None]
DeviceLike = torch.device | str | int


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Returns True if an argument is a list, with one entry for each environment or worker.

    Any sequence except a string counts as a list, because lists in Hydra configurations are not
    instances of ``list``.
    """
    return isinstance(value, Sequence) and not isinstance(value, str)
