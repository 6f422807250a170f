"""Inference services of TorchRL, which act for the workers of a collector."""

from __future__ import annotations

from functools import partial
from typing import Any

from trawl.supported import CHOSEN_WORKERS_SERVICE, SERVICE_WEIGHTS
from trawl.weights.strategy import load_weights
from trawl.weights.tensors import weights_of


class InferenceServiceUpdater:
    """Sends weights to an inference service, which acts for all workers.

    Args:
        service: the service.
    """

    def __init__(self, service: Any) -> None:
        self.service = service

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the service needs no further arguments."""

    def register_collector(self, collector: Any) -> None:
        """Does nothing: weights go to the service, whichever collector sends them."""

    def push_weights(self, policy_or_weights: Any = None, worker_ids: Any = None) -> None:
        """Sends weights to the service.

        Raises:
            ValueError: if there are no weights, or workers are chosen.
        """
        if policy_or_weights is None:
            raise ValueError(
                "update_policy_weights_() needs weights, because the policy is an inference "
                "service: pass them"
            )
        if worker_ids is not None:
            raise CHOSEN_WORKERS_SERVICE.error("worker_ids", worker_ids)
        weights, place = weights_of(policy_or_weights).nested(), self.service.service_backend
        if place == "thread":
            self.service.update_model(partial(load_weights, source=weights))
        elif place == "process":
            self.service.update_model_weights(weights)
        else:
            self.service.update_policy_weights_(weights)

    __call__ = push_weights

    def reached(self) -> None:
        """Returns None: all workers act with the service's weights."""

    def close(self) -> None:
        """Does nothing: the service may serve other collectors, too."""


def use_service(service: Any, count: int, options: dict[str, Any]) -> None:
    """Sets the options of a collector whose workers act through an inference service.

    Args:
        service: the service.
        count: number of workers.
        options: the collector's options.

    Raises:
        ValueError: if an option makes policies, or sends weights to them.
    """
    for name in SERVICE_WEIGHTS.names:
        if options.get(name) is not None:
            raise SERVICE_WEIGHTS.error(name, options[name])
    # Factories are sent with a worker's options, so the clients may have queues.
    options["policy_factory"] = [partial(_itself, client) for client in service.clients(count)]
    options["weight_updater"] = InferenceServiceUpdater(service)


def is_service(policy: Any) -> bool:
    """Returns True for an inference server of TorchRL, wherever it runs."""
    names = ("service_backend", "clients", "is_alive")
    return not callable(policy) and all(hasattr(type(policy), name) for name in names)


def _itself(client: Any) -> Any:
    return client
