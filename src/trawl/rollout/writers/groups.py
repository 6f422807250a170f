"""Collects from groups of environments in turn, so that the policy acts while others step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from trawl.keys import Key
from trawl.memory import Array
from trawl.rollout.batches import ActFn, StepFn
from trawl.rollout.block import BlockPart
from trawl.rollout.episodes import EpisodeTracker
from trawl.rollout.inputs import InputMemory
from trawl.rollout.layout import Leaf
from trawl.rollout.policy.binder import PolicyBinder
from trawl.rollout.policy.leaves import PolicyLeaves
from trawl.rollout.policy.policy import Policy
from trawl.rollout.stages.staged_rows import StagedRows
from trawl.rollout.steppers.parallel import ParallelStepper


@dataclass(frozen=True)
class Group:
    """A group of environments, bound to a chunk.

    Attributes:
        act: function of ``t`` that calls the policy for the group.
        send: function of ``t`` that begins a step of the group.
        receive: function of ``t`` that ends the step.
    """

    act: ActFn
    send: StepFn
    receive: StepFn


class GroupsInTurn:
    """Acts for one group of environments while the other groups step.

    The groups take turns in a fixed order. A group receives its last step only when it is its turn
    again, so a step may still run when the next one is due.

    Args:
        groups: the groups.
        count: number of steps in the chunk.
    """

    def __init__(self, groups: Sequence[Group], count: int) -> None:
        self._groups, self._last = groups, count - 1
        # The step that all groups have begun, and that they have not ended yet.
        self._begun: int | None = None
        #: Seconds that :meth:`act` has waited for environments.
        self.waited = 0.0

    def act(self, t: int) -> None:
        """For each group in turn, ends step ``t - 1``, acts, and begins step ``t``."""
        for group in self._groups:
            if self._begun is not None:
                before = perf_counter()
                group.receive(self._begun)
                self.waited += perf_counter() - before
            group.act(t)
            group.send(t)
        self._begun = t

    def step(self, t: int) -> None:
        """Ends the chunk's last step."""
        if t == self._last:
            self.finish()

    def finish(self) -> None:
        """Ends the step that the groups have begun."""
        begun, self._begun = self._begun, None
        if begun is not None:
            for group in self._groups:
                group.receive(begun)


class GroupBinder:
    """Binds a policy and the steps of groups of environments to chunks of a batch's rows.

    Args:
        stepper: the stepper of the environments.
        policy: the policy.
        leaves: entries that the policy writes.
        readable: entries of the environment's data that the policy can read, by key.
        next_obs: the entries that a step passes on to the next step, by key.
    """

    def __init__(
        self,
        stepper: ParallelStepper,
        policy: Policy,
        leaves: PolicyLeaves,
        readable: Mapping[Key, Leaf],
        next_obs: Mapping[Key, Array],
    ) -> None:
        self._stepper, env = stepper, stepper.env
        self._in_turn: GroupsInTurn | None = None
        self._binders: list[tuple[slice, slice, PolicyBinder, InputMemory]] = []
        size, rows = env.batch_size[0] // env.groups, env.batch_size.numel() // env.groups
        for group in range(env.groups):
            part = range(group * size, (group + 1) * size)
            chosen = slice(group * rows, (group + 1) * rows)
            own = {key: array[chosen] for key, array in next_obs.items()}
            binder = PolicyBinder(env, policy, leaves, readable, own, part)
            first = slice(part.start, part.stop)
            self._binders.append((first, chosen, binder, InputMemory()))

    @property
    def waited(self) -> float:
        """Seconds that the policy's part of the current chunk has waited for environments."""
        return 0.0 if self._in_turn is None else self._in_turn.waited

    def bind(
        self, staged: StagedRows, episodes: EpisodeTracker, start: int, stop: int
    ) -> tuple[ActFn, StepFn]:
        """Returns the functions of the inner loop for rows ``start`` to ``stop``.

        Args:
            staged: the rows of the batch, and what is done to frames.
            episodes: tracker of the environments' episodes.
            start: the first row.
            stop: the row after the last row.
        """
        count, view = len(self._binders), staged.view
        steps = self._stepper.bind_groups(view, episodes, start, stop, count)
        groups = []
        bound = zip(self._binders, steps, strict=True)
        for (part, chosen, binder, copies), (send, receive) in bound:
            act = binder.bind(BlockPart(staged.block, copies, part), start, stop, random=False)
            assert act is not None
            receive = staged.stages.bind(receive, view, chosen, start, stop)
            groups.append(Group(act, send, receive))
        self._in_turn = GroupsInTurn(groups, stop - start)
        return self._in_turn.act, self._in_turn.step

    def finish(self) -> None:
        """Ends the step that the groups have begun."""
        if self._in_turn is not None:
            self._in_turn.finish()
