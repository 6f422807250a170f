"""Functions that call the policy on rows that are tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from trawl.envs.tensor_env import TensorEnv
from trawl.keys import Key
from trawl.rollout.array_policy import act_fn
from trawl.rollout.batch_writer import ActFn
from trawl.rollout.layout import Leaf
from trawl.rollout.policy import Policy
from trawl.rollout.policy_leaves import PolicyLeaves
from trawl.rollout.policy_outputs import PolicyOutputs, check_shape
from trawl.rollout.random_actions import RandomActions
from trawl.rollout.tensor_block import LazyRows, TensorBlock
from trawl.rollout.tensor_stepper import TensorStepper


class TensorPolicyBinder:
    """Binds a policy to chunks of the rows of a batch of tensors.

    Args:
        env: the environment.
        policy: the policy.
        leaves: entries that the policy writes.
        readable: entries of the environment's data that the policy can read, by key.
        next_row: for each entry of the next frame, the row after a batch's last row.
        stepper: the object that steps the environment.
    """

    def __init__(
        self,
        env: TensorEnv,
        policy: Policy,
        leaves: PolicyLeaves,
        readable: Mapping[Key, Leaf],
        next_row: Mapping[Key, Tensor],
        stepper: TensorStepper,
    ) -> None:
        self._env = env
        self._policy = policy
        self._leaves = leaves
        self._readable = {*readable, *leaves.states, *leaves.memories}
        self._next_row = next_row
        self._stepper = stepper
        dtypes = {key: leaf.dtype for key, leaf in leaves.written.items()}
        self._outputs = PolicyOutputs(dtypes, env.answers_at_once)
        self._random = RandomActions(env, leaves, self._outputs)

    def bind(self, block: TensorBlock, start: int, stop: int, random: bool) -> ActFn | None:
        """Returns a function of ``t`` that acts in row ``start + t``.

        Returns None if all actions of the chunk have already been drawn at random.
        """
        if random or self._policy.draws_from(self._env):
            return self._random.fill(block.tensors, start, stop, self._next_row)
        env, policy = self._env, self._policy
        plan = policy.plan(self._readable, tuple(env.batch_size))
        elsewhere = policy.is_elsewhere(self._env.home)
        # A memory's row is written after the call, so a policy must not keep or return it.
        copied = bool(self._leaves.memories) or not policy.leaves_inputs_alone
        copied = copied and not elsewhere
        inputs = [self._inputs(block, key, start, stop, copied) for key in plan.reads]
        writers = [self._writer(block, key, start, stop) for key in plan.writes]
        if len(inputs) == len(writers) == 1 and not (copied or elsewhere):
            (only,) = plan.reads
            if only in env.observation_keys and only not in block.windows:
                return self._act_on_latest(only, inputs[0], plan.call, writers[0])
        prepare = self._mover() if elsewhere else None
        return act_fn(plan.call, inputs, writers, prepare)

    def _act_on_latest(
        self,
        key: Key,
        values: Sequence[Tensor],
        call: Callable[..., Any],
        write: Callable[[int, Any], None],
    ) -> ActFn:
        """Returns a function that passes the environment's own observation to the policy."""
        stepper, index = self._stepper, self._env.observation_keys.index(key)
        dtype = values[0].dtype

        def act(t: int) -> None:
            value = values[t] if stepper.latest is None else stepper.latest[index]
            write(t, call(value if value.dtype is dtype else values[t]))

        return act

    def _mover(self) -> Callable[[Tensor], Tensor]:
        """Returns a function that moves an input to the policy's device."""
        device = self._policy.device
        # A copy to the CPU must be complete before the policy reads it.
        to_gpu = device is not None and device.type == "cuda"
        return lambda row: row.to(device, non_blocking=to_gpu)

    def _inputs(
        self, block: TensorBlock, key: Key, start: int, stop: int, copied: bool
    ) -> Sequence[Tensor]:
        if key not in self._leaves.memories:
            return block.inputs(key, start, stop, copied)
        row = self._next_row[key]
        return LazyRows(lambda _: row.clone() if copied else row, stop - start)

    def _writer(
        self, block: TensorBlock, key: Key, start: int, stop: int
    ) -> Callable[[int, Any], None]:
        rows = block.rows(key, start, stop)
        shape, dtype = rows[0].shape, rows[0].dtype
        converted = self._outputs.converted

        def write(t: int, value: Any) -> None:
            if not isinstance(value, Tensor) or value.dtype is not dtype:
                value = converted(key, value, start + t)
            if value.shape != shape:
                check_shape(key, value.shape, shape, 1)
            rows[t].copy_(value.detach() if value.requires_grad else value)

        return write

    def check(self) -> None:
        """Checks the outputs of a batch that were converted without waiting for their device."""
        self._outputs.check()
