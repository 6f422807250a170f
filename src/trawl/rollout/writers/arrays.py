"""Batches of fixed layout: the environment and the policy write directly into one block."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from typing_extensions import override

from trawl.envs.agents.pettingzoo import PettingZooEnv
from trawl.envs.base import TensorDictEnv
from trawl.envs.batches.serial import SerialEnv
from trawl.envs.gym import GymEnv
from trawl.envs.processes.parallel import ParallelEnv
from trawl.keys import IS_INIT, STEP_COUNT, Key, next_of, show_key
from trawl.memory import Array
from trawl.rollout.batches import ActFn, BatchOptions, NoFixedLayout, StepFn
from trawl.rollout.block import Block, BlockPart
from trawl.rollout.checks import has_autoreset_steps
from trawl.rollout.episodes import EpisodeStart, EpisodeTracker, StartValue, StepArrays
from trawl.rollout.inputs import InputMemory, LatestObservation
from trawl.rollout.layout import FLAG, Leaf, zeros
from trawl.rollout.policy.binder import PolicyBinder
from trawl.rollout.policy.leaves import PolicyLeaves
from trawl.rollout.policy.policy import Policy
from trawl.rollout.restarts import EnvRestarts
from trawl.rollout.slab import SlabPool
from trawl.rollout.stages.stage import RowKind
from trawl.rollout.steppers.agents import AgentStepper
from trawl.rollout.steppers.arrays import (
    ArrayStepper,
    EnvStepper,
    SerialStepper,
    SingleStepper,
    VectorStepper,
)
from trawl.rollout.steppers.dm import DMStepper, has_named_arrays
from trawl.rollout.steppers.guard import GuardedStepper
from trawl.rollout.steppers.parallel import ParallelStepper
from trawl.rollout.steppers.step_logs import StepLogs, keep_logs
from trawl.rollout.writers.fixed_layout import FixedLayoutWriter
from trawl.rollout.writers.groups import GroupBinder

# Size in bytes up to which copying a batch takes less time than binding its memory.
_SMALL = 1 << 16
# Number of chunks of a block whose functions are kept.
_MOST_CHUNKS = 16


def make_stepper(env: Any, restarts: EnvRestarts | None) -> ArrayStepper:
    """Returns the stepper for an environment of fixed layout.

    Args:
        env: the environment.
        restarts: the collector's record of failures; None to raise errors instead of restarting.
    """
    if isinstance(env, SerialEnv):
        return SerialStepper([make_stepper(child, restarts) for child in env.envs])
    if isinstance(env, ParallelEnv):
        return ParallelStepper(env, restarts)
    make = partial(_unguarded_stepper, env)
    return make() if restarts is None else GuardedStepper(env, make, restarts)


def _unguarded_stepper(env: GymEnv | PettingZooEnv) -> EnvStepper[StepArrays]:
    if isinstance(env, PettingZooEnv):
        return AgentStepper(env)
    if env.vector is not None:
        return VectorStepper(env)
    return DMStepper(env) if has_named_arrays(env) else SingleStepper(env)


class ArrayBatchWriter(FixedLayoutWriter):
    """Fills batches with the frames of an environment whose data has a fixed layout.

    Args:
        env: the environment; the constructor resets it.
        policy: the policy; the constructor calls it once to find out what it writes.
        options: options of the batches.

    Raises:
        NoFixedLayout: if the entries that the policy writes have no fixed layout.
    """

    _path = "array"
    _kind: ClassVar[RowKind] = "arrays"
    _bfloat16: frozenset[Key] = frozenset()

    def __init__(self, env: TensorDictEnv, policy: Policy, options: BatchOptions) -> None:
        self.batch = tuple(env.batch_size)
        self.stepper: ArrayStepper = make_stepper(env, options.restarts)
        logged = keep_logs(env)
        masked = has_autoreset_steps(env, options.limit) or options.restarts is not None
        super().__init__(env, policy, options, masked)
        self.episodes = EpisodeTracker(self.num_envs, options.limit)
        self._staged = self._new_rows(self._new_next())
        self._start()
        self._policy_leaves, passed_on = self._discover(), self._staged.next
        for key, leaf in self._policy_leaves.read_later.items():
            if key not in passed_on:
                passed_on[key] = self._new_row(leaf)
        # A policy without in_keys may read every entry.
        self.episodes.counts_ahead = not policy.in_keys or STEP_COUNT in policy.in_keys
        self._latest = self._new_latest()
        self._copies = InputMemory(self._latest)
        readable, leaves = self._readable, self._policy_leaves
        self._binder = PolicyBinder(env, policy, leaves, readable, passed_on)
        self._groups: GroupBinder | None = None
        if isinstance(self.stepper, ParallelStepper) and self.stepper.env.groups > 1:
            self._groups = GroupBinder(self.stepper, policy, leaves, readable, passed_on)
        layout = self._new_layout()
        self._bfloat16 = layout.bfloat16
        states = frozenset(leaves.states)
        self._logs = StepLogs(logged, self._staged.first, states, self._bfloat16)
        self.pool = SlabPool(layout, options.recycle)
        # A small batch is filled in memory of the writer's own, which is bound once, and copied.
        self._is_small = layout.nbytes <= _SMALL and not layout.pools
        self._own: Block | None = None

    # --- what a batch begins with

    def _new_next(self) -> dict[Key, Array]:
        """Returns memory for the entries that a step passes on to the next step, by key."""
        entries = self.entries
        found = {key: self._new_row(leaf) for key, leaf in entries.shown.items()}
        if entries.marks_starts:
            found[IS_INIT] = self._new_row(FLAG)
            found[IS_INIT][:] = True
        return found

    def _new_row(self, leaf: Leaf) -> Array:
        return zeros((self.num_envs, *leaf.shape), leaf.dtype)

    def _new_latest(self) -> LatestObservation | None:
        # The policy does not read the environment's own array if a stage changes it.
        observed = self.entries.observed
        alone = not self.batch and len(observed) == 1 and not self._staged.stages.keys
        return LatestObservation(*observed) if alone else None

    def _start(self) -> None:
        """Begins the first episodes."""
        self._begin_episodes(None)

    # --- entries of a batch

    @override
    def _discover(self) -> PolicyLeaves:
        leaves, observed = super()._discover(), self.entries.observed
        for key in leaves.states:
            if key in observed and leaves.written[next_of(key)] != observed[key]:
                raise NoFixedLayout(f"the policy writes {show_key(key)} with another layout")
        if isinstance(self.stepper, ParallelStepper):
            self.stepper.written = frozenset(leaves.states) & observed.keys()
        return leaves

    # --- filling

    @override
    def _begin_rows(self) -> None:
        self._logs.begin()
        super()._begin_rows()
        self.episodes.begin(self._staged.view, self._episode_starts())

    @override
    def _new_block(self) -> Block:
        if self._given is not None:
            return self._given
        if self._is_small:
            self._own = self._own or Block(self.layout)
            return self._own
        return Block(self.layout, self.pool.lease())

    @override
    def _view_of(self, block: Block | None, next_rows: dict[Key, Array]) -> StepArrays:
        rows = {} if block is None else block.flat_rows
        return StepArrays(rows, next_rows, bfloat16=self._bfloat16)

    def _episode_starts(self) -> list[EpisodeStart]:
        """Returns the objects that are called when an episode begins in the batch."""
        staged, leaves = self._staged, self._policy_leaves
        arrays, next_obs = staged.view.arrays, staged.next
        starts: list[EpisodeStart] = []
        starts += [StartValue(arrays[key], next_obs[key], 0) for key in leaves.states]
        starts += [StartValue(None, next_obs[key], 0) for key in leaves.memories]
        if self.entries.marks_starts:
            starts.append(StartValue(arrays[IS_INIT], next_obs[IS_INIT], True))
        return [*starts, *staged.stages.starts]

    @override
    def bind(self, start: int, stop: int, random: bool) -> tuple[ActFn | None, StepFn]:
        staged = self._staged
        block, view = staged.block, staged.view
        if self._groups is not None and not (random or self.policy.draws_from(self.env)):
            return self._groups.bind(staged, self.episodes, start, stop)
        act = self._binder.bind(BlockPart(block, self._copies), start, stop, random)
        copies = act is not None and not self.policy.leaves_inputs_alone
        view.latest = self._latest if copies else None
        step = self._bind_step(block, view, start, stop)
        return act, staged.bind(step, start, stop)

    def _bind_step(self, block: Block, view: StepArrays, start: int, stop: int) -> StepFn:
        """Returns the stepper's function for some rows of a block.

        It is bound anew only if something that it depends on has changed since the block was filled
        last.
        """
        own = self.stepper.bound_to(self.episodes)
        if own is None:
            return self.stepper.bind(view, self.episodes, start, stop)
        found, now = block.steps.get((start, stop)), (own, view.latest)
        if found is not None and found[0] == now:
            return found[1]
        step = self.stepper.bind(view, self.episodes, start, stop)
        if len(block.steps) >= _MOST_CHUNKS:
            block.steps.clear()
        block.steps[start, stop] = now, step
        return step

    @property
    @override
    def waited(self) -> float:
        return 0.0 if self._groups is None else self._groups.waited

    @property
    @override
    def in_groups(self) -> bool:
        return self._groups is not None

    @override
    def _end_steps(self, block: Block, filled: int) -> None:
        if self._groups is not None:
            self._groups.finish()
        self._logs.finish(block.flat_rows, self.episodes, filled)
        self.episodes.finish(filled)
