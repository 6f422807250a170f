"""Processes collected batches before they are delivered to the user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from copy import deepcopy
from types import NoneType
from typing import Any

import torch
from tensordict import TensorDictBase, is_leaf_nontensor, is_tensor_collection
from torch import Tensor

from trawl.collectors.config import CollectorConfig
from trawl.collectors.torchrl import has_fixed_rows
from trawl.collectors.utils import split_trajectories
from trawl.computed_tensor import ComputedTensor
from trawl.keys import MASK, Key
from trawl.rollout.cuts import mark_steps
from trawl.rollout.policy.device_transfer import moved
from trawl.rollout.ready.serving import by_environment, in_env_order, last_frames
from trawl.tensordicts import drop_private, has_lazy, padded

# Entry of a state that holds the state of ``postproc``.
_POSTPROC = "postproc"


class BatchDelivery:
    """Converts collected batches to the form that the options ask for.

    Args:
        config: the options.
        storing_device: device on which batches are delivered; None if they may be on any device.
        truncated_keys: keys of the environment's flags that ``set_truncated`` sets.
        first_ready: True if frames come in the order of their arrival, with the numbers of their
            environments. Otherwise, an entry of the same name is the environment's own.

    Attributes:
        first_ready: see above.
        postproc: the user's ``postproc``, moved to the storing device if it has a method ``to``.
    """

    def __init__(
        self,
        config: CollectorConfig,
        storing_device: torch.device | None,
        truncated_keys: Sequence[Key],
        first_ready: bool = False,
    ) -> None:
        self.first_ready = first_ready
        self.config = config
        self.storing_device = storing_device
        self.postproc = config.postproc
        self._truncated_keys = truncated_keys
        # What batches may have, as long as nothing is known about their keys.
        self._has_mask = self._has_private = True
        self._returned = SameTensorDict()
        # Device of the replay buffer's storage, once it is known.
        self._storage_device: Any = ...
        move = getattr(self.postproc, "to", None)
        if storing_device is not None and move is not None:
            move(storing_device)

    def expect(self, keys: Iterable[Key] | None) -> None:
        """Notes the keys that all collected batches have, so that others are not looked for.

        Args:
            keys: the keys; None if batches may have any.
        """
        found = None if keys is None else set(keys)
        self._has_mask = found is None or MASK in found
        self._has_private = found is None or any(p.startswith("_") for key in found for p in key)

    def process(self, batch: TensorDictBase, filled: int, ends: bool = True) -> Any:
        """Applies the options to a batch, in which only the first ``filled`` steps were taken.

        Args:
            batch: the batch.
            filled: see above.
            ends: False if the batch goes on with more steps.
        """
        config, steps = self.config, batch.shape[-1]
        batch = self._stored_truncated(batch, filled) if ends else self.stored(batch)
        if config.split_trajs or config.replay_buffer is not None:
            batch = batch if filled == batch.shape[-1] else batch[..., :filled]
        if config.split_trajs:
            ordered = in_env_order(batch) if self.first_ready else batch
            batch = split_trajectories(ordered, prefix="collector")
            if has_fixed_rows(config.replay_buffer):
                batch = padded(batch, steps - batch.shape[-1])
        elif config.replay_buffer is not None:
            batch = self.written(batch)
        return self.processed(batch)

    def check_storage(self, batch: TensorDictBase) -> None:
        """Checks that the replay buffer can hold batches of the form of ``batch``.

        Raises:
            ValueError: if the buffer's storage has several dimensions, but the frames are written
                in one.
        """
        if batch.get(MASK, None) is not None:
            self.config.check_storage("frames of environments that spend steps on resets")
        if batch.ndim == 1 and self.postproc is None:
            self.config.check_storage("frames without a dimension of environments")

    def written(self, batch: TensorDictBase) -> TensorDictBase:
        """Returns the frames of a batch in the shape that is written to the replay buffer."""
        found = experience(batch)
        # The last batch may have fewer steps, so the buffer can't hold rows of many steps.
        return found.reshape(-1) if self.config.exact_frames and found.ndim > 1 else found

    def processed(self, batch: TensorDictBase) -> Any:
        """Returns the result of ``postproc``, without private entries."""
        if self.postproc is None:
            return drop_private(batch) if self._has_private else batch
        result: Any = self.postproc(batch)
        if result is None:
            raise TypeError("postproc returned None; it must return the batch to deliver")
        return drop_private(result) if isinstance(result, TensorDictBase) else result

    def deliver(
        self, batch: TensorDictBase, filled: int, alone: bool = False, ends: bool = True
    ) -> Any:
        """Returns the result of :meth:`process`; with ``return_same_td``, always in one object.

        A step that is ``alone`` has a dimension of time only next to one of environments.
        """
        found = self._as_returned(self.process(batch, filled, ends))
        return found[0] if alone and batch.ndim == 1 else found

    def deliver_whole(self, trajectories: TensorDictBase) -> Any:
        """Applies ``postproc`` and ``return_same_td`` to whole trajectories.

        The trajectories were assembled from the results of :meth:`frames`.
        """
        return self._as_returned(self.processed(trajectories))

    def write(self, batch: Any, frames: int, alone: bool = False) -> int:
        """Writes a processed batch into the replay buffer, which may refuse one without frames.

        Args:
            batch: the batch.
            frames: number of its frames, unless ``postproc`` has changed it.
            alone: True if it is a single step.

        Returns:
            The number of frames that the buffer got.
        """
        buffer = self.config.replay_buffer
        if is_tensor_collection(batch):
            frames = batch.shape.numel()
        elif isinstance(batch, Sized) and not isinstance(batch, Mapping):
            frames = len(batch)
        if not frames:
            return 0
        if alone:
            (buffer.extend if batch.ndim else buffer.add)(batch)
        elif self.config.extend_buffer:
            buffer.extend(self._as_stored(batch))
        elif batch.ndim > 1 and getattr(getattr(buffer, "storage", None), "ndim", 1) > 1:
            # A buffer with more than one dimension has a row for each environment.
            for step in batch.split(1, -1):
                buffer.extend(step)
        else:
            for frame in batch.reshape(-1):
                buffer.add(frame)
        return frames

    def _as_stored(self, batch: Any) -> Any:
        """Returns a batch without a device as one on the storage's device, if its data are there.

        Storages compare this device with their own.
        """
        if not isinstance(batch, TensorDictBase) or batch.device is not None or has_lazy(batch):
            return batch
        if not isinstance(self._storage_device, (torch.device, NoneType)):
            storage = getattr(self.config.replay_buffer, "storage", None)
            # A storage may have no device, or "auto" before its first entry.
            self._storage_device = getattr(storage, "device", None)
        place = self._storage_device
        tensors = (value for value in batch.values(True, True) if isinstance(value, Tensor))
        if isinstance(place, torch.device) and all(value.device == place for value in tensors):
            return batch.to(place)
        return batch

    def _as_returned(self, processed: Any) -> Any:
        same = self.config.return_same_td and isinstance(processed, TensorDictBase)
        return self._returned.put(processed) if same else processed

    def count(self, batch: TensorDictBase, filled: int) -> int:
        """Returns the number of frames in the first ``filled`` steps of a batch."""
        return count_frames(batch, filled, self._has_mask)

    def frames(self, batch: TensorDictBase, filled: int) -> TensorDictBase:
        """Returns the collected rows of a batch, from which whole trajectories are assembled."""
        batch = self._stored_truncated(batch, filled)[..., :filled]
        # The mask is not needed: the rows that it excludes have trajectory id -1.
        return batch.exclude(MASK)

    def _stored_truncated(self, batch: TensorDictBase, filled: int) -> TensorDictBase:
        if self.config.set_truncated:
            self.truncate_last(batch, filled)
        return self.stored(batch)

    def stored(self, batch: TensorDictBase) -> TensorDictBase:
        """Moves the batch to the storing device, or clears ``batch.device`` if none is set."""
        if batch.device == self.storing_device:
            return batch
        if self.storing_device is None:
            return batch.clear_device_()
        return moved(batch, self.storing_device)

    def truncate_last(self, batch: TensorDictBase, filled: int) -> None:
        """Marks the last frame of each environment in ``filled`` steps as truncated and done."""
        taken = batch[..., :filled]
        last = last_frames(taken, self.first_ready)
        mark_steps(taken.get("next"), last, self._truncated_keys)

    def by_source(self, frames: TensorDictBase) -> list[tuple[int, TensorDictBase]]:
        """Returns frames of a worker, with the numbers of the sources in which time goes on."""
        return by_environment(frames) if self.first_ready else [(0, frames)]

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of ``postproc``, if it has one."""
        postproc: Any = self.postproc
        # A copy, because the state may refer to tensors that change.
        return {_POSTPROC: deepcopy(postproc.state_dict())} if self._has_state else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state of ``postproc``, if ``state`` has it."""
        postproc: Any = self.postproc
        if _POSTPROC in state and self._has_state:
            postproc.load_state_dict(state[_POSTPROC])

    @property
    def _has_state(self) -> bool:
        methods = (getattr(self.postproc, name, None) for name in ("state_dict", "load_state_dict"))
        return all(map(callable, methods))


def count_frames(batch: TensorDictBase, filled: int, may_have_mask: bool = True) -> int:
    """Counts the frames in the first ``filled`` steps of a batch, without masked rows."""
    mask = batch.get(MASK, None) if may_have_mask else None
    if mask is not None:
        return int(mask[..., :filled].sum())
    return int(batch.shape[:-1].numel()) * filled


def experience(batch: TensorDictBase) -> TensorDictBase:
    """Removes the steps that are masked out, such as steps that an environment spent on a reset.

    The environments may then differ in their numbers of steps, so the result has one dimension. A
    batch without a mask is returned unchanged.
    """
    mask = batch.get(MASK, None)
    return batch if mask is None else batch[mask].exclude(MASK)


class SameTensorDict:
    """A single TensorDict object that is returned for every batch, with the batch's content.

    If a batch has the same keys, shapes and dtypes as the previous batch, and only tensors with
    memory of their own, the object's memory is reused too.
    """

    def __init__(self) -> None:
        self._held: TensorDictBase | None = None

    def put(self, batch: TensorDictBase) -> TensorDictBase:
        """Copies the content of ``batch`` into the object, and returns the object."""
        held = self._held
        if held is None:
            held = self._held = batch.clone()
        elif (shapes := _shapes(batch)) is not None and shapes == _shapes(held):
            held.update_(batch)
        else:
            for key in list(held.keys()):
                held.del_(key)
            # A TensorDict accepts another batch size while it has no names and no content.
            held.names = None
            held.batch_size = batch.batch_size
            held.update(batch.clone())
            held.names = batch.names
        return held


def _shapes(batch: TensorDictBase) -> dict[Any, Any] | None:
    """Returns shapes and dtypes, or None if there are other data, which have no copies in place."""
    shapes = {}
    for key, value in batch.items(True, True, is_leaf=is_leaf_nontensor):
        if not isinstance(value, Tensor) or isinstance(value, ComputedTensor):
            return None
        shapes[key] = value.shape, value.dtype
    return shapes
