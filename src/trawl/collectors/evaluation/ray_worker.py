"""An actor of a Ray cluster that evaluates what it is sent."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle

from trawl.backends.ray_cluster import connect, import_ray
from trawl.collectors.config import check_number, check_seconds
from trawl.collectors.evaluation.options import single_key

# Seconds in which an actor is to close its environment before it is killed.
_CLOSING = 10.0


class RayEvalWorker:
    """Evaluates policies in an actor of a Ray cluster.

    The actor is a process of its own: ``init_fn`` runs there before anything else is imported, as
    some simulators ask for. It runs what is submitted one after the other. With a name, other
    programs of the cluster can use the same actor, by :meth:`from_name`.

    :class:`~trawl.collectors.Evaluator` with ``backend="ray"`` runs whole episodes, the same for
    each policy, and says how sure their mean is; this class runs a single stretch of steps.

    Args:
        init_fn: called first of all in the actor, or None.
        env_maker: makes the environment there, of any kind that a collector takes.
        policy_maker: makes the policy, called with the environment.
        num_gpus: GPUs of the actor. None: 1 where the cluster has GPUs, else none.
        reward_keys: key of the reward.
        name: name of the actor in the cluster.
        **remote_kwargs: further options of the actor, as ``ray.remote`` takes them.

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
        # As bytes: to unpickle the makers may import what init_fn has to come before.
        arguments = [cloudpickle.dumps(each) for each in (init_fn, (env_maker, policy_maker))]
        actor = ray.remote(**options)(_actor_class())
        self._actor: Any = actor.remote(list(sys.path), *arguments)
        self._reward_key = single_key("reward_keys", reward_keys)
        self._result: Any = None

    @classmethod
    def from_name(cls, name: str, *, reward_keys: Any = ("next", "reward")) -> RayEvalWorker:
        """The worker whose actor has a name.

        Args:
            name: the name that was given to the constructor.
            reward_keys: key of the reward, for what is submitted here.

        Raises:
            ValueError: if there is no such actor.
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
        """Begins an evaluation; the result of one before is given up.

        Args:
            weights: weights of the policy, as a module, a TensorDict or a mapping of tensors;
                copied at once. None: those that it has.
            max_steps: the most steps of each environment.
            deterministic: whether a probabilistic policy acts without chance.
            break_when_any_done: whether the first episode's end is the end; otherwise episodes
                follow each other.

        Raises:
            RuntimeError: if the worker was shut down.
            TypeError: for weights of a wrong type.
        """
        from trawl.collectors.evaluation.snapshot import snapshot

        if self._actor is None:
            raise RuntimeError("submit() on a worker that was shut down")
        steps = check_number("max_steps", max_steps, least=1)
        copied = None if weights is None else snapshot(weights)
        packed = cloudpickle.dumps((copied, steps, deterministic, break_when_any_done))
        self._result = self._actor.evaluate.remote(packed, self._reward_key)

    def poll(self, timeout: float = 0) -> dict[str, Any] | None:
        """The result of what was submitted last, once.

        Args:
            timeout: seconds to wait for it.

        Returns:
            ``reward``, the mean return of episodes (float), and ``frames``, what the environment
            looked like before each step, uint8 ``(steps, height, width, 3)``, or None if it can't
            be rendered so. None if there is no result yet, or none to come.

        Raises:
            Exception: of the environment, the policy or the weights, with its traceback there;
                ``ray.exceptions.RayActorError`` if the actor has died.
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
            pass  # it has ended already, or is killed now
        finally:
            ray.kill(actor)


def _actor_class() -> type:
    """The class of the actor.

    It is made in a function so that it is sent by value: the actor's process then imports
    nothing before ``init_fn`` has run.
    """

    class EvaluationActor:
        def __init__(self, path: list[str], init_fn: bytes, makers: bytes) -> None:
            import sys

            import cloudpickle

            sys.path += [entry for entry in path if entry not in sys.path]
            function = cloudpickle.loads(init_fn)
            if function is not None:
                function()
            from trawl.collectors.evaluation.stretch import StretchEvaluation

            self.evaluation = StretchEvaluation(*cloudpickle.loads(makers))

        def evaluate(self, packed: bytes, reward_key: Any) -> dict[str, Any]:
            import cloudpickle

            weights, steps, deterministic, stops = cloudpickle.loads(packed)
            return self.evaluation.run(weights, steps, deterministic, stops, reward_key)

        def close(self) -> None:
            self.evaluation.close()

    return EvaluationActor
