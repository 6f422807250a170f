"""Batches of fixed layout: environment and policy write straight into one block of memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from trawl.envs.base import DONE_KEYS, TensorDictEnv
from trawl.keys import Key, as_key, next_of, show_key
from trawl.rollout.array_stepper import REWARD, StepFn, VectorStepper, make_stepper
from trawl.rollout.checks import check_actions, check_rewards
from trawl.rollout.frames import ActFn, FrameOptions, NotFixed
from trawl.rollout.layout import Layout, Leaf
from trawl.rollout.policy import Policy
from trawl.rollout.record import (
    IS_INIT,
    MASK,
    STEP_COUNT,
    TRAJ_IDS,
    Array,
    Episodes,
    Start,
    View,
    following,
    split_rows,
)
from trawl.rollout.slab import Lease, SlabPool

_FLAG = Leaf((1,), torch.bool)
_ROOT_FLAGS: list[Key] = [(key,) for key in DONE_KEYS]
_FLAGS = [*_ROOT_FLAGS, *map(next_of, _ROOT_FLAGS)]


class ArrayFrames:
    """Fills batches of an environment whose data has a fixed layout.

    Args:
        env: the environment; it is reset.
        policy: the policy; it is called once, to see what it writes.
        options: what else is recorded.

    Raises:
        NotFixed: if the policy writes something that has no fixed layout.
    """

    def __init__(self, env: TensorDictEnv, policy: Policy, options: FrameOptions) -> None:
        self.env = env
        self.policy = policy
        self.options = options
        self.batch = tuple(env.batch_size)
        self.lanes = math.prod(self.batch)
        self.stepper = make_stepper(env)
        self.episodes = Episodes(self.lanes, options.limit)
        self._masked = _refuse_or_mask(self.stepper, options.limit)
        observed = _leaves(env.full_observation_spec, len(self.batch))
        self._observed = list(observed)
        asked = IS_INIT in policy.in_keys if options.is_init is None else options.is_init
        self._marks_starts = asked and IS_INIT not in observed
        roots = {**observed, **dict.fromkeys(_ROOT_FLAGS, _FLAG)}
        if options.limit is not None:
            roots[STEP_COUNT] = Leaf((1,), torch.int64)
        if self._marks_starts:
            roots[IS_INIT] = _FLAG
        self._roots = roots
        self._carry: dict[Key, Array] = {}
        for key in (*observed, *([IS_INIT] if self._marks_starts else [])):
            self._carry[key] = self._new_carry(roots[key])
        self.stepper.reset(View({}, self._carry), None)
        if self._marks_starts:
            self._carry[IS_INIT][:] = True
        self._written, self._states, self._memories = self._discover()
        layout = Layout(self._all_leaves(), self.batch, options.steps)
        self.pool = SlabPool(layout, options.recycle)
        self._lease: Lease | None = None
        self._view = View({}, self._carry)
        self._rows: dict[Key, Array] = {}

    # --- what the batch consists of

    def _new_carry(self, leaf: Leaf) -> Array:
        return torch.zeros((self.lanes, *leaf.shape), dtype=_stored(leaf.dtype)).numpy()

    def _discover(self) -> tuple[dict[Key, Leaf], list[Key], list[Key]]:
        """What the policy writes, its recurrent state by ``next`` keys, and by its own keys."""
        root = TensorDict({}, self.batch, device=self.env.device)
        for key, leaf in self._roots.items():
            shape = (*self.batch, *leaf.shape)
            if key in self._carry:
                root.set(key, torch.from_numpy(self._carry[key].copy()).reshape(shape))
            else:
                root.set(key, torch.zeros(shape, dtype=leaf.dtype))
        with torch.no_grad():
            found = self.policy.discover(root)
        found = {key: value for key, value in found.items() if key not in map(next_of, self._roots)}
        self.policy.writes = tuple(found)
        check_actions(self.env, self.policy.module, found)
        written = {key: self._leaf_of(key, value) for key, value in found.items()}
        states = [key[1:] for key in written if key[0] == "next"]
        memories = [
            key
            for key in self.policy.in_keys
            if key in written and key not in self._roots and key not in states
        ]
        for key in states:
            self._carry[key] = self._new_carry(written[next_of(key)])
        for key in memories:
            self._carry[key] = self._new_carry(written[key])
        return written, states, memories

    def _leaf_of(self, key: Key, value: Any) -> Leaf:
        if not isinstance(value, Tensor):
            raise NotFixed(f"the policy writes {type(value).__name__} to {show_key(key)}")
        batch = len(self.batch)
        if tuple(value.shape[:batch]) != self.batch:
            raise ValueError(
                f"policy wrote {show_key(key)} with shape {tuple(value.shape)}, but the "
                f"environment's batch size is {list(self.batch)}: the shape must begin with it"
            )
        return Leaf(tuple(value.shape[batch:]), value.dtype)

    def _all_leaves(self) -> dict[Key, Leaf]:
        leaves = dict(self._roots)
        leaves.update({key: self._written[next_of(key)] for key in self._states})
        leaves.update(self._written)
        leaves.update({next_of(key): leaf for key, leaf in self._roots.items()})
        leaves[REWARD] = Leaf((1,), torch.float32)
        if self.options.track_traj_ids:
            leaves[TRAJ_IDS] = Leaf((), torch.int64)
        if self._masked:
            leaves[MASK] = Leaf((), torch.bool)
        return leaves

    # --- filling

    def begin(self) -> None:
        lease = self._lease = self.pool.lease()
        self._view = view = View.of(lease, self._carry)
        axis = len(self.batch)
        self._rows = {key: np.moveaxis(lease.array(key), axis, 0) for key in lease.tensors}
        for key in _FLAGS:
            view.arrays[key][...] = False
        if self._masked:
            view.arrays[MASK][...] = True
        for key, carry in self._carry.items():
            if key not in self._memories:
                view.arrays[key][0] = carry
        starts = [Start(view.arrays[key], self._carry[key], 0) for key in self._states]
        starts += [Start(None, self._carry[key], 0) for key in self._memories]
        if self._marks_starts:
            for rows in (view.arrays[IS_INIT][1:], view.arrays[next_of(IS_INIT)]):
                rows[...] = False
            self._carry[IS_INIT][:] = False
            starts.append(Start(view.arrays[IS_INIT], self._carry[IS_INIT], True))
        self.episodes.begin(view, starts)

    def bind(self, start: int, stop: int, random: bool) -> tuple[ActFn | None, StepFn]:
        step = self.stepper.bind(self._view, self.episodes, start, stop)
        if random or self._draws_from_spec():
            self._fill_random(start, stop)
            return None, step
        return self._bind_policy(start, stop), step

    def _draws_from_spec(self) -> bool:
        if not self.policy.is_random:
            return False
        spec = self.policy.module.action_spec  # type: ignore[attr-defined]
        return bool(spec == self.env.full_action_spec or spec == self.env.action_spec)

    def _fill_random(self, start: int, stop: int) -> None:
        """Draws all actions of the stretch at once; what else the policy writes is zero."""
        actions = {as_key(key): key for key in self.env.action_keys}
        for key in self._written:
            rows = self._rows[key][start:stop]
            if key in actions:
                drawn = self.env.full_action_spec[actions[key]].rand((stop - start,))
                rows[...] = drawn.to(self._written[key].dtype).cpu().numpy()
            else:
                rows[...] = 0
        for key in self._states:
            self._rows[key][start + 1 : stop + 1] = 0
            self._carry[key][:] = 0
        for key in self._memories:
            self._carry[key][:] = 0

    def _bind_policy(self, start: int, stop: int) -> ActFn:
        plan = self.policy.plan({*self._roots, *self._states, *self._memories}, self.batch)
        inputs = [self._inputs(key, start, stop) for key in plan.reads]
        writers = [self._writer(key, start, stop) for key in plan.writes]
        call, fetch = plan.call, self._fetch()
        if len(inputs) == 1 and len(writers) == 1 and fetch is None:
            (values,), (write,) = inputs, writers

            def act_plain(t: int) -> None:
                write(t, call(values[t]))

            return act_plain

        def act(t: int) -> None:
            arguments = [values[t] for values in inputs]
            if fetch is not None:
                arguments = [fetch(argument) for argument in arguments]
            outputs = call(*arguments)
            if len(writers) == 1:
                outputs = (outputs,)
            for write, output in zip(writers, outputs, strict=True):
                write(t, output)

        return act

    def _fetch(self) -> Callable[[Tensor], Tensor] | None:
        """What is done to a row before the policy gets it."""
        device = self.policy.device or self.env.device
        if device is not None and device.type != "cpu":
            return lambda row: row.to(device, non_blocking=True)
        # The rows of a batch lie apart in memory; policies may rely on contiguous input.
        return Tensor.contiguous if self.batch else None

    def _inputs(self, key: Key, start: int, stop: int) -> Any:
        if key in self._memories:
            shape = (*self.batch, *self._written[key].shape)
            memory = torch.from_numpy(self._carry[key]).view(self._written[key].dtype)
            return [memory.reshape(shape)] * (stop - start)
        assert self._lease is not None
        axis = len(self.batch)
        # Views of the leased memory: a policy that keeps one keeps the batch valid.
        return self._lease.tensors[key].narrow(axis, start, stop - start).unbind(axis)

    def _writer(self, key: Key, start: int, stop: int) -> Callable[[int, Any], None]:
        leaf = self._written[key]
        shape = (*self.batch, *leaf.shape)
        rows = split_rows(self._rows[key][start:stop])
        also: list[Array] | None = None
        if key[0] == "next":
            carry = self._carry[key[1:]].reshape(shape)
            more = split_rows(self._rows[key[1:]][start + 1 : stop + 1])
            also = following(more, stop - start, carry)
        elif key in self._memories:
            also = [self._carry[key].reshape(shape)] * (stop - start)
        convert = _to_array if leaf.dtype is not torch.bfloat16 else _to_bytes

        def write(t: int, value: Any) -> None:
            array = convert(value)
            if array.shape != shape:
                raise _wrong_shape(key, array.shape, shape)
            rows[t][...] = array
            if also is not None:
                also[t][...] = array

        return write

    def finish(self, filled: int) -> TensorDictBase:
        assert self._lease is not None
        lease, self._lease = self._lease, None
        self.episodes.finish(filled)
        if filled < self.options.steps:
            for key, rows in self._rows.items():
                if key != TRAJ_IDS:
                    rows[filled:] = 0
        check_rewards(self._view.arrays[REWARD][:filled, :, 0])
        self._view, self._rows = View({}, self._carry), {}
        return self._tensordict(lease)

    def _tensordict(self, lease: Lease) -> TensorDictBase:
        size = (*self.batch, self.options.steps)
        nested: dict[str, Any] = {}
        hidden = set(map(next_of, self._observed)) if self.options.compact else set()
        for key, tensor in lease.tensors.items():
            if key in hidden:
                continue
            place = nested
            for part in key[:-1]:
                place = place.setdefault(part, {})
            place[key[-1]] = tensor
        names = [*[None] * len(self.batch), "time"]
        return TensorDict(nested, size, device=self.env.device, names=names)

    # --- between batches

    def reset(self, mask: NDArray[np.bool_] | None = None, **kwargs: Any) -> None:
        self.stepper.reset(View({}, self._carry), mask, **kwargs)
        chosen = np.ones(self.lanes, dtype=np.bool_) if mask is None else mask
        for lane in np.flatnonzero(chosen):
            self.episodes.restart(int(lane))
        for key in (*self._states, *self._memories):
            self._carry[key][chosen] = 0
        if self._marks_starts:
            self._carry[IS_INIT][chosen] = True

    def fake(self) -> TensorDictBase:
        """A batch of zeros."""
        return self._tensordict(self.pool.lease()).zero_()

    def describe(self) -> dict[str, Any]:
        why = self.policy.why_not_direct
        facts: dict[str, Any] = {"env_path": "array"}
        facts["policy_path"] = "direct" if why is None else "tensordict"
        if why is not None:
            facts["policy_path_reason"] = why
        facts["batches_held"] = self.pool.leased
        facts["memory_bytes"] = self.pool.nbytes
        return facts


def _to_array(value: Any) -> Array:
    array: Array = value.detach().cpu().numpy() if value.requires_grad else value.cpu().numpy()
    return array


def _to_bytes(value: Any) -> Array:
    array: Array = value.detach().cpu().view(torch.int16).numpy()
    return array


def _stored(dtype: torch.dtype) -> torch.dtype:
    return torch.int16 if dtype is torch.bfloat16 else dtype


def _wrong_shape(key: Key, got: tuple[int, ...], expected: tuple[int, ...]) -> ValueError:
    return ValueError(
        f"policy wrote {show_key(key)} with shape {tuple(got)}; it was {expected} at first, and "
        "must stay so"
    )


def _leaves(spec: Any, batch: int) -> dict[Key, Leaf]:
    return {
        as_key(key): Leaf(tuple(leaf.shape[batch:]), leaf.dtype)
        for key, leaf in spec.items(True, True)
    }


def _refuse_or_mask(stepper: Any, limit: int | None) -> bool:
    """Whether frames need a mask, because the environment spends steps on resets."""
    if not isinstance(stepper, VectorStepper):
        return False
    if limit is not None and not stepper.vector.can_restart:
        raise ValueError(
            f"max_frames_per_traj={limit} needs an environment that can restart some of its "
            f"sub-environments, and {type(stepper.vector.env).__name__} can't; use "
            "gymnasium.vector.SyncVectorEnv, or a list of factories"
        )
    return stepper.vector.spent() is not None
