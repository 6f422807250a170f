"""Contract between the writer of ready environments' frames and the environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from trawl.envs.processes.ready import Rows
from trawl.keys import Key
from trawl.memory import Array, Mask

NO_ROWS: Rows = np.empty(0, np.int64)


class ReadyResults(NamedTuple):
    """Results of environments that have taken a step.

    All arrays have a row for each environment, in the same order.

    Attributes:
        rows: rows of the environments among all environments.
        results: rewards of the step, and observations and agents' flags after it, by key. A reward
            of one number has no dimension of its own, because indexing takes several times as long
            with another dimension.
        flags: one byte for each environment, with the bits that
            :class:`~trawl.envs.processes.buffers.SharedStepBuffers` describes.
    """

    rows: Rows
    results: Mapping[Key, Array]
    flags: NDArray[np.uint8]

    def only(self, chosen: slice | Array) -> ReadyResults:
        """Returns the results of some of the environments."""
        results = {key: array[chosen] for key, array in self.results.items()}
        return ReadyResults(self.rows[chosen], results, self.flags[chosen])


class ReadySource(Protocol):
    """Environments, each of which becomes ready at its own pace.

    The writer waits for results, takes and records them, and then sends actions.

    Attributes:
        broken: rows of environments that have failed. The writer clears it.
        restarted: rows of environments that were reset because they had failed, and that
            :meth:`take` has passed over. The writer clears it.
    """

    broken: list[int]
    restarted: list[int]

    def start(self) -> Mapping[Key, Array]:
        """Begins episodes in all environments.

        Returns:
            An observation for each row, with which the policy can be tried. A row whose
            environment is not ready yet has the observation of another one.
        """

    def set_action_dtypes(self, dtypes: Mapping[Key, np.dtype[Any]]) -> None:
        """Sets the dtypes of the actions that are sent."""

    def begin(self) -> None:
        """Notes the beginning of a batch."""

    def wait(self) -> None:
        """Waits until there are results to take, or an environment has failed."""

    def take(self, most: int, room: int) -> ReadyResults:
        """Returns results that were not taken yet.

        There may be none if the only results are to be delivered after others.

        Args:
            most: number of rows of results to return at most.
            room: number of rows that are left in the batch.
        """

    def begun(self, rows: Rows) -> Mapping[Key, Array]:
        """Returns the observations of resets, in rows that were reset in the step that was taken.

        There are none if resets take a step of their own.
        """

    def turn(self, room: int) -> Rows | None:
        """Returns rows for which the policy is to act now, in one call; None if there are none.

        There are none while there are results to take, so that the policy acts together for all
        environments that became ready together.

        Args:
            room: number of rows that are left in the batch.
        """

    def send(self, actions: Mapping[Key, Array], late: Mask | None) -> None:
        """Begins the steps of the rows that :meth:`turn` returned, with an action for each.

        Args:
            actions: the actions, by key.
            late: True for rows to be reset after the step even if their episode has not ended;
                None for no row.
        """

    def reset(self, mask: NDArray[np.bool_] | None, **kwargs: Any) -> Rows:
        """Resets all environments, or where ``mask`` is True. Their results are dropped.

        Returns:
            The rows whose first observations :meth:`begun` returns.
        """

    def recover(self) -> None:
        """Repairs what an exception that ended a batch may have left undone."""

    def settle(self) -> None:
        """Waits until no environment is stepping. The results are taken later.

        Nothing happens if the environments can't be captured.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns what later batches depend on, except the environments, after :meth:`settle`.

        Raises:
            EnvStateError: if the environments can't be captured.
        """

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Compares a state with the environments.

        Raises:
            EnvStateError: if the environments can't be restored.
            StateError: if it is the state of environments that are distributed in another way.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a state that :meth:`state_dict` returned; other results are dropped."""
