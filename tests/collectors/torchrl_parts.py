"""Helpers of tests that compare Trawl's collectors with TorchRL's."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from torchrl.data import Bounded, Categorical, Composite, Unbounded
from torchrl.envs import EnvBase


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """TorchRL's own collectors may warn as they like."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def structure(batch: TensorDictBase) -> Any:
    """Shapes and dtypes of a batch, nested as it is; a lazy stack as the list of its parts."""
    if isinstance(batch, LazyStackedTensorDict):
        return batch.stack_dim, [structure(part) for part in batch.tensordicts]
    entries = {}
    for key in batch.keys():  # noqa: SIM118 - a TensorDict is no dict
        value: Any = batch.get(key)
        nested = isinstance(value, TensorDictBase)
        entries[key] = structure(value) if nested else (tuple(value.shape), value.dtype)
    return entries


class Different(EnvBase):
    """Agents that observe, and do, vectors of different lengths; episodes take four steps.

    Observations are the number of the step; so are the rewards.

    Args:
        batch_size: of the environment.
        sizes: the length of each agent's vectors.
        nested: True if each agent has a reward and flags of its own.
    """

    def __init__(
        self,
        batch_size: Sequence[int] = (),
        sizes: Sequence[int] = (2, 3, 4),
        nested: bool = False,
    ) -> None:
        super().__init__(batch_size=batch_size)
        batch = self.batch_size

        def agents(name: str, leaf: Any) -> Composite:
            each = [Composite({name: leaf((*batch, n))}, shape=batch) for n in sizes]
            return Composite(agents=torch.stack(each, len(batch)), shape=batch)

        self.observation_spec = agents("observation", Unbounded)
        self.action_spec = agents("action", lambda shape: Bounded(-1.0, 1.0, shape))
        shape = (*batch, len(sizes)) if nested else batch
        flag = Categorical(2, (*shape, 1), dtype=torch.bool)
        names = ("done", "terminated", "truncated")
        flags = Composite({name: flag.clone() for name in names}, shape=shape)
        reward = Composite(reward=Unbounded((*shape, 1)), shape=shape)
        self.reward_spec = Composite(agents=reward, shape=batch) if nested else reward
        self.done_spec = Composite(agents=flags, shape=batch) if nested else flags
        self.steps = 0

    def _flags(self) -> TensorDictBase:
        flags = self.full_done_spec.zero()
        for key in flags.keys(True, True):
            flags.get(key).fill_(self.steps == 4 and "truncated" not in key)
        return flags

    def _reset(self, tensordict: Any, **kwargs: Any) -> TensorDictBase:
        self.steps = 0
        return self.full_observation_spec.zero().update(self._flags())

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.steps += 1
        found = self.full_observation_spec.zero() + self.steps
        found.update(self.full_reward_spec.zero() + self.steps)
        return found.update(self._flags())

    def _set_seed(self, seed: int | None) -> None:
        pass


def halve(tensordict: TensorDictBase) -> TensorDictBase:
    """A policy for :class:`Different`: each agent does half of what it observes."""
    agents = tensordict["agents"]
    for index in range(agents.shape[-1]):
        agent = agents[..., index]
        agent["action"] = agent["observation"] / 2
    return tensordict
