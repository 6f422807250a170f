"""Logs of the actions of environments that may have to be replayed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trawl.envs.base import TensorDictEnv
from trawl.envs.logged import LoggedEnv
from trawl.keys import DONE, Key
from trawl.memory import Array
from trawl.rollout.episodes import EpisodeTracker
from trawl.rollout.steppers.arrays import from_bfloat16


def keep_logs(env: Any) -> list[tuple[int, LoggedEnv]]:
    """Makes environments keep logs, if they may have to be replayed.

    Args:
        env: the environment, which must be reset afterwards.

    Returns:
        Environments that may keep logs, each with its index. After the first reset, an environment
        keeps its log only if it needs one.
    """
    found, index = list[tuple[int, LoggedEnv]](), 0
    for part in env.parts if isinstance(env, TensorDictEnv) else ():
        if isinstance(part, LoggedEnv):
            part.keep_log()
            found.append((index, part))
        index += max(1, part.batch_size.numel())
    return found


class StepLogs:
    """Adds the steps of finished batches to the logs of environments.

    Args:
        found: environments that may keep logs, each with its index; they have been reset.
        next_obs: the observations after the last step by key, with a row for each environment.
        changed: keys of observations that the policy changes.
        bfloat16: keys of bfloat16 entries.
    """

    def __init__(
        self,
        found: list[tuple[int, LoggedEnv]],
        next_obs: Mapping[Key, Array],
        changed: frozenset[Key],
        bfloat16: frozenset[Key],
    ) -> None:
        self._logged = list[tuple[int, LoggedEnv, list[Array]]]()
        self._bfloat16 = bfloat16
        self._in_batch = False
        for index, env in found:
            keys = [leaf.key for leaf in env.observation_codec.leaves]
            if not changed.isdisjoint(keys):
                # A replay could not be compared with the changed observations.
                env.drop_log()
            if env.log is not None:
                chosen = _rows_of(env, index)
                observed = [next_obs[key][chosen] for key in keys]
                env.log.observed = observed
                self._logged.append((index, env, observed))

    def begin(self) -> None:
        """Prepares for a batch."""
        if self._in_batch:
            for _, env, _ in self._logged:
                if env.log is not None:
                    env.log.lose("a batch was given up before it was finished")
        self._in_batch = True

    def finish(self, rows: Mapping[Key, Array], episodes: EpisodeTracker, filled: int) -> None:
        """Adds the steps of a batch, before the tracker finishes it.

        Args:
            rows: the entries of the batch, ``(steps, num_envs, *leaf)``, by key.
            episodes: tracker of the environments' episodes.
            filled: number of steps.
        """
        self._in_batch = False
        for index, env, observed in self._logged:
            log, chosen = env.log, _rows_of(env, index)
            if log is None:
                continue
            log.observed = observed
            first = log.skipped if env.batch_size else episodes.first_row(index)
            log.skipped = 0
            actions = []
            for leaf in env.action_codec.leaves:
                array = rows[leaf.key][first:filled, chosen]
                actions.append(from_bfloat16(array) if leaf.key in self._bfloat16 else array)
            rewards = env.reward_rows(rows, chosen, first, filled)
            log.extend(actions, rewards, rows[DONE][first:filled, chosen, 0])


def _rows_of(env: LoggedEnv, index: int) -> Any:
    """Returns the index of an environment's rows in arrays for all environments."""
    return slice(index, index + env.batch_size.numel()) if env.batch_size else index
