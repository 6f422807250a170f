"""Adapters for vector environments that step only some of their sub-environments at once.

EnvPool and ALE's ``AtariVectorEnv`` can be made with a ``batch_size`` below ``num_envs``. Such a
*pool* receives actions for some sub-environments, and returns the results of the first
``batch_size`` ones that are ready. Its adapter therefore has no ``step``, but :meth:`~Pool.send`
and :meth:`~Pool.receive`, and collectors record the results in the order in which they come.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Any, NamedTuple, NoReturn

import numpy as np
from gymnasium.vector import AutoresetMode, VectorWrapper
from numpy.typing import NDArray
from typing_extensions import override

from trawl.envs.batches.autoreset import ModeCheck, autoreset_mode
from trawl.envs.batches.envpool_calls import EnvPoolCalls, refuse_seed
from trawl.envs.entries.infos import InfoCodec
from trawl.envs.entries.masks import newest_masks
from trawl.envs.entries.spaces import SpaceCodec
from trawl.envs.outcomes import Outcome
from trawl.envs.vector import Step, VectorAdapter, array_reader, is_envpool
from trawl.memory import Array, Mask
from trawl.supported import MODE_ENVPOOL, MODE_POOL

Rows = NDArray[np.int64]


class PoolResults(NamedTuple):
    """Results of the sub-environments that were ready.

    All arrays have a row for each of them, in the same order.

    Attributes:
        rows: numbers of the sub-environments.
        leaves: the observations. Where an episode ended, they are the last ones of the episode.
        rewards: the rewards.
        terminated: the terminated flags.
        truncated: the truncated flags.
        begun: the first observations of the next episodes, valid where an episode ended; None if
            the next step is the reset.
    """

    rows: Rows
    leaves: list[Array]
    rewards: Array
    terminated: Mask
    truncated: Mask
    begun: list[Array] | None = None

    def only(self, chosen: Mask) -> PoolResults:
        """Returns the results of some of the sub-environments."""
        rows, leaves, rewards, terminated, truncated, begun = self
        return PoolResults(
            rows[chosen],
            [leaf[chosen] for leaf in leaves],
            rewards[chosen],
            terminated[chosen],
            truncated[chosen],
            None if begun is None else [leaf[chosen] for leaf in begun],
        )


class Pool(VectorAdapter):
    """Vector environment that returns the results of whichever sub-environments are ready.

    Args:
        env: the vector environment.
        codec: codec for the observations of one sub-environment.
        mode: the autoreset mode of the environment.

    Attributes:
        ready_envs: number of sub-environments whose results are returned at once.
        resets_next: True if the step after the end of an episode is only a reset.
        can_restart: True if :meth:`send_reset` accepts any sub-environments that are not
            stepping; False if it needs all.
    """

    can_restart = False
    autoresets = "begins its episodes by itself"
    ready_envs: int
    resets_next = True

    def __init__(self, env: Any, codec: SpaceCodec, mode: AutoresetMode) -> None:
        super().__init__(env, codec, ModeCheck(env, array_reader(env, codec, mode), mode))
        # What the environment returned and :meth:`receive` has not: empty, or a single entry.
        self._received: list[Any] = []

    @abstractmethod
    def send_reset(self, rows: Rows, **kwargs: Any) -> None:
        """Begins to reset sub-environments.

        Args:
            rows: their numbers.
            **kwargs: arguments of the environment's ``reset``.
        """

    @abstractmethod
    def send(self, action: Any, rows: Rows) -> None:
        """Begins a step of sub-environments.

        Args:
            action: their actions, with a row for each.
            rows: their numbers, as :meth:`receive` returned them.
        """

    def receive(self) -> PoolResults:
        """Waits until enough sub-environments are ready, and returns their results."""
        if not self._received:
            # In one call into C, so that no signal handler can raise between the return of the
            # results and their storage. They would be lost, and nobody would act for them again.
            self._received.extend(starmap(self._receive_raw, ((),)))
        results = self._read(self._received[0])
        self.is_begun = True
        self._received.clear()
        return results

    @property
    @abstractmethod
    def _receive_raw(self) -> Callable[[], Any]:
        """Function that waits for results."""

    @abstractmethod
    def _read(self, raw: Any) -> PoolResults:
        """Turns what the environment returned into results."""

    # --- what needs all sub-environments

    @override
    def reset(self, seeds: Sequence[int] | None = None, **kwargs: Any) -> list[Array]:
        self._refuse()

    @override
    def step(self, action: Any) -> Step:
        self._refuse()

    @override
    def restart(self, mask: Mask, **kwargs: Any) -> list[Array]:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError(self.why_alone)

    @property
    def why_alone(self) -> str:
        """Text that says where the environment can be used."""
        return (
            f"{type(self.env.unwrapped).__name__} with batch_size={self.ready_envs} and num_envs="
            f"{self.num_envs} doesn't step all of its environments at once, so it can't be one of "
            "several that are stepped together: make it without batch_size, or make it the only "
            "environment of a collector, or of each worker"
        )


class EnvPoolPool(Pool):
    """Adapter for EnvPool with a ``batch_size`` below ``num_envs``."""

    can_restart = True

    def __init__(self, env: Any, codec: SpaceCodec) -> None:
        super().__init__(env, codec, AutoresetMode.NEXT_STEP)
        self.ready_envs = int(env.config["batch_size"])
        self._calls = EnvPoolCalls(env, reads_infos=isinstance(codec, InfoCodec))

    @override
    def send_reset(self, rows: Rows, **kwargs: Any) -> None:
        refuse_seed(kwargs.get("seed"))
        if len(rows):
            self._calls.send_reset(rows.astype(np.int32))

    @override
    def send(self, action: Any, rows: Rows) -> None:
        self._calls.send(action, rows.astype(np.int32))

    @property
    @override
    def _receive_raw(self) -> Callable[[], Any]:
        return self._calls.receive_raw

    @override
    def _read(self, raw: Any) -> PoolResults:
        ids, obs, reward, terminated, truncated, info = self._calls.read(raw)
        leaves = self._reader.read(obs, info)
        return PoolResults(ids.astype(np.int64), leaves, reward, terminated, truncated)


class AtariPool(Pool):
    """Adapter for environments with the interface of ALE's ``AtariVectorEnv``.

    ``send`` takes actions for exactly those sub-environments that ``recv`` returned last, in this
    order, and ``reset`` resets all of them.
    """

    def __init__(self, env: Any, codec: SpaceCodec, mode: AutoresetMode) -> None:
        super().__init__(env, codec, mode)
        self.ready_envs = int(env.batch_size)
        self.resets_next = mode is AutoresetMode.NEXT_STEP
        self._action_dtype = env.single_action_space.dtype

    @override
    def send_reset(self, rows: Rows, **kwargs: Any) -> None:
        obs, info = self.env.reset(**kwargs)
        nothing = np.zeros(len(info["env_id"]), np.bool_)
        self._received.append((obs, nothing.astype(np.float32), nothing, nothing, info))

    @override
    def send(self, action: Any, rows: Rows) -> None:
        self.env.send(np.ascontiguousarray(action, self._action_dtype))

    @property
    @override
    def _receive_raw(self) -> Callable[[], Any]:
        # ALE's own method, called without Python code around it.
        found: Callable[[], Any] = getattr(self.env, "ale", self.env).recv
        return found

    @override
    def _read(self, raw: Any) -> PoolResults:
        obs, reward, terminated, truncated, info = raw
        leaves = self._reader.read_step(obs, info, Outcome(reward, terminated, truncated))
        begun = None
        if not self.resets_next:
            ended = terminated | truncated
            if ended.any():
                begun, leaves = leaves, self._with_final(leaves, ended, info)
        rows = info["env_id"].astype(np.int64)
        self.masks = newest_masks(self.masks, info, self.num_envs, rows)
        return PoolResults(rows, leaves, reward, terminated, truncated, begun)


def is_pool(env: Any) -> bool:
    """Returns True if ``env`` steps only some of its sub-environments at once."""
    if isinstance(env, VectorWrapper):
        # A wrapper expects results for all sub-environments.
        return False
    if is_envpool(env):
        return bool(hasattr(env, "num_envs") and env.config["batch_size"] != env.num_envs)
    together = getattr(env, "batch_size", None)
    methods = all(callable(getattr(env, name, None)) for name in ("send", "recv", "reset"))
    return methods and isinstance(together, int) and together != getattr(env, "num_envs", None)


def adapt_pool(env: Any, codec: SpaceCodec, given: AutoresetMode | str | None = None) -> Pool:
    """Returns the adapter for a vector environment for which :func:`is_pool` is True.

    Args:
        env: the environment.
        codec: codec for the observations of one sub-environment.
        given: the autoreset mode stated by the user, or None.

    Raises:
        ValueError: if the autoreset mode is unknown, or can't be used.
    """
    if is_envpool(env):
        if given is not None:
            raise MODE_ENVPOOL.error("autoreset_mode", str(given))
        return EnvPoolPool(env, codec)
    mode = autoreset_mode(env, given)
    if mode is AutoresetMode.DISABLED:
        raise MODE_POOL.error(against=repr(env))
    return AtariPool(env, codec, mode)
