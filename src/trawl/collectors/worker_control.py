"""Methods with which users control workers: seeds, state, hooks, calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from inspect import isroutine
from operator import methodcaller
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from trawl.collectors import worker
from trawl.collectors.assembler import BatchAssembler
from trawl.collectors.base import View
from trawl.collectors.profile import ProfileConfig
from trawl.collectors.slot import summary
from trawl.collectors.times import shares_of
from trawl.collectors.tracer import WorkerTracer
from trawl.collectors.worker_state import WorkerState, call_path
from trawl.envs.seeding import check_seed, derive
from trawl.paths import first_name


class WorkerControl(WorkerState):
    """The part of a collector with workers that controls the workers between batches.

    Workers answer between two batches. Seeds, weights, versions, hooks and loaded environment
    states are kept for workers that replace dead ones.

    Attributes:
        num_workers: number of workers.
        policy: the policy as it was given; workers have copies.
    """

    sync: bool
    _first_env: int
    _assembler: BatchAssembler
    _waited: float

    def reset(self, reset_idx: Sequence[bool] | None = None, **kwargs: Any) -> None:
        """Begins new trajectories.

        Args:
            reset_idx: for each worker, True to reset its environments; None to reset all.
            **kwargs: arguments of the environments' reset.

        Raises:
            TypeError: if an entry is not a bool.
            ValueError: if there is not exactly one entry for each worker.
        """
        self._check_open("reset()")
        chosen = [True] * self.num_workers if reset_idx is None else list(reset_idx)
        if not all(isinstance(asked, (bool, np.bool_)) for asked in chosen):
            raise TypeError(
                f"reset_idx must have a bool for each worker, but it is {chosen}: for example, "
                f"{[True] * self.num_workers} resets all workers"
            )
        if len(chosen) != self.num_workers:
            raise ValueError(
                f"reset_idx has {len(chosen)} entries, but there are {self.num_workers} workers"
            )
        with self._held():
            self._call(
                {
                    i: (methodcaller("reset", **own),)
                    for i, own in _seeded(chosen, kwargs)
                    if chosen[i]
                }
            )

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds each worker (environments, policy, random actions), and resets the environments.

        Two collectors with the same arguments and the same seed collect equal batches. With
        ``sync=False``, each worker's batches are equal, but their order depends on the workers'
        speed. Batches that workers have already collected are delivered first.

        Args:
            seed: a non-negative integer.
            static_seed: True to give all environments the same seed.

        Returns:
            A seed for a further environment (equal to ``seed`` if ``static_seed`` is True).
        """
        seed = check_seed(seed)
        self._check_open("set_seed()")
        with self._held():
            for index in range(self.num_workers):
                # Set before the call, because the worker may be replaced while others are seeded.
                self._setups[index].seed = seed, static_seed
                self._pool.slots[index].begun = ()
                call = (methodcaller("set_seed", seed, static_seed),)
                seed = self._call({index: call})[index]
        return seed

    def number_environments(self, first: int) -> int:
        """Gives the environments of all workers the indices with which ``reset_kwargs`` is called.

        Args:
            first: index of the first environment.

        Returns:
            The number of environments.
        """
        self._first_env, count = first, 0
        with self._held():
            for index, setup in enumerate(self._setups):
                setup.first_env = first + count
                call = (methodcaller("number_environments", setup.first_env),)
                count += self._call({index: call})[index]
        return count

    @override
    def map_fn(
        self,
        method_name: str,
        list_of_args: Sequence[Sequence[Any]] | None = None,
        list_of_kwargs: Sequence[dict[str, Any]] | None = None,
    ) -> list[Any]:
        """Calls the method at path ``method_name`` of each worker's collector.

        Args:
            method_name: path of the method, for example ``"env.close"``.
            list_of_args: positional arguments for each worker.
            list_of_kwargs: keyword arguments for each worker.

        Returns:
            The result of each worker.

        Raises:
            ValueError: if a list does not have exactly one entry for each worker.
        """
        count = self.num_workers
        args = [()] * count if list_of_args is None else list(list_of_args)
        kwargs = [{}] * count if list_of_kwargs is None else list(list_of_kwargs)
        for given in (args, kwargs):
            if len(given) != count:
                raise ValueError(f"Expected {count} argument entries, got {len(given)}")
        self._check_open("map_fn()")
        if self._is_of_buffer(method_name):
            return super().map_fn(method_name, args, kwargs)
        calls = [(method_name, *own) for own in zip(args, kwargs, strict=True)]
        return self._each(call_path, calls)

    @override
    def cascade_execute(self, attr_path: str, *args: Any, **kwargs: Any) -> Any:
        """Calls the method at ``attr_path``, or returns the attribute if it is not callable.

        Only the workers have environments, so a path that begins with ``env`` leads to those of
        all workers. For other parts of the workers, such as their copies of the policy, use
        :meth:`map_fn`.

        Returns:
            The result; if the path begins with ``env``, a list with the result of each worker.

        Raises:
            ValueError: if arguments are given for an attribute that is not callable.
        """
        if first_name(attr_path) != "env":
            return super().cascade_execute(attr_path, *args, **kwargs)
        return self._all(methodcaller("cascade_execute", attr_path, *args, **kwargs))

    def worker_policy_versions(self) -> dict[int, int | str | None]:
        """Asks each worker for the version of its policy, once it has finished its batch.

        Returns:
            The version of each worker, by its number; None if versions are not tracked.
        """
        self._check_open("worker_policy_versions()")
        if self._version is None:
            return dict.fromkeys(range(self.num_workers))
        return dict(enumerate(self.get_distant_attr("policy_version")))

    @property
    def env(self) -> WorkerEnv:
        """The environment of the first worker; see :class:`WorkerEnv`."""
        self._check_open("env")
        return WorkerEnv(self._ask_first)

    def _ask_first(self, function: Callable[..., Any], *arguments: Any) -> Any:
        (answer,) = self._each(function, [arguments])
        return answer

    def getattr_policy(self, attr: str) -> Any:
        """Returns the attribute of the first worker's policy at path ``attr``."""
        return self._each(methodcaller("getattr_policy", attr), [()])[0]

    def getattr_env(self, attr: str) -> Any:
        """Returns the attribute of the first worker's environment at path ``attr``."""
        return self._each(methodcaller("getattr_env", attr), [()])[0]

    @property
    def policy_device(self) -> tuple[torch.device | None, ...]:  # type: ignore[override]
        """Device of each worker's policy; None if the policy stays where it was."""
        return tuple(setup.devices.policy for setup in self._setups)

    @property
    def env_device(self) -> tuple[torch.device | None, ...]:  # type: ignore[override]
        """Device of each worker's environment; None for no particular device."""
        return tuple(setup.devices.env for setup in self._setups)

    @property
    def storing_device(self) -> tuple[torch.device | None, ...]:  # type: ignore[override]
        """Device of each worker's batches; None for no particular device."""
        return tuple(setup.devices.storing for setup in self._setups)

    def rollout(self) -> Any:
        """Raises ``NotImplementedError``: a collector with workers has no ``rollout()``."""
        raise NotImplementedError("a collector with workers has no rollout(): use next()")

    def frames_per_batch_worker(self, worker_idx: int | None = None) -> int:
        """Returns the number of frames in a request to a worker (by default, the first worker)."""
        return self._setups[worker_idx or 0].frames

    def fake_tensordict(self) -> Any:
        """Returns a batch of zeros with the layout of a delivered batch."""
        fakes = [fake.clear_device_() for fake in self._all(worker.fake)]
        alone = self._whole is not None or not self.sync
        version = None if self._version is None else self._version.version
        batch = self._assembler.combine(fakes[:1] if alone else fakes, version)
        return self._fake(batch[0] if alone else batch)

    # --- statistics

    @override
    def stats(self, workers: View = "aggregate") -> dict[str, Any]:
        """Returns statistics of the collector, as a flat dictionary.

        Besides the statistics of every collector, the dictionary contains:

        - ``workers`` and ``workers_alive``, the numbers of all workers and of living ones.
        - ``restarts``, the number of times that workers were replaced.
        - ``worker_frames``, the sum of ``worker_0/frames``, ``worker_1/frames`` and so on.
        - ``env_time_share``, the environment's share of the loop's time.
        - ``batches_held``, the number of batches that are still referred to, and
          ``memory_bytes``, the memory of these batches and of spare blocks.
        - ``schedule``, which is ``"synchronous"``, ``"prefetch"`` or ``"asynchronous"``.
        - For asynchronous collectors, with ``preemptive_threshold`` below 1 and with ``prefetch``,
          ``policy_lag_mean``, ``policy_lag_max``, and the number of frames with each lag, as
          ``policy_lag_0``, ``policy_lag_1`` and so on. The lag of a batch is the number of weight
          updates that were sent to its worker between the beginning of the batch and its delivery.
          Frames of random actions are left out.
        - With ``on_env_error="restart"``, ``env_restarts``, the number of times that an
          environment was rebuilt.

        The statistics of each worker are ``frames``, ``batches``, ``alive``, ``restarts``, and the
        other statistics of a ``Collector``. The numbers of delivered frames and batches include
        those of workers that were replaced. A worker sends its statistics with each batch, so the
        call doesn't wait for workers.

        Args:
            workers: ``"aggregate"`` for all workers together, ``"per_worker"`` for each worker
                (``worker_0/frames``, …), or ``"both"``.

        Raises:
            ValueError: if ``workers`` has another value.
        """
        return super().stats(workers)

    @override
    def _per_worker(self) -> dict[str, Any]:
        together = summary(self._pool.slots)
        facts = {name: together[name] for name in ("workers", "workers_alive")}
        for slot in self._pool.slots:
            one = slot.stats()
            # A worker that is being added has no batches yet.
            if slot.index < len(self._scheduler.frames):
                one["requested_frames_per_batch"] = self._scheduler.frames[slot.index]
            version = self._acknowledged(slot)
            if isinstance(version, int):
                one["policy_version"] = version
            facts |= {f"worker_{slot.index}/{name}": value for name, value in one.items()}
        return facts

    @override
    def _aggregate(self) -> dict[str, Any]:
        pools = self._assembler.pools
        facts = super()._aggregate() | summary(self._pool.slots)
        facts["batches_held"] = sum(pool.leased for pool in pools)
        facts["memory_bytes"] = sum(pool.nbytes for pool in pools)
        ahead = "prefetch" if self.config.prefetch else "synchronous"
        facts["schedule"] = ahead if self.sync else "asynchronous"
        runs_ahead = not self.sync or self.config.prefetch or self._batches_at_once > 1
        if runs_ahead or self.config.preempts:
            facts |= self._lags.stats()
        if self.config.on_env_error == "restart":
            facts.setdefault("env_restarts", 0)
        return facts

    @override
    def _connect_tracer(self) -> None:
        if "_scheduler" not in vars(self):
            return
        tracer, scheduler = self._tracer, self._scheduler
        drawn = tracer if isinstance(tracer, WorkerTracer) else None
        scheduler.on_wait = None if drawn is None else drawn.waited
        scheduler.samples_steps = drawn is not None and drawn.samples_steps
        for slot in self._pool.slots:
            slot.lane = None if drawn is None else drawn.lane(slot.index)

    @override
    def _counters(self) -> dict[str, float]:
        found = super()._counters()
        if "_assembler" in vars(self):
            found["policy lag"] = self._lags.last
            pools = self._assembler.pools
            found["batches held"] = sum(pool.leased for pool in pools)
            found["memory"] = sum(pool.nbytes for pool in pools)
        return found

    @override
    def _worker_shares(self) -> dict[str, Any]:
        return shares_of([slot.times for slot in self._pool.slots])

    @override
    def _pop_waited(self) -> float:
        before, self._waited = self._waited, self._scheduler.waited
        return self._waited - before

    @property
    @override
    def _batches_ready(self) -> int:
        return self._scheduler.batches_ready

    @property
    @override
    def _queue_depth(self) -> int:
        return sum(len(slot.pending) for slot in self._pool.slots)

    # --- hooks, profiles

    @property
    def pre_collect_hook(self) -> Any:
        """Function that each worker calls before it collects a batch."""
        return self._setups.hooks["pre_collect_hook"]

    @pre_collect_hook.setter
    def pre_collect_hook(self, hook: Any) -> None:
        self._set_hook("pre_collect_hook", hook)

    @property
    def post_collect_hook(self) -> Any:
        """Function that each worker calls with each batch that it has collected."""
        return self._setups.hooks["post_collect_hook"]

    @post_collect_hook.setter
    def post_collect_hook(self, hook: Any) -> None:
        self._set_hook("post_collect_hook", hook)

    def _set_hook(self, name: str, hook: Any) -> None:
        hooks = self._setups.hooks
        first = name not in hooks
        if not first:
            self._all(setattr, name, hook)
        hooks[name] = hook

    @override
    def _begin_profile(self, config: ProfileConfig) -> None:
        options = {field.name: getattr(config, field.name) for field in fields(config)}
        self._all(methodcaller("enable_profile", **options))

    @override
    def disable_profile(self) -> None:
        self._all(methodcaller("disable_profile"))
        self._profile_config = None

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_workers={self.num_workers}, "
            f"frames_per_batch={self.__dict__.get('requested_frames_per_batch')}, "
            f"total_frames={self.config.total_frames})"
        )


class WorkerEnv:
    """The environment of a worker, as far as it can be used from the process of the driver.

    Attributes are copies, and methods are called in the worker, which answers once it has finished
    its batch. Each access is a message to the worker.

    Args:
        ask: function that calls a function with the worker's collector, and returns its result.
    """

    def __init__(self, ask: Callable[..., Any]) -> None:
        self._ask = ask

    def __getattr__(self, name: str) -> Any:
        # The object itself may be copied and shown without a message.
        if name.startswith("__") or name == "_ask":  # not set yet in a copy
            raise AttributeError(name)
        is_method, value = self._ask(_look_up, name)
        return partial(self._call, name) if is_method else value

    def _call(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return self._ask(_call_env, name, args, kwargs)

    def __repr__(self) -> str:
        return str(self._ask(_show_env))


def _look_up(collector: Any, name: str) -> tuple[bool, Any]:
    """Returns an attribute of the environment; for a method, which can't be sent, None."""
    found = getattr(collector.env, name)
    is_method = isroutine(found) or isinstance(found, partial)
    return is_method, None if is_method else found


def _call_env(collector: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return getattr(collector.env, name)(*args, **kwargs)


def _show_env(collector: Any) -> str:
    return repr(collector.env)


def _seeded(
    chosen: Sequence[bool], kwargs: Mapping[str, Any]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields each worker's number and reset arguments; a given seed differs between workers."""
    own = dict(kwargs)
    for index in range(len(chosen)):
        yield index, dict(own)
        if own.get("seed") is not None:
            own["seed"] = derive(own["seed"], "worker", index)
