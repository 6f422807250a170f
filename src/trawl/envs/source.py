"""Base class of vector environments of other libraries, for packages that add a kind of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from typing_extensions import override

from trawl.envs.seeding import next_seed


class Source(VectorEnv[Any, Any, Any], ABC):
    """Base class of vector environments of another library.

    A subclass sets ``num_envs``, ``single_observation_space`` and ``single_action_space``, and
    implements :meth:`begin` and :meth:`step`. Then all options of the collectors apply to it. Each
    value that the methods take or return has a row for each environment.

    The state of the environments can be captured if all attributes are plain data, arrays, tensors
    or generators. Otherwise, define ``get_state()``, which returns such data, and
    ``set_state(state)``.

    Attributes:
        num_envs: number of environments.
        single_observation_space: observation space of one environment.
        single_action_space: action space of one environment.
        device: None if the data are numpy arrays. If they are torch tensors, their device.
        autoreset_mode: when new episodes begin. With ``"Disabled"``, :meth:`begin` begins each of
            them. With ``"SameStep"``, the step that ends an episode returns the first observation
            of the next one, and the last one in ``info["final_obs"]``. With ``"NextStep"``, the
            step after the end is only a reset, whose reward and flags are zero.
        can_restart: True if :meth:`begin` can begin an episode in some of the environments at any
            time, although the environments begin episodes by themselves. With ``"Disabled"``, it
            must.

    Examples:
        >>> import numpy as np
        >>> from gymnasium import spaces
        >>> from trawl.envs import GymEnv, Source
        >>> class Counters(Source):
        ...     single_observation_space = spaces.Box(0, 9, (1,), np.float32)
        ...     single_action_space = spaces.Discrete(2)
        ...     def __init__(self, num_envs):
        ...         self.num_envs, self.counts = num_envs, np.zeros(num_envs)
        ...     def begin(self, mask, seeds):
        ...         self.counts = np.where(mask, 0, self.counts)
        ...         return self.counts[:, None].astype(np.float32), {}
        ...     def step(self, actions):
        ...         self.counts = self.counts + actions
        ...         over, late = self.counts == 9, np.zeros(self.num_envs, bool)
        ...         return self.counts[:, None].astype(np.float32), actions * 1.0, over, late, {}
        >>> GymEnv(Counters(4)).rollout(5)["observation"].shape
        torch.Size([4, 5, 1])
    """

    autoreset_mode: AutoresetMode | str = AutoresetMode.DISABLED
    can_restart: bool = False
    device: torch.device | str | None = None

    @abstractmethod
    def begin(self, mask: Any, seeds: list[int] | None) -> tuple[Any, dict[str, Any]]:
        """Begins episodes where ``mask`` is True.

        The entries of ``options`` that a user passes to a reset become further keyword arguments.

        Args:
            mask: bool, with a row for each environment. If ``autoreset_mode`` isn't
                ``"Disabled"``, and ``can_restart`` is False, the mask is always True.
            seeds: a seed for each environment, or None.

        Returns:
            The observations of all environments, and the info. Where the mask is False, nothing
            must change: neither the environment nor its observation.
        """

    @abstractmethod
    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Takes a step in each environment.

        Args:
            actions: the actions, batched as in Gymnasium's vector environments.

        Returns:
            The observations, the rewards, the flags ``terminated`` and ``truncated``, and the info.
        """

    @override
    def reset(
        self, *, seed: int | Sequence[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins episodes in all environments, or in those of ``options["reset_mask"]``.

        Raises:
            TypeError: if :meth:`begin` returned anything but the observations and the info.
        """
        given = dict(options or {})
        mask = given.pop("reset_mask", None)
        if mask is None and self.device is None:
            mask = np.ones(self.num_envs, np.bool_)
        elif mask is None:
            mask = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        if isinstance(seed, int):
            seeds = [seed]
            while len(seeds) < self.num_envs:
                seeds.append(next_seed(seeds[-1]))
            seed = seeds
        found = self.begin(mask, None if seed is None else list(seed), **given)
        if not isinstance(found, tuple) or len(found) != 2:
            what = f"{len(found)} values" if isinstance(found, tuple) else type(found).__name__
            raise TypeError(
                f"begin of {self} returned {what}, but it must return (observations, info)"
            )
        if found[1] is not None and not isinstance(found[1], Mapping):
            raise TypeError(
                f"begin of {self} returned {found[1]!r} as its info, but an info must be a dict"
            )
        return found

    @cached_property
    def observation_space(self) -> Space[Any]:  # type: ignore[override]
        """Space of the observations of all environments."""
        return batch_space(self.single_observation_space, self.num_envs)

    @cached_property
    def action_space(self) -> Space[Any]:  # type: ignore[override]
        """Space of the actions of all environments."""
        return batch_space(self.single_action_space, self.num_envs)


def check_source(env: Any) -> None:
    """Checks that a :class:`Source` has what its class can't say.

    Raises:
        TypeError: if an attribute is missing, or has the wrong type; the message names it.
    """
    base = getattr(env, "unwrapped", env)
    if not isinstance(base, Source):
        return
    name = type(base).__name__
    count = getattr(base, "num_envs", None)
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
        raise TypeError(f"{name}.num_envs must be a positive integer, but it is {count!r}")
    modes = [mode.value for mode in AutoresetMode]
    if base.autoreset_mode not in [*AutoresetMode, *modes]:
        raise TypeError(
            f"{name}.autoreset_mode must be one of {modes}, but it is {base.autoreset_mode!r}"
        )
    for kind in ("observation", "action"):
        space = getattr(base, f"single_{kind}_space", None)
        if not isinstance(space, Space):
            raise TypeError(
                f"{name}.single_{kind}_space must be a gymnasium.Space, but it is {space!r}"
            )
