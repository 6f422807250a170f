"""Calls methods of the environments of a :class:`~trawl.envs.ParallelEnv`, and steps them.

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

import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, TypeVar

import cloudpickle

from trawl.backends.base import Failed
from trawl.envs.attributes import Application, pack
from trawl.envs.processes.buffers import SharedStepBuffers, StepBufferSpec
from trawl.envs.processes.processes import Ended, EnvProcesses
from trawl.envs.processes.service import EnvAnswer
from trawl.envs.processes.wakeups import STEP
from trawl.errors import WorkerDied
from trawl.memory import Mask

# Seconds that a process may take for a restart, in addition to the limit for a step.
_STARTING = 60.0
T = TypeVar("T")
_BYTE_ORDER: Literal["little", "big"] = sys.byteorder


class _TimeLimit:
    """Kills processes that take too long.

    Args:
        started: the processes.
        seconds: seconds that a process may take for a step; None for no limit.
    """

    def __init__(self, started: EnvProcesses, seconds: float | None) -> None:
        self._started, self.seconds = started, seconds
        # Time at which each process began its step, and of the last check.
        self._began: dict[int, float] = {}
        self._checked = 0.0

    @property
    def patience(self) -> float | None:
        """Seconds after which to check again; None if there is no limit."""
        return None if self.seconds is None else self.seconds / 2

    def begin(self, workers: Iterable[int]) -> None:
        """Notes that processes begin a step or a restart now."""
        if self.seconds is not None:
            self._began.update(dict.fromkeys(workers, time.monotonic()))

    def of(self, what: str) -> float | None:
        """Returns the seconds that a process may take for a ``"step"``, or for anything else."""
        if self.seconds is None or what == "step":
            return self.seconds
        return self.seconds + _STARTING

    def check(self, workers: Iterable[int], what: str) -> None:
        """Kills those of some processes that have taken too long for a step or a restart.

        The time since the last check counts as half of the limit at most: this process may have
        been suspended, perhaps together with the others, or kept from reading their messages.
        """
        limit, now, most = self.of(what), time.monotonic(), self.patience
        if limit is None or most is None:
            return
        if now - self._checked > most:
            for index, began in self._began.items():
                self._began[index] += max(0.0, now - max(self._checked, began) - most)
        self._checked = now
        for index in workers:
            if now - self._began.get(index, now) >= limit:
                self.kill(index, what)

    def kill(self, index: int, what: str) -> None:
        """Kills a process that has taken too long for a step, a reset or a restart."""
        self._started.kill(
            index, f"took more than {self.of(what):g} s for a {what}, and was killed"
        )


class _Replacements:
    """Starts processes in place of dead ones.

    Args:
        started: the processes.

    Attributes:
        buffers: memory that the processes share; None if they have none.
    """

    def __init__(self, started: EnvProcesses) -> None:
        self._started = started
        self.buffers: SharedStepBuffers | None = None
        # Environments in new processes that were not reset yet.
        self._made: set[int] = set()
        # Calls that each new process must get, too: arguments by the name of the method and the
        # number of the environment; None for methods of the service.
        self._calls: dict[tuple[str, int | None], Sequence[Any]] = {}

    def note(self, name: str, env: int | None, args: Sequence[Any]) -> None:
        """Notes the call of a method, instead of an earlier one."""
        self._calls[name, env] = args

    def start(self, index: int, seed: int | None = None) -> None:
        """Starts a process; see :meth:`EnvProcesses.launch`."""
        self._started.launch(index, seed)
        if self.buffers is not None:
            self.buffers.answers[index] = self.buffers.numbers[index]
        envs = self._started.envs_of(index)
        for (name, env), args in self._calls.items():
            if env is None or env in envs:
                self._started.post(index, env, name, args)
        self._made.update(envs)

    def start_for(self, env: int, seed: int | None) -> tuple[int, bool]:
        """Starts another process if that of an environment is dead.

        Args:
            env: number of the environment, which is reset afterwards.
            seed: its seed, or None.

        Returns:
            The number of the process, and True if the environment has to be made anew.
        """
        index = env // self._started.envs_per_worker
        if index not in self._started.living:
            self.start(index, seed)
        failed = env not in self._made
        self._made.discard(env)
        return index, failed


class EnvWorkers:
    """Environments in processes, which step together or each at its own pace.

    Methods are called by messages, and each call has a number. A step needs no message. Each step
    of a process has a number, too. When the process has taken the step, it writes the number to
    shared memory, and only this number counts as its answer. A wake-up merely ends the other side's
    wait, and may come more often than needed.

    Args:
        started: the processes.
        timeout: seconds that a process may take for a step before it is killed; None for no limit.

    Attributes:
        started: the argument.
        count: number of processes.
        buffers: the shared memory; None until :meth:`attach` is called.
        tolerant: True to keep the failures of steps in ``failures``, instead of raising them.
        failures: errors of the environments that have failed and are to be restarted, by number.
    """

    def __init__(self, started: EnvProcesses, timeout: float | None = None) -> None:
        self.started, self._limit = started, _TimeLimit(started, timeout)
        self._replacements = _Replacements(started)
        self.count, self._each = started.count, started.envs_per_worker
        self.buffers: SharedStepBuffers | None = None
        self.closed = False
        self.tolerant = False
        self.failures: dict[int, Exception] = {}
        # Failures of steps that nobody has waited for yet, unless they are tolerated.
        self._unraised: dict[int, Exception] = {}
        # Text that says why a process has ended, if all calls fail since then.
        self._lost: str | None = None
        # Number of the last step.
        self._step = 0
        # The processes that may be stepping; for a group of processes that step together, only the
        # first one.
        self._pending: set[int] = set()
        # Environments that are being restarted, by number of the call that completes the restart.
        self._restarting: dict[int, int] = {}

    # --- calls

    def attach(self, spec: StepBufferSpec) -> SharedStepBuffers:
        """Allocates the shared memory that steps use from now on."""
        memory = self.started.share(spec.nbytes)
        self.set_all("attach", spec)
        self.buffers = self._replacements.buffers = SharedStepBuffers(spec, memory)
        return self.buffers

    def set_all(self, name: str, *args: Any) -> None:
        """Calls a method of the service in all processes, also in those that replace dead ones."""
        self._replacements.note(name, None, args)
        self.call_each(name, [args] * self.count)

    def set_each(self, name: str, arguments: Mapping[int, Sequence[Any]]) -> None:
        """Calls a method of environments, also of those in processes that replace dead ones.

        Args:
            name: name of the method.
            arguments: its arguments, by number of the environment.
        """
        for env, args in arguments.items():
            self._replacements.note(name, env, args)
        self.call({env: (name, *args) for env, args in arguments.items()})

    def call_each(self, name: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Calls a method of the service in each process with arguments of its own."""
        return self._call([(index, None, name, args) for index, args in enumerate(arguments)])

    def call(self, calls: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Calls methods of environments.

        Args:
            calls: name of the method and its arguments, by number of the environment.

        Returns:
            The results, by number of the environment.

        Raises:
            WorkerError: if a call raised an exception; the error is also an instance of the
                exception's type.
            WorkerDied: if a process has died.
        """
        sent = [(env // self._each, env, name, args) for env, (name, *args) in calls.items()]
        return dict(zip(calls, self._call(sent), strict=True))

    def apply(self, calls: Mapping[int, Application]) -> dict[int, Any]:
        """Calls functions with environments where these are.

        Args:
            calls: for some environments, by number, a function and its arguments after the
                environment.

        Returns:
            The results, by number of the environment.

        Raises:
            TypeError: if arguments or results can't be pickled.
            WorkerError: if a call raised an exception; the error is also an instance of the
                exception's type.
            WorkerDied: if a process has died.
        """
        if not self.started.isolated:
            return self.call({env: ("apply", call) for env, call in calls.items()})
        packed = {env: pack(call) for env, call in calls.items()}
        found = self.call({env: ("apply_packed", data) for env, data in packed.items()})
        return {env: cloudpickle.loads(data) for env, data in found.items()}

    def _call(self, calls: Sequence[tuple[int, int | None, str, Sequence[Any]]]) -> list[Any]:
        self.settle()
        # A call can't do without an answer.
        tolerant, self.tolerant = self.tolerant, False
        try:
            numbers = [self.started.post(*call) for call in calls]
            found, waiting = dict[int, Any](), set(numbers)
            while waiting:
                index, content = self._next_message()
                number = getattr(content, "number", 0)
                if number in waiting:
                    waiting.discard(number)
                    found[number] = content.result(self.started.place_of(index, content))
        finally:
            self.tolerant = tolerant
        return [found[number] for number in numbers]

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
        envs_of, living = self.started.envs_of, self.started.living
        found: dict[int, Any] = {}
        errors: dict[int, Exception] = {}
        waiting: dict[int, int] = {}
        for env, (name, *args) in calls.items():
            index = env // self._each
            if index in living:
                waiting[self.started.post(index, env, name, args)] = env
            else:
                dead = f"{self.started.name_of(index)}: its process is dead"
                errors.update(dict.fromkeys(envs_of(index), WorkerDied(dead)))
        what = "step" if steps else "reset"
        self._limit.begin({env // self._each for env in waiting.values()})
        while waiting:
            self._limit.check({env // self._each for env in waiting.values()}, what)
            received = self.started.receive(self._limit.patience)
            if received is None:
                continue
            index, content = received
            number = getattr(content, "number", 0)
            if isinstance(content, Ended):
                if not tolerated:
                    self._lost = self._lost or content.summary
                errors.update(dict.fromkeys(envs_of(index), content.error))
                waiting = {n: env for n, env in waiting.items() if env not in errors}
            elif number in waiting:
                env = waiting.pop(number)
                if content.failure is not None:
                    errors[env] = content.failure.error(self.started.place_of(index, content))
                else:
                    found[env] = content.value
        # Those that have answered before their process has died have to begin anew, too.
        return {env: value for env, value in found.items() if env not in errors}, errors

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
        workers, wakers = range(first, stop), self.started.wakers
        limit = None if self._limit.seconds is None else self._limit
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
            if self.tolerant or self._unraised:
                self._forget_failures(workers)
            if limit is not None:
                limit.begin(workers)
            try:
                for worker in workers:
                    wakers[worker](STEP)
            except BrokenPipeError:
                # A process is dead: the step fails, and the other processes need not begin it,
                # unless it succeeds without the dead one.
                if self.tolerant:
                    self.wake_late()

        def wait() -> None:
            while answers.tobytes() != expected:
                if self.tolerant and not self._late(workers):
                    # An error was sent before the answer that says that the step has failed.
                    self._read_messages()
                    break
                self.wait_for_answers()
            self._pending.discard(first)

        return begin, wait

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
        self._limit.begin(workers)
        for worker in workers:
            self._pending.add(worker)
            buffers.numbers[worker] = self._step
            # In this order: if Ctrl-C comes now, the process may still have to be woken, but its
            # last answer is not taken for an answer to this step.
            stepping[worker] = True
            self.started.wake(worker, STEP)
        if self.tolerant or self._unraised:
            self._forget_failures(workers)

    def _forget_failures(self, workers: Iterable[int]) -> None:
        """Forgets failures of earlier steps; if failures are tolerated, dead processes fail."""
        buffers = self.buffers
        assert buffers is not None
        for worker in workers:
            envs = self.started.envs_of(worker)
            for env in envs:
                self._unraised.pop(env, None)
            if self.tolerant and worker not in self.started.living:
                buffers.answers[worker] = -buffers.numbers[worker]
                for env in envs:
                    self.failures.setdefault(env, WorkerDied(f"environment {env}: it is dead"))

    def wait_for_answers(self, timeout: float | None = None) -> None:
        """Waits until a process may have finished its step, or for ``timeout`` seconds.

        Raises:
            WorkerError: if an environment failed; it is also an instance of the original
                exception's type.
            WorkerDied: if a process has died.
        """
        longest = self._limit.patience
        if longest is not None:
            timeout = longest if timeout is None else min(timeout, longest)
        if self._unraised or self.started.wait(timeout):
            self._read_messages()
            if self._unraised:
                raise self._unraised.pop(next(iter(self._unraised)))
        self._kill_late()

    def _kill_late(self) -> None:
        """Kills the processes that have taken too long for their step, or for a restart."""
        if self._limit.seconds is not None:
            self._limit.check(self._late(), "step")
            self._limit.check({env // self._each for env in self.restarting}, "restart")

    def wake_late(self) -> None:
        """Wakes processes that are to take a step, in case an exception prevented that."""
        for index in self._late():
            self.started.wake(index, STEP)

    def _late(self, workers: Iterable[int] | None = None) -> list[int]:
        """Returns the processes that have not finished their steps."""
        buffers = self.buffers
        assert buffers is not None
        numbers, answers = buffers.numbers, buffers.answers
        chosen = range(self.count) if workers is None else workers
        return [index for index in chosen if abs(answers[index]) != numbers[index]]

    def finish_step(self, forget: bool = True) -> None:
        """Waits until all processes have finished the pending step, if there is one.

        Args:
            forget: True to forget its failures, unless they are tolerated; False to raise them when
                somebody waits for the step.

        Raises:
            WorkerDied: if a process has died.
        """
        if not self._pending:
            return
        self._check_running()
        self._read_messages()
        # Some processes may not have been woken for the step, but all must take it.
        self.wake_late()
        while self._late():
            if self.started.wait(self._limit.patience):
                self._read_messages()
            self._kill_late()
        # The error of a step was sent before its answer.
        self._read_messages()
        self._pending.clear()
        if forget:
            self._unraised.clear()

    def settle(self) -> None:
        """Finishes the pending step and all restarts; if ``tolerant``, replaces dead processes.

        Raises:
            WorkerDied: if a process has died, unless ``tolerant``.
        """
        self._check_running()
        self.finish_step(forget=False)
        self.wait_for_restarts()
        if self.tolerant:
            self._read_messages()
            for index in set(range(self.count)) - self.started.living:
                self._replacements.start(index)

    # --- messages

    def _read_messages(self, timeout: float | None = 0) -> None:
        """Reads the messages that have come, or waits for one.

        Args:
            timeout: seconds to wait; None for no limit.
        """
        while self._next_message(timeout)[1] is not None:
            timeout = 0

    def _next_message(self, timeout: float | None = None) -> tuple[int, Any]:
        """Waits for a message, and notes the failure or the end of a restart in it.

        Args:
            timeout: seconds to wait; None for no limit.

        Returns:
            The number of the process, and its message; None in its place if none came in time.

        Raises:
            WorkerError: if a process has ended because of an error, unless ``tolerant``.
            WorkerDied: if a process has died, unless ``tolerant``.
        """
        index, content = self.started.receive(timeout) or (0, None)
        if isinstance(content, Ended):
            self._note_end(index, content)
        elif isinstance(content, EnvAnswer):
            restarted = self._restarting.pop(content.number, None) is not None
            buffers = self.buffers
            awaited = buffers is not None and content.number == -buffers.numbers[index]
            if content.failure is not None and (restarted or awaited):
                assert content.env is not None
                errors = self.failures if self.tolerant else self._unraised
                errors[content.env] = content.failure.error(self.started.place_of(index, content))
        return index, content

    def _note_end(self, index: int, ended: Ended) -> None:
        """Notes that a process has ended."""
        if not self.tolerant:
            self._lost = self._lost or ended.summary
            raise ended.error
        buffers, envs = self.buffers, self.started.envs_of(index)
        assert buffers is not None
        found = self._restarting.items()
        self._restarting = {number: env for number, env in found if env not in envs}
        self.failures.update(dict.fromkeys(envs, ended.error))
        buffers.answers[index] = -buffers.numbers[index]

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
        index, failed = self._replacements.start_for(env, seed)
        self._limit.begin([index])
        self._restarting[self.started.post(index, env, "restart", (failed, seed))] = env

    def restart(self, env: int, seed: int | None) -> Any:
        """Makes an environment anew, and returns the result of its reset, by messages.

        Args:
            env: number of the environment.
            seed: its seed, or None.

        Raises:
            Exception: the error of the reset.
        """
        _, failed = self._replacements.start_for(env, seed)
        found, errors = self.try_call({env: ("restart", failed, seed)})
        if errors:
            raise errors[env]
        return found[env]

    @property
    def restarting(self) -> set[int]:
        """Numbers of the environments whose restart has not ended."""
        return set(self._restarting.values())

    def wait_for_restarts(self) -> None:
        """Waits until all restarts have ended."""
        while self._restarting:
            self._read_messages(self._limit.patience)
            self._kill_late()

    # --- the end

    def _check_running(self) -> None:
        """Checks that the environments are open, and that no process has died.

        Raises:
            RuntimeError: if the environments are closed.
            WorkerDied: if a process has died.
        """
        if self.closed:
            raise RuntimeError("the environments are already closed")
        if self._lost is not None:
            raise WorkerDied(self._lost)

    def close(self) -> list[Failed]:
        """Ends all processes; see :meth:`EnvProcesses.close`."""
        if self.closed:
            return []
        self.closed = True
        # The functions refer to this object, which would keep the shared memory for a while.
        self.__dict__.pop("_whole", None)
        return self.started.close()
