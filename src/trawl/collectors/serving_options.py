"""The arguments of an ``AsyncBatchedCollector``, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal

from trawl.checks import check_number, check_seconds, did_you_mean, seconds_above_zero
from trawl.collectors.config import CollectorConfig, PolicyLike
from trawl.collectors.local.first_ready import VERSION, pool_of
from trawl.collectors.options import Check, at_least, option, validate
from trawl.devices import check_device
from trawl.envs.batches.batched import arguments_of
from trawl.envs.batches.serial import build_env
from trawl.envs.build import is_env, refuse_policy
from trawl.envs.processes.affinity import Affinity, check_cores
from trawl.envs.processes.parallel import ParallelEnv
from trawl.envs.transforms import PolicyVersion
from trawl.envs.types import is_list
from trawl.keys import as_key
from trawl.rollout.ready.serving import Batching, ServingOptions
from trawl.supported import READY_POOL, Trait, check

_MOST, _LEAST, _PATIENCE = 64, 1, 0.01
#: Options for acting, if the user gives none.
DEFAULT_SERVING = ServingOptions(Batching(_LEAST, _MOST, _PATIENCE, None), VERSION)
_NO_LIST = (
    "create_env_fn must be a list with a function for each environment, or make an EnvPool "
    "or ALE environment with a batch_size below num_envs"
)
# Options of a Collector that it does not get as they are, or that have no effect.
_OWN = frozenset(
    {"device", "create_env_kwargs", "exact_frames", "track_policy_version", "weight_sync_schemes"}
)


def _no_choice(*accepted: Any) -> Check:
    """Returns a check of an option that chooses among TorchRL's transports, and does nothing."""

    def check(name: str, value: Any) -> Any:
        why = (
            "environments and policy share memory, and frames are delivered without messages. "
            "Leave it out"
        )
        if not (value is None or isinstance(value, (str, int))):
            raise TypeError(f"{name} can't be {type(value).__name__}: {why}")
        if value not in accepted:
            shown = " or ".join(repr(one) for one in accepted if one is not None)
            raise ValueError(f"{name} must be {shown}, but it is {value!r}: {why}")
        return value

    return check


def _cores(name: str, value: Any) -> Any:
    return value if value is None else check_cores(value, name)


def _version_key(name: str, value: Any) -> Any:
    if value is not None and not isinstance(value, (str, tuple)):
        raise TypeError(f"{name} must be a key or None, but it is {value!r}")
    return value


def _patience(name: str, value: Any) -> float | None:
    found = None if value is None else check_seconds(name, value)
    if found is not None and not found >= 0:
        raise ValueError(f"{name} must be a number of seconds from 0 on, but it is {found!r}")
    return found


def _service(name: str, value: Any) -> Any:
    if value not in (None, "thread", "process"):
        raise ValueError(
            f"server_config must have {name}='thread' or 'process', but it is {value!r}"
        )
    return value


def _config(**known: Check | None) -> Check:
    """Returns a check of a mapping, or an object with attributes, which becomes a dictionary.

    Args:
        **known: its entries, which are those of TorchRL's configurations, with their checks.
    """

    def check(name: str, config: Any) -> dict[str, Any] | None:
        if config is None:
            return None
        if isinstance(config, Mapping):
            unknown = sorted(set(config) - known.keys())
            if unknown:
                raise ValueError(
                    f"{name} has unknown entries: {', '.join(unknown)}"
                    f"{did_you_mean(unknown, known)}"
                )
        elif not any(hasattr(config, entry) for entry in known):
            raise TypeError(
                f"{name} must be a mapping, or an object with attributes such as "
                f"{next(iter(known))}, but it is {config!r}"
            )
        found = {entry: entry_of(config, entry) for entry in known}
        return {
            entry: value if (one := known[entry]) is None else one(entry, value)
            for entry, value in found.items()
            if value is not None
        }

    return check


@dataclass(frozen=True, kw_only=True)
class AsyncBatchedArguments(CollectorConfig):
    """The arguments of an :class:`~trawl.collectors.AsyncBatchedCollector`.

    Attributes:
        frames_per_batch: number of frames in a batch.
        total_frames: number of frames after which iteration ends; a negative number: no limit. The
            last batch has exactly the frames that are left.
        exact_frames: has no effect, because the number of frames is always exact.
        max_batch_size: maximum number of environments for which the policy acts at once; None: 64.
        min_batch_size: number of ready environments that the policy waits for; None: 1.
        server_timeout: seconds after the first ready environment, after which the policy acts even
            if fewer than ``min_batch_size`` are ready; None: 0.01.
        transport: has no effect, because environments and policy share memory. ``None``,
            ``"auto"`` and ``"driver"`` are accepted.
        device: device of the policy; short for ``device_config`` with only this device.
        backend: default for ``env_backend``.
        env_backend: place of the environments: ``"multiprocessing"`` (also None), processes, or
            ``"threading"``, threads of this process.
        env_exchange: has no effect. ``"auto"`` and ``"shm"`` are accepted.
        envs_per_worker: environments in each process, which become ready together.
        transition_chunk_size: has no effect. ``"auto"`` and 1 are accepted.
        policy_backend: place of the policy: ``"threading"`` (also None), the thread that collects,
            or ``"multiprocessing"``, the inference process, which collects ahead while the learner
            works. The constructor then returns an
            :class:`~trawl.collectors.async_batched.InferenceProcessCollector`.
        yield_completed_trajectories: True to deliver whole trajectories, one at a time, instead of
            batches.
        weight_sync: scheme through which the policy gets new weights.
        weight_sync_model_id: name of the model that ``weight_sync`` updates.
        verbose: has no effect; ``server_stats()`` has the figures.
        create_env_kwargs: keyword arguments for the functions: one mapping for all, or a list.
        worker_affinity: CPU cores of each process, as in :class:`~trawl.envs.ParallelEnv`.
        driver_affinity: CPU cores on which the thread that collects runs while it collects.
        server_config: mapping, or object with attributes, that sets ``max_batch_size``,
            ``min_batch_size``, ``timeout`` and ``static_batch_size``. With the latter, the policy
            always gets a batch of this size, as CUDA graphs need it.
        device_config: mapping, or object with attributes, that sets ``policy_device``,
            ``env_device`` and ``storing_device``.
        policy_version: version of the policy before the first update.
        policy_version_key: key of the policy version; None to leave it out.
        track_policy_version: the :class:`~trawl.collectors.PolicyVersion` that counts the versions.
            True and False have no effect, because versions are always counted.
        on_env_error: reaction to an exception in an environment, and to the death of its process.
            ``"raise"`` raises an error. ``"restart"`` makes the environment anew while the others
            go on. Its last frame is then marked as truncated, if it is in the same batch.
        worker_timeout: seconds that a process may take for a step; None: no limit. If it takes
            longer, it is killed, and counts as dead.
        max_policy_lag: maximum number of weight updates by which a frame may be behind when it is
            delivered; None: no limit. To keep to the limit, environments wait, but no frame is
            thrown away.
        cudagraph_policy: whether and how the policy is run as a CUDA graph, as in a ``Collector``.
            A graph has a fixed batch size: ``static_batch_size`` in ``server_config``, or else the
            largest batch that there can be.
    """

    create_env_fn: Any = field(kw_only=False)
    policy: PolicyLike | None = None
    exact_frames: bool = True
    max_batch_size: int | None = option(None, at_least(1))
    min_batch_size: int | None = option(None, at_least(1))
    server_timeout: float | None = option(None, _patience)
    transport: Literal["auto", "driver"] | None = option(None, _no_choice(None, "auto", "driver"))
    backend: Literal["threading", "multiprocessing"] | None = None
    env_backend: Literal["threading", "multiprocessing"] | None = None
    env_exchange: Literal["shm", "auto"] = option("auto", _no_choice("auto", "shm"))
    envs_per_worker: int = option(1, partial(check_number, least=1))
    transition_chunk_size: int | Literal["auto"] = option("auto", _no_choice("auto", 1))
    policy_backend: Literal["threading", "multiprocessing"] | None = None
    yield_completed_trajectories: bool = False
    weight_sync: Any = None
    weight_sync_model_id: str = "policy"
    verbose: bool = False
    worker_affinity: Affinity | None = None
    driver_affinity: Sequence[int] | None = option(None, _cores)
    server_config: Any = option(
        None,
        _config(
            max_batch_size=at_least(1),
            static_batch_size=at_least(1),
            min_batch_size=at_least(1),
            timeout=lambda _, value: _patience("the timeout in server_config", value),
            service_backend=_service,
            collect_stats=None,
            stats_window_size=None,
            max_inflight_per_env=None,
        ),
    )
    device_config: Any = option(
        None,
        _config(policy_device=None, output_device=None, env_device=None, storing_device=None),
    )
    policy_version: int = option(0, partial(check_number, least=0))
    policy_version_key: str | tuple[str, ...] | None = option("policy_version", _version_key)
    worker_timeout: float | None = option(None, seconds_above_zero)
    max_policy_lag: int | None = option(None, at_least(0))

    def __post_init__(self) -> None:
        if not is_list(self.create_env_fn):
            check_pool(self.create_env_fn)
            self._check_decided_by_pool()
        elif not self.create_env_fn:
            raise ValueError("create_env_fn must not be an empty list")
        else:
            count = len(self.create_env_fn)
            arguments_of(count, self.create_env_kwargs, "the number of environments is")
        validate(self)
        options = {**vars(self), "workers": self.in_process}
        check(options)
        check(options, {Trait.READY}, "AsyncBatchedCollector")
        if self.policy is not None and self.policy_factory is not None:
            raise TypeError("policy and policy_factory can't both be given")
        if self.policy is None and self.policy_factory is None:
            raise TypeError(
                "a policy is missing: pass policy or policy_factory; policy=RandomPolicy() takes "
                "random actions"
            )
        if self.envs_per_worker > (most := self.batching.most):
            raise ValueError(
                f"envs_per_worker={self.envs_per_worker} is larger than max_batch_size={most}, but "
                "the environments of a process become ready together"
            )

    def _check_decided_by_pool(self) -> None:
        for one in fields(self):
            given = getattr(self, one.name)
            if one.name in READY_POOL.names and given != one.default:
                raise READY_POOL.error(one.name, given)

    @property
    def batching(self) -> Batching:
        """Sizes of the batches for which the policy acts; a pool decides them itself.

        Raises:
            ValueError: if sizes contradict each other, or the number of environments.
        """
        if not is_list(self.create_env_fn):
            return DEFAULT_SERVING.batching
        count, config = len(self.create_env_fn), self.server_config
        names = ("max_batch_size", "min_batch_size", "server_timeout")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        key = timeout = "server_timeout"
        if config is not None:
            if given:
                raise ValueError(
                    f"server_config and {', '.join(given)} can't both be given: set "
                    f"{', '.join(given)} in server_config"
                )
            given, key, timeout = config, "timeout", "the timeout in server_config"
        size, least = given.get("static_batch_size"), given.get("min_batch_size", _LEAST)
        most, patience = given.get("max_batch_size", size or _MOST), given.get(key, _PATIENCE)
        if least > min(most, count):
            what = f"max_batch_size={most}" if least > most else f"the {count} environments"
            raise ValueError(f"min_batch_size={least} is larger than {what}")
        if least > 1 and patience == 0:
            raise ValueError(
                f"min_batch_size={least} has no effect if {timeout} is 0: give the number of "
                "seconds to wait, or math.inf"
            )
        if size is not None and size < most:
            raise ValueError(f"static_batch_size={size} is smaller than max_batch_size={most}")
        if self.cudagraph_policy and size is None:
            # A graph has a fixed batch size.
            size = min(most, count)
        return Batching(least, most, patience, size)

    @property
    def in_process(self) -> bool:
        """True if the policy has a process of its own."""
        return has_own_process(self.policy_backend, self.server_config)

    @property
    def serving(self) -> ServingOptions:
        """Options for acting in environments that are ready."""
        key = self.policy_version_key
        return ServingOptions(
            self.batching,
            None if key is None else as_key(key),
            self.max_policy_lag,
            self.driver_affinity,
        )

    def env_factory(self) -> Callable[[], Any]:
        """Returns a function that makes the environments."""
        if not is_list(self.create_env_fn):
            return partial(make_pool, self.create_env_fn, self.create_env_kwargs)
        threads = (self.env_backend or self.backend) == "threading"
        return partial(
            ParallelEnv,
            len(self.create_env_fn),
            list(self.create_env_fn),
            create_env_kwargs=self.create_env_kwargs,
            envs_per_worker=self.envs_per_worker,
            backend="thread" if threads else "process",
            worker_affinity=self.worker_affinity,
            worker_timeout=self.worker_timeout,
        )

    def collector_options(self) -> dict[str, Any]:
        """Returns the options of a :class:`~trawl.collectors.Collector`."""
        found = {
            one.name: given
            for one in fields(CollectorConfig)
            if one.name not in _OWN and (given := getattr(self, one.name)) is not one.default
        }
        version: Any = self.track_policy_version
        first = self.policy_version
        if version is None or isinstance(version, bool):
            version = PolicyVersion()
            version.version = first
        elif first:
            raise ValueError(
                f"policy_version={first} and track_policy_version can't both be given: set the "
                "version of the object that counts them"
            )
        found["track_policy_version"] = version
        schemes = self.weight_sync_schemes
        if self.weight_sync is not None:
            schemes = {**(schemes or {}), self.weight_sync_model_id: self.weight_sync}
        if schemes is not None:
            found["weight_sync_schemes"] = schemes
        if self.yield_completed_trajectories:
            found["trajs_per_batch"] = 1
            found["traj_format"] = "cat" if self.replay_buffer is None else None
        devices = device_options(self.device, self.device_config)
        if twice := sorted(devices.keys() & found):
            other = "device" if self.device_config is None else "device_config"
            raise ValueError(f"{other} and {', '.join(twice)} can't both be given: leave one out")
        return {**devices, **found}


def check_pool(source: Any) -> None:
    """Checks an argument that is not a list of environments.

    Raises:
        TypeError: if it can't be a pool, or a function that makes one.
    """
    if isinstance(source, str) or not (is_env(source) or callable(source)):
        raise TypeError(f"{_NO_LIST}, but it is {source!r}")
    refuse_policy(source)


def make_pool(source: Any, kwargs: Any) -> Any:
    """Makes the environment around a pool.

    Raises:
        TypeError: if the source makes another environment.
    """
    env = build_env(source, kwargs)
    if pool_of(env) is None:
        env.close()
        raise TypeError(f"{_NO_LIST}, but it made {env!r}")
    return env


def entry_of(config: Any, name: str) -> Any:
    """Returns an entry of a mapping, or an attribute of an object; None if there is none."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def has_own_process(policy_backend: Any, config: Any) -> bool:
    """Returns True if these options give the policy a process of its own."""
    service = entry_of(config, "service_backend")
    return bool(policy_backend == "multiprocessing" or service == "process")


def device_options(device: Any, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a collector's options for devices.

    Raises:
        ValueError: if both arguments are given, or if ``device`` is not a device of this machine.
    """
    if config is None:
        return {} if device is None else {"policy_device": check_device("device", device)}
    if device is not None:
        raise ValueError("device and device_config can't both be given")
    return {name: value for name, value in config.items() if name != "output_device"}
