"""Control of workers between two batches: seeds, resets, hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from operator import attrgetter, methodcaller
from typing import Any

import numpy as np
from typing_extensions import override

from trawl.collectors.watch.profile import ProfileConfig, Profiling
from trawl.collectors.workers.access import WorkerCalls, WorkersAccess
from trawl.collectors.workers.pool import WorkerPool
from trawl.collectors.workers.setups import WorkerSetups
from trawl.collectors.workers.weights import WorkersWeights
from trawl.envs.seeding import check_seed, derive


class WorkersControl:
    """Controls the workers of a collector.

    Workers answer between two batches. Seeds and hooks are kept for workers that replace dead ones.

    Args:
        collector: the collector, to whose parts the object refers.
        setups: setup of each worker.
        pool: the workers.
        calls: calls functions with the workers' collectors.

    Attributes:
        first_env: index of the first environment, with which ``reset_kwargs`` is called.
    """

    def __init__(
        self, collector: Any, setups: WorkerSetups, pool: WorkerPool, calls: WorkerCalls
    ) -> None:
        self.first_env = 0
        self._setups, self._pool, self._calls = setups, pool, calls
        hooks = ("pre_collect_hook", "post_collect_hook")
        setups.hooks |= {name: getattr(collector.config, name) for name in hooks}
        self._lifetime, self._background = collector.parts.lifetime, collector.parts.background
        self._weights: WorkersWeights = collector.parts.weights

    def reset(self, /, reset_idx: Sequence[bool] | None = None, **kwargs: Any) -> None:
        """Begins new trajectories.

        Args:
            reset_idx: for each worker, True to reset its environments; None to reset all.
            **kwargs: arguments of the environments' reset.

        Raises:
            TypeError: if an entry is not a bool.
            ValueError: if there is not exactly one entry for each worker.
        """
        self._lifetime.check_open("reset()")
        count = len(self._pool.slots)
        chosen = [True] * count if reset_idx is None else list(reset_idx)
        if not all(isinstance(asked, (bool, np.bool_)) for asked in chosen):
            raise TypeError(
                f"reset_idx must have a bool for each worker, but it is {chosen}: for example, "
                f"{[True] * count} resets all workers"
            )
        if len(chosen) != count:
            raise ValueError(f"reset_idx has {len(chosen)} entries, but there are {count} workers")
        with self._background.held():
            self._calls.call(
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
        self._lifetime.check_open("set_seed()")
        with self._background.held():
            for index in range(len(self._pool.slots)):
                # Set before the call, because the worker may be replaced while others are seeded.
                self._setups[index].seed = seed, static_seed
                self._pool.slots[index].begun = ()
                call = (methodcaller("set_seed", seed, static_seed),)
                seed = self._calls.call({index: call})[index]
        return seed

    def number_environments(self, first: int) -> int:
        """Gives the environments of all workers the indices with which ``reset_kwargs`` is called.

        Args:
            first: index of the first environment.

        Returns:
            The number of environments.
        """
        self.first_env, count = first, 0
        with self._background.held():
            for index, setup in enumerate(self._setups):
                setup.first_env = first + count
                call = (methodcaller("number_environments", setup.first_env),)
                count += self._calls.call({index: call})[index]
        return count

    def worker_policy_versions(self) -> dict[int, int | str | None]:
        """Asks each worker for the version of its policy, once it has finished its batch.

        Returns:
            The version of each worker, by its number; None if versions are not tracked.
        """
        self._lifetime.check_open("worker_policy_versions()")
        if self._weights.tracker is None:
            return dict.fromkeys(range(len(self._pool.slots)))
        return dict(enumerate(self._calls.all(attrgetter("policy_version"))))

    def frames_per_batch_worker(self, worker_idx: int | None = None) -> int:
        """Returns the number of frames in a request to a worker (by default, the first worker)."""
        return self._setups[worker_idx or 0].frames

    def hook(self, name: str) -> Any:
        """Returns a hook of the workers' collectors."""
        return self._setups.hooks[name]

    def set_hook(self, name: str, hook: Any) -> None:
        """Sets a hook of the workers' collectors."""
        self._calls.all(setattr, name, hook)
        self._setups.hooks[name] = hook


class WorkersProfiling(Profiling):
    """The profiles of a collector's workers.

    Args:
        check: function that raises an exception if it is too late to begin a profile.
        access: access to the workers' collectors.
    """

    def __init__(self, check: Callable[[], None], access: WorkersAccess) -> None:
        super().__init__(0, check)
        self._access = access

    @override
    def _begin(self, config: ProfileConfig) -> None:
        options = {field.name: getattr(config, field.name) for field in fields(config)}
        self._access.calls.all(methodcaller("enable_profile", **options))

    @override
    def disable_profile(self) -> None:
        self._access.calls.all(methodcaller("disable_profile"))
        self.config = None


def _seeded(
    chosen: Sequence[bool], kwargs: Mapping[str, Any]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields each worker's number and reset arguments; a given seed differs between workers."""
    own = dict(kwargs)
    for index in range(len(chosen)):
        yield index, dict(own)
        if own.get("seed") is not None:
            own["seed"] = derive(own["seed"], "worker", index)
