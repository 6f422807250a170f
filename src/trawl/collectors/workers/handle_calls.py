"""Method calls that a worker's handle forwards to the worker's collector.

With Ray, this is the handle of the worker's actor.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any

import cloudpickle
from torch import nn

from trawl.backends.base import HandleCall, Port
from trawl.collectors.workers.requests import StateChanged, WorkerWarning
from trawl.weights.tensors import weights_of

_UPDATE = "update_policy_weights_"
_COLLECT = frozenset({"next", "rollout"})
# Methods that have no meaning in a worker, and what to do instead.
_REFUSED = {
    "async_shutdown": "call it on the collector, or end this worker with ray.kill(handle)",
    "deliver_weights": "call update_policy_weights_()",
    "increment_version": "call it on the collector",
    "iterator": "an iterator can't be sent: call next() for each batch",
    "pause": "call it on the collector",
    "register_scheme_receiver": "pass weight_sync_schemes or weight_recv_schemes to the collector",
    "start": "call it on the collector",
}


def methods_of(kind: type) -> list[str]:
    """Returns the names of the public methods of a collector class."""
    found = inspect.getmembers(kind, inspect.isfunction)
    return [name for name, _ in found if not name.startswith("_")]


class HandleCalls(ABC):
    """Part of a worker that answers calls through the worker's handle.

    Attributes:
        collector: the worker's collector.
    """

    collector: Any
    _port: Port
    # True if the driver assembles whole trajectories.
    _whole: bool

    @abstractmethod
    def _up_to_date(self) -> Any:
        """Loads the weights that were sent to the collector, and returns the collector."""

    @property
    @abstractmethod
    def _updates(self) -> int:
        """Number of policy updates sent so far, up to the newest that the collector has loaded."""

    def _answer(self, asked: HandleCall) -> None:
        """Carries out a call, and sets its answer.

        Raises:
            Exception: the exception that the call raised, if the collector is closed afterwards.
        """
        try:
            # The result is pickled at once, because objects in it may change before Ray sends it.
            value = cloudpickle.dumps(self._called(asked.name, asked.args, dict(asked.kwargs)))
        except Exception as error:
            if asked.name == _UPDATE:
                # Updaters such as TorchRL's ignore the result, so a warning reports the error.
                text = (
                    f"{_UPDATE}() through a worker's handle changed nothing: "
                    f"{type(error).__name__}: {error}"
                )
                self._port.send(WorkerWarning(text, RuntimeWarning))
            asked.answer.set_exception(error)
            if self.collector.closed:
                raise
        else:
            asked.answer.set_result(value)

    def _called(self, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        if name in _REFUSED:
            raise RuntimeError(
                f"{name}() can't be called through a worker's handle: {_REFUSED[name]}"
            )
        self._check_apart(name)
        if name == "receive_weights" and (args or kwargs):
            # receive_weights() takes no weights in a worker, so a call with weights is an update.
            name = _UPDATE
        if name == _UPDATE and "policy_weights" in kwargs:
            if args or "policy_or_weights" in kwargs:
                raise ValueError(
                    f"{_UPDATE}() got weights twice: policy_weights is the older name of "
                    "policy_or_weights"
                )
            kwargs["policy_or_weights"] = kwargs.pop("policy_weights")
        collector = self._up_to_date()
        if name == "next":
            return self._next_apart()
        result = getattr(collector, name)(*args, **kwargs)
        if name == _UPDATE:
            self._report()
        elif name == "set_seed":
            self._port.send(StateChanged(seed=_seed(*args, **kwargs)))
        elif name == "load_state_dict":
            self._report(_state(*args, **kwargs).get("env_state_dict"))
        return result

    def _check_apart(self, name: str) -> None:
        """Refuses calls that would leave gaps in the driver's trajectories or counts."""
        why = ""
        if self._whole and name in _COLLECT | {"load_state_dict"}:
            why = "the collector assembles whole trajectories"
        elif name in _COLLECT and self.collector.config.replay_buffer is not None:
            why = "workers write into the replay buffer, and the collector counts what they write"
        if why:
            raise RuntimeError(
                f"{name}() can't be called through a worker's handle, because {why}: call it on "
                "the collector"
            )

    def _report(self, env_state: Any = None) -> None:
        """Sends weights and state to the driver, which passes them to a replacement worker."""
        weights = self._policy_weights()
        self._port.send(
            StateChanged(
                weights=None if weights is None else weights.cpu(),
                count=self._updates,
                version=self.collector.policy_version,
                env_state=env_state,
            )
        )

    def _next_apart(self) -> Any:
        """Returns a batch for the caller of the handle; the driver does not see the batch."""
        return self.collector.next()

    def _policy_weights(self) -> Any:
        policy = self.collector.policy
        if not isinstance(policy, nn.Module):
            return None
        return weights_of(policy).nested()


def _seed(seed: int, static_seed: bool = False) -> tuple[int, bool]:
    return seed, static_seed


def _state(state_dict: Any, strict: bool = True) -> Any:
    return state_dict
