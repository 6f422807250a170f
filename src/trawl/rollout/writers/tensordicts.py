"""Batches of TensorDicts, for TorchRL environments and environments without a fixed layout.

The writer keeps the frames, and stacks them at the end of the batch. If the layouts of the frames
differ, the batch is a lazy stack.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from trawl.envs.base import TensorDictEnv
from trawl.envs.capture.codec import NotPlain
from trawl.envs.capture.kinds import copy_or_encode, from_plain, to_plain
from trawl.errors import EnvStateError, resetting
from trawl.keys import (
    IS_INIT,
    MASK,
    NO_TRAJECTORY,
    RESET_MASK,
    STEP_COUNT,
    TRAJ_IDS,
    Key,
    as_key,
    end_keys,
    next_of,
)
from trawl.rollout.batches import ActFn, BatchOptions, StepFn
from trawl.rollout.block import Block, copy_into
from trawl.rollout.checks import check_carrier, check_rewards, has_autoreset_steps
from trawl.rollout.cuts import is_late, mark_frame
from trawl.rollout.episode_sums import EpisodeSums
from trawl.rollout.episodes import EpisodeTracker
from trawl.rollout.layout import Layout, layout_of
from trawl.rollout.policy.binder import TensorDictBinder
from trawl.rollout.policy.policy import Policy
from trawl.rollout.restarts import FailureCounter, PartFailures, emptied
from trawl.rollout.stages.loose_stages import LooseStages, LooseStep
from trawl.rollout.stages.staged_rows import stages_for
from trawl.rollout.steppers.step_logs import keep_logs
from trawl.rollout.writers.batch_writer import BatchWriter
from trawl.tensordicts import (
    broadcastable,
    padded,
    stack_frames,
    tensors_at,
    whole_key,
)

_COUNT, _DONE = STEP_COUNT[0], ("done",)


class TensorDictBatchWriter(BatchWriter):
    """Fills batches of an environment with the TensorDict interface.

    Args:
        env: the environment; the constructor resets it.
        policy: the policy; the constructor calls it once to find out what it writes.
        options: options of the batches.
        why: reason why the array path can't be used.
    """

    def __init__(self, env: Any, policy: Policy, options: BatchOptions, why: str) -> None:
        self.env = env
        self.policy = policy
        self.options = options
        self.why = why
        self.batch = tuple(env.batch_size)
        self.num_envs = math.prod(self.batch)
        # TorchRL's environments count steps and mark starts with their own transforms.
        own = isinstance(env, TensorDictEnv)
        self._limit = options.limit if own else None
        self._marks_starts = own and options.marks_starts(policy.reads_is_init)
        # Flags of agents, which are no done keys of Trawl's environments.
        flags = map(as_key, env.full_done_spec.keys(True, True)) if own else ()
        self._agent_flags = [key for key in flags if len(key) > 1]
        self.episodes = EpisodeTracker(self.num_envs, None)
        self.sums = EpisodeSums(self.num_envs)
        self._records: list[TensorDictBase] = []
        self._block: Block | None = None
        self._done_keys = [next_of(as_key(key)) for key in env.done_keys]
        self._flags = [*self._done_keys, *map(next_of, self._agent_flags)]
        self._end_keys = [next_of(key) for key in end_keys(map(as_key, env.done_keys))]
        self._reward_keys = [next_of(as_key(key)) for key in env.reward_keys]
        # For each row, a mask of the environments whose step failed or was an autoreset.
        self._has_mask = own and has_autoreset_steps(env, self._limit)
        self._masked_out: list[Tensor] = []
        # Environments that fail are rebuilt: Trawl's own one by one, others as a whole.
        self._parts: PartFailures | None = None
        self._whole: FailureCounter | None = None
        if options.restarts is not None:
            self._has_mask = True
            if own:
                self._parts = PartFailures(env, options.restarts)
            else:
                self._whole = FailureCounter(options.restarts, 0, self.num_envs)
        keep_logs(env)
        # The specs are compared before the reset, because a reset may change the mask of a spec.
        self._draws_from_spec = policy.draws_from(env)
        root = self._with_marks(self._reset())
        # What is done to some entries of the frames; None if nothing is.
        self._stages: LooseStages | None = None
        if stages_for(options):
            self._stages = LooseStages(env, policy, options, root, self._has_mask)
            self.normalization = self._stages.staged.stages.normalization
        shown = root if self._stages is None else self._stages.read_first(root)
        self._caller = TensorDictBinder(env, policy, shown)
        self.warnings = self._caller.warnings
        self._states, self._memories = self._caller.states, self._caller.memories
        self._first = self._caller.first
        if self._stages is not None:
            written = [as_key(key) for key in self._caller.written.keys(True, True)]
            after = [key[1:] for key in written if key[0] == "next"]
            self._stages.check_policy(written, self._states if own else after)
        observed = env.full_observation_spec.keys(True, True)
        self._passed_roots = {*map(as_key, (*observed, *env.done_keys)), *self._states}
        self._carrier = self._begun(root)
        self._passed_on = self._keys_passed_on() if options.compact else []

    def _begun(self, root: TensorDictBase) -> TensorDictBase:
        """Adds the entries that ``root`` needs when episodes begin in all environments."""
        self._with_marks(root)
        for key in (*self._states, *self._memories):
            if key not in root.keys(True):
                root.set(key, self._first.get(key).clone())
        return root

    def _with_marks(self, root: TensorDictBase) -> TensorDictBase:
        """Adds the step count and ``is_init`` of an episode's first frame."""
        shape = (*self.batch, 1)
        if self._limit is not None:
            root.set(_COUNT, torch.zeros(shape, dtype=torch.int64))
        if self._marks_starts:
            root.set(IS_INIT, torch.ones(shape, dtype=torch.bool))
        return root

    @property
    @override
    def layout(self) -> Layout | None:
        return layout_of(self.fake())

    @property
    @override
    def hidden(self) -> frozenset[Key]:
        return frozenset()

    @override
    def begin(self, block: Block | None = None) -> None:
        self._block = block
        self._records = []
        self._masked_out = []
        if self._parts is not None:
            self._parts.begin(self._records)
        if self._stages is not None:
            self._stages.renew(self.most_frames)

    @override
    def bind(self, start: int, stop: int, random: bool) -> tuple[ActFn | None, StepFn]:
        take = self._bind_step()
        if self._caller.unwritten:
            take = partial(self._take_without_action, take)
        act = self._bind_action(random or self._draws_from_spec)
        if self._stages is not None:
            return self._shown(act), self._stages.bind(take, self.episodes, start, stop)

        def step(t: int) -> None:
            take()

        return act, step

    def _bind_step(self) -> Callable[[], LooseStep]:
        """Returns a function that takes a step."""
        if self._whole is not None:
            return partial(self._step_or_remake, self._whole)
        records, env_step = self._records, self.env.step_and_maybe_reset
        own = isinstance(self.env, TensorDictEnv)
        special = own and bool(
            self._limit is not None
            or self._marks_starts
            or self._has_mask
            or self._states
            or self._memories
        )

        def take() -> LooseStep:
            unread = _unread(self._carrier, self._passed_roots) if own else ()
            frame, root = env_step(self._carrier)
            if unread:
                root = root.exclude(*unread)
            step = self._follow(frame, root) if special else LooseStep(frame, root)
            records.append(frame)
            self._carrier = step.root
            return step

        return take

    def _shown(self, act: ActFn) -> ActFn:
        """Returns a function that lets the policy read what stages make of its inputs."""
        stages = self._stages
        assert stages is not None

        def act_shown(t: int) -> None:
            stages.show(self._carrier, t)
            act(t)
            stages.hide(self._carrier, t)

        return act_shown

    def _bind_action(self, random: bool) -> ActFn:
        records = self._records
        if random:
            act_randomly = self._caller.act_randomly

            def act(t: int) -> None:
                # The environment is looked up in each step, because it is replaced if it fails.
                self._carrier = act_randomly(self.env, self._carrier, len(records))
        else:
            act_on = self._caller.bind(self.env, self._carrier)

            def act(t: int) -> None:
                self._carrier = act_on(self._carrier, len(records))

        return act

    def _take_without_action(self, take: Callable[[], LooseStep]) -> LooseStep:
        """Takes a step, and explains the error if the policy still writes no action."""
        try:
            return take()
        except KeyError as error:
            self._caller.explain(error, self._carrier)
            raise

    def _step_or_remake(self, counter: FailureCounter) -> LooseStep:
        """Takes a step in an environment that is rebuilt as a whole if it fails."""
        failed = nowhere = torch.zeros(self.batch, dtype=torch.bool)
        frame = self._carrier
        try:
            frame, root = self.env.step_and_maybe_reset(frame)
        except Exception as error:
            present = set(map(as_key, frame.keys(True)))
            taken = present.issuperset(self._done_keys)
            root = counter.restart(error, len(self._records), self._remake, taken)
            if taken:
                mark_frame(frame, self._flags, ~nowhere)
            else:
                failed = ~nowhere
                frame.set("next", self._discard_step(frame.get("next", None), failed))
        else:
            counter.failures = 0
        self._masked_out.append(failed)
        self._records.append(frame)
        self._carrier = root
        return LooseStep(frame, root, failed, failed)

    def _remake(self) -> TensorDictBase:
        assert self.options.restarts is not None
        self.env = self.options.restarts.remake()
        return self._begun(self._reset())

    def _discard_step(self, following: TensorDictBase | None, mask: Tensor) -> TensorDictBase:
        """Discards the step where ``mask`` is True, and ends episodes there with the previous step.

        Returns:
            The TensorDict for ``"next"``, with blank entries where ``mask`` is True.
        """
        if self._records:
            mark_frame(self._records[-1], self._flags, mask & ~self._masked_out[-1])
        blank = self.env.fake_tensordict().get("next").zero_()
        return emptied(blank if following is None else following, blank, mask)

    def _follow(self, frame: TensorDictBase, root: TensorDictBase) -> LooseStep:
        """Counts steps, cuts off long episodes, and passes on or clears recurrent state."""
        following = frame.get("next")
        # Looked up before a reset, which makes the environment forget it.
        skipped = self.env.autoreset_mask() if self._has_mask else None
        if self._limit is not None:
            count = frame.get(_COUNT) + 1
            following.set(_COUNT, count)
            resets = None if skipped is None else skipped.unsqueeze(-1).to(count.device)
            late = is_late(self._limit, count, resets)
            cut = late & ~following.get("done")
            if following.get("truncated", None) is None:
                following.set("truncated", torch.zeros_like(cut))
            flags = [_DONE, *self._agent_flags]
            mark_frame(following, flags, late.squeeze(-1), ended_too=[_DONE])
            if self._parts is not None:
                cut &= ~self._parts.failed().unsqueeze(-1).to(cut.device)
            if cut.any():
                root = self.env.reset(root.copy().set(RESET_MASK, cut))
        failed = None if self._parts is None else self._parts.failed()
        if failed is not None and failed.any():
            following = self._discard_step(following, failed)
            frame.set("next", following)
            root = self.env.reset(root.copy().set(RESET_MASK, failed.unsqueeze(-1)))
        done = following.get("done")
        if failed is not None and self._parts is not None:
            skipped = failed if skipped is None else skipped | failed
            self._parts.clear_successful()
        if skipped is not None:
            self._masked_out.append(skipped)
            done = done | skipped.unsqueeze(-1).to(done.device)
        if self._limit is not None:
            root.set(_COUNT, following.get(_COUNT).masked_fill(done, 0))
        if self._marks_starts:
            root.set(IS_INIT, done.clone())
            following.set(IS_INIT, torch.zeros_like(done))
        for key in self._states:
            root.set(key, _where(done, self._first, following, key))
        for key in self._memories:
            root.set(key, _where(done, self._first, frame, key))
        return LooseStep(frame, root, skipped, failed)

    @override
    def abandon(self) -> None:
        self._block, self._records = None, []

    @override
    def finish(self, filled: int) -> TensorDictBase | None:
        if self._parts is not None:
            self._parts.end()
        self._caller.check()
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
        if self._has_mask:
            batch.set(MASK, ~torch.stack(self._masked_out, axis))
        if filled < self.options.steps:
            batch = self._padded(batch, filled)
        block, self._block = self._block, None
        if self._stages is not None:
            self._stages.finish(batch, filled, dense=block is not None)
        batch = self._compact(batch)
        return None if block is not None and copy_into(batch, block.lease) else batch

    def _actions_of(self, batch: TensorDictBase) -> dict[Key, NDArray[Any]]:
        """Returns the actions, of shape ``(steps, num_envs, ...)``, except those in lazy stacks."""
        axis, actions = len(self.batch), {}
        for key in map(as_key, self.env.action_keys):
            if whole_key(batch, key) == key and isinstance(value := batch.get(key, None), Tensor):
                rows = np.moveaxis(value.detach().cpu().float().numpy(), axis, 0)
                actions[key] = rows.reshape(len(rows), self.num_envs, -1)
        return actions

    def _padded(self, batch: TensorDictBase, filled: int) -> TensorDictBase:
        """Returns the batch, padded at the end with zeros that belong to no trajectory."""
        whole = padded(batch, self.options.steps - filled)
        if self.options.track_traj_ids:
            whole.get(TRAJ_IDS)[..., filled:] = NO_TRAJECTORY
        return whole

    def _compact(self, batch: TensorDictBase) -> TensorDictBase:
        """Returns the batch; with ``compact``, without the entries of :meth:`_keys_passed_on`."""
        return batch.exclude(*self._passed_on) if self._passed_on else batch

    def _keys_passed_on(self) -> list[Key]:
        """Returns the keys under "next" whose entries become inputs of the following step."""
        env = self.env
        if isinstance(env, TensorDictEnv):
            passed = [*env.full_observation_spec.keys(True, True), STEP_COUNT, IS_INIT]
        else:
            passed = [
                key
                for spec in (env.full_observation_spec, env.full_state_spec)
                for key in spec.keys(True, True, step_mdp_static_only=True)
            ]
        return [next_of(as_key(key)) for key in passed]

    def _number(self, batch: TensorDictBase, filled: int) -> Tensor:
        """Returns the trajectory ids of a batch, computed from its done flags."""
        size = (*self.batch, filled)
        done = torch.zeros(size, dtype=torch.bool)
        for key in self._end_keys:
            done |= batch.get(key).cpu().reshape(*size, -1).any(-1)
        skipped = torch.stack(self._masked_out, -1) if self._has_mask else torch.zeros_like(done)
        ended, not_counted = (
            flags.reshape(self.num_envs, filled).numpy().T for flags in (done, skipped)
        )
        self._sum_episodes(batch, ended, not_counted)
        ids = self.episodes.number(ended, not_counted)
        return torch.from_numpy(ids.T.copy()).reshape(size)

    def _sum_episodes(
        self, batch: TensorDictBase, done: NDArray[np.bool_], skipped: NDArray[np.bool_]
    ) -> None:
        """Adds rewards to the sums, unless frames have none or differ in their shape."""
        found = [list(tensors_at(batch, key, len(self.batch))) for key in self._reward_keys]
        if not found or any(len(parts) > 1 for parts in found):
            return
        shape = (self.num_envs, len(done), -1)
        rewards = [value.detach().cpu().double().reshape(shape) for ((value, _),) in found]
        # Several rewards of a frame belong to agents.
        mean = torch.cat(rewards, -1).mean(-1).numpy().T
        counted = ~skipped if skipped.any() else None
        self.sums.add(mean, done, counted, self.most_frames)

    @override
    def reset(self, mask: NDArray[np.bool_] | None = None, **kwargs: Any) -> None:
        self.sums.reset(mask)
        if mask is None or mask.all():
            self._carrier = self._begun(self._reset(**kwargs))
        else:
            chosen = torch.from_numpy(mask).reshape(self.batch)
            partly = self._carrier.copy()
            for key, group in zip(self.env.reset_keys, self.env.done_keys_groups, strict=True):
                flags = self.env.full_done_spec[group[0]].zero()
                partly.set(key, broadcastable(chosen, flags).expand(flags.shape).clone())
            fresh = self._begun(self._reset(partly, **kwargs))
            if isinstance(self.env, TensorDictEnv):
                self._restore_rows(chosen.unsqueeze(-1), fresh)
            self._carrier = fresh
        if self._stages is not None:
            self._stages.reset(self._carrier, None if mask is None else torch.from_numpy(mask))
        self.episodes.restart_all(mask)

    def _reset(self, *partly: TensorDictBase, **kwargs: Any) -> TensorDictBase:
        with resetting(self.env):
            root: TensorDictBase = self.env.reset(*partly, **kwargs)
        return root

    def _restore_rows(self, reset: Tensor, fresh: TensorDictBase) -> None:
        """Restores entries other than observations in environments that were not reset."""
        own: list[Any] = [*self._states, *self._memories]
        own += [_COUNT] if self._limit is not None else []
        own += [IS_INIT] if self._marks_starts else []
        for key in own:
            fresh.set(key, _where(reset, fresh, self._carrier, key))

    @override
    def state_dict(self) -> dict[str, Any]:
        try:
            rows = to_plain(self._carrier, copy_or_encode)
        except NotPlain as error:
            raise EnvStateError(f"an entry of the frames holds data, {error}") from error
        episodes, sums = self.episodes.state_dict(), self.sums.state_dict()
        stages = {} if self._stages is None else {"stages": self._stages.staged.state_dict()}
        return {"rows": rows, "episodes": episodes, "sums": sums, **stages}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # Copies, because a step may change its inputs.
        rows = from_plain(state["rows"]).clone()
        written = {whole_key(self._caller.written, key) for key in self.policy.writes}
        check_carrier(self.env, written, self._carrier, rows)
        if self._stages is not None:
            self._stages.staged.load_state_dict(state.get("stages", {}))
        self._carrier = rows
        self.episodes.load_state_dict(state["episodes"])
        self.sums.load_state_dict(state["sums"])

    def fake(self) -> TensorDictBase:
        """Returns a batch of zeros."""
        frame = self._begun(self.env.fake_tensordict().update(self._caller.written))
        frame.get("next").update(self._with_marks(TensorDict({}, self.batch)))
        if self._stages is not None:
            self._stages.fill(frame)
        if self.options.track_traj_ids:
            frame.set(TRAJ_IDS, torch.zeros(self.batch, dtype=torch.int64))
        if self._has_mask:
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


def _unread(carrier: TensorDictBase, passed_on: Collection[Key]) -> list[Any]:
    """Returns keys that the policy wrote under "next", and that don't belong in a root.

    The environment passes on all entries under "next". The policy's belong to the next root only if
    it reads them there.

    Args:
        carrier: the TensorDict of the step.
        passed_on: keys of the entries of a root.
    """
    written = carrier.get("next", None)
    if written is None:
        return []
    return [key for key in written.keys(True, True) if as_key(key) not in passed_on]


def _where(mask: Tensor, chosen: TensorDictBase, other: TensorDictBase, key: Key) -> Tensor:
    """Selects between the entries of two TensorDicts.

    Args:
        mask: mask of shape ``(*batch, 1)``.
        chosen: TensorDict whose entry is used where ``mask`` is True.
        other: TensorDict whose entry is used elsewhere.
        key: key of the entry.
    """
    value = other.get(key)
    return torch.where(broadcastable(mask[..., 0], value), chosen.get(key), value)
