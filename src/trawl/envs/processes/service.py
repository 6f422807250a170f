"""Service that runs the environments of a process.

Infrequent requests come as messages. A step of all environments is requested with one byte in a
pipe, and its actions and results are in shared memory. A step therefore costs the process one read
and one write.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from typing_extensions import override

from trawl.backends.base import Answer, Port, Service
from trawl.backends.failure import Failure
from trawl.backends.ipc import Closed
from trawl.envs.base import TensorDictEnv
from trawl.envs.batches.foreign import has_tensors_only
from trawl.envs.batches.serial import build_env
from trawl.envs.capture.pickling import signing_key, use_signing_key
from trawl.envs.env_member import EnvMember
from trawl.envs.generators import global_state, seed_generators, set_global_state
from trawl.envs.kinds import KINDS
from trawl.envs.processes.buffers import SharedStepBuffers, StepBufferSpec
from trawl.envs.processes.own_process import prepare_process
from trawl.envs.processes.spin import Spin
from trawl.envs.processes.wakeups import STEP, WakeupHandles
from trawl.errors import add_note
from trawl.keys import Key, as_key

BUFFERS = 1


@dataclass(frozen=True, repr=False)
class EnvInfo:
    """Description of an environment, which its process sends once the environment is made.

    Attributes:
        fixed_layout: True if the environment's data has a fixed layout, so that its steps can use
            shared memory.
        cannot_restart: names of the vector environments that can't restart on demand.
        autoresets: True if some of the environment's steps are only resets.
        carried: keys of observations that are also inputs of the environment's next step. A policy
            may write them under ``"next"``.
        full_reward_spec: specs of the rewards.
        full_done_spec: specs of the flags.
        fake: a frame of zeros, or None if ``fixed_layout`` is True.
        asks_others: True if kinds of environments of other packages were needed.
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
    carried: frozenset[Key]
    full_reward_spec: Any
    full_done_spec: Any
    fake: TensorDictBase | None
    asks_others: bool

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
class EnvAnswer(Answer):
    """Answer to an :class:`EnvCall`, or the failure of step ``-number``.

    Attributes:
        env: number of the environment that failed; None if the failure is not that of one.
    """

    env: int | None = None


@dataclass(frozen=True)
class EnvServiceFactory:
    """Factory of the service in a process, sent to the process.

    Attributes:
        index: number of the process.
        first: number of the process's first environment.
        sources: for each environment of the process, its source and the source's keyword
            arguments.
        wakeups: descriptors with which the process and its owner wake each other; None if they do
            so by messages.
        registry: environments that the owner has registered with Gymnasium. The process registers
            them too. None if the service runs in a thread of the owner.
        cores: CPU cores on which the process may run; None for all.
        spins: True to spin for a moment before each wait.
        seed: seed of the process's global generators while the environments are made, or None.
        signing_key: key with which the process signs pickles in the states of its environments.
    """

    index: int
    first: int
    sources: Sequence[tuple[Any, Mapping[str, Any]]]
    wakeups: WakeupHandles | None
    registry: Mapping[str, Any] | None
    cores: Sequence[int] | None = None
    spins: bool = False
    seed: int | None = None
    signing_key: bytes = field(default_factory=signing_key, repr=False)

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
        self._spin: Spin | None = None
        if factory.spins and self._wakeups is not None:
            poll = select.poll()
            poll.register(self._wakeups.steps, select.POLLIN)
            self._spin = Spin(poll.poll)
        self._members: dict[int, EnvMember] = {}
        self._buffers: SharedStepBuffers | None = None
        # Threads draw from the generators of their owner.
        self._draws_own = factory.registry is not None
        try:
            if factory.cores is not None:
                # Before the environments are made, so that their memory is near these cores.
                os.sched_setaffinity(0, factory.cores)
            if factory.registry is not None:
                # The process runs only environments, so it needs one torch thread. It draws its
                # own random numbers.
                prepare_process(1, factory.registry)
                use_signing_key(factory.signing_key)
                if factory.seed is not None:
                    seed_generators(factory.seed)
            for index, (source, kwargs) in enumerate(factory.sources, factory.first):
                self._members[index] = EnvMember(
                    index,
                    partial(build_env, source, kwargs),
                    leads=self._draws_own and index == factory.first,
                )
        except BaseException as error:
            add_note(error, f"while making environment {factory.first + len(self._members)}")
            self.close()
            raise
        port.send(tuple(_info_of(member.env) for member in self._members.values()))

    @property
    @override
    def busy(self) -> bool:
        # The service's work includes waiting for a wake-up.
        return self._buffers is not None and self._wakeups is not None

    @override
    def handle(self, content: EnvCall | bytes) -> None:
        if isinstance(content, bytes):
            if self._take_step()():
                self._port.send(STEP)
            return
        target: Any = self if content.env is None else self._members[content.env]
        try:
            value = getattr(target, content.name)(*content.args)
        except Exception as error:
            self._tell(content.number, content.env, error)
        else:
            self._port.send(EnvAnswer(content.number, value))

    def _tell(self, number: int, env: int | None, error: Exception) -> None:
        """Sends an error. Stopped while it reads source files, a thread would leave them open."""
        with self._port.undisturbed():
            self._port.send(EnvAnswer(number, failure=Failure.of(error), env=env))

    @override
    def work(self) -> None:
        """Takes steps until a message arrives."""
        assert self._wakeups is not None
        steps, answers = self._wakeups.steps, self._wakeups.answers
        read, wake, spin, step = os.read, os.eventfd_write, self._spin, self._take_step()
        while True:
            if spin is not None:
                spin()
            wakeup = read(steps, 1)
            if wakeup != STEP:
                if not wakeup:
                    raise Closed
                return
            if step():
                wake(answers, 1)

    def _take_step(self) -> Callable[[], bool]:
        """Returns a function that takes the next step; it returns False if it was taken before.

        A reset can change a member's step function, but comes as a message. Then this method must
        be called again.
        """
        assert self._buffers is not None
        index, buffers = self._index, self._buffers
        numbers, answered, eager = buffers.numbers, buffers.answers, buffers.eager
        members = [(member, member.step_buffers) for member in self._members.values()]

        def take() -> bool:
            number = numbers[index]
            if answered[index] in (number, -number):
                # The process was woken twice for this step.
                return False
            answer = number
            for member, step in members:
                try:
                    step(bool(eager[0]))
                except Exception as error:
                    self._tell(-number, member.index, error)
                    answer = -number
            answered[index] = answer
            return True

        return take

    @override
    def close(self) -> None:
        with ExitStack() as stack:
            if self._wakeups is not None:
                stack.callback(self._wakeups.close)
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

    def capture_generators(self) -> dict[str, Any] | None:
        """Returns the state of the process's global random generators; None in a thread."""
        return global_state() if self._draws_own else None

    def restore_generators(self, state: Mapping[str, Any] | None) -> None:
        """Continues from a state that :meth:`capture_generators` returned."""
        if state is not None:
            set_global_state(state)


def _info_of(env: TensorDictEnv) -> EnvInfo:
    fixed = bool(env.fixed_layout) or has_tensors_only(env)
    return EnvInfo(
        name=env.name,
        text=repr(env),
        batch_size=torch.Size(env.batch_size),
        full_observation_spec=env.full_observation_spec,
        full_action_spec=env.full_action_spec,
        action_spec_unbatched=env.action_spec_unbatched,
        fixed_layout=fixed,
        cannot_restart=tuple(env.cannot_restart),
        autoresets=env.autoreset_mask() is not None,
        carried=frozenset(map(as_key, env.full_state_spec.keys(True, True))),
        full_reward_spec=env.full_reward_spec,
        full_done_spec=env.full_done_spec,
        fake=None if fixed else env.fake_tensordict(),
        asks_others=KINDS.asks_others,
    )
