"""Evaluation of a policy during its training."""

from __future__ import annotations

import secrets
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType
from torch import nn

from trawl.collectors.evaluation.engine import EvaluationEngine, EvaluationStopped, Setup
from trawl.collectors.evaluation.options import (
    check_policies,
    collector_options,
    place,
)
from trawl.collectors.evaluation.pending import PendingResults
from trawl.collectors.evaluation.results import (
    Comparison,
    EvaluationResult,
    as_tensordict,
    comparison_of,
    metrics_of,
    result_of,
)
from trawl.collectors.evaluation.snapshot import check_different, snapshot, snapshots
from trawl.collectors.evaluation.thread import EvaluationThread
from trawl.collectors.options import check_callable, check_seconds, one_of
from trawl.envs.seeding import check_seed
from trawl.weight_update.tensors import Weights

_REWARD, _DONE = ("next", "reward"), ("next", "done")


class Evaluator:
    """Evaluates a policy, while the caller waits or continues training.

    Each evaluation runs ``num_trajectories`` whole episodes. Every environment contributes the
    same number of them; the first environments contribute one more if the number doesn't divide.
    Each episode begins with a seed that depends only on ``seed`` and the number of the episode.
    So the same weights give the same result, on every backend and with any number of
    environments.

    The learner is not affected. The policy that evaluates is a copy in evaluation mode, weights
    are copied at the call, and an evaluating thread has its own random numbers and exploration
    type.

    Args:
        env: a Gymnasium id, or a function that makes an environment, of any kind that a
            collector takes; a list of these is stepped as a batch. With ``backend="thread"``
            also an existing environment, which the evaluator closes at its end.
        policy: the policy; a module is copied.
        policy_factory: function that makes the policy where it acts, instead of ``policy``;
            called with the environment if it takes an argument. If it returns None, actions are
            random.
        num_trajectories: number of episodes in an evaluation.
        max_steps: steps after which an episode is truncated. None: it ends by itself.
        frames_per_batch: number of frames that all environments together collect at a time; by
            default up to 100 for each environment.
        collector_cls: a subclass of :class:`~trawl.collectors.Collector` that evaluates, or
            ``MultiSyncCollector`` to evaluate in a process of its own.
        collector_kwargs: more options of the collector.
        weight_sync_schemes: by model, the schemes that send weights to workers; with
            ``backend="thread"`` the evaluation moves to a process.
        log_prefix: prefix of the names of metrics.
        reward_keys: key of the reward. Several values in a row, such as one per agent, are
            averaged.
        done_keys: key of the flag that marks the end of an episode.
        device: device of the policy; by default that of its parameters.
        exploration_type: how probabilistic policies act.
        metrics_fn: function that returns more metrics, by name. It is called with the whole
            trajectories, of shape ``(num_trajectories, longest)``, which are padded with zeros
            where ``("collector", "mask")`` is False. If a name is that of a metric of the
            evaluator, such as ``"reward"``, the function's value replaces it.
        dump_video: whether TorchRL's video recorders write their videos, and the first episode
            is rendered if the environment's ``render_mode`` is ``"rgb_array"``.
        on_result: called with the metrics of each evaluation, as a TensorDict, in the thread
            that evaluates.
        busy_policy: behaviour of :meth:`trigger_eval` while an evaluation is under way:
            ``"skip"``, ``"queue"`` or ``"error"``.
        backend: where to evaluate: in a ``"thread"`` of this process, in another ``"process"`` of
            this machine, or in an actor of a ``"ray"`` cluster.
        init_fn: function that is called in each process or actor before anything else.
        num_gpus: with Ray, GPUs of each actor; by default as for
            :class:`~trawl.collectors.distributed.RayCollector`.
        ray_kwargs: with Ray, further options of the actors.
        num_envs: number of environments that are stepped as a batch, in each worker.
        num_workers: number of processes or actors.
        seed: seed of the episodes. None: a new seed for each evaluation.

    Raises:
        ValueError: for a value that is not possible, or arguments that contradict each other.
        TypeError: for an argument of a wrong type.
        ImportError: with ``backend="ray"``, if Ray is not installed.
        Exception: any error of making the environment or the policy.

    Example:
        >>> from tensordict.nn import TensorDictModule
        >>> from torch import nn
        >>> from trawl.collectors import Evaluator
        >>> policy = TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"])
        >>> with Evaluator("Pendulum-v1", policy, num_trajectories=4, max_steps=20) as evaluator:
        ...     metrics = evaluator.evaluate()
        >>> metrics["eval/num_episodes"], metrics["eval/episode_length"]
        (4, 20.0)
    """

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
        reward_keys: Any = _REWARD,
        done_keys: Any = _DONE,
        device: torch.device | str | None = None,
        exploration_type: InteractionType | None = InteractionType.DETERMINISTIC,
        metrics_fn: Callable[[TensorDictBase], Mapping[str, Any]] | None = None,
        dump_video: bool = True,
        on_result: Callable[[TensorDict], Any] | None = None,
        busy_policy: str = "skip",
        backend: str = "thread",
        init_fn: Callable[[], Any] | None = None,
        num_gpus: float | None = None,
        ray_kwargs: Mapping[str, Any] | None = None,
        num_envs: int = 1,
        num_workers: int = 1,
        seed: int | None = 0,
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
            keep=metrics_fn is not None,
            dump_video=dump_video,
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
            self._thread.call(engine.open).result()
        except BaseException:
            self._thread.request_stop()
            raise

    # --- evaluating

    def evaluate(
        self,
        weights: Any = None,
        step: int | None = None,
        *,
        weights_dict: Mapping[str, Any] | None = None,
    ) -> EvaluationResult:
        """Evaluates, and waits for the result; evaluations that were triggered before come first.

        Args:
            weights: weights of the policy: a module, a TensorDict, or a mapping of tensors. None:
                the current weights of the policy that was passed to the constructor; a policy
                made by a factory keeps its weights.
            step: the step that the result is logged at. None: the next number of a counter.
            weights_dict: weights by model: ``"policy"``, or a path such as
                ``"env.transform[0]"``.

        Returns:
            Metrics, with the prefix before each name: ``reward`` (mean of the episodes' returns)
            and its ``reward_std``, ``reward_sem`` (standard error), ``reward_iqm`` (interquartile
            mean), ``reward_ci_low`` and ``reward_ci_high`` (95 % bootstrap interval of the mean);
            ``num_episodes``, ``episode_length``, ``fps``, ``step``; those of ``metrics_fn``; and
            ``video``, uint8 ``(steps + 1, height, width, 3)``, of the first episode if it was
            rendered. The attribute ``episodes`` has the return and length of each episode.

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
            weights: as :meth:`evaluate` takes them; copied at once.
            step: as :meth:`evaluate` takes it. A skipped evaluation uses up no number.
            weights_dict: as :meth:`evaluate` takes them; copied at once.

        Returns:
            True if there will be a result; False if another evaluation is under way and
            ``busy_policy`` is ``"skip"``.

        Raises:
            RuntimeError: if another evaluation is under way and ``busy_policy`` is ``"error"``,
                or the evaluator was shut down.
            Exception: the error of an earlier evaluation whose result was not taken.
        """
        self._results.raise_failure()
        if self.pending and self.busy_policy != "queue":
            if self.busy_policy == "skip":
                return False
            raise RuntimeError(
                "an evaluation is under way: wait() for it, or give busy_policy='skip' or 'queue'"
            )
        future = self._submit(snapshots(self.policy, weights, weights_dict), step)
        # A callback has received the earlier results already.
        self._results.add(future, newest_only=self._on_result is not None)
        return True

    def compare(self, first: Any = None, second: Any = None) -> Comparison:
        """Evaluates two policies on the same episodes, and compares them episode by episode.

        Both policies meet the same variation between episodes, such as different initial states.
        A comparison therefore needs far fewer episodes than two evaluations on different ones.

        Args:
            first: weights of the first policy, as :meth:`evaluate` takes them. None: the current
                weights of the policy that was passed to the constructor, or the latest weights of
                a policy made by a factory.
            second: weights of the second. None: the current weights of the policy that was
                passed to the constructor.

        Returns:
            The difference, its interval, and both results. No step number is used up.

        Raises:
            ValueError: if both are the same policy, or there is no second policy.
            RuntimeError: if the evaluator was shut down.
            Exception: any error of the environment, a policy, a worker, or a callback.
        """
        check_different(self.policy, first, second)
        self._results.raise_failure()
        seed = secrets.randbits(31) if self.seed is None else self.seed
        copies = [snapshots(self.policy, weights, None) for weights in (first, second)]
        futures = [self._submit(one, self._steps, seed) for one in copies]
        return comparison_of(*(future.result() for future in futures))

    def _submit(
        self, weights: Mapping[str, Weights], step: int | None, seed: int | None = None
    ) -> Future[EvaluationResult]:
        if seed is None:
            # Drawn without the learner's generators.
            seed = secrets.randbits(31) if self.seed is None else self.seed
        with self._lock:
            number = self._steps if step is None else step
            call = partial(
                _evaluated,
                self._engine,
                weights,
                seed,
                number,
                self.log_prefix,
                self._metrics_fn,
                self._on_result,
            )
            future = self._thread.call(call)
            self._steps += step is None
        return future

    # --- results

    @property
    def pending(self) -> bool:
        """True if an evaluation that was triggered is under way, or waits for its turn."""
        return self._results.awaited

    def poll(self, timeout: float = 0) -> EvaluationResult | None:
        """Returns the next result of a triggered evaluation; each result is returned once.

        Results come in the order in which the evaluations were triggered.

        Args:
            timeout: seconds to wait for the result.

        Returns:
            The result; None if there is none yet, or none to come.

        Raises:
            Exception: the error of the evaluation.
        """
        return self.wait(timeout)

    def wait(self, timeout: float | None = None) -> EvaluationResult | None:
        """Waits for the next result of a triggered evaluation.

        Args:
            timeout: seconds to wait; None: as long as it takes.

        Returns:
            The result; None if it did not come in time, or none is to come.

        Raises:
            Exception: the error of the evaluation.
        """
        return self._results.pop(None if timeout is None else check_seconds("timeout", timeout))

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """Returns the number of the next step, as ``step_counter``.

        Raises:
            RuntimeError: while an evaluation is under way.
        """
        self._check_idle("state_dict()")
        return {"step_counter": self._steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores the counter of steps from :meth:`state_dict`.

        Raises:
            RuntimeError: while an evaluation is under way.
            KeyError: if there is no ``step_counter``.
        """
        self._check_idle("load_state_dict()")
        self._steps = int(state_dict["step_counter"])

    def _check_idle(self, what: str) -> None:
        if self.pending:
            raise RuntimeError(f"{what} while an evaluation is under way: wait() for it before")

    @staticmethod
    def extract_weights(policy: nn.Module) -> TensorDict:
        """Returns a copy of a policy's parameters and buffers, on the CPU."""
        return TensorDict(snapshot(policy).tensors).unflatten_keys(".")

    # --- the end

    def shutdown(self, timeout: float = 5.0) -> None:
        """Ends the evaluation under way and closes the environments; may be called repeatedly.

        Evaluations that wait for their turn are cancelled; finished results stay available.

        Args:
            timeout: seconds to wait for the evaluation under way. Workers that take longer are
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
    prefix: str,
    metrics_fn: Callable[[TensorDictBase], Mapping[str, Any]] | None,
    on_result: Callable[[TensorDict], Any] | None,
) -> EvaluationResult:
    """Runs an evaluation in the thread.

    It doesn't refer to the evaluator, which may be garbage-collected meanwhile.
    """
    measured = engine.run(weights, seed, step)
    metrics: dict[str, Any] = {}
    if metrics_fn is not None and measured.trajectories is not None:
        metrics = metrics_of(metrics_fn(measured.trajectories))
    result = result_of(measured, prefix, step, metrics)
    if on_result is not None:
        on_result(as_tensordict(result))
    return result
