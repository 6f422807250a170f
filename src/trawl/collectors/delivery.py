"""What becomes of a batch between the loop and the user."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase

from trawl.collectors.config import CollectorConfig
from trawl.collectors.returned import Returned
from trawl.collectors.utils import split_trajectories
from trawl.tensordicts import drop_private

_MASK = ("collector", "mask")


class Delivery:
    """Makes of a batch as it was collected what the options ask for.

    Args:
        config: the options.
        storing_device: where batches are delivered; None for no device in particular.
        truncated_keys: the flags that ``set_truncated`` sets.

    Attributes:
        postproc: the user's function of a batch, on the storing device if it can be moved.
    """

    def __init__(
        self,
        config: CollectorConfig,
        storing_device: torch.device | None,
        truncated_keys: list[Any],
    ) -> None:
        self.config = config
        self.storing_device = storing_device
        self.postproc = config.postproc
        self._truncated_keys = truncated_keys
        self._returned = Returned()
        move = getattr(self.postproc, "to", None)
        if storing_device is not None and move is not None:
            move(storing_device)

    def process(self, batch: TensorDictBase, filled: int) -> Any:
        """The batch as the user wants it; its first ``filled`` rows are frames."""
        config = self.config
        batch = self._stored_truncated(batch, filled)
        if config.split_trajs or config.replay_buffer is not None:
            batch = batch if filled == batch.shape[-1] else batch[..., :filled]
        if config.split_trajs:
            batch = split_trajectories(batch, prefix="collector")
        elif config.replay_buffer is not None:
            batch = experience(batch)
        return self.processed(batch)

    def processed(self, batch: TensorDictBase) -> Any:
        """What ``postproc`` makes of a batch, without what is private."""
        result: Any = batch
        if self.postproc is not None:
            result = self.postproc(batch)
            if result is None:
                raise TypeError("postproc returned None; it must return the batch to deliver")
        return drop_private(result) if isinstance(result, TensorDictBase) else result

    def deliver(self, batch: TensorDictBase, filled: int) -> Any:
        """The same as :meth:`process`, as the object that the user is to get."""
        return self._as_returned(self.process(batch, filled))

    def deliver_whole(self, trajectories: TensorDictBase) -> Any:
        """The same of whole trajectories, which were put together of what :meth:`frames` gave."""
        return self._as_returned(self.processed(trajectories))

    def _as_returned(self, processed: Any) -> Any:
        same = self.config.return_same_td and isinstance(processed, TensorDictBase)
        return self._returned.put(processed) if same else processed

    def frames(self, batch: TensorDictBase, filled: int) -> TensorDictBase:
        """The frames that trajectories are put together of, in rows as they were collected."""
        batch = self._stored_truncated(batch, filled)[..., :filled]
        # Rows of no trajectory are known by their ids as well.
        return batch.exclude(_MASK)

    def _stored_truncated(self, batch: TensorDictBase, filled: int) -> TensorDictBase:
        if self.config.set_truncated:
            self.truncate_last(batch, filled)
        return self.stored(batch)

    def stored(self, batch: TensorDictBase) -> TensorDictBase:
        """The batch on the storing device; without one it is on no device in particular."""
        if batch.device == self.storing_device:
            return batch
        if self.storing_device is None:
            return batch.clear_device_()
        return batch.to(self.storing_device)

    def truncate_last(self, batch: TensorDictBase, filled: int) -> None:
        """Says of the last of ``filled`` rows that the episode was cut off there."""
        row = batch[..., filled - 1]
        last, mask = row.get("next"), row.get(_MASK, None)
        for key in self._truncated_keys:
            done_key = "done" if isinstance(key, str) else (*key[:-1], "done")
            for flags in (last.get(key), last.get(done_key)):
                # What is no experience stays as it is.
                flags |= True if mask is None else mask.reshape(_like(mask, flags))


def _like(mask: torch.Tensor, flags: torch.Tensor) -> tuple[int, ...]:
    """The shape of a mask that fits flags with more dimensions."""
    return (*mask.shape, *[1] * (flags.ndim - mask.ndim))


def count_frames(batch: TensorDictBase, filled: int) -> int:
    """Frames of experience in a batch as it was collected."""
    mask = batch.get(_MASK, None)
    if mask is not None:
        return int(mask[..., :filled].sum())
    return int(batch.shape[:-1].numel()) * filled


def experience(batch: TensorDictBase) -> TensorDictBase:
    """What a learner may draw from: steps that an environment spent on resetting are not.

    Without them the rows are of different lengths, so what is left is flat.
    """
    mask = batch.get(_MASK, None)
    return batch if mask is None else batch[mask].exclude(_MASK)
