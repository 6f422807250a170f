"""Gymnasium environments, single or vector, with the TensorDict interface."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray
from tensordict import NonTensorData, TensorDict, stack
from torch import Tensor
from typing_extensions import override

from trawl.checks import check_bool, check_number
from trawl.devices import optional_device
from trawl.envs.batches.envpool_calls import make_envpool
from trawl.envs.batches.pool import Pool, adapt_pool, is_pool
from trawl.envs.capture import capture, restore
from trawl.envs.capture.ways import chain
from trawl.envs.dm import DMEnv, is_dm_env, make_dm_control
from trawl.envs.entries.finding_infos import find_infos
from trawl.envs.entries.info_keys import InfoKeys
from trawl.envs.entries.infos import InfoCodec, InfoLayout, InfoMerger
from trawl.envs.entries.masks import (
    MASK_KEY,
    FirstMaskCheck,
    MaskKeeper,
    MaskMethod,
    flat_mask,
    mask_method,
)
from trawl.envs.entries.spaces import SpaceCodec, check_keys
from trawl.envs.kinds import EnvKind
from trawl.envs.logged import LoggedEnv
from trawl.envs.making import make, single_spaces, wrapped
from trawl.envs.outcomes import (
    checked_info,
    flag_of,
    reset_results,
    reward_of,
    reward_shape_of,
    rewards_of,
    step_results,
)
from trawl.envs.reset_kwargs import ResetArguments, arguments_of_all, names_taken
from trawl.envs.seeding import check_seed, next_seed, rebuilt_seed
from trawl.envs.specs import Composite, NonTensor, Unbounded
from trawl.envs.types import EnvLike
from trawl.envs.vector import VectorAdapter, adapt, is_envpool, is_vector_env
from trawl.errors import env_errors
from trawl.schema.states import GYM, check_adapter
from trawl.supported import MODE_SINGLE, Trait


class GymEnv(LoggedEnv):
    """Gymnasium environment with the TensorDict interface.

    If its spaces have a fixed layout, collectors step it without TensorDicts, which is faster.

    The observation of a Box space has the key ``"observation"``. The entries of a Dict space keep
    their own names, and the entries of a Tuple space have the keys ``("observation", "0")`` and so
    on. A discrete action or observation is a one-hot int64 vector or, with
    ``categorical_action_encoding``, an index. The reward is float32. The reward and the flags
    have shape ``(*batch_size, 1)``.

    Args:
        env: an id of Gymnasium, or an id such as ``"dm_control:cheetah/run"`` (see the page
            "Environments"), a ``gymnasium.Env``, a ``gymnasium.vector.VectorEnv``, an EnvPool
            environment or an environment of dm_env.
        categorical_action_encoding: True to encode discrete values as indices instead of one-hot
            vectors.
        frame_skip: number of steps that are taken with each action; the rewards are summed.
        from_pixels: True to add the rendered image, uint8 of shape ``(height, width, 3)``, under
            ``"pixels"``.
        pixels_only: True to drop all observations except ``"pixels"``.
        num_envs: number of environments that are stepped together; allowed only with an id.
        autoreset_mode: mode in which a vector environment resets its sub-environments, as a
            ``gymnasium.vector.AutoresetMode`` or its value: ``"NextStep"``, ``"SameStep"`` or
            ``"Disabled"``. It is required if the environment's metadata has no
            ``"autoreset_mode"``. With an id, the vector environment is made in this mode.
        info_keys: entries of ``info`` that become observations, as a list of names or of
            :class:`InfoKey`, or as a mapping from names to spaces. An entry ``"name"`` has the key
            ``("info", "name")``, unless an ``InfoKey`` states another one. Where an info lacks the
            entry, it is zero. Without a space, the layout is found in random steps of the
            environment, which is then reset.
        device: device of the returned TensorDicts. With None, the TensorDicts have no device, and
            their tensors are on the CPU.
        **kwargs: further arguments of ``gymnasium.make`` (with ``num_envs``, of
            ``gymnasium.make_vec``), or of the package that makes the environment; allowed only with
            an id.

    Raises:
        gymnasium.error.Error: if the id is unknown, or its environment can't be made.
        ImportError: if a package that the id names is not installed.
        TypeError: if ``env`` is none of the above, if ``num_envs`` or ``kwargs`` are passed
            without an id, or if an argument has the wrong type.
        ValueError: if ``num_envs`` is below 1, or if arguments contradict each other.

    Attributes:
        mask_check: check of the info of the first step.
        reward_shape: shape of the reward, which the environment's ``reward_space`` states; ``()``
            for a single number.

    Examples:
        >>> from trawl.envs import GymEnv
        >>> env = GymEnv("CartPole-v1")
        >>> env.rollout(3).batch_size
        torch.Size([3])
        >>> env.close()
    """

    def __init__(
        self,
        env: str | EnvLike,
        *,
        categorical_action_encoding: bool = False,
        frame_skip: int | None = None,
        from_pixels: bool = False,
        pixels_only: bool = False,
        num_envs: int | None = None,
        autoreset_mode: AutoresetMode | str | None = None,
        info_keys: InfoKeys | None = None,
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        check_bool("categorical_action_encoding", categorical_action_encoding)
        check_bool("from_pixels", from_pixels)
        check_bool("pixels_only", pixels_only)
        self._has_id = isinstance(env, str)
        env_id = env
        if isinstance(env, str):
            if num_envs is not None:
                num_envs = check_number("num_envs", num_envs, least=1)
            env = make(env, num_envs, from_pixels, autoreset_mode, kwargs, GymEnv)
        elif kwargs or num_envs is not None:
            raise TypeError(
                f"{sorted(kwargs) or ['num_envs']} can be used only with the id of an "
                f"environment: they can't change {type(env).__name__}, which already exists"
            )
        self.env = wrapped(env, frame_skip, from_pixels, pixels_only)
        layout = None
        if info_keys is not None:
            layout, info_keys = find_infos(self.env, info_keys, autoreset_mode, owned=self._has_id)
        if isinstance(env_id, str):
            self.remake = partial(
                GymEnv,
                env_id,
                categorical_action_encoding=categorical_action_encoding,
                frame_skip=frame_skip,
                from_pixels=from_pixels,
                pixels_only=pixels_only,
                num_envs=num_envs,
                autoreset_mode=autoreset_mode,
                info_keys=info_keys,
                **kwargs,
            )
        self.device = optional_device("device", device)
        self.categorical_action_encoding = categorical_action_encoding
        self._seed: tuple[int, bool] | None = None  # of the last set_seed()
        self._seeds: list[int] | None = None
        self._rebuilds = 0  # since the last set_seed()
        self._fixed_arguments: Mapping[str, Any] = {}
        # The masks of actions; self.env may be another wrapper around a keeper.
        self._masks: MaskKeeper | MaskMethod | None = None
        # True once the simulator was reset, and once it was asked for a method for masks.
        self._is_begun = self._looked = False
        self.mask_check = FirstMaskCheck()
        self._describe_spaces(autoreset_mode, layout)

    def _describe_spaces(
        self, autoreset_mode: AutoresetMode | str | None, infos: InfoLayout | None
    ) -> None:
        """Sets the batch size, codecs, specs and vector adapter according to the simulator."""
        categorical = self.categorical_action_encoding
        batched = is_vector_env(self.env)
        if autoreset_mode is not None and not batched:
            name = type(self.env.unwrapped).__name__
            raise MODE_SINGLE.error("autoreset_mode", str(autoreset_mode), against=name)
        self.batch_size = torch.Size([self.env.num_envs] if batched else [])
        observed, acted = single_spaces(self.env, batched)
        self.observation_codec: SpaceCodec = (
            SpaceCodec(observed, "observation", categorical)
            if infos is None
            else InfoCodec(InfoMerger(observed, infos), categorical)
        )
        self.action_codec = SpaceCodec(acted, "action", categorical)
        check_keys(self.observation_codec, self.action_codec)
        self.reward_shape = reward_shape_of(self.env)
        if self.reward_shape:
            reward = Unbounded((*self.batch_size, *self.reward_shape))
            self._reward_spec = Composite({"reward": reward}, self.batch_size)
        self.vector: VectorAdapter | None = None
        if batched:
            adapter = adapt_pool if is_pool(self.env) else adapt
            self.vector = adapter(self.env, self.observation_codec, autoreset_mode)
        place = self.device or "cpu"
        self.full_observation_spec = self.observation_codec.composite(self.batch_size).to(place)
        self.full_action_spec = self.action_codec.composite(self.batch_size).to(place)

    @property
    def name(self) -> str:
        """The environment's id, or the name of its class if it has no id."""
        inner, spec = self.env.unwrapped, getattr(self.env, "spec", None)
        name = getattr(inner, "name", None) if isinstance(inner, DMEnv) else None
        return str(name or getattr(spec, "id", None) or type(inner).__name__)

    @property
    @override
    def fixed_layout(self) -> bool:
        """True if all data have a fixed shape and dtype."""
        return bool(self.observation_codec.fixed and self.action_codec.fixed)

    @property
    def action_spec_unbatched(self) -> Any:
        """Action spec of a single environment in the batch."""
        specs = self.action_codec.composite()
        return specs[self.action_keys[0]] if len(self.action_keys) == 1 else specs

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds the next reset; an EnvPool environment with an id is made again with the seed.

        Args:
            seed: the seed, which must not be negative. In a vector environment, the first
                sub-environment gets this seed, and the others get seeds derived from it.
            static_seed: True to give the same seed to all sub-environments.

        Returns:
            The seed for another environment; if ``static_seed``, the same seed.
        """
        seed = check_seed(seed)
        if self._has_id and is_envpool(self.env):
            # EnvPool takes its seed only when it is made.
            remake: Any = self.remake
            self._seed, self.remake = None, partial(remake, seed=seed % 2**31)
            self.rebuild()
            return next_seed(seed, static_seed)
        self._seed, self._rebuilds = (seed, static_seed), 0
        return self._set_seeds(seed, static_seed)

    def _set_seeds(self, seed: int, static_seed: bool) -> int:
        self._seeds = []
        for _ in range(max(1, self.batch_size.numel())):
            self._seeds.append(seed)
            seed = next_seed(seed, static_seed)
        return seed

    def begin_episode(self, **kwargs: Any) -> list[Any]:
        """Resets a simulator that is not a vector environment, and returns its first leaves.

        If ``info`` has an action mask, the environment records its masks from now on.
        """
        seeds = self.pop_seeds()
        if seeds is not None:
            kwargs.setdefault("seed", seeds[0])
        obs, info = reset_results(self.reset_simulator(**kwargs), self.env)
        if info and MASK_KEY in info and not isinstance(self._masks, MaskKeeper):
            self.env = self._masks = MaskKeeper(self.env, flat_mask(info[MASK_KEY]))
        self._is_begun = True
        self.decide_log()
        return self.read(obs, info, "reset")

    def read(self, obs: Any, info: Any, method: str) -> list[Any]:
        """Returns the leaves of an observation of a single environment, and of its info.

        Args:
            obs: the observation.
            info: the info.
            method: the method that returned them, ``"reset"`` or ``"step"``.
        """
        if isinstance(self.observation_codec, InfoCodec):
            checked_info(info, method, self.env)
        return self.observation_codec.encode(obs, info)

    @override
    def action_mask(self) -> NDArray[Any] | None:
        vector = self.vector
        if vector is not None and vector.masks is not None:
            return vector.masks
        # A method may need the state that a reset makes.
        begun = self._is_begun if vector is None else vector.is_begun
        if self._masks is None and begun and not self._looked:
            self._looked = True
            name, *more = self.action_keys
            spec = None if more else self.full_action_spec[name]
            self._masks = mask_method(self.env, self.action_codec.space, spec)
        if isinstance(self._masks, MaskMethod):
            return self._masks.masks
        return None if self._masks is None else self._masks.mask[None]

    def pop_seeds(self) -> list[int] | None:
        """Returns the seeds for the next reset and clears them; returns None if none are set."""
        seeds, self._seeds = self._seeds, None
        return seeds

    @override
    def _close(self) -> None:
        self.env.close()

    @property
    def _captured_adapter(self) -> VectorAdapter | None:
        """Adapter whose state is captured, too; a replay restores that of a pool."""
        return self.vector if self.log is None else None

    @override
    def capture(self) -> dict[str, Any]:
        if isinstance(self.vector, Pool):
            # Some sub-environments are always stepping.
            return super().capture()
        adapter = self._captured_adapter
        return {
            "env": capture(self.env, self.log),
            "vector": None if adapter is None else adapter.state_dict(),
            "seed": None if self._seed is None else list(self._seed),
            "seeds": self._seeds,
            "rebuilds": self._rebuilds,
        }

    @override
    def check_state(self, state: Mapping[str, Any]) -> None:
        with env_errors():
            GYM(state, "state", {"seeds": [0] * max(1, self.batch_size.numel())})
        super().check_state(state)
        with env_errors():
            if self._captured_adapter is not None:
                own = self._captured_adapter.state_dict()
                # Without a fixed layout, results differ in shape and kind from step to step.
                fixed = self.observation_codec.fixed
                check_adapter(state["vector"], "state['vector']", own, fixed)

    @override
    def restore(self, state: Mapping[str, Any], trust: bool = False) -> None:
        self.env = restore(self.env, state["env"], trust, self.log)
        if self._captured_adapter is not None:
            self._captured_adapter.env = self.env
            self._captured_adapter.load_state_dict(state["vector"])
        # The environment and its wrappers may be other objects than before.
        keepers = (one for one in chain(self.env) if isinstance(one, MaskKeeper))
        self._masks, self._is_begun, self._looked = next(keepers, None), True, False
        seed = state["seed"]
        self._seed = None if seed is None else (int(seed[0]), bool(seed[1]))
        self._seeds, self._rebuilds = state["seeds"], state["rebuilds"]

    def rebuild(self) -> None:
        """Closes the simulator, ignoring errors, and makes a new one in the same way.

        If the environment was seeded, the next reset is seeded too. The seed of this reset is
        derived from the seed that was passed to :meth:`set_seed` and the number of rebuilds since
        that call. The same seed would repeat episodes.

        Raises:
            RuntimeError: if the environment was passed as an object.
            ValueError: if the new simulator has other spaces, or is the same object as before.
        """
        fresh = self._made_again(GymEnv, self._abandon)
        self.env, self.vector, self.is_closed = fresh.env, fresh.vector, False
        self._give_arguments()
        self._masks, self._is_begun, self._looked = None, False, False
        self.renew_log()
        self.observation_codec, self.action_codec = fresh.observation_codec, fresh.action_codec
        self._rebuilds += 1
        self._seeds = None
        if self._seed is not None:
            seed, static = self._seed
            self._set_seeds(rebuilt_seed(seed, self._rebuilds), static)

    @override
    def set_reset_kwargs(self, given: Any, first: int, counts: Any) -> None:
        self._fixed_arguments, self.reset_arguments = {}, None
        if given is None:
            pass
        elif isinstance(self.env.unwrapped, DMEnv) or is_envpool(self.env):
            super().set_reset_kwargs(given, first, counts)
        elif self.vector is None:
            names = names_taken(chain(self.env))
            self.reset_arguments = ResetArguments(given, first, names, counts)
        else:
            how = self.vector.autoresets
            begun = None if how is None else f"it {how}"
            self._fixed_arguments = arguments_of_all(given, first, chain(self.env), counts, begun)
        self._give_arguments()

    def _give_arguments(self) -> None:
        """Gives the vector environment, which may be made anew, the arguments of its resets."""
        if self.vector is not None:
            self.vector.reset_kwargs = self._fixed_arguments

    def _abandon(self) -> None:
        self.is_closed = True
        if self.vector is None:
            self.env.close()
        else:
            self.vector.abandon()

    @property
    @override
    def cannot_restart(self) -> list[str]:
        vector = self.vector
        return [] if vector is None or vector.can_restart else [type(vector.env).__name__]

    @property
    @override
    def traits(self) -> frozenset[Trait]:
        pool = isinstance(self.vector, Pool)
        return super().traits | ({Trait.POOL, Trait.READY} if pool else set())

    @override
    def autoreset_mask(self) -> Tensor | None:
        mask = None if self.vector is None else self.vector.autoreset_mask()
        return None if mask is None else torch.from_numpy(mask)

    def _reset(self, mask: Tensor | None, **kwargs: Any) -> TensorDict:
        if self.vector is None:
            leaves, rows = self.begin_episode(**kwargs), None
        elif mask is not None and (self._seeds is None or not mask.all()):
            rows = mask.cpu().numpy()
            leaves = self.vector.restart(rows, **kwargs)
        else:
            leaves, rows = self.vector.reset(self.pop_seeds(), **kwargs), None
        observations = self._observations(leaves)
        if self.log is not None:
            self.log.observe(leaves, rows)
        return observations

    @override
    def _after(self, actions: list[Any]) -> TensorDict:
        action = self.action_codec.decode(actions)
        if self.vector is None:
            step = self.mask_check.watched(self, self.env.step)
            obs, *rest, info = step_results(step(action), self.env)
            leaves = self.read(obs, info, "step")
            rest = self._checked(*rest)
        else:
            leaves, *rest = self.vector.step(action)
        reward, terminated, truncated = (np.asarray(part) for part in rest)
        following = self._observations(leaves)
        rewards = torch.from_numpy(reward.astype(np.float32))
        following.set("reward", rewards.reshape((*self.batch_size, *(self.reward_shape or (1,)))))
        shape = (*self.batch_size, 1)
        for key, flags in (("terminated", terminated), ("truncated", truncated)):
            following.set(key, torch.from_numpy(flags.astype(np.bool_)).reshape(shape))
        following.set("done", following.get("terminated") | following.get("truncated"))
        if self.log is not None:
            self.log.add_step(actions, reward)
            self.log.observe(leaves)
        return following

    def _checked(self, reward: Any, terminated: Any, truncated: Any) -> list[Any]:
        return [
            self.checked_reward(reward),
            flag_of(terminated, "terminated", self),
            flag_of(truncated, "truncated", self),
        ]

    def checked_reward(self, reward: Any) -> Any:
        """Returns the reward of a step as a float, or an array of its components.

        Raises:
            TypeError: if it doesn't consist of numbers.
            ValueError: if it has another shape than the environment states.
        """
        if self.reward_shape:
            return rewards_of(reward, self.reward_shape, self)
        return reward_of(reward, self)

    def _observations(self, values: list[Any]) -> TensorDict:
        result = TensorDict({}, self.batch_size)
        for leaf, value in zip(self.observation_codec.leaves, values, strict=True):
            # Copies: an environment may reuse the memory of its observations.
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


def _is_gymnasium(env: Any) -> bool:
    return isinstance(env, gymnasium.Env) or is_vector_env(env) or is_dm_env(env)


GYMNASIUM = EnvKind(GymEnv, _is_gymnasium)
DM_CONTROL = EnvKind(GymEnv, make=make_dm_control, batched=False)
ENVPOOL = EnvKind(GymEnv, make=make_envpool, batched=False)
