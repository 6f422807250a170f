"""Stepper on arrays that rebuilds its environment when it fails."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from trawl.envs.gym import GymEnv
from trawl.rollout.array_stepper import DONE, TRUNCATED, ArrayStepper, leaf_stepper
from trawl.rollout.frames import StepFn
from trawl.rollout.record import MASK, Episodes, View
from trawl.rollout.restarts import Restarts, Watch


class RestartingStepper(ArrayStepper):
    """Steps an environment on arrays, and rebuilds it when it fails.

    Args:
        env: the environment.
        restarts: the collector's record of failures.
    """

    def __init__(self, env: GymEnv, restarts: Restarts) -> None:
        self.env = env
        self._stepper = leaf_stepper(env)
        self.lanes = self._stepper.lanes
        self._restarts = restarts
        self._watch: Watch | None = None

    @override
    def reset(self, view: View, mask: NDArray[np.bool_] | None, **kwargs: Any) -> None:
        self._stepper.reset(view, mask, **kwargs)

    @override
    def bind(self, view: View, episodes: Episodes, start: int, stop: int) -> StepFn:
        if self._watch is None:
            self._watch = Watch(self._restarts, view.first, self.lanes)
        watch = self._watch
        take = self._stepper.bind(view, episodes, start, stop)

        def step(t: int) -> None:
            nonlocal take
            try:
                take(t)
            except Exception as error:
                self._recover(watch, error, view, episodes, start + t)
                # The old function is bound to the old environment.
                take = self._stepper.bind(view, episodes, start, stop)
            else:
                watch.failures = 0

        return step

    def _recover(
        self, watch: Watch, error: Exception, view: View, episodes: Episodes, row: int
    ) -> None:
        # Flags are written after a step and before its reset: if there are any, the step succeeded
        # and the reset failed.
        taken = bool(view.arrays[DONE][row].any())
        watch.restart(error, row, lambda: self._rebuild(view), taken)
        if taken:
            _break_off_after(view, episodes, row)
        else:
            _take_back(view, episodes, row, self.lanes)
        for leaf in self.env.observation_codec.leaves:
            rows = view.arrays[leaf.key]
            if row + 1 < len(rows):
                rows[row + 1] = view.carry[leaf.key]

    def _rebuild(self, view: View) -> None:
        self.env.rebuild()
        self._stepper = leaf_stepper(self.env)
        self._stepper.reset(view, None)


def _break_off_after(view: View, episodes: Episodes, row: int) -> None:
    """Ends the episodes that were still running after ``row``, whose step succeeded."""
    done, mask = view.arrays[DONE], view.arrays[MASK]
    for lane in np.flatnonzero(mask[row] & ~done[row, :, 0]):
        _truncate(view, row, int(lane))
        episodes.end(view.first + int(lane), row)


def _take_back(view: View, episodes: Episodes, row: int, lanes: int) -> None:
    """Discards the step in ``row``, and ends the episodes with the frames before it."""
    for lane in range(lanes):
        if episodes.break_off(view.first + lane, row):
            _truncate(view, row - 1, lane)
    view.arrays[MASK][row] = False
    for key, rows in view.arrays.items():
        if key[0] == "next":
            rows[row] = 0


def _truncate(view: View, row: int, lane: int) -> None:
    for key in (TRUNCATED, DONE):
        view.arrays[key][row, lane] = True
