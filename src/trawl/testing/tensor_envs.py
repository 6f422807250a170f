"""Vector environment of torch tensors that numbers its steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import Tensor

from trawl.testing.envs import NumberedEnv


class NumberedTorchEnv:
    """Vector environment whose data are torch tensors, made of :class:`NumberedEnv`.

    It has Gymnasium's vector API, and needs no simulator.

    Args:
        num_envs: number of environments.
        lengths: number of steps of each episode; environment ``i`` begins with entry ``i``.
        ends: flags at the end of each episode; see :class:`NumberedEnv`.
        autoreset_mode: mode in which it begins new episodes.
        device: device of its data.

    Attributes:
        options_seen: names of the options that resets had.

    Examples:
        >>> from trawl.collectors import Collector
        >>> from trawl.testing import NumberedTorchEnv
        >>> env = NumberedTorchEnv(2, lengths=[2])
        >>> with Collector(env, frames_per_batch=6) as collector:
        ...     batch = next(iter(collector))
        >>> batch["next", "reward"].squeeze(-1).tolist()
        [[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]
    """

    def __init__(
        self,
        num_envs: int,
        lengths: Sequence[int] = (5,),
        ends: Sequence[str] = ("terminated",),
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_envs = num_envs
        self.device = torch.device(device)
        mode = AutoresetMode(autoreset_mode)
        self.metadata = {"autoreset_mode": mode}
        makers = [
            partial(NumberedEnv, i, [*lengths[i % len(lengths) :], *lengths], ends)
            for i in range(num_envs)
        ]
        self._inner = SyncVectorEnv(makers, autoreset_mode=mode)
        self.single_observation_space = self._inner.single_observation_space
        self.single_action_space = self._inner.single_action_space
        self.options_seen: set[str] = set()

    @property
    def unwrapped(self) -> NumberedTorchEnv:
        """The environment itself."""
        return self

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Tensor, dict[str, Any]]:
        """Resets all environments, or those of ``options["reset_mask"]`` or ``["env_idx"]``."""
        options = dict(options or {})
        self.options_seen |= options.keys()
        rows = options.pop("env_idx", None)
        mask = options.pop("reset_mask", None)
        if rows is not None:
            mask = torch.zeros(self.num_envs, dtype=torch.bool)
            mask[rows.cpu()] = True
        if mask is not None:
            options["reset_mask"] = mask.cpu().numpy()
        obs, _ = self._inner.reset(seed=seed, options=options or None)
        return self._tensor(obs), {}

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Steps all environments."""
        obs, *rest, info = self._inner.step(actions.cpu().numpy())
        reward, terminated, truncated = map(self._tensor, rest)
        given: dict[str, Any] = {}
        if "final_obs" in info:
            final = np.array(obs)
            for row in np.flatnonzero(info["_final_obs"]):
                final[row] = info["final_obs"][row]
            given["final_obs"] = self._tensor(final)
        return self._tensor(obs), reward, terminated, truncated, given

    def close(self) -> None:
        """Closes the environments."""
        self._inner.close()

    def _tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(np.array(array)).to(self.device)
