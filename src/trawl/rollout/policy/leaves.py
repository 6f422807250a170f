"""Entries that a policy writes, which its first call tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from trawl.envs.base import TensorDictEnv
from trawl.envs.processes.parallel import ParallelEnv
from trawl.keys import Key, next_of, show_key
from trawl.rollout.batches import NoFixedLayout
from trawl.rollout.checks import check_actions
from trawl.rollout.layout import Leaf
from trawl.rollout.policy.policy import Policy


@dataclass
class PolicyLeaves:
    """Entries that a policy writes, including those that it reads one step later.

    Attributes:
        written: all entries that the policy writes, by key.
        states: keys of entries that the policy writes under ``"next"`` and reads one step later.
            Other entries stay under ``"next"``.
        memories: keys of entries that the policy writes, and reads under the same name one step
            later.
    """

    written: dict[Key, Leaf]
    states: list[Key]
    memories: list[Key]

    @property
    def root_states(self) -> dict[Key, Leaf]:
        """Layout of the states, by the key under which the policy reads them."""
        return {key: self.written[next_of(key)] for key in self.states}

    @property
    def read_later(self) -> dict[Key, Leaf]:
        """Layout of the states and the memories, by the key under which the policy reads them."""
        return {**self.root_states, **{key: self.written[key] for key in self.memories}}


def discover_leaves(
    env: TensorDictEnv, policy: Policy, root: TensorDictBase, readable: Mapping[Key, Leaf]
) -> PolicyLeaves:
    """Calls a policy once to find out what it writes.

    Args:
        env: the environment.
        policy: the policy.
        root: the entries with which the first step begins.
        readable: layout of these entries, by key.

    Raises:
        NoFixedLayout: if an entry that the policy writes has no fixed layout.
        KeyError, TypeError, ValueError: if the policy does not write the actions of the
            environment.
        Exception: an error that the policy raised.
    """
    with torch.no_grad():
        found = policy.discover(root)
    carried = env.carried if isinstance(env, ParallelEnv) else frozenset()
    given = {next_of(key) for key in readable if key not in carried}
    found = {key: value for key, value in found.items() if key not in given}
    policy.writes = tuple(found)
    check_actions(env, policy.module, found)
    batch = tuple(env.batch_size)
    written = {key: _leaf_of(key, value, batch) for key, value in found.items()}
    for key in written.keys() & readable.keys():
        if written[key] != readable[key]:
            raise NoFixedLayout(f"the policy overwrites {show_key(key)} with another layout")
    states, memories = policy.carried_over(written.keys(), readable.keys(), carried)
    return PolicyLeaves(written, states, memories)


def _leaf_of(key: Key, value: Any, batch: tuple[int, ...]) -> Leaf:
    """Returns the layout of an entry that a policy has written.

    Args:
        key: key of the entry.
        value: its value.
        batch: batch size of the environment.

    Raises:
        NoFixedLayout: if the value is no tensor.
        ValueError: if its shape does not begin with the batch size.
    """
    if not isinstance(value, Tensor):
        raise NoFixedLayout(f"the policy writes {type(value).__name__} to {show_key(key)}")
    if tuple(value.shape[: len(batch)]) != batch:
        raise ValueError(
            f"policy wrote {show_key(key)} with shape {tuple(value.shape)}, but the "
            f"environment's batch size is {list(batch)}: the shape must begin with the batch size"
        )
    return Leaf(tuple(value.shape[len(batch) :]), value.dtype)
