"""Steps the environments of a :class:`~trawl.envs.ParallelEnv` in their processes.

A step needs no message:

1. The owner writes the number of the step to the process's place in shared memory, and a byte to
   its pipe.
2. The process reads the byte, steps its environments, and writes the same number to its answer; if
   a step failed, it sends the error as a message and writes the negative number.
3. The process adds to an eventfd, which is the same for all processes, and on which the owner
   waits, together with messages and deaths.

If a process dies, the owner writes the negative number in its place. ``benchmarks/wakeups.py``
compares this protocol with others.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, TypeVar

from typing_extensions import override

from trawl.backends.base import Death, Event, Failed, Message
from trawl.envs.env_processes import EnvProcesses
from trawl.envs.env_service import BUFFERS, STEP, CallFailed
from trawl.errors import WorkerDied
from trawl.memory import Mask

# Seconds that a process may take for a restart, in addition to the limit for a step.
_STARTING = 60.0
T = TypeVar("T")
_BYTE_ORDER: Literal["little", "big"] = sys.byteorder


class EnvWorkers(EnvProcesses):
    """Processes that run environments, which step together or each at its own pace.

    Each step of a process has a number. When the process has taken the step, it writes the number
    to shared memory, and only this number counts as its answer. A wake-up merely ends the other
    side's wait, and may come more often than needed.

    Args:
        sources: for each environment, a pair of its source and the source's keyword arguments.
        envs_per_worker: number of environments in each process. The last process may have fewer.
        start_method: start method of the processes; None to run the environments in threads of
            this process instead.
        affinity: function that returns the CPU cores of a process, or None for all cores.
        timeout: seconds that a process may take for a step before it is killed; None for no limit.

    Attributes:
        tolerant: True to keep the failures of steps in ``failures``, instead of raising them.
        failures: errors of the environments that have failed and are to be restarted, by number.
    """

    def __init__(
        self,
        sources: Sequence[tuple[Any, Mapping[str, Any]]],
        envs_per_worker: int,
        start_method: str | None,
        affinity: Callable[[int], Sequence[int] | None] = lambda _: None,
        timeout: float | None = None,
    ) -> None:
        self.tolerant = False
        self.failures: dict[int, Exception] = {}
        self._timeout = timeout
        # Number of the last step, and the processes that may be stepping; for a group of
        # processes that step together, only the first one.
        self._step = 0
        self._pending: set[int] = set()
        # Time at which each process began its step, and why processes were killed.
        self._began: dict[int, float] = {}
        self._killed: dict[int, str] = {}
        # Environments that are being restarted, by number of the call that completes the restart.
        self._restarting: dict[int, int] = {}
        # Environments in new processes that were not reset yet.
        self._made: set[int] = set()
        self._last_errors: dict[int, Exception] = {}
        # Failures of steps that ended while a call waited for them. The next wait raises them.
        self._unraised: list[Event] = []
        self._dtypes: Mapping[Any, str] | None = None
        self._reset_kwargs: Mapping[int, tuple[Any, int]] = {}
        super().__init__(sources, envs_per_worker, start_method, affinity)

    @override
    def _call(self, calls: Sequence[tuple[int, int | None, str, Sequence[Any]]]) -> list[Any]:
        self.settle()
        # A call can't do without an answer.
        tolerant, self.tolerant = self.tolerant, False
        try:
            return super()._call(calls)
        finally:
            self.tolerant = tolerant

    def retype(self, dtypes: Mapping[Any, str]) -> None:
        """Changes the dtypes of the actions in all processes."""
        self._dtypes = dtypes
        self.call_all("retype", dtypes)

    def set_reset_kwargs(self, calls: Mapping[int, tuple[Any, int]]) -> None:
        """Sets arguments of the resets of environments, also for processes that replace dead ones.

        Args:
            calls: by number of the environment, the arguments of its method.
        """
        self._reset_kwargs = calls
        self.call({env: ("set_reset_kwargs", *call) for env, call in calls.items()})

    # --- steps

    def step(self, eager: bool, meanwhile: Callable[[], T], tolerated: bool = False) -> T:
        """Takes a step of all environments; see :meth:`stepper`.

        Args:
            eager: True to also reset rows in the step that ends their episode.
            meanwhile: function that is called while the processes step.
            tolerated: True to leave the errors in :attr:`failures`, instead of raising one.

        Returns:
            What ``meanwhile`` has returned.
        """
        if self._pending:
            self.finish_step()
        begin, wait = self._whole
        begin(eager)
        result = meanwhile()
        wait()
        if self.failures and not tolerated:
            raise next(iter(self.take_failures().values()))
        return result

    @cached_property
    def _whole(self) -> tuple[Callable[[bool], None], Callable[[], None]]:
        return self.stepper(0, self.count)

    def stepper(self, first: int, stop: int) -> tuple[Callable[[bool], None], Callable[[], None]]:
        """Returns two functions, which begin and end steps of the processes of a group.

        A step uses the actions in the shared memory, and leaves its results there. The first
        function's argument is True to also reset rows in the step that ends their episode. The
        second function waits until all processes of the group have taken the step. It raises a
        ``WorkerError`` (also an instance of the original exception's type) if an environment
        failed, and a ``WorkerDied`` if a process has died. If :attr:`tolerant` is True, it records
        them in :attr:`failures` instead.

        Args:
            first: number of the group's first process.
            stop: number after that of the group's last process.
        """
        buffers = self.buffers
        assert buffers is not None
        numbers, answers, eagerness = buffers.numbers, buffers.answers[first:stop], buffers.eager
        workers, wakeups = range(first, stop), self._wakeups
        timeout = self._timeout
        expected = b""

        def begin(eager: bool) -> None:
            nonlocal expected
            if self._lost is not None or self.closed:
                self._check_running()
            self._pending.add(first)
            self._step = number = self._step + 1
            expected = number.to_bytes(8, _BYTE_ORDER) * len(workers)
            eagerness[0] = eager
            for worker in workers:
                numbers[worker] = number
            if self.tolerant:
                self._fail_dead(workers)
            if timeout is not None:
                self._began.update(dict.fromkeys(workers, time.monotonic()))
            try:
                for worker in workers:
                    os.write(wakeups[worker], STEP)
            except BrokenPipeError:
                # A process is dead: the step fails, and the other processes need not begin it,
                # unless it succeeds without the dead one.
                if self.tolerant:
                    self.wake_late()

        def wait() -> None:
            while answers.tobytes() != expected:
                if self.tolerant and not self._late(workers):
                    # An error was sent before the answer that says that the step has failed.
                    self._handle_events()
                    break
                self.wait_for_answers()
            self._pending.discard(first)

        return begin, wait

    def _fail_dead(self, workers: Iterable[int]) -> None:
        """Lets the steps of dead processes fail."""
        buffers = self.buffers
        assert buffers is not None
        for worker in workers:
            if worker not in self._living:
                buffers.answers[worker] = -buffers.numbers[worker]
                for env in self.envs_of(worker):
                    self.failures.setdefault(env, WorkerDied(f"environment {env}: it is dead"))

    def begin_step(self, workers: Sequence[int], stepping: Mask) -> None:
        """Begins a step of some processes, which reset rows in the step that ends their episode.

        The step uses the actions in the shared memory. Other processes may be stepping.

        Args:
            workers: numbers of the processes.
            stepping: mask of the processes that are stepping; their entries are set to True.
        """
        buffers = self.buffers
        assert buffers is not None
        if self._lost is not None or self.closed:
            self._check_running()
        buffers.eager[0] = True
        self._step += 1
        now = 0.0 if self._timeout is None else time.monotonic()
        for worker in workers:
            self._pending.add(worker)
            self._began[worker] = now
            buffers.numbers[worker] = self._step
            # In this order: if Ctrl-C comes now, the process may still have to be woken, but its
            # last answer is not taken for an answer to this step.
            stepping[worker] = True
            self._wake(worker, STEP)
        if self.tolerant:
            self._fail_dead(workers)

    def wait_for_answers(self, timeout: float | None = None) -> None:
        """Waits until a process may have finished its step, or for ``timeout`` seconds.

        Raises:
            WorkerError: if an environment failed; it is also an instance of the original
                exception's type.
            WorkerDied: if a process has died.
        """
        if self._timeout is not None:
            timeout = self._timeout if timeout is None else min(timeout, self._timeout)
        if self._unraised:
            self._handle_events()
        for descriptor, _ in (timeout != 0 and self._spin()) or self._poll.poll(timeout):
            if descriptor != self._answers:
                self._handle_events()
        if self._timeout is not None:
            self._kill_late(self._timeout)

    def _kill_late(self, timeout: float) -> None:
        """Kills the processes that have taken too long for their step, or for a restart."""
        restarting = {env // self._each for env in self._restarting.values()}
        limits = dict.fromkeys(self._late(), (timeout, "step"))
        self._kill(limits | dict.fromkeys(restarting, (timeout + _STARTING, "restart")))

    def _kill(self, limits: Mapping[int, tuple[float, str]]) -> None:
        """Kills processes that have taken too long.

        Args:
            limits: by number of the process, its limit in seconds, and what it does.
        """
        now = time.monotonic()
        for index, (limit, what) in limits.items():
            if now - self._began.get(index, now) >= limit and index not in self._killed:
                self._killed[index] = f"took more than {limit:g} s for a {what}, and was killed"
                self._workers[index].kill()

    def wake_late(self) -> None:
        """Wakes processes that are to take a step, in case an exception prevented that."""
        for index in self._late():
            self._wake(index, STEP)

    # --- failures

    def _handle_events(self, failed: list[Event] | None = None, timeout: float | None = 0) -> None:
        """Handles events of the processes.

        Args:
            failed: list that gets the failures of steps; if None, they raise their errors.
            timeout: seconds to wait for an event; None for no limit.
        """
        self._events.extend(self._unraised)
        self._unraised.clear()
        if not self._events:
            self._events.extend(self._backend.wait(timeout))
        while self._events:
            event = self._next_event()
            if self.tolerant:
                self._note(event)
            elif (found := self._failed_step(event)) is None:
                continue
            elif failed is None:
                raise self._error(found, event.worker.index)
            else:
                failed.append(event)

    @override
    def _next_event(self) -> Event:
        if not self.tolerant or self.buffers is None:
            return super()._next_event()
        return self._pop_event()

    @override
    def _death(self, event: Death) -> str:
        killed = self._killed.get(event.worker.index)
        if killed is not None:
            return f"{self.name_of(event.worker.index)}: its process {killed}"
        return super()._death(event)

    def _failed_step(self, event: Event) -> CallFailed | None:
        """Returns the failure of a step that is still waited for; None for other events."""
        buffers = self.buffers
        assert buffers is not None
        if not isinstance(event, Message) or not isinstance(event.content, CallFailed):
            return None
        awaited = event.content.number == -buffers.numbers[event.worker.index]
        return event.content if awaited else None

    def _note(self, event: Event) -> None:
        """Records a failure, or the end of a restart."""
        buffers, index = self.buffers, event.worker.index
        assert buffers is not None
        if isinstance(event, Failed):
            self._last_errors[index] = event.failure.error(self.name_of(index))
        elif isinstance(event, Death):
            error, envs = self._lose(event), self.envs_of(index)
            found = self._restarting.items()
            self._restarting = {number: env for number, env in found if env not in envs}
            self.failures.update(dict.fromkeys(envs, error))
            buffers.answers[index] = -buffers.numbers[index]
        elif isinstance(event, Message) and not isinstance(event.content, tuple):
            content = event.content
            env = self._restarting.pop(content.number, None)
            awaited = env is not None or self._failed_step(event) is not None
            if awaited and isinstance(content, CallFailed) and content.env is not None:
                self.failures[content.env] = self._error(content, index)

    def _lose(self, event: Death) -> Exception:
        """Notes that a process has died, and returns the error of its environments."""
        index = event.worker.index
        self._living.discard(index)
        error = self._last_errors.pop(index, None) or WorkerDied(self._death(event))
        self._killed.pop(index, None)
        return error

    # --- restarts

    def take_failures(self) -> dict[int, Exception]:
        """Returns the errors of environments that have failed, by number, and forgets them."""
        found, self.failures = self.failures, {}
        return found

    def begin_restart(self, env: int, seed: int | None) -> None:
        """Begins to make an environment anew, and to reset it.

        If its process is dead, another one is started.

        Args:
            env: number of the environment.
            seed: its seed, or None.
        """
        index, failed = self._revived(env, seed)
        self._began[index] = time.monotonic()
        self._restarting[self._post(index, env, "restart", (failed, seed))] = env

    def restart(self, env: int, seed: int | None) -> Any:
        """Makes an environment anew, and returns the result of its reset, by messages.

        Args:
            env: number of the environment.
            seed: its seed, or None.

        Raises:
            Exception: the error of the reset.
        """
        _, failed = self._revived(env, seed)
        found, errors = self.try_call({env: ("restart", failed, seed)})
        if errors:
            raise errors[env]
        return found[env]

    def _revived(self, env: int, seed: int | None) -> tuple[int, bool]:
        """Starts another process if that of an environment is dead.

        Returns:
            The number of the process, and True if the environment has to be made anew.
        """
        index = env // self._each
        if index not in self._living:
            self._revive(index, seed)
        failed = env not in self._made
        self._made.discard(env)
        return index, failed

    def try_call(
        self, calls: Mapping[int, tuple[Any, ...]], tolerated: bool = True, steps: bool = False
    ) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Calls methods of environments by messages, and waits for all of them.

        Args:
            calls: name of the method and its arguments, by number of the environment.
            tolerated: True if dead processes are to be replaced.
            steps: True if the methods take a step.

        Returns:
            The results and the errors, by number of the environment. If a process has died, all of
            its environments have an error.
        """
        self._check_running()
        found: dict[int, Any] = {}
        errors: dict[int, Exception] = {}
        waiting: dict[int, int] = {}
        for env, (name, *args) in calls.items():
            index = env // self._each
            if index in self._living:
                waiting[self._post(index, env, name, args)] = env
            else:
                dead = f"{self.name_of(index)}: its process is dead"
                errors.update(dict.fromkeys(self.envs_of(index), WorkerDied(dead)))
        began = time.monotonic()
        self._began.update(dict.fromkeys(range(self.count), began))
        limit = None if self._timeout is None else self._timeout + (0 if steps else _STARTING)
        while waiting:
            if not self._events:
                left = None if limit is None else max(0.0, began + limit - time.monotonic())
                self._events.extend(self._backend.wait(left))
            if not self._events:
                if limit is not None and time.monotonic() >= began + limit:
                    late = {env // self._each for env in waiting.values()}
                    self._kill(dict.fromkeys(late, (limit, "step" if steps else "reset")))
                    limit = None
                continue
            event = self._events.popleft()
            index = event.worker.index
            if isinstance(event, Failed):
                self._last_errors[index] = event.failure.error(self.name_of(index))
            elif isinstance(event, Death):
                error = self._lose(event)
                if not tolerated:
                    self._lost = self._lost or str(error)
                for env in self.envs_of(index):
                    errors[env] = error
                    found.pop(env, None)
                waiting = {n: env for n, env in waiting.items() if env not in errors}
            elif isinstance(event, Message) and not isinstance(event.content, tuple):
                content, answered = event.content, waiting.pop(event.content.number, None)
                if answered is None:
                    continue
                if isinstance(content, CallFailed):
                    errors[answered] = self._error(content, index)
                else:
                    found[answered] = content.value
        return found, errors

    def _revive(self, index: int, seed: int | None = None) -> None:
        """Starts a process in place of a dead one; see :meth:`_launch`."""
        buffers = self.buffers
        self._launch(index, seed)
        if buffers is not None:
            buffers.answers[index] = buffers.numbers[index]
            self._workers[index].share(BUFFERS, self._shared)
            self._post(index, None, "attach", (self._spec,))
        if self._dtypes is not None:
            self._post(index, None, "retype", (self._dtypes,))
        for env in self.envs_of(index):
            if env in self._reset_kwargs:
                self._post(index, env, "set_reset_kwargs", self._reset_kwargs[env])
        self._made.update(self.envs_of(index))

    @property
    def restarting(self) -> set[int]:
        """Numbers of the environments whose restart has not ended."""
        return set(self._restarting.values())

    def wait_for_restarts(self) -> None:
        """Waits until all restarts have ended."""
        while self._restarting:
            self._handle_events(timeout=self._timeout)
            if self._timeout is not None:
                self._kill_late(self._timeout)

    # --- between steps

    @override
    def close(self) -> list[Failed]:
        # The functions refer to this object, which would keep the shared memory for a while.
        self.__dict__.pop("_whole", None)
        return super().close()

    def settle(self) -> None:
        """Finishes the pending step and all restarts; if ``tolerant``, replaces dead processes.

        Raises:
            WorkerDied: if a process has died, unless ``tolerant``.
        """
        self._check_running()
        if self.step_pending:
            self._unraised = self.finish_step()
        self.wait_for_restarts()
        if self.tolerant:
            self._handle_events()
            for index in set(range(self.count)) - self._living:
                self._revive(index)

    def finish_step(self) -> list[Event]:
        """Waits until all processes have finished the pending step, even if some of them fail.

        Returns:
            The failures, except those in :attr:`failures`.

        Raises:
            WorkerDied: if a process has died.
        """
        self._check_running()
        failed: list[Event] = []
        self._handle_events(failed)
        # Some processes may not have been woken for the step, but all must take it.
        self.wake_late()
        while self._late():
            for descriptor, _ in self._poll.poll(self._timeout):
                if descriptor != self._answers:
                    self._handle_events(failed)
            if self._timeout is not None:
                self._kill_late(self._timeout)
        # The error of a step was sent before its answer.
        self._handle_events(failed)
        self._pending.clear()
        return failed

    def _late(self, workers: Iterable[int] | None = None) -> list[int]:
        """Returns the processes that have not finished their steps."""
        buffers = self.buffers
        assert buffers is not None
        numbers, answers = buffers.numbers, buffers.answers
        chosen = range(self.count) if workers is None else workers
        return [index for index in chosen if abs(answers[index]) != numbers[index]]

    @property
    def step_pending(self) -> bool:
        """True if a step may still run in other processes, and nobody waits for its end."""
        return bool(self._pending)
