"""State of a collector without workers, from which another collector continues.

The entry ``"resume"`` of a state holds the states of the environments (:mod:`trawl.envs.capture`),
the rows with which the next batch begins, and random generators: the collector's own stream or,
without a seed, the global ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from typing import Any
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from trawl.collectors.config import warn
from trawl.collectors.driver.state import VERSION, CollectorState, LoadOptions, State
from trawl.collectors.driver.state_checks import RESUME, UNCAPTURED
from trawl.collectors.driver.trajectory_batcher import STATE
from trawl.collectors.local.env_loop import EnvLoop
from trawl.envs.base import TensorDictEnv
from trawl.envs.capture.kinds import to_plain
from trawl.envs.layers import state_parts
from trawl.errors import EnvStateError, StateError
from trawl.rollout.normalization import Normalization
from trawl.rollout.policy.kinds import module_of
from trawl.schema.checks import UNKNOWN
from trawl.schema.states import EPISODES, check_collector
from trawl.weights.tensors import own_extra_state

# Entry of the state with the number of the next episode of each environment.
BEGUN = "episodes_begun"
# Format of the entry RESUME.
_FORMAT = 1


class LoopState(CollectorState):
    """The state of a collector without workers.

    Args:
        collector: the collector, to whose parts the object refers.
        loop: the environment and its loop.
        finish: function that completes a batch that Ctrl-C has ended.
    """

    def __init__(self, collector: Any, loop: EnvLoop, finish: Callable[[], None]) -> None:
        super().__init__(collector)
        self._owner: Callable[[], Any] = ref(collector)
        self._loop, self._finish_batch = loop, finish

    @property
    @override
    def normalization(self) -> Normalization | None:
        return self._loop.rollout.writer.normalization

    @property
    def _policy(self) -> Any:
        collector = self._owner()
        return self._loop.module if collector is None else collector.policy

    def _finish(self) -> None:
        # A collector that the garbage collector deletes has no batch under way.
        with suppress(ReferenceError):
            self._finish_batch()

    def env_state_methods(self) -> list[str]:
        """Returns the method by which the state of each environment is captured.

        Returns:
            For each environment, ``"get_state"``, ``"ale"``, ``"mujoco"``, ``"attributes"``,
            ``"pickle"``, ``"replay"``, or ``"none"`` if its state can't be captured. If the list
            contains ``"none"``, new episodes begin in all environments after a state is loaded.
        """
        with self._background.held():
            self._loop.rollout.settle()
            return [way for part in self._parts() for way in part.state_methods] or ["none"]

    def _parts(self) -> list[Any]:
        """Returns the parts of the environment whose states are captured one by one."""
        return state_parts(self._loop.env)

    @override
    def state_dict(self) -> dict[str, Any]:
        """Returns the state from which this or another collector can continue.

        The state holds counts, weights, the states of the environments, and everything else that
        the next batches depend on. A collector that is made with the same arguments, and loads the
        state, delivers the batches that this collector would have delivered. If the state of an
        environment can't be captured (see :meth:`env_state_methods`), new episodes begin instead.

        With ``trajs_per_batch``, the state includes the trajectories that have not been delivered
        yet.
        """
        with self._background.held():
            self._finish()
            state: dict[str, Any] = {
                # A copy, because transforms change their tensors in place.
                "env_state_dict": deepcopy(self._loop.env.state_dict()),
                **self._shared(),
                "traj_pool": {"traj_id": torch.tensor(self._loop.rollout.writer.episodes.next_id)},
            }
            module = module_of(self._policy)
            if module is not None:
                # A copy, because a policy may change its buffers in place.
                state["policy_state_dict"] = deepcopy(module.state_dict())
            if self._config.reset_kwargs is not None:
                state[BEGUN] = self._loop.begun()
            try:
                state[RESUME] = self._resume_state()
            except EnvStateError as error:
                # Without the traceback of the process that the environment is in.
                state[UNCAPTURED] = str(getattr(error, "original", None) or error)
        return state

    def _resume_state(self) -> dict[str, Any]:
        if not self._parts():
            raise EnvStateError(f"the state of {self._loop.env!r} can't be captured")
        return {
            "format": _FORMAT,
            "rollout": self._loop.rollout.state_dict(),
            "envs": [part.capture() for part in self._parts()],
            "at_start": self._loop.at_start,
            "seed": None if self._loop.seed is None else list(self._loop.seed),
            "env_restarts": 0 if self._loop.restarts is None else self._loop.restarts.count,
        }

    @override
    def _loader(self, state: State, how: LoadOptions, own: State | None) -> Callable[[], None]:
        mismatch = self.why_unloadable(state, how.strict, own)
        if mismatch is not None and how.raises:
            raise mismatch
        return partial(self._load, state, how, mismatch)

    def _load(self, state_dict: State, how: LoadOptions, mismatch: Exception | None) -> None:
        """Loads a state whose entries have been checked; an exception leaves it loaded in part."""
        module = module_of(self._policy)
        if module is not None and "policy_state_dict" in state_dict:
            weights = own_extra_state(state_dict["policy_state_dict"])
            module.load_state_dict(weights, strict=how.strict)
        self.resumed = self._load_episodes(state_dict, how, mismatch)
        begun = self._checked_begun(state_dict.get(BEGUN))
        if begun is not None:
            self._loop.load_begun(begun)
        if not self.resumed:
            self._begin_episodes(state_dict, how.strict)
        tracker = self._weights.tracker
        if tracker is not None and VERSION in state_dict:
            tracker.version = state_dict[VERSION]
        self._loop.rollout.drop_paused()
        self._load_shared(state_dict, 0)

    @override
    def _put_back(self, before: State | None) -> None:
        if before is None or RESUME not in before:
            # The environments can't be captured, and some may have changed.
            self._loop.restart()
        if before is not None:
            self._load(before, LoadOptions(True, True, RESUME in before), None)

    def why_unloadable(
        self, state_dict: State, strict: bool, own: State | None
    ) -> StateError | None:
        """Returns an error that says why the episodes of a state can't go on; None if they can.

        Args:
            state_dict: the state, which is not changed, and changes nothing.
            strict: whether weights are needed.
            own: the present state; None if it is not known.

        Raises:
            StateError: if other entries are missing or damaged.
        """
        module = module_of(self._policy)
        needed = ["policy_state_dict"] if strict and module is not None else []
        known: Any = UNKNOWN if own is None else self._with_template(own)
        check_collector(state_dict, known, needed)
        self._check_shared(state_dict)
        self._checked_begun(state_dict.get(BEGUN))
        try:
            self._check_episodes(state_dict.get(RESUME), {} if own is None else own.get(RESUME))
        except StateError as error:
            return error
        return None

    def _with_template(self, own: State) -> State:
        """Returns the present state, with an example of the frames of a trajectory."""
        if self._outbox.whole is None or not isinstance(self._loop.env, TensorDictEnv):
            return own
        batch = self._loop.rollout.writer.fake()
        self._loop.stamp(batch, self._weights.version)
        frames = self._outbox.delivery.frames(batch, batch.shape[-1])
        template = to_plain(frames.reshape(-1, frames.shape[-1])[0])
        return {**own, STATE: {**own[STATE], "template": template}}

    def _check_episodes(self, state: Any, own: Any) -> None:
        if state is None:
            return
        saved = state.get("format") if isinstance(state, Mapping) else None
        if type(saved) is int and saved != _FORMAT:
            raise StateError(
                f"the state has format {saved}, but this version of Trawl reads format "
                f"{_FORMAT}: use the version that saved it"
            )
        parts = self._parts()
        found = state.get("envs") if isinstance(state, Mapping) else None
        if isinstance(found, list) and len(parts) != len(found):
            raise StateError(
                f"the state has {len(found)} environments, but the collector has {len(parts)}: "
                "load it into a collector that is made with the same arguments"
            )
        place = f"state_dict[{RESUME!r}]"
        if not isinstance(found, list):
            EPISODES(state, place, own or UNKNOWN)
        # If a step under way fails, the next batch raises its error, unless the state is loaded.
        with suppress(Exception):
            self._loop.rollout.settle()
        for index, (part, one) in enumerate(zip(parts, found or (), strict=True)):
            with _named(index):
                part.check_state(one)
        # Afterwards, because sizes tell less than names of other environments.
        EPISODES(state, place, own or UNKNOWN)

    def _load_episodes(
        self, state_dict: State, how: LoadOptions, mismatch: Exception | None
    ) -> bool:
        """Continues the episodes of a state; returns False if new ones must begin."""
        state = state_dict.get(RESUME)
        if state is not None:
            try:
                if mismatch is not None:
                    raise mismatch
                self._resume(state, how.trust)
            except StateError as error:
                if how.raises:
                    raise
                warn(f"new episodes begin in all environments: {error}", RuntimeWarning)
            else:
                return True
        return False

    def _begin_episodes(self, state_dict: State, strict: bool) -> None:
        """Begins new episodes, and loads the entries that TorchRL's states have too."""
        if state_dict.get("env_state_dict"):
            # A copy, because transforms change their tensors in place.
            self._loop.env.load_state_dict(deepcopy(state_dict["env_state_dict"]), strict=strict)
        if not self._loop.at_start or RESUME in state_dict or BEGUN in state_dict:
            self._loop.restart()
        if "traj_pool" in state_dict:
            self._loop.rollout.writer.episodes.load(int(state_dict["traj_pool"]["traj_id"]))

    def _resume(self, state: State, trust: bool) -> None:
        self._loop.rollout.load_state_dict(state["rollout"])
        for index, (part, one) in enumerate(zip(self._parts(), state["envs"], strict=True)):
            with _named(index):
                part.restore(one, trust)
        # Environments may have drawn random numbers while they were restored.
        self._loop.rollout.load_random_state(state["rollout"])
        self._loop.at_start = state["at_start"]
        seed = state["seed"]
        self._loop.seed = None if seed is None else (int(seed[0]), bool(seed[1]), int(seed[2]))
        if self._loop.restarts is not None:
            self._loop.restarts.count = state["env_restarts"]

    def _checked_begun(self, begun: Any) -> NDArray[np.int64] | None:
        """Returns the numbers of the next episodes from a state; None if they are not needed."""
        if begun is None or self._config.reset_kwargs is None:
            return None
        count = len(self._loop.next_episodes)
        fits = isinstance(begun, (list, tuple)) and len(begun) == count
        if not fits or not all(type(one) is int and 0 <= one < 2**63 for one in begun):
            raise StateError(
                f"{BEGUN} in the state must be a list with a number for each of the {count} "
                f"environments, but it is {begun!r}"
            )
        return np.array(begun, np.int64)


def check_loadable(collector: Any, state: Mapping[str, Any], strict: bool) -> None:
    """Checks that a collector can load a state, without changing the collector.

    Raises:
        StateError: if it can't; the message says what differs.
    """
    own = getattr(getattr(collector, "parts", None), "state", None)
    if isinstance(own, LoopState):
        why = own.why_unloadable(state, strict, collector.state_dict())
        if why is not None:
            raise why


@contextmanager
def _named(index: int) -> Iterator[None]:
    """Adds the number of an environment to errors about its state."""
    try:
        yield
    except EnvStateError as error:
        raise EnvStateError(f"environment {index}: {error}") from error
    except Exception as error:
        # The methods of an environment may raise anything.
        why = f"environment {index} can't be restored: {type(error).__name__}: {error}"
        raise EnvStateError(why) from error
