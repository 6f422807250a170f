"""The state of environments in processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from trawl.envs.batched import BatchedEnv
from trawl.envs.env_workers import EnvWorkers
from trawl.errors import EnvStateError, WorkerDied, env_errors
from trawl.memory import Array
from trawl.schema.checks import UNKNOWN
from trawl.schema.states import PARALLEL


class ParallelState(BatchedEnv):
    """The part of a :class:`~trawl.envs.ParallelEnv` that captures and restores its state.

    Each environment is captured in its process. The global generators of each process are part of
    the state, because environments may draw from them.
    """

    num_workers: int
    processes: EnvWorkers
    _seed: int | None
    _restarts: dict[int, int]
    _masks: dict[int, Array | None]

    @property
    @override
    def state_methods(self) -> list[str]:
        calls = dict.fromkeys(range(self.num_workers), ("state_methods",))
        return [way for ways in self.processes.call(calls).values() for way in ways]

    @override
    def capture(self) -> dict[str, Any]:
        self.processes.settle()
        # They are made anew in the next step, and need no state.
        failed = sorted(self.processes.failures)
        alive = [index for index in range(self.num_workers) if index not in failed]
        found = self.processes.call(dict.fromkeys(alive, ("capture",)))
        return {
            "envs": [found.get(index) for index in range(self.num_workers)],
            # After the environments, whose methods may draw numbers.
            "generators": self.processes.call_all("capture_generators"),
            "seed": self._seed,
            "restarts": self._restarts,
        }

    @override
    def check_state(self, state: Mapping[str, Any]) -> None:
        with env_errors():
            PARALLEL(state, "state", UNKNOWN)
        mine = {
            "environments": self.num_workers,
            "processes with random generators of their own": self.processes.generators,
        }
        generators = [one for one in state["generators"] if one is not None]
        for (what, count), others in zip(mine.items(), (state["envs"], generators), strict=True):
            if count != len(others):
                raise EnvStateError(
                    f"the state has {len(others)} {what}, but {self!r} has {count}: load it into "
                    "one that is made with the same arguments"
                )
        self.processes.call(
            {i: ("check_state", one) for i, one in enumerate(state["envs"]) if one is not None}
        )

    @override
    def restore(self, state: Mapping[str, Any], trust: bool = False) -> None:
        self.check_state(state)
        known = {index: one for index, one in enumerate(state["envs"]) if one is not None}
        calls = {index: ("restore", one, trust) for index, one in known.items()}
        self._masks = self.processes.call(calls)
        self.processes.call_each("restore_generators", [(one,) for one in state["generators"]])
        self._seed, self._restarts = state["seed"], state["restarts"]
        self.processes.failures = {
            index: WorkerDied(f"environment {index}: it had failed when the state was saved")
            for index in range(self.num_workers)
            if index not in known
        }
