"""Exact numbers of frames: batches are cut where ``total_frames`` are reached."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from trawl.keys import MASK, NO_TRAJECTORY, TRAJ_IDS
from trawl.rollout.cuts import mark_steps


def first_frames(batch: TensorDictBase, count: int, truncate: bool = False) -> TensorDictBase:
    """Returns the first ``count`` frames of a batch, step by step.

    Steps without any of these frames are cut off. If the last step has frames of only some
    environments, the others are masked out and have trajectory id -1.

    Args:
        batch: a batch whose last dimension is time.
        count: number of frames to keep. Frames that are masked out already don't count.
        truncate: True to mark the last frame of each environment as truncated, if later frames of
            the environment are left out.
    """
    before = batch.get(MASK, None)
    mask = torch.ones(batch.shape, dtype=torch.bool, device=batch.device)
    mask = mask if before is None else before
    by_step = mask.movedim(-1, 0)
    order = by_step.reshape(-1).cumsum(0).view(by_step.shape)
    kept = (by_step & (order <= count)).movedim(0, -1)
    position = torch.arange(1, batch.shape[-1] + 1, device=kept.device)
    steps = int((position * kept).max()) if kept.numel() else 0
    if truncate:
        _truncate(batch, kept, mask)
    batch, kept = batch[..., :steps], kept[..., :steps]
    if before is None and kept.all():
        return batch
    ids = batch.get(TRAJ_IDS, None)
    if ids is not None:
        batch.set(TRAJ_IDS, torch.where(kept.to(ids.device), ids, NO_TRAJECTORY))
    return batch.set(MASK, kept)


def _truncate(batch: TensorDictBase, kept: Tensor, mask: Tensor) -> None:
    """Marks the last kept frame of each environment that has frames which are not kept."""
    cut = (mask & ~kept).any(-1, keepdim=True)
    position = torch.arange(1, batch.shape[-1] + 1, device=kept.device)
    last = kept & cut & (position == (position * kept).amax(-1, keepdim=True))
    mark_steps(batch.get("next"), last)


def shares(total: float, sizes: Sequence[int], units: Sequence[int]) -> list[int]:
    """Divides a number of frames among workers, in proportion to the sizes of their batches.

    Args:
        total: number of frames that are left.
        sizes: for each worker, the number of frames in one of its batches.
        units: for each worker, the number of frames that its part is a multiple of.

    Returns:
        For each worker, the number of frames to collect, which is at most the size of its batch.
        With units above 1, the sum may be less than ``total``.
    """
    whole = sum(sizes)
    if total >= whole:
        return list(sizes)
    found = [
        math.floor(total * size / whole / unit) * unit
        for size, unit in zip(sizes, units, strict=True)
    ]
    rest = int(total) - sum(found)
    for index, unit in enumerate(units):
        if rest >= unit and found[index] < sizes[index]:
            found[index] += unit
            rest -= unit
    return found
