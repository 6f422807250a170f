"""Transforms that the option ``postproc`` applies to each batch before its delivery."""

from __future__ import annotations

import operator
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from trawl.data.trajectories import ends, flagged, leaves_named
from trawl.keys import DONE_KEYS, MASK, TRAJ_IDS
from trawl.tensordicts import broadcastable, of_frames


class MultiStep(nn.Module):
    r"""Combines up to ``n_steps`` successive steps into one, for n-step returns.

    The reward at time :math:`t` becomes the discounted sum of the rewards of :math:`k` steps:

    .. math:: r_t + \gamma r_{t+1} + \dots + \gamma^{k-1} r_{t+k-1}

    All other entries under ``"next"``, including the flags, are taken from the last of these
    steps. :math:`k` is ``n_steps``, or the number of remaining steps if the trajectory or the
    batch ends earlier.

    An n-step target then bootstraps with :math:`\gamma^k V(s_{t+k})` (Sutton and Barto,
    *Reinforcement Learning: An Introduction*, 2nd ed., eq. 7.1). A combined step never crosses the
    end of an episode, a change of trajectory id, or an edge of the mask. With whole trajectories
    (``trajs_per_batch``), the end of a batch never shortens a combined step.

    Args:
        gamma: discount of each step, from 0 to 1.
        n_steps: maximum number of steps to combine, at least 1.

    Raises:
        TypeError: if ``gamma`` is not a number, or ``n_steps`` is not an integer.
        ValueError: if ``gamma`` or ``n_steps`` is out of range.

    Examples:
        >>> import torch
        >>> from trawl.collectors import Collector
        >>> from trawl.data import MultiStep
        >>> with Collector(
        ...     "Pendulum-v1", frames_per_batch=5, postproc=MultiStep(gamma=0.99, n_steps=3)
        ... ) as collector:
        ...     batch = collector.next()
        >>> batch["steps_to_next_obs"]
        tensor([3, 3, 3, 2, 1])
    """

    def __init__(self, gamma: float, n_steps: int) -> None:
        super().__init__()
        if isinstance(n_steps, bool) or not hasattr(n_steps, "__index__"):
            raise TypeError(f"n_steps must be an integer, but it is {n_steps!r}")
        if operator.index(n_steps) < 1:
            raise ValueError(f"n_steps must be at least 1, but it is {n_steps}")
        if isinstance(gamma, bool) or not hasattr(gamma, "__float__"):
            raise TypeError(f"gamma must be a number, but it is {gamma!r}")
        if not 0 <= float(gamma) <= 1:
            raise ValueError(f"gamma must be from 0 to 1, but it is {gamma}")
        self.gamma = float(gamma)
        self.n_steps = operator.index(n_steps)

    def forward(self, batch: TensorDictBase) -> TensorDictBase:
        """Returns the batch with combined steps.

        The result has these new entries:

        - ``("next", "original_reward")``: the reward of the first step.
        - ``"steps_to_next_obs"`` (int64): the number of steps that were combined.
        - ``"gamma"`` (PyTorch's default dtype): the discount of the value after the last step.
        - ``"nonterminal"`` (bool): False in padding, and where the episode terminated within the
          combined steps. If the batch has no ``"terminated"``, this entry is False wherever the
          episode ended within the combined steps.

        Args:
            batch: frames of shape ``(*batch_size, time)``; the batch is not modified.

        Returns:
            A batch of the same shape, with the combined steps under ``"next"``.

        Raises:
            KeyError: if the batch has no reward, or no flag that marks the end of an episode.
            ValueError: if the batch has no time dimension.
        """
        if not batch.ndim:
            raise ValueError(
                "MultiStep needs a batch with a time dimension, but this batch has none"
            )
        steps = self._steps(batch)
        following = self._following(batch.get("next"), steps)
        result = batch.copy().set("next", following)
        result.set("steps_to_next_obs", steps)
        result.set("gamma", (self.gamma ** steps.double()).to(torch.get_default_dtype()))
        result.set("nonterminal", self._nonterminal(batch, following))
        return result

    def _steps(self, batch: TensorDictBase) -> Tensor:
        """Returns the number of steps to combine from each frame, as int64 of the batch's shape."""
        time = batch.shape[-1]
        last = ends(batch)
        for key in (TRAJ_IDS, MASK):
            marks = of_frames(batch, key)
            if marks is not None:
                last[..., :-1] |= marks[..., 1:] != marks[..., :-1]
        last[..., -1:] = True
        at = torch.arange(time, device=last.device).expand(batch.shape)
        # For each frame, the time of the first end of a trajectory at or after this frame.
        end = at.masked_fill(~last, time).flip(-1).cummin(-1).values.flip(-1)
        return (end - at + 1).clamp(max=self.n_steps)

    def _following(self, following: TensorDictBase, steps: Tensor) -> TensorDictBase:
        rewards = leaves_named(following, ("reward",))
        if not rewards:
            raise KeyError("the batch has no ('next', 'reward') to sum up")
        result = _later(following.exclude(*rewards), steps - 1)
        for key in rewards:
            reward = following.get(key)
            path = (key,) if isinstance(key, str) else key
            result.set(key, self._sum(reward, steps))
            result.set((*path[:-1], f"original_{path[-1]}"), reward)
        return result

    def _sum(self, reward: Tensor, steps: Tensor) -> Tensor:
        """Returns, for each frame, the discounted sum of ``steps`` rewards from this frame on."""
        axis = steps.ndim - 1
        total = reward.clone()
        for ahead in range(1, min(self.n_steps, reward.shape[axis])):
            taken = broadcastable(steps > ahead, reward)
            shifted = torch.zeros_like(reward)
            size = reward.shape[axis] - ahead
            shifted.narrow(axis, 0, size).copy_(reward.narrow(axis, ahead, size))
            total += torch.where(taken, self.gamma**ahead * shifted, 0)
        return total

    def _nonterminal(self, batch: TensorDictBase, following: TensorDictBase) -> Tensor:
        names = ("terminated",) if leaves_named(following, ("terminated",)) else DONE_KEYS
        going_on = ~flagged(batch, following, names)
        mask = of_frames(batch, MASK)
        return going_on if mask is None else going_on & mask

    def extra_repr(self) -> str:
        """Returns the arguments as text, for ``repr``."""
        return f"gamma={self.gamma}, n_steps={self.n_steps}"


def _later(frames: TensorDictBase, ahead: Tensor) -> TensorDictBase:
    """Returns, for each frame, the frame that is ``ahead`` steps later."""
    flat: Any = frames.reshape(-1)
    index = torch.arange(len(flat), device=ahead.device).reshape(ahead.shape) + ahead
    later: TensorDictBase = flat[index.reshape(-1)].reshape(frames.shape)
    if frames.names is not None:
        later.names = frames.names
    return later
