"""Base of the batch writers whose frames have a fixed layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from typing_extensions import override

from trawl.envs.base import TensorDictEnv
from trawl.keys import Key, show_key
from trawl.rollout.batch_writer import BatchOptions, BatchWriter
from trawl.rollout.checks import check_same_layout
from trawl.rollout.episode_sums import EpisodeSums
from trawl.rollout.frame_entries import FrameEntries
from trawl.rollout.layout import FramePool, Layout, Leaf
from trawl.rollout.policy import Policy
from trawl.rollout.policy_leaves import PolicyLeaves, discover_leaves
from trawl.rollout.stage import Stage


class FixedLayoutWriter(BatchWriter):
    """Fills batches with frames of a fixed layout.

    Args:
        env: the environment.
        policy: the policy.
        options: options of the batches.
        masked: True if some rows of a batch hold no frame.

    Attributes:
        options: options of the batches.
        entries: the entries of frames.
    """

    # What is done to frames, in the order in which they pass.
    _stages: Sequence[Stage[Any, Any]] = ()
    # The entries that a step passes on to the next step, after a batch's last row, by key.
    _next: dict[Key, Any]
    _policy_leaves: PolicyLeaves

    def __init__(
        self, env: TensorDictEnv, policy: Policy, options: BatchOptions, masked: bool
    ) -> None:
        self.env = env
        self.policy = policy
        self.options = options
        self.warnings: Sequence[str] = ()
        self.num_envs = env.batch_size.numel()
        self.sums = EpisodeSums(self.num_envs)
        self.entries = FrameEntries(env, policy, options, masked)

    @property
    @override
    def hidden(self) -> set[Key]:
        return self.entries.hidden

    # --- layout

    @property
    def _readable(self) -> Mapping[Key, Leaf]:
        """The entries that exist before the policy acts, as the policy reads them."""
        leaves: Mapping[Key, Leaf] = self.entries.roots
        for stage in self._stages:
            leaves = stage.readable(leaves)
        return leaves

    def _discover(self) -> PolicyLeaves:
        """Calls the policy once to find out what it writes."""
        batch = tuple(self.env.batch_size)
        root = TensorDict({}, batch, device=self.env.device)
        for key, leaf in self._readable.items():
            root.set(key, self._first_read(key, leaf).reshape(*batch, *leaf.shape))
        leaves = discover_leaves(self.env, self.policy, root, self._readable)
        for stage in self._stages:
            stage.check_policy(leaves)
        return leaves

    def _first_read(self, key: Key, leaf: Leaf) -> Tensor:
        """Returns a copy of what the policy reads first."""
        for stage in reversed(self._stages):
            found = stage.first_read(key)
            if found is not None:
                return torch.as_tensor(found)
        if key in self._next:
            return torch.as_tensor(self._next[key]).clone()
        return torch.zeros((self.num_envs, *leaf.shape), dtype=leaf.dtype)

    def _new_layout(self) -> Layout:
        more: dict[Key, Leaf] = {}
        pools: dict[Key, FramePool] = {}
        for stage in self._stages:
            more |= stage.more_leaves
            pools |= stage.pools
        leaves: Mapping[Key, Leaf] = self.entries.leaves(self._policy_leaves, more)
        for stage in self._stages:
            leaves = stage.in_batch(leaves)
        return Layout(leaves, tuple(self.env.batch_size), self.options.steps, pools)

    # --- between batches

    def _renew_stages(self) -> None:
        """Brings stages up to date before a batch."""
        mask = None
        for stage in self._stages:
            if mask is not None:
                stage.restart(mask)
            found = stage.renew(self.most_frames, self.in_groups)
            mask = mask if found is None else found

    def _saved_rows(self) -> dict[str, Tensor]:
        """Returns tensors that share the memory of the entries that a state has, by name."""
        rows = {show_key(key): row for key, row in self._next.items()}
        for stage in self._stages:
            rows |= stage.saved_rows()
        return {name: torch.as_tensor(row) for name, row in rows.items()}

    @override
    def state_dict(self) -> dict[str, Any]:
        rows = {name: row.clone() for name, row in self._saved_rows().items()}
        episodes, sums = self.episodes.state_dict(), self.sums.state_dict()
        return {"rows": rows, "episodes": episodes, "sums": sums}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = self._saved_rows()
        check_same_layout(own, state["rows"])
        for name, row in own.items():
            row.copy_(state["rows"][name])
        self.episodes.load_state_dict(state["episodes"])
        self.sums.load_state_dict(state["sums"])
