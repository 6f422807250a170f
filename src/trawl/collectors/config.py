"""Every option of a collector: its default, its meaning, its check."""

from __future__ import annotations

import math
import operator
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from difflib import get_close_matches
from inspect import getattr_static, isfunction
from numbers import Real
from typing import Any, Literal, TypeAlias

import torch
from tensordict.nn import InteractionType
from torch import nn

from trawl.collectors.types import (
    SupportsStop,
    SupportsVersion,
    SupportsWrite,
    Switch,
)
from trawl.envs.types import DeviceLike, EnvKwargs, is_list
from trawl.weight_update.scheme import WeightSyncScheme

# Pyright takes the members of InteractionType for strings.
ExplorationKind: TypeAlias = (
    InteractionType | Literal["mode", "median", "mean", "random", "deterministic"]
)
TRAJ_FORMATS = ("padded", "cat")


@dataclass(frozen=True, kw_only=True)
class CollectorConfig:
    """The options of a collector, checked.

    Attributes:
        frames_per_batch: frames in a batch, over all environments of the collector. Rounded up
            to a multiple of the number of environments.
        total_frames: frames after which iteration ends; met by whole batches, so that up to a
            batch more may come. -1: endless.
        policy_factory: makes the policy; instead of ``policy``.
        device: fills those of the next three that are not given.
        storing_device: where batches are delivered.
        env_device: where the environment's TensorDicts are.
        policy_device: where the policy runs. A policy that is elsewhere is copied there.
        create_env_kwargs: arguments for the function that makes the environment.
        max_frames_per_traj: steps after which an episode is truncated. None, 0, -1: never.
        init_random_frames: frames collected with random actions, before the policy acts.
        reset_at_each_iter: resets the environment before each batch.
        reset_when_done: only True; episodes that end are followed by others.
        postproc: called with each batch; its result is delivered.
        split_trajs: delivers trajectories, padded, ``(trajectories, longest)``, with a mask.
        track_traj_ids: writes ``("collector", "traj_ids")``.
        trajs_per_batch: delivers batches of so many whole trajectories, in the order in which
            they end; ``frames_per_batch`` are collected at a time for that. What is not whole at
            the end, or less than a batch, is dropped. None: batches of frames.
        traj_format: how these are put together: ``"padded"`` is ``(trajs_per_batch, longest)``
            with zeros at the end, where ``("collector", "mask")`` is False; ``"cat"`` is one
            behind the other, ``(frames,)``. In a replay buffer it is always ``"cat"``.
        trajs_per_write: whole trajectories that the replay buffer is extended by at a time, at
            most. None: all that there are.
        exploration_type: how probabilistic policies act: an ``ExplorationType``, or its name.
        return_same_td: yields the same TensorDict object each time, with new content.
        compact_obs: leaves the observations out of ``"next"``.
        interruptor: an object with ``collection_stopped()``, or a function, asked before each
            step; if true the batch ends early, and rows not filled have trajectory id -1.
        set_truncated: marks the last step of each batch as truncated.
        use_buffers: whether memory of batches that nobody holds is used again (default).
        replay_buffer: anything with ``extend``; batches go there, and iteration yields None.
        sink: where batches are written on disk, as they are delivered or put into the buffer: a
            :class:`~trawl.data.Sink`, or anything with ``write(batch)`` and
            ``close(complete=...)``. The collector closes it as it is shut down.
        extend_buffer: extends the buffer by batches; False adds single steps.
        samples_per_insert: samples that a learner draws, by ``collector.sample``, for each frame
            that ``start()`` collects: collection waits for it. None: it waits for nobody.
        inserts_ahead: frames that may be collected before the learner has sampled for them; None
            for those of ``init_random_frames`` and two batches (of each worker that delivers
            batches of its own).
        trust_policy: uses the policy as it is: a function of a TensorDict.
        compile_policy: compiles the policy; a mapping gives arguments of ``torch.compile``.
        cudagraph_policy: runs the policy as a CUDA graph (policy on a CUDA device).
        no_cuda_sync: changes nothing: a step needs its action, so there is no waiting to leave out.
        auto_register_policy_transforms: whether frames say that they begin an episode
            (``is_init``); None: if the policy reads it.
        track_policy_version: writes ``"policy_version"`` into each frame; a
            :class:`~trawl.collectors.PolicyVersion` to share one.
        weight_updater: a weight updater (deprecated), or what makes one.
        weight_sync_schemes: by model (``"policy"``, or a path, as ``"env.transform[0]"``), the
            schemes by which new weights are sent. Default: what suits the place of the workers.
        weight_recv_schemes: by model, the schemes by which this collector is sent new weights.
        on_env_error: what to do when an environment's ``step`` or its reset at an episode's end
            raises: ``"raise"``, or ``"restart"``, which builds that environment anew from its id
            or function. Its episode ends as truncated, the row of the step that failed is masked
            out, as ``("collector", "mask")`` says, and ``stats()["env_restarts"]`` counts it.
        worker_idx: number of the worker that this collector is, for nested collectors.
        pre_collect_hook: called without arguments before each batch is collected.
        post_collect_hook: called with each batch as it is delivered.
    """

    frames_per_batch: int
    total_frames: int = -1
    policy_factory: Callable[[], Any] | None = None
    device: DeviceLike | None = None
    storing_device: DeviceLike | None = None
    env_device: DeviceLike | None = None
    policy_device: DeviceLike | None = None
    create_env_kwargs: EnvKwargs | None = None
    max_frames_per_traj: int | None = None
    init_random_frames: int | None = None
    reset_at_each_iter: bool = False
    reset_when_done: bool = True
    postproc: Callable[[Any], Any] | None = None
    split_trajs: bool | None = None
    track_traj_ids: bool = True
    trajs_per_batch: int | None = None
    traj_format: Literal["padded", "cat"] | None = None
    trajs_per_write: int | None = None
    exploration_type: ExplorationKind | None = InteractionType.RANDOM
    return_same_td: bool = False
    compact_obs: bool = False
    interruptor: SupportsStop | Callable[[], bool] | None = None
    set_truncated: bool = False
    use_buffers: bool | None = None
    replay_buffer: Any = None
    sink: SupportsWrite | None = None
    extend_buffer: bool = True
    samples_per_insert: float | None = None
    inserts_ahead: int | None = None
    trust_policy: bool | None = None
    compile_policy: Switch | None = None
    cudagraph_policy: Switch | None = None
    no_cuda_sync: bool = False
    auto_register_policy_transforms: bool | None = None
    track_policy_version: bool | SupportsVersion | None = False
    weight_updater: Callable[..., Any] | None = None
    weight_sync_schemes: Mapping[str, WeightSyncScheme] | None = None
    weight_recv_schemes: Mapping[str, WeightSyncScheme] | None = None
    on_env_error: Literal["raise", "restart"] = "raise"
    worker_idx: int | None = None
    pre_collect_hook: Callable[[], Any] | None = None
    post_collect_hook: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        check_switches(self)
        frames = check_number("frames_per_batch", self.frames_per_batch, least=1)
        object.__setattr__(self, "frames_per_batch", frames)
        for name in ("total_frames", "init_random_frames", "max_frames_per_traj"):
            value = _check_count(name, getattr(self, name))
            object.__setattr__(self, name, value)
        object.__setattr__(self, "split_trajs", bool(self.split_trajs))
        if self.total_frames == 0:
            raise ValueError("total_frames must be positive, or -1 for endless, but it is 0")
        if not self.reset_when_done:
            raise ValueError(
                "reset_when_done=False is not possible: an episode that ended is always followed "
                "by another; leave the argument out"
            )
        object.__setattr__(self, "exploration_type", _check_exploration(self.exploration_type))
        if self.on_env_error not in ("raise", "restart"):
            raise ValueError(
                f"on_env_error must be 'raise' or 'restart', but it is {self.on_env_error!r}"
            )
        self._check_instances()
        self._check_callables()
        self._check_mappings()
        self._check_schemes()
        self._check_trajectories()
        self._check_splitting()
        self._check_buffer()
        self._check_sink()
        self._check_flow()

    def _check_instances(self) -> None:
        used = {"replay_buffer": "extend" if self.extend_buffer else "add", "sink": "write"}
        for name, method in {**used, "postproc": "__init__"}.items():
            value = getattr(self, name)
            # A class may do, if its methods need no object.
            if isinstance(value, type) and isfunction(getattr_static(value, method, None)):
                raise TypeError(
                    f"{name} must be an object, but it is the class {value.__name__}: make one, "
                    f"{name}={value.__name__}(...)"
                )

    def _check_callables(self) -> None:
        for name in ("policy_factory", "postproc", "pre_collect_hook", "post_collect_hook"):
            check_callable(name, getattr(self, name))
        if isinstance(self.policy_factory, nn.Module):
            raise TypeError(
                "policy_factory must be a function that makes the policy, but it is a module, "
                f"{type(self.policy_factory).__name__}; give it as policy"
            )
        stop = self.interruptor
        if stop is not None and not (callable(stop) or hasattr(stop, "collection_stopped")):
            raise TypeError(
                "interruptor must be a function, or have a method collection_stopped(), but it "
                f"is {type(stop).__name__}"
            )

    def _check_mappings(self) -> None:
        for name in ("compile_policy", "cudagraph_policy"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (bool, Mapping)):
                raise TypeError(
                    f"{name} must be a bool or a mapping of keyword arguments, but it is "
                    f"{type(value).__name__}: {value!r}"
                )
        check_env_kwargs(self.create_env_kwargs)

    def _check_schemes(self) -> None:
        for name in ("weight_sync_schemes", "weight_recv_schemes"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, Mapping):
                raise TypeError(
                    f"{name} must map models to weight-sync schemes, as {{'policy': scheme}}, but "
                    f"it is {type(value).__name__}: {value!r}"
                )
            for model, scheme in value.items():
                if not isinstance(scheme, WeightSyncScheme):
                    raise TypeError(
                        f"{name}[{model!r}] must be a WeightSyncScheme, but it is "
                        f"{type(scheme).__name__}: {scheme!r}"
                    )
        if self.weight_updater is not None and self.weight_sync_schemes is not None:
            raise TypeError("weight_updater and weight_sync_schemes can't both be given")

    def _check_trajectories(self) -> None:
        for name in ("trajs_per_batch", "trajs_per_write"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, check_number(name, value, least=1))
        if self.traj_format not in (None, *TRAJ_FORMATS):
            raise ValueError(
                f"traj_format must be {' or '.join(map(repr, TRAJ_FORMATS))}, but it is "
                f"{self.traj_format!r}"
            )
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
        """Settles how whole trajectories are delivered."""
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

    def _check_sink(self) -> None:
        for needed in ("write", "close"):
            if self.sink is not None and not callable(getattr(self.sink, needed, None)):
                raise TypeError(
                    f"sink must have a method {needed}(), as trawl.data.MemmapSink has, but "
                    f"{type(self.sink).__name__} has none"
                )

    def _check_flow(self) -> None:
        ratio, ahead = self.samples_per_insert, self.inserts_ahead
        if ratio is not None:
            if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not ratio > 0:
                raise ValueError(
                    f"samples_per_insert must be a number above 0, but it is {ratio!r}"
                )
            if self.replay_buffer is None:
                raise ValueError("samples_per_insert needs a replay_buffer that is sampled from")
        if ahead is not None:
            object.__setattr__(self, "inserts_ahead", check_number("inserts_ahead", ahead, 1))
            if ratio is None:
                raise ValueError("inserts_ahead needs samples_per_insert")

    @property
    def endless(self) -> bool:
        """Whether there is no limit on frames."""
        return self.total_frames < 0


def option_names() -> list[str]:
    """The names of all options."""
    return [field.name for field in fields(CollectorConfig)]


def did_you_mean(unknown: Iterable[str], known: Iterable[str]) -> str:
    """The options whose names are close to unknown ones, as the end of a message."""
    close = [get_close_matches(name, sorted(known), 1) for name in unknown]
    found = [name for names in close for name in names]
    return f"; did you mean {', '.join(found)}?" if found else ""


_muted = False


@contextmanager
def muted() -> Iterator[None]:
    """Within it nothing is warned of: a worker's options are its parent's, which warned already."""
    global _muted
    before, _muted = _muted, True
    try:
        yield
    finally:
        _muted = before


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns, unless the user has turned such warnings off by ``RL_WARNINGS=0``."""
    if not _muted and os.environ.get("RL_WARNINGS", "1") != "0":
        warnings.warn(message, category, stacklevel=_user_level())


def _user_level() -> int:
    """How far up the first frame outside of this package is."""
    import sys

    level, frame = 1, sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("trawl."):
        if frame.f_back is None:
            break
        level, frame = level + 1, frame.f_back
    return level


def check_switches(options: Any) -> None:
    """Raises a ``TypeError`` for a text in the place of True or False: any would mean True."""
    for field in fields(options):
        value = getattr(options, field.name)
        if isinstance(value, str) and field.type in ("bool", "bool | None"):
            raise TypeError(f"{field.name} must be True or False, but it is the text {value!r}")


def check_callable(name: str, value: Any) -> None:
    """Raises a ``TypeError`` for an argument that is neither None nor a function."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be callable, but it is {type(value).__name__}: {value!r}")


def check_env_kwargs(kwargs: Any) -> None:
    """Raises a ``TypeError`` for what can be no arguments of environments."""
    for value in kwargs if is_list(kwargs) else [kwargs]:
        if value is not None and not isinstance(value, Mapping):
            raise TypeError(
                "create_env_kwargs must be a mapping of keyword arguments, or a list of such, "
                f"but there is {type(value).__name__}: {value!r}"
            )


def check_number(name: str, value: Any, least: int) -> int:
    """The value as an integer; ``1e6`` is one as well."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name} must be an integer, but it is {type(value).__name__}: {value!r}")
    number = operator.index(value)
    if number < least:
        raise ValueError(f"{name} must be at least {least}, but it is {number}")
    return number


def _check_exploration(value: Any) -> InteractionType:
    """The value as an ``ExplorationType``; its name is one as well."""
    kind = value or InteractionType.RANDOM
    with suppress(ValueError):
        if isinstance(kind, str):
            return InteractionType(kind)
    raise TypeError(
        "exploration_type must be an ExplorationType, as trawl.ExplorationType.MEAN (or None for "
        f"RANDOM), but it is {value!r}"
    )


def check_seconds(name: str, value: Any) -> float:
    """The value as a number of seconds."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number of seconds, but it is {value!r}")
    return float(value)


def _check_count(name: str, value: int | None) -> int:
    """Returns a number of frames; without a limit 0, and -1 for ``total_frames``."""
    if name == "total_frames":
        endless = value is None or value == math.inf
        return -1 if endless else check_number(name, value, least=-1)
    number = -1 if value is None else check_number(name, value, least=-1)
    return max(number, 0)


@dataclass(frozen=True)
class Devices:
    """Where things are, after the rules of :func:`resolve_devices`."""

    policy: torch.device | None
    env: torch.device | None
    storing: torch.device | None


def resolve_devices(config: CollectorConfig, own: Mapping[str, Any] | None = None) -> Devices:
    """``device`` fills what is not given; batches are stored where both others are the same.

    Args:
        config: the options.
        own: options that take the place of those.
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
    # There is one CPU: what torch calls "cpu:0" is where tensors on "cpu" are.
    return torch.device("cpu") if device.type == "cpu" else device
