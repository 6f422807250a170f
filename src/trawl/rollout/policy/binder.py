"""Binds a policy to the rows of a batch: its inputs, its calls and its outputs.

The binder is the same for arrays and tensors, and for batches that are filled row by row or in the
order in which environments become ready. It decides beforehand how each input reaches the policy:
as a view of the row, as a copy that the policy may change or keep, or moved to its device. It calls
the policy by its :class:`~trawl.rollout.policy.plan.Plan`. Outputs follow one rule,
:class:`~trawl.rollout.policy.outputs.PolicyOutputs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from trawl.envs.base import TensorDictEnv
from trawl.envs.tensor_env import TensorEnv
from trawl.errors import add_note
from trawl.keys import Key, as_key, next_of
from trawl.memory import Array
from trawl.rollout.batches import ActFn
from trawl.rollout.block import PolicyRows
from trawl.rollout.checks import action_warnings, check_actions, has_fixed_shapes, missing_action
from trawl.rollout.episodes import following
from trawl.rollout.inputs import InputCopies, InputRows, LazyRows
from trawl.rollout.layout import Leaf
from trawl.rollout.policy.device_transfer import DeviceTransfer
from trawl.rollout.policy.leaves import PolicyLeaves
from trawl.rollout.policy.outputs import PolicyOutputs
from trawl.rollout.policy.plan import Plan
from trawl.rollout.policy.policy import Policy
from trawl.rollout.policy.random_actions import RandomActions
from trawl.tensordicts import changes, has_lazy, is_lazy, noted, snapshot, whole_key

#: Function that writes the actions to the TensorDict of a step, and returns it or a copy. Its
#: arguments are the TensorDict and the step's row in the batch.
TensorDictActFn = Callable[[TensorDictBase, int], TensorDictBase]

_HINT = (
    "The policy acts for the environments that are ready, whose number changes from call to call "
    "unless server_config has static_batch_size. "
)


# Number of functions of a block that are kept.
_MOST_ACTS = 64


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
        remote = self._device is not None
        self._outputs = PolicyOutputs(self._dtypes, len(self._batch), at_once, remote=remote)
        self._random = RandomActions(env, leaves, self._outputs)

    def bind(self, rows: PolicyRows, start: int, stop: int, random: bool) -> ActFn | None:
        """Returns a function of ``t`` that acts in row ``start + t``.

        Returns None if all actions of the chunk have already been drawn at random.
        """
        if not start:
            self._outputs.begin()
        if random or self._policy.draws_from(self._env):
            return self._random.fill(rows.tensors, start, stop, self._next_row)
        plan = self._policy.plan(self._readable.keys(), self._batch)
        guarded = not self._policy.leaves_inputs_alone
        acts, chunk = rows.acts, (self, start, stop, guarded)
        bound = None if acts is None else acts.get(chunk)
        if bound is not None and bound[0] is plan:
            _, act, copied = bound
            for copies, source in copied:
                copies.bind(source)
            return act
        inputs = [self._input(rows, key, start, stop, guarded) for key in plan.reads]
        writers = [self._writer(rows, key, start, stop) for key in plan.writes]
        act = _act_fn(plan, inputs, writers)
        if acts is not None:
            if len(acts) >= _MOST_ACTS:
                acts.clear()
            # Copies are of one chunk at a time.
            copied = [(one, one.rows) for one in inputs if isinstance(one, InputCopies)]
            acts[chunk] = plan, act, copied
        return act

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
        array_of = {key: outputs.array_of(key) for key in self._dtypes}

        def gathered(key: Key, rows: NDArray[np.int64]) -> Tensor:
            found, leaf = before.get(key), readable[key]
            if found is None:
                return torch.zeros((len(rows), *leaf.shape), dtype=leaf.dtype)
            tensor = torch.from_numpy(found[rows])
            # The arrays of bfloat16 entries are int16.
            return tensor if tensor.dtype is leaf.dtype else tensor.view(leaf.dtype)

        def act(chosen: NDArray[np.int64]) -> None:
            rows, count = chosen, len(chosen)
            if size is not None and count < size:
                rows = np.concatenate([chosen, np.repeat(chosen[-1:], size - count)])
            shape = (len(rows),)
            plan = direct or plans.get(shape)
            if plan is None:
                plan = plans[shape] = self._policy.plan(readable.keys(), shape)
            if transfer is None:
                values = plan.outputs(*[gathered(key, rows) for key in plan.reads])
            else:
                sent = transfer.send({key: readable[key] for key in plan.reads}, before, rows)
                values = transfer.receive(plan.outputs(*[sent[key] for key in plan.reads]))
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
            after = rows.rows(key[1:], start, stop)[1:]
            also = following(after, stop - start, self._next_row[key[1:]])
        elif key in self._leaves.memories:
            also = [self._next_row[key]] * (stop - start)
        return self._outputs.writer(key, rows.rows(key, start, stop), also, start)


def _act_fn(
    plan: Plan, inputs: Sequence[InputRows], writers: Sequence[Callable[[int, Any], None]]
) -> ActFn:
    """Returns a function of ``t`` that calls a policy with row ``t`` of its inputs.

    Args:
        plan: the policy's plan.
        inputs: rows of each input.
        writers: functions that write the outputs into row ``t``.
    """
    call = plan.call
    if len(inputs) == len(writers) == 1:
        (values,), (write_only,) = inputs, writers
        return lambda t: write_only(t, call(values[t]))
    # Of several outputs, the call itself returns a sequence.
    outputs = plan.outputs if len(writers) == 1 else call

    def act(t: int) -> None:
        found = outputs(*[values[t] for values in inputs])
        for write, output in zip(writers, found, strict=True):
            write(t, output)

    return act


class TensorDictBinder:
    """Binds a policy to the TensorDicts of an environment, whose frames have no rows.

    Args:
        env: the environment.
        policy: the policy; the constructor calls it once to find out what it writes.
        root: TensorDict that the environment's reset returned.

    Attributes:
        written: the entries that the policy wrote in its first call.
        states: keys of entries that the policy writes under ``"next"`` and reads one step later.
        memories: keys of entries that the policy writes, and reads under the same name one step
            later.
        first: TensorDict with zeros for ``states`` and ``memories``, which an episode begins with.
        warnings: warnings to the user about the actions.
        unwritten: keys of actions that the policy did not write in its first call.
    """

    def __init__(self, env: Any, policy: Policy, root: TensorDictBase) -> None:
        self._policy = policy
        self._batch = tuple(env.batch_size)
        self.warnings: Sequence[str] = ()
        self.memories: list[Key] = []
        root = snapshot(root)
        known = {as_key(key) for key in root.keys(True, True)}
        with torch.no_grad():
            found = policy.discover(root)
        self.written = self._as_one(found).clone()
        tensors = {k: v for k, v in found.items() if isinstance(v, Tensor) or is_lazy(v)}
        self._blank = self._as_one(tensors, env.device).clone().zero_()
        values = {key: value for key, value in found.items() if _is_tensor(value)}
        # A value of the CPU can be read without waiting.
        at_once = env.device is None or env.device.type == "cpu"
        dtypes = {key: value.dtype for key, value in values.items()}
        self._rule = PolicyOutputs(dtypes, len(self._batch), at_once)
        # Where the environment's own data change their shapes, the policy's may do so too.
        self._shapes = {k: v.shape for k, v in values.items()} if has_fixed_shapes(env) else {}
        # Actions count as outputs even if the policy did not write them in its first call, because
        # it may write them later.
        actions = [whole_key(root, as_key(key)) for key in env.action_keys]
        self._outputs = list(dict.fromkeys([*found, *actions]))
        self.unwritten = [key for key in actions if key not in found]
        self.states: list[Key] = []
        if isinstance(env, TensorDictEnv):
            check_actions(env, policy.module, found)
            self.states, self.memories = policy.carried_over(values.keys(), known)
        else:
            # An environment that isn't Trawl's own decides which actions it accepts.
            self.warnings = action_warnings(env, found)
        self.first = TensorDict({}, self._batch, device=env.device)
        for key in self.states:
            self.first.set(key, torch.zeros_like(found[next_of(key)]))
        for key in self.memories:
            self.first.set(key, torch.zeros_like(found[key]))

    def _as_one(
        self, entries: dict[Key, Any], device: torch.device | None = None
    ) -> TensorDictBase:
        """Returns the entries that the policy wrote as one TensorDict."""
        whole: TensorDictBase | None = entries.get(())
        return TensorDict(entries, self._batch, device=device) if whole is None else whole

    def bind(self, env: Any, carrier: TensorDictBase) -> TensorDictActFn:
        """Returns the function that writes actions, for TensorDicts like ``carrier``.

        Args:
            env: the environment.
            carrier: the TensorDict of the next step.
        """
        if self._policy.is_elsewhere(env.device):
            return self._through_tensordict(env.device)
        available: set[Key] = set()
        if not has_lazy(carrier):
            available = {as_key(key) for key in carrier.keys(True, True)}
        plan = self._policy.direct(available)
        return self._through_tensordict(env.device) if plan is None else self._directly(plan)

    def act_randomly(self, env: Any, carrier: TensorDictBase, row: int) -> TensorDictBase:
        """Writes random actions into the TensorDict of step ``row``, and returns it."""
        # The policy's other entries are zero, so that all batches have the same entries.
        carrier.update(self._blank.clone())
        env.rand_action(carrier)
        for key in map(as_key, env.action_keys):
            # The dtype of a policy's actions may differ from the environment's.
            if whole_key(carrier, key) == key and _is_tensor(drawn := carrier.get(key)):
                carrier.set(key, self._rule.converted(key, drawn, row, "random actions gave"))
        return carrier

    def _directly(self, plan: Plan) -> TensorDictActFn:
        reads, writes = plan.reads, plan.writes
        guarded = not self._policy.leaves_inputs_alone

        def act(carrier: TensorDictBase, row: int) -> TensorDictBase:
            inputs = [carrier.get(key) for key in reads]
            outputs = plan.outputs(*(map(torch.clone, inputs) if guarded else inputs))
            for key, value in zip(writes, outputs, strict=True):
                carrier.set(key, self._recorded(key, value, row))
            return carrier

        return act

    def _through_tensordict(self, home: torch.device | None) -> TensorDictActFn:
        module, record = self._policy.function, self._record_outputs
        device = self._policy.device
        elsewhere = self._policy.is_elsewhere(home)
        moved = device is not None and device != home
        cleared = device is None and home is not None
        guarded = elsewhere or not self._policy.leaves_inputs_alone

        def act(carrier: TensorDictBase, row: int) -> TensorDictBase:
            # A copy, because the last frame shares tensors that the policy may change in place.
            given = snapshot(carrier) if guarded else carrier
            # The TensorDict gets the policy's device, even if its tensors are already there.
            given = given.to(device) if moved else given
            if cleared:
                # As in TorchRL, only ``policy_device`` gives it a device.
                given = (given if guarded else given.copy()).clear_device_()
            before = noted(given)
            result = module(given)
            if elsewhere:
                carrier.update(changes(before, result).to(home or "cpu"))
            elif result is not carrier:
                carrier.update(changes(before, result))
            return record(carrier, row)

        return act

    def _record_outputs(self, carrier: TensorDictBase, row: int) -> TensorDictBase:
        """Replaces the policy's outputs by what is recorded of them."""
        for key in self._outputs:
            if not key:
                carrier = carrier.clone()
                continue
            value: Any = carrier.get(key, None)
            if isinstance(value, Tensor):
                carrier.set(key, self._recorded(key, value, row))
            elif value is not None:
                carrier.set(key, value.clone())
        return carrier

    def _recorded(self, key: Key, value: Any, row: int) -> Tensor:
        """Returns a copy of an output, because the policy may reuse its memory."""
        # Also of what became a tensor here: an array, or a part of a tuple, has the same memory.
        return self._rule.fitting(key, value, self._shapes.get(key), row).clone()

    def check(self) -> None:
        """Checks the outputs of a batch that were converted without waiting for their device."""
        self._rule.check()

    def explain(self, error: KeyError, carrier: TensorDictBase) -> None:
        """Adds a note to the error of a step if the policy has still not written an action."""
        for key in self.unwritten:
            if carrier.get(key, None) is None:
                wrote = set(self._policy.writes)
                add_note(error, str(missing_action(key, self._policy.module, wrote).args[0]))


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)
