"""Evaluation of a policy during its training."""

from __future__ import annotations

import secrets
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType
from torch import nn

from trawl.checks import check_seconds
from trawl.collectors.options import check_callable, one_of
from trawl.envs.arguments import lists_arguments
from trawl.envs.seeding import check_seed
from trawl.extras.evaluation.engine import EvaluationEngine, EvaluationStopped, Setup
from trawl.extras.evaluation.options import (
    check_factories,
    check_policies,
    collector_options,
    place,
)
from trawl.extras.evaluation.results import (
    Comparison,
    EvaluationResult,
    as_tensordict,
    comparison_of,
    metrics_of,
    result_of,
)
from trawl.extras.evaluation.snapshot import check_different, snapshot, snapshots
from trawl.extras.evaluation.thread import EvaluationThread
from trawl.keys import DONE
from trawl.rollout.normalization import Normalization, SharedStatistics
from trawl.schema.checks import UNKNOWN
from trawl.schema.states import EVALUATOR
from trawl.weights.tensors import Weights


class Evaluator:
    """Evaluates a policy, while the caller waits or continues training.

    Each evaluation runs ``num_trajectories`` whole episodes. By default, every environment
    contributes the same number of episodes. If ``num_trajectories`` is not a multiple of the number
    of environments, the first environments contribute one more. Each episode begins with a seed
    that depends only on ``seed`` and the number of the episode. The same weights therefore give the
    same result, on every backend and with any number of environments.

    The learner is not affected: the policy is evaluated as a copy in evaluation mode, weights are
    copied at the call, and an evaluating thread has its own random numbers and exploration type.

    Args:
        env: a Gymnasium id, or a function that makes an environment of any kind that a collector
            accepts; or a list of these, stepped as one batch. With ``backend="thread"``, ``env``
            may also be an existing environment, which the evaluator closes when it is shut down.
        policy: the policy; a module is copied.
        policy_factory: function that makes the policy, as an alternative to ``policy``. The
            function is called in the process that evaluates, with the environment if it takes an
            argument. If it returns None, actions are random. Everything is then made by the first
            evaluation, or by :meth:`open`.
        num_trajectories: number of episodes in an evaluation.
        max_steps: number of steps after which an episode is truncated; None for no limit.
        frames_per_batch: number of frames that all environments together collect at a time; by
            default up to 100 for each environment.
        collector_cls: a subclass of :class:`~trawl.collectors.Collector` that evaluates, or
            ``MultiSyncCollector`` to evaluate in another process.
        collector_kwargs: further options of the collector.
        weight_sync_schemes: schemes that send weights to workers, by model. If schemes are given,
            ``backend="thread"`` is treated as ``"process"``.
        log_prefix: prefix of the names of metrics.
        reward_keys: key, or list of keys, of the rewards, which are averaged over all agents; by
            default, all rewards of the environment.
        done_keys: key of the flag that marks the end of an episode.
        device: device of the policy; by default, the device of its parameters.
        exploration_type: how probabilistic policies act.
        metrics_fn: function that returns additional metrics, by name. It is called with the whole
            trajectories, of shape ``(num_trajectories, longest)``, which are padded with zeros
            where ``("collector", "mask")`` is False. If the evaluator has a metric of the same
            name, such as ``"reward"``, the function's value replaces it.
        dump_video: whether videos are made. If True, TorchRL's video recorders write their videos.
            The first episode is also rendered if the environment's ``render_mode`` is
            ``"rgb_array"``.
        on_result: function that is called with the metrics of each evaluation, as a TensorDict, in
            the thread that evaluates.
        episode_sampling: which episodes :meth:`evaluate` uses. With ``"per_env"``, every
            environment contributes the same number of episodes; with ``"first_done"``, the first
            episodes that end, among which short ones are over-represented.
        busy_policy: behaviour of :meth:`trigger_eval` while another evaluation is running:
            ``"skip"``, ``"queue"`` or ``"error"``.
        backend: where to evaluate: in a ``"thread"`` of this process, in another ``"process"`` on
            this machine, or in an actor of a ``"ray"`` cluster.
        init_fn: function that is called in each process or actor before anything else.
        num_gpus: with Ray, the number of GPUs of each actor. The default is the same as for
            :class:`~trawl.collectors.distributed.RayCollector`.
        ray_kwargs: with Ray, further options of the actors.
        num_envs: number of environments in each worker, which are stepped as a batch.
        num_workers: number of processes or actors.
        seed: seed of the episodes; None for a new seed in each evaluation.
        normalization: attribute ``normalization`` of the learner's collector. Each evaluation
            normalises observations with the statistics of the moment, and doesn't change them.

    Raises:
        ValueError: if a value is invalid, or arguments contradict each other.
        TypeError: if an argument has the wrong type.
        ImportError: if ``backend`` is ``"ray"``, but Ray is not installed.
        Exception: any error that occurs while the environment or the policy is made.

    Examples:
        >>> from tensordict.nn import TensorDictModule
        >>> from torch import nn
        >>> from trawl.collectors import Evaluator
        >>> policy = TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"])
        >>> with Evaluator("Pendulum-v1", policy, num_trajectories=4, max_steps=20) as evaluator:
        ...     metrics = evaluator.evaluate()
        >>> metrics["eval/num_episodes"], metrics["eval/episode_length"]
        (4, 20.0)
    """

    @lists_arguments
    def __init__(
        self,
        env: Any,
        policy: Any = None,
        *,
        policy_factory: Callable[..., Any] | None = None,
        num_trajectories: int = 10,
        max_steps: int | None = None,
        frames_per_batch: int | None = None,
        collector_cls: type | str | None = None,
        collector_kwargs: Mapping[str, Any] | None = None,
        weight_sync_schemes: Mapping[str, Any] | None = None,
        log_prefix: str = "eval",
        reward_keys: Any = None,
        done_keys: Any = DONE,
        device: torch.device | str | None = None,
        exploration_type: InteractionType | None = InteractionType.DETERMINISTIC,
        metrics_fn: Callable[[TensorDictBase], Mapping[str, Any]] | None = None,
        dump_video: bool = True,
        on_result: Callable[[TensorDict], Any] | None = None,
        episode_sampling: Literal["first_done", "per_env"] = "per_env",
        busy_policy: str = "skip",
        backend: str = "thread",
        init_fn: Callable[[], Any] | None = None,
        num_gpus: float | None = None,
        ray_kwargs: Mapping[str, Any] | None = None,
        num_envs: int = 1,
        num_workers: int = 1,
        seed: int | None = 0,
        normalization: Normalization | None = None,
    ) -> None:
        check_policies(env, policy, policy_factory)
        self.busy_policy = one_of("skip", "error", "queue")("busy_policy", busy_policy)
        kind, self.backend = place(backend, collector_cls, weight_sync_schemes)
        self.policy, self.log_prefix = policy, log_prefix
        self.seed = None if seed is None else check_seed(seed)
        self._metrics_fn, self._on_result = metrics_fn, on_result
        more = {"init_fn": init_fn, "weight_sync_schemes": weight_sync_schemes}
        options = collector_options(
            self.backend, collector_kwargs, policy, device, more, num_gpus, ray_kwargs
        )
        self.episode_sampling = one_of("first_done", "per_env")(
            "episode_sampling", episode_sampling
        )
        self.normalization = normalization
        setup = Setup(
            env=env,
            policy=policy,
            policy_factory=policy_factory,
            backend=self.backend,
            num_workers=num_workers,
            num_envs=num_envs,
            num_trajectories=num_trajectories,
            max_steps=max_steps,
            frames_per_batch=frames_per_batch,
            exploration_type=exploration_type,
            reward_keys=reward_keys,
            done_keys=done_keys,
            collector_class=kind,
            options=options,
            normalization=normalization,
            keep=metrics_fn is not None,
            dump_video=dump_video,
            per_env=self.episode_sampling == "per_env",
            traj_format=options.pop("traj_format", None) or "padded",
        )
        self.num_trajectories = setup.num_trajectories
        self._steps, self._lock, self._results = 0, threading.Lock(), PendingResults()
        self._start(setup)

    def _start(self, setup: Setup) -> None:
        """Starts the thread, and makes the environments and the policy there."""
        check_callable("metrics_fn", self._metrics_fn)
        check_callable("on_result", self._on_result)
        stopping = threading.Event()
        self._engine = engine = EvaluationEngine(setup, stopping)
        self._thread = EvaluationThread("Evaluator", stopping, engine.close, engine.interrupt)
        try:
            if setup.lazy:
                check_factories(setup.env)
            else:
                self.open()
        except BaseException:
            self._thread.request_stop()
            raise

    def open(self) -> None:
        """Makes the environments, the policy and the workers, unless they exist already.

        The constructor does this itself, unless there is a ``policy_factory``. The first evaluation
        does it then, and raises the errors of the functions that make them.

        Raises:
            RuntimeError: if the evaluator was shut down.
            Exception: any error of an environment, the policy or a worker.
        """
        self._thread.call(self._engine.open_for_caller).result()

    # --- evaluating

    def evaluate(
        self,
        weights: Any = None,
        step: int | None = None,
        *,
        weights_dict: Mapping[str, Any] | None = None,
    ) -> EvaluationResult:
        """Evaluates the policy, and waits for the result.

        Evaluations that were triggered earlier run first. The result contains these metrics, with
        the prefix before each name:

        - ``reward``, the mean of the episodes' returns, with the standard deviation
          ``reward_std`` of the returns and the standard error ``reward_sem`` of the mean.
        - ``reward_iqm``, the interquartile mean of the returns.
        - ``reward_ci_low`` and ``reward_ci_high``, the ends of the 95 % bootstrap interval of the
          mean.
        - ``GROUP/reward`` for each group of agents, the mean return of its agents.
        - ``num_episodes``, ``episode_length``, ``fps`` and ``step``.
        - The metrics that ``metrics_fn`` returns.
        - ``video``, if there is one: a uint8 tensor of shape ``(steps + 1, height, width, 3)``.

        Args:
            weights: weights of the policy: a module, a TensorDict, or a mapping of tensors. None:
                the current weights of the policy that was passed to the constructor; a policy
                made by a factory keeps its weights.
            step: number of the step at which the result is logged. None: the next number of a
                counter.
            weights_dict: weights by model. A model is named ``"policy"``, or by a path such as
                ``"env.transform[0]"``.

        Returns:
            The metrics. The attribute ``episodes`` has the return and length of each episode.

        Raises:
            RuntimeError: if the evaluator was shut down.
            Exception: any error of the environment, the policy, a worker, or a callback.
        """
        self._results.raise_failure()
        return self._submit(snapshots(self.policy, weights, weights_dict), step).result()

    def trigger_eval(
        self,
        weights: Any = None,
        step: int | None = None,
        *,
        weights_dict: Mapping[str, Any] | None = None,
    ) -> bool:
        """Starts an evaluation without waiting for it.

        Args:
            weights: weights of the policy (see :meth:`evaluate`). They are copied at once.
            step: number of the step (see :meth:`evaluate`). A skipped evaluation doesn't advance
                the counter.
            weights_dict: weights by model (see :meth:`evaluate`). They are copied at once.

        Returns:
            True if there will be a result; False if another evaluation is running and
            ``busy_policy`` is ``"skip"``.

        Raises:
            RuntimeError: if another evaluation is running and ``busy_policy`` is ``"error"``, or
                the evaluator was shut down.
            Exception: the error of an earlier evaluation, if its result was not retrieved.
        """
        self._results.raise_failure()
        if self.pending and self.busy_policy != "queue":
            if self.busy_policy == "skip":
                return False
            raise RuntimeError(
                "an evaluation is still running: call wait() first, or pass busy_policy='skip' "
                "or 'queue'"
            )
        future = self._submit(snapshots(self.policy, weights, weights_dict), step)
        # A callback has received the earlier results already.
        self._results.add(future, newest_only=self._on_result is not None)
        return True

    def evaluate_episodes(
        self,
        weights: Any = None,
        step: int | None = None,
        *,
        weights_dict: Mapping[str, Any] | None = None,
        seed: int | None = None,
    ) -> TensorDict:
        """Evaluates the policy, waits, and returns an entry for each episode.

        Every environment contributes the same number of episodes. Neither ``on_result`` nor
        ``metrics_fn`` is called, and the counter of steps doesn't advance. The generators of the
        calling process are as before.

        Args:
            weights: weights of the policy (see :meth:`evaluate`).
            step: number of the step at which videos are logged; None: the next number of the
                counter.
            weights_dict: weights by model (see :meth:`evaluate`).
            seed: seed of the episodes. With the same seed, an episode begins in the same way
                whatever the policy does, so that results of several policies are paired (see
                :func:`~trawl.collectors.paired_comparison`). None: the evaluator's seed.

        Returns:
            A TensorDict of batch size ``(num_trajectories,)`` with the entries
            ``"episode_reward"`` (float32; the mean over agents), ``"episode_length"`` (int64),
            ``"truncated"`` (bool) and ``"env_index"`` (int64), the index of the environment.

        Raises:
            RuntimeError: if an evaluation that was triggered is pending, or the evaluator was shut
                down.
            TypeError: if the seed is not an integer.
            ValueError: if the seed is negative.
            Exception: any error of the environment, the policy or a worker.
        """
        if seed is not None:
            seed = check_seed(seed)
        self._results.raise_failure()
        self._check_idle("evaluate_episodes()")
        copies = snapshots(self.policy, weights, weights_dict)
        number = self._steps if step is None else step
        call = partial(
            self._engine.run, copies, self._seed_or(seed), number, self._statistics(), paired=True
        )
        episodes = self._thread.call(call).result().episodes
        found = {
            "episode_reward": torch.from_numpy(episodes.returns).float(),
            "episode_length": torch.from_numpy(episodes.lengths),
            "truncated": torch.from_numpy(episodes.truncated),
            "env_index": torch.from_numpy(episodes.env_index),
        }
        return TensorDict(found, [len(episodes)])

    def compare(self, first: Any = None, second: Any = None) -> Comparison:
        """Evaluates two policies on the same episodes, and compares them episode by episode.

        Both policies face the same variation between episodes, such as different initial states.
        A comparison therefore needs far fewer episodes than two evaluations on different episodes.
        The counter of steps doesn't advance.

        Args:
            first: weights of the first policy (see :meth:`evaluate`). None: the current weights of
                the policy that was passed to the constructor, or the latest weights of a policy
                made by a factory.
            second: weights of the second policy. None: the current weights of the policy that was
                passed to the constructor.

        Returns:
            The difference, its confidence interval, and both results.

        Raises:
            ValueError: if both policies are the same, or there is no second policy.
            RuntimeError: if the evaluator was shut down.
            Exception: any error of the environment, a policy, a worker, or a callback.
        """
        check_different(self.policy, first, second)
        self._results.raise_failure()
        seed = secrets.randbits(31) if self.seed is None else self.seed
        copies = [snapshots(self.policy, weights, None) for weights in (first, second)]
        futures = [self._submit(one, self._steps, seed, paired=True) for one in copies]
        return comparison_of(*(future.result() for future in futures))

    def _submit(
        self,
        weights: Mapping[str, Weights],
        step: int | None,
        seed: int | None = None,
        paired: bool = False,
    ) -> Future[EvaluationResult]:
        with self._lock:
            number = self._steps if step is None else step
            call = partial(
                _evaluated,
                self._engine,
                weights,
                self._seed_or(seed),
                number,
                self._statistics(),
                self.log_prefix,
                self._metrics_fn,
                self._on_result,
                paired,
            )
            future = self._thread.call(call)
            self._steps += step is None
        return future

    def _seed_or(self, seed: int | None) -> int:
        seed = self.seed if seed is None else seed
        # Drawn from the system, because the learner's generators must not be used.
        return secrets.randbits(31) if seed is None else seed

    def _statistics(self) -> SharedStatistics | None:
        return None if self.normalization is None else self.normalization.frozen()

    # --- results

    @property
    def pending(self) -> bool:
        """True if an evaluation that was triggered is running, or waits for its turn."""
        return self._results.awaited

    def poll(self, timeout: float = 0) -> EvaluationResult | None:
        """Returns the next result of a triggered evaluation; each result is returned once.

        Results are returned in the order in which the evaluations were triggered.

        Args:
            timeout: seconds to wait for the result.

        Returns:
            The result; None if it is not ready yet, or no result is expected.

        Raises:
            Exception: the error of the evaluation, if it failed.
        """
        return self.wait(timeout)

    def wait(self, timeout: float | None = None) -> EvaluationResult | None:
        """Waits for the next result of a triggered evaluation.

        Args:
            timeout: seconds to wait; None for no limit.

        Returns:
            The result; None if it is not ready in time, or no result is expected.

        Raises:
            Exception: the error of the evaluation, if it failed.
        """
        return self._results.pop(None if timeout is None else check_seconds("timeout", timeout))

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Returns a dict with the number of the next step, under ``"step_counter"``.

        Raises:
            RuntimeError: if an evaluation is running, or its result was not retrieved, which the
                state would not contain. Results that ``on_result`` received count as retrieved.
        """
        self._check_idle("state_dict()")
        if self._on_result is None and len(self._results):
            raise RuntimeError(
                f"state_dict() does not contain the {len(self._results)} result(s) of evaluations "
                "that were not retrieved: call wait() for each of them first"
            )
        return {"step_counter": self._steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the counter of steps from a state that :meth:`state_dict` returned.

        Raises:
            RuntimeError: if an evaluation is running.
            StateError: if the state has no ``"step_counter"``, or it is no count. In this case,
                nothing is changed.
        """
        self._check_idle("load_state_dict()")
        EVALUATOR(state_dict, "the state", UNKNOWN)
        self._steps = state_dict["step_counter"]

    def _check_idle(self, what: str) -> None:
        if self.pending:
            raise RuntimeError(
                f"{what} can't be called while an evaluation is running: call wait() first"
            )

    @staticmethod
    def extract_weights(policy: nn.Module) -> TensorDict:
        """Returns a copy of a policy's parameters and buffers, on the CPU."""
        return TensorDict(snapshot(policy).tensors, device="cpu").unflatten_keys(".")

    # --- the end

    def shutdown(self, timeout: float = 5.0) -> None:
        """Ends the current evaluation and closes the environments; may be called repeatedly.

        Evaluations that wait for their turn are cancelled. Finished results stay available.

        Args:
            timeout: seconds to wait for the current evaluation. Workers that take longer are
                killed; a thread ends after its current step.
        """
        self._thread.stop(check_seconds("timeout", timeout))
        for error in self._results.close():
            if not isinstance(error, EvaluationStopped):
                warnings.warn(f"an evaluation failed: {error!r}", RuntimeWarning, stacklevel=2)

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        # There is no thread if the constructor failed.
        thread = self.__dict__.get("_thread")
        if thread is not None:
            thread.request_stop()


def _evaluated(
    engine: EvaluationEngine,
    weights: Mapping[str, Weights],
    seed: int,
    step: int,
    statistics: SharedStatistics | None,
    prefix: str,
    metrics_fn: Callable[[TensorDictBase], Mapping[str, Any]] | None,
    on_result: Callable[[TensorDict], Any] | None,
    paired: bool,
) -> EvaluationResult:
    """Runs an evaluation in the thread.

    The function has no reference to the evaluator, so that the evaluator can be garbage-collected
    meanwhile.
    """
    measured = engine.run(weights, seed, step, statistics, paired)
    metrics: dict[str, Any] = {}
    if metrics_fn is not None and measured.trajectories is not None:
        metrics = metrics_of(metrics_fn(measured.trajectories))
    result = result_of(measured, prefix, step, metrics)
    if on_result is not None:
        on_result(as_tensordict(result))
    return result


Result = Future[EvaluationResult]


class PendingResults:
    """Results of triggered evaluations, each of which is returned once, in order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._futures: deque[Result] = deque()

    @property
    def awaited(self) -> bool:
        """True if an evaluation is running, or waits for its turn."""
        with self._lock:
            return any(not future.done() for future in self._futures)

    def __len__(self) -> int:
        """Number of results that were not retrieved."""
        with self._lock:
            return len(self._futures)

    def add(self, future: Result, newest_only: bool) -> None:
        """Adds a future result.

        Args:
            future: the result.
            newest_only: whether to drop earlier results that are finished.
        """
        with self._lock:
            while newest_only and self._futures and self._futures[0].done():
                self._futures.popleft()
            self._futures.append(future)

    def pop(self, timeout: float | None) -> EvaluationResult | None:
        """Waits for the next result, and returns it.

        Args:
            timeout: seconds to wait; None for no limit.

        Returns:
            The result; None if it is not ready in time, or no result is expected.

        Raises:
            Exception: the error of the evaluation, if it failed.
        """
        with self._lock:
            future = self._futures[0] if self._futures else None
        if future is None:
            return None
        try:
            future.exception(timeout)
        except (FutureTimeout, CancelledError):
            return None
        with self._lock:
            # Another thread may have retrieved the result meanwhile.
            if not self._futures or self._futures[0] is not future:
                return None
            self._futures.popleft()
        return future.result()

    def raise_failure(self) -> None:
        """Raises the exception of a failed evaluation whose result was not retrieved, if any."""
        with self._lock:
            failed = next((future for future in self._futures if _failed(future)), None)
            if failed is None:
                return
            self._futures.remove(failed)
        failed.result()

    def close(self) -> list[BaseException]:
        """Keeps only the results of evaluations that succeeded.

        Returns:
            The exceptions of evaluations that failed.
        """
        with self._lock:
            failures = [future.exception() for future in self._futures if _failed(future)]
            kept = (f for f in self._futures if f.done() and not f.cancelled() and not _failed(f))
            self._futures = deque(kept)
        return [failure for failure in failures if failure is not None]


def _failed(future: Result) -> bool:
    return future.done() and not future.cancelled() and future.exception() is not None
