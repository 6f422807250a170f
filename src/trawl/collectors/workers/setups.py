"""Setup of each worker: everything that the worker and its replacements are made from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trawl.backends.base import Backend
from trawl.backends.processes.payload import Package, Shared, unsendable
from trawl.checks import check_frames
from trawl.collectors.config import CollectorConfig, muted, warn
from trawl.collectors.dispatch import DIRECT
from trawl.collectors.driver.delivery import BatchDelivery
from trawl.collectors.local.placing import Devices, resolve_devices
from trawl.collectors.multi_config import NOT_HERE, MultiConfig
from trawl.collectors.options import DRIVER, LIST, tagged
from trawl.collectors.single import Collector
from trawl.collectors.workers.requests import WorkerReady
from trawl.collectors.workers.service import WorkerProgram
from trawl.envs.batches.batched import check_env_kwargs
from trawl.envs.build import is_env
from trawl.envs.transforms import PolicyVersion
from trawl.envs.types import is_list
from trawl.rollout.policy.kinds import tensors_of
from trawl.rollout.trial import trial

# Each worker that is added later has its own range of 2**40 trajectory ids.
_ID_BITS = 40


@dataclass
class WorkerSetup:
    """Everything that a worker is made from, and the state that a replacement begins with.

    Attributes:
        create_env_fn: source of the worker's environment.
        policy: the worker's policy; None if the worker makes one.
        package: everything that the worker gets from the user's program, as it was when its first
            process was started; None until then, and if there is no policy that may change since.
        hooks: the hooks in the package.
        options: the worker's own values of options that were given as lists.
        devices: the worker's devices.
        frames: number of frames in one request to the worker.
        kwargs: options that only this worker's collector gets.
        environments: number of copies of the worker's environment.
        seed: the last seed that was set, and whether all environments share it; None if no seed
            was set.
        first_env: index of the worker's first environment, if ``reset_kwargs`` is a function.
        env_state: the last state that was loaded into the worker's environment, or None.
    """

    create_env_fn: Any
    policy: Any
    options: dict[str, Any]
    devices: Devices
    frames: int
    kwargs: dict[str, Any] = field(default_factory=dict)
    environments: int = 1
    seed: tuple[int, bool] | None = None
    first_env: int = 0
    env_state: Any = None
    package: Iterable[Any] | None = None
    hooks: dict[str, Any] = field(default_factory=dict)

    def packed_policy(self) -> Any:
        """Returns a copy of the policy in the package; None if there is none."""
        return None if self.package is None else list(islice(self.package, 2))[1]

    @property
    def policy_device(self) -> torch.device:
        """Device of the policy; by default, the device that the given policy is on."""
        given = next((tensor.device for tensor in tensors_of(self.policy)), torch.device("cpu"))
        return self.devices.policy or given


class WorkerSetups:
    """The setups of all workers, and the options that they share.

    Args:
        sources: source of each worker's environment.
        policy: the policy, or a list of policies.
        options: the user's options. Options that differ from worker to worker are lists.
        here: True if the workers run on this machine.

    Attributes:
        config: the options; ``frames_per_batch`` is the sum of its entries if it was a list.
        given: the options that were given as lists, by name, with a value for each worker.
        policies: the policy of each worker.
        hooks: the hooks of all workers' collectors.

    Raises:
        ValueError: if a list does not have exactly one entry for each worker.
        Exception: any error that :class:`~trawl.collectors.MultiConfig` raises.
    """

    def __init__(
        self, sources: list[Any], policy: Any, options: dict[str, Any], here: bool = True
    ) -> None:
        options = dict(options)
        self._sources, self._here = sources, here
        self.count = len(sources)
        self.policies = self._each("policy", policy)
        self.given: dict[str, list[Any]] = {}
        for name in sorted(tagged(CollectorConfig, LIST)):
            if is_list(options.get(name)):
                self.given[name] = self._each(name, options.pop(name))
        for kwargs in self.given.get("create_env_kwargs", ()):
            check_env_kwargs("create_env_kwargs", kwargs)
        self._frames: list[int] | None = None
        if is_list(options["frames_per_batch"]):
            each = self._each("frames_per_batch", options["frames_per_batch"])
            self._frames = [check_frames("frames_per_batch", value, 1) for value in each]
            options["frames_per_batch"] = sum(self._frames)
        self.config = MultiConfig(**options)
        self.hooks: dict[str, Any] = {}
        self._first = self.count
        self._setups: list[WorkerSetup] = []
        # The policies that workers are made with, where these are not those of the user.
        self._initial: dict[int, Any] = {}

    def _each(self, name: str, value: Any) -> list[Any]:
        if not is_list(value):
            return [value] * self.count
        if len(value) != self.count:
            raise ValueError(f"{name} has {len(value)} entries, but there are {self.count} workers")
        return list(value)

    def __getitem__(self, index: int) -> WorkerSetup:
        return self._setups[index]

    def __iter__(self) -> Iterator[WorkerSetup]:
        return iter(self._setups)

    def _options(self, index: int) -> dict[str, Any]:
        """Returns a worker's values of the options that were given as lists."""
        return {name: values[index] for name, values in self.given.items()}

    def _devices(self, index: int) -> Devices:
        return resolve_devices(self.config, self._options(index), self._here)

    def factory(self, index: int) -> Any:
        """Returns the function that makes a worker's policy, or None if the policy is given."""
        return self._options(index).get("policy_factory", self.config.policy_factory)

    def makes_policy(self, index: int) -> bool:
        """Returns True if a worker makes its policy itself."""
        return self.factory(index) is not None

    def initial_policy(self, index: int) -> Any:
        """Returns the policy to send to a worker; None if the worker makes its policy itself."""
        if self.makes_policy(index):
            return None
        return self._initial.get(index, self.policies[index])

    @property
    def all_modules(self) -> bool:
        """True if each worker's policy is a module."""
        return all(isinstance(policy, nn.Module) for policy in self.policies)

    def make(self, sync: bool, kwargs: list[dict[str, Any]], environments: int) -> None:
        """Makes the setups.

        Args:
            sync: whether all workers contribute to each batch.
            kwargs: for each worker, options that only its own collector gets.
            environments: number of copies of its environment that each worker has.
        """
        devices = [self._devices(i) for i in range(self.count)]
        _warn_of_lazy(self.policies)
        self._setups = [
            WorkerSetup(
                self._sources[i],
                self.policies[i],
                self._options(i),
                devices[i],
                frames,
                kwargs[i],
                environments,
            )
            for i, frames in enumerate(self._frames_of_workers(sync))
        ]

    def _frames_of_workers(self, sync: bool) -> list[int]:
        """Returns the number of frames to request from each worker; warns if it is rounded up."""
        wanted, count = self.config.frames_per_batch, self.count
        if not sync:
            return [wanted] * count
        if self._frames is not None:
            return self._frames
        each = math.ceil(wanted / count)
        if each * count != wanted:
            warn(
                f"frames_per_batch={wanted} is not a multiple of the number of workers, {count}: "
                f"each worker will collect {each} frames, {each * count} in total"
            )
        return [each] * count

    def add(self, source: Any, policy: Any, kwargs: dict[str, Any], environments: int) -> None:
        """Adds a worker with the options of the first worker.

        Args:
            source: source of the worker's environment.
            policy: the worker's policy; None for the first worker's policy.
            kwargs: options that only this worker's collector gets.
            environments: number of copies of the worker's environment.
        """
        first, index = self._setups[0], self.count
        self.count += 1
        self.policies.append(first.policy if policy is None else policy)
        for values in self.given.values():
            values.append(values[0])
        if policy is not None and "policy_factory" in self.given:
            self.given["policy_factory"][index] = None
        options = self._options(index)
        self._initial[index] = first.packed_policy() if policy is None else policy
        self._setups.append(
            WorkerSetup(
                source,
                self.policies[index],
                options,
                self._devices(index),
                first.frames,
                kwargs,
                environments,
            )
        )

    def options(self, index: int) -> dict[str, Any]:
        """Returns the options of a worker's collector."""
        setup, config = self._setups[index], self.config
        left_out = tagged(CollectorConfig, DRIVER) | NOT_HERE
        names = [one.name for one in fields(CollectorConfig) if one.name not in left_out]
        found = {name: setup.options.get(name, getattr(config, name)) for name in names}
        tracked = config.track_policy_version
        kind = getattr(tracked, "version_type", int)
        found["track_policy_version"] = PolicyVersion(kind) if tracked else False
        found["frames_per_batch"] = setup.frames
        found["worker_idx"] = index
        return found | self.hooks | setup.kwargs

    def warn_of_rounding(self, ready: Iterable[WorkerReady]) -> None:
        """Warns if a worker will collect more frames than requested, as its first message shows."""
        for index, (setup, one) in enumerate(zip(self._setups, ready, strict=True)):
            got = one.num_envs * one.steps
            if setup.frames != got:
                warn(
                    f"the {setup.frames} frames of worker {index} are not a multiple of its "
                    f"number of environments, {one.num_envs}: it will collect {got} frames at a "
                    f"time, {one.steps} from each environment"
                )
                return

    def trajectories(self, index: int, restarts: int, next_id: int) -> tuple[int, int]:
        """Returns a worker's first trajectory id, and the difference between successive ids.

        Args:
            index: number of the worker.
            restarts: number of earlier workers in the same slot.
            next_id: last known id of the next trajectory to begin.
        """
        # The ids of the first workers alternate in one range. Each later worker has its own range.
        stride, begin = self._first, index if index < self._first else index << _ID_BITS
        if restarts:
            # The dead worker may have used ids in a batch that was lost, or before it was ready.
            # The replacement skips all of these ids.
            begin = max(next_id, begin) + stride * (self._setups[index].frames + 1)
        return begin, stride


def shared_buffer(buffer: Any, setups: WorkerSetups, delivery: BatchDelivery) -> Shared:
    """Returns a replay buffer in the form that is sent to workers.

    An empty buffer gets its layout first, because it can't be shared without a layout.
    """
    if not getattr(buffer.storage, "initialized", True):
        policy = _copied("policy", setups.initial_policy(0))
        source, options = _copied_envs(setups[0].create_env_fn), setups.options(0)
        with muted(), Collector(source, policy, backend=DIRECT, **options) as one:
            frames = delivery.written(one.fake_tensordict())
        # The buffer's transforms may keep frames, for example to sum their rewards.
        with trial(getattr(buffer, "transform", None)):
            buffer.extend(frames)
        buffer.empty()
    return Shared(buffer)


def _copied_envs(source: Any) -> Any:
    """Returns a source of environments with copies of the environments in it."""
    if is_list(source):
        return [_copied_envs(one) for one in source]
    return _copied("create_env_fn", source) if is_env(source) else source


def _copied(name: str, value: Any) -> Any:
    try:
        (made,) = Package([value])
    except Exception as error:
        raise unsendable(name, "worker 0", error) from error
    return made


def packed_program(backend: Backend, program: WorkerProgram, index: int) -> Iterable[Any]:
    """Returns the program of worker ``index``, as it is now, in the form in which it is sent.

    Raises:
        TypeError: if an argument can't be pickled; the message names the argument.
    """
    try:
        return backend.pack(program.parts, copied=[1])
    except Exception:
        parts = {"policy": program.policy, "create_env_fn": program.create_env_fn}
        for name, value in {**parts, "init_fn": program.init_fn, **program.options}.items():
            _check_sendable(name, index, backend, value)
        raise


def _check_sendable(name: str, index: int, backend: Backend, value: Any) -> None:
    try:
        backend.pack([value], copied=[0] if name == "policy" else [])
    except Exception as error:
        raise unsendable(name, f"worker {index}", error) from error


def _warn_of_lazy(policies: Iterable[Any]) -> None:
    for policy in policies:
        if isinstance(policy, nn.Module) and any(map(is_lazy, policy.parameters())):
            warn(
                f"policy {type(policy).__name__} has parameters without shapes, such as those of "
                "LazyLinear before its first call: each worker draws its own initial values. "
                "Call the policy once, or update the weights before the first batch"
            )
            return
