"""Logs from which environments are replayed, if their state can't be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from trawl.envs.base import TensorDictEnv
from trawl.envs.batches.pool import Pool
from trawl.envs.capture import check_state, needs_log, way_of, ways_of
from trawl.envs.capture.action_log import ActionLog
from trawl.envs.capture.episode_log import EpisodeLog
from trawl.envs.capture.pool_log import PoolLog
from trawl.envs.reset_kwargs import ResetArguments
from trawl.envs.vector import VectorAdapter
from trawl.keys import REWARD, Key
from trawl.memory import Array


class LoggedEnv(TensorDictEnv):
    """The part of an environment that keeps a log, if it may have to be replayed.

    Attributes:
        log: log from which the environment can be replayed; None unless :meth:`keep_log` was
            called, and the environment's state can't be captured otherwise.
        reset_arguments: arguments that resets get besides those of the caller; None for none.
    """

    log: ActionLog | None = None
    reset_arguments: ResetArguments | None = None
    env: Any
    vector: VectorAdapter | None = None
    observation_codec: Any
    action_codec: Any
    _decided = False

    def keep_log(self) -> None:
        """Keeps a log from the next reset on, if the environment may have to be replayed.

        If steps are not taken by :meth:`step`, the caller adds them to :attr:`log`, and sets the
        observations in it.
        """
        if self._decided or self.log is not None or not self.action_codec.fixed:
            return
        if self.vector is None:
            self.log = EpisodeLog(self)
            return
        self._decided = True
        if self.vector.can_replay:
            self.log = self.vector.log = PoolLog(self)

    def decide_log(self) -> None:
        """Drops the log after the first reset, if the environment's state is plain data."""
        # Many environments have their attributes only after the first reset.
        if self.log is not None and not self._decided:
            self._decided = True
            self.log = self.log if needs_log(self.env) else None

    def drop_log(self) -> None:
        """Keeps no log any more."""
        self.log, self._decided = None, True
        if self.vector is not None:
            self.vector.log = None

    def renew_log(self) -> None:
        """Begins the log anew, after the environment was made anew."""
        if self.log is not None:
            self.log.remade()
        if isinstance(self.log, PoolLog) and self.vector is not None:
            self.vector.log = self.log

    def reset_simulator(self, **kwargs: Any) -> Any:
        """Resets a simulator that is not a vector environment, and notes this in its log."""
        return self.env.reset(**self.begin_log(kwargs))

    def begin_log(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Notes in the log how an episode begins, just before the reset that begins it.

        Args:
            arguments: arguments of the reset.

        Returns:
            The arguments, with those that all resets get.
        """
        if self.reset_arguments is not None:
            arguments = self.reset_arguments.following(arguments)
        if isinstance(self.log, EpisodeLog) and not self._is_known_plain():
            self.log.begin(self.env, arguments)
        return arguments

    def reward_rows(self, rows: Mapping[Key, Array], chosen: Any, first: int, stop: int) -> Array:
        """Returns the rewards that the log gets, with time as the first dimension.

        Args:
            rows: the entries of a batch, ``(steps, num_envs, *leaf)``, by key.
            chosen: index of the environment, or a slice.
            first: the first row.
            stop: the row after the last one.
        """
        return rows[REWARD][first:stop, chosen]

    def _is_known_plain(self) -> bool:
        """Returns True before the first reset of an environment that will need no log.

        Noting how an episode begins makes later steps slower in Python 3.11 and 3.12, because it
        reads the ``vars()`` of the environment. Gymnasium's own environments that are plain data
        before the first reset stay so. Others may get further attributes in their first reset.
        """
        own = type(self.env.unwrapped).__module__.startswith("gymnasium.envs.")
        return own and not self._decided and not needs_log(self.env)

    def replay_reset(self, arguments: Mapping[str, Any]) -> Sequence[Any]:
        """Resets a simulator that is not a vector environment, to repeat an episode.

        Returns:
            The leaves of the observation.
        """
        leaves: Sequence[Any] = self.observation_codec.encode(*self.env.reset(**arguments))
        return leaves

    def replay_step(self, action: Any) -> tuple[Sequence[Any], Any, bool]:
        """Repeats a step.

        Returns:
            The leaves of the observation, the reward, and True if the episode has ended.
        """
        obs, reward, terminated, truncated, info = self.env.step(action)
        return self.observation_codec.encode(obs, info), reward, bool(terminated or truncated)

    def rebuild(self) -> None:
        """Makes the simulator anew."""
        raise NotImplementedError

    @property
    @override
    def state_methods(self) -> list[str]:
        if isinstance(self.vector, Pool):
            return super().state_methods
        if self.vector is None:
            return [way_of(self.env, self.log)]
        return ways_of(self.env, self.log)

    @override
    def check_state(self, state: Mapping[str, Any]) -> None:
        check_state(self.env, state["env"], "state['env']", self.log)
