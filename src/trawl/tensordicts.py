"""TensorDicts made of tensors that are known to fit, and without what is private."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from trawl.keys import Key, nested

#: The constructor without its checks, which take longer than a step of a simple environment.
new_tensordict = getattr(TensorDict, "_new_unsafe", TensorDict)


def tensordict_of(
    entries: Mapping[Key, Any], batch_size: Sequence[int], names: Sequence[str | None]
) -> TensorDict:
    """Entries, by key, as a TensorDict without a device. They must have its batch size.

    Args:
        entries: tensors.
        batch_size: the batch size, also of nested TensorDicts.
        names: the names of its dimensions.
    """
    return _made(nested(entries), torch.Size(batch_size), list(names))


def _made(tree: Mapping[str, Any], batch_size: torch.Size, names: list[str | None]) -> TensorDict:
    source = {
        key: _made(value, batch_size, names) if isinstance(value, dict) else value
        for key, value in tree.items()
    }
    made: TensorDict = new_tensordict(source, batch_size=batch_size, names=list(names))
    return made


def drop_private(batch: TensorDictBase) -> TensorDictBase:
    """The batch without entries whose key has a part that begins with an underscore."""
    private = [key for key in batch.keys(True) if _is_private(key)]
    return batch.exclude(*private) if private else batch


def _is_private(key: Any) -> bool:
    return any(part.startswith("_") for part in ((key,) if isinstance(key, str) else key))
