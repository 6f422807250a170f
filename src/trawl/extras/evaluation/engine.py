"""Engine that runs evaluations one after the other, with a collector here or elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from trawl.checks import check_frames
from trawl.collectors.base import BaseCollector
from trawl.collectors.config import muted
from trawl.collectors.multi import MultiSyncCollector
from trawl.collectors.options import at_least, one_of, option, validate
from trawl.collectors.single import Collector
from trawl.envs.batches.serial import batch_source, given_envs
from trawl.envs.seeding import derive
from trawl.extras.evaluation.environments import Video
from trawl.extras.evaluation.isolation import (
    PrivateRandom,
    isolated,
    kept_globals,
    policy_seed,
)
from trawl.extras.evaluation.options import (
    check_env,
    keys_or_none,
    normalization_or_none,
    normalizing_options,
    single_key,
)
from trawl.extras.evaluation.reading import EpisodeReader, EvaluatedEpisodes
from trawl.extras.evaluation.snapshot import private_copy
from trawl.extras.evaluation.worker import evaluation_class, worker_seed
from trawl.keys import Key, next_of
from trawl.rollout.normalization import Normalization, SharedStatistics, load_statistics
from trawl.weights.tensors import Weights

# Steps of each environment in a batch. An evaluation may run up to this many more steps than it
# needs. Environments that are done are idle in these steps.
_STEPS = 100


# Number of episodes of an environment that is never idle.
_ENDLESS = 1 << 62


class EvaluationStopped(Exception):
    """Error that ends an evaluation because the evaluator was shut down."""


@dataclass(frozen=True)
class Setup:
    """Everything that an evaluation needs, except weights.

    Attributes:
        env: source of the environments.
        policy: the policy, if there is no factory.
        policy_factory: function that makes the policy in the process in which it acts.
        backend: ``"thread"``, ``"process"`` or ``"ray"``.
        num_workers: number of workers.
        num_envs: number of environments of each worker.
        num_trajectories: number of episodes.
        max_steps: number of steps after which an episode is truncated, or None.
        frames_per_batch: number of frames that all environments together collect at a time; None
            for a default.
        collector_class: the class of each worker's collector.
        options: further options of the collector.
        normalization: statistics of the learner's collector, or None.
        keep: whether whole trajectories are needed.
        dump_video: whether videos are made.
        per_env: whether each environment contributes an equal number of episodes; otherwise, the
            first episodes that end count.
        traj_format: layout of the whole trajectories: ``"padded"`` or ``"cat"``.

    Raises:
        ValueError: if a number is out of range, or the environment does not fit the backend or
            the numbers of workers and environments.
        TypeError: if a number is not an integer.
    """

    env: Any
    policy: Any
    policy_factory: Callable[..., Any] | None
    backend: str
    exploration_type: InteractionType | None
    num_workers: int = option(1, at_least(1))
    num_envs: int = option(1, at_least(1))
    num_trajectories: int = option(10, at_least(1))
    max_steps: int | None = option(None, at_least(1))
    frames_per_batch: int | None = option(None, at_least(1, check_frames))
    reward_keys: Any = option(None, keys_or_none)
    done_keys: Any = option(("next", "done"), single_key)
    collector_class: type[Collector] = Collector
    options: Mapping[str, Any] = field(default_factory=dict)
    normalization: Normalization | None = option(None, normalization_or_none)
    keep: bool = False
    dump_video: bool = option(True, lambda _, value: bool(value))
    per_env: bool = True
    traj_format: str = option("padded", one_of("padded", "cat"))

    def __post_init__(self) -> None:
        validate(self)
        check_env(self.env, self.backend, self.num_workers, self.num_envs)

    @property
    def lazy(self) -> bool:
        """True if factories make everything at the first evaluation, as in TorchRL."""
        return self.policy_factory is not None and not given_envs(self.env)

    @property
    def threaded(self) -> bool:
        """True if the environments are stepped by a thread of this process."""
        return self.backend == "thread"


@dataclass(frozen=True)
class Measured:
    """Outcome of an evaluation.

    Attributes:
        trajectories: whole trajectories, padded; None if they were not needed.
        seconds: time that the evaluation took.
        frames: number of steps in the evaluation's episodes.
    """

    episodes: EvaluatedEpisodes
    trajectories: TensorDictBase | None
    video: Video | None
    seconds: float
    frames: int


class EvaluationEngine:
    """Runs evaluations with one collector, in the calling thread.

    Args:
        setup: everything that the evaluations need, except weights.
        stopping: event that ends an evaluation as soon as possible when it is set.
    """

    def __init__(self, setup: Setup, stopping: threading.Event) -> None:
        self.setup = setup
        self._stopping = stopping
        self._collector: BaseCollector | None = None

    def open_for_caller(self) -> None:
        """Makes everything while the caller waits, whose generators stay as they are."""
        with self._globals_kept(True), self._isolation(0):
            self.open()

    def open(self) -> None:
        """Makes the environments, the policy and the workers, unless they exist already.

        Raises:
            ValueError: if the environments lack rewards, or the statistics don't fit them.
            Exception: any error of an environment, the policy or a worker.
        """
        if self._collector is None or self._collector.closed:
            self._collector = _make_collector(self.setup, self._stopping)
            try:
                self._check(self._collector)
            except BaseException:
                self.close()  # the next evaluation checks again
                raise

    def _check(self, collector: BaseCollector) -> None:
        """Checks that the setup fits the environments."""
        setup, own = self.setup, collector.normalization
        # The class of a user may add entries to batches.
        if setup.reward_keys is not None and setup.collector_class is Collector:
            collector.map_fn("check_rewards", [(setup.reward_keys,)] * setup.num_workers)
        if own is not None and setup.normalization is not None:
            own.check_shared("normalization", setup.normalization.share())

    def run(
        self,
        weights: Mapping[str, Weights],
        seed: int,
        step: int,
        statistics: SharedStatistics | None = None,
        paired: bool = False,
    ) -> Measured:
        """Runs one evaluation.

        Args:
            weights: weights by model.
            seed: seed of the episodes.
            step: number of the step at which videos are logged.
            statistics: statistics with which observations are normalised; None if they are not.
            paired: whether each environment contributes an equal number of episodes, which begin
                equally whatever the policy does. The caller must be waiting, because the global
                generators are used meanwhile.

        Raises:
            EvaluationStopped: if the evaluator was shut down meanwhile.
            Exception: any error of an environment, the policy, or a worker that is not replaced.
        """
        with self._globals_kept(paired), self._isolation(seed) as random:
            self.open()
            collector = self._collector
            assert collector is not None
            if weights:
                collector.update_policy_weights_(weights_dict=dict(weights))
            load_statistics(collector.normalization, statistics)
            while True:
                restarts = collector.stats().get("restarts", 0)
                measured = self._run_once(collector, seed, step, random, paired)
                if collector.stats().get("restarts", 0) == restarts:
                    return measured
                # A worker that was replaced began its episodes anew, so this run doesn't count.

    def _run_once(
        self,
        collector: BaseCollector,
        seed: int,
        step: int,
        random: PrivateRandom | None,
        paired: bool,
    ) -> Measured:
        setup, began = self.setup, time.perf_counter()
        count, record, per_env = setup.num_trajectories, setup.dump_video, paired or setup.per_env
        # The first episodes that end may all be those of one environment.
        share = count if per_env else _ENDLESS

        def begin(seed: int) -> tuple[list[Key], bool]:
            if random is not None:
                random.seed(policy_seed(worker_seed(seed, 0)))
            each = (seed, setup.num_workers, share, record, not setup.threaded, paired)
            found: list[Any] = collector.map_fn("begin_evaluation", [each] * setup.num_workers)
            keys, by_episode = found[0]
            return keys, by_episode

        own, by_episode = begin(seed)
        keys = setup.reward_keys or tuple(map(next_of, own))
        # Environments without a seed for each episode begin the episodes of a round together.
        rounds = 0 if by_episode or not paired else 1
        keep = setup.keep and not paired
        reader = EpisodeReader(count, keys, setup.done_keys, keep, per_env, bool(rounds))
        while not reader.complete:
            self._check_stop()
            if rounds and reader.round_complete:
                reader.begin_round()
                begin(derive(seed, "round", rounds))
                rounds += 1
            batch = collector.next()
            if batch is None:
                raise EvaluationStopped("the evaluator was shut down during an evaluation")
            self._check_stop()
            reader.add(batch)
        seconds = time.perf_counter() - began
        videos = collector.map_fn("end_evaluation", [(step, record)] * setup.num_workers)
        trajectories = reader.trajectories(setup.traj_format) if keep else None
        video = next((video for video in videos if video is not None), None)
        return Measured(reader.result(seed), trajectories, video, seconds, reader.frames)

    def _globals_kept(self, paired: bool) -> AbstractContextManager[Any]:
        """Returns a context that keeps the caller's generators of numpy and random."""
        return kept_globals() if paired and self.setup.threaded else nullcontext()

    def _check_stop(self) -> None:
        if self._stopping.is_set():
            raise EvaluationStopped("the evaluator was shut down during an evaluation")

    def _isolation(self, seed: int) -> AbstractContextManager[PrivateRandom | None]:
        """Returns a context that gives a thread its own random numbers and exploration type.

        Unless the backend is a thread, the context does nothing: workers run in other processes.
        """
        return isolated(seed) if self.setup.threaded else nullcontext()

    def interrupt(self, timeout: float) -> None:
        """Ends the workers and thereby the current evaluation; another thread may call this."""
        if self._collector is not None and not self.setup.threaded:
            self._collector.shutdown(timeout=timeout, raise_on_error=False)

    def close(self, timeout: float | None = None) -> None:
        """Closes the environments and ends the workers."""
        if self._collector is not None:
            self._collector.shutdown(timeout=timeout)
            self._collector = None


def _make_collector(setup: Setup, stopping: threading.Event) -> BaseCollector:
    """Makes the collector that a setup asks for."""
    num_envs = setup.num_workers * setup.num_envs
    frames = setup.frames_per_batch or min(_STEPS, setup.max_steps or _STEPS) * num_envs
    options: dict[str, Any] = {
        **setup.options,
        **normalizing_options(setup.normalization),
        "frames_per_batch": -(-frames // num_envs) * num_envs,
        "max_frames_per_traj": setup.max_steps,
        "exploration_type": setup.exploration_type,
        "policy_factory": setup.policy_factory,
    }
    kind = evaluation_class(setup.collector_class)
    policy = None if setup.policy is None else private_copy(setup.policy)
    source = batch_source(setup.env, setup.num_envs, setup.options.get("create_env_kwargs"))
    # Mutes warnings that frames_per_batch is rounded. Its default is not the user's choice, and
    # an environment may be a batch of any size.
    with muted():
        if setup.threaded:
            return kind(source, policy, interruptor=stopping.is_set, **options)
        if setup.backend == "process":
            return MultiSyncCollector(
                [source] * setup.num_workers, policy, collector_class=kind, **options
            )
        from trawl.collectors.distributed import RayCollector

        return RayCollector(
            [source] * setup.num_workers, policy, collector_class=kind, sync=True, **options
        )
