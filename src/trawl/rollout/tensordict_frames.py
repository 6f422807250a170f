"""Batches of TensorDict frames, from TorchRL's environments and those without a fixed layout.

Frames are gathered as they come, and stacked at the end of the batch. If their layouts differ,
the batch is a lazy stack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase, pad
from torch import Tensor
from typing_extensions import override

from trawl.envs.base import TensorDictEnv
from trawl.errors import add_note
from trawl.keys import Key, as_key, next_of
from trawl.rollout.block import Block, put
from trawl.rollout.checks import check_actions, check_rewards, doubts_of_actions, spends_steps
from trawl.rollout.frames import ActFn, FrameOptions, Frames, StepFn
from trawl.rollout.layout import Layout, layout_of
from trawl.rollout.plan import Plan, unwrap
from trawl.rollout.policy import Policy, missing_action
from trawl.rollout.record import (
    IS_INIT,
    MASK,
    NO_TRAJECTORY,
    STEP_COUNT,
    TRAJ_IDS,
    Episodes,
    View,
)
from trawl.rollout.restarts import Watch
from trawl.rollout.tensordict_restarts import PartWatches, break_off, emptied
from trawl.tensordicts import (
    changes,
    has_lazy,
    is_lazy,
    noted,
    snapshot,
    stack_frames,
    tensors_at,
    whole_key,
)

_COUNT = STEP_COUNT[0]


class TensorDictFrames(Frames):
    """Fills batches of an environment with the TensorDict interface.

    Args:
        env: the environment; the constructor resets it.
        policy: the policy; the constructor calls it once to find out what it writes.
        options: options of the batches.
        why: reason why the array path can't be used.
    """

    def __init__(self, env: Any, policy: Policy, options: FrameOptions, why: str) -> None:
        self.env = env
        self.policy = policy
        self.options = options
        self.why = why
        self.doubts: Sequence[str] = ()
        self.batch = tuple(env.batch_size)
        self.lanes = math.prod(self.batch)
        # TorchRL's environments count steps and mark starts with their own transforms.
        own = isinstance(env, TensorDictEnv)
        self._limit = options.limit if own else None
        asked = policy.reads_is_init if options.is_init is None else options.is_init
        self._marks_starts = own and asked
        self.episodes = Episodes(self.lanes, None)
        self._records: list[TensorDictBase] = []
        self._block: Block | None = None
        self._done_keys = [next_of(as_key(key)) for key in env.done_keys]
        self._reward_keys = [next_of(as_key(key)) for key in env.reward_keys]
        # One mask for each row of the environments that spent the step on a reset, if any can.
        self._spends = own and spends_steps(env, self._limit)
        self._spent: list[Tensor] = []
        # Environments that fail are rebuilt: Trawl's own one by one, others as a whole.
        self._parts: PartWatches | None = None
        self._whole: Watch | None = None
        if options.restarts is not None:
            self._spends = True
            if own:
                self._parts = PartWatches(env, options.restarts)
            else:
                self._whole = Watch(options.restarts, 0, self.lanes)
        # Keys that the policy writes and reads at the next step: under "next", or under one name.
        self._states: list[Key] = []
        self._memories: list[Key] = []
        # Compared before the reset, which may change the mask of a spec.
        self._draws_from_spec = policy.draws_from(env)
        self._first = TensorDict({}, self.batch, device=env.device)
        self._carrier = self._begun(env.reset())
        self._discover()
        self._carrier = self._begun(self._carrier)

    def _begun(self, root: TensorDictBase) -> TensorDictBase:
        """Completes ``root`` as the beginning of an episode in all environments."""
        shape = (*self.batch, 1)
        if self._limit is not None:
            root.set(_COUNT, torch.zeros(shape, dtype=torch.int64))
        if self._marks_starts:
            root.set(IS_INIT, torch.ones(shape, dtype=torch.bool))
        for key in (*self._states, *self._memories):
            if key not in root.keys(True):
                root.set(key, self._first.get(key).clone())
        return root

    def _discover(self) -> None:
        root = snapshot(self._carrier)
        known = {as_key(key) for key in root.keys(True, True)}
        with torch.no_grad():
            found = self.policy.discover(root)
        self._wrote = self._as_one(found).clone()
        tensors = {k: v for k, v in found.items() if _is_tensor(v) or is_lazy(v)}
        self._blank = self._as_one(tensors, self.env.device).clone().zero_()
        self._dtypes = {key: value.dtype for key, value in found.items() if _is_tensor(value)}
        if isinstance(self.env, TensorDictEnv):
            check_actions(self.env, self.policy.module, found)
        else:
            # An environment that isn't Trawl's own decides which actions it accepts.
            self.doubts = doubts_of_actions(self.env, found)
        # Actions count even if the policy did not write them in its first call: it may later.
        actions = [whole_key(root, as_key(key)) for key in self.env.action_keys]
        self._written = list(dict.fromkeys([*found, *actions]))
        self._unwritten = [key for key in actions if key not in found]
        self._states = [
            key[1:]
            for key, value in found.items()
            if key[:1] == ("next",) and key[1:] not in known and _is_tensor(value)
        ]
        known |= set(self._states)
        if isinstance(self.env, TensorDictEnv):
            remembered = self.policy.remembered(found) - known
            self._memories = [
                key for key in sorted(remembered) if key[0] != "next" and _is_tensor(found[key])
            ]
        for key in self._states:
            self._first.set(key, torch.zeros_like(found[next_of(key)]))
        for key in self._memories:
            self._first.set(key, torch.zeros_like(found[key]))

    def _as_one(
        self, entries: dict[Key, Any], device: torch.device | None = None
    ) -> TensorDictBase:
        """Returns the entries that the policy wrote as one TensorDict."""
        whole: TensorDictBase | None = entries.get(())
        return TensorDict(entries, self.batch, device=device) if whole is None else whole

    @property
    @override
    def layout(self) -> Layout | None:
        return layout_of(self.fake())

    @property
    @override
    def hidden(self) -> set[Key]:
        return set()

    @override
    def begin(self, block: Block | None = None) -> None:
        self._block = block
        self._records = []
        self._spent = []
        if self._parts is not None:
            self._parts.begin(self._records)

    @override
    def bind(self, start: int, stop: int, random: bool) -> tuple[ActFn | None, StepFn]:
        records, env_step = self._records, self.env.step_and_maybe_reset
        special = isinstance(self.env, TensorDictEnv) and bool(
            self._limit is not None
            or self._marks_starts
            or self._spends
            or self._states
            or self._memories
        )

        def step(t: int) -> None:
            frame, root = env_step(self._carrier)
            if special:
                root = self._follow(frame, root)
            records.append(frame)
            self._carrier = root

        if self._whole is not None:
            step = partial(self._step_or_remake, self._whole)
        if self._unwritten:
            step = partial(self._step_without_action, step)
        random = random or self._draws_from_spec
        return (self._act_randomly if random else self._act()), step

    def _step_without_action(self, step: StepFn, t: int) -> None:
        """Takes a step, and explains the error if the policy still writes no action."""
        try:
            step(t)
        except KeyError as error:
            for key in self._unwritten:
                if self._carrier.get(key, None) is None:
                    wrote = set(self.policy.writes)
                    add_note(error, str(missing_action(key, self.policy.module, wrote).args[0]))
            raise

    def _step_or_remake(self, watch: Watch, t: int) -> None:
        """Takes a step of an environment that is rebuilt as a whole if it fails."""
        nowhere = torch.zeros(self.batch, dtype=torch.bool)
        frame = self._carrier
        try:
            frame, root = self.env.step_and_maybe_reset(frame)
        except Exception as error:
            present = set(map(as_key, frame.keys(True)))
            taken = present.issuperset(self._done_keys)
            root = watch.restart(error, len(self._records), self._remake, taken)
            if taken:
                break_off(frame, self._done_keys, ~nowhere)
            else:
                frame.set("next", self._take_back(frame.get("next", None), ~nowhere))
            self._spent.append(nowhere if taken else ~nowhere)
        else:
            watch.failures = 0
            self._spent.append(nowhere)
        self._records.append(frame)
        self._carrier = root

    def _remake(self) -> TensorDictBase:
        assert self.options.restarts is not None
        self.env = self.options.restarts.remake()
        return self._begun(self.env.reset())

    def _take_back(self, following: TensorDictBase | None, lanes: Tensor) -> TensorDictBase:
        """Discards the step where it failed, in ``lanes``: episodes end with the step before.

        Returns:
            The TensorDict for ``"next"``, with blank entries in ``lanes``.
        """
        if self._records:
            break_off(self._records[-1], self._done_keys, lanes & ~self._spent[-1])
        blank = self.env.fake_tensordict().get("next").zero_()
        return emptied(blank if following is None else following, blank, lanes)

    def _act_randomly(self, t: int) -> None:
        # The policy's other entries are zero, so that all batches have the same entries.
        self._carrier.update(self._blank.clone())
        self.env.rand_action(self._carrier)
        for key in self.env.action_keys:
            # A policy may write its actions in another dtype than the environment's.
            dtype = self._dtypes.get(as_key(key))
            if dtype is not None:
                self._carrier.set(key, self._carrier.get(key).to(dtype))

    def _act(self) -> ActFn:
        if self.policy.is_elsewhere(self.env.device):
            return self._act_elsewhere()
        available: set[Key] = set()
        if not has_lazy(self._carrier):
            available = {as_key(key) for key in self._carrier.keys(True, True)}
        plan = self.policy.direct(available)
        return self._act_through_tensordict() if plan is None else self._act_directly(plan)

    def _act_directly(self, plan: Plan) -> ActFn:
        call, reads, writes = plan.call, plan.reads, plan.writes
        guarded = not self.policy.leaves_inputs_alone

        def act(t: int) -> None:
            carrier = self._carrier
            inputs = [carrier.get(key) for key in reads]
            outputs = call(*(map(torch.clone, inputs) if guarded else inputs))
            if len(writes) == 1:
                outputs = (outputs,)
            for key, value in zip(writes, outputs, strict=True):
                value = value if isinstance(value, Tensor) else unwrap(value, key)
                # A copy: the policy may reuse the memory of its outputs.
                carrier.set(key, value.clone())

        return act

    def _act_through_tensordict(self) -> ActFn:
        module, keep = self.policy.function, self._keep_written
        device = self.policy.device
        renamed = device is not None and device != self.env.device
        guarded = not self.policy.leaves_inputs_alone

        def act(t: int) -> None:
            carrier = self._carrier
            # A copy, because the frame before shares tensors that the policy may change in place.
            given = snapshot(carrier) if guarded else carrier
            # The TensorDict gets the policy's device, even if its tensors are there already.
            given = given.to(device) if renamed else given
            before = noted(given)
            result = module(given)
            if result is not carrier:
                carrier.update(changes(before, result))
            keep()

        return act

    def _keep_written(self) -> None:
        """Copies what the policy wrote, because it may reuse the memory of its outputs."""
        carrier = self._carrier
        for key in self._written:
            if not key:
                self._carrier = carrier = carrier.clone()
                continue
            value: Any = carrier.get(key, None)
            if value is not None:
                carrier.set(key, value.clone())

    def _act_elsewhere(self) -> ActFn:
        """Returns the function of a policy on another device than the environment's data."""
        module, device = self.policy.function, self.policy.device
        home = self.env.device or "cpu"

        def act(t: int) -> None:
            given = snapshot(self._carrier).to(device)
            before = noted(given)
            self._carrier.update(changes(before, module(given)).to(home))

        return act

    def _follow(self, frame: TensorDictBase, root: TensorDictBase) -> TensorDictBase:
        """Counts steps, cuts off long episodes, and passes on or clears recurrent state."""
        following = frame.get("next")
        if self._limit is not None:
            count = frame.get(_COUNT) + 1
            following.set(_COUNT, count)
            late = count >= self._limit
            cut = late & ~following.get("done")
            if self._parts is not None:
                cut &= ~self._parts.failed().unsqueeze(-1).to(cut.device)
            following.set("truncated", following.get("truncated") | late)
            following.set("done", following.get("done") | late)
            if cut.any():
                root = self.env.reset(root.copy().set("_reset", cut))
        failed = None if self._parts is None else self._parts.failed()
        if failed is not None and failed.any():
            following = self._take_back(following, failed)
            frame.set("next", following)
            root = self.env.reset(root.copy().set("_reset", failed.unsqueeze(-1)))
        done = following.get("done")
        if self._limit is not None:
            root.set(_COUNT, following.get(_COUNT).masked_fill(done, 0))
        spent = self.env.spent() if self._spends else None
        if failed is not None and self._parts is not None:
            spent = failed if spent is None else spent | failed
            self._parts.forgive()
        if spent is not None:
            self._spent.append(spent)
            done = done | spent.unsqueeze(-1).to(done.device)
        if self._marks_starts:
            root.set(IS_INIT, done.clone())
            following.set(IS_INIT, torch.zeros_like(done))
        for key in self._states:
            root.set(key, self._where(done, self._first.get(key), following.get(key)))
        for key in self._memories:
            root.set(key, self._where(done, self._first.get(key), frame.get(key)))
        return root

    def _where(self, mask: Tensor, chosen: Tensor, other: Tensor) -> Tensor:
        """``torch.where`` with a mask of shape ``(*batch, 1)``, whatever the values' shape."""
        ones = [1] * (other.ndim - len(self.batch))
        return torch.where(mask.reshape((*self.batch, *ones)), chosen, other)

    @override
    def finish(self, filled: int) -> TensorDictBase | None:
        if self._parts is not None:
            self._parts.end()
        axis = len(self.batch)
        batch = stack_frames(self._records, axis)
        self._records = []
        batch.refine_names(*[None] * axis, "time")
        for key in self._reward_keys:
            for part, rows in tensors_at(batch, key, axis):
                rewards = part.detach().cpu().numpy()
                rewards = np.moveaxis(rewards, rows, 0).reshape(filled, -1)
                check_rewards(rewards, partial(self._actions_of, batch))
        ids = self._number(batch, filled)
        if self.options.track_traj_ids:
            batch.set(TRAJ_IDS, ids if batch.device is None else ids.to(batch.device))
        if self._spends:
            batch.set(MASK, ~torch.stack(self._spent, axis))
        if filled < self.options.steps:
            batch = self._padded(batch, filled)
        batch = self._compact(batch)
        block, self._block = self._block, None
        return None if block is not None and put(batch, block.lease) else batch

    def _actions_of(self, batch: TensorDictBase) -> dict[Key, NDArray[Any]]:
        """Returns the actions of a batch, ``(steps, lanes, ...)``, except those in lazy stacks."""
        axis, actions = len(self.batch), {}
        for key in map(as_key, self.env.action_keys):
            if whole_key(batch, key) == key and _is_tensor(value := batch.get(key, None)):
                rows = np.moveaxis(value.detach().cpu().float().numpy(), axis, 0)
                actions[key] = rows.reshape(len(rows), self.lanes, -1)
        return actions

    def _padded(self, batch: TensorDictBase, filled: int) -> TensorDictBase:
        """Returns the batch, padded at the end with zeros that belong to no trajectory."""
        missing, axis = self.options.steps - filled, len(self.batch)
        if has_lazy(batch):
            blank = batch[..., :1].clone().zero_()
            whole: TensorDictBase = torch.cat([batch, *[blank] * missing], axis)
        else:
            whole = pad(batch, [*[0] * (2 * axis + 1), missing])
        whole.names = batch.names
        if self.options.track_traj_ids:
            whole.get(TRAJ_IDS)[..., filled:] = NO_TRAJECTORY
        return whole

    def _compact(self, batch: TensorDictBase) -> TensorDictBase:
        """Returns the batch, without the entries that steps pass on if ``compact`` is set."""
        if not self.options.compact:
            return batch
        env = self.env
        if isinstance(env, TensorDictEnv):
            passed = [*env.full_observation_spec.keys(True, True), STEP_COUNT, IS_INIT]
        else:
            passed = [*env._observation_keys_step_mdp, *env._state_keys_step_mdp]
        return batch.exclude(*[next_of(as_key(key)) for key in passed])

    def _number(self, batch: TensorDictBase, filled: int) -> Tensor:
        """Returns the trajectory ids of a batch, computed from its done flags."""
        size = (*self.batch, filled)
        done = torch.zeros(size, dtype=torch.bool)
        for key in self._done_keys:
            if key[-1] == "done":
                flags = batch.get(key).cpu()
                done |= flags.reshape(*size, -1).any(-1)
        spent = torch.stack(self._spent, -1) if self._spends else torch.zeros_like(done)
        ids = np.empty((filled, self.lanes), dtype=np.int64)
        self.episodes.begin(View({TRAJ_IDS: ids}, {}), [])
        spent_rows, rows = (
            flags.reshape(self.lanes, filled).numpy().T for flags in (spent, done | spent)
        )
        for row, lane in np.argwhere(rows):
            note = self.episodes.break_off if spent_rows[row, lane] else self.episodes.end
            note(int(lane), int(row))
        self.episodes.finish(filled)
        return torch.from_numpy(ids.T.copy()).reshape(size)

    @override
    def reset(self, mask: NDArray[np.bool_] | None = None, **kwargs: Any) -> None:
        if mask is None or mask.all():
            self._carrier = self._begun(self.env.reset(**kwargs))
        else:
            chosen = torch.from_numpy(mask).reshape(*self.batch, 1)
            partly = self._carrier.copy()
            for key, group in zip(self.env.reset_keys, self.env.done_keys_groups, strict=True):
                shape = self.env.full_done_spec[group[0]].shape
                flags = chosen.reshape(*self.batch, *[1] * (len(shape) - len(self.batch)))
                partly.set(key, flags.expand(shape).clone())
            fresh = self._begun(self.env.reset(partly, **kwargs))
            if isinstance(self.env, TensorDictEnv):
                self._keep_own(chosen, fresh)
            self._carrier = fresh
        for lane in range(self.lanes):
            if mask is None or mask[lane]:
                self.episodes.restart(lane)

    def _keep_own(self, reset: Tensor, fresh: TensorDictBase) -> None:
        """Restores entries other than observations in environments that were not reset."""
        own: list[Any] = [*self._states, *self._memories]
        own += [_COUNT] if self._limit is not None else []
        own += [IS_INIT] if self._marks_starts else []
        for key in own:
            fresh.set(key, self._where(reset, fresh.get(key), self._carrier.get(key)))

    def fake(self) -> TensorDictBase:
        """Returns a batch of zeros."""
        frame = self.env.fake_tensordict().update(self._wrote)
        if self._limit is not None or self._marks_starts:
            marks = self._begun(TensorDict({}, self.batch))
            frame.update(marks)
            frame.get("next").update(marks.clone())
        if self.options.track_traj_ids:
            frame.set(TRAJ_IDS, torch.zeros(self.batch, dtype=torch.int64))
        if self._spends:
            frame.set(MASK, torch.zeros(self.batch, dtype=torch.bool))
        batch = stack_frames([frame] * self.options.steps, len(self.batch)).zero_()
        batch.refine_names(*[None] * len(self.batch), "time")
        return self._compact(batch)

    @override
    def describe(self) -> dict[str, Any]:
        return {
            "env_path": "tensordict",
            "env_path_reason": self.why,
            **self.policy.describe(),
        }


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)
