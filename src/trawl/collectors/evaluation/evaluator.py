"""Evaluates a policy beside its training."""

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

from trawl.collectors.config import check_callable, check_seconds
from trawl.collectors.evaluation.engine import EvaluationEngine, EvaluationStopped, Setup
from trawl.collectors.evaluation.options import (
    BUSY_POLICIES,
    check_choice,
    check_policy,
    collector_options,
    place,
)
from trawl.collectors.evaluation.pending import PendingResults
from trawl.collectors.evaluation.results import (
    Comparison,
    EvaluationResult,
    as_tensordict,
    comparison_of,
    result_of,
)
from trawl.collectors.evaluation.snapshot import snapshot, snapshots
from trawl.collectors.evaluation.thread import EvaluationThread
from trawl.envs.seeding import check_seed
from trawl.weight_update.tensors import Weights

_REWARD, _DONE = ("next", "reward"), ("next", "done")


class Evaluator:
    """Evaluates a policy, while the caller waits or goes on training.

    Each evaluation runs ``num_trajectories`` whole episodes. Every environment contributes the
    same number of them (of a remainder, the first environments one more), and each episode
    begins with a seed that depends on ``seed`` and on its number alone: the same weights give
    the same result, on every backend and with any number of environments.

    The learner is left alone. The policy that evaluates is a copy in evaluation mode; weights
    are copied at the call; in a thread, random numbers and the exploration type are the thread's
    own.

    Args:
        env: a Gymnasium id, or a function that makes an environment, of any kind that a
            collector takes; a list of these is stepped as a batch. With ``backend="thread"``
            also an environment that is made already, which the evaluator closes at its end.
        policy: the policy; a module is copied.
        policy_factory: makes the policy where it acts, instead of ``policy``; called with the
            environment if it takes an argument. If it gives None, actions are random.
        num_trajectories: number of episodes in an evaluation.
        max_steps: steps after which an episode is truncated. None: it ends by itself.
        frames_per_batch: frames that all environments collect at a time; by default up to 100
            of each.
        collector_cls: a subclass of :class:`~trawl.collectors.Collector` that evaluates, or
            ``MultiSyncCollector`` for one in a process of its own.
        collector_kwargs: more options of the collector.
        weight_sync_schemes: by model, the schemes by which weights are sent to workers; with
            ``backend="thread"`` the evaluation moves to a process.
        log_prefix: what the names of metrics begin with.
        reward_keys: key of the reward. Several values in a row, as those of agents, are averaged.
        done_keys: key of the flag that an episode is over.
        device: device of the policy; by default that of its parameters.
        exploration_type: how probabilistic policies act.
        metrics_fn: called with whole trajectories, ``(num_trajectories, longest)`` padded with
            zeros where ``("collector", "mask")`` is False; gives more metrics, by name.
        dump_video: whether TorchRL's video recorders write what they have, and the first episode
            is rendered if the environment's ``render_mode`` is ``"rgb_array"``.
        on_result: called with the metrics of each evaluation, as a TensorDict, in the thread
            that evaluates.
        busy_policy: behaviour of :meth:`trigger_eval` while an evaluation is under way:
            ``"skip"``, ``"queue"`` or ``"error"``.
        backend: ``"thread"``, of this process; ``"process"``, of this machine; or ``"ray"``, an
            actor of a cluster.
        init_fn: called first of all in each process or actor.
        num_gpus: with Ray, GPUs of each actor; by default as for
            :class:`~trawl.collectors.distributed.RayCollector`.
        ray_kwargs: with Ray, further options of the actors.
        num_envs: number of environments that are stepped as a batch, in each worker.
        num_workers: number of processes or actors.
        seed: seed of the episodes. None: others in each evaluation.

    Raises:
        ValueError: for a value that is not possible, or arguments that contradict each other.
        TypeError: for an argument of a wrong type.
        ImportError: with ``backend="ray"``, if Ray is not installed.
        Exception: of making the environment or the policy.

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
        check_policy(policy, policy_factory)
        self.busy_policy = check_choice("busy_policy", busy_policy, BUSY_POLICIES)
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
            workers=num_workers,
            envs=num_envs,
            episodes=num_trajectories,
            max_steps=max_steps,
            frames_per_batch=frames_per_batch,
            exploration_type=exploration_type,
            reward_key=reward_keys,
            done_key=done_keys,
            collector_class=kind,
            options=options,
            keep=metrics_fn is not None,
            record=bool(dump_video),
        )
        self.num_trajectories = setup.episodes
        self._steps, self._lock, self._results = 0, threading.Lock(), PendingResults()
        self._start(setup)

    def _start(self, setup: Setup) -> None:
        """Begins the thread, and makes environments and policy there."""
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
                those that the policy which was passed to the constructor has now; a policy made
                by a factory keeps those that it has.
            step: the step that the result is logged at. None: the next number of a counter.
            weights_dict: weights by model: ``"policy"``, or a path, as ``"env.transform[0]"``.

        Returns:
            Metrics, each name after the prefix: ``reward`` (mean of the episodes' returns) and
            its ``reward_std``, ``reward_sem`` (standard error), ``reward_iqm`` (interquartile
            mean), ``reward_ci_low`` and ``reward_ci_high`` (95 % bootstrap interval of the mean);
            ``num_episodes``, ``episode_length``, ``fps``, ``step``; those of ``metrics_fn``; and
            ``video``, uint8 ``(steps + 1, height, width, 3)``, of the first episode if it was
            rendered. The attribute ``episodes`` has the return and length of each episode.

        Raises:
            RuntimeError: if the evaluator was shut down.
            Exception: of the environment, the policy, a worker, or a callback.
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
        """Begins an evaluation, and does not wait for it.

        Args:
            weights: as :meth:`evaluate` takes them; copied at once.
            step: as :meth:`evaluate` takes it. An evaluation that is skipped uses no number up.
            weights_dict: as :meth:`evaluate` takes them; copied at once.

        Returns:
            Whether there will be a result: False if another evaluation is under way and
            ``busy_policy`` is ``"skip"``.

        Raises:
            RuntimeError: if another evaluation is under way and ``busy_policy`` is ``"error"``,
                or the evaluator was shut down.
            Exception: of an evaluation before, whose failure was not asked for.
        """
        self._results.raise_failure()
        if self.pending and self.busy_policy != "queue":
            if self.busy_policy == "skip":
                return False
            raise RuntimeError(
                "an evaluation is under way: wait() for it, or give busy_policy='skip' or 'queue'"
            )
        future = self._submit(snapshots(self.policy, weights, weights_dict), step)
        # A callback had those that are there.
        self._results.add(future, newest_only=self._on_result is not None)
        return True

    def compare(self, first: Any = None, second: Any = None) -> Comparison:
        """Evaluates two policies on the same episodes, and compares them episode by episode.

        What differs from episode to episode, as where one begins, differs for both alike: a
        comparison needs far fewer episodes than two evaluations on different ones.

        Args:
            first: weights of the first policy, as :meth:`evaluate` takes them.
            second: weights of the second.

        Returns:
            The difference, its interval, and both results. No step number is used up.
        """
        self._results.raise_failure()
        seed = secrets.randbits(31) if self.seed is None else self.seed
        copies = [snapshots(self.policy, weights, None) for weights in (first, second)]
        futures = [self._submit(one, self._steps, seed) for one in copies]
        return comparison_of(*(future.result() for future in futures))

    def _submit(
        self, weights: Mapping[str, Weights], step: int | None, seed: int | None = None
    ) -> Future[EvaluationResult]:
        if seed is None:
            # Not from the learner's generators.
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
        """The next result of an evaluation that was triggered, each once, in their order.

        Args:
            timeout: seconds to wait for it.

        Returns:
            The result; None if there is none yet, or none to come.

        Raises:
            Exception: of the evaluation.
        """
        return self.wait(timeout)

    def wait(self, timeout: float | None = None) -> EvaluationResult | None:
        """Waits for the next result of an evaluation that was triggered.

        Args:
            timeout: seconds to wait; None: as long as it takes.

        Returns:
            The result; None if it did not come in time, or none is to come.

        Raises:
            Exception: of the evaluation.
        """
        return self._results.take(None if timeout is None else check_seconds("timeout", timeout))

    # --- state

    def state_dict(self) -> dict[str, Any]:
        """The number of the next step, ``step_counter``.

        Raises:
            RuntimeError: while an evaluation is under way.
        """
        self._check_idle("state_dict()")
        return {"step_counter": self._steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on counting from where :meth:`state_dict` was called.

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
        """A copy of a policy's parameters and buffers, on the CPU."""
        return TensorDict(snapshot(policy).tensors).unflatten_keys(".")

    # --- the end

    def shutdown(self, timeout: float = 5.0) -> None:
        """Ends the evaluation under way and closes the environments; may be called repeatedly.

        Evaluations that wait for their turn are cancelled; results that are there stay.

        Args:
            timeout: seconds to wait for the evaluation under way. Workers that take longer are
                killed; a thread ends after the step that it is at.
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
        # A constructor that failed leaves no thread.
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
    """Evaluates in the thread; it knows no evaluator, which may be forgotten meanwhile."""
    measured = engine.run(weights, seed, step)
    metrics: dict[str, Any] = {}
    if metrics_fn is not None and measured.trajectories is not None:
        metrics = dict(metrics_fn(measured.trajectories))
    result = result_of(measured, prefix, step, metrics)
    if on_result is not None:
        on_result(as_tensordict(result))
    return result
