"""Batches of environments that are stepped one after the other in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from trawl.checks import check_number
from trawl.devices import optional_device
from trawl.envs.attributes import Application
from trawl.envs.base import TensorDictEnv
from trawl.envs.batches.batched import BatchedEnv, arguments_of, factories_of
from trawl.envs.batches.foreign import as_member
from trawl.envs.build import build_one, distinct, env_of_id, is_env
from trawl.envs.entries.masks import joined_masks
from trawl.envs.kinds import lacks_vectors, steps_batches
from trawl.envs.reset_kwargs import sliced
from trawl.envs.seeding import next_kwargs
from trawl.envs.types import EnvKwargs, EnvSources, is_list
from trawl.keys import RESET_MASK
from trawl.supported import Trait


class SerialEnv(BatchedEnv):
    """Batch of environments that are stepped one after the other in this process.

    Args:
        num_workers: number of environments.
        create_env_fn: function that makes one environment, or a sequence of ``num_workers``
            functions. A Gymnasium id or an environment's class works as well. A function may
            return any environment that a collector accepts.
        create_env_kwargs: keyword arguments for ``create_env_fn``: one mapping for all
            environments, or a sequence with one mapping for each.
        device: device of the returned TensorDicts. With None, the TensorDicts have no device, and
            their tensors are on the CPU.

    Raises:
        TypeError: if the environments can't be made.
        ValueError: if a sequence does not have ``num_workers`` entries, or if the environments'
            specs differ.

    Examples:
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
        self.device = optional_device("device", device)
        self.envs: list[TensorDictEnv] = _build_each(factories, arguments)
        try:
            for index, made in enumerate(zip(self.envs, factories, arguments, strict=True)):
                self.envs[index] = _as_member(*made)
            _check_distinct(self.envs)
            self._set_members(self.envs)
        except BaseException:
            _close_made(self.envs, factories)
            raise

    @override
    def _seed_member(self, index: int, seed: int, static_seed: bool) -> int:
        return self.envs[index].set_seed(seed, static_seed)

    @override
    def set_reset_kwargs(self, given: Any, first: int, counts: Any) -> None:
        for env, (row, own) in zip(self.envs, sliced(counts, self._sizes()), strict=True):
            env.set_reset_kwargs(given, first + row, own)

    @override
    def episode_counts(self, counts: Any) -> Any:
        parts = zip(self.envs, sliced(counts, self._sizes()), strict=True)
        return np.concatenate([env.episode_counts(own) for env, (_, own) in parts])

    @override
    def load_episode_counts(self, counts: Any) -> None:
        for env, (_, own) in zip(self.envs, sliced(counts, self._sizes()), strict=True):
            env.load_episode_counts(own)

    def _sizes(self) -> list[int]:
        return [max(1, env.batch_size.numel()) for env in self.envs]

    @override
    def _apply(self, calls: Mapping[int, Application]) -> dict[int, Any]:
        return {
            index: function(self.envs[index], *arguments)
            for index, (function, *arguments) in calls.items()
        }

    @override
    def _close(self) -> None:
        _close_all(self.envs)

    @property
    @override
    def parts(self) -> list[Any]:
        return [part for env in self.envs for part in env.parts]

    @property
    @override
    def cannot_restart(self) -> list[str]:
        return [name for env in self.envs for name in env.cannot_restart]

    @property
    @override
    def traits(self) -> frozenset[Trait]:
        return frozenset[Trait]().union(*(env.traits for env in self.envs))

    @override
    def autoreset_mask(self) -> Tensor | None:
        masks = [env.autoreset_mask() for env in self.envs]
        return None if all(mask is None for mask in masks) else self._join_masks(masks)

    @override
    def action_mask(self) -> NDArray[Any] | None:
        return joined_masks([env.action_mask() for env in self.envs])

    def _reset(self, mask: Tensor | None, **kwargs: Any) -> TensorDict:
        results = []
        for index, env in enumerate(self.envs):
            part = None if mask is None else mask[index]
            if part is None or (part.ndim == 0 and part):
                results.append(env.reset(**kwargs))
            elif part.any():
                partly = env.fake_tensordict().set(RESET_MASK, part.unsqueeze(-1))
                results.append(env.reset(partly, **kwargs))
            else:
                # Only the shape of this row is used.
                results.append(env.fake_tensordict())
            kwargs = next_kwargs(kwargs)
        return self._join_resets(results)

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        keys = self.action_keys
        rows = [
            env.step(tensordict[i].select(*keys)).get("next") for i, env in enumerate(self.envs)
        ]
        return self._join(rows, list(rows[0].keys()))


def build_env(source: Any, kwargs: EnvKwargs | None = None, *, name: str = "create_env_fn") -> Any:
    """Builds the environment that ``source`` describes.

    Args:
        source: a Gymnasium id, a Gymnasium, vector or EnvPool environment, a TensorDict
            environment (recognised by its protocol), a function that makes one of these, or a
            list of any of these. The environments of a list are stepped as one batch.
        kwargs: arguments for the function (or, with an id, for :class:`GymEnv`). If ``source``
            is a list, ``kwargs`` may be a list with one entry for each environment.
        name: name of the argument that ``source`` comes from, for error messages.

    Returns:
        A :class:`TensorDictEnv`. There are two exceptions for environments of other libraries: a
        TensorDict environment is returned unchanged, and a list of TensorDict environments is
        returned as TorchRL's ``SerialEnv``.

    Raises:
        TypeError: if ``source`` is none of the above, or if ``kwargs`` is a list and ``source``
            is not.
        RuntimeError: if ``kwargs`` are passed with an environment object that doesn't accept
            them.
    """
    if is_list(source):
        return _build_list(source, kwargs, name)
    if isinstance(source, str) and isinstance(kwargs, Mapping):
        make_several = several_of_id(source, kwargs)
        if make_several is not None:
            return make_several()
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(
            f"create_env_kwargs is a list, which needs a list of environments, but {name} is "
            f"{source!r}: pass a mapping"
        )
    return build_one(source, kwargs, name)


def several_of_id(env_id: str, kwargs: Mapping[str, Any]) -> Callable[[], SerialEnv] | None:
    """Returns a function that makes a batch of environments of a library without vectors.

    Args:
        env_id: the id.
        kwargs: arguments of the environments, and ``num_envs``.

    Returns:
        The function; None if there is no ``num_envs``, or the library makes the vector itself.
    """
    if "num_envs" not in kwargs or not lacks_vectors(env_id):
        return None
    options = dict(kwargs)
    count = check_number("num_envs", options.pop("num_envs"), least=1)
    return partial(SerialEnv, count, partial(env_of_id, env_id, **options))


def batch_source(source: Any, count: int, kwargs: EnvKwargs | None = None) -> Any:
    """Returns the source of several environments that are stepped as one batch.

    If the environments of an id are batches themselves, the source makes one batch of ``count``
    environments. Otherwise, it is a list.

    Args:
        source: the source of one environment.
        count: number of environments.
        kwargs: arguments with which the source will be built.

    Examples:
        >>> batch_source("CartPole-v1", 2)
        ['CartPole-v1', 'CartPole-v1']
        >>> batch_source("gymnax:CartPole-v1", 2).keywords
        {'num_envs': 2}
    """
    if count == 1:
        return source
    call = partial(env_of_id, source) if isinstance(source, str) else source
    if isinstance(call, partial) and call.func is env_of_id and steps_batches(call.args[0]):
        more: Any = kwargs or {}
        if "num_envs" not in call.keywords and "num_envs" not in more and not is_list(more):
            return partial(call, num_envs=count)
    return [source] * count


def _build_list(source: Sequence[Any], kwargs: Any, name: str) -> Any:
    if not source:
        raise ValueError(f"{name} must not be an empty list")
    count = len(source)
    sources = distinct(source, name)
    envs = _build_each(sources, arguments_of(count, kwargs, f"{name} has"), name)
    if all(isinstance(env, TensorDictEnv) for env in envs):
        return SerialEnv(count, envs)
    if any(isinstance(env, TensorDictEnv) for env in envs):
        kinds = ", ".join(type(env).__name__ for env in envs)
        _close_made(envs, sources)
        raise TypeError(
            f"{name} must not mix environments of TorchRL with others in one batch, but the list "
            f"made {kinds}: pass only Gymnasium environments, or only TorchRL's"
        )
    # TorchRL batches its own environments.
    from torchrl.envs import SerialEnv as TorchRLSerialEnv

    batch = TorchRLSerialEnv(count, [lambda env=env: env for env in envs])
    batch.start()  # before that, each look at an unknown attribute is an endless recursion
    return batch


def _build_each(
    sources: Sequence[Any], arguments: Sequence[Any], name: str = "create_env_fn"
) -> list[Any]:
    envs: list[Any] = []
    try:
        for source, kwargs in zip(sources, arguments, strict=True):
            envs.append(build_env(source, kwargs, name=name))
    except BaseException:
        _close_made(envs, sources)
        raise
    return envs


def _as_member(env: Any, source: Any, kwargs: Any) -> TensorDictEnv:
    """Returns an environment that was built from its source as a member of a batch."""
    return as_member(env, None if given_envs(source) else partial(_member_of, source, kwargs))


def _member_of(source: Any, kwargs: Any) -> TensorDictEnv:
    return _as_member(build_env(source, kwargs), source, kwargs)


def given_envs(source: Any) -> list[Any]:
    """Returns the environment objects among the sources of environments."""
    if is_list(source):
        return [env for part in source for env in given_envs(part)]
    return [source] if is_env(source) else []


def close_made(env: Any, source: Any) -> None:
    """Closes an environment, except for environments that its source contains as objects.

    Args:
        env: the environment, which :func:`build_env` made.
        source: its source.
    """
    given = given_envs(source)
    if not given:
        env.close(raise_if_closed=False)
    elif is_list(source) and isinstance(env, SerialEnv):
        _close_made(env.envs, source)


def _close_made(envs: Sequence[Any], sources: Sequence[Any]) -> None:
    """Closes environments, as far as they were made from their sources."""
    with ExitStack() as stack:
        for env, source in zip(reversed(envs), reversed(sources[: len(envs)]), strict=True):
            stack.callback(close_made, env, source)


def _close_all(envs: Sequence[Any]) -> None:
    """Closes every environment, even if closing another one raises."""
    with ExitStack() as stack:
        for env in reversed(envs):
            stack.callback(env.close, raise_if_closed=False)


def _check_distinct(envs: list[TensorDictEnv]) -> None:
    """Rejects environments that share a simulator: each would change the other's state."""
    seen: dict[int, int] = {}
    for index, env in enumerate(envs):
        for simulator in _simulators(env):
            other = seen.setdefault(id(simulator), index)
            if other != index:
                raise ValueError(
                    f"environments {other} and {index} of one batch are the same object, "
                    f"{simulator!r}: pass an id, or a function that makes a new one each time"
                )


def _simulators(env: Any) -> list[Any]:
    if isinstance(env, SerialEnv):
        return [simulator for child in env.envs for simulator in _simulators(child)]
    inner = getattr(env, "env", env)
    return [getattr(inner, "unwrapped", inner)]
