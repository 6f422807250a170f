"""Stacks of frames that are computed from batches without stacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor


def dense_stacks(
    batches: Sequence[TensorDictBase], key: Any, size: int, padding: str = "reset"
) -> Tensor:
    """Returns the stacks after the steps of batches without stacks, with time as dimension 1."""
    roots, after = (torch.cat([b[name] for b in batches], 1) for name in (key, ("next", key)))
    done = torch.cat([b["next", "done"] for b in batches], 1).squeeze(-1)
    found = torch.zeros(*after.shape[:2], size, *after.shape[2:], dtype=after.dtype)
    for env in range(len(after)):
        frames: list[Tensor] = []
        for step in range(after.shape[1]):
            if not frames:
                first = roots[env, step]
                blank = first if padding == "reset" else torch.zeros_like(first)
                frames = [*[blank] * (size - 1), first]
            frames = [*frames[1:], after[env, step]]
            found[env, step] = torch.stack(frames)
            if done[env, step]:
                frames = []
    return found
