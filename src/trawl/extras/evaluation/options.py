"""Checks of the arguments of an evaluator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import torch
from torch import nn

from trawl.collectors.config import CollectorConfig
from trawl.collectors.multi import MultiSyncCollector
from trawl.collectors.multi_config import MultiConfig
from trawl.collectors.options import EVALUATOR, one_of, tagged
from trawl.collectors.single import Collector
from trawl.devices import check_device
from trawl.envs.build import is_env
from trawl.envs.types import is_list
from trawl.keys import Key, given_key
from trawl.rollout.normalization import Normalization

_BY_NAME = {"Collector": Collector, "MultiSyncCollector": MultiSyncCollector}

# Arguments of collectors that an evaluation sets itself, or that would change its episodes.
_OWN = (
    {"create_env_fn", "policy", "num_collectors", "sync"}
    | tagged(CollectorConfig, EVALUATOR)
    | tagged(MultiConfig, EVALUATOR)
)


def _check_order(env: Any, policy: Any) -> None:
    """Checks that the environment and the policy are not swapped.

    Raises:
        TypeError: if ``env`` is a policy, or ``policy`` is an environment.
    """
    hint = (
        "are env and policy swapped? The environment comes first, and the policy second: "
        "Evaluator(env, policy)"
    )
    if isinstance(env, nn.Module) and not is_env(env):
        raise TypeError(
            "env must be a Gymnasium id, an environment or a function that makes one, but it is a "
            f"module, {type(env).__name__}: {hint}"
        )
    makes_env = isinstance(policy, type) and issubclass(policy, gymnasium.Env)
    if isinstance(policy, str) or makes_env or is_env(policy):
        raise TypeError(
            f"policy must be a module or a function, but it is an environment, {policy!r}: {hint}"
        )


def check_policies(env: Any, policy: Any, policy_factory: Any) -> None:
    """Checks that there is exactly one policy or factory, and that no arguments are swapped.

    Raises:
        ValueError: if both or neither of ``policy`` and ``policy_factory`` are given.
        TypeError: if the factory can't be called or is a policy, ``env`` is a policy, or
            ``policy`` is an environment.
    """
    _check_order(env, policy)
    if (policy is None) == (policy_factory is None):
        what = "neither is" if policy is None else "both are"
        raise ValueError(f"pass either policy or policy_factory: {what} given")
    if policy_factory is None:
        return
    if isinstance(policy_factory, nn.Module) or not callable(policy_factory):
        raise TypeError(
            "policy_factory must be a function that makes the policy, but it is "
            f"{type(policy_factory).__name__}: pass a policy as policy="
        )


def check_factories(env: Any) -> None:
    """Checks what can be checked of factories that are called later.

    Raises:
        TypeError: if ``env`` is neither an id nor a function.
    """
    for source in env if is_list(env) else [env]:
        if not isinstance(source, str) and not is_list(source) and not callable(source):
            raise TypeError(
                "env must be a Gymnasium id, an environment or a function that makes one, but it "
                f"is {type(source).__name__}: {source!r}"
            )


def check_env(env: Any, backend: str, workers: int, envs: int) -> None:
    """Checks that an environment fits the backend and the numbers of workers and environments.

    Raises:
        ValueError: if ``env`` is an existing environment, but other processes or several
            environments are needed; if ``env`` is a list, but ``envs`` is above 1; or if there are
            several workers, but the backend is a thread.
    """
    made = is_env(env)
    if made and backend != "thread":
        raise ValueError(
            f"backend={backend!r} makes its environment in another process, but env is an "
            f"existing environment, {env!r}: pass a function that makes it"
        )
    if workers > 1 and backend == "thread":
        raise ValueError(
            f"num_workers={workers} needs backend='process' or 'ray', because backend='thread' "
            "has only one worker"
        )
    if envs > 1 and (made or is_list(env)):
        raise ValueError(
            f"num_envs={envs} needs an id, or a function that makes an environment, but env is "
            f"{env!r}"
        )


def check_kwargs(kwargs: Mapping[str, Any] | None, backend: str) -> dict[str, Any]:
    """Checks the user's options of the collector, and returns them.

    Raises:
        TypeError: if there are options that the evaluator sets itself.
        ValueError: if the policy is to be captured in a graph, but the backend is a thread.
    """
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"collector_kwargs must be a mapping of options, but it is {kwargs!r}")
    found = dict(kwargs or {})
    own = sorted(_OWN & found.keys())
    if own:
        raise TypeError(
            f"collector_kwargs can't contain {', '.join(own)}: the evaluator sets these options "
            "itself, or has arguments for them"
        )
    if backend == "thread" and found.get("cudagraph_policy"):
        raise ValueError(
            "cudagraph_policy needs backend='process' or 'ray': a graph that is captured in a "
            "thread would contain what the learner computes at the same time"
        )
    return found


def place(
    backend: str, kind: Any, schemes: Mapping[str, Any] | None
) -> tuple[type[Collector], str]:
    """Returns the collector class of each worker, and the backend that the workers run on.

    Args:
        backend: the backend that the user chose.
        kind: a class of collectors, its name, or None.
        schemes: weight-sync schemes, which need workers; or None.

    Raises:
        ValueError: if the backend is unknown, or an evaluation can't use the class.
    """
    backend = one_of("thread", "process", "ray")("backend", backend)
    kind = _BY_NAME.get(kind, kind) if isinstance(kind, str) else kind or Collector
    if backend == "thread" and (schemes is not None or kind is MultiSyncCollector):
        backend = "process"
    if kind is MultiSyncCollector:
        kind = Collector
    if not (isinstance(kind, type) and issubclass(kind, Collector)):
        raise ValueError(
            "collector_cls must be Collector, a subclass of it, or MultiSyncCollector, but it is "
            f"{kind!r}"
        )
    return kind, backend


def single_key(name: str, key: Any) -> Any:
    """Returns one key, from a key or a list of one key.

    Raises:
        ValueError: if a list has several keys or none.
    """
    if isinstance(key, list):
        if len(key) != 1:
            raise ValueError(f"{name} must be a single key, but there are {len(key)}: {key!r}")
        return key[0]
    return key


def keys_or_none(name: str, keys: Any) -> tuple[Key, ...] | None:
    """Returns the keys of an argument, which is a key, a list of keys, or None.

    A tuple of tuples is taken for a list of keys.

    Raises:
        TypeError: if a key is neither a string nor a tuple of strings.
        ValueError: if a list has no keys.
    """
    if keys is None:
        return None
    several = isinstance(keys, tuple) and keys and all(isinstance(one, tuple) for one in keys)
    each = keys if several or isinstance(keys, list) else [keys]
    found = tuple(given_key(name, key) for key in each)
    if not found:
        raise ValueError(f"{name} must be a key, a list of keys or None, but the list is empty")
    return found


def normalization_or_none(name: str, value: Any) -> Normalization | None:
    """Returns the statistics of the learner's collector, or None.

    Raises:
        TypeError: if the value is something else.
    """
    if value is not None and not isinstance(value, Normalization):
        raise TypeError(
            f"{name} must be the attribute `normalization` of a collector that normalises, "
            f"but it is {value!r}"
        )
    return value


def normalizing_options(normalization: Normalization | None) -> dict[str, Any]:
    """Returns the options of a collector that normalises observations like the learner's.

    Rewards are not normalised, so returns are those of the environment.

    Args:
        normalization: the statistics of the learner's collector, or None.
    """
    options = None if normalization is None else normalization.options.observations
    return {} if options is None else {"normalize_observations": options}


def collector_options(
    backend: str,
    kwargs: Mapping[str, Any] | None,
    policy: Any,
    device: Any,
    workers: Mapping[str, Any],
    num_gpus: float | None,
    ray_kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Returns the options of the collector, without those that the evaluator sets itself.

    Args:
        backend: the backend of the evaluator.
        kwargs: the user's options.
        policy: the policy, or None.
        device: the device of the policy; None for the device of its parameters.
        workers: options that only collectors with workers have.
        num_gpus: number of GPUs of each actor, or None.
        ray_kwargs: further options of the actors.

    Raises:
        TypeError: if there are options that the evaluator sets itself.
        ValueError: if the policy is to be captured in a graph, but the backend is a thread.
    """
    options = check_kwargs(kwargs, backend)
    if device is not None:
        options["policy_device"] = check_device("device", device, here=backend != "ray")
    elif isinstance(policy, nn.Module) and not {"device", "policy_device"} & options.keys():
        found = next((p.device for p in policy.parameters()), torch.device("cpu"))
        options |= {} if found.type == "cpu" else {"policy_device": found}
    if backend != "thread":
        options |= workers
    if backend == "ray":
        resources = {} if num_gpus is None else {"num_gpus": num_gpus}
        options["remote_configs"] = {**resources, **(ray_kwargs or {})}
    return options
