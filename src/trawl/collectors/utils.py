"""Splitting of batches into trajectories."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, pad_sequence
from torch import Tensor

from trawl.keys import as_key, show_key


def split_trajectories(
    rollout_tensordict: TensorDictBase,
    *,
    prefix: Any = None,
    trajectory_key: Any = None,
    done_key: Any = None,
    as_nested: bool = False,
) -> TensorDictBase:
    """Splits a batch into its trajectories, one per row.

    Args:
        rollout_tensordict: a batch of any shape whose last dimension is time.
        prefix: key that ``"traj_ids"`` and ``"mask"`` are nested under. Default: ``"collector"``,
            if the batch has this key.
        trajectory_key: key of the trajectory ids. The mask is written to the same level. Default:
            ``(prefix, "traj_ids")``.
        done_key: for a batch without ids, the key under ``"next"`` of the flags that mark the
            ends of trajectories. Default: ``"done"``.
        as_nested: True to return nested tensors instead of padded ones.

    Returns:
        A TensorDict of shape ``(trajectories, longest)``. Shorter trajectories are padded with
        zeros, and the bool entry ``(prefix, "mask")`` is False in the padding. Ids are added if
        the batch had none. Frames without a trajectory (id -1) are left out; if no frames remain,
        the shape is ``(0, 0)``. If every trajectory fills a row of the batch, the result has the
        shape of the batch, and the mask is True everywhere. A leading dimension is added if time
        is the batch's only dimension.

    Raises:
        KeyError: if the batch has neither ids nor done flags.
        TypeError: if the trajectories can't be padded, for example because an entry is text.
        ValueError: if the batch has no time dimension.

    Examples:
        >>> from trawl.collectors import Collector
        >>> from trawl.collectors.utils import split_trajectories
        >>> with Collector("CartPole-v1", frames_per_batch=200) as collector:
        ...     trajectories = split_trajectories(next(iter(collector)))
        >>> trajectories["collector", "mask"].sum().item()
        200
    """
    if not rollout_tensordict.ndim:
        raise ValueError(
            "rollout_tensordict has no dimensions, but its last dimension must be time"
        )
    batch = rollout_tensordict.copy()
    if prefix is None and "collector" in batch.keys():  # noqa: SIM118 - a TensorDict is no dict
        prefix = "collector"
    root = () if prefix is None else as_key(prefix)
    ids_key = (*root, "traj_ids") if trajectory_key is None else as_key(trajectory_key)
    mask_key = (*ids_key[:-1], "mask")
    if batch.get(ids_key, None) is None:
        batch.set(ids_key, _ids_by_ends(batch, ids_key, done_key))
    length, ids = batch.shape[-1], batch.get(ids_key).reshape(batch.shape)
    # numel() of a TensorDict is at least 1, and an empty TensorDict can't be reshaped.
    empty = not batch.shape.numel()
    sizes = [] if empty else _run_lengths(ids.reshape(-1, length))
    if not empty and bool((ids >= 0).all()) and all(size == length for size in sizes):
        result = batch if batch.ndim > 1 else batch.unsqueeze(0)
        return _with_mask(result, mask_key, torch.ones(result.shape, dtype=torch.bool))
    cut = () if empty else batch.reshape(-1).split(sizes)
    pieces = [piece for piece in cut if piece.get(ids_key)[0] >= 0]
    if not pieces:
        return _with_mask(_none_of(batch), mask_key, torch.ones(0, 0, dtype=torch.bool))
    if as_nested:
        whole: TensorDictBase = TensorDict.lazy_stack(pieces, 0)
        return whole.densify(layout=torch.jagged) if hasattr(whole, "densify") else whole
    masked = [
        _with_mask(piece.copy(), mask_key, torch.ones(piece.shape, dtype=torch.bool))
        for piece in pieces
    ]
    try:
        result = pad_sequence(masked)
    except RuntimeError as error:
        raise TypeError(
            f"trajectories can't be padded: {error}. Entries without a fixed shape, such as texts, "
            "can be padded from tensordict 0.15 on: leave split_trajs out, and use "
            f"{show_key(ids_key)}, or trajs_per_batch with traj_format='cat'"
        ) from error
    return result.refine_names(None, None) if hasattr(result, "refine_names") else result


def _none_of(batch: TensorDictBase) -> TensorDictBase:
    """Returns a TensorDict with the entries of a batch, but without trajectories."""
    none: TensorDictBase = batch.apply(
        lambda value: value.new_empty(0, 0, *value.shape[batch.ndim :]), batch_size=[0, 0]
    )
    return none


def _ids_by_ends(batch: TensorDictBase, ids_key: tuple[str, ...], done_key: Any) -> Tensor:
    """Returns ids for trajectories that end at done flags, and at the ends of rows."""
    key = ("next", *as_key("done" if done_key is None else done_key))
    done = batch.get(key, None)
    if done is None:
        raise KeyError(
            f"can't tell trajectories apart: the batch has neither {show_key(ids_key)} nor "
            f"{show_key(key)}"
        )
    begins = done.reshape(*batch.shape, -1).any(-1).roll(1, -1)
    begins[..., 0] = True
    ids: Tensor = begins.reshape(-1).cumsum(0).reshape(batch.shape) - 1
    return ids


def _run_lengths(ids: Tensor) -> list[int]:
    """Returns the lengths of the runs of equal ids, row by row."""
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    where = starts.reshape(-1).nonzero().reshape(-1).tolist()
    return [b - a for a, b in zip(where, [*where[1:], ids.numel()], strict=True)]


def _with_mask(piece: TensorDictBase, key: tuple[str, ...], mask: Tensor) -> TensorDictBase:
    present = piece.get(key, None)
    mask = mask if piece.device is None else mask.to(piece.device)
    return piece.set(key, mask if present is None else present & mask.reshape(present.shape))
