"""Vector environments under one rule of when episodes end and begin.

The step that ends an episode shows its true last observation, and a new episode begins by an
explicit restart.

Gymnasium has three ways to reset a sub-environment (``AutoresetMode``) and EnvPool a fourth.
Each adapter here turns one of them into ``step`` and ``restart(mask)``, so that the loop above
knows only one. The exception is an environment that insists on spending a whole step on
resetting and offers nothing else: :class:`StepResetVector` says which rows of a step were
such resets, so that they are never taken for experience.

Source of the modes: https://farama.org/Vector-Autoreset-Mode
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.async_vector_env import AsyncState
from numpy.typing import NDArray
from typing_extensions import override

from trawl.envs.spaces import Array, SpaceCodec

Mask = NDArray[np.bool_]
Step = tuple[list[Array], Array, Array, Array]


class VectorAdapter:
    """A vector environment that is restarted where and when the caller says.

    Args:
        env: the vector environment.
        codec: encodes the observations of one sub-environment.

    Attributes:
        num_envs: number of sub-environments.
        can_restart: whether :meth:`restart` may be called for any sub-environment at any time.
    """

    can_restart = True

    def __init__(self, env: Any, codec: SpaceCodec) -> None:
        self.env = env
        self.codec = codec
        self.num_envs = int(env.num_envs)

    def reset(self, seeds: Sequence[int] | None = None, **kwargs: Any) -> list[Array]:
        """Begins an episode everywhere; the observation leaves, each ``(num_envs, ...)``.

        Args:
            seeds: one for each sub-environment, unless ``kwargs`` have a ``seed``.
            **kwargs: arguments of the environment's reset.
        """
        if seeds is not None:
            # Only these two take a seed for each sub-environment; others make them from one.
            several = isinstance(self.env.unwrapped, (SyncVectorEnv, AsyncVectorEnv))
            kwargs.setdefault("seed", list(seeds) if several else seeds[0])
        obs, _ = self.env.reset(**kwargs)
        return self.codec.encode(obs)

    def step(self, action: Any) -> Step:
        """Steps every sub-environment.

        Returns:
            The observation leaves (at an episode's end its true last one), rewards, and the
            terminated and truncated flags, each with ``num_envs`` rows.
        """
        obs, reward, terminated, truncated, _ = self.env.step(action)
        return self.codec.encode(obs), reward, terminated, truncated

    def restart(self, mask: Mask, **kwargs: Any) -> list[Array]:
        """Begins a new episode where ``mask`` says; observation leaves for all rows."""
        options = {**(kwargs.pop("options", None) or {}), "reset_mask": mask.copy()}
        obs, _ = self.env.reset(options=options, **kwargs)
        return self.codec.encode(obs)

    def spent(self) -> Mask | None:
        """The rows of the last step that were resets and no experience, or None."""
        return None

    def close(self) -> None:
        """Closes the environment."""
        self.env.close()

    def abandon(self) -> None:
        """Closes an environment that failed."""
        inner = self.env.unwrapped if hasattr(self.env, "unwrapped") else self.env
        state = getattr(inner, "_state", AsyncState.DEFAULT)
        if not isinstance(inner, AsyncVectorEnv) or state is AsyncState.DEFAULT:
            self.env.close()
            return
        # A process died while it was waited for; to close the environment would be to wait on.
        for process in inner.processes:
            process.terminate()
        for pipe in inner.parent_pipes:
            if pipe is not None:
                pipe.close()
        for process in inner.processes:
            process.join()
        inner.closed = True


class SameStepVector(VectorAdapter):
    """``AutoresetMode.SAME_STEP``: the new episode's first observation comes with the last step.

    That observation is held back until :meth:`restart` asks for it, and the true last one is
    taken from ``info["final_obs"]``.
    """

    def __init__(self, env: Any, codec: SpaceCodec) -> None:
        super().__init__(env, codec)
        self.can_restart = isinstance(env.unwrapped, (SyncVectorEnv, AsyncVectorEnv))
        self._fresh: list[Array] = []
        # Whose first observation is held back.
        self._ended = np.zeros(self.num_envs, dtype=np.bool_)

    @override
    def reset(self, seeds: Sequence[int] | None = None, **kwargs: Any) -> list[Array]:
        self._ended = np.zeros(self.num_envs, dtype=np.bool_)
        return super().reset(seeds, **kwargs)

    @override
    def step(self, action: Any) -> Step:
        obs, reward, terminated, truncated, info = self.env.step(action)
        leaves = self.codec.encode(obs)
        self._ended = terminated | truncated
        if self._ended.any():
            self._fresh = leaves
            leaves = self._with_final(leaves, info)
        return leaves, reward, terminated, truncated

    def _with_final(self, leaves: list[Array], info: dict[str, Any]) -> list[Array]:
        if "final_obs" not in info:
            raise KeyError(
                "the vector environment says AutoresetMode.SAME_STEP, but gave no "
                f"info['final_obs'] at an episode's end; the info holds {sorted(info)}"
            )
        # What has no fixed layout comes as a tuple.
        merged: list[Any] = [
            np.array(leaf) if isinstance(leaf, np.ndarray) else list(leaf) for leaf in leaves
        ]
        final = info["final_obs"]
        for row in np.flatnonzero(self._ended):
            sample = _row(final, int(row))
            for target, value in zip(merged, self.codec.encode(sample), strict=True):
                target[row] = value
        return merged

    @override
    def restart(self, mask: Mask, **kwargs: Any) -> list[Array]:
        more = mask & ~self._ended
        self._ended = self._ended & ~mask
        if more.any():
            if not self.can_restart:
                raise _cant_restart(self.env)
            # A partial reset repeats the other rows' last observation, which is their first one.
            self._fresh = super().restart(more, **kwargs)
        return self._fresh


class EnvPoolVector(VectorAdapter):
    """An EnvPool environment: it resets any sub-environments when asked by their ids."""

    def __init__(self, env: Any, codec: SpaceCodec) -> None:
        super().__init__(env, codec)
        self._last: list[Array] = []
        self._raw_reset = _raw_reset(env)

    @override
    def reset(self, seeds: Sequence[int] | None = None, **kwargs: Any) -> list[Array]:
        if seeds is not None or kwargs.get("seed") is not None:
            raise ValueError(
                "an EnvPool environment takes its seed when it is made: "
                "envpool.make_gymnasium(..., seed=...) instead of set_seed(...)"
            )
        obs, _ = self.env.reset()
        self._last = self.codec.encode(obs)
        return self._last

    @override
    def step(self, action: Any) -> Step:
        obs, reward, terminated, truncated, _ = self.env.step(action)
        self._last = self.codec.encode(obs)
        return self._last, reward, terminated, truncated

    @override
    def restart(self, mask: Mask, **kwargs: Any) -> list[Array]:
        obs, rows = self._raw_reset(np.flatnonzero(mask).astype(np.int32))
        merged = [np.array(leaf) for leaf in self._last]
        for target, value in zip(merged, self.codec.encode(obs), strict=True):
            target[rows] = value
        return merged


class StepResetVector(VectorAdapter):
    """``AutoresetMode.NEXT_STEP`` without partial resets: the step after an end is a reset."""

    can_restart = False

    def __init__(self, env: Any, codec: SpaceCodec) -> None:
        super().__init__(env, codec)
        self._last: list[Array] = []
        self._resetting = np.zeros(self.num_envs, dtype=np.bool_)
        self._ended = np.zeros(self.num_envs, dtype=np.bool_)

    @override
    def reset(self, seeds: Sequence[int] | None = None, **kwargs: Any) -> list[Array]:
        self._resetting = np.zeros(self.num_envs, dtype=np.bool_)
        self._ended = np.zeros(self.num_envs, dtype=np.bool_)
        return super().reset(seeds, **kwargs)

    @override
    def step(self, action: Any) -> Step:
        self._resetting = self._ended
        self._last, reward, terminated, truncated = super().step(action)
        self._ended = terminated | truncated
        return self._last, reward, terminated, truncated

    @override
    def restart(self, mask: Mask, **kwargs: Any) -> list[Array]:
        if (mask & ~self._ended).any():
            if not mask.all():
                raise _cant_restart(self.env)
            return self.reset(**kwargs)
        # The next step is the reset.
        return self._last

    @override
    def spent(self) -> Mask | None:
        return self._resetting


def _raw_reset(env: Any) -> Callable[[Array], tuple[Any, Array]]:
    """Resets sub-environments by id; gives their observations and ids, in one order.

    EnvPool's own ``reset`` takes four times as long, most of it for the names and nesting of
    what it returns. Where observations are a single array its inner calls are enough.
    """
    keys = list(getattr(env, "_state_keys", ()))
    inner = hasattr(env, "_reset") and hasattr(env, "_recv")
    if not (inner and keys.count("obs") == 1 and keys.count("info:env_id") == 1):

        def reset(ids: Array) -> tuple[Any, Array]:
            obs, info = env.reset(ids)
            return obs, info["env_id"]

        return reset
    obs_at, ids_at = keys.index("obs"), keys.index("info:env_id")

    def quick_reset(ids: Array) -> tuple[Any, Array]:
        env._reset(ids)
        state = env._recv()
        return state[obs_at], state[ids_at]

    return quick_reset


def adapt(env: Any, codec: SpaceCodec) -> VectorAdapter:
    """The adapter for a Gymnasium ``VectorEnv`` or an EnvPool environment.

    Raises:
        ValueError: for an EnvPool environment that steps only some of its environments at once.
    """
    if is_envpool(env):
        together = env.config["batch_size"]
        if together != env.num_envs:
            raise ValueError(
                f"an EnvPool environment must step all of its environments at once, but it has "
                f"batch_size={together} and num_envs={env.num_envs}; make it without batch_size"
            )
        return EnvPoolVector(env, codec)
    mode = AutoresetMode(env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
    if mode is AutoresetMode.SAME_STEP:
        return SameStepVector(env, codec)
    if mode is AutoresetMode.DISABLED or isinstance(env.unwrapped, SyncVectorEnv):
        return VectorAdapter(env, codec)
    # Without shared memory, AsyncVectorEnv resets once more after a partial reset.
    if isinstance(env.unwrapped, AsyncVectorEnv) and env.unwrapped.shared_memory:
        return VectorAdapter(env, codec)
    return StepResetVector(env, codec)


def is_envpool(env: object) -> bool:
    """Whether ``env`` is an EnvPool environment with the Gymnasium interface."""
    return all(hasattr(env, name) for name in ("async_reset", "send", "recv", "config"))


def is_vector_env(env: object) -> bool:
    """Whether ``env`` steps several sub-environments at once."""
    return isinstance(env, VectorEnv) or is_envpool(env)


def _cant_restart(env: Any) -> ValueError:
    return ValueError(
        f"{type(env.unwrapped).__name__} resets its sub-environments by itself when their "
        "episodes end, and can't be told to restart some of them. Use "
        "gymnasium.vector.SyncVectorEnv, or a list of factories, for max_frames_per_traj and for "
        "reset(index)."
    )


def _row(sample: Any, row: int) -> Any:
    """Sub-environment ``row``'s part of an info entry, as ``VectorEnv`` merges them."""
    if isinstance(sample, dict):
        # Beside each entry, "_entry" says which sub-environments gave one.
        return {k: _row(v, row) for k, v in sample.items() if not _tells(k, sample)}
    return sample[row]


def _tells(key: Any, sample: dict[Any, Any]) -> bool:
    return str(key).startswith("_") and str(key)[1:] in sample
