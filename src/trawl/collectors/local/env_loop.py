"""The environment of a collector without workers, and the loop that steps it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from trawl.collectors.config import CollectorConfig
from trawl.collectors.driver.budget import FrameBudget
from trawl.collectors.driver.policy_version import stamp
from trawl.collectors.torchrl import names
from trawl.envs.base import TensorDictEnv
from trawl.envs.generators import RandomStream
from trawl.envs.reset_kwargs import with_reset_kwargs
from trawl.envs.seeding import rebuilt_seed, stream_seed
from trawl.keys import STEP_COUNT, Key, as_key
from trawl.rollout.loop import Rollout
from trawl.rollout.policy.policy import Policy
from trawl.rollout.restarts import EnvRestarts


class EnvLoop:
    """An environment and the loop that steps it: making, resetting, seeding, numbering.

    Args:
        config: options of the collector.
        budget: the collector's frames.
        make: function that makes the environment.
        register: function that tells an environment of its collector.
        counts_twice: True if episodes can be limited even if the environment counts its steps
            itself.

    Attributes:
        env: the environment.
        device: device to which a new environment is moved; None to leave it where it is.
        rollout: the inner loop.
        module: the policy that acts.
        policy: the same, as the loop calls it.
        restarts: the environments that were made anew; None if none are.
        seed: the seed, whether it is static, and the number of restarts before it was set; None if
            no seed was set.
        hook: function that is called before each batch; None for no function.
        at_start: True if all environments have been reset since the last batch.
        next_episodes: the number of the next episode of each environment, unless a process has it.
    """

    rollout: Rollout
    module: Any
    policy: Policy

    def __init__(
        self,
        config: CollectorConfig,
        budget: FrameBudget,
        make: Callable[[], Any],
        register: Callable[[Any], None],
        counts_twice: bool,
    ) -> None:
        self._config, self._budget = config, budget
        self._make, self._register, self._counts_twice = make, register, counts_twice
        self.device: torch.device | None = None
        self.restarts: EnvRestarts | None = None
        self.seed: tuple[int, bool, int] | None = None
        self.hook: Callable[[], Any] | None = config.pre_collect_hook
        self.at_start = True
        # Index of the first environment among those of all workers.
        self._first = 0
        self.env = make()
        self.next_episodes = np.zeros(1, np.int64)

    # --- making

    @property
    def num_envs(self) -> int:
        """Number of environments."""
        return max(1, int(self.env.batch_size.numel()))

    @property
    def truncated_keys(self) -> list[Key]:
        """Keys of the flags for truncation."""
        return [key for key in map(as_key, self.env.done_keys) if key[-1] == "truncated"]

    def prepare(self) -> None:
        """Gives the environment what options ask for, when the policy is known."""
        self.next_episodes = np.zeros(self.num_envs, np.int64)
        self._give_reset_kwargs()
        self._add_transforms()

    def _add_transforms(self) -> None:
        """Makes TorchRL's environments count steps and mark starts, by transforms around them."""
        limit = self._config.max_frames_per_traj
        if (
            limit
            and not self._counts_twice
            and STEP_COUNT[0] in names(self.env.full_observation_spec)
        ):
            raise ValueError(
                f"max_frames_per_traj={limit} counts steps in the entry 'step_count', which the "
                "environment already has: limit the episodes in the environment instead"
            )
        if isinstance(self.env, TensorDictEnv) or not hasattr(self.env, "append_transform"):
            return
        marks = self._config.auto_register_policy_transforms
        if marks is None:
            marks = self.policy.reads_is_init
        if limit or marks:
            from trawl.collectors.local.torchrl_transforms import add_transforms

            self.env = add_transforms(self.env, limit or None, marks, self.module)

    def remake(self) -> Any:
        """Replaces a failed environment that isn't Trawl's own, and returns the new environment."""
        assert self.restarts is not None
        with suppress(Exception):
            self.env.close(raise_if_closed=False)
        self.env = self._make()
        if self.device is not None:
            self.env = self.env.to(self.device)
        self._register(self.env)
        self._give_reset_kwargs()
        self._add_transforms()
        if self.seed is not None:
            seed, static, before = self.seed
            again = rebuilt_seed(seed, self.restarts.count + 1 - before)
            self.env.set_seed(again, static_seed=static)
        return self.env

    def close(self, close_env: bool) -> None:
        """Closes the environment, or leaves it as it was given."""
        own = self._config.reset_kwargs is not None and isinstance(self.env, TensorDictEnv)
        if own and not close_env:
            self.env.set_reset_kwargs(None, 0, self.next_episodes)
        if close_env and not getattr(self.env, "is_closed", False):
            self.env.close(raise_if_closed=False)

    # --- seeds and resets

    def restart(self, mask: NDArray[np.bool_] | None = None, **kwargs: Any) -> None:
        """Begins new episodes, in all environments or where ``mask`` is True.

        Args:
            mask: a flag for each environment; None for all of them.
            **kwargs: arguments of the environment's reset.
        """
        self.rollout.reset(mask, **kwargs)
        self.at_start = mask is None
        self._budget.own.trajectory_pending_frames = self.rollout.writer.sums.unfinished

    def mask(self, index: Any) -> NDArray[np.bool_]:
        """Returns a mask of the environments that an index into the batch chooses."""
        mask = np.zeros(tuple(self.env.batch_size) or (1,), dtype=np.bool_)
        mask[index] = True
        return mask.reshape(-1)

    def set_seed(self, seed: int, static: bool) -> int:
        """Seeds the environment and the random stream, and begins new episodes.

        Returns:
            A seed for a further environment.
        """
        following = self.env.set_seed(seed, static_seed=static)
        rebuilds = 0 if self.restarts is None else self.restarts.count
        self.seed = (seed, static, rebuilds)
        self.load_begun(np.zeros_like(self.next_episodes))
        self.rollout.stream = RandomStream(stream_seed(seed), self.rollout.generator_device)
        self.restart()
        return int(following)

    # --- numbers of environments and episodes, for reset_kwargs

    def _give_reset_kwargs(self) -> None:
        given = self._config.reset_kwargs
        if given is not None:
            self.env = with_reset_kwargs(self.env, given, self._first, self.next_episodes)

    def number(self, first: int) -> None:
        """Gives the environments the indices with which ``reset_kwargs`` is called.

        Args:
            first: index of the first environment. If it changes, the environments are reset.
        """
        if first != self._first:
            self._first = first
            self._give_reset_kwargs()
            self.load_begun(np.zeros_like(self.next_episodes))
            self.restart()

    def begun(self) -> list[int]:
        """Returns the number of the next episode of each environment."""
        own = isinstance(self.env, TensorDictEnv)
        found: list[int] = (
            self.env.episode_counts(self.next_episodes) if own else self.next_episodes
        ).tolist()
        return found

    def load_begun(self, begun: NDArray[np.int64]) -> None:
        """Sets the number of the next episode of each environment."""
        self.next_episodes[:] = begun
        if self._config.reset_kwargs is not None and isinstance(self.env, TensorDictEnv):
            self.env.load_episode_counts(self.next_episodes)

    def continue_from(self, begun: Sequence[int]) -> None:
        """Begins new episodes, which are numbered from those that a dead worker had begun."""
        self.load_begun(np.array(begun, np.int64))
        self.restart()

    # --- batches

    def stamp(self, batch: TensorDictBase, version: int | str | None) -> None:
        """Writes the version into all frames of a batch, unless each has its own."""
        if version is not None and not self.rollout.stamps_frames:
            stamp(batch, version, after=not self._config.compact_obs)
