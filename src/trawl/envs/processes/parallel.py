"""Several environments, each in its own process, stepped in parallel as one batch."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from trawl.backends.processes.backend import START_METHODS
from trawl.checks import check_number, seconds_above_zero
from trawl.devices import optional_device
from trawl.envs.agents.groups import groups_of
from trawl.envs.arguments import lists_arguments
from trawl.envs.attributes import Application, EnvHandle, pack
from trawl.envs.base import action_array
from trawl.envs.batches.batched import BatchedEnv, arguments_of, factories_of
from trawl.envs.entries.masks import choices, joined_masks
from trawl.envs.processes.affinity import Affinity, affinity_of
from trawl.envs.processes.buffers import (
    AUTORESET,
    RESET,
    SharedStepBuffers,
    StepBufferSpec,
    StepEntries,
    StepResults,
)
from trawl.envs.processes.processes import EnvProcesses
from trawl.envs.processes.workers import EnvWorkers
from trawl.envs.seeding import check_seed, next_kwargs, rebuilt_seed
from trawl.envs.types import EnvKwargs, EnvSources
from trawl.errors import EnvStateError, WorkerDied, env_errors
from trawl.foreign.tensordict import new_tensordict
from trawl.keys import Key, as_key, show_key
from trawl.memory import Array, Mask
from trawl.schema.checks import UNKNOWN
from trawl.schema.states import PARALLEL


class ParallelEnv(BatchedEnv):
    """Batch of environments in other processes.

    With the same seed, it returns the same data as :class:`~trawl.envs.SerialEnv`. Processes pay
    off if a step of one environment takes longer than waking a process (about twenty
    microseconds), and if there are enough CPU cores.

    Actions, observations, rewards and flags lie in shared memory. In a collector, the step that
    ends an episode also resets the environment. Environments whose data has no fixed shapes and
    dtypes exchange messages instead, which is slower.

    Args:
        num_workers: number of environments.
        create_env_fn: function that makes one environment, or a sequence of ``num_workers``
            functions. A function is called in the process of its environment. A Gymnasium id or an
            environment's class works as well. A function may return any environment that a
            collector accepts. Functions that the process can't import (lambdas, closures, and all
            functions of ``__main__``) are sent by value.
        create_env_kwargs: keyword arguments for ``create_env_fn``: one mapping for all
            environments, or a sequence with one mapping for each.
        envs_per_worker: number of environments in each process; the last process may have fewer.
            The process steps them one after another. One wake-up then serves several environments,
            which pays off if their steps are short.
        groups: number of groups of equal size. A collector's policy acts for one group while the
            other groups step. The groups take turns in a fixed order, so equal seeds give equal
            data.
        device: device of the returned TensorDicts. With None, the TensorDicts have no device, and
            their tensors are on the CPU.
        backend: ``"process"`` runs the environments in processes, and ``"thread"`` in threads of
            this process. Threads suit environments that can't be pickled or that spend their time
            outside Python. They share this process's random generators and settings. A thread whose
            environment does not return can't be ended.
        worker_affinity: CPU cores of each process: a sequence with one sequence of core numbers for
            each process, or a function of the process's number that returns one. None leaves the
            choice to the operating system.
        worker_timeout: seconds that a process may take for a step. If it takes longer, it is
            killed, and counts as dead. None: no limit.
        start_method: ``"forkserver"`` forks the processes from a server that has imported the
            modules they need; ``"spawn"`` starts a fresh interpreter for each process, which
            takes seconds.

    Raises:
        TypeError: if the environments can't be made.
        ValueError: if a sequence does not have ``num_workers`` entries, if the environments'
            specs differ, or if the groups can't be formed.
        WorkerError: if a process raised an exception; the error is also an instance of the
            exception's type. Later calls may raise this error too.
        WorkerDied: if a process died. Later calls may raise this error too.

    Examples:
        >>> from trawl.envs import ParallelEnv
        >>> env = ParallelEnv(2, "Pendulum-v1")
        >>> env.rollout(5).batch_size
        torch.Size([2, 5])
        >>> env.close()

    Attributes:
        processes: the processes; collectors use them to step and to restart environments.
    """

    has_processes = True

    @lists_arguments
    def __init__(
        self,
        num_workers: int,
        create_env_fn: EnvSources,
        *,
        create_env_kwargs: EnvKwargs | None = None,
        envs_per_worker: int = 1,
        groups: int = 1,
        device: torch.device | str | None = None,
        backend: Literal["process", "thread"] = "process",
        worker_affinity: Affinity | None = None,
        worker_timeout: float | None = None,
        start_method: Literal["forkserver", "spawn"] = "forkserver",
    ) -> None:
        factories = factories_of(num_workers, create_env_fn)
        arguments = arguments_of(num_workers, create_env_kwargs)
        _check_place(backend, start_method)
        self.device = optional_device("device", device)
        self.num_workers = num_workers
        self.envs_per_worker = check_number("envs_per_worker", envs_per_worker, 1)
        self.groups = _check_groups(groups, num_workers, self.envs_per_worker)
        sources = list(zip(factories, arguments, strict=True))
        method = start_method if backend == "process" else None
        timeout = _check_timeout(worker_timeout, backend)
        affinity = affinity_of(worker_affinity, -(-num_workers // self.envs_per_worker))
        started = EnvProcesses(sources, self.envs_per_worker, method, affinity)
        self.processes = EnvWorkers(started, timeout)
        self._finalizer = weakref.finalize(self, self.processes.close)
        try:
            self._set_members(started.infos)
            #: Memory shared with the processes; None if steps are exchanged as messages.
            self.buffers: SharedStepBuffers | None = None
            if self.fixed_layout:
                self.buffers = self.processes.attach(_buffer_spec(self))
                self._step_results = StepResults(self.buffers, self.batch_size, self.done_keys)
            self._groups = {
                group: self.full_observation_spec[group].shape for group in groups_of(self)
            }
        except BaseException:
            self._finalizer()
            raise
        self._has_autoresets = any(info.autoresets for info in self.members)
        self._acted = [
            (key, as_key(key), self.full_action_spec[key].shape) for key in self.action_keys
        ]
        self._seeds = _Seeds()
        self._eager = False
        # Flags of the last step, if it could also reset environments; None once the observations
        # of the reset have been read.
        self._last_bits: Array | None = None
        self._autoresets: Tensor | None = None
        self.num_members = num_workers
        # Environments that were made anew after a failure, and whose reset has not been read. If
        # steps are exchanged as messages, with its result.
        self._begun: dict[int, Any] = {}
        # Action masks by environment, if steps are exchanged as messages.
        self._masks: dict[int, Array | None] = {}

    @override
    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        self._seeds.set(check_seed(seed), {})
        return super().set_seed(seed, static_seed)

    @override
    def _seed_member(self, index: int, seed: int, static_seed: bool) -> int:
        (following,) = self.processes.call({index: ("seed", seed, static_seed)}).values()
        return int(following)

    @override
    def set_reset_kwargs(self, given: Any, first: int, counts: Any) -> None:
        sent = (
            given
            if given is None or not self.processes.started.isolated
            else pack(given, "reset_kwargs")
        )
        rows = self.batch_size[1:].numel()
        each = {index: (sent, first + index * rows) for index in range(self.num_workers)}
        self.processes.set_each("set_reset_kwargs", each)

    @override
    def episode_counts(self, counts: Any) -> Any:
        if self.buffers is not None and len(self.batch_size) == 1:
            return self.buffers.episodes.copy()
        calls = dict.fromkeys(range(self.num_workers), ("episode_counts",))
        return np.concatenate(list(self.processes.call(calls).values()))

    @override
    def load_episode_counts(self, counts: Any) -> None:
        each = counts.reshape(self.num_workers, -1)
        self.processes.call({i: ("load_episode_counts", own) for i, own in enumerate(each)})

    @property
    def envs(self) -> tuple[EnvHandle, ...]:
        """Handles of the environments, for paths such as ``"env.envs[0].unwrapped.level"``."""
        members = enumerate(self.members)
        return tuple(EnvHandle(self._apply, index, repr(info)) for index, info in members)

    @override
    def _apply(self, calls: Mapping[int, Application]) -> dict[int, Any]:
        return self.processes.apply(calls)

    @override
    def _close(self) -> None:
        self._finalizer.detach()
        for failed in self.processes.close():
            raise failed.failure.error(self.processes.started.name_of(failed.worker.index))

    @property
    @override
    def cannot_restart(self) -> list[str]:
        return [name for info in self.members for name in info.cannot_restart]

    @property
    def carried(self) -> frozenset[Key]:
        """Keys of observations that a policy may write under ``"next"`` for the next step."""
        found: frozenset[Key] = self.members[0].carried
        return found

    @override
    def autoreset_mask(self) -> Tensor | None:
        if not self._has_autoresets:
            return None
        return (
            torch.zeros(self.batch_size, dtype=torch.bool)
            if self._autoresets is None
            else self._autoresets
        )

    @override
    def action_mask(self) -> NDArray[Any] | None:
        if self.buffers is None:
            return joined_masks([self._masks.get(index) for index in range(self.num_workers)])
        return self.buffers.action_masks()

    # --- for collectors, which read and write the shared memory themselves

    def begin(self, mask: Mask | None, **kwargs: Any) -> None:
        """Resets environments, and leaves their observations in the shared memory.

        Args:
            mask: mask of the environments to reset, of shape ``(environments,)``; None for all.
            **kwargs: ``seed`` and ``options``, with the same meaning as in
                ``gymnasium.Env.reset``.
        """
        self.processes.call(_reset_calls(self.num_workers, "begin", mask, kwargs))

    def set_action_dtypes(self, dtypes: Mapping[Key, np.dtype[Any]]) -> None:
        """Changes the dtypes of the actions in the shared memory."""
        assert self.buffers is not None
        if self.buffers.action_dtypes != dtypes:
            self.processes.set_all("retype", {key: dtype.str for key, dtype in dtypes.items()})
            self.buffers.set_action_dtypes(dtypes)

    def stepper(
        self, group: int, groups: int
    ) -> tuple[slice, Callable[[bool], None], Callable[[], None]]:
        """Returns the rows of a group of environments, and functions that step the group.

        The first function begins a step with the actions in the shared memory. Its argument is
        True to also reset environments in the step that ends their episode. The second function
        waits until the results are in the shared memory.

        Args:
            group: number of the group.
            groups: number of groups.
        """
        rows, workers = (
            slice(count * group // groups, count * (group + 1) // groups)
            for count in (self.batch_size.numel(), self.processes.count)
        )
        return rows, *self.processes.stepper(workers.start, workers.stop)

    def begin_restart(self, env: int) -> None:
        """Begins to make a failed environment anew, and to reset it."""
        self.processes.begin_restart(env, self._seeds.next(env))

    @override
    def restart(self, member: int = 0) -> None:
        if self.buffers is not None:
            self.begin_restart(member)
            self._begun[member] = None
        else:
            self._begun[member] = self.processes.restart(member, self._seeds.next(member))

    # --- for other callers

    def _reset(self, mask: Tensor | None, **kwargs: Any) -> TensorDict:
        rows = None if mask is None else mask.cpu().numpy().ravel()
        of_envs = None if rows is None else rows.reshape(self.num_workers, -1)
        chosen = [env for env in self._begun if of_envs is None or of_envs[env].any()]
        begun = {env: self._begun.pop(env) for env in chosen}
        if self.buffers is None:
            calls = _reset_calls(self.num_workers, "reset", rows, kwargs)
            found = self._call({env: call for env, call in calls.items() if env not in begun}, True)
            found |= begun
            # Those whose reset has failed.
            found |= {env: self._begun.pop(env) for env in calls.keys() & self._begun.keys()}
            self._masks.update({index: mask for index, (_, mask) in found.items()})
            fake = (self.members[0].fake, None)
            results = [found.get(index, fake)[0] for index in range(self.num_workers)]
            return self._join_resets(results)
        if begun and rows is not None:
            rows = rows.copy()
            rows.reshape(self.num_workers, -1)[list(begun)] = False
            if not rows.any():
                return self._tensordict(self._step_results.after_reset())
        bits, self._last_bits = self._last_bits, None
        if bits is None or rows is None or kwargs or (rows & (bits.ravel() & RESET == 0)).any():
            self.begin(rows, **kwargs)
        return self._tensordict(self._step_results.after_reset())

    def _tensordict(self, entries: Mapping[str, Any]) -> TensorDict:
        found = new_tensordict(entries, self.batch_size)
        for group, size in self._groups.items():
            found.get(group).batch_size = size
        return found

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        if self.buffers is None:
            return self._step_by_messages(tensordict)
        self._put_actions(tensordict)
        entries, _ = self._take_step(self._step_results.allocate)
        return self._tensordict(entries.after)

    def _take_step(self, allocate: Callable[[], StepEntries]) -> tuple[StepEntries, Array]:
        """Takes a step with the actions in the shared memory.

        Args:
            allocate: function that returns memory for the results. It is called while the
                processes step.

        Returns:
            The results, and the flags of the step.
        """
        self._last_bits = None
        tolerated = self.on_error is not None
        if tolerated:
            self.processes.tolerant = True
        entries = self.processes.step(self._eager, allocate, tolerated)
        self.failed = self._repaired() if tolerated else ()
        bits = self._step_results.write(entries)
        if self._eager:
            self._last_bits = bits
        if self._has_autoresets:
            self._autoresets = torch.from_numpy(bits & AUTORESET != 0).view(self.batch_size)
        return entries, bits

    def _repaired(self) -> set[int]:
        """Restarts the environments that failed in a step, and returns their numbers."""
        assert self.buffers is not None
        assert self.on_error is not None
        failed = set[int]()
        while errors := self.processes.take_failures():
            for env, error in errors.items():
                self.on_error(error, False, env)
            failed |= errors.keys()
            self.processes.wait_for_restarts()
        for env in failed:
            rows = self.buffers.rows(env)
            # The step left nothing valid there.
            self.buffers.discard(rows)
        return failed

    @override
    def step_and_maybe_reset(
        self, tensordict: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        simple = self.buffers is not None and self.device is None and tensordict.device is None
        # The processes reset environments within the step, and _reset() only reads the results.
        self._eager = True
        try:
            if not simple or "next" in tensordict.keys():  # noqa: SIM118
                return super().step_and_maybe_reset(tensordict)
            # The same operations as in the base class, without its lookups.
            self._put_actions(tensordict)
            following = begin = None

            def allocate() -> StepEntries:
                nonlocal following, begin
                entries = self._step_results.allocate()
                following, begin = map(self._tensordict, (entries.after, entries.begin))
                return entries

            _, bits = self._take_step(allocate)
            assert begin is not None
            tensordict.set("next", following)
            if bits is not self._step_results.no_bits:
                begin = self._tensordict(self._step_results.to_go_on_from(bits))
            return tensordict, begin
        finally:
            self._eager, self._last_bits = False, None

    def _put_actions(self, tensordict: TensorDictBase) -> None:
        assert self.buffers is not None
        values: dict[Key, Array] = {}
        for name, key, expected in self._acted:
            value = self.action_in(tensordict, name)
            if value.shape != expected:
                raise ValueError(
                    f"action {show_key(key)} has shape {tuple(value.shape)}, but the "
                    f"environment's action spec says {tuple(expected)}"
                )
            values[key] = action_array(value)
        self.processes.finish_step()
        self.set_action_dtypes({key: value.dtype for key, value in values.items()})
        for key, target in self.buffers.actions.items():
            target[...] = values[key].reshape(target.shape)

    def _step_by_messages(self, tensordict: TensorDictBase) -> TensorDict:
        keys = self.action_keys
        calls = {
            index: ("step", tensordict[index].select(*keys)) for index in range(self.num_workers)
        }
        self.failed = ()
        results = self._call(calls, False)
        rows, autoresets, masks = zip(*(results[index] for index in sorted(results)), strict=True)
        self._masks = dict(enumerate(masks))
        self._autoresets = self._join_masks(autoresets)
        return self._join(list(rows), list(rows[0].keys()))

    def _call(self, calls: Mapping[int, tuple[Any, ...]], resets: bool) -> dict[int, Any]:
        """Calls methods of environments, and restarts those that fail if ``on_error`` is set.

        Args:
            calls: name of the method and its arguments, by number of the environment.
            resets: True if they are resets, False if they are steps.

        Returns:
            The results, by number of the environment; zeros for steps that failed.
        """
        tolerated = self.on_error is not None
        found, errors = self.processes.try_call(calls, tolerated, steps=not resets)
        for env, error in errors.items():
            if self.on_error is None:
                raise error
            self.on_error(error, resets, env)
            if not resets:
                found[env] = (self.members[0].fake.get("next"), None, None)
        # A process that dies in a reset loses the episodes of its other environments.
        self.failed = {*self.failed, *(errors.keys() - calls.keys() if resets else errors)}
        return found

    # --- the state: each environment is captured in its process

    @property
    @override
    def state_methods(self) -> list[str]:
        calls = dict.fromkeys(range(self.num_workers), ("state_methods",))
        return [way for ways in self.processes.call(calls).values() for way in ways]

    @override
    def capture(self) -> dict[str, Any]:
        self.processes.settle()
        # They are made anew in the next step, and need no state.
        failed = sorted(self.processes.failures)
        alive = [index for index in range(self.num_workers) if index not in failed]
        found = self.processes.call(dict.fromkeys(alive, ("capture",)))
        nothing: list[Any] = [()] * self.processes.count
        return {
            "envs": [found.get(index) for index in range(self.num_workers)],
            # Environments may draw from the global generators of their process. Captured after the
            # environments, whose methods may draw, too.
            "generators": self.processes.call_each("capture_generators", nothing),
            "seed": self._seeds.given,
            "restarts": self._seeds.restarts,
        }

    @override
    def check_state(self, state: Mapping[str, Any]) -> None:
        with env_errors():
            PARALLEL(state, "state", UNKNOWN)
        own = self.processes.count if self.processes.started.isolated else 0
        mine = {
            "environments": self.num_workers,
            "processes with random generators of their own": own,
        }
        generators = [one for one in state["generators"] if one is not None]
        for (what, count), others in zip(mine.items(), (state["envs"], generators), strict=True):
            if count != len(others):
                raise EnvStateError(
                    f"the state has {len(others)} {what}, but {self!r} has {count}: load it into "
                    "one that is made with the same arguments"
                )
        self.processes.call(
            {i: ("check_state", one) for i, one in enumerate(state["envs"]) if one is not None}
        )

    @override
    def restore(self, state: Mapping[str, Any], trust: bool = False) -> None:
        self.check_state(state)
        known = {index: one for index, one in enumerate(state["envs"]) if one is not None}
        calls = {index: ("restore", one, trust) for index, one in known.items()}
        self._masks = self.processes.call(calls)
        self.processes.call_each("restore_generators", [(one,) for one in state["generators"]])
        self._seeds.set(state["seed"], state["restarts"])
        self.processes.failures = {
            index: WorkerDied(f"environment {index}: it had failed when the state was saved")
            for index in range(self.num_workers)
            if index not in known
        }

    def __reduce__(self) -> Any:
        raise TypeError(
            "a ParallelEnv can't be copied or sent to another process: pass a function that "
            "makes it there"
        )


def _buffer_spec(env: ParallelEnv) -> StepBufferSpec:
    batch = len(env.batch_size)
    observed, flags, rewards, acted = (
        {
            as_key(key): (tuple(leaf.shape[batch:]), leaf.dtype)
            for key, leaf in spec.items(True, True)
        }
        for spec in (
            env.full_observation_spec,
            env.full_done_spec,
            env.full_reward_spec,
            env.full_action_spec,
        )
    )
    observed |= {key: leaf for key, leaf in flags.items() if len(key) > 1}
    sizes = choices(env.action_spec_unbatched) if len(acted) == 1 else None
    rows_per_env = env.batch_size[1:].numel()
    return StepBufferSpec(
        env.processes.count,
        env.num_workers,
        rows_per_env,
        observed,
        rewards,
        acted,
        tuple(sizes or ()),
    )


class _Seeds:
    """Seeds of environments that are made anew.

    Attributes:
        given: the last seed of all environments; None if there is none.
        restarts: number of restarts of each environment since. The dictionary is never changed,
            only replaced.
    """

    def __init__(self) -> None:
        self.set(None, {})

    def set(self, given: int | None, restarts: Mapping[int, int]) -> None:
        """Sets the seed, and the numbers of restarts."""
        self.given, self.restarts = given, restarts

    def next(self, env: int) -> int | None:
        """Returns the seed of an environment that is made anew."""
        if self.given is None:
            return None
        # Restarts of other environments, which depend on timing, change nothing.
        count = self.restarts.get(env, 0) + 1
        self.restarts = {**self.restarts, env: count}
        return rebuilt_seed(self.given, env, count)


def _reset_calls(
    count: int, name: str, mask: Mask | None, kwargs: dict[str, Any]
) -> dict[int, tuple[Any, ...]]:
    """Returns the calls that reset environments, or those in ``mask``, by environment."""
    calls: dict[int, tuple[Any, ...]] = {}
    for index in range(count):
        part = None if mask is None else mask.reshape(count, -1)[index]
        if part is None or part.any():
            calls[index] = (name, part, dict(kwargs))
        kwargs = next_kwargs(kwargs)
    return calls


def _check_timeout(value: float | None, backend: str) -> float | None:
    """Returns ``worker_timeout``; None if there is no limit."""
    timeout = seconds_above_zero("worker_timeout", value)
    if timeout is not None and backend == "thread":
        raise ValueError(
            f"worker_timeout={value!r} needs backend='process', because a thread can't be killed"
        )
    return None if timeout == math.inf else timeout


def _check_place(backend: str, start_method: str) -> None:
    if start_method not in START_METHODS:
        raise ValueError(f"start_method must be one of {START_METHODS}, but it is {start_method!r}")
    if backend not in ("process", "thread"):
        raise ValueError(f"backend must be 'process' or 'thread', but it is {backend!r}")


def _check_groups(groups: Any, envs: int, envs_per_worker: int) -> int:
    """Returns the number of groups; raises an error if the environments can't be grouped."""
    count = int(check_number("groups", groups, 1))
    if count > 1 and (envs % count or envs // count % envs_per_worker):
        fits = [n for n in range(2, envs + 1) if not (envs % n or envs // n % envs_per_worker)]
        raise ValueError(
            f"groups={count} can't be formed from {envs} environments with envs_per_worker="
            f"{envs_per_worker}, because each group must have the same number of full processes: "
            f"groups may be {', '.join(map(str, [1, *fits]))}"
        )
    return count
