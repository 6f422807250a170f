"""A policy as the loop knows it: the entries that it reads and writes, and the way to call it.

By now it is a function of a TensorDict (see ``kinds.py``), which can be called on tensors if there
is a :class:`~trawl.rollout.policy.plan.Plan` for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection
from tensordict.nn import InteractionType
from torch import Tensor, nn

from trawl.errors import add_note
from trawl.keys import IS_INIT, Key, as_key, show_key, show_keys
from trawl.rollout.checks import name_of
from trawl.rollout.policy.first_call import PolicyReads, call_noting_networks, foreign_networks
from trawl.rollout.policy.modules import ModuleWatch, leaves_inputs_alone
from trawl.rollout.policy.plan import NotPlannable, Plan, make_plan
from trawl.rollout.policy.sampling import Sampling, keep_reasons
from trawl.rollout.trial import trial
from trawl.tensordicts import changes, is_lazy, noted


class Policy:
    """Resolved policy, with the plan by which the loop calls it.

    Args:
        module: function that maps a TensorDict to a TensorDict that also has the actions.
        exploration: exploration type of probabilistic modules.
        device: device to which the policy's inputs are moved; None to leave them where they are.
        transform: function such as ``torch.compile``, which wraps the function that the loop
            calls; None to leave this function as it is.

    Attributes:
        writes: keys that the policy writes; known once :meth:`discover` has run.
        reads: keys that the policy may read; known once :meth:`discover` has run.
        alone: True if no other thread draws random numbers while the policy is called.
        networks: networks that the policy calls, that are not part of it, and that can be trained;
            known in a worker, once :meth:`discover` has run.
        varies: True if the policy is called with batches of different sizes.
        why_not_direct: reason why the policy is called with a TensorDict, or None if it is called
            on tensors.
        leaves_inputs_alone: True if the policy is certain neither to change nor to keep its input
            tensors; known once :meth:`direct` or :meth:`plan` has returned.
    """

    def __init__(
        self,
        module: Callable[[Any], Any],
        exploration: InteractionType,
        device: torch.device | None = None,
        transform: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
    ) -> None:
        self.module = module
        self.exploration = exploration
        self.device = device
        self.transform = transform
        self.alone = True
        self.varies = False
        self.networks: list[nn.Module] = []
        self.writes: tuple[Key, ...] = ()
        self.reads = PolicyReads()
        self.why_not_direct: str | None = None
        self.leaves_inputs_alone = False
        # The plan of the module as it was when it was last looked at, or the reason why there is
        # none.
        self._watch: ModuleWatch | None = None
        self._plan: Plan | str = ""
        # An entry without a row for each environment, and its shape; None if there is none.
        self._misfit: tuple[Key, tuple[int, ...]] | None = None
        self._samplings: tuple[Sampling, ...] = ()
        self._compiled: Plan | None = None
        self._has_spec = hasattr(module, "set_action_spec_from_env")

    def is_elsewhere(self, home: torch.device | None) -> bool:
        """Returns True if inputs have to be moved to the policy's device.

        Args:
            home: the device of the environment's data; None for the CPU.
        """
        cpu = torch.device("cpu")
        return self.device is not None and self.device != (home or cpu)

    def draws_from(self, env: Any) -> bool:
        """Returns True if the policy draws random actions from the environment's action spec."""
        if not self._has_spec:
            return False
        module: Any = self.module
        spec = module.action_spec
        return bool(spec == env.full_action_spec or spec == env.action_spec)

    @property
    def in_keys(self) -> list[Key]:
        """Keys that the policy declares as its inputs."""
        return _keys_of(getattr(self.module, "in_keys", None))

    @property
    def reads_is_init(self) -> bool:
        """True if the policy reads ``is_init``, which marks the first frame of an episode."""
        # A policy need not name the keys that its modules read.
        own = self.module
        for one in own.modules() if isinstance(own, nn.Module) else [own]:
            # Ornstein-Uhlenbeck noise reads the key without naming it among its `in_keys`.
            named = getattr(one, "is_init_key", None) == "is_init"
            if named or IS_INIT in _keys_of(getattr(one, "in_keys", None)):
                return True
        return False

    def carried_over(
        self,
        found: AbstractSet[Key],
        known: AbstractSet[Key],
        given: AbstractSet[Key] = frozenset(),
    ) -> tuple[list[Key], list[Key]]:
        """Returns the keys of entries that the policy writes, and may read one step later.

        A chain of modules declares which keys it reads. Any other policy may read everything that
        it wrote, as in TorchRL's collectors.

        Args:
            found: keys that the policy writes.
            known: keys of the entries that a step begins with.
            given: keys among ``known`` that the policy writes for the next step.

        Returns:
            Keys that it writes under ``"next"``, without this name; and keys that it writes and
            reads under the same name.
        """
        following = [key[1:] for key in found if key[0] == "next"]
        states = [k for k in following if k in given or (k not in known and k in self.reads)]
        self._look()
        read = found if isinstance(self._plan, str) else found & set(self.in_keys)
        memories = sorted(key for key in read - known - set(states) if key[0] != "next")
        return states, memories

    @cached_property
    def function(self) -> Callable[[Any], Any]:
        """The policy as a function of a TensorDict, wrapped by ``transform`` if it is set."""
        return self.module if self.transform is None else self.transform(self.module)

    def describe(self) -> dict[str, Any]:
        """Returns a description of the path in use, with the reason if it is the slower path."""
        if self.why_not_direct is not None:
            return {"policy_path": "tensordict", "policy_path_reason": self.why_not_direct}
        facts = {"policy_path": "direct"}
        if self._samplings:
            reasons = [one.why_objects for one in self._samplings if one.why_objects is not None]
            facts["distribution_path"] = "objects" if reasons else "recorded"
            if reasons:
                facts["distribution_path_reason"] = reasons[0]
        return facts

    def check_samples(self, batch: Mapping[Key, Tensor], filled: int) -> None:
        """Checks the parameters of distributions in the first rows of a batch, if it has them.

        Args:
            batch: the entries with time first, by key.
            filled: number of rows.

        Raises:
            ValueError: the error that a distribution raises for invalid parameters.
        """
        for drawn in self._samplings:
            if batch.keys() >= set(drawn.in_keys):
                drawn.check([batch[key][:filled] for key in drawn.in_keys])

    def discover(self, root: TensorDictBase) -> dict[Key, Any]:
        """Calls the policy once to find out what it writes, in a :func:`trial`.

        Args:
            root: a TensorDict with the entries that an environment's reset returns.

        Returns:
            Values like those that the policy writes, by key. All values within a lazy stack form
            one entry, which is a lazy stack too. If ``root`` itself is a lazy stack, the key of
            this entry is the empty tuple.

        Raises:
            ValueError: if an entry does not have a row for each environment.
            Exception: an error that the policy raised.
        """
        try:
            with trial(self.module):
                found = self._call_on_tensors(root)
                if found is None:
                    found = self._call(root)
                # The policy's own tensors, which it may return, are restored.
                found = {key: _own(value) for key, value in found.items()}
        except Exception as error:
            if self._misfit is not None:
                raise _wrong_batch(*self._misfit, root.batch_size) from error
            add_note(
                error,
                f"while calling policy {name_of(self.module)} once, to see what it writes, with "
                f"batch size {list(root.batch_size)} and {_describe(root)}",
            )
            if any(_is_tensor(v) and v.dtype is torch.float64 for v in _entries(root).values()):
                add_note(
                    error,
                    "float64 observations are passed to the policy unchanged: convert them in "
                    "the policy (x.float()), or convert its weights (policy.double())",
                )
            raise
        self.writes = tuple(found)
        return found

    def _call_on_tensors(self, root: TensorDictBase) -> dict[Key, Any] | None:
        """Calls the policy on tensors, and returns the entries that it writes.

        Returns None if the policy can't be called on tensors. A call on tensors avoids the import
        of pandas, which a TensorDictModule needs to check its inputs for pandas objects. In a new
        process, this import takes as long as the rest of the first batch.
        """
        if self.is_elsewhere(None):
            return None
        try:
            plan = make_plan(self.module, self.exploration, unrolled=False)
        except NotPlannable:
            return None
        # Clones: if this call fails, the policy is called again with the same inputs.
        given = {k: v.clone() for k, v in _entries(root).items() if _is_tensor(v)}
        batch = root.batch_size
        inputs = [given.get(key) for key in plan.reads]
        if not all(map(_is_tensor, inputs)):
            return None
        try:
            values, self.networks = call_noting_networks(self.module, plan.outputs, *inputs)
        except Exception:
            return None  # the call with a TensorDict raises a more informative error
        wrong = [
            i for i, v in enumerate(values) if _is_tensor(v) and v.shape[: len(batch)] != batch
        ]
        if wrong or not all(map(_is_tensor, values)):
            if wrong:
                self._misfit = plan.writes[wrong[0]], tuple(values[wrong[0]].shape)
            return None
        self.reads = PolicyReads(plan.reads)
        found = dict(zip(plan.writes, values, strict=True))
        return {key: value for key, value in found.items() if value is not given.get(key)}

    def _call(self, root: TensorDictBase) -> dict[Key, Any]:
        """Calls the policy with a TensorDict, and returns the entries that it writes."""
        given_to = root if self.device is None else root.to(self.device)
        self.reads = PolicyReads()
        given_to = self.reads.noting(given_to, self.device)
        given = noted(given_to)
        result, called = self.reads.call(self.module, given_to)
        self.networks = foreign_networks(self.module, called)
        if not is_tensor_collection(result):
            kind = type(result).__name__
            raise TypeError(
                f"policy must return a TensorDict, but {name_of(self.module)} returned {kind}"
            )
        found = _entries(changes(given, result))
        if self.device is not None:
            found = {k: v.cpu() if _is_tensor(v) or is_lazy(v) else v for k, v in found.items()}
        return found

    def plan(self, available: AbstractSet[Key], batch: tuple[int, ...]) -> Plan:
        """Returns a plan with which the loop can call the policy on tensors.

        The plan is made anew if the policy has changed, because a user may hook or replace a module
        between two batches. A plan that ``transform`` has wrapped is always reused.

        Args:
            available: keys of the tensors that the loop can provide.
            batch: batch size of the environment.
        """
        return self.direct(available) or self._transformed(
            self._through_tensordict(available, batch)
        )

    def direct(self, available: AbstractSet[Key]) -> Plan | None:
        """Returns a plan for calling the policy without a TensorDict, or None."""
        self._look()
        if self._compiled is not None and self.why_not_direct is None:
            return self._compiled
        plan = self._plan
        if isinstance(plan, str):
            self.why_not_direct = plan
        elif missing := {key for key in plan.reads if key not in available}:
            self.why_not_direct = f"it reads {show_keys(missing)}, which nothing provides"
        elif set(plan.writes) != set(self.writes):
            self.why_not_direct = "it writes keys other than its out_keys"
        else:
            self.why_not_direct = None
            keep_reasons(self._samplings, plan.samplings)
            self._samplings = plan.samplings
            return self._transformed(plan)
        return None

    def _look(self) -> None:
        """Makes the plan, if the policy has changed since this was last done."""
        if self._watch is not None and not self._watch.has_changed:
            if isinstance(self._plan, Plan):
                for drawn in self._plan.samplings:
                    drawn.renew(self.alone, objects=self.varies)
            return
        self._watch = ModuleWatch(self.module)
        self.leaves_inputs_alone = leaves_inputs_alone(self.module)
        plain = self.transform is None
        try:
            self._plan = make_plan(self.module, self.exploration, plain, self.alone, self.varies)
        except NotPlannable as why:
            self._plan = str(why)

    def _transformed(self, plan: Plan) -> Plan:
        """Returns the plan, wrapped by ``transform`` if it is set; a wrapped plan is reused."""
        if self.transform is None:
            return plan
        if self._compiled is None:
            self._compiled = Plan(plan.reads, plan.writes, self.transform(plan.call))
        return self._compiled

    def _through_tensordict(self, available: AbstractSet[Key], batch: tuple[int, ...]) -> Plan:
        module, reads, writes = self.module, tuple(sorted(available)), self.writes
        # As in TorchRL, only ``policy_device`` gives the policy's TensorDict a device.
        device = self.device
        names = [key[0] if len(key) == 1 else key for key in reads]
        single = writes[0] if len(writes) == 1 else None
        dims = len(batch)

        def call(*inputs: Tensor) -> Any:
            # The policy may act for some of the environments, in rows that are filled up.
            size = inputs[0].shape[:dims]
            values = TensorDict(dict(zip(names, inputs, strict=True)), size, device=device)
            result = module(values)
            if single is not None:
                return result.get(single)
            return [result.get(key) for key in writes]

        return Plan(reads, writes, call)


def _keys_of(keys: Any) -> list[Key]:
    """Returns the keys of a module's key list or mapping; for None, an empty list."""
    return [as_key(key) for key in keys or ()]


def _entries(values: TensorDictBase) -> dict[Key, Any]:
    """Returns the entries by key; a lazy stack is one entry, since its parts' keys may differ."""
    if is_lazy(values):
        return {(): values}
    found: dict[Key, Any] = {}
    for key, value in values.items():
        if is_tensor_collection(value) and not is_non_tensor(value):
            found |= {(key, *inner): entry for inner, entry in _entries(value).items()}
        else:
            found[(key,)] = value
    return found


def _own(value: Any) -> Any:
    """Returns a copy of a tensor or TensorDict that a policy wrote."""
    if _is_tensor(value):
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value.clone() if is_tensor_collection(value) else value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _describe(root: TensorDictBase) -> str:
    """Returns a description of the entries that a policy was called with."""
    if is_lazy(root):
        return ", and ".join(_describe(part) for part in root.tensordicts)
    parts = []
    for key, value in _entries(root).items():
        if is_lazy(value):
            parts.append(f"{show_key(key)}: several of ({_describe(value)})")
        elif _is_tensor(value):
            parts.append(f"{show_key(key)}: {value.dtype} {tuple(value.shape)}")
    return ", ".join(parts)


def _wrong_batch(key: Key, shape: tuple[int, ...], batch: Sequence[int]) -> ValueError:
    """Returns the error for a policy that does not write a row for each environment."""
    first = ", ".join(map(str, batch))
    return ValueError(
        f"policy wrote {show_key(key)} with shape {shape}, but it was called with inputs of batch "
        f"size {tuple(batch)}, so the shape must begin with ({first}, ...): write a row for each "
        "environment"
    )
