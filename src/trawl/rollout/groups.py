"""Collects from groups of environments in turn, so that the policy acts while others step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from trawl.rollout.batch_writer import ActFn, StepFn


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
