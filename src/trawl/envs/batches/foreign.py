"""Environments of other libraries as members of a batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from trawl.envs.base import TensorDictEnv
from trawl.envs.capture.kinds import from_plain, to_plain
from trawl.envs.reset_kwargs import with_reset_kwargs
from trawl.envs.seeding import rebuilt_seed
from trawl.envs.specs import is_fixed
from trawl.errors import env_errors
from trawl.keys import DONE_KEYS, RESET_MASK, as_key, show_keys
from trawl.schema.states import FOREIGN


class ForeignEnv(TensorDictEnv):
    """Environment with TorchRL's protocol that is a member of a batch, and can be rebuilt alone.

    Other attributes are those of the environment.

    Args:
        env: the environment.
        remake: function that returns another :class:`ForeignEnv` like this one; None if ``env`` was
            passed as an object.

    Attributes:
        env: the environment.
    """

    def __init__(self, env: Any, remake: Callable[[], Any] | None = None) -> None:
        if not any(as_key(key) == ("done",) for key in env.done_keys):
            flags = show_keys([as_key(key) for key in env.done_keys])
            raise ValueError(
                f"{env!r} can't be in a batch, because it has only the flags {flags}: add a flag "
                "'done', which ends the episode of all agents"
            )
        self.env, self.remake = env, remake
        self.batch_size, self.device = env.batch_size, env.device
        self.full_observation_spec = env.full_observation_spec
        self.full_action_spec = env.full_action_spec
        self._reward_spec, self._done_spec = env.full_reward_spec, env.full_done_spec
        # What the last reset or step returned: transforms read it in the next step.
        self._root: TensorDictBase | None = None
        self._seed: tuple[int, bool] | None = None
        self._rebuilds = 0  # since the last set_seed()
        self._arguments: tuple[Any, int, Any] | None = None

    def __getattr__(self, name: str) -> Any:
        # Copies ask for methods with such names, also before there is an environment.
        if name == "env" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.env, name)

    @property
    @override
    def name(self) -> str:
        return repr(self.env)

    @property
    @override
    def unwrapped(self) -> Any:
        return self.env

    @property
    @override
    def action_spec_unbatched(self) -> Any:
        return self.env.action_spec_unbatched

    @property
    @override
    def full_state_spec(self) -> Any:
        return self.env.full_state_spec

    @override
    def fake_tensordict(self) -> TensorDict:
        found: TensorDict = self.env.fake_tensordict()
        return found

    @override
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        self._seed, self._rebuilds = (seed, static_seed), 0
        return int(self.env.set_seed(seed, static_seed=static_seed))

    @override
    def set_reset_kwargs(self, given: Any, first: int, counts: Any) -> None:
        self._arguments = None if given is None else (given, first, counts)
        self._give_arguments()

    def _give_arguments(self) -> None:
        if self._arguments is not None:
            self.env = with_reset_kwargs(self.env, *self._arguments)

    @override
    def rebuild(self) -> None:
        fresh = self._made_again(ForeignEnv, self.close)
        self.env, self.is_closed = fresh.env, False
        self._give_arguments()
        self._rebuilds += 1
        if self._seed is not None:
            seed, static = self._seed
            self.env.set_seed(rebuilt_seed(seed, self._rebuilds), static_seed=static)

    # --- steps

    @override
    def _reset(self, mask: Tensor | None, **kwargs: Any) -> TensorDict:
        part = None
        if mask is not None and not mask.all():
            before = self.fake_tensordict() if self._root is None else self._root.copy()
            part = before.set(RESET_MASK, mask.unsqueeze(-1))
        root: TensorDict = self.env.reset(part, **kwargs)
        self._root = root
        return root.copy()

    @override
    def _as_given(self, action: Any) -> Any:
        return action

    @override
    def _after(self, actions: list[Any]) -> TensorDict:
        root = self._root
        taken: Any = TensorDict({}, self.batch_size) if root is None else root.copy()
        for key, action in zip(self.action_keys, actions, strict=True):
            taken.set(key, action)
        following: TensorDict = self.env.step(taken).get("next")
        self._root = following.exclude(*self.reward_keys)
        return following

    @override
    def _close(self) -> None:
        self.env.close(raise_if_closed=False)

    # --- the state

    @property
    @override
    def state_methods(self) -> list[str]:
        state = state_of(self.env)
        return super().state_methods if state is None else state.state_methods

    @override
    def capture(self) -> dict[str, Any]:
        state = state_of(self.env)
        if state is None:
            return super().capture()
        root = None if self._root is None else to_plain(self._root.clone())
        seed = None if self._seed is None else list(self._seed)
        return {"env": state.capture(), "root": root, "seed": seed, "rebuilds": self._rebuilds}

    @override
    def check_state(self, state: Mapping[str, Any]) -> None:
        state = _with_root(state)
        with env_errors():
            FOREIGN(state, "state", {})
        state_of(self.env).check_state(state["env"])

    @override
    def restore(self, state: Mapping[str, Any], trust: bool = False) -> None:
        state = _with_root(state)
        state_of(self.env).restore(state["env"], trust)
        root = None if state["root"] is None else from_plain(state["root"])
        self._root = root if root is None or self.device is None else root.to(self.device)
        seed = state["seed"]
        self._seed = None if seed is None else (int(seed[0]), bool(seed[1]))
        self._rebuilds = state["rebuilds"]

    def __repr__(self) -> str:
        return repr(self.env)


def _with_root(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a state in its present form; it was that of the other library alone at first."""
    if "env" in state:
        return state
    return {"env": state, "root": None, "seed": None, "rebuilds": 0}


def as_member(env: Any, remake: Callable[[], Any] | None = None) -> TensorDictEnv:
    """Returns an environment with TorchRL's protocol as one of Trawl's, for a batch.

    Args:
        env: the environment, which may be Trawl's own.
        remake: see :class:`ForeignEnv`.

    Raises:
        ValueError: if no flag is for the environment as a whole.
    """
    return env if isinstance(env, TensorDictEnv) else ForeignEnv(env, remake)


def has_tensors_only(env: TensorDictEnv) -> bool:
    """Returns True if all data are tensors of fixed shapes and dtypes, which arrays can hold."""
    single = torch.Size([*env.batch_size, 1])
    flags = {as_key(key): leaf for key, leaf in env.full_done_spec.items(True, True)}
    # What transforms read again in the next step is among the observations.
    read, shown = (
        set(spec.keys(True, True)) for spec in (env.full_state_spec, env.full_observation_spec)
    )
    specs = env.full_observation_spec, env.full_action_spec, env.full_reward_spec
    leaves = [*flags.values(), *(leaf for spec in specs for leaf in spec.values(True, True))]
    return (
        read <= shown
        and all(len(key) > 1 or key[0] in DONE_KEYS for key in flags)
        and all(len(key) > 1 or leaf.shape == single for key, leaf in flags.items())
        and all(is_fixed(leaf) and leaf.dtype is not torch.bfloat16 for leaf in leaves)
    )


def is_torchrl(env: Any) -> bool:
    """Returns True for an environment of TorchRL."""
    base = getattr(sys.modules.get("torchrl.envs"), "EnvBase", None)
    return base is not None and isinstance(env, base)


def state_of(env: Any) -> Any:
    """Returns what captures the state of another library's environment; None if nothing does.

    It has ``state_methods``, ``capture``, ``check_state`` and ``restore``.
    """
    if is_torchrl(env):
        from trawl.envs.capture.torchrl import TorchRLState

        return TorchRLState(env)
    # Looked up in the class, because wrappers of other libraries pass on names they do not know.
    return env if hasattr(type(env), "capture") else None
