"""Several environments, each in its own process, stepped in parallel as one batch."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from typing_extensions import override

from trawl.backends.process import START_METHODS
from trawl.envs.base import TensorDictEnv
from trawl.envs.masks import choices
from trawl.envs.parallel_area import AUTORESET, RESET, TERMINATED, TRUNCATED, Area, AreaPlan
from trawl.envs.parallel_crew import Crew
from trawl.envs.parallel_worker import Facts
from trawl.envs.seeding import check_seed, next_seed
from trawl.envs.serial import arguments_of, check_alike, factories_of
from trawl.envs.spaces import Array
from trawl.envs.types import EnvKwargs, EnvSources
from trawl.keys import DONE_KEYS, Key, as_key, nested, show_key
from trawl.tensordicts import new_tensordict

Mask = NDArray[np.bool_]


class ParallelEnv(TensorDictEnv):
    """Batch of environments, each in its own process.

    With equal seeds it returns the same data as :class:`~trawl.envs.SerialEnv`. Processes pay off
    if a step of one environment takes longer than waking a process (about twenty microseconds),
    and if there are enough CPU cores.

    Actions, observations, rewards and flags lie in shared memory. In a collector, the step that
    ends an episode also resets the environment. Environments without a fixed layout, and
    TorchRL's, exchange messages instead, which is slower.

    Args:
        num_workers: number of environments, and of processes.
        create_env_fn: function that makes one environment, called in its process, or a sequence
            of ``num_workers`` functions. A Gymnasium id or an environment's class works as well.
            A function may return any environment that a collector accepts. Functions that the
            process can't import (lambdas, closures, all of ``__main__``) are sent by value.
        create_env_kwargs: keyword arguments for ``create_env_fn``: one mapping for all
            environments, or a sequence with one mapping for each.
        device: device of the returned TensorDicts; with None, their tensors are on the CPU and
            they have no device.
        start_method: ``"forkserver"`` forks the processes from a server that has imported the
            modules they need; ``"spawn"`` starts a fresh interpreter for each, which takes
            seconds.

    Raises:
        TypeError: if the environments can't be made.
        ValueError: if a sequence does not have ``num_workers`` entries, or the environments'
            specs differ.
        WorkerError: if a process raised an exception, here or in a later call; the error is also
            of that exception's type.
        WorkerDied: if a process died, here or in a later call.

    Example:
        >>> from trawl.envs import ParallelEnv
        >>> env = ParallelEnv(2, "Pendulum-v1")
        >>> env.rollout(5).batch_size
        torch.Size([2, 5])
        >>> env.close()
    """

    def __init__(
        self,
        num_workers: int,
        create_env_fn: EnvSources,
        *,
        create_env_kwargs: EnvKwargs | None = None,
        device: torch.device | str | None = None,
        start_method: Literal["forkserver", "spawn"] = "forkserver",
    ) -> None:
        factories = factories_of(num_workers, create_env_fn)
        arguments = arguments_of(num_workers, create_env_kwargs)
        if start_method not in START_METHODS:
            raise ValueError(f"start_method must be among {START_METHODS}, but is {start_method!r}")
        self.device = None if device is None else torch.device(device)
        self.is_closed = False
        self.num_workers = num_workers
        self._crew = Crew(list(zip(factories, arguments, strict=True)), start_method)
        self._finalizer = weakref.finalize(self, self._crew.close)
        facts = self._crew.facts
        try:
            check_alike(facts)
            self._first: Facts = facts[0]
            self.batch_size = torch.Size([num_workers, *facts[0].batch_size])
            place = self.device or "cpu"
            self.full_observation_spec = (
                facts[0].full_observation_spec.expand(num_workers).to(place)
            )
            self.full_action_spec = facts[0].full_action_spec.expand(num_workers).to(place)
            #: Memory shared with the processes; None if steps are exchanged as messages.
            self.area: Area | None = None
            if self.fixed_layout:
                self.area = self._crew.attach(self._plan())
                self._bind(self.area)
        except BaseException:
            self._finalizer()
            raise
        self._spends = any(facts.spends for facts in self._crew.facts)
        self._acted = [
            (key, as_key(key), self.full_action_spec[key].shape) for key in self.action_keys
        ]
        self._eager = False
        # Flags of the last step, if it also reset environments, until their observations are read.
        self._told: Array | None = None
        self._spent: Tensor | None = None
        # Action masks by process, if steps are exchanged as messages.
        self._masks: dict[int, Array | None] = {}

    def _plan(self) -> AreaPlan:
        batch = len(self.batch_size)
        observed, acted = (
            {as_key(key): (tuple(leaf.shape[batch:]), leaf.dtype) for key, leaf in leaves}
            for leaves in (
                self.full_observation_spec.items(True, True),
                self.full_action_spec.items(True, True),
            )
        )
        sizes = choices(self.action_spec_unbatched) if len(acted) == 1 else None
        return AreaPlan(
            self.num_workers, self.batch_size[1:].numel(), observed, acted, sum(sizes or ())
        )

    def _bind(self, area: Area) -> None:
        """Prepares views of the shared memory in the shapes of TensorDict entries."""
        self._observed, self._begun = (
            {key: array.reshape(*self.batch_size, *array.shape[1:]) for key, array in found.items()}
            for found in (area.observed, area.begun)
        )
        self._rewards, self._flags = (
            array.reshape(*self.batch_size, 1) for array in (area.rewards, area.flags)
        )
        self._no_flags = np.zeros(self._flags.shape, np.bool_)
        self._nothing = self._no_flags.tobytes()

    @property
    def name(self) -> str:
        """Names of the environments, without repetitions."""
        return " ".join(dict.fromkeys(facts.name for facts in self._crew.facts))

    @property
    def fixed_layout(self) -> bool:
        """True if all actions and observations have a fixed shape and dtype."""
        return all(facts.fixed for facts in self._crew.facts)

    @property
    def action_spec_unbatched(self) -> Any:
        """The action spec of one environment of the batch."""
        return self._first.action_spec_unbatched

    def set_seed(self, seed: int, static_seed: bool = False) -> int:
        """Seeds the next reset of each environment, each with a seed derived from the last.

        Returns:
            The seed for another environment (the same if ``static_seed``).
        """
        seed = check_seed(seed)
        for index in range(self.num_workers):
            (seed,) = self._crew.call({index: ("seed", seed, static_seed)}).values()
        return seed

    @override
    def close(self, *, raise_if_closed: bool = True) -> None:
        if self.is_closed:
            if raise_if_closed:
                raise RuntimeError("the environments are closed already")
            return
        self.is_closed = True
        self._finalizer.detach()
        for failed in self._crew.close():
            raise failed.failure.error(f"environment {failed.worker.index}")

    @property
    @override
    def parts(self) -> list[Any]:
        return [self]

    @property
    @override
    def vectors(self) -> list[Any]:
        """Stand-ins for the processes' vector environments that can't restart on demand."""
        return [
            SimpleNamespace(can_restart=False, env=type(name, (), {})())
            for facts in self._crew.facts
            for name in facts.cannot_restart
        ]

    @override
    def autoreset_mask(self) -> Tensor | None:
        if not self._spends:
            return None
        return (
            torch.zeros(self.batch_size, dtype=torch.bool) if self._spent is None else self._spent
        )

    @override
    def action_mask(self) -> NDArray[Any] | None:
        if self.area is None:
            masks = [self._masks.get(index) for index in range(self.num_workers)]
            found = [mask for mask in masks if mask is not None]
            return np.concatenate(found) if len(found) == self.num_workers else None
        return self.area.masks if self.area.masked.any() else None

    # --- for collectors, which read and write the shared memory themselves

    def begin(self, mask: Mask | None, **kwargs: Any) -> None:
        """Resets environments, and leaves their observations in the shared memory.

        Args:
            mask: environments to reset, ``(environments,)``; None for all.
            **kwargs: ``seed`` and ``options``, as ``gymnasium.Env.reset`` takes them.
        """
        self._call_reset("begin", mask, kwargs)

    def take_actions_as(self, dtypes: Mapping[Key, np.dtype[Any]]) -> None:
        """Sets the dtypes of the actions in the shared memory from now on."""
        assert self.area is not None
        if self.area.action_dtypes != dtypes:
            self._crew.call_all("retype", {key: dtype.str for key, dtype in dtypes.items()})
            self.area.take_actions_as(dtypes)

    def advance(self, eager: bool = True) -> None:
        """Takes a step with the actions in the shared memory, and leaves the results there.

        Args:
            eager: True if environments are also reset in the step that ends their episode.
        """
        self._crew.step(eager)

    def settle(self) -> None:
        """Waits for the processes to finish a step that was interrupted here, if there is one."""
        if self._crew.unsettled:
            self._crew.settle()

    # --- for other callers

    def _call_reset(self, name: str, mask: Mask | None, kwargs: dict[str, Any]) -> dict[int, Any]:
        calls: dict[int, tuple[Any, ...]] = {}
        for index in range(self.num_workers):
            part = None if mask is None else mask.reshape(self.num_workers, -1)[index]
            if part is None or part.any():
                calls[index] = (name, part, dict(kwargs))
            if kwargs.get("seed") is not None:
                # With one seed for all, the environments would give equal episodes.
                kwargs["seed"] = next_seed(kwargs["seed"])
        return self._crew.call(calls)

    def _reset(self, mask: Tensor | None, **kwargs: Any) -> TensorDict:
        rows = None if mask is None else mask.cpu().numpy().ravel()
        if self.area is None:
            found = self._call_reset("reset", rows, kwargs)
            self._masks.update({index: mask for index, (_, mask) in found.items()})
            fake = (self._first.fake, None)
            results = [found.get(index, fake)[0] for index in range(self.num_workers)]
            return self._joined(results, list(self.full_observation_spec.keys()))
        told, self._told = self._told, None
        if told is None or rows is None or kwargs or (rows & (told.ravel() & RESET == 0)).any():
            self.begin(rows, **kwargs)
        return self._made(self._copied(self._begun))

    def _step(self, tensordict: TensorDictBase) -> TensorDict:
        if self.area is None:
            return self._step_by_messages(tensordict)
        return self._made(self._results(tensordict))

    def _results(self, tensordict: TensorDictBase) -> dict[str, Any]:
        """Takes a step; returns the entries of the TensorDict for ``"next"``."""
        self._put_actions(tensordict)
        self._told = None
        self._crew.step(self._eager)
        told = self._flags.copy()
        if self._eager:
            self._told = told
        if self._spends:
            self._spent = torch.from_numpy(told & AUTORESET != 0).view(self.batch_size)
        if told.tobytes() == self._nothing:
            flags = dict.fromkeys(DONE_KEYS, self._no_flags)
        else:
            flags = {
                "done": told & (TERMINATED | TRUNCATED) != 0,
                "terminated": told & TERMINATED != 0,
                "truncated": told & TRUNCATED != 0,
            }
        return self._copied(self._observed, reward=self._rewards, **flags)

    @override
    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        if self.area is None:
            return super().step(tensordict)
        following = self._placed(self._step(tensordict))
        preset = tensordict.get("next", None)
        tensordict.set("next", following if preset is None else preset.update(following))
        return tensordict

    @override
    def step_and_maybe_reset(
        self, tensordict: TensorDictBase
    ) -> tuple[TensorDictBase, TensorDictBase]:
        simple = self.area is not None and self.device is None and tensordict.device is None
        # The processes reset environments within the step, and _reset() only reads the results.
        self._eager = True
        try:
            if not simple or "next" in tensordict.keys():  # noqa: SIM118
                return super().step_and_maybe_reset(tensordict)
            # The steps of the base class, without its lookups.
            results = self._results(tensordict)
            tensordict.set("next", self._made(results))
            del results["reward"]
            root = self._made(results)
            if self._told is not None and self._told.tobytes() != self._nothing:
                self._restart(root)
            return tensordict, root
        finally:
            self._eager, self._told = False, None

    def _put_actions(self, tensordict: TensorDictBase) -> None:
        assert self.area is not None
        values: dict[Key, Array] = {}
        for name, key, expected in self._acted:
            value = tensordict.get(name, None)
            if value is None:
                present = ", ".join(sorted(map(str, tensordict.keys())))
                raise KeyError(f"no action {show_key(key)} in the TensorDict, which has {present}")
            if value.shape != expected:
                raise ValueError(
                    f"action {show_key(key)} has shape {tuple(value.shape)}, but the "
                    f"environment's action spec says {tuple(expected)}"
                )
            # numpy has no bfloat16.
            value = value.float() if value.dtype is torch.bfloat16 else value
            values[key] = value.numpy(force=True)
        self.settle()
        self.take_actions_as({key: value.dtype for key, value in values.items()})
        for key, target in self.area.actions.items():
            target[...] = values[key].reshape(target.shape)

    def _copied(self, arrays: dict[Key, Array], **more: Array) -> dict[str, Any]:
        """Returns the arrays as tensors, copied because the next step overwrites them."""
        found = nested({key: torch.from_numpy(array.copy()) for key, array in arrays.items()})
        for name, array in more.items():
            found[name] = torch.from_numpy(array.copy())
        return found

    def _made(self, values: dict[str, Any]) -> TensorDict:
        result: TensorDict = new_tensordict(values, self.batch_size)
        return result

    def _step_by_messages(self, tensordict: TensorDictBase) -> TensorDict:
        keys = self.action_keys
        calls = {
            index: ("step", tensordict[index].select(*keys)) for index in range(self.num_workers)
        }
        results = self._crew.call(calls)
        rows, spent, masks = zip(*(results[index] for index in sorted(results)), strict=True)
        self._masks = dict(enumerate(masks))
        nothing = torch.zeros(self.batch_size[1:], dtype=torch.bool)
        self._spent = torch.stack([nothing if part is None else part for part in spent])
        return self._joined(list(rows), list(rows[0].keys()))

    def _joined(self, rows: list[TensorDictBase], keys: list[Any]) -> TensorDict:
        result: TensorDict = TensorDict.maybe_dense_stack([row.select(*keys) for row in rows], 0)
        return result

    def __reduce__(self) -> Any:
        raise TypeError(
            "a ParallelEnv can't be copied or sent to another process; give a function that makes "
            "it there"
        )

    def __repr__(self) -> str:
        return f"ParallelEnv({self.num_workers} x {self._first.text})"
