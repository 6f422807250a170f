"""Collector that runs evaluations, in a thread or in a worker."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from typing_extensions import override

from trawl.collectors.single import Collector
from trawl.collectors.torchrl import names
from trawl.envs.base import TensorDictEnv
from trawl.envs.batches.serial import build_env, close_made
from trawl.envs.gym import GymEnv
from trawl.envs.layers import layers_of
from trawl.envs.seeding import derive
from trawl.extras.evaluation.environments import (
    SeededEpisodes,
    Video,
    dump_videos,
    freeze,
    is_simulators,
    seed_globals,
    seeded,
    simulators,
    video_of,
)
from trawl.extras.evaluation.snapshot import private_copy
from trawl.keys import STEP_COUNT, Key, as_key, next_of, show_key, show_keys
from trawl.rollout.policy.random_policy import RandomPolicy


class EvaluationCollector(Collector):
    """Collects the episodes of evaluations.

    Args:
        create_env_fn: source of the environment.
        policy: the policy, or None with ``policy_factory``.
        policy_factory: function that makes the policy; called with the environment if it takes an
            argument.
        **options: further options of a :class:`~trawl.collectors.Collector`.
    """

    _counts_twice = True

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        env = build_env(create_env_fn, options.pop("create_env_kwargs", None), name="env")
        self._undo: list[Callable[[], Any]] = []
        self._limit: int | None = None
        try:
            # Before the first reset, which would change statistics that the learner may share.
            self._undo = freeze(env)
            if _counts_steps(env):
                self._limit = options.pop("max_frames_per_traj", None)
            if policy_factory is not None:
                options["policy_factory"] = partial(made_policy, policy_factory, env)
            super().__init__(env, policy, **options)
        except BaseException:
            self._give_back(env)
            with suppress(Exception):
                close_made(env, create_env_fn)
            raise

    def begin_evaluation(
        self, seed: int, workers: int, episodes: int, record: bool, alone: bool, paired: bool
    ) -> tuple[list[Key], bool]:
        """Begins the first episodes of an evaluation, or of a round.

        Args:
            seed: seed of the evaluation.
            workers: number of workers that evaluate.
            episodes: number of episodes, over all workers.
            record: whether videos are made.
            alone: whether no other thread draws random numbers in this process.
            paired: whether episodes begin equally whatever the policy does.

        Returns:
            Keys of the environment's rewards, without ``"next"``; and whether each episode has a
            seed of its own. Otherwise, only the first one has.
        """
        worker = self.config.worker_idx or 0
        by_episode = seeded(self.env, worker, workers, episodes, record, self._limit)
        self._undo += freeze(self.env, before_data=True)
        own = worker_seed(seed, worker)
        if paired:
            seed_globals(own)
        if by_episode:
            # Before the first reset, so that each evaluation draws equally many random numbers.
            for simulator in simulators(self.env):
                simulator.begin(seed, paired)
        if alone:
            self.set_seed(own)
        else:
            if not by_episode:
                self.env.set_seed(own)
            self.reset()
        return [as_key(key) for key in self.env.reward_keys], by_episode

    @override
    def _close(self, close_env: bool) -> None:
        try:
            super()._close(close_env)
        finally:
            self._give_back(self.env)

    def _give_back(self, env: Any) -> None:
        """Undoes what was changed in environments for evaluations: they may be the user's."""
        for layer in layers_of(env):
            if isinstance(layer, GymEnv) and isinstance(layer.env, SeededEpisodes):
                layer.env = layer.env.env
        while self._undo:
            self._undo.pop()()

    def check_rewards(self, keys: Sequence[Key]) -> None:
        """Checks that batches can have the entries that are counted as rewards.

        Entries that a policy writes, and those of TorchRL's environments, are not checked.

        Args:
            keys: keys of the entries in batches.

        Raises:
            ValueError: if there is no such entry.
        """
        env = self.env
        if not isinstance(env, TensorDictEnv):
            return
        specs = (env.full_observation_spec, env.full_reward_spec, env.full_done_spec)
        known = {next_of(as_key(key)) for spec in specs for key in spec.keys(True, True)}
        known.add(next_of(STEP_COUNT))
        for key in keys:
            if key not in known and (key[0] == "next" or next_of(key) in known):
                rewards = {next_of(as_key(one)) for one in env.reward_keys}
                raise ValueError(
                    f"reward_keys has {show_key(key)}, which is no result of a step of {env!r}: "
                    f"its rewards are {show_keys(rewards)}"
                )

    def end_evaluation(self, step: int, record: bool) -> Video | None:
        """Ends an evaluation.

        Args:
            step: number of the step at which videos are logged.
            record: whether videos are made.

        Returns:
            A video of the first episode, as a uint8 array of shape
            ``(steps + 1, height, width, 3)``; None if the episode was not rendered here.
        """
        if not record:
            return None
        dump_videos(self.env, step)
        return video_of(self.env)


def _counts_steps(env: Any) -> bool:
    """Returns True if simulators, whose episodes are limited here, have a count of their own."""
    return is_simulators(env) and STEP_COUNT[0] in names(env.full_observation_spec)


def evaluation_class(kind: type[Collector]) -> type[EvaluationCollector]:
    """Returns an ``EvaluationCollector`` class that has the methods of a user's class.

    Args:
        kind: ``Collector``, or a subclass of it.
    """
    if issubclass(EvaluationCollector, kind):
        return EvaluationCollector
    return type(f"Evaluation{kind.__name__}", (EvaluationCollector, kind), {})


def worker_seed(seed: int, worker: int) -> int:
    """Returns a worker's seed, for its policy and for environments not seeded by episode."""
    return derive(seed, "worker", worker)


def made_policy(factory: Callable[..., Any], env: Any) -> Any:
    """Returns the policy that a factory makes for an environment.

    If the factory returns None, the policy is random. A module is copied, because it may be
    trained in this process.
    """
    policy = factory(env) if _takes_argument(factory) else factory()
    return RandomPolicy(env.full_action_spec) if policy is None else private_copy(policy)


def _takes_argument(factory: Callable[..., Any]) -> bool:
    """Returns True if a factory has to be called with the environment."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # the factory has no signature to inspect
        return True
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    )
    positional = [p for p in parameters if p.kind in kinds]
    required = [p for p in positional if p.default is inspect.Parameter.empty]
    return bool(required) or any(p.name == "env" for p in positional[:1])
