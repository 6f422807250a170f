"""Service that runs an environment in its own process.

Infrequent requests come as messages. A step is requested with one byte in a pipe, and its actions
and results are in shared memory. A step therefore costs the process one read and one write.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from trawl.backends.base import Port, Service
from trawl.backends.failure import Failure
from trawl.backends.ipc import Closed
from trawl.envs.base import TensorDictEnv
from trawl.envs.gym import GymEnv
from trawl.envs.masks import MASK_KEY
from trawl.envs.outcomes import RESET_GIVES, flag_of, reward_of
from trawl.envs.own_process import prepare_process
from trawl.envs.serial import build_env
from trawl.envs.spaces import SpaceCodec
from trawl.envs.step_buffers import (
    AUTORESET,
    RESET,
    TERMINATED,
    TRUNCATED,
    SharedStepBuffers,
    StepBufferSpec,
)
from trawl.errors import add_note, resetting
from trawl.keys import Key, as_key
from trawl.memory import Array

STEP, MESSAGE = b"s", b"m"
BUFFERS = 1


class WakeupHandles:
    """File descriptors with which a process and its owner wake each other.

    Args:
        steps: pipe from which the process reads a byte when there is work.
        answers: eventfd to which the process writes when it has finished a step.
    """

    def __init__(self, steps: int, answers: int) -> None:
        self.steps = steps
        self.answers = answers

    def __reduce__(self) -> Any:
        """Passes the descriptors to the process that is being started."""
        return _wakeups, (DupFd(self.steps), DupFd(self.answers))


def _wakeups(steps: Any, answers: Any) -> WakeupHandles:
    return WakeupHandles(steps.detach(), answers.detach())


@dataclass(frozen=True, repr=False)
class EnvInfo:
    """Description of an environment, which its process sends once the environment is made.

    Attributes:
        fixed_layout: True if the environment's data has a fixed layout, so that its steps can use
            shared memory.
        cannot_restart: names of the vector environments that can't restart on demand.
        autoresets: True if some of the environment's steps are only resets.
        fake: a frame of zeros, or None if ``fixed_layout`` is True.
    """

    name: str
    text: str
    batch_size: torch.Size
    full_observation_spec: Any
    full_action_spec: Any
    action_spec_unbatched: Any
    fixed_layout: bool
    cannot_restart: tuple[str, ...]
    autoresets: bool
    fake: TensorDictBase | None

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class EnvCall:
    """Request to call a method; each request gets one answer.

    Attributes:
        number: number of the call.
        env: number of the environment whose method is called; None for a method of the service.
        name: name of the method.
        args: its arguments.
    """

    number: int
    env: int | None
    name: str
    args: Sequence[Any]


@dataclass(frozen=True)
class CallResult:
    """Result of call ``number``."""

    number: int
    value: Any


@dataclass(frozen=True)
class CallFailed:
    """Failure of call ``number``; if ``number`` is negative, failure of step ``-number``.

    Attributes:
        number: number of the call or of the step.
        env: number of the environment that failed; None if the failure is not that of one.
        failure: the failure.
    """

    number: int
    env: int | None
    failure: Failure


@dataclass(frozen=True)
class EnvServiceFactory:
    """Factory of the service in a process, sent to the process.

    Attributes:
        index: number of the process.
        first: number of the process's first environment.
        sources: for each environment of the process, its source and the source's keyword
            arguments.
        wakeups: descriptors with which the process and its owner wake each other.
        registry: environments that the owner has registered with Gymnasium. The process registers
            them too.
    """

    index: int
    first: int
    sources: Sequence[tuple[Any, Mapping[str, Any]]]
    wakeups: WakeupHandles
    registry: Mapping[str, Any]

    def __call__(self, port: Port) -> EnvService:
        """Makes the service and its environments; called in the new process."""
        return EnvService(self, port)


class EnvService(Service):
    """Service that runs in a process with environments.

    Calls name an environment by its number among all environments.

    Args:
        factory: sources of the environments, and settings of the process.
        port: connection to the process's owner.
    """

    def __init__(self, factory: EnvServiceFactory, port: Port) -> None:
        self._port = port
        self._index = factory.index
        self._wakeups = factory.wakeups
        self._members: dict[int, EnvMember] = {}
        self._buffers: SharedStepBuffers | None = None
        # The process runs only environments, so it needs one torch thread. It draws its own
        # random numbers.
        prepare_process(1, factory.registry)
        try:
            for index, (source, kwargs) in enumerate(factory.sources, factory.first):
                self._members[index] = EnvMember(index, build_env(source, kwargs))
        except BaseException as error:
            add_note(error, f"while making environment {factory.first + len(self._members)}")
            self.close()
            raise
        port.send(tuple(_info_of(member.env) for member in self._members.values()))

    @property
    @override
    def busy(self) -> bool:
        # The service's work includes waiting for a wake-up.
        return self._buffers is not None

    @override
    def handle(self, content: EnvCall) -> None:
        target: Any = self if content.env is None else self._members[content.env]
        try:
            value = getattr(target, content.name)(*content.args)
        except Exception as error:
            self._port.send(CallFailed(content.number, content.env, Failure.of(error)))
        else:
            self._port.send(CallResult(content.number, value))

    @override
    def work(self) -> None:
        """Takes steps until a message arrives."""
        assert self._buffers is not None
        steps, answers = self._wakeups.steps, self._wakeups.answers
        index, buffers = self._index, self._buffers
        numbers, answered, eager = buffers.numbers, buffers.answers, buffers.eager
        read, wake = os.read, os.eventfd_write
        # A reset can change a member's step function, but comes as a message, which ends the loop.
        members = [(member, member.step_buffers) for member in self._members.values()]
        while True:
            wakeup = read(steps, 1)
            if wakeup != STEP:
                if not wakeup:
                    raise Closed
                return
            number = numbers[index]
            if answered[index] in (number, -number):
                # The process was woken twice for this step.
                continue
            answer = number
            for member, step in members:
                try:
                    step(bool(eager[0]))
                except Exception as error:
                    self._port.send(CallFailed(-number, member.index, Failure.of(error)))
                    answer = -number
            answered[index] = answer
            wake(answers, 1)

    @override
    def close(self) -> None:
        with ExitStack() as stack:
            for member in self._members.values():
                stack.callback(member.close)

    # --- calls

    def attach(self, spec: StepBufferSpec) -> None:
        """Sets up the shared memory that steps use from now on."""
        self._buffers = SharedStepBuffers(spec, self._port.memory(BUFFERS))
        self._attach_members(self._buffers)

    def _attach_members(self, buffers: SharedStepBuffers) -> None:
        for member in self._members.values():
            member.attach(buffers)

    def retype(self, dtypes: Mapping[Key, str]) -> None:
        """Changes the dtypes of the actions."""
        assert self._buffers is not None
        self._buffers.set_action_dtypes({key: np.dtype(name) for key, name in dtypes.items()})
        self._attach_members(self._buffers)


class EnvMember:
    """An environment in a process.

    Args:
        index: number of the environment.
        env: the environment.

    Attributes:
        step_buffers: function that takes a step with the actions in the shared memory. Its
            argument is True to also reset rows whose episode ends.
    """

    step_buffers: Callable[[bool], None]

    def __init__(self, index: int, env: Any) -> None:
        self.index = index
        self.env = env
        self._buffers: SharedStepBuffers | None = None

    def close(self) -> None:
        """Closes the environment."""
        if not getattr(self.env, "is_closed", False):
            self.env.close(raise_if_closed=False)

    def attach(self, buffers: SharedStepBuffers) -> None:
        """Prepares steps that use the shared memory."""
        self._buffers = buffers
        single = type(self.env) is GymEnv and self.env.vector is None
        bind = _single if single else _nested
        self.step_buffers = bind(self.env, buffers, buffers.rows(self.index))

    def seed(self, seed: int, static_seed: bool) -> Any:
        """Seeds the next reset, and returns the seed for the next environment."""
        return self.env.set_seed(seed, static_seed)

    def begin(self, mask: Array | None, kwargs: Mapping[str, Any]) -> None:
        """Resets environments, and writes their observations to the shared memory.

        Args:
            mask: mask of the rows to reset; None for all rows.
            kwargs: arguments of the environment's ``reset``.
        """
        buffers = self._buffers
        assert buffers is not None
        fresh, masks = self.reset(mask, kwargs)
        rows = buffers.rows(self.index)
        for key, target in buffers.reset_observed.items():
            target[rows] = _numbers(fresh.get(key)).reshape(target[rows].shape)
        if (masks is not None) != buffers.masked[rows].all():
            buffers.masks[rows], buffers.masked[rows] = 2, masks is not None
            self.attach(buffers)
        if masks is not None:
            _show_masks(masks, buffers, rows)

    def reset(
        self, mask: Array | None, kwargs: Mapping[str, Any]
    ) -> tuple[TensorDictBase, Array | None]:
        """Resets all environments, or those in ``mask``.

        Returns:
            The TensorDict that the reset returned, and the action masks from ``info``.
        """
        part = None
        if mask is not None and not mask.all():
            flags = torch.from_numpy(mask).reshape(*self.env.batch_size, 1)
            part = self.env.fake_tensordict().set("_reset", flags)
        with resetting(self.env):
            return self.env.reset(part, **kwargs), self._masks()

    def step(
        self, tensordict: TensorDictBase
    ) -> tuple[TensorDictBase, Tensor | None, Array | None]:
        """Takes a step.

        Returns:
            The results of the step, a mask of the rows in which the step was only a reset, and the
            action masks from ``info``.
        """
        following = self.env.step(tensordict).get("next")
        autoresets = self.env.autoreset_mask() if isinstance(self.env, TensorDictEnv) else None
        return following, autoresets, self._masks()

    def _masks(self) -> Array | None:
        return self.env.action_mask() if isinstance(self.env, TensorDictEnv) else None


def _info_of(env: Any) -> EnvInfo:
    own = isinstance(env, TensorDictEnv)
    fixed = bool(getattr(env, "fixed_layout", False))
    cannot = [v for v in env.vectors if not v.can_restart] if own else []
    return EnvInfo(
        name=getattr(env, "name", repr(env)),
        text=repr(env),
        batch_size=torch.Size(env.batch_size),
        full_observation_spec=env.full_observation_spec,
        full_action_spec=env.full_action_spec,
        action_spec_unbatched=env.action_spec_unbatched,
        fixed_layout=fixed,
        cannot_restart=tuple(type(vector.env).__name__ for vector in cannot),
        autoresets=own and env.autoreset_mask() is not None,
        fake=None if fixed else env.fake_tensordict(),
    )


# --- steps in shared memory


def _show_masks(masks: Array, buffers: SharedStepBuffers, rows: slice) -> None:
    """Writes the action masks of a process's environments to shared memory."""
    target = buffers.masks[rows]
    if masks.shape != target.shape:
        raise ValueError(
            f"the environment returned info[{MASK_KEY!r}] with {masks.shape[-1]} entries, but "
            f"its action has {target.shape[-1]} choices: a mask needs an entry for each choice"
        )
    target[...] = (masks != 0).astype(np.int8) + (masks == 2)


def _single(env: GymEnv, buffers: SharedStepBuffers, rows: slice) -> Callable[[bool], None]:
    """Returns the function that steps a single Gymnasium environment."""
    gym_step = env.env.step
    row = rows.start
    write_observed, write_begun = (
        _observation_writer(env.observation_codec, [arrays[key][row, ...] for key in arrays])
        for arrays in (buffers.observed, buffers.reset_observed)
    )
    read_action = _action_reader(env.action_codec, buffers, row)
    # Unlike an array, a memoryview accepts only numbers.
    rewards: Any = buffers.rewards[rows].data
    flags, cut = buffers.flags[rows].data, buffers.cut[rows]
    show_masks = _mask_writer(env, buffers, rows)

    def begin() -> None:
        seeds = env.pop_seeds()
        with resetting(env, f"; {RESET_GIVES}"):
            obs, _ = env.env.reset() if seeds is None else env.env.reset(seed=seeds[0])
            write_begun(obs)

    def step(eager: bool) -> None:
        obs, reward, terminated, truncated, _ = gym_step(read_action())
        try:
            rewards[0] = reward
        except TypeError:
            rewards[0] = reward_of(reward, env)
        write_observed(obs)
        bits = 0
        if terminated is not False and flag_of(terminated, "terminated", env):
            bits = TERMINATED
        if truncated is not False and flag_of(truncated, "truncated", env):
            bits |= TRUNCATED
        if eager and (bits or cut[0]):
            begin()
            bits |= RESET
        flags[0] = bits
        if show_masks is not None:
            show_masks()

    return step


def _mask_writer(
    env: TensorDictEnv, buffers: SharedStepBuffers, rows: slice
) -> Callable[[], None] | None:
    """Returns a function that writes the environment's action masks; None if it has none."""
    if not buffers.masked[rows].all():
        return None

    def write() -> None:
        masks = env.action_mask()
        assert masks is not None
        _show_masks(masks, buffers, rows)

    return write


def _observation_writer(codec: SpaceCodec, targets: list[Array]) -> Callable[[Any], None]:
    """Returns a function that writes observations, and rejects those of the wrong shape."""
    places = list(zip(codec.leaves, targets, strict=True))
    encode = codec.encode

    def write(obs: Any) -> None:
        for (leaf, target), value in zip(places, encode(obs), strict=True):
            array = np.asarray(value)
            leaf.check(array)
            target[...] = array

    if not codec.plain or codec.leaves[0].path:
        return write
    (only,) = targets
    shape, dtype = only.shape, only.dtype

    def write_array(obs: Any) -> None:
        if obs.__class__ is np.ndarray and obs.shape == shape and obs.dtype == dtype:
            only[...] = obs
        else:
            write(obs)

    return write_array


def _action_reader(codec: SpaceCodec, buffers: SharedStepBuffers, row: int) -> Callable[[], Any]:
    """Returns a function that reads the action in the form that the environment expects."""
    arrays = buffers.actions
    parts = [arrays[as_key(leaf.key)][row, ...] for leaf in codec.leaves]
    decode = codec.decode
    if codec.plain and not codec.leaves[0].path:
        (only,) = parts
        dtype = codec.leaves[0].space.dtype
        # A copy: the environment may keep its action.
        return only.copy if only.dtype == dtype else lambda: only.astype(dtype)
    return lambda: decode(parts)


def _nested(env: TensorDictEnv, buffers: SharedStepBuffers, rows: slice) -> Callable[[bool], None]:
    """Returns the function that steps an environment that is itself a batch."""
    actions = {key: array[rows] for key, array in buffers.actions.items()}
    rewards, flags, cut = buffers.rewards[rows], buffers.flags[rows], buffers.cut[rows]
    observed = {key: array[rows] for key, array in buffers.observed.items()}
    begun = {key: array[rows] for key, array in buffers.reset_observed.items()}
    batch = env.batch_size
    show_masks = _mask_writer(env, buffers, rows)

    def write(arrays: dict[Key, Array], tensordict: TensorDictBase, mask: Any = ...) -> None:
        for key, array in arrays.items():
            array[mask] = _numbers(tensordict.get(key)).reshape(array.shape)[mask]

    def step(eager: bool) -> None:
        tensordict = TensorDict({}, batch, device=env.device)
        for key, array in actions.items():
            value = torch.from_numpy(array.copy()).reshape(*batch, *array.shape[1:])
            tensordict.set(key, value)
        following = env.step(tensordict).get("next")
        write(observed, following)
        rewards[:] = _numbers(following.get("reward")).ravel()
        terminated, truncated = (
            _numbers(following.get(key)).ravel() for key in ("terminated", "truncated")
        )
        bits = terminated * TERMINATED | truncated * TRUNCATED
        autoresets = env.autoreset_mask()
        if autoresets is not None:
            bits |= _numbers(autoresets).ravel() * AUTORESET
        ended = terminated | truncated | cut
        if eager and ended.any():
            mask = torch.from_numpy(ended).reshape(*batch, 1)
            write(begun, env.reset(following.exclude("reward").set("_reset", mask)), ended)
            bits |= ended * RESET
        flags[:] = bits
        if show_masks is not None:
            show_masks()

    return step


def _numbers(tensor: Tensor) -> Array:
    array: Array = tensor.detach().cpu().numpy()
    return array
