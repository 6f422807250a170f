"""Gymnasium environments, single or vector, with the TensorDict interface."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import Env
from gymnasium.wrappers import AddRenderObservation, FilterObservation
from tensordict import NonTensorData, TensorDict, TensorDictBase, stack
from torch import Tensor
from typing_extensions import override

from trawl.envs.base import DONE_KEYS, TensorDictEnv
from trawl.envs.seeding import check_seed, next_seed
from trawl.envs.spaces import SpaceCodec
from trawl.envs.specs import NonTensor
from trawl.envs.vector import VectorAdapter, adapt, is_envpool, is_vector_env
from trawl.keys import as_key, show_key

# What a frame has beside observations and actions.
_RESERVED = ("reward", *DONE_KEYS, "next", "collector", "_reset")


class GymEnv(TensorDictEnv):
    """A Gymnasium environment as a TensorDict environment, and the fast path of collectors.

    Observations of a Box space are under ``"observation"``, those of a Dict space under their
    own names, those of a Tuple under ``("observation", "0")`` and so on. A discrete action (or
    observation) is a one-hot int64 vector, or an index with ``categorical_action_encoding``.
    The reward is float32 and, like the flags, of shape ``(*batch_size, 1)``.

    Args:
        env: a Gymnasium id, a ``gymnasium.Env``, a ``gymnasium.vector.VectorEnv`` or an EnvPool
            environment.
        categorical_action_encoding: whether discrete values are indices and not one-hot.
        frame_skip: how many times each action is repeated; rewards are summed.
        from_pixels: adds the rendered image, uint8 ``(height, width, 3)``, under ``"pixels"``.
        pixels_only: keeps no other observation than ``"pixels"``.
        num_envs: with an id: how many environments to step as one.
        device: where the TensorDicts are put; None for the CPU without saying so.
        **kwargs: further arguments of ``gymnasium.make``, with an id.

    Raises:
        gymnasium.error.Error: if the id is unknown or can't be made.
        TypeError: if ``env`` is none of the above, or ``kwargs`` come without an id.

    Example:
        >>> from trawl.envs import GymEnv
        >>> env = GymEnv("CartPole-v1")
        >>> env.rollout(3).batch_size
        torch.Size([3])
        >>> env.close()
    """

    def __init__(
        self,
        env: str | Env[Any, Any] | Any,
        *,
        categorical_action_encoding: bool = False,
        frame_skip: int | None = None,
        from_pixels: bool = False,
        pixels_only: bool = False,
        num_envs: int | None = None,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(env, str):
            env = _make(env, num_envs, from_pixels, kwargs)
        elif kwargs or num_envs is not None:
            raise TypeError(
                f"{sorted(kwargs) or ['num_envs']} need an environment's id; they can't change "
                f"{type(env).__name__}, which is made already"
            )
        self.env = _wrapped(env, frame_skip, from_pixels, pixels_only)
        self.device = None if device is None else torch.device(device)
        self.is_closed = False
        self.categorical_action_encoding = categorical_action_encoding
        batched = is_vector_env(self.env)
        self.batch_size = torch.Size([self.env.num_envs] if batched else [])
        observed, acted = _single_spaces(self.env, batched)
        self.observation_codec = SpaceCodec(observed, "observation", categorical_action_encoding)
        self.action_codec = SpaceCodec(acted, "action", categorical_action_encoding)
        _check_keys(self.observation_codec, self.action_codec)
        self.vector: VectorAdapter | None = (
            adapt(self.env, self.observation_codec) if batched else None
        )
        place = self.device or "cpu"
        self.full_observation_spec = self.observation_codec.composite(self.batch_size).to(place)
        self.full_action_spec = self.action_codec.composite(self.batch_size).to(place)
        self._seeds: list[int] | None = None

    @property
    def name(self) -> str:
        """The environment's id, or its class for want of one."""
        spec = getattr(self.env, "spec", None)
        return str(getattr(spec, "id", None) or type(self.env.unwrapped).__name__)

    @property
    def fixed_layout(self) -> bool:
        """Whether all that it takes and gives has a fixed shape and dtype."""
        return self.observation_codec.fixed and self.action_codec.fixed

    @property
    def action_spec_unbatched(self) -> Any:
        """The action spec of one environment of the batch."""
        specs = self.action_codec.composite()
        return specs[self.action_keys[0]] if len(self.action_keys) == 1 else specs

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds the next reset.

        Args:
            seed: not negative. A vector environment's first environment gets it, the others
                seeds made from it.
            static_seed: gives all of them the same seed.

        Returns:
            The seed for another environment (the same, if static).
        """
        seed = check_seed(seed)
        self._seeds = []
        for _ in range(max(1, self.batch_size.numel())):
            self._seeds.append(seed)
            seed = next_seed(seed, static_seed)
        return seed

    def take_seeds(self) -> list[int] | None:
        """The seeds for the reset that comes now; the resets after it go on unseeded."""
        seeds, self._seeds = self._seeds, None
        return seeds

    @override
    def close(self, *, raise_if_closed: bool = True) -> None:
        if self.is_closed:
            if raise_if_closed:
                raise RuntimeError(f"environment {self.name} is closed already")
            return
        self.is_closed = True
        self.env.close()

    @property
    @override
    def vectors(self) -> list[VectorAdapter]:
        return [] if self.vector is None else [self.vector]

    @override
    def spent(self) -> Tensor | None:
        spent = None if self.vector is None else self.vector.spent()
        return None if spent is None else torch.from_numpy(spent)

    def _reset(self, mask: Tensor | None, **kwargs: Any) -> TensorDict:
        if self.vector is None:
            seeds = self.take_seeds()
            if seeds is not None:
                kwargs.setdefault("seed", seeds[0])
            obs, _ = self.env.reset(**kwargs)
            return self._observations(self.observation_codec.encode(obs))
        if mask is not None and (self._seeds is None or not mask.all()):
            return self._observations(self.vector.restart(mask.cpu().numpy(), **kwargs))
        return self._observations(self.vector.reset(self.take_seeds(), **kwargs))

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        action = self.action_codec.decode([self._action(tensordict, k) for k in self.action_keys])
        if self.vector is None:
            obs, *rest, _ = self.env.step(action)
            leaves = self.observation_codec.encode(obs)
        else:
            leaves, *rest = self.vector.step(action)
        reward, terminated, truncated = (np.asarray(part) for part in rest)
        following = self._observations(leaves)
        shape = (*self.batch_size, 1)
        following.set("reward", torch.from_numpy(reward.astype(np.float32)).reshape(shape))
        for key, flags in (("terminated", terminated), ("truncated", truncated)):
            following.set(key, torch.from_numpy(flags.astype(np.bool_)).reshape(shape))
        return following

    def _action(self, tensordict: TensorDictBase, key: Any) -> Any:
        value = tensordict.get(key, None)
        if value is None:
            present = ", ".join(sorted(map(str, tensordict.keys())))
            raise KeyError(
                f"no action {show_key(as_key(key))} in the TensorDict, which has {present}"
            )
        if not isinstance(value, Tensor):
            return value.data
        value = value.detach().cpu()
        # numpy has no bfloat16.
        return (value.float() if value.dtype is torch.bfloat16 else value).numpy()

    def _observations(self, values: list[Any]) -> TensorDict:
        result = TensorDict({}, self.batch_size)
        for leaf, value in zip(self.observation_codec.leaves, values, strict=True):
            # Copies: environments may use their observation's memory again.
            if isinstance(leaf.spec, NonTensor):
                result.set(leaf.key, self._non_tensor(copy.deepcopy(value)))
            else:
                array = np.array(value)
                leaf.check(array, self.batch_size)
                result.set(leaf.key, torch.from_numpy(array).to(leaf.spec.dtype))
        return result

    def _non_tensor(self, value: Any) -> Any:
        if not self.batch_size:
            return NonTensorData(value)
        return stack([NonTensorData(value[i]) for i in range(self.batch_size.numel())])

    def __repr__(self) -> str:
        batch = f", batch_size={list(self.batch_size)}" if self.batch_size else ""
        return f"GymEnv({self.name}{batch})"


class _FrameSkip(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Repeats each action, and sums the rewards."""

    def __init__(self, env: Env[Any, Any], times: int) -> None:
        super().__init__(env)
        self._times = times

    def step(self, action: Any) -> Any:
        total = 0.0
        for _ in range(self._times):
            obs, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return obs, total, terminated, truncated, info


def _make(env_id: str, num_envs: int | None, from_pixels: bool, kwargs: Mapping[str, Any]) -> Any:
    options = dict(kwargs)
    if from_pixels:
        options.setdefault("render_mode", "rgb_array")
    if num_envs is None:
        return gymnasium.make(env_id, **options)
    options.setdefault("vectorization_mode", "sync")
    return gymnasium.make_vec(env_id, num_envs, **options)


def _wrapped(env: Any, frame_skip: int | None, from_pixels: bool, pixels_only: bool) -> Any:
    if not (isinstance(env, Env) or is_vector_env(env)):
        raise TypeError(
            "env must be a Gymnasium id, a gymnasium.Env, a gymnasium.vector.VectorEnv or an "
            f"EnvPool environment, but it is {type(env).__name__}: {env!r}"
        )
    if is_envpool(env) and not hasattr(env, "num_envs"):
        raise TypeError("an EnvPool environment must be made by envpool.make_gymnasium")
    if not is_vector_env(env):
        for name in ("observation_space", "action_space"):
            if not isinstance(getattr(env, name, None), gymnasium.Space):
                raise TypeError(
                    f"{type(env.unwrapped).__name__}.{name} must be a gymnasium.Space, but it is "
                    f"{getattr(env, name, None)!r}"
                )
    if is_vector_env(env):
        if frame_skip not in (None, 1) or from_pixels:
            raise ValueError("frame_skip and from_pixels need a single environment, not a vector")
        return env
    if frame_skip is not None:
        if not isinstance(frame_skip, int) or frame_skip < 1:
            raise ValueError(f"frame_skip must be a positive integer, but it is {frame_skip!r}")
        env = _FrameSkip(env, frame_skip)
    if from_pixels:
        env = AddRenderObservation(
            env, render_only=False, render_key="pixels", obs_key="observation"
        )
        if pixels_only:
            env = FilterObservation(env, ["pixels"])
    elif pixels_only:
        raise ValueError("pixels_only=True needs from_pixels=True")
    return env


def _check_keys(observed: SpaceCodec, acted: SpaceCodec) -> None:
    """Refuses observations under a key that a frame has for something else."""
    taken = {(name,) for name in _RESERVED} | {leaf.key for leaf in acted.leaves}
    for key in (leaf.key for leaf in observed.leaves):
        parts = {key[:length] for length in range(1, len(key) + 1)}
        if parts & taken or any(other[: len(key)] == key for other in taken):
            raise ValueError(
                f"the environment observes {show_key(key)}, but a frame has that key for an "
                f"action, or for something else ({', '.join(_RESERVED)}); rename it with a wrapper"
            )


def _single_spaces(env: Any, batched: bool) -> Sequence[Any]:
    if not batched:
        return env.observation_space, env.action_space
    with warnings.catch_warnings():
        # EnvPool casts the bounds of its spaces when they are asked for, and Gymnasium warns.
        warnings.filterwarnings("ignore", message=".*precision lowered by casting")
        return env.single_observation_space, env.single_action_space
