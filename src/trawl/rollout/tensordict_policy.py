"""Functions that call the policy with TensorDicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from trawl.envs.base import TensorDictEnv
from trawl.errors import add_note
from trawl.keys import Key, as_key, next_of
from trawl.rollout.checks import action_warnings, check_actions, has_fixed_shapes
from trawl.rollout.plan import Plan
from trawl.rollout.policy import Policy, missing_action
from trawl.rollout.policy_outputs import PolicyOutputs
from trawl.tensordicts import changes, has_lazy, is_lazy, noted, snapshot, whole_key

#: Function that writes the actions to the TensorDict of a step, and returns it or a copy. Its
#: arguments are the TensorDict and the step's row in the batch.
TensorDictActFn = Callable[[TensorDictBase, int], TensorDictBase]


class TensorDictPolicy:
    """Calls a policy with the TensorDicts of an environment.

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
            following = [key[1:] for key in values if key[0] == "next"]
            self.states = [key for key in following if key not in known and key in policy.reads]
            check_actions(env, policy.module, found)
            remembered = policy.remembered(found) - known - set(self.states)
            self.memories = [
                key for key in sorted(remembered) if key[0] != "next" and _is_tensor(found[key])
            ]
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
        call, reads, writes = plan.call, plan.reads, plan.writes
        guarded = not self._policy.leaves_inputs_alone

        def act(carrier: TensorDictBase, row: int) -> TensorDictBase:
            inputs = [carrier.get(key) for key in reads]
            outputs = call(*(map(torch.clone, inputs) if guarded else inputs))
            if len(writes) == 1:
                outputs = (outputs,)
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
        tensor = self._rule.fitting(key, value, self._shapes.get(key), row)
        return tensor.clone() if tensor is value else tensor

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
