"""Environments with the TensorDict interface: ``reset``, ``step``, ``rollout`` and specs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from trawl.devices import check_device
from trawl.envs.entries.masks import rand_actions
from trawl.envs.specs import Categorical, Composite, Spec, Unbounded
from trawl.errors import EnvStateError
from trawl.keys import DONE_KEYS, RESET_MASK, as_key, show_key
from trawl.supported import RESET_ARGUMENTS_NONE, Trait


class TensorDictEnv(ABC):
    """Base class of Trawl's own environments, such as :class:`~trawl.envs.GymEnv`.

    A subclass sets the attributes below and implements the abstract methods.

    Attributes:
        batch_size: shape of the batch of environments that are stepped together; ``()`` for a
            single environment.
        device: device of the returned TensorDicts. With None, the TensorDicts have no device, and
            their tensors are on the CPU.
        is_closed: True once :meth:`close` has been called.
        has_processes: True if the environment runs in separate processes.
        fixed_layout: True if all data are arrays of a fixed shape and dtype.
        on_error: None, or a function that is called when a step or a reset fails. The function gets
            the exception, a bool that is True if a reset failed, and the number of the member that
            failed. It must call :meth:`restart`, or raise an exception. If it returns, the failed
            step returns zeros.
        failed: numbers of the members whose last step failed while ``on_error`` was set; its
            results are not experience.
        remake: function that makes another environment like this one; None if it was passed as an
            object, or can't be made anew.
        num_members: number of members that are rebuilt individually. Only environments in other
            processes have more than one.
    """

    batch_size: torch.Size
    device: torch.device | None
    is_closed: bool = False
    has_processes: bool = False
    fixed_layout: Any = False
    on_error: Callable[[Exception, bool, int], None] | None = None
    failed: Collection[int] = ()
    remake: Callable[[], Any] | None = None
    num_members: int = 1
    # What the reset after a failure returned.
    _restarted: TensorDict | None = None
    full_observation_spec: Composite
    full_action_spec: Composite
    # Specs of the rewards and flags; None if there is one reward, or one set of flags.
    _reward_spec: Composite | None = None
    _done_spec: Composite | None = None

    # --- implemented by subclasses

    @abstractmethod
    def _reset(self, mask: Tensor | None, **kwargs: Any) -> TensorDict:
        """Resets all environments, or those in ``mask``, and returns the observations."""

    def _after(self, actions: list[Any]) -> TensorDict:
        """Takes a step with the actions; implemented by all classes that don't have members."""
        raise NotImplementedError

    @abstractmethod
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds the next reset, and returns a seed to use for the next environment."""

    @abstractmethod
    def _close(self) -> None:
        """Closes the environment; called only while it is open."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name of the environment, such as its Gymnasium id."""

    @property
    def unwrapped(self) -> Any:
        """The simulator without its wrappers; this object itself if it is a batch of others."""
        inner = getattr(self, "env", self)
        return inner if inner is self else getattr(inner, "unwrapped", inner)

    @property
    def cannot_restart(self) -> list[str]:
        """Names of the vector environments that can't restart only some of their environments."""
        return []

    @property
    def traits(self) -> frozenset[Trait]:
        """Traits with which some options can't be combined."""
        return frozenset([Trait.ALL_AT_ONCE] if self.cannot_restart else [])

    @property
    def parts(self) -> list[Any]:
        """Parts that are rebuilt individually after a failure, in the order of their rows."""
        return [self]

    def autoreset_mask(self) -> Tensor | None:
        """Returns a mask of the environments whose last step was only a reset.

        The results of a reset are not experience. Returns None if no step of the environment is
        only a reset.
        """
        return None

    def action_mask(self) -> NDArray[Any] | None:
        """Returns the action mask from ``info``, with one row per environment.

        Returns None if ``info`` has no mask. A mask in the observation is not included.
        """
        return None

    def newest_mask(self) -> Tensor | None:
        """Returns :meth:`action_mask` as a tensor, on the device of the environment's data."""
        mask = self.action_mask()
        return None if mask is None else torch.from_numpy(mask)

    # --- specs

    @property
    def observation_spec(self) -> Composite:
        """Specs of the observations, by key."""
        return self.full_observation_spec

    @property
    def action_spec(self) -> Spec | Composite:
        """Spec of the action; if there are several actions, their specs by key."""
        keys = self.action_keys
        return self.full_action_spec[keys[0]] if len(keys) == 1 else self.full_action_spec

    @property
    def action_keys(self) -> list[Any]:
        """Keys of the actions."""
        return list(self.full_action_spec.keys(True, True))

    @property
    def action_key(self) -> Any:
        """Key of the first action, which is usually the only one."""
        return self.action_keys[0]

    @property
    def action_spec_unbatched(self) -> Any:
        """Action spec of a single environment in the batch."""
        return self.action_spec

    @property
    def full_reward_spec(self) -> Composite:
        """Spec of the reward."""
        if self._reward_spec is not None:
            return self._reward_spec.to(self.device or "cpu")
        shape = (*self.batch_size, 1)
        return Composite({"reward": Unbounded(shape, device=self.device)}, self.batch_size)

    @property
    def reward_spec(self) -> Any:
        """Spec of the reward: float32, of shape ``(*batch_size, 1)``.

        If agents have rewards of their own, the specs of the rewards by key.
        """
        keys = self.reward_keys
        return self.full_reward_spec[keys[0]] if len(keys) == 1 else self.full_reward_spec

    @property
    def full_done_spec(self) -> Composite:
        """Specs of ``done``, ``terminated`` and ``truncated``."""
        if self._done_spec is not None:
            return self._done_spec.to(self.device or "cpu")
        shape = (*self.batch_size, 1)
        specs: dict[str, Spec | Composite] = {
            key: Categorical(2, shape, torch.bool, self.device) for key in DONE_KEYS
        }
        return Composite(specs, self.batch_size)

    @property
    def done_spec(self) -> Spec:
        """Spec of ``done``: bool, of shape ``(*batch_size, 1)``."""
        spec: Spec = self.full_done_spec["done"]
        return spec

    @property
    def full_state_spec(self) -> Composite:
        """Specs of inputs other than actions; always empty."""
        return Composite(shape=self.batch_size)

    @property
    def input_spec(self) -> Composite:
        """Specs of the environment's inputs."""
        specs: dict[str, Spec | Composite] = {
            "full_action_spec": self.full_action_spec,
            "full_state_spec": self.full_state_spec,
        }
        return Composite(specs, self.batch_size)

    @property
    def output_spec(self) -> Composite:
        """Specs of the environment's outputs."""
        specs: dict[str, Spec | Composite] = {
            "full_observation_spec": self.full_observation_spec,
            "full_reward_spec": self.full_reward_spec,
            "full_done_spec": self.full_done_spec,
        }
        return Composite(specs, self.batch_size)

    @property
    def done_keys(self) -> list[str]:
        """Keys of the flags that mark the end of an episode."""
        flags = self.full_done_spec.keys()
        return [key for key in DONE_KEYS if key in flags]

    @property
    def done_keys_groups(self) -> list[list[str]]:
        """Done keys, with one group for each of :attr:`reset_keys`; there is only one group."""
        return [self.done_keys]

    @property
    def reset_keys(self) -> list[str]:
        """Keys of the masks for a partial reset."""
        return [RESET_MASK]

    @property
    def reward_keys(self) -> list[Any]:
        """Keys of the rewards."""
        return list(self.full_reward_spec.keys(True, True))

    def fake_tensordict(self) -> TensorDict:
        """Returns a frame of zeros with the layout of a real frame."""
        observation = self.full_observation_spec.zero()
        done = self.full_done_spec.zero()
        following = observation.clone().update(done).update(self.full_reward_spec.zero())
        frame = observation.update(done).update(self.full_action_spec.zero())
        return self._placed(frame.set("next", following))

    # --- arguments of resets, for collectors

    def set_reset_kwargs(self, given: Any, first: int, counts: Any) -> None:
        """Sets arguments that all later resets get; see :mod:`trawl.envs.reset_kwargs`.

        Args:
            given: the option ``reset_kwargs``; None for no arguments.
            first: index of the first environment in this object.
            counts: number of the next episode of each environment, an int64 array. The resets
                change it.

        Raises:
            TypeError: if the environment's reset doesn't take an argument.
            ValueError: if the reset takes no arguments, or the environment begins its episodes
                itself.
        """
        if given is not None:
            raise RESET_ARGUMENTS_NONE.error(against=repr(self))

    def episode_counts(self, counts: Any) -> Any:
        """Returns the number of the next episode of each environment.

        Args:
            counts: the array that :meth:`set_reset_kwargs` got. Environments in other processes
                don't change it.
        """
        return counts

    def load_episode_counts(self, counts: Any) -> None:  # noqa: B027
        """Sets the number of the next episode of each environment in other processes."""

    # --- failures, of environments that can be rebuilt

    def rebuild(self) -> None:
        """Closes the environment, ignoring errors, and makes a new one in the same way."""
        raise NotImplementedError

    def _made_again(self, kind: type[Any], close: Callable[[], object]) -> Any:
        """Closes the environment, ignoring errors, and returns one that is made in the same way.

        Args:
            kind: class that the new environment must have.
            close: function that closes the environment.

        Raises:
            RuntimeError: if the environment was passed as an object.
            ValueError: if the new environment has other specs, or is the same object as before.
        """
        if self.remake is None:
            raise RuntimeError(
                f"{self!r} was passed as an existing environment, so it can't be made again"
            )
        if not self.is_closed:
            with suppress(Exception):
                close()
        fresh = self.remake()
        if not isinstance(fresh, kind):
            raise ValueError(
                f"{self!r} was to be made again, but the function that made it returned {fresh!r}"
            )
        if fresh.unwrapped is self.unwrapped:
            raise ValueError(
                f"the function that made {self!r} returned the same object again: it must make a "
                "new one each time"
            )
        place = self.device or "cpu"
        for what in ("batch_size", "full_observation_spec", "full_action_spec"):
            mine, other = getattr(self, what), getattr(fresh, what)
            if what != "batch_size":
                mine, other = mine.to(place), other.to(place)
            if mine != other:
                fresh.close(raise_if_closed=False)
                raise ValueError(
                    f"{self!r} was made again with {what} {other}, but before it had {mine}"
                )
        return fresh

    def restart(self, member: int = 0) -> None:
        """Rebuilds a member after a failure, and resets it."""
        self.rebuild()
        self._restarted = self._reset(None)

    def _guarded_reset(self, mask: Tensor | None, **kwargs: Any) -> TensorDict:
        if self._restarted is None:
            try:
                return self._reset(mask, **kwargs)
            except Exception as error:
                if self.on_error is None:
                    raise
                self.on_error(error, True, 0)
                # All episodes of a batch are lost, not only those that were to be reset.
                if mask is not None and not mask.all():
                    self.failed = {0}
                    return self._nothing().select(*self.full_observation_spec.keys(True, True))
        begun, self._restarted = self._restarted, None
        assert begun is not None
        return begun

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        """Takes a step and returns observations, reward and flags."""
        keys = self.action_keys
        actions = [self._as_given(self.action_in(tensordict, key)) for key in keys]
        self.failed = ()
        if self.on_error is None:
            return self._after(actions)
        try:
            return self._after(actions)
        except Exception as error:
            self.on_error(error, False, 0)
            self.failed = {0}
            return self._nothing()

    def _as_given(self, action: Any) -> Any:
        """Returns an entry of an action in the form that :meth:`_after` takes."""
        return action_array(action) if isinstance(action, Tensor) else action.data

    def _nothing(self) -> TensorDict:
        """Returns the zeros that a failed step returns instead of results."""
        nothing: TensorDict = self.fake_tensordict().get("next")
        return nothing

    # --- stepping

    def reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        """Begins an episode.

        Args:
            tensordict: if it has an entry ``"_reset"``, a bool mask of shape ``(*batch_size, 1)``,
                only the environments where the mask is True are reset. The other rows of
                ``tensordict`` are returned unchanged.
            **kwargs: ``seed`` and ``options``, with the same meaning as in
                ``gymnasium.Env.reset``.

        Returns:
            A TensorDict of observations and done flags, of batch size ``batch_size``.
        """
        mask = None if tensordict is None else tensordict.get(RESET_MASK, None)
        if tensordict is not None and mask is not None:
            mask = mask.reshape(self.batch_size)
            if not mask.any():
                return tensordict.exclude(RESET_MASK)
        fresh = self._guarded_reset(mask, **kwargs)
        for key, flag in self.full_done_spec.zero().items(True, True):
            # Agents that are absent in the first step are done.
            if key not in fresh.keys(True, True):
                fresh.set(key, flag)
        fresh = self._placed(fresh)
        if mask is None or tensordict is None or mask.all():
            return fresh
        kept = tensordict.select(*fresh.keys(True, True, is_leaf=is_leaf_nontensor))
        # Text of rows whose TensorDicts name different devices, or none, can't be stacked.
        kept = kept.copy().clear_device_() if fresh.device is None else kept.to(fresh.device)
        return torch.where(mask.to(fresh.device or "cpu"), fresh, kept)

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Takes a step with the actions in ``tensordict``.

        Returns:
            ``tensordict``, with the results under ``"next"``: the observations, ``reward``
            (float32), ``done``, ``terminated`` and ``truncated``. The reward and the flags have
            shape ``(*batch_size, 1)``.

        Raises:
            KeyError: if an action is missing.
        """
        following = self._placed(self._step(tensordict))
        preset = tensordict.get("next", None)
        tensordict.set("next", following if preset is None else preset.update(following))
        return tensordict

    def action_in(self, tensordict: TensorDictBase, key: Any) -> Any:
        """Returns an action, as the TensorDict has it.

        Raises:
            KeyError: if it is missing.
        """
        value = tensordict.get(key, None)
        if value is None:
            present = ", ".join(sorted(map(str, tensordict.keys())))
            raise KeyError(
                f"no action {show_key(as_key(key))} in the TensorDict, which has {present}"
            )
        return value

    def step_and_maybe_reset(
        self, tensordict: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        """Takes a step, and resets the environments whose episodes ended.

        Returns:
            The result of :meth:`step`, and the TensorDict for the next step.
        """
        tensordict = self.step(tensordict)
        root = tensordict.get("next").exclude(*self.reward_keys)
        if root.get("done").any():
            self._restart(root)
        return tensordict, root

    def _restart(self, root: TensorDictBase) -> None:
        """Resets the environments that are done, and writes their observations to ``root``."""
        # A shallow copy: the mask must not appear in the next frame.
        fresh = self.reset(root.copy().set(RESET_MASK, root.get("done")))
        for key in fresh.keys():  # noqa: SIM118 - iterating a TensorDict gives its rows
            root.set(key, fresh.get(key))

    def rollout(
        self,
        max_steps: int,
        policy: Callable[[TensorDictBase], TensorDictBase] | None = None,
        *,
        break_when_any_done: bool = True,
        tensordict: TensorDictBase | None = None,
    ) -> TensorDictBase:
        """Steps the environment with a policy, without a collector.

        Args:
            max_steps: maximum number of steps.
            policy: function from TensorDict to TensorDict; None for random actions.
            break_when_any_done: True to stop when the first episode ends. If False, environments
                are reset at the end of an episode, and the rollout continues.
            tensordict: TensorDict to start from; if None, the environment is reset.

        Returns:
            The frames, of batch size ``(*batch_size, steps)``; the last dimension is named
            ``"time"``.
        """
        policy = self.rand_action if policy is None else policy
        root = self.reset() if tensordict is None else tensordict
        frames = []
        for _ in range(max_steps):
            frame, root = self.step_and_maybe_reset(policy(root))
            frames.append(frame)
            if break_when_any_done and frame.get(("next", "done")).any():
                break
        result: TensorDictBase = TensorDict.maybe_dense_stack(frames, len(self.batch_size))
        result.refine_names(..., "time")
        return result

    def rand_action(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Writes random actions into ``tensordict``, or into a new TensorDict.

        If the environment provides an action mask, only allowed actions are drawn.
        """
        if tensordict is None:
            tensordict = TensorDict({}, self.batch_size, device=self.device)
        drawn = rand_actions(self.full_action_spec, tensordict, self.action_mask())
        return tensordict.update(drawn)

    def rand_step(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Takes a step with random actions."""
        return self.step(self.rand_action(tensordict))

    # --- the rest

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Closes the environment.

        Raises:
            RuntimeError: if it is already closed, unless ``raise_if_closed`` is False.
        """
        if self.is_closed:
            if raise_if_closed:
                raise RuntimeError(f"environment {self.name} is already closed")
            return
        self.is_closed = True
        self._close()

    def to(self, device: torch.device | str) -> TensorDictEnv:
        """Sets the device of all later outputs, and returns the environment.

        Raises:
            ValueError: if this machine does not have the device.
        """
        self.device = device = check_device("device", device)
        self.full_observation_spec = self.full_observation_spec.to(device)
        self.full_action_spec = self.full_action_spec.to(device)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Returns an empty dict, because the state of simulators can't be saved."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any], **kwargs: Any) -> None:
        """Accepts the empty state that :meth:`state_dict` returns.

        Raises:
            ValueError: if ``state_dict`` is not empty.
        """
        if state_dict:
            raise ValueError(
                f"this environment has no state to load, but state_dict has {sorted(state_dict)}"
            )

    # --- the state of simulators, for collectors

    @property
    def state_methods(self) -> list[str]:
        """Way in which :meth:`capture` captures the state of each environment.

        The first reset may change it. See :mod:`trawl.envs.capture`.
        """
        return ["none"] * max(1, self.batch_size.numel())

    def capture(self) -> dict[str, Any]:
        """Returns the state of the environment as plain data.

        Raises:
            EnvStateError: if it can't be captured.
        """
        raise EnvStateError(f"the state of {self!r} can't be captured")

    def check_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Checks that a state is one of an environment like this, before anything is changed.

        Raises:
            EnvStateError: if it is the state of another environment; the message says what differs.
        """

    def restore(self, state: Mapping[str, Any], trust: bool = False) -> None:
        """Continues from a state that :meth:`capture` returned.

        Args:
            state: the state.
            trust: True to open a pickle that another process made.

        Raises:
            EnvStateError: if it is the state of another environment, or can't be restored.
        """
        raise EnvStateError(f"the state of {self!r} can't be restored")

    def _placed(self, tensordict: TensorDict) -> TensorDict:
        return tensordict if self.device is None else tensordict.to(self.device)


def action_array(tensor: Tensor) -> NDArray[Any]:
    """Returns an action as an array, of float32 for bfloat16, which numpy doesn't have."""
    value = tensor.float() if tensor.dtype is torch.bfloat16 else tensor
    array: NDArray[Any] = value.numpy(force=True)
    return array
