"""Stages of frames without a fixed layout.

Only the entries that stages change need a fixed layout. They are kept in rows, like those of an
environment of tensors, and pass the same stages. The environment's TensorDicts have the other
entries, and the environment's own values of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from trawl.envs.agents.groups import groups_of
from trawl.envs.base import TensorDictEnv
from trawl.envs.specs import is_fixed
from trawl.envs.tensor_env import TensorStep
from trawl.keys import (
    DONE,
    IS_INIT,
    MASK,
    STEP_COUNT,
    TERMINATED,
    TRUNCATED,
    Key,
    as_key,
    end_keys,
    next_of,
)
from trawl.rollout.batches import BatchOptions, StepFn
from trawl.rollout.block import Block
from trawl.rollout.episodes import EpisodeTracker
from trawl.rollout.inputs import InputRows
from trawl.rollout.layout import FLAG, Layout, Leaf
from trawl.rollout.policy.leaves import PolicyLeaves
from trawl.rollout.policy.policy import Policy
from trawl.rollout.stages.stage import StageSetup
from trawl.rollout.stages.staged_rows import StagedRows, keys_read
from trawl.rollout.step_tensors import StepTensors, TensorPool, TensorRows
from trawl.rollout.steppers.tensors import TensorStepper
from trawl.stacked_frames import StackedFrames
from trawl.tensordicts import has_lazy, whole_key

# Entries that transforms of TorchRL add to the observations, and that are no feature of them.
_COUNTERS = {STEP_COUNT[-1], IS_INIT[-1], "episode_reward", "traj_count"}


class LooseStep(NamedTuple):
    """Results of a step of an environment with the TensorDict interface.

    Attributes:
        frame: the frame.
        root: the TensorDict that the next step begins with.
        skipped: True where the frame is no experience, of the batch size; None if all frames are.
        failed: True where the step failed, of the batch size; None if steps never do.
    """

    frame: TensorDictBase
    root: TensorDictBase
    skipped: Tensor | None = None
    failed: Tensor | None = None


class LooseStages:
    """Normalises and stacks entries of frames without a fixed layout.

    The stepper steps this object like an environment of tensors. It takes the environment's step,
    and returns the entries that stages change.

    Args:
        env: the environment.
        policy: the policy.
        options: options of the batches.
        root: the TensorDict that the first step begins with.
        masked: True if some frames of a batch are no experience.

    Attributes:
        staged: the rows, and the stages.
        observation_keys: keys of the entries that stages read before and after each step.
        action_keys: empty, because the TensorDicts have the actions.
        reward_keys: keys of the rewards that stages read.
        batch_size: batch size of the environment.
        home: device of the entries.
        skips: True if some frames of a batch are no experience.

    Raises:
        KeyError, ValueError: if an entry can't be normalised or stacked.
    """

    action_keys: Sequence[Key] = ()

    def __init__(
        self, env: Any, policy: Policy, options: BatchOptions, root: TensorDictBase, masked: bool
    ) -> None:
        self.batch_size, self.skips = torch.Size(env.batch_size), masked
        self._num_envs, self._steps = self.batch_size.numel(), options.steps
        self._ends = [next_of(key) for key in end_keys(map(as_key, env.done_keys))]
        observed, loose = _fixed(env.full_observation_spec, root)
        rewards, loose_rewards = _rewards(env)
        features, groups = _features(env, policy, observed), groups_of(env)
        setup = StageSetup[Tensor](
            options, "tensors", observed, features, rewards, groups, (self._num_envs,), {}, masked
        )
        read = keys_read(replace(setup, loose=[*loose, *loose_rewards]))
        #: The entries that stages read.
        self._observed = {key: observed[key] for key in read if key in observed}
        self._rewards = {key: rewards[key] for key in read if key in rewards}
        self.reward_keys = [key[1:] for key in self._rewards]
        # The flags of agents, which are absent where they are True.
        members = {key[0] for key in (*self._observed, *self.reward_keys) if len(key) > 1}
        flags = _fixed(env.full_done_spec, root)[0]
        absent = {(name, DONE[-1]) for name in members} & flags.keys()
        carried = self._observed | {key: flags[key] for key in sorted(absent)}
        self.observation_keys = list(carried)
        devices = (root.get(key).device for key in carried)
        self.home: torch.device = next(devices, env.device or torch.device("cpu"))
        next_rows = {key: self._zeros(leaf) for key, leaf in carried.items()}
        setup = replace(setup, rewards=self._rewards, next_rows=next_rows)
        self.staged = StagedRows(replace(setup, home=self.home, at_once=self.answers_at_once))
        self._pool = TensorPool(self._new_layout(carried), self.home, options.recycle)
        self._stepper = TensorStepper(self, None, self.staged.stages)
        self._restarts = options.restarts is not None
        # The entries of the current chunk as the policy reads them.
        self._inputs: dict[Key, InputRows] = {}
        self._written: Sequence[Key] = ()
        self._own: dict[Key, Any] = {}
        self._take: Callable[[], LooseStep] = lambda: self._step
        self.reset(root, None)

    def _zeros(self, leaf: Leaf) -> Tensor:
        return torch.zeros((self._num_envs, *leaf.shape), dtype=leaf.dtype, device=self.home)

    @property
    def answers_at_once(self) -> bool:
        """True if code can read a tensor without waiting for a device."""
        return self.home.type == "cpu"

    # --- layout

    def _new_layout(self, carried: Mapping[Key, Leaf]) -> Layout:
        stages = self.staged.stages
        leaves: Mapping[Key, Leaf] = {
            **carried,
            **{next_of(key): leaf for key, leaf in carried.items()},
            **self._rewards,
            **dict.fromkeys((DONE, TERMINATED, TRUNCATED), FLAG),
            **stages.more_leaves,
        }
        if self.skips:
            leaves = {**leaves, MASK: Leaf((), torch.bool)}
        return Layout(stages.in_batch(leaves), (self._num_envs,), self._steps, stages.pools)

    @property
    def _shown(self) -> Mapping[Key, Leaf]:
        """The observations that stages change, as the policy reads them."""
        return self.staged.stages.readable(self._observed)

    def fill(self, frame: TensorDictBase) -> None:
        """Sets zeros of the right layout in a frame of zeros."""
        shown = self._shown
        after = {next_of(key): leaf for key, leaf in shown.items()}
        more = self.staged.stages.more_leaves
        for key, leaf in {**shown, **after, **self._rewards, **more}.items():
            frame.set(key, self._zeros(leaf).reshape((*self.batch_size, *leaf.shape)))

    # --- the policy

    def read_first(self, root: TensorDictBase) -> TensorDictBase:
        """Returns a copy of a TensorDict, with the entries that the policy reads first."""
        root = root.copy()
        for key, leaf in self._shown.items():
            first = self.staged.first_read(key)
            assert first is not None
            root.set(key, first.reshape((*self.batch_size, *leaf.shape)))
        return root

    def check_policy(self, written: Iterable[Key], states: Sequence[Key]) -> None:
        """Checks that the policy doesn't write what stages write.

        Args:
            written: keys of all entries that the policy writes.
            states: keys of those that it writes under ``"next"``.

        Raises:
            ValueError: if it does.
        """
        leaves = {key: Leaf((), torch.float32) for key in written}
        self.staged.stages.check_policy(PolicyLeaves(leaves, [*states], []))
        self._written = [key for key in written if key in self._observed]

    def show(self, carrier: TensorDictBase, t: int) -> None:
        """Sets the entries that the policy reads in step ``t`` of the chunk."""
        for key, rows in self._inputs.items():
            self._own[key] = carrier.get(key)
            value = rows[t]
            carrier.set(key, value.reshape((*self.batch_size, *value.shape[1:])))

    def hide(self, carrier: TensorDictBase, t: int) -> None:
        """Sets the environment's own values again, after the policy has acted."""
        for key in self._written:
            self._inputs[key][t].copy_(carrier.get(key).reshape(self._inputs[key][t].shape))
        for key, value in self._own.items():
            carrier.set(key, value)

    # --- steps

    def begin(self, mask: Tensor | None = None, **kwargs: Any) -> list[Tensor]:
        """Returns the entries that the next step begins with."""
        return self._values(self._step.root)

    def advance(self, actions: Iterable[Tensor]) -> TensorStep:
        """Takes the environment's step."""
        self._step = step = self._take()
        flags = [step.frame.get(key).reshape(self._num_envs, -1).any(-1) for key in self._ends]
        ended = torch.stack(flags).any(0).to(self.home)
        after = step.frame.get("next")
        rewards = [self._row(after, as_key(key)) for key in self.reward_keys]
        skipped = None if step.skipped is None else step.skipped.reshape(-1).to(self.home)
        return TensorStep(
            self._values(after), None, rewards, ended, torch.zeros_like(ended), skipped
        )

    def begin_next(self, ended: Tensor, cut: Tensor | None = None) -> list[Tensor]:
        """Returns the entries that the next step begins with."""
        return self._values(self._step.root)

    def _values(self, found: TensorDictBase) -> list[Tensor]:
        return [self._row(found, key) for key in self.observation_keys]

    def _row(self, found: TensorDictBase, key: Key) -> Tensor:
        value: Tensor = found.get(key)
        return value.reshape((self._num_envs, *value.shape[len(self.batch_size) :]))

    # --- a batch

    def renew(self, most_frames: float) -> None:
        """Begins a batch, of which at most ``most_frames`` frames are delivered."""
        staged, block = self.staged, Block(self._pool.layout, self._pool.lease())
        staged.stages.renew(most_frames, False)
        view = staged.begin(block, StepTensors(block.tensors, staged.next))
        if self.skips:
            view.arrays[MASK].fill_(True)
        staged.pass_on(self.observation_keys)

    def bind(
        self, take: Callable[[], LooseStep], episodes: EpisodeTracker, start: int, stop: int
    ) -> StepFn:
        """Returns a function that takes step ``start + t``.

        Args:
            take: function that takes the environment's step.
            episodes: tracker of the environments' episodes.
            start: first row of the chunk.
            stop: row after the last one of the chunk.
        """
        self._take, staged = take, self.staged
        view = staged.view
        step = staged.bind(self._stepper.bind(view, episodes, start, stop), start, stop)
        rows = TensorRows(staged.block, view, self._stepper.newest)
        self._inputs = {key: rows.inputs(key, start, stop, False) for key in self._observed}
        if not self._restarts:
            return step
        after = [view.rows(next_of(key), start, stop) for key in self._observed]

        def step_or_clear(t: int) -> None:
            step(t)
            failed = self._step.failed
            if failed is not None and failed.any():
                for each in after:
                    each[t][failed.reshape(-1).to(self.home)] = 0

        return step_or_clear

    def finish(self, batch: TensorDictBase, filled: int, dense: bool) -> None:
        """Ends a batch, and sets the entries that stages have changed.

        Args:
            batch: the frames of the environment, of which the first ``filled`` rows are filled.
            filled: number of rows.
            dense: True to write all frames of each stack.
        """
        self.staged.keep(self.observation_keys, filled)
        found = self.staged.finish(filled).deliver(frozenset(), None)
        after, more = map(next_of, self._observed), self.staged.stages.more_leaves
        for key in (*self._observed, *after, *self._rewards, *more):
            rows = found.get(key)
            if isinstance(rows, StackedFrames) and (dense or has_lazy(batch)):
                rows = rows.to_dense()
            batch.set(key, rows.reshape((*self.batch_size, *rows.shape[1:])))

    # --- between batches

    def reset(self, root: TensorDictBase, mask: Tensor | None) -> None:
        """Begins episodes.

        Args:
            root: the TensorDict that the next step begins with.
            mask: mask of the environments, ``(num_envs,)``; None for all of them.
        """
        self._step = LooseStep(root, root)
        chosen = None if mask is None else mask.to(self.home)
        view = StepTensors({}, self.staged.first)
        self.staged.begin_episodes(self._stepper, view, chosen)


def _features(env: Any, policy: Policy, observed: Mapping[Key, Leaf]) -> Mapping[Key, Leaf]:
    """Returns the observations without those of TorchRL's transforms, and of the policy."""
    if isinstance(env, TensorDictEnv):
        return observed
    written = {as_key(key) for key in getattr(policy.module, "out_keys", None) or ()}

    def is_chosen(key: Key) -> bool:
        private = any(part.startswith("_") for part in key)
        return not private and key[-1] not in _COUNTERS and next_of(key) not in written

    return {key: leaf for key, leaf in observed.items() if is_chosen(key)}


def _fixed(spec: Any, root: TensorDictBase) -> tuple[dict[Key, Leaf], list[Key]]:
    """Returns the layout of the entries whose layout is fixed, and the keys of the others."""
    axes, fixed, loose = root.ndim, dict[Key, Leaf](), list[Key]()
    for name, leaf in spec.items(True, True):
        key = as_key(name)
        value: Any = root.get(key, None) if whole_key(root, key) == key else None
        if is_fixed(leaf) and isinstance(value, Tensor):
            fixed[key] = Leaf(tuple(value.shape[axes:]), value.dtype)
        else:
            loose.append(key)
    return fixed, loose


def _rewards(env: Any) -> tuple[dict[Key, Leaf], list[Key]]:
    """Returns the layout of the rewards whose layout is fixed, and the keys of the others."""
    axes, fixed, loose = len(env.batch_size), dict[Key, Leaf](), list[Key]()
    for name, leaf in env.full_reward_spec.items(True, True):
        key, shape = next_of(as_key(name)), tuple(leaf.shape[axes:])
        if -1 in shape:
            loose.append(key)
        else:
            dtype = leaf.dtype if leaf.dtype.is_floating_point else torch.float32
            fixed[key] = Leaf(shape, dtype)
    return fixed, loose
