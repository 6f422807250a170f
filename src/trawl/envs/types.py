"""Types of the arguments that stand for environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import torch


class EnvLike(Protocol):
    """An environment that exists already: of Gymnasium, EnvPool, TorchRL or Trawl."""

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        """Begins an episode."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Takes a step."""


#: A Gymnasium id, an environment, or a function that makes one of these.
EnvSource = str | EnvLike | Callable[..., Any]
#: The environments of one collector: several are stepped as one batch.
EnvSources = EnvSource | Sequence[EnvSource]
#: Keyword arguments of the functions that make environments: for all of them, or one for each.
EnvKwargs = Mapping[str, Any] | Sequence[Mapping[str, Any] | None]
DeviceLike = torch.device | str | int


def is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Tells whether an argument has an entry for each environment or worker.

    Lists of Hydra's configurations are sequences, but no ``list``.
    """
    return isinstance(value, Sequence) and not isinstance(value, str)
