"""Binds a policy to the rows of a batch: its inputs, its calls and its outputs.

The binder is the same for arrays and tensors, and for batches that are filled row by row or in the
order in which environments become ready. It decides beforehand how each input reaches the policy:
as a view of the row, as a copy that the policy may change or keep, or moved to its device. It calls
the policy by its :class:`~trawl.rollout.plan.Plan`. Outputs follow one rule,
:class:`~trawl.rollout.policy_outputs.PolicyOutputs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trawl.envs.base import TensorDictEnv
from trawl.envs.tensor_env import TensorEnv
from trawl.keys import Key
from trawl.memory import Array
from trawl.rollout.batch_writer import ActFn
from trawl.rollout.device_transfer import DeviceTransfer
from trawl.rollout.layout import Leaf
from trawl.rollout.plan import Plan
from trawl.rollout.policy import Policy
from trawl.rollout.policy_inputs import InputRows
from trawl.rollout.policy_leaves import PolicyLeaves
from trawl.rollout.policy_outputs import PolicyOutputs
from trawl.rollout.random_actions import RandomActions
from trawl.rollout.tensor_block import LazyRows

_HINT = (
    "The policy acts for the environments that are ready, whose number changes from call to call "
    "unless server_config has static_batch_size. "
)


class PolicyRows(Protocol):
    """Rows of a batch that a policy reads and writes: those of all environments, or of some."""

    @property
    def tensors(self) -> Mapping[Key, Tensor]:
        """The entries with time first, by key."""

    def inputs(self, key: Key, start: int, stop: int, copied: bool) -> InputRows:
        """Returns the rows of a chunk as the policy reads them.

        Args:
            key: key of the entry.
            start: first row of the chunk.
            stop: row after the last one of the chunk.
            copied: True for memory that nothing else refers to, for a policy that may change or
                keep its inputs.
        """

    def rows(self, key: Key, start: int, stop: int) -> Sequence[Any]:
        """Returns the rows of a chunk, to write to: arrays or tensors."""

    def following(self, key: Key, start: int, stop: int, next_row: Any) -> Sequence[Any]:
        """Returns the row of the next frame for each row; ``next_row`` after the last row."""


class PolicyBinder:
    """Binds a policy to chunks of a batch's rows.

    Args:
        env: the environment.
        policy: the policy.
        leaves: entries that the policy writes.
        readable: entries of the environment's data that the policy can read, by key.
        next_row: the entries that a step passes on to the next step, by key: for each entry, the
            row after the last row of a batch.
        part: range of the environments, along the first batch dimension, that the policy acts
            for; None for all.
    """

    def __init__(
        self,
        env: TensorDictEnv,
        policy: Policy,
        leaves: PolicyLeaves,
        readable: Mapping[Key, Leaf],
        next_row: Mapping[Key, Any],
        part: range | None = None,
    ) -> None:
        self._env, self._policy, self._leaves = env, policy, leaves
        size = tuple(env.batch_size)
        self._batch = size if part is None else (len(part), *size[1:])
        self._readable = {**readable, **leaves.read_later}
        self._next_row = {
            key: next_row[key].reshape((*self._batch, *leaf.shape))
            for key, leaf in leaves.read_later.items()
        }
        home, at_once = torch.device("cpu"), True
        if isinstance(env, TensorEnv):
            home, at_once = env.home, env.answers_at_once
        device = policy.device or env.device
        # The device to which inputs are moved; None to leave them where they are.
        self._device = None if device is None or device == home else device
        self._dtypes = {key: leaf.dtype for key, leaf in leaves.written.items()}
        self._outputs = PolicyOutputs(self._dtypes, len(self._batch), at_once)
        self._random = RandomActions(env, leaves, self._outputs)

    def bind(self, rows: PolicyRows, start: int, stop: int, random: bool) -> ActFn | None:
        """Returns a function of ``t`` that acts in row ``start + t``.

        Returns None if all actions of the chunk have already been drawn at random.
        """
        if random or self._policy.draws_from(self._env):
            return self._random.fill(rows.tensors, start, stop, self._next_row)
        plan = self._policy.plan(self._readable.keys(), self._batch)
        guarded = not self._policy.leaves_inputs_alone
        inputs = [self._input(rows, key, start, stop, guarded) for key in plan.reads]
        writers = [self._writer(rows, key, start, stop) for key in plan.writes]
        return _act_fn(plan.call, inputs, writers)

    def bind_some(
        self,
        before: Mapping[Key, Array],
        written: Mapping[Key, Array],
        size: int | None,
        transfer: DeviceTransfer | None,
    ) -> Callable[[NDArray[np.int64]], None]:
        """Returns a function that acts for the environments with given numbers.

        Args:
            before: arrays of the entries that the policy can read, with a row for each environment,
                except flags, which are False.
            written: arrays of the entries that the policy writes.
            size: number of rows in each call, filled up with copies of the last row; None for no
                filling.
            transfer: copies to and from the policy's device; None if the policy is on the CPU.
        """
        readable = self._readable
        plans: dict[tuple[int, ...], Plan] = {}
        direct = self._policy.direct(readable.keys())
        outputs = PolicyOutputs(self._dtypes, 1, hint=_HINT)
        array_of = {key: outputs.array_of(key, one) for key, one in self._leaves.convert.items()}

        def gathered(key: Key, rows: NDArray[np.int64]) -> Tensor:
            found, leaf = before.get(key), readable[key]
            if found is None:
                return torch.zeros((len(rows), *leaf.shape), dtype=leaf.dtype)
            # The arrays of bfloat16 entries are int16.
            return torch.from_numpy(found[rows]).view(leaf.dtype)

        def act(chosen: NDArray[np.int64]) -> None:
            rows, count = chosen, len(chosen)
            if size is not None and count < size:
                rows = np.concatenate([chosen, np.repeat(chosen[-1:], size - count)])
            shape = (len(rows),)
            plan = direct or plans.get(shape)
            if plan is None:
                plan = plans[shape] = self._policy.plan(readable.keys(), shape)
            if transfer is None:
                values = plan.call(*[gathered(key, rows) for key in plan.reads])
            else:
                sent = transfer.send({key: readable[key] for key in plan.reads}, before, rows)
                values = plan.call(*[sent[key] for key in plan.reads])
            if len(plan.writes) == 1:
                values = (values,)
            if transfer is not None:
                values = transfer.receive(values)
            for key, value in zip(plan.writes, values, strict=True):
                target = written[key]
                target[chosen] = array_of[key](value, (*shape, *target.shape[1:]))[:count]

        return act

    def check(self) -> None:
        """Checks the outputs of a batch that were converted without waiting for their device."""
        self._outputs.check()

    def _input(self, rows: PolicyRows, key: Key, start: int, stop: int, guarded: bool) -> InputRows:
        """Returns an input for each row of a chunk."""
        device = self._device
        if key in self._leaves.memories:
            memory = self._memory(key)
            # The memory is written after the call, and a policy may keep or return its input.
            found: InputRows = LazyRows(lambda _: memory.clone(), stop - start)
        else:
            found = rows.inputs(key, start, stop, guarded and device is None)
        if device is None:
            return found
        # A copy to the CPU must be complete before the policy reads it.
        later = device.type != "cpu"
        return LazyRows(
            lambda t: found[t].to(device, non_blocking=later, copy=guarded), stop - start
        )

    def _memory(self, key: Key) -> Tensor:
        row = self._next_row[key]
        if isinstance(row, Tensor):
            return row
        # The arrays of bfloat16 entries are int16.
        return torch.from_numpy(row).view(self._leaves.written[key].dtype)

    def _writer(
        self, rows: PolicyRows, key: Key, start: int, stop: int
    ) -> Callable[[int, Any], None]:
        also: Sequence[Any] | None = None
        if key[0] == "next" and key[1:] in self._leaves.states:
            also = rows.following(key[1:], start, stop, self._next_row[key[1:]])
        elif key in self._leaves.memories:
            also = [self._next_row[key]] * (stop - start)
        convert = self._leaves.convert[key]
        return self._outputs.writer(key, convert, rows.rows(key, start, stop), also, start)


def _act_fn(
    call: Callable[..., Any],
    inputs: Sequence[InputRows],
    writers: Sequence[Callable[[int, Any], None]],
) -> ActFn:
    """Returns a function of ``t`` that calls a policy with row ``t`` of its inputs.

    Args:
        call: the policy's plan.
        inputs: rows of each input.
        writers: functions that write the outputs into row ``t``.
    """
    if len(inputs) == 1 and len(writers) == 1:
        (values,), (write_only,) = inputs, writers

        def act_plain(t: int) -> None:
            write_only(t, call(values[t]))

        return act_plain

    def act(t: int) -> None:
        outputs = call(*[values[t] for values in inputs])
        if len(writers) == 1:
            outputs = (outputs,)
        for write, output in zip(writers, outputs, strict=True):
            write(t, output)

    return act
