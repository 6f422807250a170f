"""Checks of the options that only an ``AsyncBatchedCollector`` has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trawl.checks import check_number

_MOST, _LEAST, _PATIENCE = 64, 1, 0.01
_BACKENDS = ("threading", "multiprocessing")


@dataclass(frozen=True)
class Batching:
    """Sizes of the batches for which the policy acts.

    Attributes:
        least: number of ready environments that the policy waits for.
        most: maximum number of environments for which the policy acts at once.
        patience: seconds after the first ready environment in which the others are waited for.
        size: size to which each batch is filled up; None for no filling.
    """

    least: int
    most: int
    patience: float
    size: int | None

    @classmethod
    def of(
        cls,
        count: int,
        most: int | None,
        least: int | None,
        patience: float | None,
        config: Any,
    ) -> Batching:
        """Returns the sizes that the options of a collector of ``count`` environments ask for.

        Raises:
            ValueError: if a size is out of range, or given twice.
        """
        given = {"max_batch_size": most, "min_batch_size": least, "server_timeout": patience}
        size = None
        if config is not None:
            twice = [name for name, value in given.items() if value is not None]
            if twice:
                raise ValueError(
                    f"server_config and {', '.join(twice)} can't both be given: set "
                    f"{', '.join(twice)} in server_config"
                )
            most, least = attribute(config, "max_batch_size"), attribute(config, "min_batch_size")
            patience, size = attribute(config, "timeout"), attribute(config, "static_batch_size")
        least = check_number("min_batch_size", _LEAST if least is None else least, 1)
        most = check_number("max_batch_size", _MOST if most is None else most, 1)
        patience = _PATIENCE if patience is None else patience
        if isinstance(patience, bool) or not isinstance(patience, (int, float)):
            raise TypeError(f"server_timeout must be a number of seconds, but it is {patience!r}")
        if not patience >= 0:
            raise ValueError(f"server_timeout must not be negative, but it is {patience!r}")
        if least > min(most, count):
            what = f"max_batch_size={most}" if least > most else f"the {count} environments"
            raise ValueError(f"min_batch_size={least} is larger than {what}")
        if least > 1 and patience == 0:
            raise ValueError(
                f"min_batch_size={least} has no effect with server_timeout=0: give the number of "
                "seconds to wait, or math.inf"
            )
        if size is not None and check_number("static_batch_size", size, 1) < most:
            raise ValueError(f"static_batch_size={size} is smaller than max_batch_size={most}")
        return cls(least, most, float(patience), size)

    def check_workers(self, envs_per_worker: int) -> None:
        """Checks that the environments of a process fit into a batch.

        Raises:
            ValueError: if they don't.
        """
        if envs_per_worker > self.most:
            raise ValueError(
                f"envs_per_worker={envs_per_worker} is larger than max_batch_size={self.most}, but "
                "the environments of a process become ready together"
            )


def attribute(config: Any, name: str) -> Any:
    """Returns an entry of a mapping, or an attribute of an object; None if there is none."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def env_backend_of(backend: Any, env_backend: Any) -> Literal["process", "thread"]:
    """Returns the backend of the environments.

    Raises:
        ValueError: if an option is not one of TorchRL's names for threads and processes.
    """
    for name, value in (("backend", backend), ("env_backend", env_backend)):
        if value is not None and value not in _BACKENDS:
            raise ValueError(f"{name} must be one of {_BACKENDS}, but it is {value!r}")
    chosen = env_backend or backend or "multiprocessing"
    return "thread" if chosen == "threading" else "process"


def policy_backend_of(backend: Any, policy_backend: Any, config: Any) -> None:
    """Checks the options that say where the policy runs.

    Raises:
        ValueError: if the policy can't run there.
    """
    if policy_backend not in (None, "threading"):
        raise ValueError(
            "policy_backend must be 'threading', which runs the policy in the thread that "
            f"collects, but it is {policy_backend!r}"
        )
    service = None if config is None else attribute(config, "service_backend")
    if service not in (None, "thread"):
        raise ValueError(
            "server_config must have service_backend='thread', which runs the policy in the thread "
            f"that collects, but it is {service!r}"
        )


def check_transport(transport: Any, exchange: Any, chunk: Any) -> None:
    """Checks options that choose among TorchRL's transports.

    Raises:
        TypeError: if ``transport`` is an object.
        ValueError: if an option asks for something that does not exist here.
    """
    shared = "environments and policy share memory, and frames are delivered without messages"
    if transport is not None and not isinstance(transport, str):
        raise TypeError(f"transport can't be {type(transport).__name__}: {shared}")
    if transport not in (None, "auto", "driver"):
        raise ValueError(f"transport must be 'auto' or left out, but it is {transport!r}: {shared}")
    if exchange not in ("auto", "shm"):
        raise ValueError(f"env_exchange must be 'auto' or 'shm', but it is {exchange!r}: {shared}")
    if chunk not in ("auto", 1):
        raise ValueError(
            f"transition_chunk_size must be 'auto' or 1, but it is {chunk!r}: {shared}"
        )


def device_options(device: Any, config: Any) -> dict[str, Any]:
    """Returns a collector's options for devices.

    Raises:
        ValueError: if both arguments are given, or if a device has no meaning here.
    """
    if config is None:
        return {} if device is None else {"policy_device": device}
    if device is not None:
        raise ValueError("device and device_config can't both be given")
    names = ("policy_device", "env_device", "storing_device")
    found = {name: attribute(config, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}
