"""The options of a collector, with their defaults, meanings and checks.

The tags after an option's check, such as ``DRIVER`` (only the driver acts on it) and ``LIST`` (it
may be a list, with an entry for each worker), are those of ``options.py``.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

from tensordict.nn import InteractionType
from torch import nn

from trawl.checks import check_frames
from trawl.collectors.options import (
    DRIVER,
    EACH,
    EVALUATOR,
    LIST,
    TUNED,
    WHOLE,
    WRITER,
    Flag,
    Option,
    at_least,
    check_callable,
    check_instance,
    check_switch,
    option,
    switch_or,
    validate,
)
from trawl.envs.batches.batched import check_env_kwargs
from trawl.envs.frame_stack import FrameStackLike, as_frame_stack
from trawl.envs.reset_kwargs import ResetKwargs, check_reset_kwargs
from trawl.envs.seeding import check_seed
from trawl.envs.types import DeviceLike, EnvKwargs
from trawl.foreign.torchrl import storage_of
from trawl.observe.trace_options import TraceLike, check_trace
from trawl.rollout.normalization import NormalizeObservation, NormalizeOptions, NormalizeReward
from trawl.rollout.policy.random_policy import RandomPolicy
from trawl.supported import STORAGE_FRAMES, check
from trawl.weights.scheme import WeightSyncScheme

#: A TensorDict module, an ``nn.Module`` or a function.
PolicyLike = Callable[..., Any]
#: A bool that turns a function on or off, or keyword arguments with which the function is called.
Switch = bool | Mapping[str, Any]
# Pyright treats the members of InteractionType as strings.
ExplorationKind: TypeAlias = (
    InteractionType | Literal["mode", "median", "mean", "random", "deterministic"]
)


class SupportsWrite(Protocol):
    """A sink, which stores batches on disk."""

    def write(self, batch: Any, /) -> Any:
        """Stores a batch."""

    def close(self, *, complete: bool) -> Any:
        """Finishes the stored data."""


class SupportsStop(Protocol):
    """An interruptor, which can end a batch early."""

    def collection_stopped(self) -> bool:
        """Returns True if the batch should end."""


class SupportsVersion(Protocol):
    """A counter of a policy's versions, such as :class:`~trawl.collectors.PolicyVersion`."""

    @property
    def version(self) -> Any:
        """The current version."""

    def increment_version(self) -> Any:
        """Advances to the next version."""


def _total(name: str, value: Any) -> float:
    """Returns ``total_frames`` as an integer, or infinity if there is no limit."""
    if value is None or value == math.inf:
        return math.inf
    number = check_frames(name, value)
    if number == 0:
        raise ValueError(f"{name} must be positive, or -1 for no limit, but it is 0")
    return math.inf if number < 0 else number


def _count(name: str, value: Any) -> int:
    """Returns the value as a number of frames; None and negative numbers become 0."""
    return 0 if value is None else max(check_frames(name, value), 0)


def _seed(_: str, value: Any) -> int | None:
    return None if value is None else check_seed(value)


def _policy_factory(name: str, value: Any) -> Any:
    if isinstance(value, (nn.Module, RandomPolicy)):
        what = "a module" if isinstance(value, nn.Module) else "a policy"
        raise TypeError(
            f"{name} must be a function that makes the policy, but it is {what}, "
            f"{type(value).__name__}: pass it as policy"
        )
    return check_callable(name, value)


def _reset_when_done(name: str, value: Any) -> Any:
    if not value:
        raise ValueError(
            f"{name}=False is not possible, because an episode that ended is always followed by "
            "another one: leave the argument out"
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
                f"{name} must have a method {needed}(), like trawl.data.MemmapSink, but "
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
            f"{name} must map models to weight-sync schemes, such as {{'policy': scheme}}, but "
            f"it is {type(value).__name__}: {value!r}"
        )
    for model, scheme in (value or {}).items():
        if not isinstance(scheme, WeightSyncScheme):
            raise TypeError(
                f"{name}[{model!r}] must be a WeightSyncScheme, but it is "
                f"{type(scheme).__name__}: {scheme!r}"
            )
    return value


def _true_if_given(value: Any) -> bool | None:
    return True if value else None


def _sampling(name: str, value: Any) -> Any:
    if value not in (None, "per_env"):
        raise ValueError(f"{name} must be 'per_env' or None, but it is {value!r}")
    return value


def _exploration(name: str, value: Any) -> InteractionType:
    """Returns an ``ExplorationType`` from a member or its name; None becomes ``RANDOM``."""
    kind = value or InteractionType.RANDOM
    with suppress(ValueError):
        if isinstance(kind, str):
            return InteractionType(kind)
    raise TypeError(
        f"{name} must be an ExplorationType, such as trawl.ExplorationType.MEAN (or None for "
        f"RANDOM), but it is {value!r}"
    )


@dataclass(frozen=True, kw_only=True)
class CollectorConfig:
    """The options of a collector; the constructor checks them.

    Attributes:
        frames_per_batch: number of frames in a batch, from all environments of the collector
            together. It is rounded up to a multiple of the number of environments.
        total_frames: number of frames after which iteration ends; -1, or any other negative number:
            no limit. The attribute is infinite then. The last batch is not cut short, so the total
            may exceed this number by up to one batch, unless ``exact_frames`` is True.
        exact_frames: True to collect exactly ``total_frames`` frames. The last batch then has only
            the steps that are needed. If its last step has too many frames for the rest, frames of
            some environments are masked out in ``("collector", "mask")``. A replay buffer gets
            the frames in one dimension, environment by environment.
        policy_factory: function without arguments that makes the policy; alternative to ``policy``.
            With workers, a module may be given as ``policy`` in addition, as the source of the
            weights.
        device: default for ``storing_device``, ``env_device`` and ``policy_device``.
        storing_device: device on which batches are delivered.
        env_device: device of the environment's TensorDicts.
        policy_device: device on which the policy runs. A policy on another device is copied to it.
        create_env_kwargs: keyword arguments for the function that makes the environment.
        seed: seed of the environments, the policy's random draws and random actions. The
            constructor passes it to ``set_seed``. None: nothing is seeded.
        max_frames_per_traj: number of steps after which an episode is truncated, besides the
            environment's own limit. None, 0 or a negative number: no limit.
        frame_stack: number of frames in a stack of an episode's last frames, or a
            :class:`~trawl.envs.FrameStack`. Batches store each frame once, and their observations
            are :class:`~trawl.data.StackedFrames`. None: observations are not stacked.
        init_random_frames: number of frames collected with random actions before the policy acts.
            None, 0 or a negative number: none.
        reset_kwargs: arguments for each reset of an environment, usually its options. They are a
            mapping such as ``{"options": {"level": 1}}``, or a function that returns one. The
            function is called with the index of the environment among all environments of the
            collector, and the number of its episode, counted from 0 since the start or the last
            ``set_seed``.
        reset_at_each_iter: True to reset the environment before each batch.
        reset_when_done: must be True, because when an episode ends, another one always begins.
        postproc: function called with each batch; its result is delivered instead.
        split_trajs: True to split each batch into trajectories, padded to the shape
            ``(trajectories, longest)``, with a mask.
        track_traj_ids: True to write trajectory ids to ``("collector", "traj_ids")``.
        trajs_per_batch: number of whole trajectories in a batch. Trajectories are delivered in the
            order in which they end. The collector collects ``frames_per_batch`` frames at a time,
            until there are enough whole trajectories. At the end, it drops all unfinished
            trajectories, and the last whole trajectories if they are too few for a batch. None:
            batches have ``frames_per_batch`` frames instead.
        traj_format: layout of batches of whole trajectories. With ``"padded"``, a batch has the
            shape ``(trajs_per_batch, longest)``. Shorter trajectories have zeros at the end, where
            ``("collector", "mask")`` is False. With ``"cat"``, trajectories follow one another in
            the shape ``(frames,)``. A replay buffer always gets ``"cat"``.
        replay_write_mode: what the replay buffer gets, ``"rollout"`` (batches) or ``"trajectory"``
            (whole trajectories). A batch has ``frames_per_batch`` frames. Whole trajectories are
            written concatenated along time, as soon as they end; unfinished trajectories wait.
            None: whole trajectories if ``trajs_per_batch`` is given, and else batches.
        traj_sampling: order in which whole trajectories are delivered. None: the order in which
            they end, so that the first batches have more short trajectories than the environments
            make in the long run. ``"per_env"``: the next trajectory of each environment in turn;
            trajectories of faster environments wait.
        trajs_per_write: maximum number of whole trajectories in one write to the replay buffer.
            None: no maximum.
        exploration_type: way in which probabilistic policies choose actions; a member of
            ``ExplorationType``, or its name.
        return_same_td: True to yield the same TensorDict object each time, with new content.
        compact_obs: True to leave the observations out of ``"next"``.
        interruptor: function, or object with a method ``collection_stopped()``, that ends a batch
            early if it returns True. It is called before each step of a batch except the first.
            Rows that were not filled have trajectory id -1.
        set_truncated: True to mark the last step of each batch as truncated.
        use_buffers: False to take new memory for each batch. True and None: the memory of a batch
            is used again when nothing refers to the batch any more.
        replay_buffer: any object with a method ``extend``, or ``add`` if ``extend_buffer=False``.
            Batches are written into the buffer, and iteration yields None for each batch.
        sink: object that writes batches to disk when they are delivered or put into the replay
            buffer. It is a :class:`~trawl.data.Sink`, or any object with ``write(batch)`` and
            ``close(complete=...)``. The collector closes the sink on shutdown.
        extend_buffer: True to write whole batches to the replay buffer; False to write single
            steps.
        samples_per_insert: number of samples that the learner draws with ``collector.sample`` for
            each frame that ``start()`` collects. Collection waits while it is ahead of the learner.
            None: collection never waits.
        inserts_ahead: number of frames that may be collected before the learner has drawn samples
            for them. None: ``init_random_frames`` plus the frames of two batches, or of two
            batches of each worker if each worker delivers its own batches.
        trust_policy: True to use the policy as a function of a TensorDict, without inspecting it.
        compile_policy: True to compile the policy, or a mapping of arguments for
            ``torch.compile``.
        cudagraph_policy: True to run the policy as a CUDA graph, or a mapping of arguments for
            ``CudaGraphModule``. The policy must be on a CUDA device.
        no_cuda_sync: has no effect, because each step has to wait for its action anyway.
        auto_register_policy_transforms: True to add the entry ``"is_init"``, which marks the frames
            that begin an episode. None: adds the entry only if the policy reads it.
        track_policy_version: True to write ``"policy_version"`` into each frame, or the
            :class:`~trawl.collectors.PolicyVersion` that counts the versions.
        weight_updater: a weight updater (deprecated), or a class or function that makes one.
        weight_sync_schemes: the schemes that send new weights, keyed by model (``"policy"``, or a
            path such as ``"env.transform[0]"``). Default: a scheme that suits the backend.
        weight_recv_schemes: the schemes through which this collector receives new weights, keyed by
            model.
        on_env_error: reaction to an exception from an environment: ``"raise"`` it, or
            ``"restart"`` the environment. This concerns exceptions from ``step``, and from resets
            at the end of an episode. ``"restart"`` rebuilds the environment from its id or
            function. The episode then ends as truncated, the row of the failed step is masked out
            in ``("collector", "mask")``, and ``stats()["env_restarts"]`` counts the restart.
        normalize_observations: True to normalise observations by their running mean and variance,
            or a :class:`~trawl.collectors.NormalizeObservation`. The policy and the batches have
            the normalised values.
        normalize_rewards: True to divide rewards by the running standard deviation of the
            discounted return, or a :class:`~trawl.collectors.NormalizeReward`. ``stats()`` has the
            returns of the environment.
        trace: file for a timeline of the whole run, such as ``run.json.gz`` for ui.perfetto.dev (an
            existing file is replaced), or a :class:`~trawl.observe.TraceOptions`. None: no
            timeline.
        worker_idx: index of the worker that this collector belongs to, for nested collectors.
        pre_collect_hook: function called without arguments before each batch is collected.
        post_collect_hook: function called with each batch when it is delivered.
    """

    frames_per_batch: int = field(
        # Type checkers take option() for a default.
        metadata={"option": Option(partial(check_frames, least=1), (WHOLE, EVALUATOR))}
    )
    total_frames: float = option(-1, _total, DRIVER, WHOLE, EVALUATOR)
    exact_frames: bool = option(False, None, DRIVER, WHOLE, WRITER)
    policy_factory: Callable[[], Any] | None = option(
        None, _policy_factory, EACH, LIST, TUNED, EVALUATOR
    )
    device: DeviceLike | None = option(None, None, EACH, LIST, TUNED)
    storing_device: DeviceLike | None = option(None, None, DRIVER, LIST, TUNED)
    env_device: DeviceLike | None = option(None, None, EACH, LIST, TUNED)
    policy_device: DeviceLike | None = option(None, None, EACH, LIST, TUNED)
    create_env_kwargs: EnvKwargs | None = option(None, check_env_kwargs, EACH, LIST, TUNED)
    seed: int | None = option(None, _seed, DRIVER, WHOLE, EVALUATOR)
    max_frames_per_traj: int | None = option(
        None,
        _count,
        EACH,
        TUNED,
        EVALUATOR,
        flag=Flag(("collect", "tune"), metavar="N", least=1),
        record=lambda count: count or None,
    )
    frame_stack: FrameStackLike | None = option(
        None,
        as_frame_stack,
        TUNED,
        flag=Flag(("collect", "tune", "evaluate"), int, "N"),
        record=lambda stack: stack and stack.size,
    )
    init_random_frames: int | None = option(None, _count, DRIVER, WRITER, EVALUATOR)
    reset_kwargs: ResetKwargs | None = option(None, check_reset_kwargs, EACH, TUNED)
    reset_at_each_iter: bool = option(False, None, EACH, TUNED, EVALUATOR)
    reset_when_done: bool = option(True, _reset_when_done)
    postproc: Callable[[Any], Any] | None = option(None, _postproc, DRIVER, WRITER, EVALUATOR)
    split_trajs: bool | None = option(None, lambda _, value: bool(value), DRIVER, WRITER, EVALUATOR)
    track_traj_ids: bool = option(True, None, TUNED, EVALUATOR)
    trajs_per_batch: int | None = option(None, at_least(1), DRIVER, WHOLE, EVALUATOR)
    traj_format: Literal["padded", "cat"] | None = option(None, None, DRIVER, WHOLE)
    replay_write_mode: Literal["rollout", "trajectory"] | None = option(
        None, None, DRIVER, EVALUATOR
    )
    traj_sampling: Literal["per_env"] | None = option(None, _sampling, DRIVER, WHOLE, EVALUATOR)
    trajs_per_write: int | None = option(None, at_least(1), DRIVER, EVALUATOR)
    exploration_type: ExplorationKind | None = option(
        InteractionType.RANDOM, _exploration, EACH, TUNED, EVALUATOR
    )
    return_same_td: bool = option(False, None, EVALUATOR)
    compact_obs: bool = option(False, None, TUNED, EVALUATOR)
    interruptor: SupportsStop | Callable[[], bool] | None = option(None, _interruptor, EVALUATOR)
    set_truncated: bool = option(False, None, EVALUATOR)
    use_buffers: bool | None = option(None)
    replay_buffer: Any = option(None, None, DRIVER, WRITER, EVALUATOR)
    sink: SupportsWrite | None = option(None, _sink, DRIVER, EVALUATOR)
    extend_buffer: bool = option(True, None, DRIVER, WRITER, EVALUATOR)
    samples_per_insert: float | None = option(None, _ratio, DRIVER, EVALUATOR)
    inserts_ahead: int | None = option(None, at_least(1), DRIVER, EVALUATOR)
    trust_policy: bool | None = option(None, None, EACH, TUNED)
    compile_policy: Switch | None = option(None, check_switch, EACH, TUNED)
    cudagraph_policy: Switch | None = option(None, check_switch, EACH, TUNED)
    no_cuda_sync: bool = option(False, None, EACH)
    auto_register_policy_transforms: bool | None = option(None, None, TUNED)
    track_policy_version: bool | SupportsVersion | None = option(False)
    weight_updater: Callable[..., Any] | None = option(None, None, DRIVER, WHOLE)
    weight_sync_schemes: Mapping[str, WeightSyncScheme] | None = option(
        None, _schemes, DRIVER, WHOLE
    )
    weight_recv_schemes: Mapping[str, WeightSyncScheme] | None = option(
        None, _schemes, DRIVER, WHOLE
    )
    on_env_error: Literal["raise", "restart"] = option(
        "raise", None, EACH, TUNED, flag=Flag(("collect", "tune"))
    )
    normalize_observations: bool | NormalizeObservation = option(
        False,
        switch_or(NormalizeObservation),
        WHOLE,
        TUNED,
        EVALUATOR,
        flag=Flag(("collect", "tune")),
        record=_true_if_given,
    )
    normalize_rewards: bool | NormalizeReward = option(
        False,
        switch_or(NormalizeReward),
        WHOLE,
        TUNED,
        EVALUATOR,
        flag=Flag(("collect", "tune")),
        record=_true_if_given,
    )
    trace: TraceLike | None = option(
        None, check_trace, DRIVER, WHOLE, flag=Flag(("collect",), str, "FILE")
    )
    worker_idx: int | None = option(None, at_least(0), EVALUATOR)
    pre_collect_hook: Callable[[], Any] | None = option(None, check_callable, EACH)
    post_collect_hook: Callable[[Any], Any] | None = option(None, check_callable, EACH)

    def __post_init__(self) -> None:
        validate(self)
        check({**vars(self), "storage_ndim": self.storage_ndim})
        if self.trajs_per_batch is not None and self.replay_buffer is None:
            self._set_traj_format()
        if self.split_trajs:
            warn(
                "split_trajs=True pads trajectories with zeros to the length of the longest in "
                "each batch; a learner that uses ('collector', 'traj_ids') instead needs no padding"
            )
        self._check_buffer()

    @property
    def whole_trajectories(self) -> bool:
        """True if whole trajectories are delivered, or written to the replay buffer."""
        return self.trajs_per_batch is not None or self.replay_write_mode == "trajectory"

    def _set_traj_format(self) -> None:
        """Sets the default format of whole trajectories."""
        if self.traj_format is None:
            warn(
                "trajs_per_batch without traj_format makes 'padded' batches, but TorchRL 0.16 "
                "will change this default to 'cat': pass traj_format='padded' or traj_format='cat'",
                FutureWarning,
            )
            object.__setattr__(self, "traj_format", "padded")

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

    @property
    def storage_ndim(self) -> int:
        """Number of dimensions of the replay buffer's storage; 1 if it is not known."""
        return int(getattr(storage_of(self.replay_buffer), "ndim", 1))

    def check_storage(self, what: str) -> None:
        """Checks that the replay buffer can hold frames that don't fill the rows of a batch.

        Args:
            what: what is written to the buffer.

        Raises:
            ValueError: if the buffer's storage has several dimensions.
        """
        if self.storage_ndim != 1:
            raise STORAGE_FRAMES.error(against=f"a storage of ndim={self.storage_ndim} and {what}")

    @property
    def adds_steps(self) -> bool:
        """True if each step is written to a replay buffer on its own."""
        return self.replay_buffer is not None and not self.extend_buffer

    @property
    def normalize(self) -> NormalizeOptions:
        """The options of normalisation, as one object."""
        observations, rewards = self.normalize_observations, self.normalize_rewards
        return NormalizeOptions(
            observations if isinstance(observations, NormalizeObservation) else None,
            rewards if isinstance(rewards, NormalizeReward) else None,
        )

    @property
    def endless(self) -> bool:
        """True if there is no limit on frames."""
        return self.total_frames == math.inf


_muted = False


@contextmanager
def muted() -> Iterator[None]:
    """Suppresses warnings from :func:`warn` within a ``with`` block.

    A worker uses this, because the driver has already warned about the same options.
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
