"""Several environments in this process, stepped one after the other as one batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from trawl.envs.base import TensorDictEnv
from trawl.envs.seeding import check_seed, next_seed
from trawl.envs.types import EnvKwargs, EnvSources, is_list
from trawl.envs.vector import VectorAdapter


class SerialEnv(TensorDictEnv):
    """Batch of environments that are stepped one after the other in this process.

    Args:
        num_workers: number of environments.
        create_env_fn: function that makes one environment, or a sequence of ``num_workers``
            functions. A Gymnasium id or an environment's class works as well. A function may
            return any environment that a collector accepts.
        create_env_kwargs: keyword arguments for ``create_env_fn``: one mapping for all
            environments, or a sequence with one mapping for each.
        device: device of the returned TensorDicts; with None, their tensors are on the CPU and
            they have no device.

    Raises:
        TypeError: if the environments can't be made.
        ValueError: if a sequence does not have ``num_workers`` entries, or the environments'
            specs differ.

    Example:
        >>> from trawl.envs import GymEnv, SerialEnv
        >>> env = SerialEnv(3, lambda: GymEnv("Pendulum-v1"))
        >>> env.rollout(5).batch_size
        torch.Size([3, 5])
        >>> env.close()
    """

    def __init__(
        self,
        num_workers: int,
        create_env_fn: EnvSources,
        *,
        create_env_kwargs: EnvKwargs | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        factories = factories_of(num_workers, create_env_fn)
        arguments = arguments_of(num_workers, create_env_kwargs)
        self.device = None if device is None else torch.device(device)
        self.is_closed = False
        self.envs: list[TensorDictEnv] = []
        try:
            for factory, kwargs in zip(factories, arguments, strict=True):
                self.envs.append(_build(factory, kwargs))
            _check_distinct(self.envs)
            check_alike(self.envs)
        except BaseException:
            self.close()
            raise
        first = self.envs[0]
        self.batch_size = torch.Size([num_workers, *first.batch_size])
        place = self.device or "cpu"
        self.full_observation_spec = first.full_observation_spec.expand(num_workers).to(place)
        self.full_action_spec = first.full_action_spec.expand(num_workers).to(place)

    @property
    def name(self) -> str:
        """Names of the environments, without repetitions."""
        return " ".join(dict.fromkeys(getattr(env, "name", repr(env)) for env in self.envs))

    @property
    def fixed_layout(self) -> bool:
        """True if all actions and observations have a fixed shape and dtype."""
        return all(getattr(env, "fixed_layout", False) for env in self.envs)

    @property
    def action_spec_unbatched(self) -> Any:
        """The action spec of one environment of the batch."""
        return self.envs[0].action_spec_unbatched

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds the next reset of each environment, each with a seed derived from the last.

        Returns:
            The seed for another environment (the same if ``static_seed``).
        """
        seed = check_seed(seed)
        for env in self.envs:
            seed = env.set_seed(seed, static_seed)
        return seed

    @override
    def close(self, *, raise_if_closed: bool = True) -> None:
        if self.is_closed:
            if raise_if_closed:
                raise RuntimeError("the environments are closed already")
            return
        self.is_closed = True
        # The stack closes every environment, even if closing another one raises.
        with ExitStack() as stack:
            for env in reversed(self.envs):
                stack.callback(env.close, raise_if_closed=False)

    @property
    @override
    def parts(self) -> list[Any]:
        return [
            part
            for env in self.envs
            for part in (env.parts if isinstance(env, TensorDictEnv) else [env])
        ]

    @property
    @override
    def vectors(self) -> list[VectorAdapter]:
        return [vector for env in self._own for vector in env.vectors]

    @override
    def autoreset_mask(self) -> Tensor | None:
        parts = {env: env.autoreset_mask() for env in self._own}
        if all(part is None for part in parts.values()):
            return None
        nothing = torch.zeros(self.batch_size[1:], dtype=torch.bool)
        spent = [parts.get(env) for env in self.envs]
        return torch.stack([nothing if part is None else part for part in spent])

    @override
    def action_mask(self) -> NDArray[Any] | None:
        masks = [env.action_mask() for env in self._own]
        found = [mask for mask in masks if mask is not None]
        alike = len(found) == len(self.envs) and len({mask.shape for mask in found}) == 1
        return np.concatenate(found) if alike else None

    @property
    def _own(self) -> list[TensorDictEnv]:
        """Environments of the batch that are Trawl's own."""
        return [env for env in self.envs if isinstance(env, TensorDictEnv)]

    def _reset(self, mask: Tensor | None, **kwargs: Any) -> TensorDict:
        results = []
        for index, env in enumerate(self.envs):
            part = None if mask is None else mask[index]
            if part is None or (part.ndim == 0 and part):
                results.append(env.reset(**kwargs))
            elif part.any():
                partly = env.fake_tensordict().set("_reset", part.unsqueeze(-1))
                results.append(env.reset(partly, **kwargs))
            else:
                # Only the shape of this row is used.
                results.append(env.fake_tensordict())
            if kwargs.get("seed") is not None:
                # With one seed for all, the environments would give equal episodes.
                kwargs["seed"] = next_seed(kwargs["seed"])
        return self._joined(results, list(self.full_observation_spec.keys()))

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        keys = self.action_keys
        rows = [
            env.step(tensordict[i].select(*keys)).get("next") for i, env in enumerate(self.envs)
        ]
        return self._joined(rows, list(rows[0].keys()))

    def _joined(self, rows: list[TensorDictBase], keys: list[Any]) -> TensorDict:
        result: TensorDict = TensorDict.maybe_dense_stack([row.select(*keys) for row in rows], 0)
        return result

    def __repr__(self) -> str:
        return f"SerialEnv({len(self.envs)} x {self.envs[0]!r})"


def factories_of(count: int, create: Any) -> list[Any]:
    """Returns the source of each environment."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"num_workers must be an integer, but it is {count!r}")
    if count < 1:
        raise ValueError(f"num_workers must be positive, but it is {count}")
    if is_list(create):
        if len(create) != count:
            raise ValueError(f"create_env_fn has {len(create)} entries, but num_workers is {count}")
        return list(create)
    return [create] * count


def arguments_of(count: int, kwargs: Any) -> list[Mapping[str, Any]]:
    """Returns the keyword arguments for each environment."""
    if kwargs is None or isinstance(kwargs, Mapping):
        return [kwargs or {}] * count
    if len(kwargs) != count:
        raise ValueError(f"create_env_kwargs has {len(kwargs)} entries, but num_workers is {count}")
    return list(kwargs)


def _build(factory: Callable[..., Any] | str, kwargs: Mapping[str, Any]) -> TensorDictEnv:
    from trawl.envs.build import build_env

    env: TensorDictEnv = build_env(factory, kwargs)
    return env


def check_alike(envs: Sequence[Any]) -> None:
    """Refuses environments of one batch whose batch sizes or specs differ.

    Args:
        envs: the environments, or other objects with these attributes.

    Raises:
        ValueError: if an environment differs from the first; the message names the difference.
    """
    first = envs[0]
    for index, env in enumerate(envs[1:], 1):
        for what in ("batch_size", "full_observation_spec", "full_action_spec"):
            mine, other = getattr(first, what), getattr(env, what)
            if mine != other:
                raise ValueError(
                    f"environments of one batch must be alike, but environment {index} has "
                    f"{what} {other}, and environment 0 has {mine}"
                )


def _check_distinct(envs: list[TensorDictEnv]) -> None:
    """Refuses environments that share a simulator: each would change the other's state."""
    seen: dict[int, int] = {}
    for index, env in enumerate(envs):
        for simulator in _simulators(env):
            other = seen.setdefault(id(simulator), index)
            if other != index:
                raise ValueError(
                    f"environments {other} and {index} of one batch are the same object, "
                    f"{simulator!r}: give an id, or a function that makes a new one each time"
                )


def _simulators(env: Any) -> list[Any]:
    if isinstance(env, SerialEnv):
        return [simulator for child in env.envs for simulator in _simulators(child)]
    inner = getattr(env, "env", env)
    return [getattr(inner, "unwrapped", inner)]
