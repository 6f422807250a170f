"""An actor of a Ray cluster that evaluates policies."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import torch
from tensordict.nn import InteractionType
from torch import Tensor

from trawl.backends.processes.payload import Package
from trawl.checks import check_number, check_seconds
from trawl.collectors.config import muted
from trawl.collectors.dispatch import DIRECT
from trawl.collectors.single import Collector
from trawl.envs.batches.serial import build_env
from trawl.envs.gym import GymEnv
from trawl.extras.clusters.ray.cluster import connect, import_ray
from trawl.extras.evaluation.environments import check_steps, freeze, renders
from trawl.extras.evaluation.options import single_key
from trawl.extras.evaluation.worker import made_policy
from trawl.weights.tensors import Weights

# Seconds that an actor has to close its environment before it is killed.
_CLOSING = 10.0


class RayEvalWorker:
    """Evaluates policies in an actor of a Ray cluster.

    The actor is a separate process, in which ``init_fn`` runs before anything else is imported.
    Some simulators require this order. Submitted evaluations run one after the other. If the actor
    has a name, other programs of the cluster can use it through :meth:`from_name`.

    This class evaluates a policy for a number of steps. :class:`~trawl.collectors.Evaluator` with
    ``backend="ray"`` runs whole episodes, with the same seeds for each policy, and reports the
    uncertainty of the mean return.

    Args:
        init_fn: function that is called in the actor before anything else, or None.
        env_maker: function that makes the environment in the actor, of any kind that a collector
            accepts.
        policy_maker: function that makes the policy; called with the environment.
        num_gpus: number of GPUs of the actor; by default, 1 if the cluster has GPUs, otherwise 0.
        reward_keys: key of the reward.
        name: name of the actor in the cluster.
        **remote_kwargs: further options of the actor, which are passed to ``ray.remote``.

    Raises:
        ImportError: if Ray is not installed.
        TypeError: if one of the functions can't be called.
    """

    def __init__(
        self,
        init_fn: Callable[[], Any] | None,
        env_maker: Callable[[], Any],
        policy_maker: Callable[[Any], Any],
        *,
        num_gpus: float | None = None,
        reward_keys: Any = ("next", "reward"),
        name: str | None = None,
        **remote_kwargs: Any,
    ) -> None:
        makers = {"env_maker": env_maker, "policy_maker": policy_maker}
        optional = {} if init_fn is None else {"init_fn": init_fn}
        for argument, function in {**makers, **optional}.items():
            if not callable(function):
                raise TypeError(f"{argument} must be a function, but it is {function!r}")
        ray = self._connected()
        if num_gpus is None:
            num_gpus = min(1.0, ray.cluster_resources().get("GPU", 0.0))
        options = {"num_gpus": num_gpus, **remote_kwargs}
        if name is not None:
            options["name"] = name
        # Unpickling the makers may import modules, which must happen after init_fn has run.
        package = Package([init_fn, (env_maker, policy_maker)])
        actor = ray.remote(**options)(_actor_class())
        self._actor: Any = actor.remote(list(sys.path), package)
        self._reward_key = single_key("reward_keys", reward_keys)
        self._result: Any = None

    @classmethod
    def from_name(cls, name: str, *, reward_keys: Any = ("next", "reward")) -> RayEvalWorker:
        """Returns a worker that uses an existing actor, which is found by its name.

        Args:
            name: the name that was given to the constructor.
            reward_keys: key of the reward, for evaluations that this worker submits.

        Raises:
            ValueError: if no actor has this name.
        """
        worker = cls.__new__(cls)
        key = single_key("reward_keys", reward_keys)
        actor = cls._connected().get_actor(name)
        vars(worker).update(_actor=actor, _reward_key=key, _result=None)
        return worker

    @staticmethod
    def _connected() -> Any:
        connect()
        return import_ray()

    def submit(
        self,
        weights: Any,
        max_steps: int,
        *,
        deterministic: bool = True,
        break_when_any_done: bool = True,
    ) -> None:
        """Starts an evaluation; the result of an earlier evaluation is dropped.

        Args:
            weights: weights of the policy, as a module, a TensorDict or a mapping of tensors;
                copied at once. None: the policy keeps its weights.
            max_steps: maximum number of steps of each environment.
            deterministic: whether a probabilistic policy acts deterministically.
            break_when_any_done: whether to stop at the first end of an episode; otherwise, new
                episodes begin.

        Raises:
            RuntimeError: if the worker was shut down.
            TypeError: if the weights have the wrong type.
        """
        from trawl.extras.evaluation.snapshot import snapshot

        if self._actor is None:
            raise RuntimeError("submit() was called on a worker that was shut down")
        steps = check_number("max_steps", max_steps, least=1)
        copied = None if weights is None else snapshot(weights)
        packed = cloudpickle.dumps((copied, steps, deterministic, break_when_any_done))
        self._result = self._actor.evaluate.remote(packed, self._reward_key)

    def poll(self, timeout: float = 0) -> dict[str, Any] | None:
        """Returns the result of the evaluation that was submitted last, but only once.

        The result is a dict with two entries. ``reward`` is the mean return of episodes, a float.
        ``frames`` has renderings of the environment before each step, as a uint8 tensor of shape
        ``(steps, height, width, 3)``; it is None if the environment is not rendered as arrays.

        Args:
            timeout: seconds to wait for the result.

        Returns:
            The result; None if it is not ready yet, or no result is expected.

        Raises:
            Exception: any error of the environment, the policy or the weights, with the traceback
                from the actor; ``ray.exceptions.RayActorError`` if the actor has died.
        """
        if self._result is None:
            return None
        ray = import_ray()
        ready, _ = ray.wait([self._result], timeout=check_seconds("timeout", timeout))
        if not ready:
            return None
        reference, self._result = self._result, None
        result: dict[str, Any] = ray.get(reference)
        return result

    def shutdown(self) -> None:
        """Closes the environment and ends the actor; may be called any number of times."""
        actor, self._actor, self._result = self._actor, None, None
        ray = import_ray()
        if actor is None or not ray.is_initialized():
            return
        try:
            ray.get(actor.close.remote(), timeout=_CLOSING)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            pass  # the actor has ended already, or is killed now
        finally:
            ray.kill(actor)


def _actor_class() -> type:
    """Returns the class of the actor.

    The class is defined in a function so that it is pickled by value. The actor's process then
    imports no simulator, and not torch, before ``init_fn`` has run.
    """

    class EvaluationActor:
        def __init__(self, path: list[str], package: Package) -> None:
            import sys

            sys.path += [entry for entry in path if entry not in sys.path]
            parts = iter(package)
            init_fn = next(parts)
            if init_fn is not None:
                init_fn()
            from trawl.extras.clusters.ray.eval_worker import StepEvaluation

            self.evaluation = StepEvaluation(*next(parts))

        def evaluate(self, packed: bytes, reward_key: Any) -> dict[str, Any]:
            import cloudpickle

            weights, steps, deterministic, stops = cloudpickle.loads(packed)
            return self.evaluation.run(weights, steps, deterministic, stops, reward_key)

        def close(self) -> None:
            self.evaluation.close()

    return EvaluationActor


class StepEvaluation:
    """Evaluates a policy in an environment, step by step.

    Args:
        env_maker: function that makes the environment.
        policy_maker: function that makes the policy; called with the environment.
    """

    def __init__(self, env_maker: Callable[[], Any], policy_maker: Callable[..., Any]) -> None:
        self.env = build_env(env_maker, name="env_maker")
        check_steps(self.env)
        freeze(self.env)
        self.policy = made_policy(policy_maker, self.env)

    def run(
        self,
        weights: Weights | None,
        max_steps: int,
        deterministic: bool,
        break_when_any_done: bool,
        reward_key: Any = ("next", "reward"),
    ) -> dict[str, Any]:
        """Takes up to ``max_steps`` steps in each environment.

        Args:
            weights: new weights of the policy, or None.
            max_steps: maximum number of steps.
            deterministic: whether a probabilistic policy acts deterministically.
            break_when_any_done: whether to stop at the first end of an episode.
            reward_key: key of the reward.

        Returns:
            A dict with two entries. ``reward`` is the mean return. ``frames`` is a uint8 tensor of
            shape ``(steps, height, width, 3)``, or None if the environment is not rendered as
            arrays.
        """
        render = _renderer(self.env)
        frames: list[Any] = []
        rewards: list[Tensor] = []
        ends: list[Tensor] = []
        collector = self._collector(deterministic)
        try:
            if weights is not None:
                collector.update_policy_weights_(weights=weights)
            freeze(self.env, before_data=True)
            collector.reset()
            for _ in range(max_steps):
                if render is not None:
                    frames.append(render())
                batch = collector.next()
                assert batch is not None  # the collector has no budget of frames
                num_envs = batch.shape[:-1].numel()
                reward = batch.get(reward_key)
                rewards.append(reward.reshape(num_envs, -1).double().mean(-1).cpu())
                ends.append(batch.get(("next", "done")).reshape(num_envs, -1).any(-1).cpu())
                if break_when_any_done and bool(ends[-1].any()):
                    break
        finally:
            collector.shutdown(close_env=False)
        shown = np.stack([np.asarray(frame, np.uint8) for frame in frames]) if frames else None
        return {
            "reward": _mean_return(torch.stack(rewards), torch.stack(ends), break_when_any_done),
            "frames": None if shown is None else torch.from_numpy(shown),
        }

    def _collector(self, deterministic: bool) -> Collector:
        kind = InteractionType.DETERMINISTIC if deterministic else InteractionType.RANDOM
        frames = max(1, self.env.batch_size.numel())
        options: dict[str, Any] = {"frames_per_batch": frames, "exploration_type": kind}
        with muted():
            return Collector(self.env, self.policy, backend=DIRECT, **options)

    def close(self) -> None:
        """Closes the environment."""
        self.env.close(raise_if_closed=False)


def _mean_return(rewards: Tensor, ends: Tensor, stopped: bool) -> float:
    """Returns the mean return of episodes.

    Args:
        rewards: rewards, of shape ``(steps, environments)``.
        ends: flags that mark the last steps of episodes, of the same shape.
        stopped: whether the evaluation stops at the first end of an episode.

    Returns:
        The mean return of the episodes that ended. If the evaluation stops at the first end, or no
        episode ended, each environment's sum of rewards counts as a return.
    """
    if stopped or not ends.any():
        return float(rewards.sum(0).mean())
    sums = rewards.cumsum(0)
    returns = []
    for env in range(rewards.shape[1]):
        at = sums[ends[:, env], env]
        returns += torch.diff(at, prepend=torch.zeros(1, dtype=at.dtype)).tolist()
    return float(np.mean(returns))


def _renderer(env: Any) -> Callable[[], Any] | None:
    """Returns the function that renders an environment as arrays, or None if there is none."""
    inner = env.env if isinstance(env, GymEnv) else env
    render = getattr(inner, "render", None)
    return render if renders(inner) and callable(render) else None
