"""Every option of a collector: its default, its meaning, its check."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from tensordict.nn import InteractionType
from torch import nn

from trawl.checks import check_number
from trawl.collectors.options import (
    DRIVER,
    EACH,
    LIST,
    WHOLE,
    at_least,
    check_callable,
    check_env_kwargs,
    check_instance,
    check_switch,
    one_of,
    option,
    validate,
)
from trawl.collectors.types import SupportsStop, SupportsVersion, SupportsWrite, Switch
from trawl.envs.types import DeviceLike, EnvKwargs
from trawl.weight_update.scheme import WeightSyncScheme

# Pyright takes the members of InteractionType for strings.
ExplorationKind: TypeAlias = (
    InteractionType | Literal["mode", "median", "mean", "random", "deterministic"]
)


def _total(_: str, value: Any) -> int:
    """Returns a number of frames; -1 for no limit."""
    endless = value is None or value == math.inf
    number = -1 if endless else check_number("total_frames", value, least=-1)
    if number == 0:
        raise ValueError("total_frames must be positive, or -1 for endless, but it is 0")
    return number


def _count(name: str, value: Any) -> int:
    """Returns a number of frames; 0 for none."""
    return 0 if value is None else max(check_number(name, value, least=-1), 0)


def _policy_factory(name: str, value: Any) -> Any:
    if isinstance(value, nn.Module):
        raise TypeError(
            f"{name} must be a function that makes the policy, but it is a module, "
            f"{type(value).__name__}; give it as policy"
        )
    return check_callable(name, value)


def _reset_when_done(name: str, value: Any) -> Any:
    if not value:
        raise ValueError(
            f"{name}=False is not possible: an episode that ended is always followed by another; "
            "leave the argument out"
        )
    return value


def _postproc(name: str, value: Any) -> Any:
    return check_callable(name, check_instance(name, value, "__init__"))


def _interruptor(name: str, value: Any) -> Any:
    if value is not None and not (callable(value) or hasattr(value, "collection_stopped")):
        raise TypeError(
            f"{name} must be a function, or have a method collection_stopped(), but it is "
            f"{type(value).__name__}"
        )
    return value


def _sink(name: str, value: Any) -> Any:
    check_instance(name, value, "write")
    for needed in ("write", "close"):
        if value is not None and not callable(getattr(value, needed, None)):
            raise TypeError(
                f"{name} must have a method {needed}(), as trawl.data.MemmapSink has, but "
                f"{type(value).__name__} has none"
            )
    return value


def _ratio(name: str, value: Any) -> Any:
    number = not isinstance(value, bool) and isinstance(value, (int, float))
    if value is not None and not (number and value > 0):
        raise ValueError(f"{name} must be a number above 0, but it is {value!r}")
    return value


def _schemes(name: str, value: Any) -> Any:
    if value is not None and not isinstance(value, Mapping):
        raise TypeError(
            f"{name} must map models to weight-sync schemes, as {{'policy': scheme}}, but it is "
            f"{type(value).__name__}: {value!r}"
        )
    for model, scheme in (value or {}).items():
        if not isinstance(scheme, WeightSyncScheme):
            raise TypeError(
                f"{name}[{model!r}] must be a WeightSyncScheme, but it is "
                f"{type(scheme).__name__}: {scheme!r}"
            )
    return value


def _exploration(name: str, value: Any) -> InteractionType:
    """Returns the value as an ``ExplorationType``; its name is accepted, and None for random."""
    kind = value or InteractionType.RANDOM
    with suppress(ValueError):
        if isinstance(kind, str):
            return InteractionType(kind)
    raise TypeError(
        f"{name} must be an ExplorationType, as trawl.ExplorationType.MEAN (or None for RANDOM), "
        f"but it is {value!r}"
    )


@dataclass(frozen=True, kw_only=True)
class CollectorConfig:
    """The options of a collector, checked.

    Attributes:
        frames_per_batch: frames in a batch, over all environments of the collector. Rounded up
            to a multiple of the number of environments.
        total_frames: frames after which iteration ends. The last batch is not cut short, so up to
            a batch more may be delivered. -1: no limit.
        policy_factory: function that makes the policy, in place of ``policy``.
        device: default of the next three devices.
        storing_device: device on which batches are delivered.
        env_device: device of the environment's TensorDicts.
        policy_device: device on which the policy runs. A policy on another device is copied.
        create_env_kwargs: keyword arguments for the function that makes the environment.
        max_frames_per_traj: steps after which an episode is truncated. None, 0 or -1: never.
        init_random_frames: frames collected with random actions, before the policy acts.
        reset_at_each_iter: True to reset the environment before each batch.
        reset_when_done: must be True: when an episode ends, another one begins.
        postproc: function called with each batch; its result is delivered instead.
        split_trajs: True to split each batch into trajectories, padded to the shape
            ``(trajectories, longest)``, with a mask.
        track_traj_ids: True to write ``("collector", "traj_ids")``.
        trajs_per_batch: number of whole trajectories in a batch. They are delivered in the order
            in which they end, and ``frames_per_batch`` are collected at a time until there are
            enough. At the end, trajectories that are not whole, or too few for a batch, are
            dropped. None: batches of frames.
        traj_format: layout of batches of whole trajectories. ``"padded"``: shape
            ``(trajs_per_batch, longest)``, with zeros at the end, where ``("collector", "mask")``
            is False. ``"cat"``: one trajectory after the other, shape ``(frames,)``. In a replay
            buffer it is always ``"cat"``.
        trajs_per_write: maximum number of whole trajectories by which the replay buffer is
            extended at a time. None: no maximum.
        exploration_type: how probabilistic policies act: an ``ExplorationType``, or its name.
        return_same_td: True to yield the same TensorDict object each time, with new content.
        compact_obs: True to leave the observations out of ``"next"``.
        interruptor: an object with ``collection_stopped()``, or a function, called before each
            step but the first. If it returns True, the batch ends early, and rows that were not
            filled have trajectory id -1.
        set_truncated: True to mark the last step of each batch as truncated.
        use_buffers: True (the default) to reuse the memory of a batch when nothing refers to the
            batch any more.
        replay_buffer: any object with ``extend`` (with ``extend_buffer=False``: ``add``). Batches
            are written there, and iteration yields None.
        sink: writes batches to disk as they are delivered or put into the buffer: a
            :class:`~trawl.data.Sink`, or any object with ``write(batch)`` and
            ``close(complete=...)``. The collector closes it on shutdown.
        extend_buffer: True to extend the replay buffer by batches; False to add single steps.
        samples_per_insert: samples that the learner draws with ``collector.sample`` for each frame
            that ``start()`` collects. Collection waits while it is ahead. None: it never waits.
        inserts_ahead: frames that may be collected before the learner has sampled for them. None:
            ``init_random_frames`` plus two batches (of each worker, if each delivers batches of
            its own).
        trust_policy: True to use the policy as it is, as a function of a TensorDict, without
            looking at its signature.
        compile_policy: True to compile the policy, or a mapping of arguments for
            ``torch.compile``.
        cudagraph_policy: True to run the policy as a CUDA graph, or a mapping of arguments for
            ``CudaGraphModule``. The policy must be on a CUDA device.
        no_cuda_sync: has no effect: a step needs its action, so there is no wait to leave out.
        auto_register_policy_transforms: True to mark the frames that begin an episode
            (``is_init``). None: only if the policy reads that entry.
        track_policy_version: True to write ``"policy_version"`` into each frame, or the
            :class:`~trawl.collectors.PolicyVersion` that counts the versions.
        weight_updater: a weight updater (deprecated), or a class or function that makes one.
        weight_sync_schemes: the schemes that send new weights, by model (``"policy"``, or a path
            such as ``"env.transform[0]"``). Default: a scheme that suits where the workers run.
        weight_recv_schemes: the schemes from which this collector receives new weights, by model.
        on_env_error: reaction to an exception from an environment's ``step``, or from its reset at
            the end of an episode. ``"raise"`` raises it. ``"restart"`` builds that environment
            again from its id or function: the episode ends as truncated, the row of the failed
            step is masked out in ``("collector", "mask")``, and ``stats()["env_restarts"]``
            counts the restart.
        worker_idx: number of the worker that this collector belongs to, for nested collectors.
        pre_collect_hook: function called without arguments before each batch is collected.
        post_collect_hook: function called with each batch as it is delivered.
    """

    frames_per_batch: int = field(
        metadata={"check": partial(check_number, least=1), "tags": (WHOLE,)}
    )
    total_frames: int = option(-1, _total, DRIVER, WHOLE)
    policy_factory: Callable[[], Any] | None = option(None, _policy_factory, EACH, LIST)
    device: DeviceLike | None = option(None, None, EACH, LIST)
    storing_device: DeviceLike | None = option(None, None, DRIVER, LIST)
    env_device: DeviceLike | None = option(None, None, EACH, LIST)
    policy_device: DeviceLike | None = option(None, None, EACH, LIST)
    create_env_kwargs: EnvKwargs | None = option(None, check_env_kwargs, EACH, LIST)
    max_frames_per_traj: int | None = option(None, _count, EACH)
    init_random_frames: int | None = option(None, _count, DRIVER)
    reset_at_each_iter: bool = option(False, None, EACH)
    reset_when_done: bool = option(True, _reset_when_done)
    postproc: Callable[[Any], Any] | None = option(None, _postproc, DRIVER)
    split_trajs: bool | None = option(None, lambda _, value: bool(value), DRIVER)
    track_traj_ids: bool = True
    trajs_per_batch: int | None = option(None, at_least(1), DRIVER, WHOLE)
    traj_format: Literal["padded", "cat"] | None = option(
        None, one_of("padded", "cat", None), DRIVER, WHOLE
    )
    trajs_per_write: int | None = option(None, at_least(1), DRIVER, WHOLE)
    exploration_type: ExplorationKind | None = option(InteractionType.RANDOM, _exploration, EACH)
    return_same_td: bool = False
    compact_obs: bool = False
    interruptor: SupportsStop | Callable[[], bool] | None = option(None, _interruptor)
    set_truncated: bool = False
    use_buffers: bool | None = None
    replay_buffer: Any = option(None, None, DRIVER)
    sink: SupportsWrite | None = option(None, _sink, DRIVER)
    extend_buffer: bool = option(True, None, DRIVER)
    samples_per_insert: float | None = option(None, _ratio, DRIVER)
    inserts_ahead: int | None = option(None, at_least(1), DRIVER)
    trust_policy: bool | None = option(None, None, EACH)
    compile_policy: Switch | None = option(None, check_switch, EACH)
    cudagraph_policy: Switch | None = option(None, check_switch, EACH)
    no_cuda_sync: bool = option(False, None, EACH)
    auto_register_policy_transforms: bool | None = None
    track_policy_version: bool | SupportsVersion | None = False
    weight_updater: Callable[..., Any] | None = option(None, None, DRIVER, WHOLE)
    weight_sync_schemes: Mapping[str, WeightSyncScheme] | None = option(
        None, _schemes, DRIVER, WHOLE
    )
    weight_recv_schemes: Mapping[str, WeightSyncScheme] | None = option(
        None, _schemes, DRIVER, WHOLE
    )
    on_env_error: Literal["raise", "restart"] = option("raise", one_of("raise", "restart"), EACH)
    worker_idx: int | None = None
    pre_collect_hook: Callable[[], Any] | None = option(None, check_callable, EACH)
    post_collect_hook: Callable[[Any], Any] | None = option(None, check_callable, EACH)

    def __post_init__(self) -> None:
        validate(self)
        if self.weight_updater is not None and self.weight_sync_schemes is not None:
            raise TypeError("weight_updater and weight_sync_schemes can't both be given")
        self._check_trajectories()
        self._check_splitting()
        self._check_buffer()
        self._check_flow()

    def _check_trajectories(self) -> None:
        count = self.trajs_per_batch
        if count is None:
            for name in ("traj_format", "trajs_per_write"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} is for whole trajectories: it needs "
                        "trajs_per_batch, the number of them in a batch"
                    )
            return
        if not self.track_traj_ids:
            raise ValueError(
                f"trajs_per_batch={count} needs the trajectories' ids, but track_traj_ids=False"
            )
        if self.split_trajs:
            raise ValueError(
                f"trajs_per_batch={count} and split_trajs=True can't both be given: the first "
                "delivers whole trajectories, the second cuts each batch where it ends"
            )
        if self.set_truncated and not self.reset_at_each_iter:
            raise ValueError(
                f"trajs_per_batch={count} delivers whole trajectories, but set_truncated=True "
                "marks them as ended while they go on; with reset_at_each_iter=True they do end"
            )
        self._check_traj_format()

    def _check_traj_format(self) -> None:
        """Checks how whole trajectories are delivered, and sets the default format."""
        if self.replay_buffer is not None:
            return
        if self.trajs_per_write is not None:
            raise ValueError(
                f"trajs_per_write={self.trajs_per_write} is for a replay buffer, but none is given"
            )
        if self.traj_format is None:
            warn(
                "trajs_per_batch without traj_format gives 'padded' batches; TorchRL is to change "
                "that to 'cat'. Say which: traj_format='padded' or traj_format='cat'",
                FutureWarning,
            )
            object.__setattr__(self, "traj_format", "padded")

    def _check_splitting(self) -> None:
        if not self.split_trajs:
            return
        if not self.track_traj_ids:
            raise ValueError("split_trajs=True requires track_traj_ids=True")
        warn(
            "split_trajs=True pads trajectories with zeros up to the longest of each batch; "
            "learners that can use ('collector', 'traj_ids') instead need no padding"
        )

    def _check_buffer(self) -> None:
        buffer = self.replay_buffer
        if buffer is None:
            return
        needed = "extend" if self.extend_buffer else "add"
        check_instance("replay_buffer", buffer, needed)
        if not callable(getattr(buffer, needed, None)):
            raise TypeError(
                f"replay_buffer must have a method {needed}(), but {type(buffer).__name__} has none"
            )
        refused: dict[str, Any] = {
            "return_same_td": self.return_same_td,
            "use_buffers": self.use_buffers,
        }
        if not self.extend_buffer:
            names = ("postproc", "split_trajs", "trajs_per_batch")
            refused |= {name: getattr(self, name) for name in names}
        for name, value in refused.items():
            if value:
                how = "" if self.extend_buffer else " and extend_buffer=False"
                raise TypeError(f"{name} can't be used with replay_buffer{how}")

        ndim = getattr(getattr(buffer, "_storage", None), "ndim", 1)
        if self.trajs_per_batch is not None and ndim != 1:
            raise ValueError(
                "whole trajectories are written one behind the other, in one dimension, but the "
                f"storage of replay_buffer has ndim={ndim}: make it without ndim"
            )

    def _check_flow(self) -> None:
        if self.samples_per_insert is not None and self.replay_buffer is None:
            raise ValueError("samples_per_insert needs a replay_buffer that is sampled from")
        if self.inserts_ahead is not None and self.samples_per_insert is None:
            raise ValueError("inserts_ahead needs samples_per_insert")

    @property
    def endless(self) -> bool:
        """True if there is no limit on frames."""
        return self.total_frames < 0


def option_names() -> list[str]:
    """Returns the names of all options."""
    return [one.name for one in fields(CollectorConfig)]


_muted = False


@contextmanager
def muted() -> Iterator[None]:
    """Suppresses warnings by :func:`warn` within a ``with`` block.

    A worker has the options of its driver, which has warned of them already.
    """
    global _muted
    before, _muted = _muted, True
    try:
        yield
    finally:
        _muted = before


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns the user, unless warnings are muted or turned off by ``RL_WARNINGS=0``."""
    if not _muted and os.environ.get("RL_WARNINGS", "1") != "0":
        warnings.warn(message, category, stacklevel=_user_level())


def _user_level() -> int:
    """Returns the ``stacklevel`` of the first frame outside this package."""
    import sys

    level, frame = 1, sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("trawl."):
        if frame.f_back is None:
            break
        level, frame = level + 1, frame.f_back
    return level


@dataclass(frozen=True)
class Devices:
    """Devices of a collector, resolved by :func:`resolve_devices`."""

    policy: torch.device | None
    env: torch.device | None
    storing: torch.device | None


def resolve_devices(config: CollectorConfig, own: Mapping[str, Any] | None = None) -> Devices:
    """Resolves the devices of policy, environment and stored batches.

    ``device`` is the default of all three. If that leaves no storing device, and policy and
    environment are on the same device, batches are stored there.

    Args:
        config: the options.
        own: options that take precedence over those.
    """

    def given(name: str) -> torch.device | None:
        return _device(name, (own or {}).get(name, getattr(config, name)))

    general = given("device")
    policy = given("policy_device") or general
    env = given("env_device") or general
    storing = given("storing_device") or general
    if storing is None and env is not None and env == policy:
        storing = env
    return Devices(policy, env, storing)


def _device(name: str, value: torch.device | str | int | None) -> torch.device | None:
    if value is None:
        return None
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name} {value!r} is no device: {error}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{name} is {value!r}, but torch finds no CUDA device")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", 0)
    # torch takes "cpu:0" and "cpu" for different devices, but there is only one CPU.
    return torch.device("cpu") if device.type == "cpu" else device
