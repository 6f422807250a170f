"""Entries of frames whose layout is fixed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from trawl.envs.base import TensorDictEnv
from trawl.keys import DONE_KEYS, IS_INIT, MASK, STEP_COUNT, TRAJ_IDS, Key, as_key, next_of
from trawl.rollout.layout import Leaf
from trawl.rollout.policy.leaves import PolicyLeaves
from trawl.rollout.policy.policy import Policy
from trawl.rollout.writers.batch_writer import BatchOptions

#: Layout of a flag that belongs to an environment, not to one of its agents.
FLAG = Leaf((1,), torch.bool)
_FLAGS: Mapping[Key, Leaf] = {(name,): FLAG for name in DONE_KEYS}
_NOTHING: Mapping[Key, Leaf] = MappingProxyType({})


class FrameEntries:
    """Entries of the frames in a batch, by key.

    Args:
        env: the environment.
        policy: the policy.
        options: options of the batches.
        masked: True if some rows of a batch hold no frame.

    Attributes:
        observed: the observations.
        flags: the flags that mark the end of an episode. Several agents have flags of their own.
        shown: the entries that an environment shows after each step and reset: the observations,
            and the flags of agents, because those who are absent stay done.
        rewards: the rewards, under ``"next"``. Several agents may have rewards of their own.
        roots: the entries that exist before the policy acts.
        hidden: keys of entries that are left out of batches. They are flags that the environment
            doesn't have and, with ``compact``, entries that repeat.
        marks_starts: True if frames have the flag ``is_init``, and the environment does not write
            it.
        masked: True if frames have a mask.
    """

    def __init__(
        self, env: TensorDictEnv, policy: Policy, options: BatchOptions, masked: bool
    ) -> None:
        axes = len(env.batch_size)
        self.masked = masked
        self.observed = _leaves(env.full_observation_spec, axes)
        shown = _leaves(env.full_done_spec, axes)
        # Every episode ends by these flags, even if the environment does not have all of them.
        self.flags = {**_FLAGS, **shown}
        of_agents = {key: leaf for key, leaf in shown.items() if len(key) > 1}
        self.shown = {**self.observed, **of_agents}
        rewards = _leaves(env.full_reward_spec, axes)
        self.rewards = {next_of(key): leaf for key, leaf in rewards.items()}
        self.marks_starts = options.marks_starts(policy) and IS_INIT not in self.observed
        self.roots = {**self.observed, **self.flags}
        if options.limit is not None:
            self.roots[STEP_COUNT] = Leaf((1,), torch.int64)
        if self.marks_starts:
            self.roots[IS_INIT] = FLAG
        self._has_ids = options.track_traj_ids
        unshown = set() if options.truncates else set(self.flags) - set(shown)
        repeated = set(self.roots) - set(self.flags) if options.compact else set()
        self.hidden = frozenset([*unshown, *map(next_of, repeated | unshown)])

    def leaves(self, policy: PolicyLeaves, more: Mapping[Key, Leaf] = _NOTHING) -> dict[Key, Leaf]:
        """Returns the layout of a frame.

        Args:
            policy: entries that the policy writes.
            more: further entries.
        """
        found = {
            **self.roots,
            **policy.root_states,
            **policy.written,
            **{next_of(key): leaf for key, leaf in self.roots.items()},
            **self.rewards,
            **more,
        }
        if self._has_ids:
            found[TRAJ_IDS] = Leaf((), torch.int64)
        if self.masked:
            found[MASK] = Leaf((), torch.bool)
        return found


def _leaves(spec: Any, axes: int) -> dict[Key, Leaf]:
    return {
        as_key(key): Leaf(tuple(leaf.shape[axes:]), leaf.dtype)
        for key, leaf in spec.items(True, True)
    }
