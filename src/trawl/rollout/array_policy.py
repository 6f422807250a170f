"""Functions that call the policy on the arrays of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trawl.envs.base import TensorDictEnv
from trawl.keys import Key
from trawl.memory import Array
from trawl.rollout.batch_writer import ActFn
from trawl.rollout.block import Block, BlockPart
from trawl.rollout.episodes import following, split_rows
from trawl.rollout.layout import Leaf
from trawl.rollout.policy import Policy
from trawl.rollout.policy_inputs import InputCopies, LatestObservation
from trawl.rollout.policy_leaves import PolicyLeaves
from trawl.rollout.policy_outputs import PolicyOutputs, array_checker
from trawl.rollout.random_actions import RandomActions
from trawl.rollout.windows import WindowArrays


class PolicyBinder:
    """Binds a policy to chunks of a batch's rows.

    Args:
        env: the environment.
        policy: the policy.
        leaves: entries that the policy writes.
        readable: entries of the environment's data that the policy can read, by key.
        next_obs: the entries that a step passes on to the next step, by key: for each entry, the
            row after the last row of a batch.
        part: range of the environments, along the first batch dimension, that the policy acts
            for; None for all.
        latest: the environment's last observation, for a policy that may change its inputs; None
            if the steppers don't provide it.

    Attributes:
        reads_latest: True if the functions that were bound last read ``latest``.
    """

    def __init__(
        self,
        env: TensorDictEnv,
        policy: Policy,
        leaves: PolicyLeaves,
        readable: Mapping[Key, Leaf],
        next_obs: dict[Key, Array],
        part: range | None = None,
        latest: LatestObservation | None = None,
    ) -> None:
        self.env = env
        self.policy = policy
        self.leaves = leaves
        self.batch = tuple(env.batch_size) if part is None else (len(part), *env.batch_size[1:])
        self._readable = {**readable, **leaves.read_later}
        self._next_obs = next_obs
        self.reads_latest = False
        outputs = PolicyOutputs({key: leaf.dtype for key, leaf in leaves.written.items()})
        self._random = RandomActions(env, leaves, outputs)
        self._latest = latest
        self._copies: dict[Key, InputCopies] = {}

    def bind(self, block: Block, start: int, stop: int, random: bool) -> ActFn | None:
        """Returns a function of ``t`` that acts in row ``start + t``.

        Returns None if all actions of the chunk have already been drawn at random.
        """
        self.reads_latest = False
        if random or self.policy.draws_from(self.env):
            return self._random.fill(block.tensors, start, stop, self._next_obs)
        return self.bind_policy(block, start, stop)

    def bind_policy(self, block: Block | BlockPart, start: int, stop: int) -> ActFn:
        """Returns a function of ``t`` that calls the policy for row ``start + t``."""
        plan = self.policy.plan(set(self._readable), self.batch)
        inputs, fetch = self._inputs(block, plan.reads, start, stop)
        writers = [self._writer(block, key, start, stop) for key in plan.writes]
        return act_fn(plan.call, inputs, writers, fetch)

    def _inputs(
        self, block: Block | BlockPart, keys: Sequence[Key], start: int, stop: int
    ) -> tuple[list[Any], Callable[[Tensor], Tensor] | None]:
        """Returns the rows of each key, and a function to apply to each row before use, or None."""
        inputs: list[Any] = []
        device = self.policy.device or self.env.device
        elsewhere = device is not None and device.type != "cpu"
        contiguous, guarded = True, not (elsewhere or self.policy.leaves_inputs_alone)
        for key in keys:
            if key in self.leaves.memories:
                inputs.append(_Clones(self._memory(key)))
            elif guarded:
                inputs.append(self._copied(key, block.readable(key, start, stop)))
            else:
                rows, together = block.inputs(key, start, stop)
                inputs.append(rows)
                contiguous = contiguous and together
        if elsewhere:
            return inputs, lambda row: row.to(device, non_blocking=True)
        return inputs, None if contiguous else Tensor.contiguous

    def _copied(self, key: Key, rows: Array | WindowArrays) -> InputCopies:
        """Returns copies of rows for a policy that may change or keep its inputs."""
        copies = self._copies.get(key)
        if copies is None:
            latest = self._latest if self._latest is not None and self._latest.key == key else None
            copies = self._copies[key] = InputCopies(self._readable[key].dtype, latest)
        self.reads_latest = self.reads_latest or copies.latest is not None
        copies.bind(rows)
        return copies

    def _memory(self, key: Key) -> Tensor:
        leaf = self.leaves.written[key]
        tensor = torch.from_numpy(self._next_obs[key]).view(leaf.dtype)
        return tensor.reshape((*self.batch, *leaf.shape))

    def _writer(
        self, block: Block | BlockPart, key: Key, start: int, stop: int
    ) -> Callable[[int, Any], None]:
        shape = (*self.batch, *self.leaves.written[key].shape)
        rows = split_rows(block.rows[key][start:stop])
        batch = len(self.batch)
        leaf, convert = self.leaves.written[key], self.leaves.convert[key]
        checked = array_checker(key, leaf.dtype, convert, batch)
        also = self._also(block, key, shape, start, stop)

        def write(t: int, value: Any) -> None:
            rows[t][...] = checked(value, shape)

        if also is None:
            return write

        def write_both(t: int, value: Any) -> None:
            rows[t][...] = also[t][...] = checked(value, shape)

        return write_both

    def _also(
        self, block: Block | BlockPart, key: Key, shape: tuple[int, ...], start: int, stop: int
    ) -> list[Array] | None:
        """Returns additional rows for a value that the policy reads at the next step, or None."""
        if key[0] == "next" and key[1:] in self.leaves.states:
            next_obs = self._next_obs[key[1:]].reshape(shape)
            rows = split_rows(block.rows[key[1:]][start + 1 : stop + 1])
            return following(rows, stop - start, next_obs)
        if key in self.leaves.memories:
            return [self._next_obs[key].reshape(shape)] * (stop - start)
        return None


class _Clones:
    """Rows that are all copied from the same changing tensor.

    Each row is a copy, because a policy may keep or return its input.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getitem__(self, t: int) -> Tensor:
        return self._tensor.clone()


def act_fn(
    call: Callable[..., Any],
    inputs: Sequence[Sequence[Any]],
    writers: Sequence[Callable[[int, Any], None]],
    prepare: Callable[[Any], Any] | None,
) -> ActFn:
    """Returns a function of ``t`` that calls a policy with row ``t`` of its inputs.

    Args:
        call: the policy's plan.
        inputs: rows of each input.
        writers: functions that write the outputs into row ``t``.
        prepare: function to apply to each input, or None.
    """
    if len(inputs) == 1 and len(writers) == 1 and prepare is None:
        (values,), (write_only,) = inputs, writers

        def act_plain(t: int) -> None:
            write_only(t, call(values[t]))

        return act_plain

    def act(t: int) -> None:
        arguments = [values[t] for values in inputs]
        if prepare is not None:
            arguments = [prepare(argument) for argument in arguments]
        outputs = call(*arguments)
        if len(writers) == 1:
            outputs = (outputs,)
        for write, output in zip(writers, outputs, strict=True):
            write(t, output)

    return act
